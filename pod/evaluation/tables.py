"""The papers' tables beside ours: what each takes from a benchmark's scores, and the rows that were published.

`runs.py` prints a table for every benchmark of which it is given a run. PG19's is printed by `pg19.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pod.evaluation import infinitebench, leval, needlebench
from pod.evaluation.longbench import CATEGORIES

Scores = Mapping[str, Any]  # of a set: a number, or numbers by part; null where there is none
LEVAL_AVERAGE = "Avg. of Closed (7), QA, Summ (rougeL)"
# arXiv 2406.17808, Table 7: narrativeqa .. gov_report, mean.
_CASCADE_SETS = ("narrativeqa", "hotpotqa", "qasper", "multi_news", "2wikimqa", "gov_report")


@dataclass(frozen=True)
class Table:
    """One paper's table.

    Attributes:
        title: of the table.
        benchmark: whose runs are its rows.
        columns: headings; the last one is the average by which runs are compared. None: every set of the runs, and
            the mean of those.
        values: (scores, averages) of a run -> column -> score.
        published: row -> column -> score.
        notes: what has to be known to read it.
    """

    title: str
    benchmark: str
    columns: tuple[str, ...] | None
    values: Callable[[Scores, Scores], dict[str, float | None]]
    published: dict[str, dict[str, float]]
    notes: tuple[str, ...]

    def headings(self, rows: Sequence[Mapping[str, float | None]]) -> list[str]:
        """The columns, with rows of these values."""
        if self.columns is not None:
            return list(self.columns)
        names = list(dict.fromkeys(name for row in rows for name in row))
        return [*names, f"mean of {len(names)}"]

    def row(self, values: Mapping[str, float | None], headings: Sequence[str]) -> list[float | None]:
        """A row's cells; None where a value is missing, and for a mean of which one is."""
        if self.columns is not None:
            return [values.get(name) for name in headings]
        found = [values.get(name) for name in headings[:-1]]
        return [*found, None if None in found else sum(found) / len(found)]


def _of_averages(names: Mapping[str, str]) -> Callable[[Scores, Scores], dict[str, float | None]]:
    """heading -> name of an average."""
    return lambda _, averages: {heading: averages.get(name) for heading, name in names.items()}


def _score(value: Any) -> float | None:
    return value.get("score") if isinstance(value, dict) else value


def _of_sets(names: Sequence[str], mean: str) -> Callable[[Scores, Scores], dict[str, float | None]]:
    def values(scores: Scores, _: Scores) -> dict[str, float | None]:
        found = {name: _score(scores.get(name)) for name in names}
        return found | {mean: None if None in found.values() else sum(found.values()) / len(found)}

    return values


def _rows(columns: Sequence[str], text: str) -> dict[str, dict[str, float]]:
    """`name: numbers` a line, those at the end of a line may be missing."""
    lines = (line.split(": ") for line in text.splitlines())
    return {name: dict(zip(columns, map(float, numbers.split()), strict=False)) for name, numbers in lines}


_LEVAL = {"Closed": "Closed, 7 sets", "QA": "QA", "Summ": "Summ, rougeL", "Avg.": LEVAL_AVERAGE}
_NEEDLES = {
    "S-RT": "single, mean",
    "M-RT": "multi_retrieval, mean",
    "M-RS": "multi_reasoning, mean",
    "overall": "overall (0.4, 0.3, 0.3)",
}
_CAKE = ("mean of 16",)

TABLES = (
    Table(
        "L-Eval (PoD's Table 1)",
        "leval",
        tuple(_LEVAL),
        _of_averages(_LEVAL),
        {name: dict(zip(_LEVAL, row, strict=True)) for name, row in leval.PUBLISHED.items()},
        ("arXiv 2412.02252, LLaMA3-8B-32K. Ours: Closed of 7 sets, Summ by ROUGE-L; the paper does not say which.",),
    ),
    Table(
        "InfiniteBench (PoD's Table 3)",
        "infinitebench",
        None,
        lambda scores, _: {name: _score(value) for name, value in scores.items()},
        {name: dict(zip(infinitebench.SETS, row, strict=False)) for name, row in infinitebench.PUBLISHED.items()},
        ("arXiv 2412.02252, LLaMA3.1-8B. A column is a task and its window; `scores.md` has the ceilings.",),
    ),
    Table(
        "NeedleBench v1 (CAKE's Figure 6)",
        "needlebench",
        tuple(_NEEDLES),
        _of_averages(_NEEDLES),
        {name: dict(zip(_NEEDLES, row, strict=True)) for name, row in needlebench.PUBLISHED.items()},
        ("arXiv 2503.12491: 32K, 1,024 tokens per layer, means of Chinese and English.",),
    ),
    Table(
        "LongBench, CAKE's mean of 16 sets (its Tables 2 and 3)",
        "longbench",
        _CAKE,
        _of_averages({"mean of 16": "CAKE average"}),
        _rows(
            _CAKE,
            "full: 33.07\nStreamingLLM: 23.33\nH2O: 26.06\nTOVA: 25.31\nSnapKV: 28.09\nPyramidKV: 28.20\n"
            "CAKE: 29.29\nCAKE, allocation=uniform: 28.36\nCAKE, pyramid allocation: 28.69\n"
            "CAKE, allocation=random: 28.3\nCAKE, indicator=mean: 28.82\nCAKE, indicator=variance: 28.68\n"
            "CAKE, indicator=product: 28.6",
        ),
        ("arXiv 2503.12491: Llama2-7B-Chat, 128 tokens per layer.",),
    ),
    Table(
        "LongBench, Cascade's six sets (its Table 7)",
        "longbench",
        (*_CASCADE_SETS, "mean"),
        _of_sets(_CASCADE_SETS, "mean"),
        _rows(
            (*_CASCADE_SETS, "mean"),
            "StreamingLLM: 22.57 40.78 23.89 20.69 23.46 26.82 26.37\nFA2, truncated: 18.67 36.59 15.77 17.24 19.62 "
            "20.46 21.39\nBigBird: 21.78 39.46 21.33 22.23 20.13 26.15 25.18\nMInference: 20.90 39.79 19.77 23.19 "
            "21.52 29.15 25.72\nPyramidKV: 20.99 39.79 19.86 22.20 21.77 29.20 25.63\nCascade: 26.43 47.26 33.12 "
            "23.33 32.33 28.32 31.80",
        ),
        ("arXiv 2406.17808: Llama3.1-8B, prompts uncut, `cascade:budget=0.25,rule=power_of_two,stride=512`.",),
    ),
)  # fmt: skip


def benchmark_of(scores: Scores, averages: Scores) -> str | None:
    """Whose scores these are; None where no table is of them."""
    if all(name in averages for name in (*CATEGORIES, "PoD average")):
        return "longbench"
    if LEVAL_AVERAGE in averages:
        return "leval"
    if _NEEDLES["overall"] in averages:
        return "needlebench"
    if scores and all(name.rpartition("-")[0] in infinitebench.PROMPTS for name in scores):
        return "infinitebench"
    return None
