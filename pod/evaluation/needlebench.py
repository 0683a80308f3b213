"""NeedleBench v1 (Li et al. 2024), weighed as in CAKE's paper: one needle, one at each depth, two to five to reason on.

    python eval/needlebench.py --ckpt exports/llama3-32k --data NeedleBench/ --repeats 2
    python eval/needlebench.py --ckpt exports/llama3-32k --data NeedleBench/ --size 8k --languages English Chinese
    python eval/needlebench.py --ckpt exports/llama3-32k --data mine/ --lengths 1024 2048 --buffer 300 --tasks single

--data is the folder of the benchmark's files: PaulGrahamEssays.jsonl, zh_finance.jsonl (`text`), needles.jsonl and
multi_needle_reasoning_en.json, _zh.json. Haystack lines are shuffled, joined and cut to a length less the buffer and
the needles; needles go in at their depths. 32k with both languages and all repeats is 9,200 prompts. Lengths are tokens
of the model's tokenizer; with --tokens gpt-4 they are tiktoken's, as the authors count for every model. Predictions are
written to --out as they come; the same command goes on where a killed run stopped. Each method of --eviction has its
own folder in --out, and so has each of several models; a table compares them (`comparison.md`).

Prompts and making are OpenCompass's (commit 6c9cd9a, Apache-2.0). Where it shuffles the needles of multi_retrieval
unseeded, the seed is 0 here; how many tokens an answer may have is not stated there, 2,000 here.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics
from pod.evaluation.benchmark import Benchmark, Row, Score, add_limit, command, read_sets
from pod.evaluation.command import add_numbers, check_least
from pod.evaluation.lines import Fields, check_fields, read_lines
from pod.evaluation.runner import Request, as_chat, question_at, tokenise
from pod.evaluation.texts import text_hash
from pod.extras import require

TASKS = {"single": ("single",), "multi_retrieval": ("multi_retrieval",)}
TASKS["multi_reasoning"] = tuple(f"multi_reasoning_{count}" for count in (2, 3, 4, 5))  # needles
WEIGHTS = {"single": 0.4, "multi_retrieval": 0.3, "multi_reasoning": 0.3}
REPEATS = {"single": 10, "multi_retrieval": 25, "multi_reasoning": 10}
# size -> lengths, depths in per cent, tokens that are left free in English; in Chinese these are 200.
SIZES = {
    "32k": (
        [9000, 13000, 17000, 21000, 25000, 29000, 31000, 32000],
        [0, 10, 21, 31, 42, 52, 63, 73, 84, 94, 100],
        dict.fromkeys(TASKS, 3000),
    ),
    "8k": (
        [5000, 6000, 7000, 8000],
        [int(100 / 19 * step) for step in range(20)],
        {"single": 800, "multi_retrieval": 1300, "multi_reasoning": 1000},
    ),
}
BUFFER_CHINESE = 200


@dataclass(frozen=True)
class Language:
    """What a language's prompts are made of; `mark` is what a question has before its form of answer."""

    files: tuple[str, str]  # haystack, reasoning
    opens: str
    opens_many: str
    asks: str
    asks_many: str
    mark: str
    guide: str
    ends: tuple[str, str]  # of a question, of a form of answer
    form: tuple[str, str]  # what stands around the forms of several answers


