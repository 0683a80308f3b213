"""How much of two texts is the same: words in common (F1) and the two packages' forms of ROUGE.

LongBench's ROUGE-L is that of the package `rouge` 1.0.1, L-Eval's and InfiniteBench's are those of `rouge_score`; both
are followed here, as the packages differ in how words, sentences and ties are taken.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

Segment = Callable[[str], Sequence[str]]

# The published rouge walks back through its table by recursion, and Python stops it at 1,000 frames. Its own frames
# and those of the scoring script leave this many steps (measured with Python 3.11 on frames nested as theirs are).
TRACEBACK_STEPS = 990

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The opening bracket U+300A is missing from the authors' list, its closing one is there.
_FULL_WIDTH = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
_CHINESE_PUNCTUATION = _FULL_WIDTH + "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def mean_of(scores: Sequence[float], factor: float = 100.0) -> float:
    """0..100, added up one by one as the authors do: newer Pythons' `sum` rounds differently."""
    total = 0.0
    for score in scores:
        total += score
    return factor * total / len(scores)


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
            common = _common_places(reference, candidate)
            if common is None:
                return 0.0
            found |= {reference[place] for place, _ in common}
    precision = len(found) / len(set().union(*predicted))
    recall = len(found) / len(set().union(*wanted))
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def rouge_l_zh(prediction: str, answer: str, segment: Segment) -> float:
    """`rouge_l` of the two texts with blanks between `segment`'s words."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(answer)))


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A sentence of blanks alone is one empty word, and that counts as a word."""
    return [part.split() or [""] for part in text.split(".") if part]


def _subsequence_lengths(reference: list[str], candidate: list[str]) -> np.ndarray:
    """[i, j]: the length of the longest common subsequence of the first i and the first j words."""
    ids = {word: number for number, word in enumerate({*reference, *candidate})}
    columns = np.array([ids[word] for word in candidate])
    lengths = np.zeros((len(reference) + 1, len(candidate) + 1), np.int32)
    for i, word in enumerate(reference):  # a row is a running maximum
        extended = lengths[i, :-1] + (columns == ids[word])
        np.maximum.accumulate(np.maximum(lengths[i, 1:], extended), out=lengths[i + 1, 1:])
    return lengths


def _common_places(
    one: list[str], other: list[str], most_steps: float = TRACEBACK_STEPS
) -> list[tuple[int, int]] | None:
    """The places (in one, in the other) of the words of a longest common subsequence; None after too many steps.

    Of several it is the one that is found from the end, stepping back in the other unless stepping back in the one
    keeps more.
    """
    lengths = _subsequence_lengths(one, other)
    found: list[tuple[int, int]] = []
    i, j, steps = len(one), len(other), 0
    while i and j:
        steps += 1
        if steps > most_steps:
            return None
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.append((i, j))
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def rouge_score(prediction: str, answer: str, kind: str) -> float:
    """ROUGE's F as the package `rouge_score` has it, without a stemmer: words are runs of a-z and 0-9 in lower case.

    Args:
        prediction: a text.
        answer: the reference.
        kind: "rouge1" and "rouge2" (words, pairs of words), "rougeL" (longest common subsequence of the whole texts),
            "rougeLsum" (see `_hits_by_lines`).

    Returns:
        0..1; 0 where a text has no word, or no pair of words.

    Raises:
        ValueError: another kind.
    """
    if kind == "rougeLsum":
        predicted, wanted = ([_plain_words(line) for line in text.split("\n")] for text in (prediction, answer))
        hits = _hits_by_lines(predicted, wanted)
        of_predicted, of_wanted = (sum(map(len, lines)) for lines in (predicted, wanted))
    elif kind == "rougeL":
        predicted, wanted = _plain_words(prediction), _plain_words(answer)
        hits = int(_subsequence_lengths(wanted, predicted)[-1, -1])
        of_predicted, of_wanted = len(predicted), len(wanted)
    elif kind in ("rouge1", "rouge2"):
        size = int(kind[-1])
        words = _plain_words(prediction), _plain_words(answer)
        one, other = (Counter(zip(*(text[start:] for start in range(size)), strict=False)) for text in words)
        hits, of_predicted, of_wanted = (one & other).total(), one.total(), other.total()
    else:
        raise ValueError(f"{kind!r} is no kind of ROUGE: rouge1, rouge2, rougeL, rougeLsum")
    if not hits:
        return 0.0
    precision, recall = hits / of_predicted, hits / of_wanted
    return 2 * precision * recall / (precision + recall)


def _plain_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _hits_by_lines(predicted: list[list[str]], wanted: list[list[str]]) -> int:
    """How many words of the reference's lines are found: ROUGE-L at summary level.

    Of each line, those at the positions that its longest common subsequences with all predicted lines have together;
    each uses up one of its word on both sides. Of several longest subsequences the one is taken that is found from the
    end, stepping back in the reference unless stepping back in the prediction keeps more.
    """
    left = [Counter(word for line in lines for word in line) for lines in (predicted, wanted)]
    hits = 0
    for reference in wanted:
        positions: set[int] = set()
        for candidate in predicted:
            positions |= {place for _, place in _common_places(candidate, reference, math.inf)}
        for position in sorted(positions):
            word = reference[position]
            if all(counts[word] > 0 for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return hits
