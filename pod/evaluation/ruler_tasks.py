"""RULER's 13 tasks (Hsieh et al. 2024): how a prompt of each is made at any size.

The wording of the prompts is the benchmark's (Apache-2.0), byte for byte as of `REVISION`;
the words and texts are drawn here, so single samples differ from the authors'.
"""

import math
import random
import string
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pod.evaluation.haystack import NOISE, Haystack, insert, noise, word_lists
from pod.evaluation.passkey import DIGITS, PHRASES
from pod.evaluation.questions import Questions

REVISION = "c3f5e3b"  # of NVIDIA/RULER; variable tracking is spelt right since 4a216f4
ADJECTIVES, NOUNS, VERBS = word_lists()
_NIAH = (
    "{some} special magic {kind} {be} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\n"
    "What {be_all} the special magic {kind} for {query} mentioned in the provided text?"
)
_NIAH_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {be}"
_NEEDLE = "One of the special magic {kinds} for {key} is: {value}."
_TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_TRACKING_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are: "
)
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
_HOPS = 4  # of a chain of variables


@dataclass(frozen=True)
class Setting:
    """What the making of one sample is given.

    Attributes:
        index: the sample's number.
        length: tokens of prompt and answer together.
        room: tokens of the prompt.
        count: text -> tokens.
        source: the text or the questions that the task needs.
        phrase: how needles are worded, see `ruler.make_requests`.
    """

    index: int
    length: int
    room: int
    count: Callable[[str], int]
    source: Haystack | Questions | None = None
    phrase: str | None = None


class Made(NamedTuple):
    """What a maker turns (random numbers, size, setting) into.

    What is asked for does not depend on the size, only how much stands around it does; a larger size never gives a
    shorter prompt, or hardly.

    Attributes:
        context: the prompt up to the question; a solved example is in it.
        question: the rest of the prompt; nothing in a phrase, whose answer begins with what is asked.
        prefix: how the answer begins.
        answers: the wanted strings.
    """

    context: str
    question: str
    prefix: str
    answers: list[str]


def _filled(template: str, context: str, **words: str) -> tuple[str, str]:
    """A template filled in: up to where the context ends, and what asks about it."""
    before, after = template.split("{context}")
    return before.format(**words) + context, after.format(**words)


@dataclass(frozen=True)
class Task:
    """One of the 13 tasks.

    Attributes:
        make: see `Made`.
        max_new_tokens: room for the answer.
        match: how it is scored, see `metrics.ruler`.
        needs: "haystack", "squad" or "hotpotqa" where it needs that.
        has_phrases: it asks for the value of one needle, and can be worded in another phrase.
        is_answered: whether what was made has one right answer; some have only from a certain length on.
    """

    make: Callable[[random.Random, int, Setting], Made]
    max_new_tokens: int
    match: str = "all"
    needs: str | None = None
    has_phrases: bool = False
    is_answered: Callable[[Made], bool] = lambda made: True


def _niah(
    hay: str, keys: int = 1, values: int = 1, queries: int = 1, key_kind: str = "words", value_kind: str = "numbers"
) -> Task:
    """A needle task: `keys` needles' keys of which `queries` are asked for, with `values` values each.

    hay: "noise" (five sentences again and again), "essay" (the haystack) or "needle" (further needles).
    """

    def make(draw: random.Random, size: int, setting: Setting) -> Made:
        chosen: list[str] = []
        while len(chosen) < keys:
            key = _random(draw, key_kind, setting.phrase)
            if key not in chosen:
                chosen.append(key)
        hidden = {key: [_random(draw, value_kind, setting.phrase) for _ in range(values)] for key in chosen}
        needles = [_needle(value_kind, key, value, setting.phrase) for key in chosen for value in hidden[key]]
        draw.shuffle(needles)
        asked = draw.sample(chosen, queries)
        if hay == "essay":
            # A phrase's needle is a line of its own, after any word: not every text has sentences.
            plain = setting.phrase is None
            lines = needles if plain else [f"\n{needle}\n" for needle in needles]
            context = setting.source.hide(draw, size, lines, after_sentences=plain)
        else:
            lines = noise(size)
            if hay == "needle":
                lines = _other_needles(draw, size, setting, key_kind, value_kind, chosen)
            context = "\n".join(insert(draw, lines, needles))
        if setting.phrase is not None:
            (key,) = asked
            return Made(context + "\n", "", PHRASES[setting.phrase][1].format(name=key), hidden[key])
        many = queries * values > 1
        words = {
            "kind": value_kind if many else value_kind[:-1],
            "query": asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
            "some": "Some" if many else "A",
            "be": "are" if many else "is",
            "be_all": "are all" if many else "is",
        }
        wanted = [value for key in asked for value in hidden[key]]
        return Made(*_filled(_NIAH, context, **words), _NIAH_PREFIX.format(**words), wanted)

    return Task(make, 128, needs="haystack" if hay == "essay" else None, has_phrases=queries * values == 1)


