"""L-Eval: `--help` says how; `python -m pod.eval leval` is the same."""

import sys

from pod.evaluation.leval import main

if __name__ == "__main__":
    sys.exit(main())
