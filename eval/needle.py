"""A needle in a haystack: `--help` says how; `python -m pod.eval needle` is the same."""

import sys

from pod.evaluation.needle import main

if __name__ == "__main__":
    sys.exit(main())
