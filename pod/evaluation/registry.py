"""What can be evaluated, by name: each is the `main` of a module of `pod.evaluation`, the command of that name.

A new benchmark is a file with a `benchmark.Benchmark` and a line here: `python -m pod.eval NAME` runs it.
"""

from collections.abc import Callable
from importlib import import_module

# name -> (module of pod.evaluation, what it is in a line)
EVALUATIONS = {
    # Benchmarks of generated text; `benchmark.run` runs them.
    "longbench": ("longbench", "LongBench v1 and LongBench-E"),
    "ruler": ("ruler", "RULER: 13 synthetic tasks at any length"),
    "needle": ("needle", "a needle in a haystack, by length and depth"),
    "infinitebench": ("infinitebench", "InfiniteBench: books and hidden numbers at 32K to 128K"),
    "leval": ("leval", "L-Eval: exams, questions and summaries of long documents"),
    "needlebench": ("needlebench", "NeedleBench v1: one needle, several, and what follows from them"),
    # Measurements.
    "pg19": ("pg19", "perplexity of whole books, strided and streamed"),
    "passkey": ("passkey", "pass-key retrieval, by length and depth"),
    "perplexity": ("perplexity", "perplexity and bits per byte on held-out text, whole or streamed"),
    "trade_off": ("trade_off", "quality against kept bytes, every eviction method"),
    "memory": ("memory", "the largest batch in a given memory"),
    "figures": ("figures", "attention maps, what proximal tokens foretell, four places of an answer"),
    "report": ("runs", "the papers' tables, published rows beside ours"),
}


def command_of(name: str) -> Callable[[list[str]], int]:
    """The command of an evaluation, which takes arguments and returns an exit status; only its module is imported."""
    return import_module(f"pod.evaluation.{EVALUATIONS[name][0]}").main
