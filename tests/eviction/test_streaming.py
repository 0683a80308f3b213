"""StreamingLLM: the first tokens and the last ones, in both kinds of positions."""

import math

import pytest
import torch
from cascade_simulation import simulated_stream, softmax, turned
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cascade import DIM, HEADS, KV_HEADS, config_of, run_both
from tiny_models import ANCHORS, DENSE, assert_close, build, fed, stock_model, tokens
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pod
from pod.eviction import LMInfinite, StreamingLLM

POSITIONS = ["cache", "absolute"]
MODELS = [
    pytest.param(("llama", "keys", ANCHORS), id="llama-keys"),
    pytest.param(("qwen3", "scores", ANCHORS), id="qwen3-scores"),
    pytest.param(("llama", "scores", DENSE), id="llama-dense"),
]


@st.composite
def runs(draw):
    rows = draw(st.integers(1, 3))
    chunk = st.lists(st.integers(0, 5), min_size=rows, max_size=rows).filter(any)
    chunks = draw(st.lists(chunk, min_size=1, max_size=7))
    window, sinks = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    sizes = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    anchors = draw(st.sampled_from([((0, 0), (0, 1), (0, 1)), ((0, 0), (1, 1))]))
    return chunks, anchors, window, sinks, sizes, draw(st.sampled_from(POSITIONS))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(runs())
def test_chunks_equal_the_simulation(run):
    chunks, anchors, window, sinks, (sink_size, recent_size), positions = run
    always = sinks if anchors[1][1] == anchors[1][0] == 1 else max(sinks, sink_size)
    policy = StreamingLLM(window + always, sinks, positions)
    config = config_of(anchors, "scores", sink_size, recent_size)
    cache, _ = run_both(config, policy, (window + always, always, 1), chunks, rotates=positions == "cache")
    for row in range(len(chunks[0])):
        expected = simulated_stream(window + always, always, sum(chunk[row] for chunk in chunks))
        for layer in range(len(anchors)):
            for kept in cache.positions(layer)[row].tolist():
                assert [position for position in kept if position >= 0] == expected


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("which", MODELS)
def test_until_full_logits_are_those_without_eviction(which, positions):
    model, ids = build(*which), tokens(2, 24)
    cache = pod.PodCache(model.config, eviction=StreamingLLM(24, positions=positions, stride=5))
    got = torch.cat([fed(model, cache, ids[:, :17]), fed(model, cache, ids[:, 17:], chunks=(1,) * 7)], dim=1)
    with torch.no_grad():
        assert_close(got, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("stride, chunks", [(1, (40,)), (6, (40,)), (64, (12,) + (1,) * 28)])
def test_absolute_positions_are_a_mask(stride, chunks):
    # The stock model with a mask of what each query may see: the sinks, and the window before its stride.
    model, ids, budget, sinks = build("llama", "scores", DENSE), tokens(2, 40), 11, 3
    starts = [0]
    for chunk in chunks:
        end = starts[-1] + chunk
        while starts[-1] + stride < end:
            starts.append(starts[-1] + stride)
        starts.append(end)
    seen = torch.zeros(40, 40, dtype=torch.bool)
    for start, end in zip(starts, starts[1:], strict=False):
        kept = simulated_stream(budget, sinks, start)
        for query in range(start, end):
            seen[query, [*kept, *range(start, query + 1)]] = True
    mask = torch.zeros(40, 40).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, 1, 40, 40)
    with torch.no_grad():
        expected = stock_model("llama", len(DENSE))(ids, attention_mask=mask, use_cache=False).logits
    cache = pod.PodCache(model.config, eviction=StreamingLLM(budget, sinks, "absolute", stride))
    assert_close(fed(model, cache, ids, chunks=chunks), expected)


