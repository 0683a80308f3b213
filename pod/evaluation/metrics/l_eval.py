"""L-Eval's scores of a set, as `Evaluation/` of its authors computes them (commit cd34b05)."""

import re
import string
from collections.abc import Sequence

from pod.evaluation.lines import check_name
from pod.evaluation.metrics.overlap import mean_of, rouge_score, token_f1

CHOICES = ("coursera", "quality", "tpo")
GROUPS = {
    "Closed": (*CHOICES, "gsm100", "codeU", "sci_fi", "topic_retrieval_longchat"),
    "QA": (
        "financial_qa", "legal_contract_qa", "multidoc_qa", "narrative_qa", "natural_question", "scientific_qa"
    ),
    "Summ": (
        "gov_report_summ", "meeting_summ", "news_summ", "paper_assistant", "patent_summ", "review_summ", "tv_show_summ"
    ),
}  # fmt: skip
SETS = tuple(name for names in GROUPS.values() for name in names)
ROUGES = ("geometric_mean", "rouge1", "rouge2", "rougeL")

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What is taken out of a prediction about code, in this order: "would bise" loses "is" first, and then "would be".
_FILLINGS = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def leval(task: str, predictions: Sequence[str], references: Sequence[str], rouge: str = "geometric_mean") -> float:
    """The score of one set: exact match, F1 or ROUGE, as the set is.

    Args:
        task: the set's name, of `SETS`.
        predictions: what the model wrote, one for each pair of question and answer, in the file's order; of sci_fi
            "answer with the document [fact: answer without it]".
        references: the raw outputs; of sci_fi "answer [fact: answer]".
        rouge: of a set of summaries, `rouge1`, `rouge2`, `rougeL` or the geometric mean of the three.

    Returns:
        0..100, four places.

    Raises:
        ValueError: an unknown set or kind of ROUGE, nothing to score, lists of different length, a reference without
            a word (choices) or without `[fact:` (sci_fi).
    """
    check_name(f"{task!r} is no set of L-Eval", task, SETS)
    if rouge not in ROUGES:
        raise ValueError(f"rouge is {rouge!r}: one of {', '.join(ROUGES)}")
    if len(predictions) != len(references):
        raise ValueError(f"{task}: {len(predictions)} predictions but {len(references)} references")
    if not predictions:
        raise ValueError(f"{task}: no predictions, so there is nothing to score")
    pairs = list(zip(predictions, references, strict=True))
    if task in GROUPS["Summ"]:
        kinds = ROUGES[1:] if rouge == "geometric_mean" else [rouge]
        # Of summaries the authors take the mean of what is per cent already, and the last place may depend on it.
        means = [mean_of([100 * rouge_score(*pair, kind) for pair in pairs], 1.0) for kind in kinds]
        return round(means[0] if len(means) == 1 else (means[0] * means[1] * means[2]) ** (1 / 3), 4)
    if task in GROUPS["QA"]:
        return round(mean_of([token_f1(*pair) for pair in pairs]), 4)
    # The authors round each part of a set before they take the mean of the parts.
    parts = [round(mean_of([exact_match(*pair) for pair in part]), 4) for part in _parts(task, pairs) if part]
    return round(sum(parts) / len(parts), 4)


def _parts(task: str, pairs: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """(prediction, reference) as they are compared, by the parts of a set that count alike."""
    if task == "topic_retrieval_longchat":  # the first, second and third topic of a record are asked for in turns
        return [pairs[position::3] for position in range(3)]
    if task == "sci_fi":
        references = [_judged(reference) for _, reference in pairs]
        answers = [_judged(prediction) for prediction, _ in pairs]
        return [
            [(_verdict(answer[part]), reference[part]) for answer, reference in zip(answers, references, strict=True)]
            for part in range(2)
        ]
    if task == "gsm100":
        return [[(last_number(prediction), last_number(reference)) for prediction, reference in pairs]]
    if task == "codeU":
        return [[(output_of_code(prediction, reference), _tidied(reference)) for prediction, reference in pairs]]
    letters = [(chosen_letters(task, prediction), right_letters(reference)) for prediction, reference in pairs]
    return [letters]


def exact_match(prediction: str, reference: str) -> float:
    """Two numbers are equal, a text is contained, or letters of options are the right ones.

    A reference that has only A-D left, or nothing, when punctuation and lower-case articles are gone is compared as
    options: equal strings are 1, some of the right letters a quarter. Else two numbers must be equal, and texts are
    contained without blanks, whatever the case.
    """
    wanted = _stripped(reference)
    if set(wanted) <= set("ABCD"):
        chosen = _stripped(prediction)
        return 1.0 if chosen == wanted else 0.25 if set(chosen) <= set(wanted) else 0.0
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        one, other = (text.lower().replace(" ", "") for text in (reference, prediction))
        return float(one in other)


def _stripped(text: str) -> str:
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.translate(_NO_PUNCTUATION)).split())


def chosen_letters(task: str, prediction: str) -> str:
    """The options A-D that a prediction names; coursera's may be several."""
    if not prediction.strip():
        return "None"
    if prediction in "ABCD":
        return prediction
    if task != "coursera" and (found := re.search("[A-D]", prediction)):
        return found[0]
    first = re.match("[A-D]*", prediction)[0]
    if len(first) > 1:
        return "".join(sorted(set(first)))
    rest = prediction[len(first) :].split("Question")[0]
    letters = first + "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))
    named = "".join(sorted(set(letters) & set("ABCD")))
    return named or (found[0] if (found := re.search("[A-D]+", rest)) else "A")


def right_letters(reference: str) -> str:
    """The letters A-D of a reference's first word; A where it has none."""
    if not reference.strip():
        raise ValueError("a reference is empty: the right option's letter is missing")
    return re.sub("[^A-D]", "", reference.split()[0]) or "A"


def last_number(text: str) -> str:
    """The digits up to a full stop of what follows `The answer is`, or of the first paragraph's last word with one."""
    found = re.search(r"The answer is (\S+)", text)
    if found:
        word = found[1]
    else:
        words = text.split("\n\n")[0].split(" ")  # at blanks only: a word may hold line ends
        word = next((word for word in reversed(words) if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.split(".")[0]))


def output_of_code(prediction: str, reference: str) -> str:
    """As many words as the raw reference has and three more: after `the final output`, or the last ones."""
    text = _tidied(prediction)
    for filling in _FILLINGS:
        text = text.replace(filling, "")
    size = len(reference.split()) + 3
    _, found, after = text.rpartition("the final output")
    words = re.split(r"\s+", after)  # empty ones at the ends count
    return " ".join(words[:size] if found else words[-size:])


def _tidied(code: str) -> str:
    code = re.sub(r"\s+", " ", code)
    for old in (",", "'", "\\", ".0"):
        code = code.replace(old, "")
    return code.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def _judged(text: str) -> tuple[str, str]:
    """(with the document, without it), lower case; the last character, a closing bracket, goes."""
    parts = text.lower().split("[fact:")
    if len(parts) < 2:
        raise ValueError(f"sci_fi: 'answer [fact: answer]' is expected, got {text[:60]!r}")
    return parts[0].strip(), parts[1][:-1].strip()


def _verdict(text: str) -> str:
    """What the first word says that has true or false in it."""
    words = ("true" if "true" in word else "false" for word in text.split() if "true" in word or "false" in word)
    return next(words, "<error>")
