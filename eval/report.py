"""One table of LongBench runs: `--help` says how; `python -m pod.eval report` is the same."""

import sys

from pod.evaluation.runs import main

if __name__ == "__main__":
    sys.exit(main())
