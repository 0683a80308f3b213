"""Perplexity and bits per byte: `--help` says how; `python -m pod.eval perplexity` is the same."""

import sys

from pod.evaluation.perplexity import main

if __name__ == "__main__":
    sys.exit(main())
