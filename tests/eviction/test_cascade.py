"""Cascade: positions, scores and outputs are those of a plain simulation; and what follows from its rules."""

import copy
import math

import pytest
import torch
from cascade_simulation import SimulatedLayers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ANCHORS, DENSE, assert_close, build, fed, tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pod
from pod.eviction import Cascade, StreamingLLM
from pod_kernels import slots

HEADS, KV_HEADS, DIM = 4, 2, 8
MODELS = [
    pytest.param(("llama", "scores", ANCHORS), id="llama-scores"),
    pytest.param(("qwen3", "keys", ANCHORS), id="qwen3-keys"),
    pytest.param(("llama", "scores", DENSE), id="llama-dense"),
]


# ---------------------------------------------------------------------- against the simulation


def config_of(anchors, share="scores", sink_size=1, recent_size=4) -> pod.PodLlamaConfig:
    return pod.PodLlamaConfig(
        hidden_size=HEADS * DIM,
        num_hidden_layers=len(anchors),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        anchors=[list(row) for row in anchors],
        sink_size=sink_size,
        recent_size=recent_size,
        share=share,
    )


def run_both(config, policy, cascade, chunks, seed=0, rotates=True, gamma=0.5, reduction="max", **options):
    """Feed random q, k, v to a cache and to one simulation per row, and compare after every chunk.

    chunks: lists of the real tokens of each row, right-aligned in the chunk.
    cascade: budget, sinks and sub-caches of all rows, or a list of those of each.
    """
    generator = torch.Generator().manual_seed(seed)
    layers, rows = config.num_hidden_layers, len(chunks[0])
    cache = pod.PodCache(config, eviction=policy)
    rotary = LlamaRotaryEmbedding(config)
    truths = [
        SimulatedLayers(
            config.blocks.anchors.tolist(),
            HEADS // KV_HEADS,
            config.sink_size,
            config.recent_size,
            config.share,
            mine,
            gamma,
            reduction,
            rotates,
            **options,
        )
        for mine in (cascade if isinstance(cascade, list) else [cascade] * rows)
    ]
    for new in chunks:
        columns = max(new)
        q = 2 * torch.randn(layers, rows, HEADS, columns, DIM, generator=generator)
        k, v = torch.randn(2, layers, rows, KV_HEADS, columns, DIM, generator=generator)
        mask = torch.arange(columns) >= columns - torch.tensor(new)[:, None]
        inputs = torch.zeros(rows, columns, HEADS * DIM)
        cache.begin(config, inputs, None if bool(mask.all()) else mask, rotary)
        out = [cache.attend(layer, q[layer], k[layer], v[layer], None, None, DIM**-0.5) for layer in range(layers)]
        out = torch.stack(out)
        cache.finish()
        for row, truth in enumerate(truths):
            real = slice(columns - new[row], columns)
            expected = truth.feed(q[:, row, :, real], k[:, row, :, real], v[:, row, :, real])
            torch.testing.assert_close(out[:, row, :, real].double(), expected, atol=2e-5, rtol=0)
            assert not out[:, row, :, : columns - new[row]].any()
            compare_kept(cache, truth, row)
    return cache, truths


def compare_kept(cache: pod.PodCache, truth: SimulatedLayers, row: int) -> None:
    store, place_of_row = cache._storage, row
    for rows, one in getattr(store, "_runs", ()):  # of a share
        if rows.start <= row < rows.stop:
            store, place_of_row = one, row - rows.start
    for layer, anchors in enumerate(truth.anchors):
        positions = cache.positions(layer)
        for head, anchor in enumerate(anchors):
            cascade = truth.cascades[anchor, head]
            kept = [position for position in positions[row, head].tolist() if position >= 0]
            assert kept == cascade.kept()
            state = store._layers[anchor].state
            if state.scores is None or not truth.select:
                continue
            place = store._orders[anchor].index(head)
            held = state.positions[place, place_of_row].tolist()
            for token, score in cascade.scores.items():
                assert float(state.scores[place, place_of_row, held.index(token)]) == pytest.approx(
                    score, rel=1e-4, abs=1e-7
                )


