"""RULER (Hsieh et al. 2024): 13 synthetic tasks at any length, made from a seed. `eval/ruler.py` runs it.

Eight needle tasks, variable tracking, common words, frequent words; and question answering over many documents when the
files of SQuAD 2.0 and HotpotQA are given. The wording of the prompts is the benchmark's (Apache-2.0); the words and
texts are drawn here, so single samples differ from the authors'.

A prompt is filled up to its length in whole words: the last line of the haystack is usually cut short, where the
authors' scripts leave up to one whole line empty. Prompts of 1K tokens are then within 2 % too.

A needle task that asks for one value can be worded in a phrase of `pod.evaluation.passkey` instead, for a model that
knows no English question (`phrase`). Such scores are not the benchmark's, and whoever prints them says so.
"""

import bisect
import json
import math
import random
import string
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics
from pod.evaluation.passkey import DIGITS, PHRASES
from pod.evaluation.runner import Request, tokenise

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.".split()
ADJECTIVES = (
    "able ancient angry basic bitter blank blue bold brave brief bright broad broken calm careful cheap clean "
    "clear clever cold common cool curious daily damp dark deep dense dry dull dusty eager early easy elegant "
    "empty equal exact faint fair famous fancy fast final fine firm flat fresh gentle giant glad golden grand "
    "great green happy hard heavy hidden hollow honest huge humble icy ideal idle jolly keen kind large late lazy "
    "light little lively local lonely long loud loyal lucky major mellow merry mild minor modern narrow neat new "
    "noble noisy odd old open pale patient plain polite proud pure quick quiet rapid rare ready rich rough round "
    "royal rural sharp short shy silent silver simple slow small smooth soft solid steady steep strange strong "
    "sudden sweet swift tall tame thin tidy tiny true vast vivid warm weak white wide wild wise witty wooden "
    "young"
).split()
NOUNS = (
    "acorn actor anchor apple arrow autumn badge banner barrel basket beach beacon bell bench berry bird blanket "
    "boat bottle branch bread bridge brush bucket button cabin camel candle canyon carpet castle cedar chain "
    "chair cherry circle cloud coast coin comet compass copper coral cotton cradle crane crystal curtain desert "
    "diamond door dragon drum eagle engine falcon farmer feather fence ferry field flag flame flute forest fossil "
    "fountain fox garden gate glacier glove grape guitar hammer harbor harvest helmet hill honey horse island "
    "ivory jacket jewel journey kettle kitchen kite ladder lake lantern leaf lemon letter lily lion magnet maple "
    "marble market meadow melon mirror mountain needle nest novel oasis ocean olive orchard otter owl paddle "
    "painter palace panda paper parrot pebble pencil pepper piano pigeon pillow planet plum pocket poem prairie "
    "puzzle quilt rabbit rainbow raven reef ribbon river robin rocket rope saddle salmon school shadow shell ship "
    "shore signal sparrow spider spoon spring squirrel stable star statue stone storm stream summer sunset table "
    "temple thread thunder ticket tiger timber tower train tulip tunnel turtle valley velvet village violin wagon "
    "walnut water whale wheat willow window winter wolf zebra"
).split()

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
_PHRASE_NEW_TOKENS = 48  # a phrase is answered by the value at once; a uuid takes 36 bytes
_DEPTHS = 40  # in how many steps the depths of needles in a text are drawn


@dataclass
class Haystack:
    """Any long text, repeated where it is too short.

    Args:
        text: at least one word.
    """

    text: str
    words: list[str] = field(init=False, repr=False)
    ends: list[int] = field(init=False, repr=False)  # word counts after which a sentence ends

    def __post_init__(self) -> None:
        self.words = self.text.split()
        if not self.words:
            raise ValueError("the haystack is empty: give any long text")
        self.ends = [n for n, word in enumerate(self.words, start=1) if word.rstrip("\"')").endswith((".", "!", "?"))]
        if len(self.ends) * 200 < len(self.words):
            self.ends = list(range(1, len(self.words) + 1))  # hardly any sentences: code, verse, other scripts

    def take(self, count: int) -> tuple[list[str], list[int]]:
        """The first `count` words, and where among them sentences end."""
        turns = math.ceil(count / len(self.words))
        ends = [turn * len(self.words) + end for turn in range(turns) for end in self.ends]
        return (self.words * turns)[:count], ends[: bisect.bisect_right(ends, count)]


