"""Triton's kernels of decoding and updating against plain torch: interpreted without a GPU, compiled on one.

The interpreter needs tens of milliseconds for each program, so shapes are as small as the cases allow.
"""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model import left_padded, tiny_model
from torch import Tensor

import pod
from pod.eviction import CAKE, H2O, TOVA, AdaKV, Cascade, SnapKV, StreamingLLM
from pod.eviction.base import Observation
from pod_kernels import (
    LayerSlots,
    Segments,
    SkipStats,
    attention_weights,
    cached_attention,
    dispatch,
)
from pod_kernels.cached import reference_cached_attention
from pod_kernels.cascade import Cascades, CascadeState
from pod_kernels.slots import slot_attention

splits = pytest.importorskip("pod_kernels.triton.splits", reason="triton is not installed")
decode = pytest.importorskip("pod_kernels.triton.decode", reason="triton is not installed")
slot_decode = pytest.importorskip("pod_kernels.triton.slot_decode", reason="triton is not installed")
update = pytest.importorskip("pod_kernels.triton.update", reason="triton is not installed")
cascade = pytest.importorskip("pod_kernels.triton.cascade", reason="triton is not installed")
block_tables = pytest.importorskip("pod_kernels.triton.block_tables", reason="triton is not installed")
column_sums = pytest.importorskip("pod_kernels.triton.column_sums", reason="triton is not installed")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CAPACITY, SINKS, RECENT, SLACK = 40, 3, 5, 2
# Two tiles of distant tokens; shorter than the sinks; a row of which only padding was seen.
LENGTHS = (36, 2, 0)
PATTERNS = {"anchors": (True, True), "mixed": (False, True), "shared": (False, False)}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def torch_and_small_tiles(request, monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "composed")  # where a test does not ask for the kernels
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(splits, "BLOCK", 16)
        monkeypatch.setattr(splits, "SPLITS", 2)
        monkeypatch.setattr(update, "BLOCK", 16)
        monkeypatch.setattr(cascade, "BLOCK", 16)
        monkeypatch.setattr(column_sums, "TILE", (16, 16))
        monkeypatch.setattr(column_sums, "SPLITS", 2)


def random_segments(heads: int, capacity: int, lengths: Tensor, dim: int, dtype: torch.dtype) -> Segments:
    """Segments whose every slot, the unwritten ones too, holds random numbers."""
    segments = Segments.rectangular(heads, len(lengths), capacity, dim, dtype=dtype, device=lengths.device)
    segments.data.normal_()
    return segments


def make_layer(
    is_anchor: tuple[bool, ...],
    lengths: Tensor,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    capacity: int = CAPACITY,
    sizes: tuple[int, int, int] = (SINKS, RECENT, SLACK),
) -> LayerSlots:
    order = tuple(sorted(range(len(is_anchor)), key=lambda head: not is_anchor[head]))
    anchors, (sinks, recent, slack) = sum(is_anchor), sizes
    return LayerSlots(
        order=order,
        num_anchors=anchors,
        values=random_segments(len(order), capacity, lengths, dim, dtype),
        keys=random_segments(anchors, capacity, lengths, dim, dtype),
        near_keys=torch.empty(
            len(order) - anchors,
            len(lengths),
            min(capacity, sinks + recent + slack),
            dim,
            dtype=dtype,
            device=lengths.device,
        ).normal_(),
        sink_size=sinks,
        recent_size=recent,
        ring_size=recent + slack,
    )


def decoded(layer: LayerSlots, lengths: Tensor, groups: int, share: str, dtype=torch.float32, seed=0) -> dict:
    """The arguments of `cached_attention` for one query in each row."""
    torch.manual_seed(seed)
    kv_heads, dim = len(layer.order), layer.values.data.shape[1]
    batch, capacity = len(lengths), layer.values.rectangle.shape[2]
    q, q_distant = torch.randn(2, batch, kv_heads * groups, 1, dim, device=lengths.device).to(dtype)
    options = dict(q=q, positions=lengths[:, None] - 1, unused=capacity - int(lengths.max()))
    if share == "scores":
        options["scores"] = torch.randn(kv_heads, batch, groups, 1, capacity, device=lengths.device)
        options["score_heads"] = layer.order[: layer.num_anchors]
        return options
    segments = random_segments(kv_heads, capacity, lengths, dim, dtype)
    keys = tuple((segments, kv_heads - 1 - place) for place in range(kv_heads - layer.num_anchors))
    return {**options, "q_distant": q_distant, "distant_keys": keys}


