"""A benchmark of generated text: what one says of itself, and what is done with any.

A benchmark is a file with a subclass of `Benchmark` and its `main = command(...)`, and a line in `registry.py`.
It says its prompts and how predictions are scored; `run` predicts with every model and eviction method, goes on where a
killed run stopped, refuses what was made with other settings or weights, has the scores written and compares them.
"""

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from pod.evaluation import models, report, runner
from pod.evaluation.command import add_ckpts, add_eviction, parser_of
from pod.evaluation.intervals import of_first
from pod.evaluation.lines import Fields, check_fields
from pod.model.weights import weights_hash
from pod.terminal import exit_status

Score = float | None | dict[str, float | None]  # of a set, or of its parts by name
Row = dict[str, Any]  # a prediction: {"key", "pred", ...}


class Benchmark(ABC):
    """One benchmark with the options of one run.

    One that has `read(folder)`, which gives the predictions there by set, has `--score-only` too.

    Args:
        options: of the command line; a subclass checks its own and reads its data, before any model is loaded.

    Attributes:
        name: of the benchmark.
        published: row -> scores, as a paper has them under `published_columns`; `published_in`: where that is.
        what: heads the first column of a comparison.
        weighs_cache: the cache of the longest prompt is measured, and written to `cache.json`.
        asks_beyond: tokens that come on top of `lengths`, at least.
        settings: what predictions depend on, beside the model and the eviction method.
        lengths: tokens of the prompts, for a note where a model was made for fewer.
        title: what was run, in a sentence above the comparison; may be empty.
        score_only: predictions are there, and the benchmark's data need not be.
        limit: samples of each set, at most; None for all.
        room: positions of the model that prompts are made for next; None where its config does not say.
    """

    name: ClassVar[str]
    published: ClassVar[Mapping[str, Sequence[float]]] = {}
    published_columns: ClassVar[Sequence[str]] = ()
    published_in: ClassVar[str] = ""
    what: ClassVar[str] = "set"
    weighs_cache: ClassVar[bool] = False
    asks_beyond: ClassVar[int] = 0
    settings: dict[str, Any]
    lengths: Sequence[int]
    title: str = ""
    room: int | None = None

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.score_only = getattr(options, "score_only", False)
        self.limit = getattr(options, "limit", None)
        check_limit(self.limit)

    @staticmethod
    @abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Give the command's parser the benchmark's own options."""

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> Iterable[tuple[str, list[runner.Request]]]:
        """(name, requests) of each set. What is only made when its turn comes is refused when its turn comes."""

    @abstractmethod
    def score(self, name: str, rows: Sequence[Row]) -> Score:
        """0..100, of one set's predictions."""

    @abstractmethod
    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        """The means that papers print, by name; None where one of their sets is missing. `scores`: by set."""

    def table(self, scores: dict[str, Score], counts: dict[str, int]) -> str:
        """As Markdown a row for each set, or part of one, the means, and what was published; counts: of predictions."""
        rows = []
        for name, one in scores.items():
            parts = {f"{name}, {part}": value for part, value in one.items()} if isinstance(one, dict) else {name: one}
            rows += [[said, str(counts[name]), f"{value:.2f}"] for said, value in parts.items()]
        rows += [[name, "", f"{value:.2f}"] for name, value in self.aggregate(scores).items() if value is not None]
        parts = [self.title, report.markdown_table([self.what, "samples", "score"], rows)]
        if self.published_in:
            known = [[name, *(f"{value:.2f}" for value in values)] for name, values in self.published.items()]
            parts += [f"Published ({self.published_in}):"]
            parts += [report.markdown_table(["method", *self.published_columns], known)]
        return "\n\n".join(filter(None, parts))

    def write(self, scores: dict[str, Score], counts: dict[str, int], folder: Path) -> None:
        """Write `scores.json`, `scores.md` and what else belongs to them into a folder, and print the table."""
        result = {"scores": scores, "averages": self.aggregate(scores), "samples": counts}
        report.write_json(folder / "scores.json", result)
        table = self.table(scores, counts)
        report.write(folder / "scores.md", table + "\n")
        print(f"{table}\nwritten: {folder}/scores.json, scores.md")

    def compared(self, scores: dict[str, Score]) -> dict[str, float | None]:
        """The lines of a comparison: every set or part of one, then the means."""
        flat: dict[str, float | None] = {}
        for name, value in scores.items():
            flat |= {f"{name} {part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
        return flat | self.aggregate(scores)

    def own_scores(self, name: str, rows: Sequence[Row]) -> list[float]:
        """Each sample's score by itself, 0..100, of a set whose score is their mean; of another set, none."""
        found = [self.score(name, [row]) for row in rows]
        return [one for one in found if isinstance(one, int | float)]

    def finish(self, rows: dict[str, list[Row]], folder: Path) -> dict[str, Score]:
        """Score predictions, by set, and write what is found; returns the scores by set."""
        scores = {name: self.score(name, found) for name, found in rows.items()}
        self.write(scores, {name: len(found) for name, found in rows.items()}, folder)
        return scores

    def beyond(self, ckpt: str) -> str:
        """Which lengths a model was not made for, as a sentence; nothing where there are none."""
        longer = [str(n) for n in self.lengths if self.room is not None and n + self.asks_beyond > self.room]
        name = Path(ckpt).resolve().name
        return f"{name} was made for {self.room} tokens, not for {', '.join(longer)}." if longer else ""


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Give a parser `--limit`, samples of each set."""
    parser.add_argument("--limit", type=int, help="only the first LIMIT samples of each set")


def check_limit(limit: int | None) -> None:
    """Raises ValueError where `--limit` leaves no sample."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1 sample, got {limit}")


