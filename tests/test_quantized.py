"""Quantised caches: codes and what is read are those of plain quantise-dequantise loops; bytes; eviction; misuse."""

import copy
from dataclasses import replace

import pytest
import torch
from test_cache import ANCHORS, DENSE, assert_close, build, fed, greedy, left_padded, recomputed, tokens
from torch import Tensor

import pod
from pod.eviction import CAKE, H2O, TOVA, AdaKV, Cascade, PyramidKV, Quest, SageKV, SnapKV, StreamingLLM
from pod_kernels.quantized import Quantization, QuantizedSegments, quantized
from pod_kernels.segments import Segments

MODELS = [
    pytest.param(("llama", "scores", ANCHORS), id="llama-scores"),
    pytest.param(("qwen3", "keys", ANCHORS), id="qwen3-keys"),
    pytest.param(("llama", "scores", DENSE), id="llama-dense"),
]
SPECS = [Quantization(8, 4, 7), Quantization(4, 4, 7), Quantization(4, 5, 1)]
EVICTIONS = [SnapKV(24, window=4), PyramidKV(24, window=4), AdaKV(24, window=4)]
EVICTIONS += [H2O(24, query_aware=False), SageKV(24, query_aware=False), TOVA(24, query_aware=False)]


def named(methods):
    return pytest.mark.parametrize("method", methods, ids=lambda method: type(method).__name__)


def rounded_off(numbers: list[float], bits: int) -> tuple[list[float], float]:
    """The numbers of one group after quantising and dequantising, and the size of a step."""
    low, step = min(numbers), (max(numbers) - min(numbers)) / (2**bits - 1)
    if step == 0:
        return numbers, 0.0
    return [low + step * round((number - low) / step) for number in numbers], step


def truth(vectors: Tensor, spec: Quantization, is_key: bool, closed: int = 0) -> tuple[Tensor, Tensor]:
    """One segment's vectors [n, D], n in use, after storage: plain loops over groups, channels and tokens.

    closed: groups that were closed before. Returns them, and the step of each number (0 where it is as it was).
    """
    out, steps = vectors.clone().double(), torch.zeros_like(vectors).double()
    width = spec.group if vectors.shape[1] % spec.group == 0 else vectors.shape[1]
    for first in range(0, len(vectors) - spec.residual - spec.group + 1, spec.group):
        if first < closed * spec.group:
            continue
        for token in [None] if is_key else range(first, first + spec.group):
            channels = vectors.shape[1] if is_key else vectors.shape[1] // width
            for part in range(channels):
                where = slice(first, first + spec.group), part
                if not is_key:
                    where = token, slice(part * width, part * width + width)
                numbers, step = rounded_off(vectors[where].double().tolist(), spec.bits)
                out[where], steps[where] = torch.tensor(numbers, dtype=torch.float64), step
    return out, steps


