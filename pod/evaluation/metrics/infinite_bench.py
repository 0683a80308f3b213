"""InfiniteBench's scores of a line, as `src/compute_scores.py` of its authors computes them (commit 88b3daa)."""

import re
from collections.abc import Sequence

from pod.evaluation.lines import check_name
from pod.evaluation.metrics.overlap import rouge_score, token_f1

_PREFIXES = ("answer is:", "answer:", "answer is", "option is")
_TO_BLANKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))


def infinitebench(task: str, prediction: str, label: str | Sequence[str]) -> float:
    """The score of one line.

    Args:
        task: passkey, number_string, longbook_qa_eng, longbook_choice_eng or longbook_sum_eng.
        prediction: what the model wrote, special tokens skipped.
        label: the answer, or the accepted ones: the best counts, of digits the first one is meant. Of a choice, the
            right option's text and its letter.

    Returns:
        0..1.

    Raises:
        ValueError: an unknown task, no answer.
    """
    check_name(f"{task!r} is no task of InfiniteBench", task, _SCORES)
    labels = [label] if isinstance(label, str) else list(label)
    if not labels:
        raise ValueError(f"{task}: a line without an answer")
    return float(_SCORES[task](prediction, labels))


def _digits(prediction: str, labels: list[str]) -> bool:
    """The first run of the digits 0-9 is the answer."""
    found = re.search("[0-9]+", prediction)
    return labels[0] == (found[0] if found else "")


def _choice(prediction: str, label: list[str]) -> bool:
    """A first letter A-D decides alone (`Answer: B` is A); else a label, what follows a phrase, or a first word."""
    text = prediction.strip()
    if not text:
        return False
    if text[0] in "ABCD":
        return text[0] in label
    if text in label:
        return True
    text = re.sub("  +", " ", text.translate(_TO_BLANKS))
    for prefix in _PREFIXES:
        _, found, rest = text.partition(prefix)
        if found:
            # One character stands between phrase and answer, whatever it is. Nothing after that is no answer.
            return len(rest) > 0 and any(rest[1:].startswith(one) for one in label)
    return next((word in label for word in text.split() if word in "ABCD"), False)


_SCORES = {
    "passkey": _digits,
    "number_string": _digits,
    "longbook_qa_eng": lambda prediction, labels: max(token_f1(prediction, one) for one in labels),
    "longbook_choice_eng": _choice,
    "longbook_sum_eng": lambda prediction, labels: max(rouge_score(prediction, one, "rougeLsum") for one in labels),
}
