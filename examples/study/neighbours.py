"""Make the modules of the other examples importable: import this before them."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
sys.path += [str(folder) for folder in (EXAMPLES, EXAMPLES / "flip") if str(folder) not in sys.path]
