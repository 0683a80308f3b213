"""RULER (Hsieh et al. 2024): 13 synthetic tasks at any length, made from a seed.

    python eval/ruler.py --ckpt exports/llama3-32k --haystack essays.txt --lengths 4096 8192 16384 32768
    python eval/ruler.py --ckpt exports/tiny --tasks niah_single_1 --lengths 1024 2048 --samples 20
    python eval/ruler.py --ckpt exports/dense exports/tiny --tasks vt --eviction snapkv:budget=256+cake:budget=256
    python eval/ruler.py --ckpt exports/llama3-32k --prepared RULER/benchmark_root/llama3/synthetic/32768/data
    torchrun --nproc-per-node 8 eval/ruler.py --ckpt exports/llama3-32k --tasks vt cwe fwe --lengths 131072

Predictions are written to --out as they come; the same command goes on where a killed run stopped. When all are there,
the table is printed and written as `scores.json`, `scores.md` and `scores.png`. Each method of --eviction has its own
folder in --out, laid out as --out itself, and so has each of several models; one table compares them all
(`comparison.md`). Five needle tasks hide their needles in --haystack; qa_1 and qa_2 need the files of SQuAD 2.0 and
HotpotQA (distractor setting). A model that knows no English question, as the demo's, can be asked in a phrase of
`eval/passkey.py` (--phrase); the table then says that this is not the benchmark's wording.

Eight needle tasks, variable tracking, common words, frequent words; and question answering over many documents when the
files of SQuAD 2.0 and HotpotQA are given.

--prepared takes the files that the authors' scripts wrote, TASK/validation.jsonl, as they are: their chat template is
in them, so none is put around them, and no second begin-of-text token before them. Otherwise samples are made here,
with words of wonderwords, as the authors have it, where that is installed, else of a smaller list.

A prompt is filled up to its length in whole words: the last line of the haystack is usually cut short, where the
authors' scripts leave up to one whole line empty. Prompts of 1K tokens are then within 2 % too.

A needle task that asks for one value can be worded in a phrase of `pod.evaluation.passkey` instead, for a model that
knows no English question (`phrase`). Such scores are not the benchmark's, and whoever prints them says so.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics, report
from pod.evaluation.benchmark import Benchmark, Row, Score, add_limit, command
from pod.evaluation.command import add_numbers
from pod.evaluation.haystack import Haystack, fit
from pod.evaluation.lines import Fields, check_fields, check_name, read_lines
from pod.evaluation.passkey import PHRASES
from pod.evaluation.questions import Questions, read_hotpotqa, read_squad
from pod.evaluation.ruler_tasks import REVISION, TASKS, VERBS, Made, Setting
from pod.evaluation.runner import Request, as_chat, question_at, tokenise
from pod.evaluation.texts import read_text, text_hash
from pod.files import digest

PREPARED: Fields = {"input": (str,), "outputs": (list,), "length": (int,)}
# How the question of a prepared prompt begins; that of other tasks with `Question:`.
_ASKED_BY = {"niah": "\nWhat ", "qa": "\n\nAnswer the question based on the given documents."}
_PHRASE_NEW_TOKENS = 48  # a phrase is answered by the value at once; a uuid takes 36 bytes


def resolve_tasks(names: Sequence[str] | None, given: set[str], phrase: str | None = None) -> list[str]:
    """The named tasks; without names, all that can be made from what is given.

    Args:
        names: of `ruler_tasks.TASKS`.
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
        check_name(f"{name!r} is no task of RULER", name, TASKS)
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
        source: a `Haystack` for the tasks that need one, `questions.read_squad`'s for qa_1, `read_hotpotqa`'s for qa_2.
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
        return as_chat(tokenizer, made.context + made.question) + made.prefix

    def count(text: str, special_tokens: bool = False) -> int:
        return len(tokenise(tokenizer, text, special_tokens))

    requests = []
    for index in range(samples):
        setting = Setting(index, length, length - new_tokens, count, source, phrase)

        def make(size: int, setting: Setting = setting) -> tuple[int, Made]:
            made = kind.make(random.Random(f"{seed} {task} {length} {setting.index}"), size, setting)
            return count(prompt(made), not chat), made

        tokens, made = fit(make, setting.room)
        if tokens > setting.room or not kind.is_answered(made):
            need = f"at least {tokens + new_tokens} tokens" if tokens > setting.room else "more tokens"
            raise ValueError(f"{task} does not fit into {length} tokens with this tokenizer: {need} are needed")
        text = prompt(made)
        requests.append(
            Request(
                key=str(index),
                text=text,
                max_new_tokens=new_tokens,
                special_tokens=not chat,
                question_at=question_at(text, made.question or made.prefix),
                record={"answers": made.answers, "tokens": tokens + new_tokens},
            )
        )
    return requests