def with_kernels(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as context:
        context.setenv("POD_ATTENTION_BACKEND", "fused")
        return function(*args, **kwargs)


def compare(monkeypatch, layer: LayerSlots, options: dict, tau: float | None, tolerance: float = 1e-5) -> None:
    """Everything that the kernels give back or leave behind, against the plain loops."""
    results, stats, workspaces = [], [SkipStats(), SkipStats()], []
    for kernels, count in zip((True, False), stats, strict=True):
        given = {**options, "tau": tau, "stats": count, "return_lse": True, "return_gate": True}
        if "scores" in options:
            given["scores"] = options["scores"].clone()
            workspaces.append(given["scores"])
        if kernels:
            results.append(with_kernels(monkeypatch, cached_attention, layer=layer, **given))
        else:
            results.append(reference_cached_attention(given.pop("q"), layer, **given))
    for name, one, other in zip(("out", "lse", "gate"), *results, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
    assert stats[0].collect() == stats[1]
    if workspaces:
        for row, length in enumerate((options["positions"][:, 0] + 1).tolist()):
            distant = slice(layer.sink_size, max(layer.sink_size, length - layer.recent_size))
            one, other = (workspace[:, row, ..., distant] for workspace in workspaces)
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
            assert torch.equal(workspaces[0][:, row, ..., length:], options["scores"][:, row, ..., length:])


@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("name", PATTERNS)
def test_decoding_equals_the_loops(name, tau, monkeypatch):
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    layer = make_layer(PATTERNS[name], lengths)
    compare(monkeypatch, layer, decoded(layer, lengths, 2, "scores"), tau)


@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("parts", [3, 20])
def test_any_number_of_parts(parts, tau, monkeypatch):
    """Not a power of two; more than are added up at once, most of them empty."""
    monkeypatch.setattr(splits, "SPLITS", parts)
    torch.manual_seed(8)
    lengths = torch.tensor((39, 21), device=DEVICE)
    layer = make_layer((False, True), lengths, dim=24)
    compare(monkeypatch, layer, decoded(layer, lengths, 3, "scores"), tau)


@pytest.mark.parametrize("tau", [None, 0.5])
def test_keys_of_the_anchor_and_one_kv_head(tau, monkeypatch):
    torch.manual_seed(1)
    lengths = torch.tensor((21, 9), device=DEVICE)
    layer = make_layer((False,), lengths, dim=24)
    compare(monkeypatch, layer, decoded(layer, lengths, 3, "keys"), tau)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("dim, groups", [(64, 4), (96, 1), (128, 17), (256, 2)])
def test_head_dimensions_and_groups(dim, groups, share, monkeypatch):
    torch.manual_seed(2)
    lengths = torch.tensor((39, 11), device=DEVICE)
    layer = make_layer((True, False, False), lengths, dim=dim)
    for tau in (None, 0.3):
        compare(monkeypatch, layer, decoded(layer, lengths, groups, share), tau)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("sizes", [(0, 1, 0), (0, 4, 3), (5, 1, 2), (1, 60, 4)])
def test_sizes_of_sinks_and_ring(sizes, tau, monkeypatch):
    torch.manual_seed(3)
    for lengths in ((1, 40, 17), (5, 6, 7)):
        lengths = torch.tensor(lengths, device=DEVICE)
        layer = make_layer((True, False), lengths, sizes=sizes)
        compare(monkeypatch, layer, decoded(layer, lengths, 2, "scores"), tau)


def half_errors(monkeypatch, layer: LayerSlots, options: dict) -> tuple[float, float]:
    """Largest error of the kernels and of eager torch in half precision, against float32 on the same numbers."""

    def widened(part):
        if isinstance(part, Segments):
            return replace(part, data=part.data.float())
        if isinstance(part, tuple):
            return tuple(widened(one) for one in part)
        return part.float() if isinstance(part, Tensor) and part.dtype.is_floating_point else part

    parts = {name: widened(getattr(layer, name)) for name in ("values", "keys", "near_keys")}
    wide = replace(layer, **parts)
    truth = cached_attention(layer=wide, **{name: widened(part) for name, part in options.items()})
    outs = []
    for kernels in (True, False):
        given = dict(options)
        if "scores" in given:
            given["scores"] = given["scores"].clone()
        if kernels:
            outs.append(with_kernels(monkeypatch, cached_attention, layer=layer, **given))
        else:
            outs.append(cached_attention(layer=layer, **given))
    return tuple(float((out.float() - truth).abs().max()) for out in outs)


def test_half_precision_errs_no_more_than_twice_as_much_as_eager(monkeypatch):
    torch.manual_seed(4)
    lengths = torch.tensor((40, 23), device=DEVICE)
    layer = make_layer((True, False), lengths, dtype=torch.float16, dim=32)
    options = decoded(layer, lengths, 2, "scores", torch.float16)
    error, eager = half_errors(monkeypatch, layer, options)
    assert error <= 2 * eager and eager < 1e-2


SLOTS = {"even": [[9, 9], [9, 9]], "ragged": [[21, 3], [6, 17]]}
NEWEST = (23, 4)


def packed(sizes: list[list[int]], dim: int = 16) -> Segments:
    segments = Segments.packed(sizes, 2, dim, dtype=torch.float32, device=DEVICE)
    segments.data.normal_()
    return segments


def make_packed(sizes: list[list[int]], anchors: int) -> tuple[LayerSlots, Segments]:
    """A layer with random content and its table of positions: the newest, some earlier ones, holes; two spare slots."""
    table = Segments.packed(sizes, 2, 1, dtype=torch.int32, device=DEVICE, fill=-1)
    others, places = len(sizes) - anchors, SINKS + RECENT + 3
    near_positions = torch.full((others, 2, places), -1, dtype=torch.int32)
    near_slots = torch.zeros(others, 2, places, dtype=torch.int32)
    for head, rows in enumerate(sizes):
        for row, size in enumerate(rows):
            known = torch.randperm(NEWEST[row])[: max(0, size - 3)].tolist()
            held = torch.tensor([NEWEST[row], *known] + [-1] * (size - 1 - len(known)))[torch.randperm(size)]
            table.run(head, row).copy_(held[:, None])
            is_near = (held >= 0) & ((held < SINKS) | (NEWEST[row] - held < RECENT))
            for place, slot in enumerate(is_near.nonzero()[:, 0].tolist() if head >= anchors else []):
                near_positions[head - anchors, row, place + 1] = held[slot]
                near_slots[head - anchors, row, place + 1] = slot
    layer = LayerSlots(
        order=(1, 0),
        num_anchors=anchors,
        values=packed(sizes),
        keys=packed(sizes[:anchors]),
        near_keys=torch.randn(others, 2, places, 16, device=DEVICE),
        near_positions=near_positions.to(DEVICE),
        near_slots=near_slots.to(DEVICE),
        sink_size=SINKS,
        recent_size=RECENT,
    )
    return layer, table


@pytest.mark.parametrize("name, anchors", [("even", 1), ("ragged", 0)])
def test_slots_of_any_positions_with_keys(name, anchors, monkeypatch):
    torch.manual_seed(5)
    layer, table = make_packed(SLOTS[name], anchors)
    q, q_distant = torch.randn(2, 2, 4, 1, 16, device=DEVICE)
    options = dict(
        positions=torch.tensor(NEWEST, device=DEVICE)[:, None],
        table=((table, 0), (table, 1)),
        q_distant=q_distant,
        distant_keys=tuple((packed(SLOTS[name]), head) for head in range(anchors, 2)),
    )
    out = with_kernels(monkeypatch, cached_attention, q, layer, **options)
    torch.testing.assert_close(out, reference_cached_attention(q, layer, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("anchors", [0, 1])
def test_slots_of_any_positions_read_what_their_anchor_left(anchors, monkeypatch):
    torch.manual_seed(6)
    anchor, table = make_packed(SLOTS["ragged"], 2)
    q_anchor, q = torch.randn(2, 2, 4, 1, 16, device=DEVICE)
    positions = torch.tensor(NEWEST, device=DEVICE)[:, None]
    common = dict(positions=positions, table=((table, 0), (table, 1)), return_weights=True)
    torch.manual_seed(7)
    layer, _ = make_packed(SLOTS["ragged"], anchors)
    layer.near_positions.fill_(-1)
    for head in range(anchors, 2):
        for row in range(2):
            held = table.run(head, row)[:, 0].long()
            is_near = (held >= 0) & ((held < SINKS) | (NEWEST[row] - held < RECENT))
            slots = is_near.nonzero()[:, 0]
            layer.near_positions[head - anchors, row, : len(slots)] = held[slots].int()
            layer.near_slots[head - anchors, row, : len(slots)] = slots.int()
    results = []
    for kernels in (True, False):
        # Where it is not written it must not be read.
        common["scores"] = torch.full((2, 2, 2, 1, 23), torch.nan, device=DEVICE)
        run = (lambda *args, **kwargs: with_kernels(monkeypatch, *args, **kwargs)) if kernels else None
        run = run or (lambda function, *args, **kwargs: function(*args, **kwargs))
        left = run(cached_attention, q_anchor, anchor, score_heads=(0, 1), **common)
        results.append((*left, run(cached_attention, q, layer, **common)[0]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": CAPACITY, "crop_slack": SLACK},
        pytest.param({"eviction": SnapKV(budget=9, window=4)}, marks=pytest.mark.slow),
        pytest.param({"eviction": StreamingLLM(budget=9, sinks=3, positions="absolute")}, marks=pytest.mark.slow),
    ],
    ids=["all", "packed", "slots"],
)
def test_tokens_are_stored_bit_for_bit(options, monkeypatch):
    lengths, blocks = torch.tensor((36, 3), device=DEVICE), pod.LayerBlocks([[0, 0], [0, 1]])
    config = pod.convert(tiny_model(num_hidden_layers=2), blocks, sink_size=SINKS, recent_size=RECENT).config
    prompt = torch.arange(36, device=DEVICE) >= 36 - lengths[:, None]
    stored = []
    for name in ("fused", "composed"):
        cache = pod.PodCache(config, **options)
        torch.manual_seed(9)
        for mask in (prompt, *(torch.ones(2, 1, dtype=torch.bool, device=DEVICE) for _ in range(2))):
            count = mask.shape[1]
            cache.begin(config, torch.zeros(2, count, 8, device=DEVICE), mask, None)
            anchors = None, None
            for layer in range(2):
                q, k, v = (torch.randn(2, heads, count, 16, device=DEVICE) for heads in (4, 2, 2))
                with monkeypatch.context() as context:
                    context.setenv("POD_ATTENTION_BACKEND", name if count == 1 else "composed")
                    cache._storage.by_kernels = None
                    cache.attend(layer, q, k, v, *anchors, 0.25)
                anchors = (q, k) if count > 1 else anchors
            with monkeypatch.context() as context:
                context.setenv("POD_ATTENTION_BACKEND", name)
                cache.finish()
        stored.append(cache.storages())
    if cache._storage.is_fixed:
        stored = [parts[:-2] + [part[..., :-1] for part in parts[-2:]] for parts in stored]
    # What nothing is in yet has the backend's own page size.
    assert all(torch.equal(one, other) for one, other in zip(*stored, strict=True) if one.numel() or other.numel())


def inserted_alike(levels: int, size: int, sinks: int, reduction: str, steps: int) -> None:
    """A token at a time into two states, by torch and by the kernels; the second row begins later."""
    cascades = Cascades(sinks, levels * size, levels)
    states = [CascadeState.allocate(cascades, 2, 2, True, DEVICE) for _ in range(2)]
    seen, generator = np.array([0, 0]), torch.Generator().manual_seed(0)
    for step in range(steps):
        new = np.array([1, int(step >= steps // 4)])
        positions = torch.tensor([[seen[0]], [seen[1] if new[1] else -1]], device=DEVICE)
        used = min(int(seen.max()), cascades.slots)
        # Few different numbers, so that there are ties.
        sums = torch.rand(2, 2, 3, used + 1, generator=generator).mul(4).round().to(DEVICE)
        factors = torch.tensor([0.9, 0.9 if new[1] else 1.0], device=DEVICE)
        plain, fast = states
        reduced = sums.amax(dim=2) if reduction == "max" else sums.mean(dim=2)
        plain.scores[..., :used].mul_(factors[:, None]).add_(reduced[..., :used])
        expected = plain.insert(cascades, cascades.plan(seen, new, 1, DEVICE), positions, reduced[..., used:])
        scores = cascade.average(fast.scores, sums, factors, reduction)
        assert torch.equal(scores, reduced[..., used:])
        assert torch.equal(cascade.insert(fast, cascades, positions, scores), expected)
        # What has no slot or place goes to the last column, which says nothing.
        for one, other in zip(fast.tensors(), plain.tensors(), strict=True):
            assert torch.equal(one[..., :-1], other[..., :-1])
        seen = seen + new


def test_a_cascade_takes_a_token_bit_for_bit():
    inserted_alike(3, 2, 1, "max", 16)


@pytest.mark.slow
@pytest.mark.parametrize("levels, size, sinks, reduction", [(1, 3, 2, "max"), (4, 3, 0, "mean"), (2, 1, 2, "max")])
def test_cascades_take_tokens_bit_for_bit(levels, size, sinks, reduction):
    inserted_alike(levels, size, sinks, reduction, 40)


def chunk(count: int, used: int, dtype: torch.dtype, shape=(2, 2, 2, 24)) -> dict:
    """The arguments of `slot_attention` for a chunk whose second row has padding, and fewer slots in use."""
    heads, batch, groups, dim = shape
    torch.manual_seed(10)
    q = torch.randn(heads, batch, groups, count, dim, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, heads, batch, used + count, dim, device=DEVICE).to(dtype)
    counts = torch.tensor([count, max(1, count - 3)], device=DEVICE)[:batch]
    positions = torch.arange(count, device=DEVICE) - (count - counts)[:, None]
    return dict(
        q=q,
        keys=keys.split([used, count], dim=2),
        values=values.split([used, count], dim=2),
        kept=torch.tensor([used, used // 2], device=DEVICE)[:batch],
        positions=torch.where(positions >= 0, positions + 50, -1),
        anchors=[],
        own=None,
        share="scores",
        sink_size=0,
        recent_size=1,
        scale=0.3,
        decay=0.9 ** torch.arange(count - 1, -1, -1, device=DEVICE, dtype=torch.float32),
    )


@pytest.mark.parametrize(
    "count, used",
    [
        pytest.param(19, 21, marks=pytest.mark.slow),
        (5, 0),
        pytest.param(33, 7, marks=pytest.mark.slow),
    ],
)
def test_a_chunk_and_what_its_keys_received(count, used, monkeypatch):
    options = chunk(count, used, torch.float32, (1, 2, 2, 24))
    out, sums, _ = with_kernels(monkeypatch, slot_attention, **options)
    expected, expected_sums, _ = slot_attention(**options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "count", [1, pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)]
)
def test_what_keys_receive_from_a_window(count):
    torch.manual_seed(11)
    # Keys as a model hands them over: of another order in memory, positions shared by all heads.
    q, keys = torch.randn(1, 2, 2, count, 24, device=DEVICE), torch.randn(2, 37, 1, 24, device=DEVICE)
    keys = keys.permute(2, 0, 1, 3)
    held = (torch.arange(37, device=DEVICE) - torch.tensor([[0], [9]], device=DEVICE)).clamp(min=-1)
    positions = held[:, 37 - count :].clone()
    positions[1, : count // 2] = -1
    held = held.expand(1, -1, -1)
    weights = attention_weights(q, keys, held, positions, 0.3)
    seen = Observation(weights.transpose(0, 1), held.transpose(0, 1), positions[:, -1], in_order=True, decoding=False)
    expected = [part.transpose(0, 1) for part in (seen.sums(), seen.variances(), seen.entropies())]
    found = column_sums.column_statistics(q, keys, held, positions, 0.3, with_spread=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    alone = column_sums.column_statistics(q, keys, held, positions, 0.3, with_spread=False)
    assert torch.equal(alone[0], found[0]) and alone[1] is alone[2] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [CAKE(budget=9, window=4), H2O(budget=9), TOVA(budget=9)], ids=["cake", "h2o", "tova"]
)
def test_a_prefill_keeps_the_same_tokens(method, monkeypatch):
    model, (ids, mask, _) = tiny(), left_padded((20, 13), 20)
    kept = []
    for name in ("fused", "composed"):
        cache = pod.PodCache(model.config, eviction=method)
        with monkeypatch.context() as context, torch.no_grad():
            context.setenv("POD_ATTENTION_BACKEND", name)
            with cache.prefill():
                for part in (slice(0, 12), slice(12, 20)):
                    known = mask[:, : part.stop].to(DEVICE)
                    model(ids[:, part].to(DEVICE), attention_mask=known, past_key_values=cache)
        kept.append(cache.positions(0))
    assert torch.equal(*kept)


def tiny(layers: int = 2) -> torch.nn.Module:
    blocks = pod.LayerBlocks([[0, 0], [0, 1], [0, 1]][:layers])
    stock = tiny_model("qwen3", num_hidden_layers=layers)
    return pod.convert(stock, blocks, sink_size=2, recent_size=5).to(DEVICE)


def generated(monkeypatch, model, kernels: bool, steps: int, **options) -> tuple[Tensor, list[Tensor], SkipStats]:
    """Logits of greedy decoding of two rows, one of them left-padded, what the cache then stores, and its counts."""
    ids, mask, _ = (part.to(DEVICE) for part in left_padded((20, 6), 20))
    cache = pod.PodCache(model.config, **options)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
    with monkeypatch.context() as context:
        context.setenv("POD_ATTENTION_BACKEND", "fused" if kernels else "composed")
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            past_key_values=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
    stored = cache.storages()
    if cache._storage.is_fixed:
        # What has no slot or place goes to the last column of the state, which says nothing.
        state = cache._storage._state.tensors()
        stored = stored[: -len(state)] + [part[..., :-1] for part in state]
    return torch.stack(out.logits), stored, cache.stats


def assert_generates_alike(monkeypatch, model, steps: int, **options) -> None:
    (logits, stored, stats), (expected, known, counted) = (
        generated(monkeypatch, model, kernels, steps, **options) for kernels in (True, False)
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert stats == counted and (options.get("tau") is None or stats.skipped > 0)
    for one, other in zip(stored, known, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"tau": 0.4}, {"eviction": H2O(budget=9)}], ids=["tau", "h2o"])
def test_generate(options, monkeypatch):
    assert_generates_alike(monkeypatch, tiny(), 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 30},
        {"eviction": SnapKV(budget=9, window=4)},
        {"eviction": AdaKV(budget=9, window=4), "max_length": 30},
        {"eviction": TOVA(budget=9)},
        {"eviction": CAKE(budget=9, window=4)},
        {"eviction": Cascade(budget=8, sinks=2, num_cascades=2, gamma=0.5)},
        {"eviction": StreamingLLM(budget=8, sinks=2, positions="absolute")},
    ],
    ids=["none", "snapkv", "adakv", "tova", "cake", "cascade", "absolute"],
)
def test_generate_with_every_kind_of_storage(options, monkeypatch):
    assert_generates_alike(monkeypatch, tiny(3), 3, **options)


def test_a_backend_that_cannot_run_is_refused_with_the_reason(monkeypatch):
    states = torch.zeros(1, 16)
    monkeypatch.delenv("POD_ATTENTION_BACKEND")
    assert not dispatch.runs_triton(states)
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "tritn")
    with pytest.raises(ValueError, match="POD_ATTENTION_BACKEND 'tritn' does not exist: valid are 'auto'"):
        dispatch.runs_triton(states)
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "fused")
    with monkeypatch.context() as context:
        context.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match="the tensors are on cpu, not on a CUDA device"):
            dispatch.runs_triton(states)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.runs_triton(states)
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        dispatch.runs_triton(states.bfloat16())
    with pytest.raises(ValueError, match="float64 is none of"):
        dispatch.runs_triton(states.double())
    with pytest.raises(ValueError, match="head dimension 320 is above 256"):
        dispatch.runs_triton(torch.zeros(1, 320))
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        dispatch.runs_triton(states)
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "auto")
    assert not dispatch.runs_triton(states)
    monkeypatch.setattr(dispatch, "chosen", lambda shapes: dispatch.TORCH._replace(backend="fused"))  # not by name
    assert not dispatch.runs_triton(states)


@pytest.mark.slow
def test_without_triton_all_works_by_torch():
    program = """
import sys
sys.modules["triton"] = None  # an import of it raises ModuleNotFoundError
import torch, pod
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
config = LlamaConfig(**sizes, pad_token_id=0)
model = pod.convert(LlamaForCausalLM(config), pod.LayerBlocks([[0] * 2] * 2), sink_size=1, recent_size=2).eval()
print(model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, min_new_tokens=3).shape[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["8"], done.stderr[-3000:]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    modules = decode, slot_decode, splits, update, cascade, column_sums, block_tables
    parts = {part.fn for module in modules for part in vars(module).values() if hasattr(part, "fn")}
    sources = {part.__name__: inspect.getsource(part) for part in parts}
    # What another one calls is compiled with that.
    calls = "".join(source.split("):", 1)[1] for source in sources.values())
    kernels = {name for name in sources if not re.search(rf"\b{name}\(", calls)}
    assert "_attend" in kernels and kernels == set(done.stdout.split())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_large_bfloat16(dim, share, monkeypatch):
    torch.manual_seed(0)
    lengths = torch.tensor((8192, 5000, 17, 4101), device=DEVICE)
    sizes = (16, 1008, 64)
    layer = make_layer((True, False, False, True), lengths, dim, torch.bfloat16, 8192, sizes)
    options = decoded(layer, lengths, 4, share, torch.bfloat16)
    error, eager = half_errors(monkeypatch, layer, options)
    assert error <= 2 * eager


@pytest.mark.slow
def test_generate_inside_a_window(monkeypatch):
    stock = tiny_model("qwen3", num_hidden_layers=2)
    model = pod.convert(stock, pod.LayerBlocks.dense(2, 2), sink_size=2, recent_size=5, share="window").to(DEVICE)
    assert_generates_alike(monkeypatch, model, 3)


@pytest.mark.gpu
@needs_gpu
def test_large_ragged_slots_in_bfloat16(monkeypatch):
    torch.manual_seed(2)
    sizes = [[4096, 700], [1500, 4096]]
    newest = torch.tensor((6000, 5000), device=DEVICE)
    table = Segments.packed(sizes, 2, 1, dtype=torch.int32, device=DEVICE, fill=-1)
    for head in range(2):
        for row in range(2):
            held = torch.randperm(int(newest[row]), device=DEVICE)[: sizes[head][row] - 5]
            table.run(head, row)[: len(held), 0] = held.int()
    layers = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        values, keys = (Segments.packed(sizes, 2, 128, dtype=torch.float32, device=DEVICE) for _ in range(2))
        for part in (values, keys):
            part.data = torch.randn(part.data.shape, device=DEVICE).bfloat16().to(dtype)
        none = torch.empty(0, 2, 0, 128, dtype=dtype, device=DEVICE)
        index = torch.empty(0, 2, 0, dtype=torch.int32, device=DEVICE)
        near = {"near_positions": index, "near_slots": index}
        layers[dtype] = LayerSlots((1, 0), 2, values, keys, none, SINKS, RECENT, **near)
    q = torch.randn(2, 8, 1, 128, device=DEVICE).bfloat16()
    options = dict(positions=newest[:, None], table=((table, 0), (table, 1)))
    truth = cached_attention(q.float(), layers[torch.float32], **options)
    eager = cached_attention(q, layers[torch.bfloat16], **options)
    runs = [with_kernels(monkeypatch, cached_attention, q, layers[torch.bfloat16], **options) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    errors = [float((out.float() - truth).abs().max()) for out in (runs[0], eager)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.gpu
@needs_gpu
def test_a_large_chunk_in_bfloat16(monkeypatch):
    options = chunk(1024, 4096, torch.bfloat16, (4, 2, 4, 128))
    results = [with_kernels(monkeypatch, slot_attention, **options) for _ in range(20)]
    assert all(
        torch.equal(part, first) for result in results for part, first in zip(result[:2], results[0], strict=False)
    )
    eager = slot_attention(**options)
    wide = {name: part.float() if name == "q" else part for name, part in options.items()}
    for name in ("keys", "values"):
        wide[name] = tuple(part.float() for part in options[name])
    truth = slot_attention(**wide)
    for part in range(2):
        errors = [float((result[part].float() - truth[part]).abs().max()) for result in (results[0], eager)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tau", [None, 0.2])
def test_outputs_are_written_whole_and_bits_repeat(tau, monkeypatch):
    torch.manual_seed(1)
    lengths = torch.tensor((8192, 5000, 0, 4101), device=DEVICE)
    layer = make_layer((True, False, False, True), lengths, 128, torch.bfloat16, 8192, (16, 1008, 64))
    options = decoded(layer, lengths, 4, "scores", torch.bfloat16)
    allocate = torch.empty

    def poisoned(*args, **kwargs):
        out = allocate(*args, **kwargs)
        return out.fill_(torch.nan) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like: poisoned(like.shape, dtype=like.dtype, device=DEVICE))
    first = None
    for _ in range(20):
        given = {**options, "scores": options["scores"].clone(), "tau": tau, "return_lse": True, "return_gate": True}
        results = with_kernels(monkeypatch, cached_attention, layer=layer, **given)
        assert not any(bool(part.isnan().any()) for part in results)
        first = results if first is None else first
        assert all(torch.equal(one, other) for one, other in zip(results, first, strict=True))