_CHINESE = (
    "你是一个善于回答用户问题的智能AI助手\n请保持你的回答简洁清楚。不要说和下面文档中的无关的话，或重复你的回答\n"
)
_ENGLISH = (
    "You are an intelligent AI assistant skilled in answering user questions.\nPlease keep your answers concise and "
    "clear. Do not talk about irrelevant topics or repeat your answers.\nThe document given to you by the user is "
)
LANGUAGES = {
    "English": Language(
        ("PaulGrahamEssays.jsonl", "multi_needle_reasoning_en.json"),
        _ENGLISH,
        _ENGLISH,
        "\n\nNow, the question is: {q}",
        "\n\nNow, the questions are: {q}\n",
        "Please answer in the format",
        "Before answering, please consider what in the document is most relevant to this question.",
        ("?", "."),
        ("Please answer in the format of '", "'"),
    ),
    "Chinese": Language(
        ("zh_finance.jsonl", "multi_needle_reasoning_zh.json"),
        f"{_CHINESE}用户现在给你的文档是",
        f"{_CHINESE}请先仔细阅读下面的文档再依次回答最后提出的问题\n用户现在给你的文档是",
        "\n\n现在请问：{q}",
        "\n\n现在请问：{q}\n",
        "请按照",
        "在回答之前，请思考文档中与此问题最相关的内容是什么。",
        ("？", "。"),
        ("请按照'", "'的格式回答。"),
    ),
}
NEEDLE: Fields = {name: (str,) for name in ("needle", "retrieval_question", "arg1", "arg2", "language")}
RECORD: Fields = {"derivations": (list,), "derivation_count": (int,), "question": (str,), "answer": (str,)}
# arXiv 2503.12491, 32K, 1,024 tokens per layer, means of Chinese and English: S-RT, M-RT, M-RS, overall.
PUBLISHED = {
    "Mistral-7B-v0.3": (87.37, 93.66, 50.77, 78.28),
    "Mistral-7B-v0.3, H2O": (49.48, 36.20, 41.76, 43.18),
    "Mistral-7B-v0.3, SnapKV": (90.99, 56.93, 46.61, 67.46),
    "Mistral-7B-v0.3, PyramidKV": (91.32, 47.89, 46.50, 64.84),
    "Mistral-7B-v0.3, CAKE": (89.66, 71.00, 49.04, 71.87),
    "Llama3.1-8B": (91.49, 99.70, 75.10, 89.04),
    "Llama3.1-8B, H2O": (78.05, 90.61, 63.21, 77.37),
    "Llama3.1-8B, SnapKV": (92.06, 92.45, 72.20, 86.22),
    "Llama3.1-8B, PyramidKV": (92.76, 72.66, 73.87, 81.07),
    "Llama3.1-8B, CAKE": (92.01, 94.16, 71.35, 86.46),
}


