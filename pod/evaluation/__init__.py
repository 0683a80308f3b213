"""Evaluations by name, each `python -m pod.eval NAME` and `python eval/NAME.py`, and what they share.

registry.py            their names
benchmark.py           what a benchmark of generated text says of itself, and what is done with any
runner.py              its predictions: batches, processes, files that a killed run goes on from
longbench.py, leval.py, infinitebench.py, ruler.py, needle.py, needlebench.py    the benchmarks: prompts, scores, tables
lines.py               their files of one JSON object a line
metrics/               the scores, as the benchmarks' authors compute them
ruler_tasks.py         how RULER's 13 tasks are made at any size
haystack.py            what long prompts are filled up with
questions.py           SQuAD's and HotpotQA's files
passkey.py             prompts with a hidden key, and the digits' accuracy
perplexity.py          losses on held-out text, whole or streamed through the cache
pg19.py                the same of whole books, as Cascade's paper has it
harness.py             lm-evaluation-harness's model class, with a cache that evicts
trade_off.py           both against the bytes that a cache keeps, every eviction method
figures.py             the papers' figures of a model's attention, and of where an answer lies
memory.py              the largest batch in a given memory, by arithmetic and measured
runs.py, tables.py     the papers' tables of runs, published rows beside ours: `report`
command.py             what their command lines have in common
models.py              load what --ckpt names, and run it with what --eviction names
texts.py               held-out texts: files, stretches, prepared samples
intervals.py           how sure a comparison is: paired, by resampling
report.py              how results are written down: JSON, tables, heat maps
"""
