"""`python -m flashtile` is the command `flashtile`."""

import sys

from flashtile.cli import main

if __name__ == "__main__":
    sys.exit(main())
