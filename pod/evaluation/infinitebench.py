"""InfiniteBench (Zhang et al. 2024): books and hidden numbers over 32K, 64K and 128K tokens, truncated in the middle.

    python eval/infinitebench.py --ckpt exports/llama3-32k --data InfiniteBench/ --windows 32768
    python eval/infinitebench.py --ckpt exports/llama3-32k --data InfiniteBench/ --eviction snapkv:budget=4096
    python eval/infinitebench.py --ckpt exports/llama3-32k --tasks passkey number_string --made 1024 2048 4096 8192

The five tasks of PoD's Table 3. --data is the folder of the benchmark's files, TASK.jsonl. A prompt of more tokens than
a window keeps the window's half at either end, so a hidden number may be cut away: the table prints the ceiling that
this sets, the share of the samples whose number is still in the prompt. --made hides numbers in the benchmark's own
words at lengths of your choice and needs no file. Where a model's positions end, its windows are lowered, and a note
says so. Predictions are written to --out as they come; the same command goes on where a killed run stopped. Each method
of --eviction has its own folder in --out, and so has each of several models; a table compares them (`comparison.md`).

The prompts are the benchmark's for base models, byte for byte (commit 88b3daa, MIT licence); where the tokenizer has a
chat template they are the user's turn in it. Greedy, until the end of text.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics, report
from pod.evaluation.benchmark import Benchmark, Row, Score, add_limit, command, read_sets
from pod.evaluation.command import add_numbers, check_least
from pod.evaluation.haystack import NOISE, fit
from pod.evaluation.lines import Fields, check_name, read_lines
from pod.evaluation.runner import Request, as_chat, asked_last, tokenise
from pod.evaluation.texts import text_hash

PROMPTS = {
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n\nThe letter of the correct answer is"
    ),
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information.\n\n{context}\n\n{input}\n\nThe pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the "
        "important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is"
    ),
}
MAX_NEW_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "longbook_qa_eng": 40,
    "longbook_choice_eng": 40,
    "longbook_sum_eng": 1200,
}
HIDDEN = {"passkey": "pass key", "number_string": "sequence of digits"}  # tasks of a hidden number, and its name
WINDOWS = [32 * 1024, 64 * 1024, 128 * 1024]
FIELDS: Fields = {"context": (str,), "input": (str,), "answer": (str, list)}
SETS = [f"{task}-{window}" for window, task in product(WINDOWS, PROMPTS)]
# arXiv 2412.02252, Table 3 (LLaMA3.1-8B): the tasks in the order of PROMPTS at 32K, 64K, 128K; the mean of the 15.
_TABLE_3 = """\
dense: 29.56 25.33 15.51 27.12 27.12 | 37.26 28.82 15.14 54.24 54.24 | 31.24 41.78 14.86 100 99.49 | 40.11
SnapKV: 28.93 26.20 13.26 27.12 26.61 | 35.14 27.95 11.69 54.24 53.05 | 29.34 34.50 13.65 100 98.98 | 38.71
PyramidKV: 29.88 26.20 15.01 27.12 27.12 | 36.53 29.26 15.18 54.24 54.24
Quest: 28.49 25.76 12.87 27.12 27.12 | 35.81 27.51 11.22 54.24 54.24 | 29.04 34.50 8.95 100 98.14 | 38.33
LM-Infinite: 25.28 26.64 12.46 3.39 3.39 | 27.25 28.82 12.64 3.39 3.39 | 22.19 29.26 13.01 3.39 3.22 | 14.51
StreamingLLM: 25.39 26.20 12.05 3.39 3.39 | 27.14 27.95 13.29 3.39 3.39 | 22.66 27.95 12.79 3.39 3.22 | 14.37
H2O: 25.42 26.20 13.08 4.92 3.39 | 27.55 27.95 14.31 7.12 3.56
WA: 3.52 3.49 0.53 0 1.36 | 3.36 3.06 0.65 0 1.19 | 3.32 3.49 0.70 0 1.19 | 1.72
WA + CPT: 12.59 18.78 11.31 3.39 3.39 | 13.12 17.90 10.78 3.39 3.39 | 12.81 20.96 11.26 3.39 3.39 | 9.99
CLA: 22.07 34.06 13.58 24.07 25.76 | 22.74 31.88 12.74 50.85 52.54 | 21.62 34.50 12.96 97.80 96.78 | 36.93
PoD: 27.43 35.43 17.89 26.61 27.12 | 29.62 36.92 15.52 53.73 54.24 | 26.64 42.79 15.52 99.83 99.15 | 40.56
PoD + SnapKV: 28.61 35.86 13.90 26.61 23.39 | 28.48 36.23 14.03 53.73 49.49 | 24.72 40.61 12.36 99.83 87.97 | 38.39"""
PUBLISHED = {
    name: [float(value) for value in values.replace("|", "").split()]
    for name, values in (row.split(": ") for row in _TABLE_3.splitlines())
}


def load_samples(data: str, task: str) -> list[dict[str, Any]]:
    """The samples of one task, in their order; `label` is added, as `metrics.infinitebench` takes it.

    Raises:
        ValueError: nothing there, or a line that is not as the format says, with file, line and field.
    """
    if data == "hub":
        raise ValueError(
            "--data hub: fetch xinrongzhang2022/InfiniteBench from the Hugging Face hub and give its folder: --data DIR"
        )
    choice = task == "longbook_choice_eng"
    samples = []
    for place, line in read_lines(Path(data) / f"{task}.jsonl", FIELDS | ({"options": (list,)} if choice else {})):
        answers = [line["answer"]] if isinstance(line["answer"], str) else line["answer"]
        if not answers:
            raise ValueError(f"{place}: field 'answer' is empty")
        if choice:
            answers = _label(place, answers, line["options"])
        samples.append(line | {"label": answers})
    return samples


def _label(place: str, answers: list[str], options: list[str]) -> list[str]:
    """(text, letter) of a choice, of which files may give the text alone."""
    if len(options) != 4:
        raise ValueError(f"{place}: field 'options' must be four texts, got {len(options)}")
    if len(answers) == 2 and answers[1] in ("A", "B", "C", "D"):
        return answers
    if len(answers) != 1 or answers[0] not in options:
        raise ValueError(f"{place}: field 'answer' must be one of the options, or its text and letter, got {answers}")
    return [answers[0], "ABCD"[options.index(answers[0])]]


def filled(task: str, sample: dict[str, Any]) -> tuple[str, str]:
    """The prompt up to the end of its context, and what asks about it."""
    options = {f"OPTION_{letter}": text for letter, text in zip("ABCD", sample.get("options") or [], strict=False)}
    before, after = PROMPTS[task].split("{context}")
    return before + sample["context"], after.format(input=sample["input"], **options)


def truncate(tokenizer: PreTrainedTokenizerBase, text: str, window: int) -> str:
    """The text, or its first and last `window // 2` tokens where it has more than `window`.

    Both ends are decoded together, and so is a text that fits, without special tokens: what is spelt like one goes.
    Tokenised again, that may be more or fewer tokens: the authors' script has it so.

    Raises:
        ValueError: the window is below 2.
    """
    if window < 2:
        raise ValueError(f"a window must be at least 2 tokens, got {window}: give larger --windows")
    ids = tokenise(tokenizer, text)
    if len(ids) > window:
        ids = ids[: window // 2] + ids[-(window // 2) :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def make_requests(
    tokenizer: PreTrainedTokenizerBase, task: str, samples: Sequence[dict[str, Any]], window: int
) -> list[Request]:
    """The prompts of one task in one window; the record: {"label", "prompt"}, of hidden numbers also "kept"."""
    chat = bool(tokenizer.chat_template)
    requests = []
    for index, sample in enumerate(samples):
        context, asked = filled(task, sample)
        text = truncate(tokenizer, context + asked, window)
        record = {"label": sample["label"], "prompt": text_hash(text)}
        if task in HIDDEN:
            record["kept"] = sample["label"][0] in text
        text, place = asked_last(tokenizer, text, asked, chat)
        options = {"special_tokens": not chat, "question_at": place, "record": record}
        requests.append(Request(str(index), text, MAX_NEW_TOKENS[task], **options))
    return requests


def made(tokenizer: PreTrainedTokenizerBase, task: str, length: int, count: int) -> list[dict[str, Any]]:
    """Samples of a hidden number in the benchmark's words, at `count` depths from beginning to end.

    Args:
        tokenizer: counts the tokens.
        task: passkey (five digits) or number_string (ten: five times, one of them is doubled).
        length: tokens of prompt and answer together, at most.
        count: how many.

    Raises:
        ValueError: the length does not hold the question.
    """
    line = " ".join(NOISE) + "\n"
    name = HIDDEN[task]

    def sample(lines: int, index: int) -> dict[str, Any]:
        draw = random.Random(f"{task} {length} {index}")
        digits = [draw.choice("0123456789") for _ in range(5)]
        for _ in range(5 if task == "number_string" else 0):
            place = draw.randrange(len(digits))
            digits.insert(place, digits[place])
        key = "".join(digits)
        before = round(lines * index / max(1, count - 1))
        hidden = f"The {name} is {key}. Remember it. {key} is the {name}.\n"
        context = line * before + hidden + line * (lines - before)
        return {"context": context, "input": f"What is the {name}?", "label": [key]}

    def tokens(lines: int) -> tuple[int, int]:
        texts = [as_chat(tokenizer, "".join(filled(task, sample(lines, index)))) for index in (0, count - 1)]
        return max(len(tokenise(tokenizer, text, not tokenizer.chat_template)) for text in texts), lines

    room = length - MAX_NEW_TOKENS[task]
    used, lines = fit(tokens, room)
    while used > room and lines:  # digits may be more tokens in one sample than in another
        used, lines = tokens(lines - 1)
    if used > room:
        raise ValueError(f"--made {length}: {task} needs at least {used + MAX_NEW_TOKENS[task]} tokens")
    return [sample(lines, index) for index in range(count)]


def published_table(names: Sequence[str]) -> str:
    """The paper's scores in those of the sets `TASK-WINDOW` that it has."""
    scores = {method: dict.fromkeys(SETS) | dict(zip(SETS, each, strict=False)) for method, each in PUBLISHED.items()}
    rows = [{"": method} | each for method, each in scores.items()]
    columns = {"method": ("", "{}")} | {name: (name, "{:.2f}") for name in names if name in SETS}
    return report.table_of(rows, columns)


