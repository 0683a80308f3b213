"""LongBench's scores, as its authors' script computes them, oddities included.

The edit similarity is difflib's. Chinese sets are cut into words by jieba (`pip install 'pod-attention[eval]'`), or by
any function that is passed as `segment`.
"""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial

import numpy as np

from pod.evaluation.lines import check_name
from pod.evaluation.metrics.overlap import Segment, mean_of, rouge_l, rouge_l_zh, token_f1, token_f1_zh
from pod.extras import require

FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum", "lsht"})
METRICS = {
    "token_f1": ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    "token_f1_zh": ("multifieldqa_zh",),
    "rouge_l": ("gov_report", "qmsum", "multi_news", "samsum"),
    "rouge_l_zh": ("dureader", "vcsum"),
    "classification": ("trec", "lsht"),
    "retrieval": ("passage_retrieval_en", "passage_retrieval_zh"),
    "count": ("passage_count",),
    "code_similarity": ("lcc", "repobench-p"),
}
METRIC_OF = {dataset: metric for metric, datasets in METRICS.items() for dataset in datasets}
NEEDS_SEGMENTATION = frozenset(METRICS["token_f1_zh"] + METRICS["rouge_l_zh"])
LENGTH_BUCKETS = ("0-4k", "4-8k", "8k+")

PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")  # the answers of retrieval sets


def longbench(
    dataset: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None = None,
    segment: Segment | None = None,
) -> float:
    """The score of one set of LongBench: the mean over samples of the best over each sample's answers.

    Args:
        dataset: one of the 21 names, or its LongBench-E form (`qasper_e`).
        predictions: what the model wrote, one per sample, special tokens skipped.
        answers: the accepted answers of each sample.
        all_classes: the class names; needed by trec and lsht, ignored by the others.
        segment: text -> words, for Chinese; jieba's default cut when None.

    Returns:
        0..100, rounded to two places.

    Raises:
        ValueError: unknown set, nothing to score, lists of different length, classes missing.
        ImportError: a Chinese set, no `segment` and no jieba.
    """
    return round(mean_of(longbench_samples(dataset, predictions, answers, all_classes, segment)), 2)


def longbench_e(
    dataset: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    lengths: Sequence[int],
    all_classes: Sequence[str] | None = None,
    segment: Segment | None = None,
) -> dict[str, float | None]:
    """The scores of one set of LongBench-E by the samples' length in words, as the data gives it.

    Returns:
        {"0-4k", "4-8k", "8k+"} -> 0..100, or None where no sample has such a length.

    Raises:
        ValueError, ImportError: as `longbench`.
    """
    if len(lengths) != len(predictions):
        raise ValueError(f"{dataset}: {len(predictions)} predictions but {len(lengths)} lengths")
    buckets: dict[str, list[float]] = {name: [] for name in LENGTH_BUCKETS}
    samples = longbench_samples(dataset, predictions, answers, all_classes, segment)
    for score, length in zip(samples, lengths, strict=True):
        buckets["0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"].append(score)
    return {name: round(100 * float(np.mean(scores)), 2) if scores else None for name, scores in buckets.items()}


def longbench_samples(
    dataset: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None = None,
    segment: Segment | None = None,
) -> list[float]:
    """The scores 0..1 of every sample; arguments and errors as `longbench`."""
    name = dataset.removesuffix("_e")
    check_name(f"{dataset!r} is no set of LongBench", name, sorted(METRIC_OF))
    if len(predictions) != len(answers):
        raise ValueError(f"{dataset}: {len(predictions)} predictions but answers for {len(answers)} samples")
    if not predictions:
        raise ValueError(f"{dataset}: no predictions, so there is nothing to score")
    metric = METRIC_OF[name]
    if metric == "classification" and not all_classes:
        raise ValueError(f"{dataset} is scored by class names: all_classes is empty")
    if name in NEEDS_SEGMENTATION and segment is None:
        segment = jieba_segment()
    compare: Callable[[str, str], float] = {
        "token_f1": token_f1,
        "token_f1_zh": partial(token_f1_zh, segment=segment),
        "rouge_l": rouge_l,
        "rouge_l_zh": partial(rouge_l_zh, segment=segment),
        "classification": partial(classification, all_classes=all_classes),
        "retrieval": retrieval,
        "count": count,
        "code_similarity": code_similarity,
    }[metric]
    scores = []
    for prediction, accepted in zip(predictions, answers, strict=True):
        if name in FIRST_LINE_ONLY:
            prediction = prediction.lstrip("\n").split("\n")[0]
        scores.append(max([0.0, *(compare(prediction, answer) for answer in accepted)]))
    return scores


def jieba_segment() -> Segment:
    """jieba's default cut, text -> words.

    Raises:
        ImportError: jieba is not installed.
    """
    require("eval", "jieba", what="scoring Chinese sets (multifieldqa_zh, dureader, vcsum), whose words it cuts,")
    import jieba

    return lambda text: list(jieba.cut(text, cut_all=False))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1/n where the answer is among the n classes named in the prediction.

    A class that is a proper part of the answer does not count, but the authors' script removes it from the list it is
    walking over, and so skips the name after it: of two such neighbours the second stays.
    """
    named = [name for name in all_classes if name in prediction]
    position = 0
    while position < len(named):
        if named[position] in answer and named[position] != answer:
            # `list.remove` takes the first equal name, which is another one where a class is listed twice.
            named.remove(named[position])
        position += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that equal the answer's; the answer reads `Paragraph 7` or `段落7`.

    Raises:
        ValueError: the answer names no paragraph.
    """
    wanted = PARAGRAPH.search(answer)
    if wanted is None:
        raise ValueError(f"the answer of a retrieval set must read 'Paragraph 7' or '段落7', got {answer!r}")
    return count(prediction, wanted[1])


def count(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that equal the answer, digit for digit; 0 without any."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(answer)) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Edit similarity of the prediction's first line of code and the answer, in whole hundredths.

    The first line of code is the first, after leading newlines, without a backtick, `#` or `//`; a line of blanks is
    one. The similarity is difflib's ratio with its heuristic for frequent characters in long texts.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not ("`" in line or "#" in line or "//" in line)), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100
