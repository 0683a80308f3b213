"""NeedleBench v1: `--help` says how; `python -m pod.eval needlebench` is the same."""

import sys

from pod.evaluation.needlebench import main

if __name__ == "__main__":
    sys.exit(main())