@st.composite
def runs(draw):
    rows = draw(st.integers(1, 2))
    chunk = st.lists(st.integers(0, 6), min_size=rows, max_size=rows).filter(any)
    chunks = draw(st.lists(chunk, min_size=1, max_size=8))
    share, reduction = draw(st.sampled_from(["scores", "keys"])), draw(st.sampled_from(["max", "mean"]))
    anchors = draw(st.sampled_from([((0, 0), (0, 1), (0, 1)), ((0, 0), (1, 1)), ((0, 0), (0, 0))]))
    sizes = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    # Size, sinks, sub-caches; and tokens of the budget that do not make one of each.
    cascade = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 4))
    spare = draw(st.integers(0, cascade[2] - 1))
    return chunks, anchors, share, reduction, sizes, cascade, spare, draw(st.integers(0, 1000))


@pytest.mark.slow
@settings(deadline=None, max_examples=20, derandomize=True)
@given(runs())
def test_chunks_equal_the_simulation(run):
    chunks, anchors, share, reduction, (sink_size, recent_size), (size, sinks, levels), spare, seed = run
    config = config_of(anchors, share, sink_size, recent_size)
    shared = any(anchor != layer for layer, row in enumerate(anchors) for anchor in row)
    always = max(sinks, sink_size) if shared else sinks
    budget = always + size * levels + spare
    policy = Cascade(budget, sinks, levels, gamma=0.9, head_reduction=reduction)
    run_both(config, policy, (budget, always, levels), chunks, seed, gamma=0.9, reduction=reduction)


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize(
    "anchors",
    [pytest.param(((0, 0), (1, 1)), marks=pytest.mark.slow), ((0, 0), (0, 1), (0, 1))],
    ids=["dense", "blocks"],
)
@pytest.mark.parametrize(
    ("option", "told"),
    [
        (dict(head_reduction="median"), dict(reduction="median")),
        (dict(heads="homogeneous"), dict(homogeneous=True)),
        (dict(heads="homogeneous", head_reduction="median"), dict(homogeneous=True, reduction="median")),
        (dict(heads="homogeneous", head_reduction="mean"), dict(homogeneous=True, reduction="mean")),
        (dict(select=False), dict(select=False)),
    ],
    ids=["median", "homogeneous", "homogeneous-median", "homogeneous-mean", "select=false"],
)
def test_the_papers_ablations_equal_the_simulation(option, told, anchors, share):
    """Two rows, padded on the left, two query heads to a KV head, prefills and single tokens."""
    policy = Cascade(2 + 3 * 3, sinks=2, num_cascades=3, gamma=0.5, **option)
    chunks = [[9, 4], [5, 6], [1, 1], [1, 0], *[[1, 1]] * 8, [3, 7], [1, 1]]
    config = config_of(anchors, share, 1, 4)
    _, truths = run_both(config, policy, (11, 2, 3), chunks, **told)
    heads = [truths[0].cascades[0, head].kept() for head in range(KV_HEADS)]
    assert (heads[0] == heads[1]) == ("heads" in option or not option.get("select", True))


def test_longbench_sizes_are_powers_of_two_with_sinks_on_top():
    method = Cascade(0.25, sinks=64, num_cascades=4, stride=512, rule="power_of_two")
    for prompt in (1, 15, 16, 31, 32, 4095, 4096, 8191, 8192, 31500):
        wanted = 64 + max(4, 2 ** int(math.log2(prompt / 4)) if prompt >= 4 else 0)
        assert method.tokens_of(prompt, 0, 2) == wanted
        assert method.tokens_of(prompt, 70, 2) == wanted + 6
    assert method.with_budget(1088) == Cascade(1088, sinks=64, num_cascades=4, stride=512)
    assert pod.eviction.parse("cascade:budget=0.25,rule=power_of_two,stride=512") == method
    with pytest.raises(ValueError, match="rule=power_of_two is of a budget that is a share .* such as 0.25; got 256"):
        Cascade(256, rule="power_of_two")


