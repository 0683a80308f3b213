"""Figures of attention: `--help` says how; `python -m pod.eval figures` is the same."""

import sys

from pod.evaluation.figures import main

if __name__ == "__main__":
    sys.exit(main())