@dataclass(frozen=True)
class Questions:
    """Questions over documents: (question, answers, numbers of its documents, numbers of documents near to them)."""

    items: list[tuple[str, list[str], list[int], list[int]]]
    documents: list[str]


@dataclass(frozen=True)
class Setting:
    """What the making of one sample is given.

    Attributes:
        index: the sample's number.
        length: tokens of prompt and answer together.
        room: tokens of the prompt.
        count: text -> tokens.
        source: the text or the questions that the task needs.
        phrase: how needles are worded, see `make_requests`.
    """

    index: int
    length: int
    room: int
    count: Callable[[str], int]
    source: Haystack | Questions | None = None
    phrase: str | None = None


# A maker turns (random numbers, size, setting) into (question, answer prefix, wanted strings). What is asked for does
# not depend on the size, only how much stands around it does; a larger size never gives a shorter prompt, or hardly.
Made = tuple[str, str, list[str]]


@dataclass(frozen=True)
class Task:
    """One of the 13 tasks.

    Attributes:
        make: see `Made`.
        max_new_tokens: room for the answer.
        match: how it is scored, see `metrics.ruler`.
        needs: "haystack", "squad" or "hotpotqa" where it needs that.
        has_phrases: it asks for the value of one needle, and can be worded in another phrase.
    """

    make: Callable[[random.Random, int, Setting], Made]
    max_new_tokens: int
    match: str = "all"
    needs: str | None = None
    has_phrases: bool = False


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
            context = _hide_in_text(draw, size, setting.source, lines, after_sentences=plain)
        else:
            lines = _noise(size)
            if hay == "needle":
                lines = _other_needles(draw, size, setting, key_kind, value_kind, chosen)
            context = "\n".join(_insert(draw, lines, needles))
        if setting.phrase is not None:
            (key,) = asked
            return context + "\n", PHRASES[setting.phrase][1].format(name=key), hidden[key]
        many = queries * values > 1
        words = {
            "kind": value_kind if many else value_kind[:-1],
            "query": asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
            "some": "Some" if many else "A",
            "be": "are" if many else "is",
            "be_all": "are all" if many else "is",
        }
        wanted = [value for key in asked for value in hidden[key]]
        return _NIAH.format(context=context, **words), _NIAH_PREFIX.format(**words), wanted

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


def _noise(size: int) -> list[str]:
    """Lines of `size` words of noise together."""
    full, rest = divmod(size, len(NOISE))
    return [" ".join(NOISE)] * full + ([" ".join(NOISE[:rest])] if rest else [])


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
    return [line() for _ in range(size // weight)] + _noise(size % weight)


def _insert(draw: random.Random, lines: list[str], needles: list[str]) -> list[str]:
    """The lines with the needles in their order at random places."""
    places = range(len(lines) + 1)
    few = len(places) < len(needles)
    chosen = sorted(draw.choices(places, k=len(needles)) if few else draw.sample(places, len(needles)))
    mixed = list(lines)
    for offset, (place, needle) in enumerate(zip(chosen, needles, strict=True)):
        mixed.insert(place + offset, needle)
    return mixed


def _hide_in_text(draw: random.Random, size: int, haystack: Haystack, needles: list[str], after_sentences: bool) -> str:
    """`size` words of the haystack with the needles between sentences or words, at depths drawn from 40 steps."""
    words, ends = haystack.take(size)
    ends = [0, *ends] if after_sentences else range(len(words) + 1)
    depths = sorted(draw.sample(range(_DEPTHS), len(needles)))
    places = [ends[round(depth / (_DEPTHS - 1) * (len(ends) - 1))] for depth in depths]
    parts, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*words[last:place], needle]
        last = place
    return " ".join([*parts, *words[last:]])


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
        context = "\n".join(_insert(draw, _noise(size), chain))
        prefix = _TRACKING_PREFIX.format(count=len(names), query=value)
        return _TRACKING.format(context=context, query=value), prefix, names

    # The authors' example has up to 500 tokens; a tokenizer of single bytes has no room for more than the chain.
    small = setting.room < 4 * 500
    question, prefix, names = one(3, 0 if small else 5 * len(NOISE))
    solved = f"{question}{prefix} {' '.join(names)}\n\n"
    question, prefix, names = one(5, size)
    return solved + question, prefix, names


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
    return solved + _COMMON.format(context=listed(words[:10] * often, others)), _COMMON_PREFIX, words[:10]


def _distinct_words(draw: random.Random, count: int) -> list[str]:
    """Different words; the first ones do not depend on how many are wanted. Where words run out, compounds follow."""
    words = sorted({*ADJECTIVES, *NOUNS})
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
    return _FREQUENT.format(context=" ".join(text)), _FREQUENT_PREFIX, coded[1:4]


def _question_answering(draw: random.Random, size: int, setting: Setting) -> Made:
    """A question whose documents stand among `size` words of others; the last of those is cut short."""
    questions = setting.source
    query, answers, own, near = questions.items[setting.index % len(questions.items)]
    near = draw.sample(near, len(near))
    taken = {*own, *near}
    far = [number for number in range(len(questions.documents)) if number not in taken]
    draw.shuffle(far)
    others, left = [], size
    while left > 0 and (near or far):
        for number in near + far:
            words = questions.documents[number].split(" ")
            others.append(" ".join(words[:left]))
            left -= len(words)
            if left <= 0:
                break
    documents = [questions.documents[number] for number in own] + others
    draw.shuffle(documents)
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
    return _QA.format(context=context, query=query), " Answer:", answers


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
    "fwe": Task(_frequent_words, 50),
    "qa_1": Task(_question_answering, 32, "any", "squad"),
    "qa_2": Task(_question_answering, 32, "any", "hotpotqa"),
}