def read_prepared(folder: Path, task: str) -> list[dict[str, Any]]:
    """The lines of `TASK/validation.jsonl`, as the authors' scripts write them.

    Raises:
        ValueError: the file is missing or not as the format says, with file, line and field.
    """
    lines = read_lines(folder / task / "validation.jsonl", PREPARED, "--prepared")
    for place, line in lines:
        # Before 48cbc8b (2025-05-13) there was no such field, and `input` ends in the prefix.
        check_fields(place, {"answer_prefix": "", **line}, {"answer_prefix": (str,)})
        if not line["outputs"]:
            raise ValueError(f"{place}: field 'outputs' is empty")
    return [line for _, line in lines]


def prepared_requests(tokenizer: PreTrainedTokenizerBase, task: str, lines: Sequence[dict[str, Any]]) -> list[Request]:
    """The prompts of one task's prepared lines, numbered here, as `index` is none."""
    bos = tokenizer.bos_token
    requests = []
    for number, line in enumerate(lines):
        text = line["input"] + line.get("answer_prefix", "")
        place = text.rfind(_ASKED_BY.get(task.partition("_")[0], "\nQuestion:"))
        requests.append(
            Request(
                key=str(number),
                text=text,
                max_new_tokens=TASKS[task].max_new_tokens,
                special_tokens=not (bos and text.startswith(bos)),
                question_at=place if place > 0 else None,
                record={"answers": line["outputs"], "tokens": line["length"]},
            )
        )
    return requests


def score(task: str, rows: Sequence[dict[str, Any]]) -> float:
    """0..100 of one task's predictions, rows `{"pred", "answers"}` as the runner writes them."""
    return metrics.ruler([row["pred"] for row in rows], [row["answers"] for row in rows], TASKS[task].match)