def read_sets(folder: Path, names: Iterable[str], fields: Fields) -> dict[str, list[Row]]:
    """The predictions that a folder has of some sets, for `--score-only`.

    Args:
        folder: of the predictions.
        names: of the sets; those without a prediction are left out.
        fields: what a prediction must have beside its text.

    Raises:
        ValueError: there are none; a broken line, or one without a field, with file and line.
    """
    names, found = list(names), {}
    for name in names:
        read = runner.Predictions(folder, name).read(lambda place, row: check_fields(place, row, fields))
        if read:
            found[name] = list(read.values())
    if not found:
        raise ValueError(f"--out {folder}: no predictions of {', '.join(names)}")
    return found


def resolve_sets(
    names: Sequence[str], groups: Mapping[str, Sequence[str]], sets: Iterable[str], what: str
) -> list[str]:
    """The sets of a benchmark that names and names of groups stand for, each once.

    Args:
        names: what --tasks gives.
        groups: name -> sets.
        sets: all names of sets.
        what: the benchmark's name, for the error.

    Raises:
        ValueError: an unknown name, with the closest valid one.
    """
    known, found = list(sets), {}
    for name in names:
        if name not in groups and name not in known:
            close = get_close_matches(name, (*groups, *known), n=1) or known
            raise ValueError(
                f"--tasks {name}: no set of {what} and no group; did you mean {', '.join(close)}? The groups are "
                f"{', '.join(groups)}"
            )
        found.update(dict.fromkeys(groups.get(name, (name,))))
    return list(found)


def folders_of(ckpts: Sequence[str], out: Path) -> dict[str, Path]:
    """Where each model's results go: `out` itself of one model, else a folder in it."""
    return {ckpt: out if len(ckpts) == 1 else out / Path(ckpt).resolve().name for ckpt in ckpts}


