"""LongBench v1 and LongBench-E, scored as their authors score them.

    python eval/longbench.py --ckpt exports/llama3-32k --data longbench/ --tasks pod
    torchrun --nproc-per-node 8 eval/longbench.py --ckpt exports/llama3-32k --batch-size 4
    python eval/longbench.py --ckpt exports/llama3-32k --tasks pod --eviction snapkv:budget=1024+cake:budget=1024
    python eval/longbench.py --out runs/longbench/llama3-32k --score-only

Predictions are written to --out as they come; the same command goes on where a killed run stopped. When all are there,
the scores are printed and written to `scores.json`, and the bytes that the cache of the longest prompt takes to
`cache.json`; `eval/report.py` makes one table of several runs. Each method of --eviction has its own folder in --out,
laid out as --out itself, and so has each of several models; a table compares them (`comparison.md`).

The prompts are the benchmark's own (Bai et al. 2024, MIT licence), byte for byte: a model's score moves by points when
a blank changes, so their odd spellings and their trailing newlines stay.
"""

import argparse
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics, report
from pod.evaluation.benchmark import Benchmark, Row, Score, add_limit, command, resolve_sets
from pod.evaluation.lines import Fields, check_fields, parse_lines
from pod.evaluation.runner import Predictions, Request, asked_last, tokenise
from pod.evaluation.texts import text_hash

_MULTI_DOCUMENT = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n"
        " Answer the question based on the above article as concisely as you can, using a single phrase or sentence if "
        "possible. If the question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _MULTI_DOCUMENT,
    "2wikimqa": _MULTI_DOCUMENT,
    "musique": _MULTI_DOCUMENT,
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答："
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"
    ),
    "vcsum": "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format should only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}
MAX_NEW_TOKENS = {
    name: tokens
    for tokens, names in {
        32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en passage_retrieval_zh",
        64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
        128: "narrativeqa qasper dureader samsum",
        512: "gov_report qmsum multi_news vcsum",
    }.items()
    for name in names.split()
}
# These continue a pattern of examples or code, which a chat template would interrupt.
NO_CHAT_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})

# The columns of PoD's Table 1; synthetic tasks and Chinese sets are not in it.
CATEGORIES = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "code": ("lcc", "repobench-p"),
}
_POD = tuple(name for names in CATEGORIES.values() for name in names)
_E = "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count"
GROUPS = {
    "all": tuple(PROMPTS),
    "pod": _POD,
    "cake": (*_POD, "passage_count", "passage_retrieval_en"),
    "e": tuple(f"{name}_e" for name in (*_E.split(), "passage_retrieval_en", "lcc", "repobench-p")),
}
TASKS = (*GROUPS["all"], *GROUPS["e"])

# What the runner and the metrics read, with the types that a line must have.
FIELDS: Fields = {
    "input": (str,),
    "context": (str,),
    "answers": (list,),
    "length": (int,),
    "all_classes": (list, type(None)),
    "_id": (str,),
}
HUB_DATASET = "THUDM/LongBench"
BOTH = "prefilling & decoding"
# arXiv 2412.02252, Tables 1 and 4: method, window, category scores, average, KV saving, degradation, stage.
PUBLISHED = (
    ("LLaMA3-8B-32K", "32K", 32.94, 32.23, 25.41, 69.30, 66.54, 45.28, None, None, ""),
    ("SnapKV", "4K", 31.76, 31.85, 21.92, 68.62, 66.72, 44.17, 87.5, 4.3, "prefilling"),
    ("PyramidKV", "4K", 33.34, 31.51, 23.76, 68.91, 66.36, 44.78, 93.6, 3.4, "prefilling"),
    ("Quest", "4K", 32.14, 32.19, 24.27, 69.05, 66.43, 44.82, 0.0, 1.4, BOTH),
    ("LM-Infinite", "16+4080", 28.83, 28.95, 21.74, 68.12, 66.54, 42.84, 87.5, 7.7, BOTH),
    ("StreamingLLM", "16+4080", 28.68, 28.95, 21.64, 68.14, 66.60, 42.80, 87.5, 8.0, BOTH),
    ("H2O", "96+4000", 29.36, 29.51, 22.73, 68.45, 66.17, 43.24, 87.5, 7.4, BOTH),
    ("window attention", "4K", 8.90, 3.63, 9.05, 11.13, 41.08, 14.76, 87.5, 65.9, BOTH),
    ("window attention, trained", "4K", 26.94, 27.95, 22.29, 66.60, 66.10, 41.97, 87.5, 12.6, BOTH),
    ("CLA", "32K", 24.02, 22.58, 22.50, 60.92, 59.35, 37.87, 50.0, 31.4, BOTH),
    ("PoD", "16+4080+28K", 30.97, 32.43, 24.82, 67.30, 68.26, 44.75, 35.0, 2.8, BOTH),
    ("PoD + SnapKV", "4K", 30.98, 32.68, 22.90, 66.90, 67.79, 44.25, 91.9, 3.1, BOTH),
)