@dataclass
class Tokens:
    """How lengths are counted: text -> ids, which are remembered as many prompts need them, and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @classmethod
    def of_model(cls, tokenizer: PreTrainedTokenizerBase) -> "Tokens":
        return cls(cache(lambda text: tokenise(tokenizer, text, False)), tokenizer.decode)

    @classmethod
    def of_gpt4(cls) -> "Tokens":
        """tiktoken's, as the authors count.

        Raises:
            ImportError: tiktoken is not installed.
            ValueError: its file is not there.
        """
        require("eval", "tiktoken", what="--tokens gpt-4")
        import tiktoken

        try:
            encoding = tiktoken.encoding_for_model("gpt-4")
        except Exception as error:
            raise ValueError(
                f"--tokens gpt-4: tiktoken's file cannot be fetched ({error}); put it into the folder that "
                "TIKTOKEN_CACHE_DIR names, or count with --tokens model"
            ) from error
        return cls(cache(encoding.encode), encoding.decode)


@dataclass
class Files:
    """The benchmark's files in one language; `orders` are the haystack's lines as each repeat has them."""

    lines: list[str]
    needles: list[dict[str, Any]]
    records: list[dict[str, Any]]
    orders: list[list[str]] = field(default_factory=list)

    def order(self, repeat: int) -> list[str]:
        """Each repeat shuffles what the one before has left."""
        while len(self.orders) <= repeat:
            shuffled = list(self.orders[-1] if self.orders else self.lines)
            random.Random(len(self.orders)).shuffle(shuffled)
            self.orders.append(shuffled)
        return self.orders[repeat]


def read_files(folder: Path, language: str, tasks: Sequence[str]) -> Files:
    """What the tasks need of the benchmark's folder.

    Raises:
        ValueError: a file is missing or not as the format says, with file, line and field.
    """
    kind = LANGUAGES[language]
    lines = [line["text"] for _, line in read_lines(folder / kind.files[0], {"text": (str,)})]
    needles, records = [], []
    if set(tasks) != {"multi_reasoning"}:
        for place, line in read_lines(folder / "needles.jsonl", NEEDLE):
            if line["language"] == language:
                question = line["retrieval_question"]
                if kind.mark not in question or question.count("'") < 2:
                    raise ValueError(
                        f"{place}: field 'retrieval_question' must say {kind.mark!r} and a form between quotes"
                    )
                needles.append(line)
            elif line["language"] not in LANGUAGES:
                known = " or ".join(LANGUAGES)
                raise ValueError(f"{place}: field 'language' must be {known}, got {line['language']!r}")
        if not needles:
            raise ValueError(f"{folder}/needles.jsonl has no needle in {language}")
    if "multi_reasoning" in tasks:
        records = _read_records(folder / kind.files[1])
    return Files(lines, needles, records)


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--data: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"{path}: expected a list of objects with the fields {', '.join(RECORD)}")
    for number, record in enumerate(found):
        check_fields(f"{path}: record {number}", record, RECORD)
    for count in (2, 3, 4, 5):
        if not any(record["derivation_count"] == count for record in found):
            raise ValueError(f"{path}: no record whose 'derivation_count' is {count}")
    return found


def haystack(tokens: Tokens, lines: Sequence[str], room: int) -> list[int]:
    """The first `room` tokens of the lines, each tokenised alone; fewer where they end."""
    found: list[int] = []
    for line in lines:
        found += tokens.encode(line)
        if len(found) >= room:
            break
    return found[: max(0, room)]


def hide_each(hay: list[int], needles: Sequence[list[int]], depths: Sequence[int]) -> list[int]:
    """A needle at each depth in per cent of the haystack as it was, inserted in order."""
    found, inserted = hay, 0
    for needle, depth in zip(needles, depths, strict=True):
        place = min(int(len(hay) * (depth / 100)) + inserted, len(found))
        found = found[:place] + needle + found[place:]
        inserted += len(needle)
    return found


def hide_chain(hay: list[int], needles: Sequence[list[int]], depth: int) -> list[int]:
    """The first needle at the depth, each next a tenth of the haystack behind the end of the one before.

    As OpenCompass counts, the points already leave room for the needles before them, and inserting one moves all later
    points by its length again: they drift.
    """
    places: list[int] = []
    for number in range(len(needles)):
        last = len(hay) + sum(map(len, needles[:number]))
        place = int(places[-1] + len(needles[number - 1]) + len(hay) * 0.1) if places else int(len(hay) * (depth / 100))
        places.append(min(place, last))
    found, moved = hay, 0
    for place, needle in zip(places, needles, strict=True):
        found = found[: place + moved] + needle + found[place + moved :]
        moved += len(needle)
    return found


def guided(language: Language, question: str) -> str:
    """The question with the sentence that asks to think first, before the form of the answer."""
    before, after = question.split(language.mark)[:2]
    blank = " " if language.mark[0] == "P" else ""
    return before + language.guide + blank + language.mark + after


def asked_together(language: Language, needles: Sequence[dict[str, Any]]) -> str:
    """The questions of several needles, and one form for their answers."""
    questions = [needle["retrieval_question"] for needle in needles]
    end, stop = language.ends
    forms = "、".join(question.split("'")[1].split(stop)[0] for question in questions)
    return "、".join(question.split(end)[0] + end for question in questions) + forms.join(language.form)


def distinct(needles: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Needles of which no two have the same first or second argument.

    Raises:
        ValueError: there are not so many.
    """
    shuffled = list(needles)
    random.Random(0).shuffle(shuffled)
    found: list[dict[str, Any]] = []
    for needle in shuffled:
        if len(found) < count and all(needle[name] != one[name] for name in ("arg1", "arg2") for one in found):
            found.append(needle)
    if len(found) < count:
        raise ValueError(f"multi_retrieval needs {count} needles of distinct arg1 and arg2, one a depth: {len(found)}")
    return found


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tokens,
    files: Files,
    language: str,
    task: str,
    lengths: Sequence[int],
    depths: Sequence[int],
    repeats: int,
    buffer: int,
    max_new_tokens: int = 2000,
) -> list[Request]:
    """The prompts of one task; the record is {"reference", "length", "depth", "repeat"}, depth -1 of multi_retrieval.

    Args:
        tokenizer: of the chat template.
        tokens: what lengths are counted in.
        files: of the language.
        language: of `LANGUAGES`.
        task: single, multi_retrieval, or multi_reasoning_N for N needles.
        lengths: tokens of needles, haystack and buffer together.
        depths: per cent.
        repeats: prompts of each length and depth.
        buffer: tokens that are left free for question and answer.
        max_new_tokens: of an answer.
    """
    kind = LANGUAGES[language]
    many = task == "multi_retrieval"
    needles = distinct(files.needles, len(depths)) if many else []
    requests = []
    for length, depth, repeat in product(lengths, [-1] if many else depths, range(repeats)):
        draw = random.Random(repeat)
        if many:
            chosen = list(needles)
            draw.shuffle(chosen)
            texts, reference = [one["needle"] for one in chosen], [one["arg2"] for one in chosen]
            question = guided(kind, asked_together(kind, chosen))
        elif task == "single":
            one = draw.choice(files.needles)
            texts, reference = [one["needle"]], [one["needle"], one["arg2"]]
            question = guided(kind, one["retrieval_question"])
        else:
            count = int(task.rpartition("_")[2])
            one = draw.choice([record for record in files.records if record["derivation_count"] == count])
            texts, reference = one["derivations"], one["answer"]
            question = one["question"] + kind.guide
        ids = [tokens.encode(f"\n{text}\n") for text in texts]
        hay = haystack(tokens, files.order(repeat), length - buffer - sum(map(len, ids)))
        context = hide_each(hay, ids, depths) if many else hide_chain(hay, ids, depth)
        asked = (kind.asks_many if many else kind.asks).format(q=question)
        content = (kind.opens_many if many else kind.opens) + tokens.decode(context) + asked
        text = as_chat(tokenizer, content)
        record = {"reference": reference, "length": length, "depth": depth, "repeat": repeat}
        requests.append(
            Request(
                key=f"{length}-{depth}-{repeat}",
                text=text,
                max_new_tokens=max_new_tokens,
                special_tokens=not tokenizer.chat_template,
                question_at=question_at(text, asked.strip()),
                record=record | {"prompt": text_hash(content)},
            )
        )
    return requests


