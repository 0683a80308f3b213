"""TriangleMix: the pairs that are left, by loops over them; what a cache does with it; what it is refused with."""

import math

import pytest
import torch
from tiny_models import ANCHORS, DENSE, assert_close, build, fed, tokens

import pod
from pod.eviction import Quest, SnapKV, StreamingLLM
from pod_kernels import triangle
from pod_kernels.triangle import TriangleMix, triangle_attention


def by_loops(q, k, v, q_distant, k_distant, shape, sink_size, recent_size, lengths):
    """Every pair by the rule; float64."""
    out, (rows, heads, columns, dim) = torch.zeros(*q.shape, dtype=torch.double), q.shape
    groups = heads // k.shape[1]
    for row in range(rows):
        length = columns if lengths is None else int(lengths[row])
        first = columns - length
        for head in range(heads):
            kv = head // groups
            for i in range(length):
                left = [j for j in range(i + 1) if j < shape.sinks or j > i - shape.window or i >= length - shape.last]
                logits = []
                for j in left:
                    near = q_distant is None or j < sink_size or j > i - recent_size
                    a, b = (q, k) if near else (q_distant, k_distant)
                    product = a[row, head, first + i].double() @ b[row, kv, first + j].double()
                    logits.append(product / math.sqrt(dim))
                weights = torch.stack(logits).softmax(dim=0)
                out[row, head, first + i] = weights @ v[row, kv, [first + j for j in left]].double()
    return out


SHAPES = [
    TriangleMix(0, sinks=2, window=5, last=4),
    TriangleMix(0, sinks=0, window=1, last=0),
    TriangleMix(0, sinks=9, window=3, last=1),  # more sinks than the model's, a window below its own
    TriangleMix(0, sinks=1, window=12, last=3),  # a window beyond what is proximal
    TriangleMix(0, sinks=3, window=2, last=99),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["own", "scores"])
