"""RULER, 13 synthetic tasks at any length: `--help` says how; `python -m pod.eval ruler` is the same."""

import sys

from pod.evaluation.ruler import main

if __name__ == "__main__":
    sys.exit(main())
