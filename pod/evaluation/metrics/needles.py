"""The scores of needle benchmarks: which wanted strings stand in an answer (RULER, NeedleBench v1)."""

import re
from collections.abc import Sequence

import numpy as np


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
    return round(total / len(predictions) * 100, 2)  # in the authors' order: the last place may depend on it


def needlebench(kind: str, prediction: str, reference: str | Sequence[str]) -> float:
    """NeedleBench v1's score of one repeat, as OpenCompass computed it in 2024.

    Args:
        kind: "single" (the keyword stands in the prediction, else a fifth of the likeness to the needle, both without
            blanks), "multi_retrieval" (the share of the keywords that stand there, case and all) or "multi_reasoning"
            (the share of the answer's words that stand there, whatever the case).
        prediction: what the model wrote.
        reference: (needle, keyword), [keywords] or the answer.

    Returns:
        0..100.

    Raises:
        ValueError: another kind, a reference of another form.
    """
    if kind not in ("single", "multi_retrieval", "multi_reasoning"):
        raise ValueError(f"{kind!r} is no kind of NeedleBench: single, multi_retrieval, multi_reasoning")
    if isinstance(reference, str) != (kind == "multi_reasoning") or (kind == "single" and len(reference) != 2):
        form = {"single": "(needle, keyword)", "multi_retrieval": "[keyword, ...]", "multi_reasoning": "the answer"}
        raise ValueError(f"the reference of {kind} is {form[kind]}, got {str(reference)[:60]!r}")
    if kind == "single":
        needle, keyword = reference
        return (
            100.0 if keyword in prediction else 0.2 * likeness(*(re.sub(r"\s+", "", t) for t in (prediction, needle)))
        )
    if kind == "multi_retrieval":
        return sum(100.0 for keyword in reference if keyword in prediction) / len(reference) if reference else 0.0
    words, prediction = reference.lower().split(), prediction.lower()
    # As the authors multiply: the last digit of a third depends on it.
    return sum(word in prediction for word in words) * (100 / len(words)) if words else 0.0


def likeness(one: str, other: str) -> float:
    """100 (1 - Levenshtein distance / length of the longer text); 100 of two empty ones."""
    longest = max(len(one), len(other))
    if not longest:
        return 100.0
    one, other = sorted((one, other), key=len)  # the loop goes over the shorter
    letters, places = np.array([ord(letter) for letter in other]), np.arange(len(other) + 1)
    distances = places
    for count, letter in enumerate(one, start=1):
        changed = np.minimum(distances[1:] + 1, distances[:-1] + (letters != ord(letter)))
        # A place may also be reached from the one before it, at a cost of 1: a running minimum of what is left of it.
        distances = np.minimum.accumulate(np.concatenate([[count], changed]) - places) + places
    return 100 * (1 - int(distances[-1]) / longest)
