"""Time flashtile's forward and backward pass: `python minimal_benchmark.py --batch 4 --seqlen 2048 --causal`.

All flags are those of `flashtile run`; see `python minimal_benchmark.py --help`.
"""

import sys

from flashtile.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
