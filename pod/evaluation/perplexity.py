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
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pod.data.prepared import PreparedData
from pod.data.tokenizer import check_tokenizer, check_vocabulary
from pod.evaluation import command, models, report
from pod.evaluation.models import asks_apart, by_row, label_of, parameters_of
from pod.evaluation.texts import given_texts, prepared, stretches, token_ids
from pod.eviction import Method, unparse
from pod.model.inputs import CACHE
from pod.terminal import exit_status

# Logits of so many tokens, of all rows together, are in memory at once.
POSITIONS = 1024


@dataclass
class Perplexity:
    """Losses of many texts, added up.

    Attributes:
        nats: [T] float64, the sum of the losses by position in the text; position 0 is foretold by nothing and is 0.
        count: [T] int64, how many texts reached each position.
        num_bytes: bytes of the tokens that were foretold; None where a token's bytes are not known.
    """

    nats: Tensor
    count: Tensor
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return float(self.nats.sum() / self.count.sum().clamp(min=1))

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, None where the bytes are not known."""
        return None if not self.num_bytes else float(self.nats.sum()) / math.log(2) / self.num_bytes

    def summary(self) -> dict[str, float | int | None]:
        """What goes into a JSON file."""
        return {
            "tokens": int(self.count.sum()),
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }

    def curve(self, parts: int = 32) -> tuple[list[float], list[float]]:
        """(position, mean nats) of `parts` stretches of positions, for a picture."""
        positions, means = [], []
        for index in torch.arange(len(self.nats)).chunk(parts):
            count = self.count[index].sum()
            if count > 0:
                positions.append(float(index.double().mean()))
                means.append(float(self.nats[index].sum() / count))
        return positions, means


def check_streamed(methods: Iterable[Method]) -> None:
    """Refuse methods that would evict from a streamed text's first chunk only, or keep a share of that for ever.

    Raises:
        ValueError: a method with `query_aware=False`, or whose budget is a share of the prompt.
    """
    for method in methods:
        if asks_apart(method):
            remedy = "choose another method" if method.waits else "leave query_aware out"
            raise ValueError(
                f"{unparse(method)}: with query_aware=false the first chunk of a streamed text would be evicted from "
                f"and all others kept, without bound: {remedy}"
            )
        if method.is_share:
            raise ValueError(
                f"{unparse(method)}: a streamed text has no prompt to keep a share of, only its first chunk: give a "
                "budget in tokens"
            )


def token_losses(head: nn.Module, hidden_states: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every position in nats, float32, with the logits of `POSITIONS` tokens in memory at once.

    Args:
        head: hidden -> vocab.
        hidden_states: [B, T, hidden].
        targets: [B, T] int64, the token that each position foretells.

    Returns:
        [B, T].
    """
    size = max(1, POSITIONS // len(targets))
    return torch.cat(
        [
            nn.functional.cross_entropy(head(states).float().transpose(1, 2), wanted, reduction="none")
            for states, wanted in zip(hidden_states.split(size, 1), targets.split(size, 1), strict=True)
        ],
        dim=1,
    )


@torch.no_grad()
def changes_logits(model: PreTrainedModel) -> bool:
    """Whether logits are not what the head gives, of a few tokens: Granite and Cohere scale them, Gemma 2 caps them."""
    ids = torch.arange(8, device=model.device)[None]
    of_head = model.get_output_embeddings()(model.base_model(ids, use_cache=False).last_hidden_state)
    return not torch.allclose(model(ids, use_cache=False).logits.float(), of_head.float())


def perplexity(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    bytes_per_token: float | None = None,
    stream: int | None = None,
    new_cache: Callable[[], object] | None = None,
    label: str = "perplexity",
) -> Perplexity:
    """Losses of texts, each from its beginning.

    Args:
        model: a causal LM in evaluation mode.
        texts: token ids [T] or [B, T] each, T >= 2.
        bytes_per_token: bytes that a token stands for, where that is one number (1.0 for byte tokenizers).
        stream: feed a text through the cache in chunks of so many tokens instead of whole, so that memory is the
            cache's and one chunk's (beside 8 bytes for each token's loss); None takes each text in one forward
            without a cache. Each chunk is a prefill: a method that evicts after a prefill does so after every chunk.
        new_cache: makes the cache of a streamed text; the model's own default otherwise.
        label: of the progress bar.

    Raises:
        ValueError: a text of fewer than 2 tokens; `stream` below 1; `new_cache` without `stream`.
    """
    if stream is not None and stream < 1:
        raise ValueError(f"stream is {stream}: at least 1 token a chunk")
    if stream is None and new_cache is not None:
        raise ValueError("a text that is taken whole passes no cache: set stream, tokens of a chunk")
    body, head = model.base_model, model.get_output_embeddings()
    if changes_logits(model):
        body, head = model, nn.Identity()
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    total = sum(text.numel() - text.shape[:-1].numel() for text in texts) if isinstance(texts, list) else None
    with torch.no_grad(), tqdm(total=total, desc=label, unit=" tokens", unit_scale=True) as bar:
        for text in texts:
            ids = torch.atleast_2d(text).to(model.device)
            if ids.shape[1] < 2:
                raise ValueError(f"a text has {ids.shape[1]} tokens: at least 2 are needed")
            losses = torch.zeros(ids.shape, dtype=torch.float64)
            cache = new_cache() if new_cache is not None else None
            for start, stop in _chunks(ids.shape[1] - 1, stream):
                output = body(ids[:, start:stop], **{CACHE: cache}, use_cache=stream is not None)
                cache, targets = output.get(CACHE), ids[:, start + 1 : stop + 1]
                losses[:, start + 1 : stop + 1] = token_losses(head, output[0], targets).cpu()
                bar.update(ids.shape[0] * (stop - start))
            sums.append(losses.sum(dim=0))
            counts.append(torch.full((ids.shape[1],), ids.shape[0]))
            counts[-1][0] = 0
    longest = max((len(part) for part in sums), default=0)
    nats = sum((nn.functional.pad(part, (0, longest - len(part))) for part in sums), torch.zeros(longest).double())
    count = sum((nn.functional.pad(part, (0, longest - len(part))) for part in counts), torch.zeros(longest).long())
    known = None if bytes_per_token is None else round(int(count.sum()) * bytes_per_token)
    return Perplexity(nats, count, known)


def _chunks(length: int, size: int | None) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size or length):
        yield start, min(start + (size or length), length)


