"""The largest batch in a given memory: `--help` says how; `python -m pod.eval memory` is the same."""

import sys

from pod.evaluation.memory import main

if __name__ == "__main__":
    sys.exit(main())