def _random(draw: random.Random, kind: str, phrase: str | None) -> str:
    """A key or a value. In a phrase they are those of its pass keys, two letters and five digits; uuids stay uuids."""
    if kind == "numbers":
        digits = 7 if phrase is None else DIGITS
        return str(draw.randint(10 ** (digits - 1), 10**digits - 1))
    if kind == "words" and phrase is not None:
        return "".join(draw.choices(string.ascii_lowercase, k=2))
    if kind == "words":
        return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _needle(kinds: str, key: str, value: str, phrase: str | None) -> str:
    if phrase is None:
        return _NEEDLE.format(kinds=kinds, key=key, value=value)
    return PHRASES[phrase][0].format(name=key, value=value).removesuffix("\n")


def _other_needles(
    draw: random.Random, size: int, setting: Setting, key_kind: str, value_kind: str, taken: list[str]
) -> list[str]:
    """Lines that look like the needles, with other keys; what is left of `size` words becomes noise."""

    def line() -> str:
        key = _random(draw, key_kind, setting.phrase)
        while key in taken:
            key = _random(draw, key_kind, setting.phrase)
        return _needle(value_kind, key, _random(draw, value_kind, setting.phrase), setting.phrase)

    # How many words of noise are as long as a line, in tokens: so size grows evenly.
    weight = max(1, round(setting.count(line()) * 10 * len(NOISE) / setting.count(" ".join(NOISE * 10))))
    return [line() for _ in range(size // weight)] + noise(size % weight)


def _variable_tracking(draw: random.Random, size: int, setting: Setting) -> Made:
    """One chain X1 = 12345, X2 = X1, ...: which variables have the value? A solved example stands before it."""

    def one(letters: int, size: int) -> Made:
        names: list[str] = []
        while len(names) <= _HOPS:
            name = "".join(draw.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        value = str(draw.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {after} = VAR {before}" for before, after in zip(names, names[1:], strict=False)]
        context = "\n".join(insert(draw, noise(size), chain))
        prefix = _TRACKING_PREFIX.format(count=len(names), query=value)
        return Made(*_filled(_TRACKING, context, query=value), prefix, names)

    # The authors' example has up to 500 tokens; a tokenizer of single bytes has no room for more than the chain.
    small = setting.room < 4 * 500
    example = one(3, 0 if small else 5 * len(NOISE))
    solved = f"{example.context}{example.question}{example.prefix} {' '.join(example.answers)}\n\n"
    made = one(5, size)
    return made._replace(context=solved + made.context)


def _common_words(draw: random.Random, size: int, setting: Setting) -> Made:
    """The ten words that stand most often in a numbered list. A solved example stands before it."""

    def listed(common: list[str], others: list[str]) -> str:
        entries = common + others
        draw.shuffle(entries)
        return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))

    # (repeats of the common, of the others, words of the example, its repeats), as the authors have them.
    often, rarely, example, example_often, example_rarely = (
        (6, 1, 20, 3, 1) if setting.length < 4096 else (30, 3, 40, 10, 3)
    )
    words = _distinct_words(draw, example)
    context = listed(words[:10] * example_often, words[10:] * example_rarely)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(words[:10], start=1))
    solved = f"{_COMMON.format(context=context)}{_COMMON_PREFIX} {answer}\n"
    words = _distinct_words(draw, 10 + math.ceil(size / rarely))
    # The last word may stand fewer times: one entry more or less is what the length is fitted by.
    others = [words[10 + number // rarely] for number in range(size)]
    context, question = _filled(_COMMON, listed(words[:10] * often, others))
    return Made(solved + context, question, _COMMON_PREFIX, words[:10])


def _distinct_words(draw: random.Random, count: int) -> list[str]:
    """Different words; the first ones do not depend on how many are wanted. Where words run out, compounds follow."""
    words = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    draw = random.Random(draw.getrandbits(64))
    draw.shuffle(words)
    seen = set(words)
    while len(words) < count:
        parts = [draw.choice(ADJECTIVES), draw.choice(NOUNS)]
        if len(words) > 10000:
            parts.append(draw.choice(NOUNS))
        word = "".join(parts)
        if word not in seen:
            seen.add(word)
            words.append(word)
    return words[:count]


def _frequent_words(draw: random.Random, size: int, setting: Setting) -> Made:
    """The three most frequent of coded words whose frequencies fall with the square of their rank; dots are noise."""
    coded: list[str] = []
    while len(coded) < max(8, setting.room // 50):
        word = "".join(draw.choices(string.ascii_lowercase, k=6))
        if word not in coded[:4]:
            coded.append(word)
    coded[0] = "..."
    zeta = math.pi**2 / 6  # of 2
    text = [word for rank, word in enumerate(coded, start=1) for _ in range(int(size / (rank * rank * zeta)))]
    draw.shuffle(text)
    return Made(*_filled(_FREQUENT, " ".join(text)), _FREQUENT_PREFIX, coded[1:4])


def _told_apart(made: Made) -> bool:
    """The three most frequent coded words are more frequent than any other."""
    words = made.context.split("coded words. ")[1].split()
    counts = Counter(word for word in words if word != "...")
    ranked = [number for _, number in counts.most_common(4)]
    return len(ranked) > 3 and ranked[2] > ranked[3] and min(counts[word] for word in made.answers) == ranked[2]


def _question_answering(draw: random.Random, size: int, setting: Setting) -> Made:
    """A question whose documents stand among `size` words of others; the last of those is cut short."""
    questions = setting.source
    query, answers, own, near = questions.items[setting.index % len(questions.items)]
    near = draw.sample(near, len(near))
    taken = {*own, *near}
    far = [number for number in range(len(questions.documents)) if number not in taken]
    draw.shuffle(far)
    others, left = [], size
    if size and not any(map(questions.documents.__getitem__, near + far)):
        raise ValueError(
            f"{questions.path}: the question {query[:60]!r} has no other documents to stand among, so no prompt of "
            f"{setting.length} tokens can be made: give the whole file, or shorter --lengths"
        )
    while left > 0:
        for number in near + far:
            words = questions.documents[number].split(" ")
            others.append(" ".join(words[:left]))
            left -= len(words)
            if left <= 0:
                break
    documents = [questions.documents[number] for number in own] + others
    draw.shuffle(documents)
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
    return Made(*_filled(_QA, context, query=query), " Answer:", answers)


TASKS = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("essay"),
    "niah_single_3": _niah("essay", value_kind="uuids"),
    "niah_multikey_1": _niah("essay", keys=4),
    "niah_multikey_2": _niah("needle"),
    "niah_multikey_3": _niah("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": _niah("essay", values=4),
    "niah_multiquery": _niah("essay", keys=4, queries=4),
    "vt": Task(_variable_tracking, 30),
    "cwe": Task(_common_words, 120),
    "fwe": Task(_frequent_words, 50, is_answered=_told_apart),
    "qa_1": Task(_question_answering, 32, "any", "squad"),
    "qa_2": Task(_question_answering, 32, "any", "hotpotqa"),
}
