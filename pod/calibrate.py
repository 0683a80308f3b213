"""Measure a model once for all, for methods that read it: which KV heads need the past, and Q-Filters' directions.

    python -m pod.calibrate --ckpt exports/llama3-32k --text-file book.txt --out runs/calibration.safetensors
    python -m pod.calibrate --ckpt checkpoints/tiny-base --measure razor --out runs/calibration.safetensors
    python -m pod.calibrate --ckpt exports/llama3-32k --text-file book.txt --learn --out runs/heads.safetensors

Three measurements, which `--measure` names, all without training; `pod.calibration` is the file and who reads it.

*razor* (RazorAttention, arXiv 2407.15891): random tokens, repeated 4 times. A query's weight on the tokens before that
are its own (echo), and on those that follow them (induction), summed over the repetitions before, in the mean over the
queries; a KV head has the maximum of its query heads. Heads that are high in either retrieve. `razor` orders all heads
by both, at the paper's 14 heads by induction for each one by echo.

*kvzip* (KVzip, arXiv 2505.23416): a text, the request to repeat it, and the text again. The largest weight that any
query after the text pays to any of its tokens.

*filters* (Q-Filters, arXiv 2503.02812): of queries after RoPE, sampled from texts, the first right singular vector,
with the sign that makes most products with queries positive; a KV head has the mean of its query heads.

`--learn` writes *duo* instead: head scores that are trained as DuoAttention's are (`pod.training.head_gates`). A run
that was stopped goes on with the same command, from what lies in OUT-learning/; the log in there stays.

Shapes: L layers, H_kv KV heads, G query heads per KV head, T tokens, N tokens of one repetition, D head dimension.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod import calibration
from pod.evaluation.models import load
from pod.evaluation.texts import read_text, token_ids
from pod.eviction.base import ranks
from pod.files import check_writable
from pod.model.probe import Meter, Seen, watch
from pod.model.reconstruction import FIRST
from pod.model.weights import weights_hash
from pod.terminal import exit_status

MEASUREMENTS = ("razor", "kvzip", "filters")
REPEATS = 4  # of the random tokens
SINKS = 4  # first tokens whose weights say nothing
BY_INDUCTION, BY_ECHO = 0.14, 0.01  # of all heads, RazorAttention's
_QUERIES = 128  # whose weights are in memory at once


class Repeats(Meter):
    """RazorAttention's echo and induction scores; a meter of `pod.model.probe.watch`.

    Args:
        size: N; a sample is N tokens, `REPEATS` times, what comes before them (a first token) left out.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.scores: list[Tensor] = []  # [2, H_kv] of each layer, echo and induction

    def begin(self, length: int, layers: int) -> bool:
        self.queries = torch.arange(length - (REPEATS - 1) * self.size, length)
        return True

    def enter(self, layer: int, seen: Seen) -> None:
        sums = [0.0, 0.0]
        for at, weights in _weights(seen, self.queries):
            before = at[:, None] - self.size * torch.arange(1, REPEATS, device=at.device)
            # The token itself is not earlier: with one token repeated, induction would look at it.
            for shift in (0, 1):
                places = before + shift
                counts = (before >= 0) & (places < at[:, None])
                found = weights.gather(-1, places.clamp(min=0).expand(*weights.shape[:2], -1, -1))
                sums[shift] += (found * counts).sum(dim=(-1, -2)).double()
        self.scores.append((torch.stack(sums) / len(self.queries)).amax(dim=-1).cpu())

    def result(self) -> dict[str, Tensor]:
        """`echo`, `induction` and `razor`, [L, H_kv] each."""
        echo, induction = torch.stack(self.scores, dim=1).float()
        return {"echo": echo, "induction": induction, "razor": razor_order(echo, induction)}


def razor_order(echo: Tensor, induction: Tensor) -> Tensor:
    """RazorAttention's choice for any number of heads.

    The n highest are, for the n that they come to, the best 14 c by induction with the best c by echo: at c = 1 % of
    all heads, the paper's. Of equal scores the lower layer's comes first, then the lower head's.

    Args:
        echo, induction: [L, H_kv].

    Returns:
        [L, H_kv] float32: 1 for the first, falling by 1 / (L * H_kv) from head to head.
    """
    shares = (induction, BY_INDUCTION), (echo, BY_ECHO)
    reached = [(ranks(-scores.flatten()) + 1) / share for scores, share in shares]
    return (1 - ranks(torch.minimum(*reached)) / echo.numel()).view(echo.shape).float()


