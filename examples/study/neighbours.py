"""Import this before modules of the other examples: each runs from its own folder, and the study uses them all."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
sys.path += [str(folder) for folder in (EXAMPLES, EXAMPLES / "flip") if str(folder) not in sys.path]