def resolve_tasks(names: Sequence[str]) -> list[str]:
    """The sets that names and names of groups stand for, each once.

    Raises:
        ValueError: an unknown name, with the closest valid one.
    """
    return resolve_sets(names, GROUPS, TASKS, "LongBench")


def load_samples(data: str, task: str) -> list[dict[str, Any]]:
    """The samples of one set, in their order.

    Args:
        data: a directory with `TASK.jsonl` or `data/TASK.jsonl` or `data.zip`; such a zip file; or "hub" for the
            data.zip of the benchmark's own repository on the Hugging Face hub.
        task: one of `TASKS`.

    Returns:
        Dictionaries with the fields of `FIELDS` and whatever else a line has.

    Raises:
        ValueError: nothing there, or a line that is not as the format says, with file, line and field.
    """
    samples = []
    for place, sample in parse_lines(*_file(data, task), FIELDS):
        _check_answers(place, sample, task)
        samples.append(sample)
    if not samples:
        raise ValueError(f"{data}: {task}.jsonl has no samples")
    return samples


def check_prediction(place: str, row: dict[str, Any], task: str) -> None:
    """Refuse a prediction that cannot be scored, be it ours or of the authors' scripts.

    Args:
        place: file:line.
        row: `{"pred", "answers", "all_classes"}`, and "length" in a LongBench-E set.
        task: one of `TASKS`.

    Raises:
        ValueError: a field is missing or has a wrong type or value; names the place and the field.
    """
    names = ["answers", "all_classes", *(["length"] if task.endswith("_e") else [])]
    check_fields(place, row, {name: FIELDS[name] for name in names})
    _check_answers(place, row, task)


def _check_answers(place: str, line: dict[str, Any], task: str) -> None:
    """Refuse a line that the set's metric cannot score."""
    metric = metrics.METRIC_OF[task.removesuffix("_e")]
    if metric == "classification" and not line["all_classes"]:
        raise ValueError(f"{place}: field 'all_classes' must name the classes of {task}, got {line['all_classes']}")
    for answer in line["answers"] if metric == "retrieval" else []:
        if metrics.PARAGRAPH.search(answer) is None:
            raise ValueError(f"{place}: field 'answers' of {task} must read 'Paragraph 7' or '段落7', got {answer!r}")


def _file(data: str, task: str) -> tuple[str, bytes]:
    """(name for errors, content) of a set's file."""
    path = Path(_download() if data == "hub" else data)
    file_name = f"{task}.jsonl"
    plain = [folder / file_name for folder in (path, path / "data") if (folder / file_name).is_file()]
    archive = path if path.suffix == ".zip" and path.is_file() else path / "data.zip"
    if plain:
        return str(plain[0]), plain[0].read_bytes()
    if not archive.is_file():
        raise ValueError(f"--data {data}: neither {file_name}, data/{file_name} nor data.zip is there")
    try:
        with zipfile.ZipFile(archive) as opened:
            inside = [entry for entry in opened.namelist() if Path(entry).name == file_name]
            if not inside:
                raise ValueError(f"{archive}: no {file_name} in the archive")
            return f"{archive}/{inside[0]}", opened.read(inside[0])
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive}: no zip file, or damaged ({error})") from error


def _download() -> str:
    from huggingface_hub import hf_hub_download  # only when the hub is asked for

    try:
        return hf_hub_download(HUB_DATASET, "data.zip", repo_type="dataset")
    except Exception as error:
        raise ValueError(
            f"--data hub: {HUB_DATASET}'s data.zip cannot be fetched ({error}). Fetch it elsewhere and give --data DIR"
        ) from error


def truncate(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> str:
    """The text, or its first and last int(max_length / 2) tokens where it has more than max_length.

    Both ends are decoded without special tokens and joined as text. Tokenised again, that may be more or fewer tokens:
    the authors' scripts have it so, and what is measured with them has it too.

    Raises:
        ValueError: max_length is below 2.
    """
    if max_length < 2:
        raise ValueError(f"--max-length must be at least 2 tokens, got {max_length}")
    ids = tokenise(tokenizer, text)
    if len(ids) <= max_length:
        return text
    half = int(max_length / 2)
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    samples: Sequence[dict[str, Any]],
    max_length: int = 31500,
) -> list[Request]:
    """The prompts of one set: filled in, truncated in the middle, then put into the chat template where there is one.

    Args:
        tokenizer: the model's; without a chat template (a base model) prompts are plain text.
        task: one of `TASKS`.
        samples: as `load_samples` gives them.
        max_length: tokens of a prompt before the chat template.

    Raises:
        ValueError: max_length too small.
    """
    name = task.removesuffix("_e")
    chat = bool(tokenizer.chat_template) and name not in NO_CHAT_TEMPLATE
    requests = []
    for index, sample in enumerate(samples):
        filled = PROMPTS[name].format(context=sample["context"], input=sample["input"])
        asked = PROMPTS[name].split("{context}")[1].format(input=sample["input"])
        text, place = asked_last(tokenizer, truncate(tokenizer, filled, max_length), asked, chat)
        requests.append(
            Request(
                key=str(index),
                text=text,
                max_new_tokens=MAX_NEW_TOKENS[name],
                special_tokens=not chat,
                stop_at_newline=name == "samsum",
                question_at=place,
                record={field: sample[field] for field in ("answers", "all_classes", "length", "_id")}
                | {"prompt": text_hash(filled)},
            )
        )
    return requests