@pytest.mark.parametrize("lengths", [None, (17, 23, 1), (0, 23, 9)])
@pytest.mark.parametrize("chunk", [256, 3])
def test_the_pairs_that_are_left(shape, kind, lengths, chunk, monkeypatch):
    monkeypatch.setattr(triangle, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(1)
    q, q_distant = 2 * torch.randn(2, 3, 6, 23, 4, generator=generator)
    k, v, k_distant = torch.randn(3, 3, 2, 23, 4, generator=generator)
    distant = (None, None) if kind == "own" else (q_distant, k_distant)
    lengths = None if lengths is None else torch.tensor(lengths)
    sizes = {"sink_size": 2, "recent_size": 6}
    found = triangle_attention(q, k, v, *distant, shape, **sizes, scale=0.5, lengths=lengths)
    expected = by_loops(q, k, v, *distant, shape, **sizes, lengths=lengths)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("anchors", [ANCHORS, DENSE], ids=["blocks", "dense"])
@pytest.mark.parametrize("family, share", [("llama", "scores"), ("qwen3", "keys"), ("llama", "kv")])
def test_a_window_as_long_as_the_prompt_leaves_everything(family, share, anchors):
    model, ids = build(family, share, anchors), tokens(2, 37)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    both = [
        fed(model, pod.PodCache(model.config, sparse_prefill=sparse), torch.cat([ids, tokens(2, 4)], dim=1),
            torch.cat([mask, mask[:, -4:]], dim=1), chunks=(37, 1, 3))
        for sparse in (None, TriangleMix(0, window=37, last=0))
    ]  # fmt: skip
    assert_close(both[1][1, 9:], both[0][1, 9:])
    assert_close(both[1][0], both[0][0])


def test_lower_layers_and_later_forwards_are_whole(monkeypatch):
    model, ids, seen = build(), tokens(1, 40), []
    attention = pod.cache.slots.triangle_attention
    monkeypatch.setattr(pod.cache.slots, "triangle_attention", lambda *a, **k: seen.append(a[0]) or attention(*a, **k))
    sparse = TriangleMix(sinks=1, window=4, last=3)
    cache, plain = pod.PodCache(model.config, sparse_prefill=sparse), pod.PodCache(model.config)
    states = [model(ids, past_key_values=one, output_hidden_states=True).hidden_states for one in (cache, plain)]
    half = len(ANCHORS) // 2
    assert len(seen) == len(ANCHORS) - half  # the upper half, by default
    for ours, theirs in list(zip(*states, strict=True))[: half + 1]:
        assert torch.equal(ours, theirs)
    # Of the first sparse layer the last queries see everything, and of the others none but the first ones do.
    differs = (states[0][half + 1] - states[1][half + 1]).abs().amax(dim=-1)[0] > 1e-4
    assert not differs[-3:].any() and not differs[:5].any() and differs[5:-3].any()
    fed(model, cache, tokens(1, 5), chunks=(1, 4))
    assert len(seen) == len(ANCHORS) - half
    cache.reset()
    fed(model, cache, ids)
    assert len(seen) == 2 * (len(ANCHORS) - half)


@pytest.mark.parametrize("options", [{"eviction": SnapKV(12, window=4)}, {"eviction": Quest(8, 4)}, {"tau": 0.5}])
def test_with_other_methods(options):
    model, ids = build(), tokens(2, 40)
    whole = TriangleMix(0, window=40)
    logits = [
        fed(model, pod.PodCache(model.config, sparse_prefill=sparse, **options), torch.cat([ids, ids[:, :3]], dim=1),
            chunks=(40, 1, 1, 1)) for sparse in (None, whole, TriangleMix(0, 2, 4, 3))
    ]  # fmt: skip
    assert_close(logits[1], logits[0])
    assert (logits[2] - logits[0]).abs().max() > 1e-3


def test_in_generate():
    model, ids = build(), tokens(2, 40)
    options = {"max_new_tokens": 6, "do_sample": False}
    cache = pod.PodCache(model.config, sparse_prefill=TriangleMix(0, window=40))
    assert model.generate(ids, past_key_values=cache, **options).tolist() == model.generate(ids, **options).tolist()


def test_fewer_pairs_are_multiplied(monkeypatch):
    pairs = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        triangle,
        "scaled_dot_product_attention",
        lambda q, k, *a, **o: pairs.append(q.shape[2] * k.shape[2]) or real(q, k, *a, **o),
    )
    length, q = 4096, torch.randn(1, 1, 4096, 4)
    triangle_attention(q, q, q, None, None, TriangleMix(), sink_size=4, recent_size=8, scale=0.5)
    # A band of 512 in chunks of 256, the sinks, and the last 128 queries; causal attention has T (T + 1) / 2.
    assert sum(pairs) <= (length - 128) * (8 + 511 + 256) + 128 * length < 0.45 * length * (length + 1) / 2


def test_what_cannot_be_is_named():
    model, ids = build(), tokens(1, 20)
    with pytest.raises(ValueError, match="window must be a whole number from 1 on, got 0"):
        TriangleMix(window=0)
    with pytest.raises(ValueError, match="starting_layer must be a whole number from 0 on, got -1"):
        TriangleMix(-1)
    with pytest.raises(ValueError, match="sparse_prefill must be such as pod.TriangleMix"):
        pod.PodCache(model.config, sparse_prefill=True)
    with pytest.raises(ValueError, match="StreamingLLM.*a window of its own"):
        pod.PodCache(model.config, eviction=StreamingLLM(16), sparse_prefill=TriangleMix())
    with pytest.raises(ValueError, match="a window of its own"):
        pod.PodCache(build(share="window", anchors=DENSE).config, sparse_prefill=TriangleMix())
    streaming = pod.convert(build(anchors=DENSE), pod.LayerBlocks([[0, -1], [1, 1], [2, 2]]), 2, 6)
    with pytest.raises(ValueError, match="cannot be combined with heads that stream"):
        pod.PodCache(streaming.config, sparse_prefill=TriangleMix())
    cache = pod.PodCache(model.config, sparse_prefill=TriangleMix())
    with pytest.raises(ValueError, match="a loss of sparse_prefill would not be the model's"):
        model(ids, past_key_values=cache, labels=ids)
    with pytest.raises(ValueError, match="the whole prompt in one forward"):
        model.generate(ids, past_key_values=cache, prefill_chunk_size=8, max_new_tokens=2)
    fed(model, cache, ids)  # what was refused has left nothing