def evaluate(options: argparse.Namespace, texts: list[str]) -> dict[str, dict[str, Perplexity]]:
    """Losses of each checkpoint, without eviction and with each of the methods.

    Args:
        options: of the command line. `data`, a prepared directory, is taken instead of the texts; `length` None takes
            them whole, one at a time.
        texts: cut into stretches, all of them as one text, or taken each from beginning to end.

    Returns:
        `[checkpoint][method]`, the method "none" without eviction.

    Raises:
        ValueError: a checkpoint, text or method that cannot be; data of another tokenizer; methods without `stream`, or
            with `query_aware=False`; `evicting_only` without methods.
    """
    length, limit, batch_size, data = options.length, options.limit, options.batch_size, options.data
    methods = options.eviction or []
    command.check_least(options, length=2, limit=1, batch_size=1)
    if methods and options.stream is None:
        raise ValueError(
            "--eviction needs --stream N, tokens fed at a time: a text taken whole is over before anything is evicted"
        )
    check_streamed(methods)
    if options.evicting_only and not methods:
        raise ValueError("--evicting-only needs --eviction METHOD: nothing is left to run")
    results: dict[str, dict[str, Perplexity]] = {}
    for ckpt in options.ckpt:
        model, tokenizer = models.load(ckpt)
        if data is not None:
            check_ids(data, limit, batch_size, ckpt, model.config.get_text_config().vocab_size)
        results[ckpt] = {}
        for variant in models.variants(model, methods)[1 if options.evicting_only else 0 :]:
            if data is not None:
                batches = prepared(data, limit, batch_size)
            elif length is None:
                batches = (token_ids(tokenizer, text) for text in texts[:limit])
            else:
                batches = stretches(token_ids(tokenizer, "".join(texts)), length, limit, batch_size)
            results[ckpt][variant.name] = perplexity(
                variant.model,
                list(batches),
                known_bytes(tokenizer),
                options.stream,
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
    parser = command.parser_of("perplexity", __doc__)
    command.add_ckpts(parser, batch_size=8)
    command.add_eviction(parser)
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
    parser.add_argument("--stream", type=int, metavar="N", help="through the cache, N tokens at a time")
    parser.add_argument("--evicting-only", action="store_true", help="without the row of no eviction")
    options = command.parse(parser, "perplexity", arguments)
    results = evaluate(options, [] if options.data is not None else given_texts(options.text))
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
