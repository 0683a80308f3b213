"""PG19's protocol (Cascade's Table 1): the perplexity of whole books, in chunks without a cache or through a small one.

    python eval/pg19.py --ckpt exports/llama3-32k --books pg19-test/
    python eval/pg19.py --ckpt exports/dense exports/tiny --books texts/ --sizes 1024 2048 --stride 256
    python eval/pg19.py --ckpt exports/tiny --books texts/ --sizes 1024 --stride 256 --methods h2o+cascade:sinks=64

--books is any folder of UTF-8 files NAME.txt or NAME.txt.gz, such as the 100 books of emozilla/pg19-test. Each book is
tokenised whole, with the begin-of-text token where there is one, and read alone from its beginning. Of each size C only
the books longer than C count, by the model's own tokenizer (the paper: by Llama's for both models). The rows are
`strided`, chunks of C tokens without a cache, each from position 0, and each method of --methods, fed --stride tokens
at a time, with C tokens beside its sinks. Tokens weigh equally: exp of all losses over all tokens but a book's first.
Results are written after each book, and the same command goes on where a killed run stopped.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pod import eviction
from pod.evaluation import command, models, report, runner
from pod.evaluation.benchmark import add_limit, check_limit
from pod.evaluation.models import label_of
from pod.evaluation.perplexity import check_streamed, perplexity
from pod.evaluation.texts import read_text, text_hash
from pod.evaluation.trade_off import with_budget
from pod.files import read_json
from pod.model.weights import weights_hash
from pod.terminal import exit_status

METHODS = "streamingllm:sinks=64+cascade:sinks=64,num_cascades=4"
STRIDED = "strided"
# arXiv 2406.17808, Table 1: model, C, its books and million tokens; strided, BigBird, StreamingLLM, Cascade.
PUBLISHED = (
    ("Qwen2", 16384, "91, 9.78M", "9.50", "10.65", "9.18", "9.14"),
    ("Llama", 16384, "91, 9.78M", "8.08", "12.76", "7.78", "7.72"),
    ("Qwen2", 32768, "77, 9.42M", "9.26", "10.38", "9.05", "9.03"),
    ("Llama", 32768, "77, 9.42M", "7.86", "11.33", "7.65", "7.60"),
    ("Llama", 65536, "62, 8.25M", "7.73", "OOM", "7.61", "7.60"),
)

Losses = dict[str, tuple[float, int]]  # book -> nats, tokens


def read_books(folder: Path, limit: int | None) -> dict[str, str]:
    """name -> text of each book of a folder, by name.

    Raises:
        ValueError: no folder, no book in it, a file that is no UTF-8.
    """
    paths = sorted(path for end in ("*.txt", "*.txt.gz") for path in folder.glob(end))
    if not paths:
        raise ValueError(f"--books {folder}: no NAME.txt or NAME.txt.gz is there")
    return {path.name: read_text(path, "--books") for path in paths[:limit]}


def strided(ids: Tensor, size: int) -> Iterator[Tensor]:
    """[T] -> chunks of `size` tokens and the one that the last of them foretells: every token but the first is once."""
    for start in range(0, len(ids) - 1, size):
        yield ids[start : start + size + 1]


def method_of(text: str, size: int, stride: int) -> eviction.Method:
    """A method that keeps `size` tokens beside its sinks; one that reads in strides reads `stride` tokens at once.

    Raises:
        ValueError: as `pod.eviction.parse`.
    """
    method = with_budget(text, size)
    changes = {"budget": size + getattr(method, "sinks", 0)}
    if getattr(method, "stride", 0) is None:
        changes["stride"] = stride
    return dataclasses.replace(method, **changes)


class Results:
    """Losses by checkpoint, row, size and book, on disk.

    Args:
        path: of the file; read where it is there.
        settings: what they depend on.

    Raises:
        ValueError: the file is of other settings.
    """

    def __init__(self, path: Path, settings: dict) -> None:
        self.path, self.settings = path, settings
        self.losses: dict[str, Losses] = {}
        if path.exists():
            earlier = read_json(path)
            if not isinstance(earlier, dict) or not isinstance(earlier.get("losses"), dict):
                raise ValueError(f"{path}: no results of this command: choose another --out, or remove the file")
            runner.refuse_others(f"{path} holds losses", earlier.get("settings", {}), settings, "file")
            self.losses = earlier["losses"]

    def of(self, ckpt: str, row: str, size: int) -> Losses:
        """The losses of one cell of the table."""
        return self.losses.setdefault(f"{ckpt} {row} {size}", {})

    def write(self) -> None:
        report.write_json(self.path, {"settings": self.settings, "losses": self.losses})


def run(options: argparse.Namespace) -> dict[tuple[str, int], Losses]:
    """(row's label, size) -> losses of each book.

    Raises:
        ValueError: books, sizes, methods or checkpoints that cannot be.
    """
    check_limit(options.limit)
    command.check_least(options, sizes=1, stride=1)
    books = read_books(options.books, options.limit)
    methods = {size: [method_of(text, size, options.stride) for text in options.methods] for size in options.sizes}
    check_streamed(method for found in methods.values() for method in found)
    kinds = [type(method).__name__ for method in methods[options.sizes[0]]]
    rows = [kind if kinds.count(kind) == 1 else text for kind, text in zip(kinds, options.methods, strict=True)]
    hashes = {name: text_hash(text) for name, text in books.items()}
    found: dict[tuple[str, int], Losses] = {}
    for ckpt in options.ckpt:
        settings = {"stride": options.stride, "books": hashes, "weights": weights_hash(ckpt)}
        results = Results(options.out / f"{Path(ckpt).resolve().name}.json", settings)
        model, tokenizer = models.load(ckpt)
        ids = {name: torch.tensor(runner.tokenise(tokenizer, text)) for name, text in books.items()}
        for size in options.sizes:
            longer = {name: tokens for name, tokens in ids.items() if len(tokens) > size}
            if not longer:
                most = max(map(len, ids.values()))
                raise ValueError(f"--sizes {size}: no book has more tokens, the longest {most}; give a smaller size")
            for shown, variant in zip([STRIDED, *rows], models.variants(model, methods[size]), strict=True):
                row = STRIDED if variant.method is None else variant.name
                losses = results.of(ckpt, row, size)
                for name, tokens in longer.items():
                    if name in losses:
                        continue
                    label = f"{label_of(ckpt, row)}, {size}: {name}"
                    if variant.method is None:
                        one = perplexity(model, strided(tokens, size), label=label)
                    else:
                        made = partial(variant.cache_factory, variant.model)
                        one = perplexity(variant.model, [tokens], None, options.stride, made, label=label)
                    losses[name] = (float(one.nats.sum()), int(one.count.sum()))
                    results.write()
                found[label_of(ckpt, shown), size] = {name: losses[name] for name in longer}
    return found


def table(found: dict[tuple[str, int], Losses]) -> str:
    """Perplexity by model and method, sizes side by side, under each its books and tokens."""
    sizes = list(dict.fromkeys(size for _, size in found))
    rows = list(dict.fromkeys(label for label, _ in found))

    def cell(label: str, size: int) -> str:
        losses = found.get((label, size))
        if losses is None:
            return "-"
        nats, tokens = (sum(part) for part in zip(*losses.values(), strict=True))
        return f"{math.exp(nats / tokens):.3f} ({len(losses)} books, {tokens:,} tokens)"

    return report.markdown_table(
        ["model", *(f"{size:,}" for size in sizes)], [[row, *(cell(row, size) for size in sizes)] for row in rows]
    )


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("pg19", __doc__)
    command.add_ckpts(parser)
    parser.add_argument("--books", type=Path, required=True, help="a folder of NAME.txt or NAME.txt.gz")
    what = f"eviction methods without budgets ({METHODS})"
    command.add_eviction(parser, "--methods", what, eviction.split, eviction.split(METHODS))
    command.add_numbers(parser, "--sizes", [16384, 32768, 65536], "tokens of a chunk, and kept (16384,32768,65536)")
    parser.add_argument("--stride", type=int, default=1024, help="tokens fed to a cache at a time (1024)")
    add_limit(parser)
    options = command.parse(parser, "pg19", arguments)
    made = table(run(options))
    known = report.markdown_table(
        ["model", "C", "books, tokens", STRIDED, "BigBird", "StreamingLLM", "Cascade"],
        [[model, f"{size:,}", *rest] for model, size, *rest in PUBLISHED],
    )
    text = f"{made}\n\nPublished (arXiv 2406.17808):\n\n{known}"
    report.write(options.out / "pg19.md", text + "\n")
    print(text)
    print(f"written: {options.out}/pg19.md, MODEL.json")