def simulated_lambda(config, window, sinks, q, k, v):
    """LM-Infinite of one row as plain loops: q [L, H, T, D], k and v [L, H_kv, T, D] before RoPE; [L, H, T, D].

    A query sees the sinks, the `window` tokens before it and itself, and turns by its distance, at most `window`.
    """
    out, anchors = torch.zeros(q.shape, dtype=torch.float64), config.blocks.anchors.tolist()
    for layer, row in enumerate(anchors):
        for asking in range(HEADS):
            head = asking * KV_HEADS // HEADS
            for i in range(q.shape[2]):
                seen = [j for j in range(i + 1) if j < sinks or i - j <= window]
                logits = []
                for j in seen:
                    near = j < config.sink_size or i - j < config.recent_size
                    query = q[layer if near or config.share == "keys" else row[head], asking, i]
                    query = turned(query.double(), min(i - j, window))
                    logits.append(float(query @ k[layer if near else row[head], head, j].double()) / math.sqrt(DIM))
                for weight, j in zip(softmax(logits), seen, strict=True):
                    out[layer, asking, i] += weight * v[layer, head, j].double()
    return out


@settings(deadline=None, max_examples=15, derandomize=True)
@given(runs(), st.sampled_from(["scores", "keys"]), st.integers(0, 99))
def test_lm_infinite_equals_the_simulation(run, share, seed):
    chunks, anchors, window, sinks, (sink_size, recent_size), _ = run
    config = config_of(anchors, share, sink_size, recent_size)
    layers, rows, generator = len(anchors), len(chunks[0]), torch.Generator().manual_seed(seed)
    always = sinks if config.blocks.is_dense else max(sinks, sink_size)
    cache, rotary = pod.PodCache(config, eviction=LMInfinite(window + always, sinks)), LlamaRotaryEmbedding(config)
    totals = [sum(chunk[row] for chunk in chunks) for row in range(rows)]
    q = [2 * torch.randn(layers, HEADS, total, DIM, generator=generator) for total in totals]
    k, v = ([torch.randn(layers, KV_HEADS, total, DIM, generator=generator) for total in totals] for _ in range(2))
    expected = [simulated_lambda(config, window, always, *row) for row in zip(q, k, v, strict=True)]
    seen = [0] * rows
    for new in chunks:
        given = [torch.zeros(layers, rows, states[0].shape[1], max(new), DIM) for states in (q, k, v)]
        for states, padded in zip((q, k, v), given, strict=True):
            for row, count in enumerate(new):
                padded[:, row, :, max(new) - count :] = states[row][:, :, seen[row] : seen[row] + count]
        mask = torch.arange(max(new)) >= max(new) - torch.tensor(new)[:, None]
        cache.begin(config, torch.zeros(rows, max(new), HEADS * DIM), None if bool(mask.all()) else mask, rotary)
        for layer in range(layers):
            out = cache.attend(layer, *(states[layer] for states in given), None, None, DIM**-0.5).double()
            for row, count in enumerate(new):
                wanted = expected[row][layer, :, seen[row] : seen[row] + count]
                torch.testing.assert_close(out[row, :, max(new) - count :], wanted, atol=2e-5, rtol=0)
        cache.finish()
        seen = [before + count for before, count in zip(seen, new, strict=True)]
        for row in range(rows):
            kept = [position for position in cache.positions(layers - 1)[row, 0].tolist() if position >= 0]
            assert kept == simulated_stream(window + always, always, seen[row])


@pytest.mark.slow
@pytest.mark.parametrize("which", MODELS)
def test_lm_infinite_does_not_depend_on_strides(which):
    # Unlike StreamingLLM, whose queries see their whole stride.
    model, ids = build(*which), tokens(2, 60)
    mask = (torch.arange(60) >= torch.tensor([0, 23])[:, None]).long()
    found = []
    for stride, chunks in ((4096, ()), (7, ()), (1, (20, 40))):
        cache = pod.PodCache(model.config, eviction=LMInfinite(12, sinks=3, stride=stride))
        found.append(fed(model, cache, ids, mask, chunks)[mask.bool()])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])
    with torch.no_grad():
        # The window and the token itself hold all: nothing is left out, and no distance is above the ceiling.
        whole = pod.PodCache(model.config, eviction=LMInfinite(62, sinks=3))
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(fed(model, whole, ids, mask)[mask.bool()], expected[mask.bool()])


