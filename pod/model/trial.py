"""One way to run attention, tried in a process of its own, which a crash or a hang may take with it.

    python -m pod.model.trial '{"work": "training", "dtype": "bfloat16", "head_dim": 128, "heads": 32, "kv_heads": 8,
                                "tokens": 4096, "backend": "fused", "flash": null}'

`pod.autotune` starts it, and reads its last line, JSON: `ratio`, the median over the rounds of the time by that of
torch's own operations in the same round, and `reason`, why it may not be taken, else null.

What is compared: attention with its gradients, in rows with padding and of several documents; or steps of decoding by
all that a cache does with what it keeps, evicts by scores, chains and skips; or a step of requests in block tables. The
truth has twice the digits; the error,
relative to it, may be twice that of plain matmuls in the digits at hand. Memory that is handed out is full of NaN, and
the same inputs must give the same bits.
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod.eviction import H2O, Cascade
from pod.model.probe import attended
from pod_kernels import shared_score_attention
from pod_kernels.block_tables import block_table_attention
from pod_kernels.dispatch import forced
from pod_kernels.flash import EAGER
from pod_kernels.tables import Part, Store, Tiles

EXACT = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
SINKS, RUNS, ROUNDS, STEPS = 16, 20, 10, 4
BLOCK = 16  # tokens of a serving engine's block
CHECKED = 1061  # tokens at which matmuls by pairs fit
LEAST = 2.0**-20  # relative error that sums of another order make in float32
SHARPNESS = 2.0  # of queries: with flatter attention the mean of many values would hide what a mask gets wrong


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        work: of `pod_kernels.dispatch.Work`.
        dtype: as torch writes it.
        head_dim, heads, kv_heads: of the model.
        tokens: of a sequence, or in the cache.
        backend, flash: as `pod_kernels.dispatch.Choice`.
        device: where it runs.
    """

    work: str
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    tokens: int
    backend: str
    flash: str | None = None
    device: str = "cuda"

    @property
    def recent(self) -> int:
        """Recent tokens of the window: what the paper has of a 32K context."""
        return max(1, self.tokens // 8)

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=getattr(torch, self.dtype))


class Refused(Exception):
    """The candidate ran, and may not be taken."""