def resolve_tasks(names: Sequence[str] | None, given: set[str], phrase: str | None = None) -> list[str]:
    """The named tasks; without names, all that can be made from what is given.

    Args:
        names: of `TASKS`.
        given: of "haystack", "squad", "hotpotqa".
        phrase: see `make_requests`.

    Raises:
        ValueError: an unknown task, with the closest valid one; a task whose text or questions are not given; an
            unknown phrase, a task that cannot be worded in it.
    """
    if phrase is not None and phrase not in PHRASES:
        raise ValueError(f"--phrase {phrase!r} is not known: {', '.join(PHRASES)}")
    worded = [name for name, task in TASKS.items() if phrase is None or task.has_phrases]
    if names is None:
        return [name for name in worded if TASKS[name].needs in {None, *given}]
    for name in names:
        if name not in TASKS:
            close = get_close_matches(name, TASKS, n=1) or list(TASKS)
            raise ValueError(f"{name!r} is no task of RULER; did you mean {', '.join(close)}?")
        if TASKS[name].needs not in {None, *given}:
            raise ValueError(f"{name} needs --{TASKS[name].needs} FILE")
        if name not in worded:
            raise ValueError(f"--phrase {phrase} has no words for {name}, only for {', '.join(worded)}")
    return list(dict.fromkeys(names))


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    samples: int,
    *,
    seed: int = 0,
    source: Haystack | Questions | None = None,
    phrase: str | None = None,
) -> list[Request]:
    """The prompts of one task at one length, each with its answer prefix at the end.

    Sample i is a function of (seed, task, length, i), the tokenizer and the given texts, and of nothing else.

    Args:
        tokenizer: counts the tokens; its chat template, where it has one, stands around the question.
        task: one of `TASKS`.
        length: tokens of prompt and answer together, as the authors count; never more, and at most 2 % fewer.
        samples: how many.
        seed: of everything random.
        source: a `Haystack` for the tasks that need one, `read_squad`'s for qa_1, `read_hotpotqa`'s for qa_2.
        phrase: a name in `passkey.PHRASES`: needles that ask for one value stand and are asked for in it, with names
            of two letters and numbers of five digits, and 48 tokens have room for the answer; None is the
            benchmark's wording.

    Returns:
        Requests whose record is {"answers", "tokens"}; tokens as the length counts them.

    Raises:
        ValueError: unknown task or phrase, a text that it needs is missing, a length that does not hold the question.
    """
    resolve_tasks([task], {"haystack", "squad", "hotpotqa"} if source is not None else set(), phrase)
    kind = TASKS[task]
    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}")
    chat = bool(tokenizer.chat_template)
    new_tokens = kind.max_new_tokens if phrase is None else _PHRASE_NEW_TOKENS

    def prompt(made: Made) -> str:
        question, prefix, _ = made
        if chat:
            message = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return question + prefix

    def count(text: str, special_tokens: bool = False) -> int:
        return len(tokenise(tokenizer, text, special_tokens))

    requests = []
    for index in range(samples):
        setting = Setting(index, length, length - new_tokens, count, source, phrase)

        def make(size: int, setting: Setting = setting) -> tuple[int, Made]:
            made = kind.make(random.Random(f"{seed} {task} {length} {setting.index}"), size, setting)
            return count(prompt(made), not chat), made

        tokens, made = fit(make, setting.room)
        if tokens > setting.room or kind is TASKS["fwe"] and not _told_apart(made):
            need = f"at least {tokens + new_tokens} tokens" if tokens > setting.room else "more tokens"
            raise ValueError(f"{task} does not fit into {length} tokens with this tokenizer: {need} are needed")
        requests.append(
            Request(
                key=str(index),
                text=prompt(made),
                max_new_tokens=new_tokens,
                special_tokens=not chat,
                record={"answers": made[2], "tokens": tokens + new_tokens},
            )
        )
    return requests


