"""Quality against kept bytes: `--help` says how; `python -m pod.eval trade_off` is the same."""

import sys

from pod.evaluation.trade_off import main

if __name__ == "__main__":
    sys.exit(main())
