"""What the scripts in `eval/` share: loading, pass-key retrieval, perplexity, and how results are written down."""
