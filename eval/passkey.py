"""Pass-key retrieval: `--help` says how; `python -m pod.eval passkey` is the same."""

import sys

from pod.evaluation.passkey import main

if __name__ == "__main__":
    sys.exit(main())
