"""The demo's corpus, written: `pod/data/demo_corpus.py` says what it is, `--help` how."""

import sys

from pod.data.demo_corpus import main

if __name__ == "__main__":
    sys.exit(main())