def run(trial: Trial) -> float:
    """Check the candidate, and time it.

    Returns:
        its time by that of torch's own operations.

    Raises:
        Refused: it is wrong; says how.
        ValueError: it cannot run here; says why.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return {"decode": _decode, "serving": _serving}.get(trial.work, _attention)(trial)


def _errors(found: Tensor, truth: Tensor) -> dict[str, float]:
    """The mean (root of squares) and the largest error, by the mean and the largest of the truth."""
    difference, truth = (found.to(truth.dtype) - truth).abs(), truth.abs()
    mean, size = (each.square().mean().sqrt().item() for each in (difference, truth))
    return {"mean": mean / (size or 1), "largest": difference.max().item() / (truth.max().item() or 1)}


def _check(what: str, found: Tensor, truth: Tensor, eager: dict[str, float], allowed: float = 2.0) -> None:
    """Refuse a result that is not finite, or whose errors are more than `allowed` times those of `eager`."""
    if not found.isfinite().all():
        raise Refused(f"{what} has {int((~found.isfinite()).sum())} numbers that are not finite")
    for kind, error in _errors(found, truth).items():
        if error > allowed * max(eager[kind], LEAST):
            raise Refused(f"{what}: the {kind} error is {error:.2g}, that of plain matmuls {eager[kind]:.2g}")


def _ratio(ours: Callable[[], object], torchs: Callable[[], object], device: str) -> float:
    """Median over the rounds of the time of `ours` by that of `torchs`, of which each runs once before."""
    torch.use_deterministic_algorithms(False)  # nobody fills memory in what is timed
    ours(), torchs()
    ratios = []
    for _ in range(ROUNDS):
        seconds = [_seconds(work, device) for work in (torchs, ours)]
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def _seconds(work: Callable[[], object], device: str) -> float:
    if device != "cuda":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _attention(trial: Trial) -> float:
    names = ["the output", "lse", "the gate"]
    if trial.work == "training":
        names += [f"the gradient of {name}" for name in ("q", "k", "v", "q_distant", "k_distant")]
    eager: dict[str, list[dict[str, float]]] = {}
    for tokens in sorted({min(trial.tokens, CHECKED), trial.tokens}):
        case = AttentionCase(trial, tokens)
        for kind in case.placements:
            # The eager kernel has memory for any length; plain matmuls show at the first length what errors are usual.
            truth = case.results(kind, "composed", EAGER, exact=True)
            if kind not in eager:
                eager[kind] = list(map(_errors, case.results(kind, "reference", half=True), truth))
            found = case.results(kind, trial.backend, trial.flash)
            for name, *tensors in zip(names, found, truth, eager[kind], strict=True):
                _check(f"{name} of {tokens:,} tokens, {kind}", *tensors)
            for _ in range(RUNS - 1):
                again = case.results(kind, trial.backend, trial.flash)
                # torch's, cuDNN's and FlashAttention's backward add up in no fixed order.
                for name, one, other in list(zip(names, found, again, strict=True))[: None if case.is_ours else 3]:
                    if not torch.equal(one, other):
                        raise Refused(f"{name} of {tokens:,} tokens, {kind}, differs from run to run")
    works = (partial(case.results, "plain", *choice) for choice in ((trial.backend, trial.flash), ("composed", "")))
    return _ratio(*works, trial.device)


class AttentionCase:
    """Random states of so many tokens, all query heads sharing, and what they are placed in."""

    def __init__(self, trial: Trial, tokens: int) -> None:
        self.trial, self.training, self.is_ours = trial, trial.work == "training", trial.backend == "fused"
        queries, keys = ((1, heads, tokens, trial.head_dim) for heads in (trial.heads, trial.kv_heads))
        self.inputs = [trial.random(*size) for size in (queries, keys, keys, queries, keys)]
        for place in (0, 3):
            self.inputs[place] *= SHARPNESS
        self.grad = trial.random(*queries)
        cuts = torch.tensor([tokens // 3, tokens // 2 + 1], device=trial.device)
        documents = torch.bucketize(torch.arange(tokens, device=trial.device), cuts, right=True)
        self.placements: dict[str, dict[str, Tensor]] = {
            "plain": {},
            "padded": {"lengths": torch.tensor([tokens - tokens // 16 - 1], device=trial.device)},
            "several documents": {"document_ids": documents[None]},
        }
        self.sizes = {"sink_size": SINKS, "recent_size": max(1, tokens // 8)}

    def results(
        self, placement: str, backend: str, flash: str | None = None, exact: bool = False, half: bool = False
    ) -> list[Tensor]:
        """out, lse (0 of padding), gate and, in training, the inputs' gradients.

        Args:
            placement: of `placements`.
            backend, flash: what runs.
            exact: in twice the digits.
            half: products in the inputs' own digits, as autocast makes them.
        """
        dtype = self.inputs[0].dtype
        states = [state.to(EXACT[dtype]) if exact else state.detach() for state in self.inputs]
        states = [state.requires_grad_(self.training) for state in states]
        is_half = half and dtype != torch.float32
        autocast = torch.autocast(self.trial.device, dtype=dtype if is_half else None, enabled=is_half)
        place = self.placements[placement]
        with forced(backend, flash), torch.set_grad_enabled(self.training):
            with autocast:
                found = shared_score_attention(*states, **self.sizes, **place, return_lse=True, return_gate=True)
            gradients = ()
            if self.training:
                gradients = torch.autograd.grad(found[0], states, self.grad.to(states[0].dtype))
        return [found[0].detach(), found[1].masked_fill(found[1].isneginf(), 0), found[2], *gradients]


def _decode(trial: Trial) -> float:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=2 * trial.heads,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=trial.heads,
        num_key_value_heads=trial.kv_heads,
        head_dim=trial.head_dim,
        max_position_embeddings=2 * trial.tokens,
    )
    stock = LlamaForCausalLM(config)
    for layer in stock.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(layer.self_attn, name).weight, std=(SHARPNESS / config.hidden_size) ** 0.5)
    # Every other head of the second layer reads the first layer's scores.
    blocks = pod.LayerBlocks([[0] * trial.kv_heads, [head % 2 for head in range(trial.kv_heads)]])
    exact = pod.convert(stock, blocks, SINKS, trial.recent).eval().to(trial.device)
    dtype = getattr(torch, trial.dtype)
    model = copy.deepcopy(exact).to(dtype)
    exact = exact.to(EXACT[dtype])
    length = trial.tokens + RUNS + 2 * ROUNDS + STEPS
    caches: dict[str, dict[str, Any]] = {
        "that keeps all": {},
        "that evicts by scores": {"eviction": H2O(trial.recent + SINKS + trial.tokens // 4)},
        "that is a chain": {"eviction": Cascade(trial.recent + SINKS + trial.tokens // 4, sinks=4)},
        "that skips": {"tau": 0.7},
    }
    ids = torch.randint(64, (2, trial.tokens + STEPS), device=trial.device)
    mask = torch.ones_like(ids)
    mask[1, : trial.tokens // 16 + 1] = 0

    def filled(which: PreTrainedModel, **options: Any) -> pod.PodCache:
        cache = pod.PodCache(which.config, max_length=length, **options)
        with forced("composed"):
            which(ids[:, : trial.tokens], attention_mask=mask[:, : trial.tokens], past_key_values=cache)
        cache._storage.by_kernels = None  # it asks once what runs: the steps' backend is to answer
        return cache

    def steps(which: PreTrainedModel, cache: pod.PodCache, backend: str) -> Tensor:
        with attended(which) as seen, forced(backend):
            for place in range(trial.tokens, trial.tokens + STEPS):
                which(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], past_key_values=cache)
        return torch.stack(seen)

    def step(cache: pod.PodCache, backend: str) -> None:
        with forced(backend):
            model(torch.ones_like(ids[:, :1]), past_key_values=cache)

    with torch.no_grad():
        for kind, options in caches.items():  # the first one is exact, and says what errors are usual
            cache = filled(model, **options)
            eager = steps(model, copy.deepcopy(cache), "composed")
            found = steps(model, copy.deepcopy(cache), trial.backend)
            what, allowed = f"attention of a cache {kind}", 2.0
            if not options:
                truth = steps(exact, filled(exact), "composed")
                usual = _errors(eager, truth)
            else:
                # Other digits would evict and skip other tokens: the eager result stands for the truth, as far from it.
                truth, allowed = eager, 3.0
            _check(what, found, truth, usual, allowed)
            for _ in range(RUNS - 1):
                if not torch.equal(found, steps(model, copy.deepcopy(cache), trial.backend)):
                    raise Refused(f"{what} differs from run to run")
        works = (partial(step, filled(model), backend) for backend in (trial.backend, "composed"))
        return _ratio(*works, trial.device)


def _serving(trial: Trial) -> float:
    """Steps over block tables: requests of unequal lengths that decode, and with them a chunk of a prefill."""
    lengths = [max(1, trial.tokens // part) for part in (1, 2, 3, 5)]
    sizes = {"sink_size": SINKS, "recent_size": trial.recent, "scale": trial.head_dim**-0.5}
    # Every other head shares; its anchor's keys lie in another layer's blocks.
    heads = torch.arange(trial.kv_heads, device=trial.device)
    own, others = heads[::2], heads[1::2]
    width = -(-trial.tokens // BLOCK)
    count = len(lengths) * width
    table = torch.randperm(count, device=trial.device).view(-1, width)
    stores = [
        trial.random(count, vectors, BLOCK, trial.head_dim)
        for vectors in (trial.kv_heads + len(own), *2 * [len(others)])
    ]
    for blocks in stores:  # what no token was written to is no number
        by_request = blocks[table].movedim(2, 3).flatten(1, 2)
        for row, length in enumerate(lengths):
            by_request[row, length:] = torch.nan
        blocks[table] = by_request.unflatten(1, (width, BLOCK)).movedim(3, 2)

    def step(counts: list[int]) -> Callable[..., Tensor]:
        starts = np.cumsum([0, *counts])
        tiles = Tiles.of(starts, np.array(lengths), torch.device(trial.device))
        queries = [SHARPNESS * trial.random(int(starts[-1]), trial.heads, trial.head_dim) for _ in range(2)]

        def attend(backend: str, exact: bool = False) -> Tensor:
            dtype = EXACT[queries[0].dtype] if exact else queries[0].dtype
            far, near, anchors = (Store(blocks.to(dtype), table) for blocks in stores)
            q, q_distant = (each.to(dtype) for each in queries)
            keys = Part(far, trial.kv_heads + torch.arange(len(own), device=trial.device), own)
            near_keys, distant_keys = [keys], [keys]
            if len(others):
                places = torch.arange(len(others), device=trial.device)
                near_keys, distant_keys = ([keys, Part(store, places, others)] for store in (near, anchors))
            values = [Part(far, heads, heads)]
            with forced(backend):
                return block_table_attention(q, q_distant, near_keys, distant_keys, values, tiles, **sizes)

        return attend

    decoding = step([1] * len(lengths))
    for what, attend in {
        "requests that decode": decoding,
        "a chunk beside them": step([1, min(100, lengths[1]), 1, 1]),
    }.items():
        truth, eager, found = attend("composed", True), attend("composed"), attend(trial.backend)
        _check(f"attention of {what}", found, truth, _errors(eager, truth))
        if not all(torch.equal(found, attend(trial.backend)) for _ in range(RUNS - 1)):
            raise Refused(f"attention of {what} differs from run to run")
    return _ratio(partial(decoding, trial.backend), partial(decoding, "composed"), trial.device)


def report(trial: Trial) -> dict[str, Any]:
    """What `run` says, as plain values: nothing that goes wrong in it is an error here."""
    try:
        return {"ratio": run(trial), "reason": None}
    except Refused as refused:
        return {"ratio": None, "reason": str(refused)}
    except torch.OutOfMemoryError:
        return {"ratio": None, "reason": f"{trial.tokens:,} tokens do not fit"}
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"ratio": None, "reason": f"{type(error).__name__}: {lines[0] if lines else ''}"}


if __name__ == "__main__":
    print(json.dumps(report(Trial(**json.loads(sys.argv[1])))), flush=True)
