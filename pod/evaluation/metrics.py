"""The metrics of LongBench v1 and RULER, as their authors' scripts compute them, oddities included.

    longbench("hotpotqa", predictions, answers)     # 0..100, rounded to two places

A published number can only be compared with one computed the same way, so what those scripts do by accident is done
here too, and each accident has a test. Two packages that they need are not needed here: ROUGE-L follows `rouge` 1.0.1
and the edit similarity is difflib's. Chinese sets are cut into words by jieba (`pip install 'pod-attention[eval]'`),
or by any function that is passed as `segment`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial

import numpy as np

from pod.extras import require

Segment = Callable[[str], Sequence[str]]

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

# The published rouge walks back through its table by recursion, and Python stops it at 1,000 frames. Its own frames
# and those of the scoring script leave this many steps (measured with Python 3.11 on frames nested as theirs are).
TRACEBACK_STEPS = 990

PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")  # the answers of retrieval sets
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The opening bracket U+300A is missing from the authors' list, its closing one is there.
_FULL_WIDTH = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
_CHINESE_PUNCTUATION = _FULL_WIDTH + "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


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
    scores = longbench_samples(dataset, predictions, answers, all_classes, segment)
    total = 0.0
    for score in scores:  # one by one as the authors do: newer Pythons' `sum` rounds differently
        total += score
    return round(100 * total / len(scores), 2)


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
    if name not in METRIC_OF:
        close = get_close_matches(name, METRIC_OF, n=1) or sorted(METRIC_OF)
        raise ValueError(f"{dataset!r} is no set of LongBench; did you mean {', '.join(close)}?")
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


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the two multisets of words: lower case, no ASCII punctuation, no articles (SQuAD's normalisation)."""
    return _overlap_f1(_words(prediction), _words(answer))


def token_f1_zh(prediction: str, answer: str, segment: Segment) -> float:
    """The same over `segment`'s words, each lower-cased and without punctuation; articles stay."""
    return _overlap_f1(_words_zh(prediction, segment), _words_zh(answer, segment))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _words_zh(text: str, segment: Segment) -> list[str]:
    cleaned = ("".join(word.lower().translate(_NO_CHINESE_PUNCTUATION).split()) for word in segment(text))
    return [word for word in cleaned if word]


def _overlap_f1(prediction: list[str], answer: list[str]) -> float:
    common = (Counter(prediction) & Counter(answer)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(answer)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L's F at summary level as `rouge` 1.0.1 has it.

    Sentences are what stands between full stops, words what stands between blanks. For each pair of sentences the
    words of one longest common subsequence are collected; the **distinct** words of all pairs together are divided by
    the number of distinct words of prediction and answer. Of several longest subsequences the one is taken that is
    found from the end, stepping back in the prediction unless stepping back in the answer keeps more.

    Returns:
        0..1; 0 where a text has no sentence, or where a pair of sentences takes more than `TRACEBACK_STEPS`.
    """
    predicted, wanted = _sentences(prediction), _sentences(answer)
    if not predicted or not wanted:
        return 0.0
    found: set[str] = set()
    for reference in wanted:
        for candidate in predicted:
            common = _common_words(reference, candidate)
            if common is None:
                return 0.0
            found |= common
    precision = len(found) / len(set().union(*predicted))
    recall = len(found) / len(set().union(*wanted))
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def rouge_l_zh(prediction: str, answer: str, segment: Segment) -> float:
    """`rouge_l` of the two texts with blanks between `segment`'s words."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(answer)))


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A sentence of blanks alone is one empty word, and that counts as a word."""
    return [part.split() or [""] for part in text.split(".") if part]


def _common_words(reference: list[str], candidate: list[str]) -> set[str] | None:
    """The words of the longest common subsequence that rouge finds; None where its recursion would overflow."""
    ids = {word: number for number, word in enumerate({*reference, *candidate})}
    columns = np.array([ids[word] for word in candidate])
    # lengths[i, j]: the longest common subsequence of the first i and the first j words. A row is a running maximum.
    lengths = np.zeros((len(reference) + 1, len(candidate) + 1), np.int32)
    for i, word in enumerate(reference):
        extended = lengths[i, :-1] + (columns == ids[word])
        np.maximum.accumulate(np.maximum(lengths[i, 1:], extended), out=lengths[i + 1, 1:])
    found: set[str] = set()
    i, j, steps = len(reference), len(candidate), 0
    while i and j:
        steps += 1
        if steps > TRACEBACK_STEPS:
            return None
        if reference[i - 1] == candidate[j - 1]:
            i, j = i - 1, j - 1
            found.add(reference[i])
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return found


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


def ruler(predictions: Sequence[str], answers: Sequence[Sequence[str]], match: str = "all") -> float:
    """RULER's score: the mean share of the wanted strings that stand in the prediction, whatever the case.

    Args:
        predictions: what the model wrote; control characters count as line ends.
        answers: the wanted strings of each sample.
        match: "all" (the share of the strings) or "any" (1 where one of them is there: the QA tasks).

    Returns:
        0..100, rounded to two places.

    Raises:
        ValueError: another `match`, nothing to score, no wanted string, lists of different length.
    """
    if match not in ("all", "any"):
        raise ValueError(f"match must be 'all' or 'any', got {match!r}")
    if len(predictions) != len(answers):
        raise ValueError(f"{len(predictions)} predictions but answers for {len(answers)} samples")
    if not predictions or not all(answers):
        raise ValueError("nothing to score: no predictions, or a sample without wanted strings")
    total = 0.0
    for prediction, wanted in zip(predictions, answers, strict=True):
        text = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
        hits = [answer.lower() in text for answer in wanted]
        total += any(hits) if match == "any" else sum(hits) / len(hits)
    return round(100 * total / len(predictions), 2)