def test_longbench_sizes_are_those_of_each_row():
    config = config_of(((0, 0), (0, 1), (0, 1)), "scores", 1, 4)
    policy = Cascade(0.25, sinks=2, num_cascades=2, gamma=0.5, rule="power_of_two", stride=100)
    run_both(config, policy, [(10, 2, 2), (6, 2, 2)], [[35, 19], [1, 1], [5, 2], [1, 1]])


@pytest.mark.slow
@settings(deadline=None, max_examples=12, derandomize=True)
@given(runs(), st.lists(st.integers(0, 24), min_size=2, max_size=2).filter(any), st.sampled_from([0.29, 0.5, 0.9]))
def test_a_share_equals_the_simulation_of_each_row(run, prompts, budget):
    chunks, anchors, share, reduction, (sink_size, recent_size), (_, sinks, levels), _, seed = run
    prompts = prompts[: len(chunks[0])]
    if not any(prompts):
        prompts[0] = 17
    config = config_of(anchors, share, sink_size, recent_size)
    always = sinks if config.blocks.is_dense else max(sinks, sink_size)
    policy = Cascade(budget, sinks, levels, gamma=0.9, head_reduction=reduction)
    each = [max(round(100 * budget) * prompt // 100, always + levels) for prompt in prompts]
    cascades = [(tokens, always, levels) for tokens in each]
    run_both(config, policy, cascades, [prompts, *chunks], seed, gamma=0.9, reduction=reduction)


@pytest.mark.parametrize("anchors", [((0, 0), (1, 1)), ((0, 0), (0, 1), (2, 1))], ids=["dense", "blocks"])
def test_decoding_equals_the_simulation_step_by_step(anchors):
    # A prompt of two chunks, then single tokens until every token of the prompt could be gone.
    chunks = [[5, 7], [4, 4]] + [[1, 1]] * 20
    run_both(config_of(anchors, recent_size=6), Cascade(10, 2, 4, gamma=0.8), (10, 2, 4), chunks, gamma=0.8)


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("stride", [3, 64])
def test_until_full_logits_are_those_without_eviction(which, stride):
    model, ids = build(*which), tokens(2, 26)
    cache = pod.PodCache(model.config, eviction=Cascade(28, sinks=4, num_cascades=3, stride=stride))
    got = torch.cat([fed(model, cache, ids[:, :20]), fed(model, cache, ids[:, 20:], chunks=(1,) * 6)], dim=1)
    with torch.no_grad():
        assert_close(got, model(ids, use_cache=False).logits)


def test_a_dynamic_rope_sees_the_places_in_use_only():
    # Its frequencies change with the longest place: until full these are the positions, afterwards they stay.
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        initializer_range=0.3,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    model = pod.convert(LlamaForCausalLM(config).eval(), pod.LayerBlocks.dense(2, 2), sink_size=2, recent_size=6)
    cache, ids = pod.PodCache(model.config, eviction=Cascade(20, sinks=4, num_cascades=2, stride=20)), tokens(1, 20)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert_close(fed(model, cache, ids), expected)
    fed(model, cache, tokens(1, 40), chunks=(1,) * 40)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(21)[None])
    assert_close(cache._storage._steps.table[0], cos[0, :, :4])
    assert_close(cache._storage._steps.table[1], sin[0, :, :4])


@pytest.mark.parametrize("which", MODELS)
def test_bfloat16(which):
    # Far beyond the budget, against the same in float32: loosely, as rounding differs in every layer.
    model, ids = build(*which), tokens(2, 40)
    small, policy = copy.deepcopy(model).to(torch.bfloat16), StreamingLLM(12, stride=7)
    got = fed(small, pod.PodCache(small.config, eviction=policy), ids, chunks=(30,) + (1,) * 10)
    expected = fed(model, pod.PodCache(model.config, eviction=policy), ids, chunks=(30,) + (1,) * 10)
    assert got.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(got.float(), expected, dim=-1).mean() > 0.99


@pytest.mark.parametrize("which", MODELS)
def test_until_full_the_number_of_cascades_does_not_matter(which):
    model, ids = build(*which), tokens(2, 4 + 24 + 1)
    logits = []
    for number in (1, 2, 4, 24):
        cache = pod.PodCache(model.config, eviction=Cascade(28, sinks=4, num_cascades=number, stride=5))
        logits.append(fed(model, cache, ids))
    for other in logits[1:]:
        assert torch.equal(logits[0], other)


@pytest.mark.parametrize("which", MODELS)
def test_stride_one_is_token_by_token(which):
    model, ids = build(*which), tokens(2, 30)
    one = pod.PodCache(model.config, eviction=Cascade(10, sinks=2, num_cascades=2, stride=1))
    by_token = pod.PodCache(model.config, eviction=Cascade(10, sinks=2, num_cascades=2))
    assert_close(fed(model, one, ids), fed(model, by_token, ids, chunks=(1,) * 30))
    for layer in range(len(model.model.layers)):
        assert torch.equal(one.positions(layer), by_token.positions(layer))


@pytest.mark.parametrize("which", MODELS)
def test_strides_are_forwards(which):
    model, ids = build(*which), tokens(2, 31)
    strided = pod.PodCache(model.config, eviction=Cascade(10, sinks=2, num_cascades=2, stride=7))
    several = pod.PodCache(model.config, eviction=Cascade(10, sinks=2, num_cascades=2, stride=10))
    assert_close(fed(model, strided, ids), fed(model, several, ids, chunks=(7, 7, 7, 7, 3)))


@pytest.mark.parametrize("which", MODELS)
def test_one_sub_cache_is_streaming(which):
    model, ids = build(*which), tokens(2, 40)
    cascade = pod.PodCache(model.config, eviction=Cascade(13, sinks=3, num_cascades=1, stride=6))
    streaming = pod.PodCache(model.config, eviction=StreamingLLM(13, sinks=3, stride=6))
    assert_close(fed(model, cascade, ids), fed(model, streaming, ids))
    assert_close(fed(model, cascade, ids[:, :1]), fed(model, streaming, ids[:, :1]))
    for layer in range(len(model.model.layers)):
        assert torch.equal(cascade.positions(layer), streaming.positions(layer))


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("stride", [4, 64])
def test_a_left_padded_row_is_exact(which, stride):
    # Three turns; the third row is shorter than the sinks at first.
    model, policy = build(*which), Cascade(11, sinks=3, num_cascades=2, stride=stride)
    turns = [(17, 9, 2), (5, 5, 5), (1, 1, 1), (1, 1, 1), (6, 6, 6)]
    rows = [tokens(sum(turn[row] for turn in turns), seed=row) for row in range(3)]
    batch, mask = pod.PodCache(model.config, eviction=policy), torch.zeros(3, 0, dtype=torch.long)
    alone = [pod.PodCache(model.config, eviction=policy) for _ in range(3)]
    done = [0, 0, 0]
    for turn in turns:
        width = max(turn)
        ids, new = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
        for row, count in enumerate(turn):
            ids[row, width - count :] = rows[row][done[row] : done[row] + count]
            new[row, width - count :] = 1
        mask = torch.cat([mask, new], dim=1)
        logits = fed(model, batch, ids, mask)
        for row, count in enumerate(turn):
            expected = fed(model, alone[row], rows[row][None, done[row] : done[row] + count])
            assert_close(logits[row, width - count :], expected[0])
            for layer in range(len(model.model.layers)):
                kept, truth = batch.positions(layer)[row], alone[row].positions(layer)[0]
                assert torch.equal(kept[:, : truth.shape[1]], truth) and (kept[:, truth.shape[1] :] == -1).all()
            done[row] += count
    assert batch.get_seq_length() == sum(max(turn) for turn in turns)


@pytest.mark.parametrize("which", MODELS)
def test_rows_are_reordered(which):
    model, policy = build(*which), Cascade(11, sinks=3, num_cascades=2)
    ids, new = tokens(3, 20), tokens(4, 9, seed=1)
    order = torch.tensor([2, 0, 0, 1])
    cache, truth = (pod.PodCache(model.config, eviction=policy) for _ in range(2))
    fed(model, cache, ids)
    cache.reorder_cache(order)
    fed(model, truth, ids[order])
    assert_close(fed(model, cache, new, chunks=(1,) * 9), fed(model, truth, new, chunks=(1,) * 9))
    assert cache.batch_size == 4


@pytest.mark.parametrize("which", MODELS)
def test_generate(which):
    model, ids = build(*which), tokens(2, 23)
    policy = Cascade(10, sinks=2, num_cascades=2, stride=6)
    cache = pod.PodCache(model.config, eviction=policy)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    truth, expected = pod.PodCache(model.config, eviction=policy), ids
    logits = fed(model, truth, ids)
    for _ in range(12):
        expected = torch.cat([expected, logits[:, -1:].argmax(dim=-1)], dim=1)
        logits = fed(model, truth, expected[:, -1:])
    assert torch.equal(got, expected)
    beams = model.generate(
        ids,
        past_key_values=pod.PodCache(model.config, eviction=policy),
        max_new_tokens=5,
        do_sample=False,
        num_beams=3,
    )
    assert beams.shape == (2, 28)


# ---------------------------------------------------------------------- what it costs


@pytest.fixture
def pairs(monkeypatch) -> list[int]:
    """How many (query, key) pairs each product of attention multiplied, what masks hide included."""
    counted, products, put = [], slots._products, slots._put

    def noted_products(queries, keys, scale):
        logits = products(queries, keys, scale)
        counted.append(logits.numel())
        return logits

    def noted_put(logits, queries, own, is_used, scale):
        counted.append(queries[..., 0].numel() * own.keys.shape[2])
        put(logits, queries, own, is_used, scale)

    monkeypatch.setattr(slots, "_products", noted_products)
    monkeypatch.setattr(slots, "_put", noted_put)
    return counted


def test_pairs_grow_linearly(pairs):
    model, stride, budget, sinks = build("llama", "scores", DENSE), 8, 16, 4
    counted = []
    for length in (64, 128, 256):
        cache = pod.PodCache(model.config, eviction=Cascade(budget, sinks, 2, stride=stride))
        pairs.clear()
        fed(model, cache, tokens(2, length))
        expected = sum(stride * (min(first, budget) + stride) for first in range(0, length, stride))
        assert sum(pairs) == 2 * 4 * 3 * expected  # rows, query heads, layers
        counted.append(sum(pairs))
    assert counted[2] - counted[1] == 2 * (counted[1] - counted[0])


def test_decoding_inside_blocks_multiplies_no_distant_key_twice(pairs):
    model = build("llama", "scores", ANCHORS)  # 2 sinks and 6 recent
    cache = pod.PodCache(model.config, eviction=Cascade(16, sinks=4, num_cascades=2))
    fed(model, cache, tokens(3, 30))
    pairs.clear()
    fed(model, cache, tokens(3, 1))
    anchors = int(model.config.blocks.is_anchor.sum())
    others = model.config.blocks.anchors.numel() - anchors
    # Two query heads per KV head, three rows; each of the other heads has its own keys of 2 + 6 tokens and the new one.
    assert sum(pairs) == 3 * 2 * (anchors * (16 + 1) + others * (2 + 6 + 1))


@pytest.mark.parametrize("which", MODELS)
def test_an_update_writes_the_inserted_tokens_only(which):
    model = build(*which)
    cache = pod.PodCache(model.config, eviction=Cascade(18, sinks=2, num_cascades=4))
    ids = torch.arange(1, 53).expand(2, -1)  # no two alike, whose vectors in the first layer would be
    fed(model, cache, ids[:, :40])
    for step in range(40, 52):
        before = [tensor.clone() for tensor in vectors_of(cache)]
        fed(model, cache, ids[:, step : step + 1])
        changed = [int((old != new).any(dim=-1).sum()) for old, new in zip(before, vectors_of(cache), strict=True)]
        segments = [part.offsets.numel() for stored in cache._storage._layers for part in parts(stored)]
        # One vector per row and head of each part, wherever the token went.
        assert changed == segments


def parts(stored) -> tuple:
    return stored.values, stored.keys, stored.own


def vectors_of(cache: pod.PodCache) -> list[Tensor]:
    return [part.data for stored in cache._storage._layers for part in parts(stored)]


@pytest.mark.parametrize("which", MODELS)
def test_bytes_do_not_grow(which):
    model = build(*which)
    budget, sinks, levels, batch = 20, 4, 4, 2
    cache = pod.PodCache(model.config, eviction=Cascade(budget, sinks, levels, stride=8))
    fed(model, cache, tokens(batch, 5))
    sizes = {cache.nbytes()}
    storages = [tensor.data_ptr() for tensor in cache.storages()]
    for _ in range(4):
        fed(model, cache, tokens(batch, 37), chunks=(20, 1, 16))
        sizes.add(cache.nbytes())
    assert [tensor.data_ptr() for tensor in cache.storages()] == storages
    anchors = int(model.config.blocks.is_anchor.sum())
    others = model.config.blocks.anchors.numel() - anchors
    near = model.config.sink_size + model.config.recent_size
    vectors = (2 * anchors + others) * budget + others * min(near, budget)
    # Positions and scores of each slot and one spare, and the rings with a spare each.
    books = anchors * ((8 + 4) * (budget + 1) + 8 * (budget - sinks + levels))
    assert sizes == {batch * (vectors * DIM * 4 + books)}


# ---------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(budget=0), "Cascade: budget must be at least 1 token, got 0"),
        (dict(budget=67), "hold the 64 sinks and a token of each of the 4 sub-caches; got 67. Use at least 68"),
        (dict(budget=72, sinks=-1), "sinks must be >= 0 tokens, got -1"),
        (dict(budget=72, num_cascades=0), "num_cascades must be at least 1, got 0"),
        (dict(budget=72, stride=0), "stride must be at least 1 query, got 0"),
        (dict(budget=72, gamma=1.0), "gamma must be between 0 and 1, both excluded; got 1.0"),
        (dict(budget=72, gamma=0.0), "gamma must be between 0 and 1, both excluded; got 0.0"),
        (dict(budget=72, head_reduction="mode"), "head_reduction must be one of max, mean, median; got 'mode'"),
    ],
)
def test_bad_values_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Cascade(**kwargs)