class Ruler(Benchmark):
    """See the module's docstring. A set is a task at one length, `TASK-LENGTH`."""

    name = "ruler"
    what = "task, tokens"

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--tasks",
            nargs="+",
            metavar="TASK",
            help=f"of {', '.join(TASKS)} (default: all whose files are given)",
        )
        add_numbers(
            parser, "--lengths", [4096, 8192, 16384, 32768], "tokens of prompt and answer together (4096,...,32768)"
        )
        parser.add_argument("--samples", type=int, default=100, help="per task and length (100; the authors: 500)")
        parser.add_argument(
            "--phrase",
            choices=list(PHRASES),
            help="needle tasks of one value in eval/passkey.py's words, names of two letters, numbers of five digits; "
            "default: the benchmark's",
        )
        parser.add_argument("--haystack", type=Path, help="a UTF-8 file with any long text")
        parser.add_argument("--squad", type=Path, help="SQuAD 2.0's dev-v2.0.json, for qa_1")
        parser.add_argument("--hotpotqa", type=Path, help="HotpotQA's hotpot_dev_distractor_v1.json, for qa_2")
        parser.add_argument("--prepared", type=Path, help="a folder of the authors' TASK/validation.jsonl")
        add_limit(parser)
        parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.lengths = list(dict.fromkeys(options.lengths))
        self.prepared: dict[str, list[dict[str, Any]]] = {}
        if getattr(options, "prepared", None) is not None:
            self._read_prepared(options)
            return
        files = {"haystack": options.haystack, "squad": options.squad, "hotpotqa": options.hotpotqa}
        given = {name for name, path in files.items() if path is not None}
        self.tasks = resolve_tasks(options.tasks, given, options.phrase)
        read = {"haystack": lambda path: Haystack(read_text(path, "--haystack"))}
        read |= {"squad": read_squad, "hotpotqa": read_hotpotqa}
        self.sources = {need: read[need](files[need]) for need in {TASKS[task].needs for task in self.tasks} - {None}}
        self.settings = {name: digest(files[name]) for name in sorted(self.sources)}
        self.settings |= {"seed": options.seed} | ({} if options.phrase is None else {"phrase": options.phrase})
        self.settings |= {"revision": REVISION} | ({"words": "wonderwords"} if VERBS else {})
        self.title = f"RULER, {options.samples} samples each"
        if options.phrase is not None:
            stated, asked = (part.strip() for part in PHRASES[options.phrase])
            self.title += f", not in its own words: stated as `{stated}`, asked for as `{asked}`"
        self.title += "."

    def _read_prepared(self, options: argparse.Namespace) -> None:
        """Take tasks, lengths and samples from the authors' files."""
        if options.phrase is not None:
            raise ValueError("--phrase words samples that are made here, not those of --prepared")
        there = [name for name in TASKS if (options.prepared / name / "validation.jsonl").is_file()]
        self.tasks = resolve_tasks(options.tasks or there, {"haystack", "squad", "hotpotqa"})
        if not self.tasks:
            raise ValueError(f"--prepared {options.prepared}: no TASK/validation.jsonl is there ({', '.join(TASKS)})")
        self.prepared = {task: read_prepared(options.prepared, task)[: self.limit] for task in self.tasks}
        self.lengths = [max(line["length"] for lines in self.prepared.values() for line in lines)]
        self.settings = {"prepared": text_hash(repr(self.prepared))}
        self.title = "RULER, prepared by its authors' scripts."

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[Request]]]:
        if self.prepared:
            (length,) = self.lengths
            return [
                (f"{task}-{length}", prepared_requests(tokenizer, task, lines)) for task, lines in self.prepared.items()
            ]
        # All at once: a task that does not fit into one of the lengths is refused before the work.
        asked = {name: getattr(self.options, name) for name in ("samples", "seed", "phrase")}
        sources = {task: self.sources.get(TASKS[task].needs) for task in self.tasks}
        return [
            (f"{task}-{n}", make_requests(tokenizer, task, n, source=sources[task], **asked)[: self.limit])
            for n in self.lengths
            for task in self.tasks
        ]

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        return score(name.rpartition("-")[0], rows)

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        return {f"average, {n}": sum(self._column(scores, n)) / len(self.tasks) for n in self.lengths}

    def _column(self, scores: dict[str, Score], length: int) -> list[float]:
        return [scores[f"{task}-{length}"] for task in self.tasks]

    def compared(self, scores: dict[str, Score]) -> dict[str, float | None]:
        lines = {f"{task}, {n}": scores[f"{task}-{n}"] for task in self.tasks for n in self.lengths}
        return lines | self.aggregate(scores)

    def write(self, scores: dict[str, Score], counts: dict[str, int], folder: Path) -> None:
        rows = {task: {n: scores[f"{task}-{n}"] for n in self.lengths} for task in self.tasks}
        averages = dict(zip(self.lengths, self.aggregate(scores).values(), strict=True))
        names = [str(length) for length in self.lengths]
        lines = rows | ({"average": averages} if len(rows) > 1 else {})
        table = report.markdown_table(
            ["task", *names], [[name, *(f"{value:.2f}" for value in row.values())] for name, row in lines.items()]
        )
        made = {"samples": self.options.samples, "seed": self.options.seed, "revision": REVISION}
        if self.prepared:
            made = {"samples": counts, "prepared": str(self.options.prepared)}
        result = made | {"scores": rows, "averages": averages}
        report.write_json(folder / "scores.json", result)
        said = "prepared by the authors' scripts" if self.prepared else f"as of NVIDIA/RULER at {REVISION}"
        table += f"\n\nPrompts {said}."
        report.write(folder / "scores.md", table + "\n")
        report.save_heat_map(
            folder / "scores.png",
            [list(row.values()) for row in rows.values()],
            list(rows),
            names,
            title=self.title[:-1],
            xlabel="tokens of prompt and answer",
            ylabel="task",
        )
        print(table)
        print(f"written: {folder}/scores.json, scores.md, scores.png")


main = command(Ruler, __doc__)
