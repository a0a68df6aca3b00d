"""``python -m remat``: the same as the command ``remat``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