class InfiniteBench(Benchmark):
    """See the module's docstring. A set is a task in one window, `TASK-WINDOW`."""

    name = "infinitebench"
    what = "task, window"

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", default="hub", help="the folder of TASK.jsonl")
        parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"of {', '.join(PROMPTS)} (default: all)")
        add_numbers(parser, "--windows", WINDOWS, "tokens of a prompt (32768,65536,131072)")
        add_numbers(parser, "--made", None, "hide numbers at these lengths instead of reading files")
        parser.add_argument("--samples", type=int, default=10, help="of each length of --made (10)")
        add_limit(parser)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.tasks = list(dict.fromkeys(options.tasks or (HIDDEN if options.made else PROMPTS)))
        for task in self.tasks:
            check_name(f"--tasks {task}: no task of InfiniteBench here", task, PROMPTS)
            if options.made and task not in HIDDEN:
                raise ValueError(f"--made has no words for {task}, only for {', '.join(HIDDEN)}")
        check_least(options, samples=1)
        self.lengths = options.made or options.windows
        self.settings = {"made": options.samples} if options.made else {}
        self.title = "InfiniteBench" + (", hidden numbers made here" if options.made else "") + "."
        if not self.score_only:
            _ = self.samples  # read before any model is loaded

    @cached_property
    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """task -> its samples; none where they are made for a tokenizer."""
        return {} if self.options.made else {task: load_samples(self.options.data, task) for task in self.tasks}

    def read(self, folder: Path) -> dict[str, list[Row]]:
        found = read_sets(folder, [f"{task}-{n}" for n in self.lengths for task in self.tasks], {"label": (list,)})
        for name, rows in found.items():
            for row in rows if name.rpartition("-")[0] in HIDDEN else []:
                if not isinstance(row.get("kept"), bool):
                    raise ValueError(f"{folder}/{name}.jsonl: field 'kept' (true or false) of {row['key']} is missing")
        return found

    def window(self, tokenizer: PreTrainedTokenizerBase, task: str, length: int) -> int:
        """Tokens of a prompt: fewer than `length` where prompt, chat template and answer end the model's positions."""
        template = len(tokenise(tokenizer, as_chat(tokenizer, ""), False)) if tokenizer.chat_template else 0
        return length if self.room is None else min(length, self.room - template - MAX_NEW_TOKENS[task])

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Request]]]:
        for length in self.lengths:
            for task in self.tasks:
                found = self.samples.get(task) or made(tokenizer, task, length, self.options.samples)
                window = self.window(tokenizer, task, length)
                yield f"{task}-{length}", make_requests(tokenizer, task, found[: self.limit], window)

    def beyond(self, ckpt: str) -> str:
        if self.options.made or self.room is None or self.room >= max(self.lengths) + max(MAX_NEW_TOKENS.values()):
            return super().beyond(ckpt)
        name = Path(ckpt).resolve().name
        return f"{name} has {self.room} positions: windows that end beyond them with the answer are lowered."

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        found = self.own_scores(name, rows)
        percent = round(sum(found) / len(found), 2)
        if name.rpartition("-")[0] not in HIDDEN:
            return percent
        return {"score": percent, "ceiling": round(100 * sum(row["kept"] for row in rows) / len(rows), 2)}

    def own_scores(self, name: str, rows: Sequence[Row]) -> list[float]:
        task = name.rpartition("-")[0]
        return [100 * metrics.infinitebench(task, row["pred"], row["label"]) for row in rows]

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        cells = [one["score"] if isinstance(one, dict) else one for one in scores.values()]
        return {f"mean of {len(cells)}": round(sum(cells) / len(cells), 2)}

    def table(self, scores: dict[str, Score], counts: dict[str, int]) -> str:
        rows = []
        for name, one in scores.items():
            task, _, length = name.rpartition("-")
            value, ceiling = (one["score"], f"{one['ceiling']:.2f}") if isinstance(one, dict) else (one, "")
            rows.append([task, length, str(counts[name]), f"{value:.2f}", ceiling])
        rows += [[mean, "", "", f"{value:.2f}", ""] for mean, value in self.aggregate(scores).items()]
        table = report.markdown_table(["task", "window", "samples", "score", "ceiling by truncation"], rows)
        if not self.options.made:
            table += f"\n\nPublished (arXiv 2412.02252, LLaMA3.1-8B):\n\n{published_table(list(scores))}"
        return table


main = command(InfiniteBench, __doc__)