class Reconstruction(Meter):
    """KVzip's score of each head, its largest over a text's tokens; a meter of `pod.model.probe.watch`.

    Args:
        size: tokens of the text, with which a sample begins; what follows repeats it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.scores: list[Tensor] = []

    def begin(self, length: int, layers: int) -> bool:
        self.queries = torch.arange(self.size, length)
        return True

    def enter(self, layer: int, seen: Seen) -> None:
        best = [weights[..., SINKS : self.size].amax(dim=(1, 2, 3)) for _, weights in _weights(seen, self.queries)]
        self.scores.append(torch.stack(best).amax(dim=0).cpu())

    def result(self) -> dict[str, Tensor]:
        """`kvzip` [L, H_kv]."""
        return {"kvzip": torch.stack(self.scores).float()}


class Directions(Meter):
    """Q-Filters' filters; a meter of `pod.model.probe.watch`.

    Args:
        samples: how many there will be.
        queries: how many of each query head are looked at, of all samples together.
    """

    def __init__(self, samples: int, queries: int) -> None:
        self.each = -(-queries // samples)
        self.queries: list[list[Tensor]] = []  # by layer, [H_kv, G, n, D] of each sample
        self.draws = torch.Generator().manual_seed(0)

    def begin(self, length: int, layers: int) -> bool:
        self.at = torch.randperm(length, generator=self.draws)[: self.each]
        self.queries = self.queries or [[] for _ in range(layers)]
        return True

    def enter(self, layer: int, seen: Seen) -> None:
        states = seen.project("q", self.at.to(seen.hidden_states.device))
        self.queries[layer].append(states.unflatten(0, (seen.module.config.num_key_value_heads, -1)).cpu())

    def result(self) -> dict[str, Tensor]:
        """`filters` [L, H_kv, D]."""
        return {"filters": torch.stack([first_directions(torch.cat(parts, dim=2)) for parts in self.queries])}


def first_directions(queries: Tensor) -> Tensor:
    """[.., G, n, D] queries -> [.., D] float32, the mean over G of their first right singular vectors.

    Nothing is subtracted before; the sign of each is that which makes most products with its queries positive.
    """
    queries = queries.double()
    # The right singular vectors are the eigenvectors of the [D, D] of products, the last one of the largest value.
    first = torch.linalg.eigh(queries.mT @ queries).eigenvectors[..., -1]
    is_positive = (queries @ first[..., None] > 0)[..., 0].double().mean(dim=-1, keepdim=True)
    return torch.where(is_positive < 0.5, -first, first).mean(dim=-2).float()


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | None,
    measure: Sequence[str] = MEASUREMENTS,
    *,
    repeated: int = 2500,
    length: int = 2048,
    samples: int = 19,
    queries: int = 3000,
    progress: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Measure a model; `pod.calibration.save` writes what it returns.

    What is longer than the model's `max_position_embeddings` is made shorter.

    Args:
        model: as `pod.model.probe.watch` takes it, dense or PoD.
        tokenizer, text: for all but razor.
        measure: of MEASUREMENTS.
        repeated: random tokens that razor repeats 4 times.
        length: tokens of kvzip's text, and of each sample of filters.
        samples: parts of the text for filters; fewer where it is shorter.
        queries: of each query head that filters look at.
        progress: show progress bars.

    Returns:
        The tensors, and how each was measured.

    Raises:
        ValueError: an unknown measurement, a number below 1, no text, or one that is too short.
    """
    check(text, measure, repeated=repeated, length=length, samples=samples, queries=queries)
    config, tensors, made = model.config, {}, {}
    most = config.max_position_embeddings

    def run(name: str, texts: Sequence[Tensor], meter: Repeats | Reconstruction | Directions, **how: int) -> None:
        watch(model, texts, [meter], name, progress)
        found = meter.result()
        tensors.update(found)
        made.update(dict.fromkeys(found, how))

    if "razor" in measure:
        size = min(repeated, (most - 1) // REPEATS)
        ids = torch.randint(config.vocab_size, (size,), generator=torch.Generator().manual_seed(0)).repeat(REPEATS)
        first = [] if config.bos_token_id is None else [config.bos_token_id]
        sample = torch.cat([torch.tensor(first, dtype=torch.long), ids])[None]
        run("razor", [sample], Repeats(size), repeated=size, repeats=REPEATS)
    if set(measure) <= {"razor"}:
        return tensors, made
    ids = token_ids(tokenizer, text)[None]
    if "kvzip" in measure:
        request = token_ids(tokenizer, FIRST)[None]
        size = min(length, ids.shape[1], (most - request.shape[1]) // 2)
        if size <= SINKS:
            raise ValueError(f"kvzip needs a text of more than {SINKS} tokens and room to repeat it, got {size}")
        sample = torch.cat([ids[:, :size], request, ids[:, :size]], dim=1)
        run("kvzip", [sample], Reconstruction(size), tokens=size)
    if "filters" in measure:
        size = min(length, ids.shape[1], most)
        parts = [part for part in ids[:, : samples * size].split(size, dim=1) if part.shape[1] == size]
        meter = Directions(len(parts), queries)
        run("filters", parts, meter, samples=len(parts), tokens=size, queries=min(size, meter.each) * len(parts))
    return tensors, made


def check(text: str | None, measure: Sequence[str], **sizes: int) -> None:
    """Refuse what `calibrate` cannot measure, before a model is loaded for it.

    Raises:
        ValueError: an unknown measurement, a number below 1, no text where one is measured on.
    """
    unknown = sorted(set(measure) - set(MEASUREMENTS))
    if unknown or not measure:
        raise ValueError(f"measurements are {', '.join(MEASUREMENTS)}; got {', '.join(unknown) or 'none'}")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not text and set(measure) - {"razor"}:
        raise ValueError("kvzip and filters are measured on a text: give one (--text-file), or measure razor alone")


def _weights(seen: Seen, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions [q] of some of the queries, which are in order, and their attention weights [H_kv, G, q, T]."""
    for at in queries.to(seen.hidden_states.device).split(_QUERIES):
        later = torch.arange(seen.hidden_states.shape[1], device=at.device) > at[:, None]
        yield at, seen.logits(at, slice(None)).unflatten(1, (-1, len(at))).masked_fill_(later, -torch.inf).softmax(-1)


@exit_status
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pod.calibrate", description=__doc__.split("\n")[0])
    parser.add_argument("--ckpt", required=True, help="an exported model's directory, or any of a supported family")
    parser.add_argument("--out", required=True, type=Path, help="the safetensors file to write")
    parser.add_argument(
        "--text-file", type=Path, help="a UTF-8 file, for all but razor; 40,000 tokens are enough to measure"
    )
    parser.add_argument("--force", action="store_true", help="replace the file, where there is one")
    measuring = parser.add_argument_group("measurements")
    measuring.add_argument("--measure", help=f"which of {','.join(MEASUREMENTS)} (all)")
    measuring.add_argument("--repeated", type=int, help="random tokens that razor repeats (2500)")
    measuring.add_argument("--length", type=int, help="tokens of kvzip's text and of filters' parts (2048)")
    measuring.add_argument("--samples", type=int, help="parts of the text for filters (19)")
    measuring.add_argument("--queries", type=int, help="of each query head, for filters (3000)")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--learn", action="store_true", help="learn duo's head scores instead; hours, on a GPU")
    learning.add_argument("--steps", type=int, help="of the optimiser, a sample each (2000)")
    learning.add_argument("--shortest", type=int, help="tokens of the shortest sample (1000)")
    learning.add_argument("--longest", type=int, help="and of the longest (32000, or what the model takes)")
    learning.add_argument("--needles", type=int, help="that a sample hides and asks for (10)")
    learning.add_argument("--words", type=int, help="of each needle (32)")
    learning.add_argument("--sink-size", type=int, help="of heads that stream (a PoD model's own; 128)")
    learning.add_argument("--recent-size", type=int, help="of heads that stream (a PoD model's own; 256)")
    learning.add_argument("--lr", type=float, help="the highest learning rate (0.02)")
    learning.add_argument("--penalty", type=float, help="what the mean gate weighs in the loss (0.05)")
    learning.add_argument("--seed", type=int, help="of the samples (0)")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        raise ValueError(f"{options.out} exists: choose another --out, or replace it with --force")
    check_writable(options.out.parent)
    text = None if options.text_file is None else read_text(options.text_file, "--text-file")
    measured, learned = (
        {name: value for name in names if (value := getattr(options, name)) is not None}
        for names in (
            ("measure", "repeated", "length", "samples", "queries"),
            ("steps", "shortest", "longest", "needles", "words", "sink_size", "recent_size", "lr", "penalty", "seed"),
        )
    )
    if wrong := measured if options.learn else learned:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"{names}: {'not with' if options.learn else 'only with'} --learn")
    folder = options.out.with_name(f"{options.out.stem}-learning")
    if options.learn:
        from pod.training.head_gates import Learning, learn  # Lightning, which measuring does without

        if text is None:
            raise ValueError("--learn hides words in a text: give one with --text-file")
        how = Learning(**learned)
        model, tokenizer = load(options.ckpt)
        scores, settings = learn(model, tokenizer, text, folder, how, weights=weights_hash(options.ckpt))
        tensors, made = {"duo": scores}, {"duo": settings}
    else:
        measured["measure"] = (options.measure or ",".join(MEASUREMENTS)).split(",")
        check(text, **measured)
        model, tokenizer = load(options.ckpt)
        tensors, made = calibrate(model, tokenizer, text, **measured)
    calibration.save(options.out, tensors, model.config, made)
    for name, how in made.items():
        shape = " x ".join(map(str, tensors[name].shape))
        print(f"{name}: {shape}, {', '.join(f'{key} {value}' for key, value in how.items())}")
    if options.learn:
        shutil.rmtree(folder / "steps")  # what a stopped run would have gone on from
    print(f"written: {options.out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