def test_sinks_of_the_model_that_fill_the_budget_are_named():
    blocks, dense = build("llama", "scores", ANCHORS, sinks=5), build("llama", "scores", DENSE, sinks=5)
    pod.PodCache(dense.config, eviction=Cascade(8, sinks=2))
    with pytest.raises(ValueError, match="model's sink_size of 5 tokens.*each of the 4.*got 8. Use at least 9"):
        pod.PodCache(blocks.config, eviction=Cascade(8, sinks=2))


def test_cropping_is_refused_by_name():
    model = build()
    cache = pod.PodCache(model.config, eviction=Cascade(8, sinks=2))
    fed(model, cache, tokens(1, 5))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="Cascade cannot take tokens back.*without draft tokens"):
        cache.crop(-1)


def test_misuse_of_a_cache_is_named():
    model = build()
    with pytest.raises(ValueError, match="eviction must be a method such as pod.eviction.*got 'cascade'"):
        pod.PodCache(model.config, eviction="cascade")
    cache = pod.PodCache(model.config, eviction=Cascade(8, sinks=2))
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.positions(0)
    fed(model, cache, tokens(2, 5))
    with pytest.raises(ValueError, match="the cache holds 2 rows but the input has 3"):
        fed(model, cache, tokens(3, 1))
    with pytest.raises(ValueError, match="row 1 of attention_mask has padding after its first real token"):
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[1, 6] = 0
        fed(model, cache, tokens(2, 3), mask)
    with pytest.raises(ValueError, match="row 0 of attention_mask has padding after its first real token"):
        mask = torch.ones(1, 8, dtype=torch.long)
        mask[0, -1] = 0
        fed(model, pod.PodCache(model.config, eviction=Cascade(8, sinks=2, stride=3)), tokens(1, 8), mask)
    assert cache.get_seq_length() == 5
    config, inputs = model.config, torch.zeros(2, 1, 32)
    cache.begin(config, inputs, None, model.model.rotary_emb)
    with pytest.raises(ValueError, match="the last forward broke off.*call cache.reset"):
        fed(model, cache, tokens(2, 1))
    cache.reset()
    assert cache.nbytes() == 0 and cache.get_seq_length() == 0
    fed(model, cache, tokens(3, 5))
