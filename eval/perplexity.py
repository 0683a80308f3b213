"""Perplexity and bits per byte on held-out text, whole samples or streamed through the cache.

    python eval/perplexity.py --ckpt exports/tiny --data data/demo/1024
    python eval/perplexity.py --ckpt exports/dense exports/tiny --text book.txt --length 1024
    python eval/perplexity.py --ckpt exports/tiny --text book.txt --length 8192 --stream 256
    python eval/perplexity.py --ckpt exports/tiny --text books/*.txt --length all --stream 64 --evicting-only \\
        --eviction cascade:budget=256,sinks=64+streamingllm:budget=256,sinks=64

`--data` reads the validation split of a prepared directory; `--text` cuts the files into stretches of `--length`
tokens, or takes each file from beginning to end (`--length all`); without either it is the held-out modules of the
standard library. `--stream N` feeds the cache N tokens at a time: texts of any length then need the memory of the
cache, of N tokens, and two numbers for each token (its id and its loss). The cache grows with the text, unless an
eviction method bounds it; `--evicting-only` leaves out the row whose cache grows. Methods act after every N tokens;
those that act after a prefill only do nothing with N = 1, and query_aware=false, which evicts once, is refused. Writes
perplexity.json (by checkpoint and method) and perplexity.png (loss by position) and prints a table.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from pod import eviction
from pod.data.demo_corpus import held_out_text
from pod.data.prepared import PreparedData
from pod.data.tokenizer import check_tokenizer, check_vocabulary
from pod.evaluation import command, models, report
from pod.evaluation.models import by_row, label_of, parameters_of
from pod.evaluation.perplexity import Perplexity, check_streamed, perplexity
from pod.evaluation.texts import prepared, read_text, stretches, token_ids
from pod.files import check_writable
from pod.terminal import exit_status


def evaluate(
    ckpts: list[str],
    data: str | None,
    texts: list[str],
    length: int | None,
    limit: int,
    batch_size: int,
    stream: int | None,
    methods: list[eviction.Method] | None = None,
    evicting_only: bool = False,
) -> dict[str, dict[str, Perplexity]]:
    """Losses of each checkpoint, without eviction and with each of the methods.

    Args:
        ckpts: exported models.
        data: a prepared directory; None takes `texts`.
        texts: cut into stretches, all of them as one text, or taken each from beginning to end.
        length: tokens of a stretch; None takes the texts whole, one at a time.
        limit: at most so many samples, stretches or texts.
        batch_size: samples or stretches at once.
        stream: tokens of a chunk that goes through the cache; None takes texts whole.
        methods: eviction methods.
        evicting_only: leave out the model without eviction.

    Returns:
        [checkpoint][method], the method "none" without eviction.

    Raises:
        ValueError: a checkpoint, text or method that cannot be; data of another tokenizer; methods without `stream`, or
            with `query_aware=False`; `evicting_only` without methods.
    """
    if (length is not None and length < 2) or limit < 1 or batch_size < 1:
        raise ValueError("--length must be at least 2, --limit and --batch-size at least 1")
    if methods and stream is None:
        raise ValueError(
            "--eviction needs --stream N, tokens fed at a time: a text taken whole is over before anything is evicted"
        )
    check_streamed(methods or [])
    if evicting_only and not methods:
        raise ValueError("--evicting-only needs --eviction METHOD: nothing is left to run")
    results: dict[str, dict[str, Perplexity]] = {}
    for ckpt in ckpts:
        model, tokenizer = models.load(ckpt)
        if data is not None:
            check_ids(data, limit, batch_size, ckpt, model.config.get_text_config().vocab_size)
        results[ckpt] = {}
        for variant in models.variants(model, methods)[1 if evicting_only else 0 :]:
            if data is not None:
                batches = prepared(data, limit, batch_size)
            elif length is None:
                batches = (token_ids(tokenizer, text) for text in texts[:limit])
            else:
                batches = stretches(token_ids(tokenizer, "".join(texts)), length, limit, batch_size)
            results[ckpt][variant.name] = perplexity(
                variant.model,
                batches,
                known_bytes(tokenizer),
                stream,
                variant.cache_factory and partial(variant.cache_factory, variant.model),
                label=label_of(ckpt, variant.name),
            )
    return results


def check_ids(data: str, limit: int, batch_size: int, ckpt: str, vocab_size: int) -> None:
    """See that the samples' ids are tokens of the model, and the same ones as when they were prepared.

    Raises:
        ValueError: some are not.
    """
    used = set(torch.cat([batch.flatten() for batch in prepared(data, limit, batch_size)]).tolist())
    if max(used) >= vocab_size:
        check_vocabulary(PreparedData(data), vocab_size)
    check_tokenizer(PreparedData(data), ckpt, used)


def known_bytes(tokenizer: PreTrainedTokenizerBase) -> float | None:
    """Bytes of a token, for tokenizers of bytes."""
    return 1.0 if isinstance(tokenizer, ByT5Tokenizer) else None


def tokens_or_all(text: str) -> int | None:
    """`1024` -> 1024, `all` -> None."""
    try:
        return None if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor `all`") from None


def draw(results: dict[str, dict[str, Perplexity]], path: Path) -> None:
    """Mean loss by position in the text, a curve for each model and method."""
    figure = report.figure(6, 4)
    axes = figure.add_subplot()
    for label, result in by_row(results).items():
        axes.plot(*result.curve(), label=f"{label} ({result.loss:.3f})")
    axes.set(xlabel="position (tokens)", ylabel="nats per token")
    axes.legend()
    report.save_figure(figure, path, dpi=150)


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", nargs="+", required=True, help="exported models (directories or hub ids)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", help="a prepared directory: its validation split")
    source.add_argument("--text", type=Path, nargs="+", help="UTF-8 files")
    parser.add_argument(
        "--length",
        type=tokens_or_all,
        default=1024,
        metavar="N",
        help="tokens of a stretch of --text (1024); `all`: each file from beginning to end",
    )
    parser.add_argument("--limit", type=int, default=64, help="at most so many samples, stretches or files (64)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples or stretches at once (8)")
    parser.add_argument("--stream", type=int, metavar="N", help="through the cache, N tokens at a time")
    command.add_eviction(parser)
    parser.add_argument("--evicting-only", action="store_true", help="without the row of no eviction")
    parser.add_argument(
        "--out", type=Path, default=command.default_folder("perplexity"), help="folder of what is written"
    )
    options = parser.parse_args(arguments)
    check_writable(options.out)
    texts = []
    if options.data is None:
        texts = [read_text(path, "--text") for path in options.text] if options.text else [held_out_text()]
    results = evaluate(
        options.ckpt,
        options.data,
        texts,
        options.length,
        options.limit,
        options.batch_size,
        options.stream,
        options.eviction,
        options.evicting_only,
    )
    summary = {ckpt: {name: one.summary() for name, one in found.items()} for ckpt, found in results.items()}
    written = {"stream": options.stream, "parameters": parameters_of(options.eviction), "models": summary}
    report.write_json(options.out / "perplexity.json", written)
    draw(results, options.out / "perplexity.png")
    rows = []
    for label, result in by_row(results).items():
        tokens = f"{result.count.sum():,}"
        bits = "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        rows.append([label, tokens, f"{result.loss:.4f}", f"{result.perplexity:.3f}", bits])
    print(report.markdown_table(["model", "tokens", "nats/token", "perplexity", "bits/byte"], rows))
    print(f"written: {options.out}/perplexity.json, {options.out}/perplexity.png")


if __name__ == "__main__":
    sys.exit(main())