def run(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Predict with each model, without eviction and with each method; score when all predictions are there.

    Args:
        benchmark: what is asked.
        options: `ckpt` (several), `eviction`, `batch_size`, `out`.

    Raises:
        ValueError: a model or method that cannot be, predictions of other settings or weights in the folder.
    """
    keys: dict[str, list[str]] = {}
    notes: list[str] = []
    finished: dict[str, Path] = {}  # whose results are where
    folders = folders_of(options.ckpt, options.out)
    for ckpt, out in folders.items():
        settings = benchmark.settings | {"ckpt": ckpt}
        runner.check_settings(out, settings, partly=True)
        model, tokenizer = models.load(ckpt)
        settings["weights"] = weights_hash(ckpt)
        variants = models.variants(model, options.eviction)
        benchmark.room = getattr(model.config, "max_position_embeddings", None)
        note = benchmark.beyond(ckpt)
        if note:
            notes.append(note)
            if runner.process()[0] == 0:
                print(f"note: {note}", file=sys.stderr)
        longest = None
        for name, requests in benchmark.prompts(tokenizer):
            keys[name] = [request.key for request in requests]
            longest = max([longest, *requests] if longest else requests, key=lambda request: len(request.text))
            runner.predict_each(variants, tokenizer, requests, out, name, options.batch_size, settings)
        for variant in variants:
            folder = variant.folder(out)
            finished[variant.name if len(folders) == 1 else f"{out.name}, {variant.name}"] = folder
            if benchmark.weighs_cache and None not in predictions(folder, keys).values():
                report.write_json(folder / "cache.json", weighed(variant, tokenizer, longest))
    scores, samples = {}, {}
    for name, folder in finished.items():
        rows = predictions(folder, keys)
        if None in rows.values():
            print(f"process {runner.process()[0]} is done; the last one to finish prints the scores", file=sys.stderr)
            return
        if len(finished) > 1:
            print(f"\n{name}:")
        scores[name] = benchmark.finish(rows, folder)
        if len(finished) > 1:
            samples[name] = [score for one, found in rows.items() for score in benchmark.own_scores(one, found)]
    if len(scores) > 1:
        compare(benchmark, scores, samples, options.out, notes)


def predictions(folder: Path, keys: dict[str, list[str]]) -> dict[str, list[Row] | None]:
    """The predictions of each set in a folder; None where some are missing. `keys`: of each set's requests."""
    return {name: runner.Predictions(folder, name).merge(wanted) for name, wanted in keys.items()}


def weighed(variant: models.Variant, tokenizer: PreTrainedTokenizerBase, longest: runner.Request) -> dict[str, float]:
    """What the cache of one prompt takes, measured: `eval/report.py` prints it."""
    ids = runner.encode(tokenizer, longest)
    cache = None if variant.cache_factory is None else variant.cache_factory(variant.model)
    question = runner.question_tokens(tokenizer, longest, ids) if models.asks_apart(variant.method) else 0
    return models.measured_saving(variant.model, torch.tensor([ids]), cache, question)


def compare(
    benchmark: Benchmark,
    scores: dict[str, dict[str, Score]],
    samples: dict[str, list[float]],
    out: Path,
    notes: Sequence[str],
) -> None:
    """Print several models and methods side by side and write `comparison.md`.

    The last line is the sum of all samples' own scores over the first column's: paired, with an interval of 95 %.

    Args:
        benchmark: that was run.
        scores: model and method -> set -> score.
        samples: model and method -> each sample's own score, in one order.
        out: folder to write to.
        notes: sentences above the table.
    """
    columns = {name: benchmark.compared(found) for name, found in scores.items()}
    lines = [name for name in next(iter(columns.values())) if any(one[name] is not None for one in columns.values())]
    cells = [[f"{one[name]:.2f}" if one[name] is not None else "-" for one in columns.values()] for name in lines]
    shares = of_first(samples)
    if shares:
        first = next(iter(samples))
        lines.append(f"of {first}, {len(samples[first])} samples [95 %]")
        cells.append(list(shares.values()))
    table = report.markdown_table(
        [benchmark.what, *columns], [[name, *row] for name, row in zip(lines, cells, strict=True)]
    )
    above = " ".join(filter(None, [benchmark.title, *notes]))
    text = f"{above}\n\n{table}" if above else table
    report.write(out / "comparison.md", text + "\n")
    print(f"\n{text}\nwritten: {out}/comparison.md")


def command(kind: type[Benchmark], doc: str | None) -> Callable[..., int]:
    """The command of a benchmark.

    Args:
        kind: the benchmark.
        doc: what `--help` says.
    """

    @exit_status
    def main(arguments: list[str] | None = None) -> None:
        parser = parser_of(kind.name, doc)
        add_ckpts(parser, batch_size=1, required=False)
        add_eviction(parser)
        kind.add_options(parser)
        where = f"where predictions and scores go (runs/{kind.name}/NAME; of several models, runs/{kind.name})"
        parser.add_argument("--out", type=Path, help=where)
        parser.set_defaults(score_only=False)
        if hasattr(kind, "read"):
            alone = "score the predictions in --out; no model is loaded"
            parser.add_argument("--score-only", action="store_true", help=alone)
        options = parser.parse_args(arguments)
        if options.score_only:
            if options.out is None:
                raise ValueError("--score-only needs --out, the folder of the predictions")
            if options.eviction:
                raise ValueError(
                    "--score-only scores one folder: name the method's own folder with --out, no --eviction"
                )
            benchmark = kind(options)
            benchmark.finish(benchmark.read(options.out), options.out)
            return
        if options.ckpt is None:
            raise ValueError("--ckpt is missing: name an exported model's directory")
        if options.out is None:
            name = Path(options.ckpt[0]).resolve().name
            options.out = Path("runs") / kind.name / (name if len(options.ckpt) == 1 else "")
        run(kind(options), options)

    return main
