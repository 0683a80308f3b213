"""LongBench v1 and LongBench-E: `--help` says how; `python -m pod.eval longbench` is the same."""

import sys

from pod.evaluation.longbench import main

if __name__ == "__main__":
    sys.exit(main())
