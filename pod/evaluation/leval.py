"""L-Eval (An et al. 2023): exams, questions and summaries of long documents, 20 sets, scored by rule.

    python eval/leval.py --ckpt exports/llama3-32k --data LEval-data/
    python eval/leval.py --ckpt exports/llama3-32k --data LEval-data/ --tasks coursera quality --max-length 16
    python eval/leval.py --ckpt exports/llama3-32k --data LEval-data/ --tasks QA --eviction snapkv:budget=4096

--data is the benchmark's folder, with `Closed-ended-tasks/NAME.jsonl` and `Open-ended-tasks/NAME.jsonl`, or one with
NAME.jsonl. Only lines whose `evaluation` is exam, f1 or rouge are asked. The document alone is truncated, to
--max-length thousand tokens less 512: its first words stay, of codeU the last. sci_fi asks again without the document,
so half of its score touches no long cache. Of summaries the geometric mean of three ROUGEs and ROUGE-L are printed, of
the Closed sets the mean with and without topic_retrieval_longchat: which of them PoD's Table 1 has is not stated.
Predictions are written to --out as they come; the same command goes on where a killed run stopped. Each method of
--eviction has its own folder in --out, and so has each of several models; a table compares them (`comparison.md`).

The prompts are those of the benchmark's Llama-2 script, byte for byte (commit cd34b05). The chat template has its
system message; a base model reads system message and question, and `Answer:` opens its answer. Greedy, 512 new tokens.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics
from pod.evaluation.benchmark import Benchmark, Row, Score, add_limit, command, read_sets, resolve_sets
from pod.evaluation.lines import Fields, read_lines
from pod.evaluation.metrics.l_eval import GROUPS, SETS
from pod.evaluation.runner import Request, as_chat, question_at, tokenise
from pod.evaluation.texts import text_hash

_VERY_LONG = "Now you are given a very long document. Please follow the instruction "
_LETTER = " Please only provide the letter corresponding to the answer (like "
_CHOICE = (
    f"{_VERY_LONG}based on this document. For multi-choice questions, there is only a sinlge correct option.{_LETTER}A "
    "or B) when answering. For other questions, please directly give the concise and accurate answer. "
)
_OPEN = (
    f"{_VERY_LONG}after this document. These instructions may include summarizing a document, answering questions "
    "based on the document, or writing a required paragraph. "
)
SYSTEM = dict.fromkeys(SETS, _OPEN) | {
    "gsm100": (
        "Given several question answer pairs, you need to follow a similar format to answer the last question. Make "
        "sure the response is end with The answer is _ . "
    ),
    "topic_retrieval_longchat": (
        "Below is a record of our previous conversation on many different topics. You are the ASSISTANT, and I am the "
        "USER. At the beginning of each topic, the USER will say 'I would like to discuss the topic of <TOPIC>'. "
        "Memorize each <TOPIC>. At the end of the record, I will ask you to retrieve the first/second/third topic "
        "names. Now the record start. "
    ),
    "coursera": (
        f"{_VERY_LONG}based on this document. For multi-choice questions, there could be a sinlge correct option or "
        f"multiple correct options.{_LETTER}A or AB) when answering. "
    ),
    "codeU": (
        "Now you are given a code base consisting of a large amount of functions and the corresponding comments. In "
        "the end, I will call some functions defined in the code base. Please carefully read these codes and comments "
        "and answer the question."
    ),
    "sci_fi": (
        "Now you are given a scientific fiction. I will ask you some questions and the answer should be "
        '"True" or "False". Notice that you should answer the question based on the evidence in the document instead '
        "of your background knowledge."
    ),
    "quality": _CHOICE,
    "tpo": _CHOICE,
}
BARE = frozenset({"gsm100", "codeU", "topic_retrieval_longchat"})  # the instruction follows the document as it is
_ASKED = {
    "bare": ("", "\n\n{inst}"),
    "Closed": (
        "Document is as follows. ",
        " \nQuestion: {inst}.  Please directly give the answer without any additional output or explanation ",
    ),
    "open": ("Document is as follows. ", " Instruction: {inst} \nAnswer this question with {n} words."),
}
_IN_DOCUMENT = "based on the world described in the document."
_IN_REALITY = "based on the real-world knowledge and facts up until your last training"
_FACT = "Please directly answer without any additional output or explanation. \nAnswer:"
ANSWER = "\nAnswer:"
MAX_NEW_TOKENS = 512
SCORED = ("exam", "f1", "rouge")
FIELDS: Fields = {"input": (str,), "instructions": (list,), "outputs": (list,), "evaluation": (str,)}
# arXiv 2412.02252, Table 1 (LLaMA3-8B-32K): Closed, QA, Summ, the mean of the three.
PUBLISHED = {
    "dense": (42.10, 24.68, 15.55, 27.45),
    "SnapKV": (39.86, 23.90, 13.53, 25.76),
    "PyramidKV": (42.10, 22.63, 12.96, 25.90),
    "Quest": (40.55, 25.59, 14.69, 26.94),
    "LM-Infinite": (37.32, 22.80, 13.91, 24.68),
    "StreamingLLM": (37.12, 22.79, 13.81, 24.57),
    "H2O": (37.15, 23.18, 13.48, 24.60),
    "WA": (20.95, 5.57, 2.79, 9.77),
    "WA + CPT": (32.94, 22.09, 12.55, 22.52),
    "CLA": (19.05, 13.52, 11.52, 14.70),
    "PoD": (43.59, 22.95, 15.00, 27.18),
    "PoD + SnapKV": (43.07, 22.12, 14.32, 26.50),
}


def resolve_tasks(names: Sequence[str]) -> list[str]:
    """The sets that names and names of groups stand for, each once.

    Raises:
        ValueError: an unknown name, with the closest valid one.
    """
    return resolve_sets(names, GROUPS, SETS, "L-Eval")


def load_samples(data: str, task: str) -> list[dict[str, Any]]:
    """The documents of one set that are scored by rule, in their order.

    Raises:
        ValueError: nothing there, or a line that is not as the format says, with file, line and field.
    """
    if data == "hub":
        raise ValueError("--data hub: get LEval-data of OpenLMLab/LEval, or L4NLP/LEval from the hub: --data DIR")
    kind = "Closed-ended-tasks" if task in GROUPS["Closed"] else "Open-ended-tasks"
    path = Path(data) / kind / f"{task}.jsonl"
    samples = []
    for place, line in read_lines(path if path.is_file() else Path(data) / f"{task}.jsonl", FIELDS):
        if len(line["instructions"]) != len(line["outputs"]):
            counts = f"{len(line['instructions'])} texts but field 'outputs' {len(line['outputs'])}"
            raise ValueError(f"{place}: field 'instructions' has {counts}")
        for output in line["outputs"]:
            if not output.strip():
                raise ValueError(f"{place}: field 'outputs' has an empty text")
            if task == "sci_fi" and "[fact:" not in output:
                raise ValueError(f"{place}: field 'outputs' of sci_fi must read 'True [fact: False]', got {output!r}")
        if line["evaluation"] in SCORED:
            samples.append(line)
    if not samples:
        raise ValueError(f"{data}: no line of {task}.jsonl is scored by rule ({', '.join(SCORED)})")
    return samples


def truncate(tokenizer: PreTrainedTokenizerBase, task: str, document: str, most: int) -> str:
    """A document of at most `most` tokens: as many words of its beginning, then 250 fewer each time; of codeU its end.

    Where that would be fewer than no words, the authors' index turns round: so many words go from the other end.

    Raises:
        ValueError: `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"a document needs at least 1 token, got {most}: give a larger --max-length")
    fewer = 0
    while document and len(tokenise(tokenizer, document)) > most:
        pieces = document.split(" ")
        document = " ".join(pieces[fewer - most :] if task == "codeU" else pieces[: most - fewer])
        fewer += 250
    return document


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    samples: Sequence[dict[str, Any]],
    most: int = 31_488,
    limit: int | None = None,
) -> list[Request]:
    """The prompts of one set, one for each question, of sci_fi two; the record is {"reference", "prompt"}.

    Args:
        tokenizer: the model's.
        task: one of `SETS`.
        samples: as `load_samples` gives them.
        most: tokens of a document.
        limit: only so many questions, the first ones.
    """
    chat = bool(tokenizer.chat_template)
    group = "bare" if task in BARE else "Closed" if task in GROUPS["Closed"] else "open"
    opens = ANSWER if group == "Closed" or (group == "open" and not chat) else ""
    before, after = _ASKED[group]

    def pairs() -> Iterator[tuple[str, str, str]]:
        for sample in samples:
            document = truncate(tokenizer, task, sample["input"], most)
            for instruction, output in zip(sample["instructions"], sample["outputs"], strict=True):
                yield document, instruction, output

    requests: list[Request] = []
    for number, (document, instruction, output) in enumerate(islice(pairs(), limit)):
        asked = after.format(inst=instruction, n=len(output.split()))
        content = before + document + asked
        text = as_chat(tokenizer, content, SYSTEM[task]) + opens
        record = {"reference": output, "prompt": text_hash(SYSTEM[task] + content)}
        options = {"max_new_tokens": MAX_NEW_TOKENS, "record": record}
        place = question_at(text, asked.strip())
        requests.append(Request(str(number), text, special_tokens=not chat, question_at=place, **options))
        if task == "sci_fi":
            fact = instruction.replace(_IN_DOCUMENT, _IN_REALITY) + _FACT
            requests.append(Request(f"{number} fact", fact, question_at=len(fact) // 2, **options))
    return requests


def _turn(row: Row) -> tuple[int, str]:
    """Where a prediction stands in its set, as `make_requests` asks; those without a key keep their order."""
    number, _, again = str(row.get("key", 0)).partition(" ")
    return int(number), again


class LEval(Benchmark):
    """See the module's docstring."""

    name = "leval"
    published = PUBLISHED
    published_columns = ("Closed", "QA", "Summ", "Avg.")
    published_in = "arXiv 2412.02252, LLaMA3-8B-32K"
    asks_beyond = MAX_NEW_TOKENS

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", default="hub", help="the benchmark's folder LEval-data, or one of NAME.jsonl")
        parser.add_argument(
            "--tasks", nargs="+", metavar="TASK", default=list(GROUPS), help=", ".join((*GROUPS, *SETS))
        )
        what = "thousands of tokens, of which a document has 512 tokens less (default: 32)"
        parser.add_argument("--max-length", type=int, default=32, help=what)
        add_limit(parser)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if options.max_length < 1:
            raise ValueError(f"--max-length is in thousands of tokens: at least 1, got {options.max_length}")
        self.most = 1000 * options.max_length - MAX_NEW_TOKENS
        self.settings, self.lengths = {"max_length": options.max_length}, [self.most]
        self.tasks = resolve_tasks(options.tasks)
        if not self.score_only:
            self.samples = {task: load_samples(options.data, task) for task in self.tasks}

    def read(self, folder: Path) -> dict[str, list[Row]]:
        found = read_sets(folder, self.tasks, {"reference": (str,)})
        for rows in found.values():  # a run that did not end has written the longest prompts first
            rows.sort(key=_turn)
        numbers = [_turn(row)[0] for row in found.get("sci_fi", [])]
        if numbers[::2] != numbers[1::2]:
            raise ValueError(f"{folder}: each question of sci_fi is asked twice, and not all predictions are there")
        return found

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Request]]]:
        for task, samples in self.samples.items():
            yield task, make_requests(tokenizer, task, samples, self.most, self.limit)

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        predictions, references = [row["pred"] for row in rows], [row["reference"] for row in rows]
        if name == "sci_fi":  # each question was asked twice in a row
            both = zip(predictions[::2], predictions[1::2], strict=True)
            predictions, references = [f"{first} [fact: {second}]" for first, second in both], references[::2]
        if name in GROUPS["Summ"]:
            kinds = {"geometric mean": "geometric_mean", "rougeL": "rougeL"}
            return {said: metrics.leval(name, predictions, references, kind) for said, kind in kinds.items()}
        return metrics.leval(name, predictions, references)

    def own_scores(self, name: str, rows: Sequence[Row]) -> list[float]:
        return [] if name == "sci_fi" else super().own_scores(name, rows)  # a sample of it is two predictions

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        def mean(values: Sequence[float | None]) -> float | None:
            return None if None in values else round(sum(values) / len(values), 2)

        def of(names: Sequence[str], part: str = "") -> float | None:
            found = [scores.get(name) for name in names]
            return mean([one[part] if isinstance(one, dict) else one for one in found])

        closed, questions = of(GROUPS["Closed"]), of(GROUPS["QA"])
        six = of([name for name in GROUPS["Closed"] if name != "topic_retrieval_longchat"])
        means = {"Closed, 7 sets": closed, "Closed, 6 sets (no topic)": six, "QA": questions}
        for part in ("geometric mean", "rougeL"):
            means[f"Summ, {part}"] = of(GROUPS["Summ"], part)
        for part in ("geometric mean", "rougeL"):
            means[f"Avg. of Closed (7), QA, Summ ({part})"] = mean([closed, questions, means[f"Summ, {part}"]])
        return means

    def table(self, scores: dict[str, Score], counts: dict[str, int]) -> str:
        return super().table(scores, counts | {"sci_fi": counts.get("sci_fi", 0) // 2})


main = command(LEval, __doc__)