class NeedleBench(Benchmark):
    """See the module's docstring. A set is a task in one language, `TASK-LANGUAGE`."""

    name = "needlebench"
    published = PUBLISHED
    published_columns = ("S-RT", "M-RT", "M-RS", "overall")
    published_in = "arXiv 2503.12491, means of Chinese and English; 32K, 1,024 per layer"

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, help="the folder of the benchmark's files")
        parser.add_argument("--size", choices=list(SIZES), default="32k", help="lengths, depths, buffers (32k)")
        parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="(default: all)")
        parser.add_argument("--languages", nargs="+", choices=list(LANGUAGES), default=["English"], help="(English)")
        parser.add_argument("--repeats", type=int, help="most of a length and depth (10; multi_retrieval 25)")
        add_numbers(parser, "--lengths", None, "other lengths than the size's")
        add_numbers(parser, "--depths", None, "other depths in per cent")
        parser.add_argument("--buffer", type=int, help="tokens left free for question and answer, in every task")
        parser.add_argument("--tokens", choices=["model", "gpt-4"], default="model", help="what counts lengths (model)")
        parser.add_argument("--max-new-tokens", type=int, default=2000, help="of an answer (2000)")
        add_limit(parser)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        lengths, depths, self.buffers = SIZES[options.size]
        self.lengths, self.depths = options.lengths or lengths, options.depths or depths
        check_least(options, repeats=1, max_new_tokens=1, lengths=1, depths=0)
        if max(self.depths) > 100:
            raise ValueError(f"--depths are per cent, got {max(self.depths)}")
        if options.data is None and not self.score_only:
            raise ValueError("--data is missing: give the folder of opencompass/NeedleBench's files")
        self.files = {
            one: None if self.score_only else read_files(options.data, one, options.tasks) for one in options.languages
        }
        if not self.score_only and "multi_retrieval" in options.tasks:
            for files in self.files.values():
                distinct(files.needles, len(self.depths))
        self.settings = {
            name: getattr(options, name) for name in ("size", "repeats", "depths", "buffer", "tokens", "max_new_tokens")
        }
        counted = "tokens of the model's tokenizer" if options.tokens == "model" else "tiktoken's gpt-4 tokens"
        self.title = f"NeedleBench v1, {', '.join(options.languages)}; lengths in {counted}."

    def read(self, folder: Path) -> dict[str, list[Row]]:
        names = [f"{task}-{one}" for one in self.files for group in self.options.tasks for task in TASKS[group]]
        return read_sets(folder, names, {"reference": (str, list)})

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Request]]]:
        options = self.options
        tokens = Tokens.of_model(tokenizer) if options.tokens == "model" else Tokens.of_gpt4()
        for language, files in self.files.items():
            for group in dict.fromkeys(options.tasks):
                repeats = min(REPEATS[group], options.repeats or REPEATS[group])
                buffer = self.buffers[group] if language == "English" else BUFFER_CHINESE
                buffer = buffer if options.buffer is None else options.buffer
                for task in TASKS[group]:
                    grid = (self.lengths, self.depths, repeats, buffer, options.max_new_tokens)
                    requests = make_requests(tokenizer, tokens, files, language, task, *grid)
                    yield f"{task}-{language}", requests[: self.limit]

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        kind = next(task for task in TASKS if name.startswith(task))
        return sum(metrics.needlebench(kind, row["pred"], row["reference"]) for row in rows) / len(rows)

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        means: dict[str, float | None] = {}
        for group, tasks in TASKS.items():
            found = [scores.get(f"{task}-{language}") for language in self.files for task in tasks]
            means[f"{group}, mean"] = None if None in found else sum(found) / len(found)
        known = [means[f"{group}, mean"] for group in WEIGHTS]
        overall = None if None in known else sum(w * one for w, one in zip(WEIGHTS.values(), known, strict=True))
        return means | {"overall (0.4, 0.3, 0.3)": overall}


main = command(NeedleBench, __doc__)
