"""Perplexity and bits per byte on held-out text, whole samples or streamed through the cache.

    python eval/perplexity.py --ckpt exports/tiny --data data/demo/1024
    python eval/perplexity.py --ckpt exports/dense exports/tiny --text book.txt --length 1024
    python eval/perplexity.py --ckpt exports/tiny --text book.txt --length 8192 --stream 256

`--data` reads the validation split of a prepared directory; `--text` cuts the files into stretches of `--length`
tokens; without either it is the held-out modules of the standard library. `--stream N` feeds the cache N tokens at a
time. Writes perplexity.json and perplexity.png (loss by position) and prints a table.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from pod.evaluation import models, report
from pod.evaluation.perplexity import Perplexity, perplexity

sys.path.insert(0, str(Path(__file__).resolve().parent))
from passkey import default_text  # noqa: E402


def stretches(ids: Tensor, length: int, limit: int, batch_size: int) -> Iterator[Tensor]:
    """[N] -> batches [B, length] of stretches spread evenly over the text, at most `limit` of them."""
    count = min(limit, len(ids) // length)
    if count == 0:
        raise ValueError(f"the text has {len(ids)} tokens, --length {length} wants more: lower it or give longer text")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    rows = torch.stack([ids[start : start + length] for start in starts])
    yield from rows.split(batch_size)


def prepared(path: str, limit: int, batch_size: int) -> Iterator[Tensor]:
    """Batches [B, T] of the validation split of a prepared directory, evenly spread, at most `limit` samples."""
    from pod.data import PreparedDataset

    dataset = PreparedDataset(path, "validation")
    chosen = torch.linspace(0, len(dataset) - 1, min(limit, len(dataset))).long().tolist()
    for first in range(0, len(chosen), batch_size):
        yield torch.stack([dataset[index]["input_ids"] for index in chosen[first : first + batch_size]])


def evaluate(
    ckpts: list[str], data: str | None, text: str | None, length: int, limit: int, batch_size: int, stream: int | None
) -> dict[str, Perplexity]:
    """Losses of each checkpoint.

    Raises:
        ValueError: a checkpoint or text that cannot be; the model was trained with another vocabulary than the data.
    """
    if length < 2 or limit < 1 or batch_size < 1:
        raise ValueError("--length must be at least 2, --limit and --batch-size at least 1")
    results = {}
    for ckpt in ckpts:
        model, tokenizer = models.load(ckpt)
        if data is not None:
            batches = prepared(data, limit, batch_size)
        else:
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            batches = stretches(ids, length, limit, batch_size)
        results[ckpt] = perplexity(model, batches, known_bytes(tokenizer), stream, label=Path(ckpt).name)
    return results


def known_bytes(tokenizer: PreTrainedTokenizerBase) -> float | None:
    """Bytes of a token, for tokenizers of bytes."""
    return 1.0 if isinstance(tokenizer, ByT5Tokenizer) else None


def draw(results: dict[str, Perplexity], path: Path) -> None:
    """Mean loss by position in the text."""
    figure = report.figure(6, 4)
    axes = figure.add_subplot()
    for ckpt, result in results.items():
        axes.plot(*result.curve(), label=f"{Path(ckpt).name} ({result.loss:.3f})")
    axes.set(xlabel="position (tokens)", ylabel="nats per token")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", nargs="+", required=True, help="exported models (directories or hub ids)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", help="a prepared directory: its validation split")
    source.add_argument("--text", type=Path, nargs="+", help="UTF-8 files")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a stretch of --text (1024)")
    parser.add_argument("--limit", type=int, default=64, help="at most so many samples or stretches (64)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--stream", type=int, metavar="N", help="through the cache, N tokens at a time")
    parser.add_argument(
        "--out", type=Path, default=report.default_folder("perplexity"), help="folder of what is written"
    )
    options = parser.parse_args(arguments)
    try:
        text = None
        if options.data is None:
            text = "".join(p.read_text(encoding="utf-8") for p in options.text) if options.text else default_text()
        results = evaluate(
            options.ckpt, options.data, text, options.length, options.limit, options.batch_size, options.stream
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = {ckpt: result.summary() for ckpt, result in results.items()}
    report.write_json(options.out / "perplexity.json", {"stream": options.stream, "models": summary})
    draw(results, options.out / "perplexity.png")
    rows = []
    for ckpt, result in results.items():
        tokens = f"{result.count.sum():,}"
        bits = "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        rows.append([Path(ckpt).name, tokens, f"{result.loss:.4f}", f"{result.perplexity:.3f}", bits])
    print(report.markdown_table(["model", "tokens", "nats/token", "perplexity", "bits/byte"], rows))
    print(f"written: {options.out}/perplexity.json, {options.out}/perplexity.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
