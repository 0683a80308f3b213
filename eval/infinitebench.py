"""InfiniteBench: `--help` says how; `python -m pod.eval infinitebench` is the same."""

import sys

from pod.evaluation.infinitebench import main

if __name__ == "__main__":
    sys.exit(main())
