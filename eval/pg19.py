"""PG19's protocol: perplexity of whole books: `--help` says how; `python -m pod.eval pg19` is the same."""

import sys

from pod.evaluation.pg19 import main

if __name__ == "__main__":
    sys.exit(main())
