"""`python -m betahook`: the command, for when its script is not on the path."""

import sys

from betahook.cli import main

if __name__ == "__main__":
    sys.exit(main())