def _told_apart(made: Made) -> bool:
    """The three most frequent coded words are more frequent than any other."""
    words = made[0].split("coded words. ")[1].split("\nQuestion:")[0].split()
    counts = Counter(word for word in words if word != "...")
    ranked = [number for _, number in counts.most_common(4)]
    return len(ranked) > 3 and ranked[2] > ranked[3] and min(counts[word] for word in made[2]) == ranked[2]


def fit(make: Callable[[int], tuple[int, Any]], room: int) -> tuple[int, Any]:
    """The largest size whose tokens are at most `room`, or one within half a percent of it.

    Args:
        make: size -> (tokens, made); tokens grow about evenly with the size.
        room: tokens.

    Returns:
        (tokens, made); those of size 0 where even that has too many.
    """
    low, best = 0, make(0)
    base = best[0]
    high, size, tries = None, max(1, (room - base) // 4), 0
    while best[0] <= room and best[0] < 0.995 * room and (high is None or high - low > 1):
        tokens, made = make(size)
        if tokens <= room:
            low, best = size, (tokens, made)
        else:
            high = size
        # Where the straight line through size 0 and this one reaches the room; halving when that does not get there.
        tries += 1
        size = int(size * (room - base) / max(1, tokens - base))
        if high is None:
            size = min(max(size, low + 1), 8 * low + 8)
        elif not low < size < high or tries > 6:
            size = (low + high) // 2
    return best


def score(task: str, rows: Sequence[dict[str, Any]]) -> float:
    """0..100 of one task's predictions, rows `{"pred", "answers"}` as the runner writes them."""
    return metrics.ruler([row["pred"] for row in rows], [row["answers"] for row in rows], TASKS[task].match)


def read_squad(path: str | Path) -> Questions:
    """Answerable questions of a SQuAD 2.0 file; documents of the same article count as near.

    Raises:
        ValueError: no such file, or another format; names the field.
    """
    content = _read_json(path)
    numbers: dict[str, int] = {}
    items = []
    with _format_errors(path, "SQuAD 2.0"):
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                numbers.setdefault(paragraph["context"], len(numbers))
        for article in content["data"]:
            all_of = list(dict.fromkeys(numbers[paragraph["context"]] for paragraph in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                own = numbers[paragraph["context"]]
                near = [number for number in all_of if number != own]
                for item in paragraph["qas"]:
                    if not item.get("is_impossible", False):
                        answers = list(dict.fromkeys(answer["text"] for answer in item["answers"]))
                        items.append((item["question"], answers, [own], near))
    return _questions(path, items, numbers)


def read_hotpotqa(path: str | Path) -> Questions:
    """The questions of a HotpotQA file (distractor setting), each with its ten documents.

    Raises:
        ValueError: no such file, or another format; names the field.
    """
    content = _read_json(path)
    numbers: dict[str, int] = {}
    items = []
    with _format_errors(path, "HotpotQA"):
        for item in content:
            documents = [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
            own = list(dict.fromkeys(numbers.setdefault(document, len(numbers)) for document in documents))
            items.append((item["question"], [item["answer"]], own, []))
    return _questions(path, items, numbers)


def _questions(path: str | Path, items: list, numbers: dict[str, int]) -> Questions:
    items = [item for item in items if item[1]]
    if not items:
        raise ValueError(f"{path}: no question with an answer")
    return Questions(items, list(numbers))


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of the data set's JSON file") from error
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON: {error}") from error


class _format_errors:
    """Names file and field when a file is not of its format."""

    def __init__(self, path: str | Path, format_name: str) -> None:
        self.path, self.format_name = path, format_name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyError):
            raise ValueError(f"{self.path}: not {self.format_name}: field {error} is missing") from error
        if isinstance(error, (TypeError, ValueError, AttributeError)):
            raise ValueError(f"{self.path}: not {self.format_name}: {error}") from error
