"""What the scripts in `eval/` share: loading, pass-key retrieval, perplexity, and how results are written down.

command.py             --eviction, lists of numbers
models.py              load what --ckpt names, and run it with what --eviction names
texts.py               held-out texts: files, stretches, prepared samples
passkey.py             prompts with a hidden key, and the digits' accuracy
perplexity.py          losses on held-out text, whole or streamed through the cache
memory.py              bytes of generating, by kind and measured; the largest batch
runner.py              generated text: batches, processes, files that a killed run goes on from
longbench.py, ruler.py, metrics.py    the benchmarks' prompts and scores
ruler_tasks.py         how RULER's 13 tasks are made at any size
haystack.py            what long prompts are filled up with
questions.py           SQuAD's and HotpotQA's files
report.py              JSON, tables, heat maps
"""