def test_lm_infinite_generates():
    model, ids = build("qwen3", "scores", ANCHORS), tokens(2, 30)
    for options in (dict(num_beams=3), dict(prefill_chunk_size=7)):
        cache = pod.PodCache(model.config, eviction=LMInfinite(9, sinks=2))
        out = model.generate(ids, past_key_values=cache, max_new_tokens=15, do_sample=False, **options)
        assert out.shape == (2, 45) and cache.positions(2).shape[2] == 9
    with pytest.raises(ValueError, match="larger than the 4 sinks, which it includes; got 4. Use at least 5"):
        LMInfinite(4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_bytes_do_not_grow(positions):
    model = build("llama", "scores", ANCHORS, recent=6)
    cache = pod.PodCache(model.config, eviction=StreamingLLM(20, positions=positions, stride=16))
    fed(model, cache, tokens(2, 3))
    first = cache.nbytes()
    fed(model, cache, tokens(2, 100))
    assert cache.nbytes() == first == sum(tensor.untyped_storage().nbytes() for tensor in cache.storages())
    # The own keys of layers that are no anchors: sinks and recent, not the budget.
    assert cache._storage._layers[3].own.rectangle.shape[2] == 2 + 6


def test_sinks_of_the_model_are_kept_inside_blocks():
    blocks, dense = build("llama", "scores", ANCHORS, sinks=5), build("llama", "scores", DENSE, sinks=5)
    for model, sinks in ((blocks, 5), (dense, 2)):
        cache = pod.PodCache(model.config, eviction=StreamingLLM(9, sinks=2))
        fed(model, cache, tokens(1, 30))
        assert cache.positions(1)[0, 0].tolist() == simulated_stream(9, sinks, 30)
    with pytest.raises(ValueError, match="larger than the model's sink_size of 5 tokens.*got 5. Use at least 6"):
        pod.PodCache(blocks.config, eviction=StreamingLLM(5, sinks=2))


def test_generate_far_beyond_the_budget():
    model, ids = build("qwen3", "scores", ANCHORS), tokens(2, 30)
    cache = pod.PodCache(model.config, eviction=StreamingLLM(9, sinks=2, stride=8))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=15, do_sample=False)
    assert out.shape == (2, 45) and cache.positions(2).shape == (2, 2, 9)
    # What was cached is all but the last token generated.
    assert cache.positions(2)[1, 1].tolist() == simulated_stream(9, 2, 44)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(budget=4), "larger than the 4 sinks, which it includes; got 4. Use at least 5"),
        (dict(budget=0, sinks=0), "StreamingLLM: budget must be at least 1 token, got 0"),
        (dict(budget=9, sinks=-1), "sinks must be >= 0 tokens, got -1"),
        (dict(budget=9, positions="slot"), "positions must be one of 'cache', 'absolute'; got 'slot'"),
        (dict(budget=9, stride=0), "stride must be at least 1 query, got 0"),
    ],
)
def test_bad_values_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        StreamingLLM(**kwargs)


@pytest.mark.parametrize("budget", [16, 0.9], ids=["tokens", "share"])
def test_columns_that_are_padding_in_every_row_count(budget):
    """The real tokens fit into one stride, which is fewer columns than the forward has."""
    model, ids = build(), tokens(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.long)
    mask[:, 16:] = 1
    cache, alone = (pod.PodCache(model.config, eviction=StreamingLLM(budget, sinks=3, stride=4)) for _ in range(2))
    logits = fed(model, cache, ids, mask)
    assert cache.get_seq_length() == 20 and cache.has_padding
    assert_close(logits[:, 16:], fed(model, alone, ids[:, 16:]))
    new, mask = tokens(2, 3, seed=4), torch.nn.functional.pad(mask, (0, 3), value=1)
    assert_close(fed(model, cache, new, mask, (1,) * 3), fed(model, alone, new, None, (1,) * 3))
