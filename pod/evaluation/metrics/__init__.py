"""The scores of benchmarks, as their authors' scripts compute them, oddities included.

    longbench("hotpotqa", predictions, answers)         # 0..100, rounded to two places
    leval("coursera", predictions, references)          # 0..100, four places
    infinitebench("passkey", prediction, label)         # 0..1, of a line
    needlebench("single", prediction, reference)        # 0..100, of a repeat

A published number can only be compared with one computed the same way, so what those scripts do by accident is done
here too, and each accident has a test. The packages that they need for ROUGE and edit distances are not needed here.

overlap.py           words in common, ROUGE of two packages
long_bench.py        LongBench
infinite_bench.py    InfiniteBench
l_eval.py            L-Eval
needles.py           RULER, NeedleBench
"""

from pod.evaluation.metrics.infinite_bench import infinitebench
from pod.evaluation.metrics.l_eval import leval
from pod.evaluation.metrics.long_bench import (
    LENGTH_BUCKETS,
    METRIC_OF,
    METRICS,
    NEEDS_SEGMENTATION,
    PARAGRAPH,
    classification,
    code_similarity,
    count,
    jieba_segment,
    longbench,
    longbench_e,
    longbench_samples,
    retrieval,
)
from pod.evaluation.metrics.needles import needlebench, ruler
from pod.evaluation.metrics.overlap import rouge_l, rouge_l_zh, rouge_score, token_f1, token_f1_zh

__all__ = [
    "LENGTH_BUCKETS",
    "METRICS",
    "METRIC_OF",
    "NEEDS_SEGMENTATION",
    "PARAGRAPH",
    "classification",
    "code_similarity",
    "count",
    "infinitebench",
    "jieba_segment",
    "leval",
    "longbench",
    "longbench_e",
    "longbench_samples",
    "needlebench",
    "retrieval",
    "rouge_l",
    "rouge_l_zh",
    "rouge_score",
    "ruler",
    "token_f1",
    "token_f1_zh",
]
