"""Quest, ShadowKV, ClusterKV: what is read and the outputs are those of plain simulations; no more is read; bytes."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quest_simulation import SimulatedClusterKV, SimulatedQuest, SimulatedShadowKV
from simulation import Ambiguous
from test_cascade import DIM, HEADS, KV_HEADS, config_of
from tiny_models import ANCHORS, DENSE, assert_close, build, fed, tokens

import pod
from pod.eviction import ClusterKV, Quest, ReadSelector, ShadowKV

GROUPS = HEADS // KV_HEADS
MODELS = [
    pytest.param(("llama", "scores", ANCHORS), id="llama-scores"),
    pytest.param(("qwen3", "keys", ANCHORS), id="qwen3-keys"),
    pytest.param(("llama", "scores", DENSE), id="llama-dense"),
]


def run_both(config, method, chunks, seed=0, crop=0):
    """Feed random q, k, v to a cache and to one simulation per row, and compare every forward.

    chunks: lists of the real tokens of each row, right-aligned in the chunk; of the first a share makes the budget.
    crop: tokens that are taken back after every chunk of several.
    """
    generator = torch.Generator().manual_seed(seed)
    layers, rows, anchors = config.num_hidden_layers, len(chunks[0]), config.blocks.anchors.tolist()
    cache = pod.PodCache(config, eviction=method)
    sizes = config.sink_size, config.recent_size, config.share
    budgets = [method.budget] * rows
    if method.budget < 1:
        budgets = [max(int(method.budget * tokens), method.least(0, 1)) for tokens in chunks[0]]
    page = 1 if isinstance(method, ClusterKV) else method.page_size
    parts, kind = (page, method.dense_layers), SimulatedQuest
    if isinstance(method, ShadowKV):
        kind = partial(SimulatedShadowKV, outliers=method.outliers, recent=method.recent)
    if isinstance(method, ClusterKV):
        names = ("cluster_size", "sinks", "recent", "rounds")
        kind = partial(SimulatedClusterKV, **{name: getattr(method, name) for name in names})
    truths = [kind(anchors, GROUPS, *sizes, budget, *parts) for budget in budgets]
    choices = 0
    for number, new in enumerate(chunks):
        columns = max(new)
        q = 2 * torch.randn(layers, rows, HEADS, columns, DIM, generator=generator)
        k, v = torch.randn(2, layers, rows, KV_HEADS, columns, DIM, generator=generator)
        mask = torch.arange(columns) >= columns - torch.tensor(new)[:, None]
        cache.begin(config, torch.zeros(rows, columns, 1), None if bool(mask.all()) else mask, None)
        step, out = cache._storage.step, []
        for layer, row in enumerate(anchors):
            distant = [None, None]
            if cache.takes_anchors(columns):
                asked = row if config.share == "scores" else [layer] * KV_HEADS
                distant[0] = torch.stack([q[asked[head // GROUPS], :, head] for head in range(HEADS)], dim=1)
                distant[1] = torch.stack([k[anchor, :, head] for head, anchor in enumerate(row)], dim=1)
            out.append(cache.attend(layer, q[layer], k[layer], v[layer], *distant, DIM**-0.5))
        out = torch.stack(out)
        decodes = columns == 1 and number > 0
        for row, truth in enumerate(truths):
            real = slice(columns - new[row], columns)
            given = [states[:, row, :, real] for states in (q, k, v)]
            expected, read = truth.feed(*given, decodes) if new[row] else (out[:, row, :, real].double(), {})
            if truth.closest < 1e-4:
                raise Ambiguous
            for (layer, head), pages in read.items():
                found = step.read[anchors[layer][head], head][row].tolist()
                assert sorted({token // page for token in found if token >= 0}) == sorted(pages)
                wanted = [token for token in range(len(truth.q)) if token // page in pages]
                assert sorted(token for token in found if token >= 0) == wanted
                choices += len(pages) < (len(truth.q) - 1) // page + 1
            torch.testing.assert_close(out[:, row, :, real].double(), expected, atol=2e-5, rtol=0)
            assert not out[:, row, :, : columns - new[row]].any()
        cache.finish()
        if crop and columns > 1 and min(len(truth.q) for truth in truths) > crop:
            cache.crop(-crop)
            for truth in truths:
                truth.crop(crop)
    return cache, choices


@st.composite
def runs(draw):
    rows = draw(st.integers(1, 3))
    first = draw(st.lists(st.integers(0, 17), min_size=rows, max_size=rows).filter(any))
    # Rows of which nothing but padding was seen may go on in a later chunk; after its first token a row has no padding.
    later = draw(st.lists(st.sampled_from([1, 1, 1, 1, 4]), max_size=14))
    anchors = draw(st.sampled_from([((0, 0), (0, 1), (0, 1)), ((0, 0), (1, 1)), ((0, 0), (1, 0), (2, 2), (2, 3))]))
    sizes = draw(st.integers(0, 3)), draw(st.integers(1, 8)), draw(st.sampled_from(["scores", "keys"]))
    page = draw(st.integers(1, 5))
    dense, recent = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    method = Quest(draw(st.integers(page, 4 * page)), page, dense)
    if (other := draw(st.sampled_from([None, ShadowKV, ClusterKV]))) is ClusterKV:
        ends, rounds = (draw(st.integers(0, 3)), recent), draw(st.integers(0, 3))
        method = ClusterKV(sum(ends) + draw(st.integers(1, 9)), page, dense, *ends, rounds)
    elif other:
        least = page * (recent + 1)
        method = ShadowKV(draw(st.integers(least, least + 4 * page)), page, dense, draw(st.floats(0, 0.9)), recent)
    return [first] + [[count] * rows for count in later], anchors, sizes, method, draw(st.integers(0, 99))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(runs(), st.sampled_from([0, 2]))
def test_forwards_equal_the_simulation(run, crop):
    chunks, anchors, (sinks, recent, share), method, seed = run
    try:
        run_both(config_of(anchors, share, sinks, recent), method, chunks, seed, crop)
    except Ambiguous:
        assume(False)


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("anchors", [((0, 0), (1, 1)), ((0, 0), (0, 1), (2, 1))], ids=["dense", "blocks"])
@pytest.mark.parametrize(
    "method",
    [
        *(Quest(8, 4, 0), Quest(0.5, 4, 0), ShadowKV(12, 3, 0, 0.5, 1), ShadowKV(0.5, 2, 0, 0.3, 2)),
        *(ClusterKV(9, 4, 0, 2, 3, 2), ClusterKV(0.5, 3, 0, 1, 1, 4)),
    ],
    ids=repr,
)
def test_decoding_equals_the_simulation_step_by_step(method, anchors, share):
    # Odd lengths and left padding: pages count from each row's first real token, and so does a share.
    chunks = [[13, 22, 5]] + [[1, 1, 1]] * 12
    cache, choices = run_both(config_of(anchors, share, 2, 6), method, chunks)
    assert choices > 20
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())


@pytest.mark.parametrize("which", MODELS)
def test_what_is_not_read_is_not_touched(which):
    model = build(*which)
    cache = pod.PodCache(model.config, max_length=50, eviction=Quest(8, 4, dense_layers=0))
    fed(model, cache, tokens(2, 41))
    poisoned, reads = copy.deepcopy(cache), []
    finish = cache.finish
    cache.finish = lambda: reads.append(cache._storage.step.read) or finish()
    expected = fed(model, cache, tokens(2, 1))
    for layer, segments in enumerate(poisoned._storage.layers):
        for place, head in enumerate(segments.order):
            read = reads[0][int(poisoned.blocks.anchors[layer, head]), head]
            for row in range(2):
                unread = [token for token in range(41) if token not in read[row].tolist()]
                assert len(unread) == 41 - (4 + 1)  # the newest page has two tokens, one of them new
                segments.values.rectangle[place, row, unread] = torch.nan
                if place < segments.num_anchors:
                    segments.keys.rectangle[place, row, unread] = torch.nan
    # The page that gets the new token is computed from its keys again, and it is always read.
    assert torch.equal(fed(model, poisoned, tokens(2, 1)), expected)


@pytest.mark.parametrize("which", MODELS)
def test_a_budget_of_all_tokens_changes_nothing(which):
    model, ids = build(*which), tokens(3, 30)
    mask = (torch.arange(30) >= torch.tensor([0, 27, 11])[:, None]).long()
    caches = [pod.PodCache(model.config, eviction=method) for method in (Quest(40, 8, 0), None)]
    logits = []
    for one in caches:
        first = fed(model, one, ids[:, :21], mask)
        logits.append(torch.cat([first, fed(model, one, ids[:, 21:], mask, (1,) * 9)], dim=1))
    assert_close(*(found[mask.bool()] for found in logits))
    tight = pod.PodCache(model.config, eviction=Quest(8, 8, 0))
    fed(model, tight, ids[:, :21], mask)
    assert (fed(model, tight, ids[:, 21:], mask, (1,) * 9)[0] - logits[0][0, 21:]).abs().max() > 1e-2


def test_the_first_layers_are_dense_and_a_prefill_in_chunks_is():
    model, ids = build("llama", "scores", DENSE), tokens(1, 40)
    for cache in (pod.PodCache(model.config, eviction=Quest(8, 4, dense_layers=3)), pod.PodCache(model.config)):
        whole = fed(model, cache, ids[:, :30]), fed(model, cache, ids[:, 30:], chunks=(1,) * 10)
    cache = pod.PodCache(model.config, eviction=Quest(8, 4, dense_layers=3))
    fed(model, cache, ids[:, :30])
    assert_close(fed(model, cache, ids[:, 30:], chunks=(1,) * 10), whole[1])
    cache = pod.PodCache(model.config, eviction=Quest(8, 4, dense_layers=0))
    with cache.prefill():
        assert_close(fed(model, cache, ids[:, :30]), whole[0])
        assert_close(fed(model, cache, ids[:, 30:], chunks=(1,) * 10), whole[1])


@pytest.mark.parametrize("which", MODELS)
def test_rows_are_reordered_and_generate_runs(which):
    model, ids = build(*which), tokens(2, 25)
    method = Quest(8, 4, dense_layers=1)
    one, other = (pod.PodCache(model.config, eviction=method) for _ in range(2))
    fed(model, one, ids)
    one.reorder_cache(torch.tensor([1, 1, 0]))
    fed(model, other, ids[[1, 1, 0]])
    for step in range(3):
        assert_close(fed(model, one, tokens(3, 1, seed=step)), fed(model, other, tokens(3, 1, seed=step)))
    for options in (dict(num_beams=3), dict(prefill_chunk_size=7), dict(prompt_lookup_num_tokens=2)):
        rows = ids[:1] if "prompt_lookup_num_tokens" in options else ids
        cache = pod.PodCache(model.config, eviction=method)
        options |= dict(max_new_tokens=9, do_sample=False, suppress_tokens=[0])
        out = model.generate(rows, past_key_values=cache, **options)
        assert out.shape == (len(rows), 34)


@pytest.mark.parametrize("which", MODELS)
def test_bytes_are_those_without_eviction_and_the_pages(which):
    model = build(*which)
    cache = pod.PodCache(model.config, max_length=61, eviction=Quest(16))
    fed(model, cache, tokens(2, 5))
    anchors = model.config.blocks.num_blocks
    plain = pod.PodCache(model.config, max_length=61).expected_nbytes(61, batch=2, itemsize=4)
    assert cache.nbytes() == plain + 2 * anchors * 4 * (2 * DIM) * 4 == cache.expected_nbytes(61, batch=2, itemsize=4)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
    assert (cache.positions(0) >= 0).sum() == 2 * 2 * 5
    means = pod.PodCache(model.config, max_length=61, eviction=ShadowKV(40))
    fed(model, means, tokens(2, 5))
    assert means.nbytes() == plain + 2 * anchors * 8 * (DIM + 1) * 4 == means.expected_nbytes(61, batch=2, itemsize=4)
    groups = pod.PodCache(model.config, max_length=61, eviction=ClusterKV(60, cluster_size=20))
    fed(model, groups, tokens(2, 5))
    index = 2 * anchors * 4 * (DIM + 2 * 20) * 4
    assert groups.nbytes() == plain + index == groups.expected_nbytes(61, batch=2, itemsize=4)


@dataclass(frozen=True)
class OfMeans(ReadSelector):
    """A reader of one's own: the newest token, and the pages of three whose sum of keys is nearest to the query."""

    budget: int
    dense_layers: int = 0

    def pages(self, length):
        return -(-length // 3)

    def index_width(self, dim):
        return dim

    def refresh(self, index, keys, before, after, most):
        for row, held in enumerate(after.tolist()):
            for first in range(0, held, 3):
                index[:, row, first // 3] = keys[:, row, first : min(first + 3, held)].sum(dim=1)

    def choose(self, q, index, positions):
        best = (q.sum(dim=2, keepdim=True) @ index.mT)[:, :, 0].topk(min(index.shape[2], self.budget // 3)).indices
        read = (best[..., None] * 3 + torch.arange(3)).flatten(2)
        read = read.masked_fill(read >= positions, -1)
        return torch.cat([read, positions.expand(len(read), -1, -1)], dim=-1)


@pytest.mark.parametrize("which", MODELS)
def test_a_reader_of_ones_own_has_its_index_and_reads_what_it_chooses(which):
    model, ids = build(*which), tokens(2, 31)
    mask = (torch.arange(31) >= torch.tensor([0, 9])[:, None]).long()
    caches = [pod.PodCache(model.config, max_length=31, eviction=one) for one in (OfMeans(33), OfMeans(6), None)]
    all_read, some_read, plain = [
        (fed(model, one, ids[:, :22], mask), fed(model, one, ids[:, 22:], mask, (1,) * 9))[1] for one in caches
    ]
    assert_close(all_read, plain)
    assert (some_read - plain).abs().max() > 1e-2
    index = model.config.blocks.num_blocks * 2 * 11 * DIM * 4
    assert caches[1].nbytes() == caches[2].nbytes() + index == caches[1].expected_nbytes(31, batch=2, itemsize=4)
    for layer in {anchor for row in model.config.blocks.anchors.tolist() for anchor in row}:
        held = caches[1]._storage.layers[layer]
        for row, length in ((0, 31), (1, 22)):
            sums = torch.nn.functional.pad(held.keys.rectangle[:, row, :length], (0, 0, 0, -length % 3))
            sums = sums.unflatten(1, (-1, 3)).sum(dim=2)
            torch.testing.assert_close(held.pages.rectangle[:, row, : sums.shape[1]], sums)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(budget=15), "at least one page of page_size=16 tokens, got 15"),
        (dict(budget=9, page_size=0), "page_size must be at least 1 token, got 0"),
        (dict(budget=16, dense_layers=-1), "dense_layers must be >= 0, got -1"),
        (dict(budget=39, recent=4), "39 leaves no page of 8 tokens .* recent=4 newest ones: it must be at least 40"),
        (dict(budget=40, outliers=1.0), "outliers must be a share, 0 <= outliers < 1, got 1.0"),
        (dict(budget=49, rounds=1, sinks=17), "49 leaves no token .* sinks=17 first and recent=32 .* at least 50"),
        (dict(budget=60, rounds=-1), r"rounds \(-1\) must be >= 0"),
        (dict(budget=60, cluster_size=0), r"cluster_size \(0\) and recent \(32\) must be at least 1"),
        (dict(budget=40, recent=0), "recent must be at least 1 page, got 0"),
    ],
)
def test_bad_values_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        kinds = {"rounds": ClusterKV, "cluster_size": ClusterKV, "recent": ShadowKV, "outliers": ShadowKV}
        next((kind for name, kind in kinds.items() if name in kwargs), Quest)(**kwargs)