# ---------------------------------------------------------------------- the segments alone


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole groups", "any sizes"])
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, Quantization(8, 3, 2), Quantization(4, 8, 20)], ids=str)
def test_segments_hold_the_truth_as_they_fill(spec, is_key, is_told, is_whole):
    generator, dim = torch.Generator().manual_seed(0), 16
    sizes = [[50, 9], [33, 50]]
    if is_whole:
        sizes = [list(map(spec.rounded, head)) for head in sizes]
    written = [torch.randn(sizes[n // 2][n % 2], dim, generator=generator) for n in range(4)]
    written[3][:, 2] = 1.5  # a channel without a spread
    held = QuantizedSegments.allocate(spec, is_key, sizes, 2, dim, dtype=torch.float32, device="cpu")
    expected, used, closed = [part.clone() for part in written], [0] * 4, [0] * 4
    for more in (3, 1, 1, 20, 1, 1, 1, 1, 9, 5):
        full = held.full()
        for n in range(4):
            count = min(more, len(written[n]) - used[n])
            run = full.run(n // 2, n % 2)
            run[used[n] : used[n] + count] = written[n][used[n] : used[n] + count]
            used[n] += count
            expected[n][: used[n]] = truth(expected[n][: used[n]], spec, is_key, closed[n])[0]
            closed[n] = max(closed[n], (used[n] - spec.residual) // spec.group)
        held.absorb(full, torch.tensor(used), more if is_told else None)
        assert held.closed.tolist() == [max(0, one) for one in closed]
        for n in range(4):
            for found in (held.full().run(n // 2, n % 2), held.full(n // 2).run(0, n % 2)):
                torch.testing.assert_close(found[: used[n]], expected[n][: used[n]], atol=1e-6, rtol=1e-6)
    assert max(closed) > 1
    for n, part in enumerate(written):
        difference = (held.full().run(n // 2, n % 2)[: used[n]] - part[: used[n]]).abs().double()
        _, steps = truth(part[: used[n]], spec, is_key)
        assert (difference <= steps / 2 + 1e-6).all() and (difference[steps == 0] <= 1e-6).all()
    bytes_of = [spec.nbytes(size, dim, 4, is_key) for head in sizes for size in head]
    assert held.nbytes() == sum(bytes_of) == sum(one.untyped_storage().nbytes() for one in held.named("").values())
    rows = held.of_rows(torch.tensor((1, 0, 1)))
    for head in range(2):
        for place, row in enumerate((1, 0, 1)):
            count = used[head * 2 + row]
            assert torch.equal(rows.full().run(head, place)[:count], held.full().run(head, row)[:count])


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize(
    "sizes", [[[0, 12], [9, 0]], [[15, 0], [0, 0]], [[3, 3], [0, 18]], [[0, 0], [0, 0]], [[7, 0], [4, 16]]], ids=str
)
def test_segments_of_no_slots_touch_no_others(sizes, is_key, is_told):
    spec, dim = Quantization(8, 3, 2), 16
    where = dict(dtype=torch.float32, device="cpu")
    held = QuantizedSegments.allocate(spec, is_key, sizes, 2, dim, **where)
    alone = {
        (head, row): QuantizedSegments.allocate(spec, is_key, [[sizes[head][row]]], 1, dim, **where)
        for head in range(2)
        for row in range(2)
        if sizes[head][row]
    }
    generator, used = torch.Generator().manual_seed(0), [0] * 4
    for more in (4, 1, 1, 7, 1, 30):
        full = held.full()
        for (head, row), one in alone.items():
            n, own = head * 2 + row, one.full()
            count = min(more, sizes[head][row] - used[n])
            new = torch.randn(count, dim, generator=generator)
            for run in (full.run(head, row), own.run(0, 0)):
                run[used[n] : used[n] + count] = new
            used[n] += count
            one.absorb(own, torch.tensor([used[n]]))
        held.absorb(full, torch.tensor(used), more if is_told else None)
        for (head, row), one in alone.items():
            assert torch.equal(held.full().run(head, row), one.full().run(0, 0))
            assert torch.equal(held.full(head).run(0, row), one.full().run(0, 0))


def test_codes_take_their_bits():
    # 32 tokens of 128 channels: 4 bits each, and two half-precision numbers for each 32 of them, are 5 bits.
    spec = Quantization(4, 32, 1)
    assert spec.nbytes(4096, 128, 2, True) - spec.nbytes(0, 128, 2, True) == 4096 * 128 * 5 // 8
    assert spec.nbytes(4096, 128, 2, False) - spec.nbytes(0, 128, 2, False) == 4096 * 128 * 5 // 8
    full = Segments.packed([[64]], 1, 128, dtype=torch.bfloat16, device="cpu")
    full.data.copy_(torch.randn(64, 128))
    held = quantized(full, torch.tensor([64]), spec, True)
    assert held.nbytes() == spec.nbytes(64, 128, 2, True) and held.closed.tolist() == [1]
    difference = (held.full().data - full.data)[:32].float().abs()
    # Half a step, and what bfloat16 rounds off of scale, lowest value and sum.
    assert (difference <= held.scales[0].float() / 2 + 3 * 2**-8 * full.data[:32].float().abs().amax()).all()


# ---------------------------------------------------------------------- the cache


class Followed:
    """A cache that is not quantised, made to hold what a quantised one holds, which went ahead, after each layer.

    What the quantised one holds is checked first: the truth of what this one was given. A number halfway between two
    codes may fall on either side, as the two caches' numbers differ in their last bits; `flips` counts these.
    """

    def __init__(self, cache: pod.PodCache, ahead: pod.PodCache) -> None:
        self.cache, self.ahead, self.attend = cache, ahead, cache.attend
        self.closed, self.numbers, self.flips = {}, 0, 0
        cache.attend = self

    def __call__(self, index: int, *states) -> Tensor:
        out = self.attend(index, *states)
        layer, other = (one._storage.layers[index] for one in (self.cache, self.ahead))
        spec = self.ahead.quantization
        for is_key, part, held in ((False, layer.values, other.values), (True, layer.keys, other.keys)):
            assert isinstance(held, QuantizedSegments) or not part.data.numel()
            held = held.full()
            for place, head in enumerate(layer.order[: layer.num_anchors] if is_key else layer.order):
                for row in range(part.offsets.shape[0]):
                    used = int(self.cache._storage.step.positions[row, -1]) + 1
                    if self.cache.eviction is not None:
                        used = int((self.cache.positions(index)[row, head] >= 0).sum())
                    start, key = int(part.offsets[row, place]), (index, is_key, place, row)
                    run, found = part.data[start : start + used], held.run(place, row)[:used]
                    expected, steps = truth(run, spec, is_key, self.closed.get(key, 0))
                    difference = (found - expected).abs()
                    assert (difference <= 1.01 * steps + 1e-4).all()
                    self.flips += int((difference > 1e-4).sum())
                    self.numbers += int((steps > 0).sum())
                    run.copy_(found)
                    self.closed[key] = max(self.closed.get(key, 0), (used - spec.residual) // spec.group)
        return out


@pytest.mark.parametrize("method", [None, *EVICTIONS], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize(
    "which", [MODELS[0], *(pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in MODELS[1:])]
)
def test_what_is_read_is_the_truth(which, method):
    spec = SPECS[1] if method is None or method.query_aware else SPECS[0]
    model, (ids, mask) = build(*which), left_padded((45, 31))
    options = dict(max_length=100, eviction=method, crop_slack=1)
    plain, held = pod.PodCache(model.config, **options), pod.PodCache(model.config, **options, quantization=spec)
    followed = Followed(plain, held)
    assert_close(fed(model, held, ids, mask), fed(model, plain, ids, mask))  # one piece is in full precision
    assert max(followed.closed.values()) > 2
    before = sum(followed.closed.values())
    for step in range(9):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = tokens(2, 1, seed=step)
        assert_close(fed(model, held, new, mask), fed(model, plain, new, mask))
    assert sum(followed.closed.values()) > before
    if method is None or not method.query_aware:
        mask = torch.nn.functional.pad(mask, (0, 6), value=1)
        assert_close(fed(model, held, tokens(2, 6), mask), fed(model, plain, tokens(2, 6), mask))
    assert held.nbytes() == sum(storage.untyped_storage().nbytes() for storage in held.storages())
    for layer in range(5):
        assert torch.equal(held.positions(layer), plain.positions(layer))
    assert followed.flips < 1e-3 * followed.numbers


@pytest.mark.parametrize("which", MODELS)
def test_bytes_are_freed_and_the_formula(which):
    model = build(*which)
    for bits, least in ((8, 0.5), (4, 0.65)):
        spec = Quantization(bits, 16, 16)
        for length in (400, 403):
            cache = pod.PodCache(model.config, max_length=length, crop_slack=0, quantization=spec)
            fed(model, cache, tokens(2, 5))
            assert cache.nbytes() == cache.expected_nbytes(length, batch=2, itemsize=4)
            assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
            plain = pod.PodCache(model.config, crop_slack=0).expected_nbytes(length, batch=2, itemsize=4)
            assert cache.nbytes() < (1 - least) * plain
            parts = [part for layer in cache._storage.layers for part in (layer.values, layer.keys)]
            kinds = {type(part) for part in parts if len(part.sizes)}
            assert kinds == {QuantizedSegments}  # no layer stays in full precision


@pytest.mark.parametrize("max_length", [None, pytest.param(330, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method",
    [SnapKV(64, window=16), SnapKV(70, window=16), SnapKV(190, window=4), PyramidKV(150), AdaKV(150), TOVA(64), None],
    ids=str,
)
@pytest.mark.parametrize("which", [MODELS[0], pytest.param(*MODELS[2].values, marks=pytest.mark.slow)])
def test_there_are_never_more_bytes_than_plain_ones(which, method, max_length):
    model, held = build(*which), []
    if isinstance(method, TOVA):
        method = TOVA(64, query_aware=False)
    for quantization in (None, Quantization(8), Quantization(4), Quantization(4, residual=64)):
        cache = pod.PodCache(model.config, max_length, method, quantization=quantization)
        sizes = []
        for count in (3, 300, 1, 20, 1, 1):  # what is small grows, and is evicted again
            fed(model, cache, tokens(1, count))
            sizes.append(cache.nbytes())
        held.append(sizes)
    plain, *others = held
    assert all(size <= most for sizes in others for size, most in zip(sizes, plain, strict=True))
    if method is None or method.budget >= 150:  # and where it pays there are fewer
        assert others[-1][-1] < 0.9 * plain[-1]


@pytest.mark.slow
@named(EVICTIONS)
@pytest.mark.parametrize("which", MODELS[:2])
def test_eviction_then_turns_rows_crops_and_beams(method, which):
    # Growth, a second turn that evicts again, and reordered rows: everything works and stays close to full precision.
    model, (ids, mask) = build(*which), left_padded((110, 97))
    method, spec, logits = replace(method, budget=72), Quantization(8, 4, 8), []
    for quantization in (spec, None):
        cache = pod.PodCache(model.config, eviction=method, crop_slack=2, quantization=quantization)
        now, found = mask, [fed(model, cache, ids, mask)[:, -1:]]
        for count, seed in ((1, 1), (1, 2), (7, 3), (1, 4), (1, 5)):
            now = torch.nn.functional.pad(now, (0, count), value=1)
            found.append(fed(model, cache, tokens(2, count, seed=seed), now))
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        now = now[[1, 0, 1]]
        for seed in range(3):
            found.append(fed(model, cache, tokens(3, 1, seed=seed), now))
            now = torch.nn.functional.pad(now, (0, 1), value=1)
        logits.append(torch.cat([one.flatten(0, 1) for one in found]))
    difference = (logits[0] - logits[1]).abs()
    assert 1e-6 < difference.max() and difference.mean() < 0.1 * logits[1].abs().mean()
    cache = pod.PodCache(model.config, eviction=method, crop_slack=2, quantization=spec)
    options = dict(attention_mask=mask, max_new_tokens=6, suppress_tokens=[0])
    assert model.generate(ids, past_key_values=cache, num_beams=3, do_sample=False, **options).shape == (2, 116)
    cache = pod.PodCache(model.config, eviction=method, quantization=Quantization(4, 4, 64))
    out = model.generate(ids, past_key_values=cache, prefill_chunk_size=20, do_sample=False, **options)
    assert out.shape == (2, 116)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())


@pytest.mark.slow
@pytest.mark.parametrize("which", MODELS)
def test_growth_crops_and_rows_without_eviction(which):
    model, ids = build(*which), tokens(2, 120)
    whole = pod.PodCache(model.config, max_length=130, crop_slack=4, quantization=Quantization(8, 4, 6))
    grown = pod.PodCache(model.config, crop_slack=4, quantization=Quantization(8, 4, 6))
    first = [fed(model, cache, ids[:, :60]) for cache in (whole, grown)]
    assert_close(*first)
    for at in range(60, 90):
        assert_close(*(fed(model, cache, ids[:, at : at + 1]) for cache in (whole, grown)))
    for cache in (whole, grown):
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert_close(*(fed(model, cache, ids[[1, 1, 0], 86:110], chunks=(9, 1, 14)) for cache in (whole, grown)))
    expected = recomputed(model, ids[[1, 1, 0], :111])[:, -1]
    found = fed(model, whole, ids[[1, 1, 0], 110:111])[:, -1]
    assert 0 < (found - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_what_has_grown_is_quantised_from_where_it_pays():
    model, kinds = build(), []
    cache, plain = (
        pod.PodCache(model.config, crop_slack=8, quantization=spec) for spec in (Quantization(8, 4, 8), None)
    )
    for count in (20, 5, 90, 1, 1):
        outs = [fed(model, one, tokens(2, count)) for one in (cache, plain)]
        kinds.append(type(cache._storage.layers[0].values))
        assert cache.nbytes() <= plain.nbytes()
        if kinds[-1] is Segments:
            assert_close(*outs)
    assert kinds == [Segments] * 2 + [QuantizedSegments] * 3
    assert 1e-6 < (outs[0] - outs[1]).abs().mean() < 0.05 * outs[1].abs().mean()


@pytest.mark.parametrize("method", [None, EVICTIONS[0], EVICTIONS[3]], ids=lambda method: type(method).__name__)
def test_a_loaded_cache_and_a_copy_go_on_alike(method, tmp_path):
    model, (ids, mask) = build(), left_padded((45, 31))
    for max_length in (None, 80):
        cache = pod.PodCache(model.config, max_length, method, crop_slack=2, quantization=Quantization(4, 4, 7))
        fed(model, cache, ids, mask)
        mask_then = torch.nn.functional.pad(mask, (0, 8), value=1)
        fed(model, cache, tokens(2, 3), mask_then[:, :48], (1, 1, 1))
        cache.save(tmp_path / "cache")
        loaded = pod.PodCache.load(tmp_path / "cache", model.config)
        assert loaded.quantization == cache.quantization and loaded.nbytes() == cache.nbytes()
        copied = copy.deepcopy(cache)
        outs = [fed(model, one, tokens(2, 5), mask_then, (1,) * 5) for one in (cache, loaded, copied)]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_forward_that_broke_off_is_named(monkeypatch):
    model, cache = build(), pod.PodCache(build().config, quantization=Quantization(8, 4, 64))
    fed(model, cache, tokens(1, 80))
    monkeypatch.setattr(model.model.layers[2].mlp, "forward", lambda states: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fed(model, cache, tokens(1, 1))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="broke off.*call cache.reset"):
        fed(model, cache, tokens(1, 1))
    cache.reset()
    assert_close(fed(model, cache, tokens(1, 20)), recomputed(model, tokens(1, 20)))
    logits = fed(model, cache, tokens(1, 1))
    assert greedy(model, cache, logits, 3)[0].shape == (1, 3)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tau=0.5), "tau=0.5 cannot be combined with quantization"),
        (dict(eviction=H2O(16)), "with H2O, which evicts while decoding.*query_aware=False"),
        (dict(eviction=CAKE(16, window=4, query_aware=False)), "with CAKE, which takes tokens from layers"),
        (dict(eviction=StreamingLLM(16)), "with StreamingLLM, which organises storage"),
        (dict(eviction=Cascade(80)), "with Cascade, which organises storage"),
        (dict(eviction=Quest(16)), "with Quest, which organises storage or pages"),
        (dict(crop_slack=200), "128 tokens in full precision.*crop_slack is 200"),
        (dict(quantization="int4"), r"such as pod.Quantization\(bits=4\), got 'int4'"),
    ],
)
def test_what_does_not_compose_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pod.PodCache(build().config, **{"quantization": pod.Quantization(), **options})


def test_a_window_model_and_bad_values_are_refused():
    window = pod.convert(build(anchors=DENSE), pod.LayerBlocks.dense(5, 2), sink_size=2, recent_size=6, share="window")
    with pytest.raises(ValueError, match="with WindowAttention"):
        pod.PodCache(window.config, quantization=pod.Quantization())
    for kwargs, message in [
        (dict(bits=3), "bits must be 8 or 4, got 3"),
        (dict(group=0), "group"),
        (dict(residual=0.5), "residual"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.Quantization(**kwargs)