def score(task: str, rows: Sequence[dict[str, Any]]) -> float | dict[str, float | None]:
    """The score 0..100 of one set's predictions; of a LongBench-E set, one per length.

    Args:
        task: one of `TASKS`.
        rows: `{"pred", "answers", "all_classes", "length"}`, as the runner and the authors' scripts write them.

    Raises:
        ValueError: a row without these fields, nothing to score.
        ImportError: a Chinese set without jieba.
    """
    for number, row in enumerate(rows, start=1):
        for name in ("pred", "answers", "all_classes", *(["length"] if task.endswith("_e") else [])):
            if name not in row:
                raise ValueError(f"prediction {number} of {task}: field {name!r} is missing")
    if not rows:
        raise ValueError(f"{task}: no predictions, so there is nothing to score")
    predictions, answers = [row["pred"] for row in rows], [row["answers"] for row in rows]
    if task.endswith("_e"):
        return metrics.longbench_e(task, predictions, answers, [row["length"] for row in rows], rows[-1]["all_classes"])
    return metrics.longbench(task, predictions, answers, rows[-1]["all_classes"])


def averages(scores: dict[str, Any]) -> dict[str, float | None]:
    """The means that papers print, from the sets' scores; None where one of its sets is missing.

    Returns:
        The five category means of PoD's Table 1, "PoD average" (the mean of these five) and "CAKE average" (the mean
        over 16 sets).
    """

    def mean(names: Sequence[str], of: dict[str, Any]) -> float | None:
        values = [of.get(name) for name in names]
        return None if None in values else sum(values) / len(values)

    categories = {category: mean(names, scores) for category, names in CATEGORIES.items()}
    found = categories | {"PoD average": mean(list(CATEGORIES), categories)}
    found["CAKE average"] = mean(GROUPS["cake"], scores)
    return {name: None if value is None else round(value, 2) for name, value in found.items()}


class LongBench(Benchmark):
    """See the module's docstring."""

    name = "longbench"
    weighs_cache = True
    asks_beyond = 1  # the answer

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--data",
            default="hub",
            help="a directory with TASK.jsonl files or the benchmark's data.zip, or 'hub' to fetch it (default: hub)",
        )
        parser.add_argument(
            "--tasks",
            nargs="+",
            metavar="TASK",
            help=f"sets, or groups: all (21, the default), e (LongBench-E), pod (14), cake (16). "
            f"Sets: {', '.join(GROUPS['all'])}",
        )
        parser.add_argument("--max-length", type=int, default=31500, help="tokens of a prompt (default: 31500)")
        add_limit(parser)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.settings = {"max_length": options.max_length}
        self.lengths = [options.max_length]
        self.tasks = resolve_tasks(options.tasks or (["all", "e"] if options.score_only else ["all"]))
        if not options.score_only:
            _check_segmentation(self.tasks)
            self.samples = {task: load_samples(options.data, task) for task in self.tasks}

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Request]]]:
        for task, samples in self.samples.items():
            yield task, make_requests(tokenizer, task, samples[: self.limit], self.options.max_length)

    def read(self, folder: Path) -> dict[str, list[Row]]:
        rows = {}
        for task in self.tasks:
            check = partial(check_prediction, task=task)
            rows[task] = list(Predictions(folder, task).read(check).values())
        missing = [task for task in self.tasks if not rows[task]]
        if missing and (self.options.tasks or len(missing) == len(self.tasks)):
            raise ValueError(f"--out {folder}: no predictions of {', '.join(missing)}")
        rows = {task: found for task, found in rows.items() if found}
        _check_segmentation(rows)
        return rows

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        return score(name, rows)

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        return averages({name: value for name, value in scores.items() if not isinstance(value, dict)})

    def table(self, scores: dict[str, Score], counts: dict[str, int]) -> str:
        by_length = {name: value for name, value in scores.items() if isinstance(value, dict)}
        plain = {name: value for name, value in scores.items() if name not in by_length}
        tables = [super().table(plain, counts)] if plain else []
        if by_length:
            rows = [
                [name, str(counts[name]), *("-" if value is None else f"{value:.2f}" for value in found.values())]
                for name, found in by_length.items()
            ]
            tables.append(report.markdown_table(["set", "samples", *metrics.LENGTH_BUCKETS], rows))
        return "\n\n".join(tables)


def _check_segmentation(tasks: Iterable[str]) -> None:
    """Say before the work, not after it, that the Chinese sets cannot be scored."""
    if any(task in metrics.NEEDS_SEGMENTATION for task in tasks):
        metrics.jieba_segment()


main = command(LongBench, __doc__)
