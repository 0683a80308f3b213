"""Values in CPU memory: outputs are those without, nothing is copied twice in a step, bytes by formula, refusals."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ANCHORS, DENSE, build, fed, tokens

import pod
from pod.cache.offload import OffloadedValues
from pod.eviction import ClusterKV, Quest, ShadowKV, SnapKV
from pod.eviction.recent import RecentReader
from pod_kernels import Segments

READERS = [
    Quest(8, 4, dense_layers=0),
    Quest(9, 2, dense_layers=1),
    ShadowKV(12, 3, outliers=0.5, recent=1),
    ClusterKV(9, 4, 0, sinks=2, recent=3, rounds=2),
    RecentReader(10),
]
MODELS = [
    pytest.param(("llama", "scores", ANCHORS), id="scores"),
    pytest.param(("qwen3", "keys", ANCHORS), id="keys"),
    pytest.param(("llama", "scores", DENSE), id="dense"),
]


def pair(model, method, places, **options):
    """The same cache without and with values in CPU memory."""
    made = [pod.PodCache(model.config, eviction=method, value_pool=pool, **options) for pool in (None, places)]
    assert made[0].offloaded == (0, 0)
    return made


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("method", READERS, ids=repr)
@pytest.mark.parametrize("places", [0, 5])
def test_outputs_are_those_without(which, method, places):
    # Left padding, growing storage, a further turn, a crop, other rows: whatever moves what the pool stands for.
    model = build(*which)
    caches = pair(model, method, method.budget + places)
    mask = (torch.arange(60) >= torch.tensor([0, 9, 3])[:, None]).long()
    found = []
    for cache in caches:
        logits = [fed(model, cache, tokens(3, 22), mask), fed(model, cache, tokens(3, 9, seed=1), mask, (1,) * 9)]
        logits.append(fed(model, cache, tokens(3, 5, seed=2), mask))
        cache.crop(-3)
        logits.append(fed(model, cache, tokens(3, 6, seed=3), mask, (1,) * 6))
        with cache.peek():
            logits.append(fed(model, cache, tokens(3, 4, seed=4), mask, (1, 2, 1)))
        cache.crop(-2)
        logits.append(fed(model, cache, tokens(3, 4, seed=5), mask, (1,) * 4))
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        logits.append(fed(model, cache, tokens(3, 4, seed=6), mask[[2, 0, 0]], (1,) * 4))
        found.append(logits)
    for plain, offloaded in zip(*found, strict=True):
        assert torch.equal(plain, offloaded)
    assert caches[1].offloaded.copied > 0


class SimulatedPool:
    """The pool of one head and row: for each place the token it holds and the step that read it last."""

    def __init__(self, places):
        self.places, self.copied = [[-1, -1] for _ in range(places)], 0

    def by_age(self):
        return sorted(self.places, key=lambda place: place[1])

    def write(self, token, step):
        self.by_age()[0][:] = token, step

    def fetch(self, wanted, step):
        held = {token: place for place in self.places for token in place[:1]}
        for token in wanted:
            if token in held:
                held[token][1] = step
        missing = [token for token in wanted if token not in held]
        for token, place in zip(missing, self.by_age(), strict=False):
            place[:] = token, step
        self.copied += len(missing)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_a_step_copies_once_what_the_pool_lacks(data):
    heads, rows, start, budget = 2, 2, data.draw(st.integers(2, 30)), data.draw(st.integers(1, 8))
    places = budget + data.draw(st.integers(0, 6))
    truth = torch.randn(heads, rows, 50, 3, generator=torch.Generator().manual_seed(0))
    host = Segments.rectangular(heads, rows, 50, 3, dtype=torch.float32, device=torch.device("cpu"))
    values = OffloadedValues.of(host, places, torch.device("cpu"))
    values.write(0, truth[:, :, :start], None)
    pools = {(head, row): SimulatedPool(places) for head in range(heads) for row in range(rows)}
    for step in range(data.draw(st.integers(1, 12))):
        newest, values.steps = start + step, step
        others = st.lists(st.integers(0, newest - 1), max_size=min(budget - 1, newest), unique=True)
        wanted = torch.full((heads, rows, budget), newest)  # where there is none, the query's own token
        for (head, row), pool in pools.items():
            older = data.draw(others)
            wanted[head, row, : len(older)] = torch.tensor(older, dtype=torch.long)
            if head == 1:  # a later layer's: before its own token is there
                pool.fetch(older, step)
            pool.write(newest, step)
            pool.fetch([*older, newest], step)
        values.fetch([1], wanted[1:].masked_fill(wanted[1:] == newest, -1))
        values.write(newest, truth[:, :, newest : newest + 1], None)
        assert torch.equal(values.taken(wanted), host.taken(wanted))
        assert values.copied == sum(pool.copied for pool in pools.values())
        for (head, row), pool in pools.items():
            assert values.held[head, row].tolist() == [token for token, _ in pool.places]
    assert torch.equal(host.rectangle[:, :, : newest + 1], truth[:, :, : newest + 1])


def test_a_pool_of_all_tokens_copies_each_once_and_a_blocks_later_layers_find_theirs(monkeypatch):
    model = build("llama", "scores", ANCHORS)
    cache = pod.PodCache(model.config, max_length=40, eviction=Quest(8, 4, dense_layers=0), value_pool=40)
    fed(model, cache, tokens(2, 30))
    seen, taken = [], OffloadedValues.taken

    def counted(values, at):
        before = values.copied
        out = taken(values, at)
        seen.append(values.copied - before)
        return out

    monkeypatch.setattr(OffloadedValues, "taken", counted)
    fed(model, cache, tokens(2, 1))
    held = [layer.values for layer in cache._storage.layers]
    # What a layer's own anchors chose is copied when it attends; the others' is there when it does.
    own = [layer.num_anchors * 2 * 8 for layer in cache._storage.layers]
    assert all(found <= most for found, most in zip(seen, own, strict=True))
    assert seen[0] > 0 and seen[2] == 0 and held[2].copied > 0
    fed(model, cache, tokens(2, 9, seed=1), chunks=(1,) * 9)
    # Each of the 30 tokens at most once, as nothing has to make room.
    assert all(int((values.held >= 0).sum()) <= 2 * 2 * 40 and values.copied <= 2 * 2 * 30 for values in held)


@pytest.mark.parametrize("which", MODELS)
def test_bytes_are_those_of_the_pool_and_the_rest_is_counted_apart(which):
    model = build(*which)
    plain, cache = pair(model, Quest(8, 4, dense_layers=1), 12, max_length=50)
    for one in (plain, cache):
        fed(model, one, tokens(2, 33))
        fed(model, one, tokens(2, 3), chunks=(1,) * 3)
    layers, dim = len(model.config.blocks.anchors) - 1, model.config.head_dim
    assert cache.offloaded.nbytes == layers * 2 * 2 * 50 * dim * 4
    pool = layers * 2 * 2 * 12 * (dim * 4 + 8)
    assert cache.nbytes() == plain.nbytes() - cache.offloaded.nbytes + pool
    assert cache.nbytes() == cache.expected_nbytes(50, batch=2, itemsize=4)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())


def test_a_saved_cache_goes_on_and_a_copy_does(tmp_path):
    model = build()
    plain, cache = pair(model, ShadowKV(12, 3, recent=1), 14)
    for one in (plain, cache):
        fed(model, one, tokens(2, 33))
        fed(model, one, tokens(2, 3), chunks=(1,) * 3)
    cache.save(tmp_path / "cache.safetensors")
    loaded = pod.PodCache.load(tmp_path / "cache.safetensors", model.config)
    assert loaded.value_pool == 14 and loaded.offloaded.copied == 0
    others = [cache, copy.deepcopy(cache), loaded]
    expected = fed(model, plain, tokens(2, 5, seed=1), chunks=(1,) * 5)
    for one in others:
        assert torch.equal(fed(model, one, tokens(2, 5, seed=1), chunks=(1,) * 5), expected)


@pytest.mark.parametrize("which", MODELS)
def test_generate_is_the_same(which):
    model = build(*which)
    for options in (dict(num_beams=3), dict(prefill_chunk_size=7), dict(do_sample=False)):
        found = [
            model.generate(tokens(2, 25), past_key_values=one, max_new_tokens=9, suppress_tokens=[0], **options)
            for one in pair(model, Quest(8, 4), 8)
        ]
        assert found[0].shape == (2, 34) and torch.equal(*found)


def test_a_failed_forward_can_be_repeated(monkeypatch):
    model = build()
    plain, cache = pair(model, Quest(8, 4, dense_layers=0), 9, max_length=40)
    for one in (plain, cache):
        fed(model, one, tokens(1, 30))
    taken = OffloadedValues.taken
    monkeypatch.setattr(OffloadedValues, "taken", lambda values, at: taken(values, at) if values is not last else 1 / 0)
    last = cache._storage.layers[-1].values
    with pytest.raises(ZeroDivisionError):
        fed(model, cache, tokens(1, 1, seed=7))
    monkeypatch.undo()
    for one in (plain, cache):
        fed(model, one, tokens(1, 1, seed=1))
    steps = [fed(model, one, tokens(1, 6, seed=2), chunks=(1,) * 6) for one in (plain, cache)]
    assert torch.equal(*steps)


class Greedy(Quest):
    """Reads twice its budget."""

    def choose(self, q, index, positions):
        return (positions[None] - torch.arange(2 * self.budget)).clamp(min=-1).expand(len(q), -1, -1)


@pytest.mark.parametrize(
    "method, places, message",
    [
        (None, 8, "value_pool=8 needs a method that chooses what a step reads.* got eviction=None"),
        (SnapKV(40), 64, "value_pool=64 needs a method .*SnapKV"),
        (Quest(0.5), 64, "its budget a number of tokens"),
        (Quest(32), 31, r"value_pool \(31 tokens\) is below the 32 that a step reads"),
        (Quest(32), 0, "value_pool must be at least 1 token, a whole number; got 0"),
    ],
)
def test_what_cannot_be_is_refused(method, places, message):
    with pytest.raises(ValueError, match=message):
        pod.PodCache(build().config, eviction=method, value_pool=places)


def test_a_reader_that_reads_more_than_it_said_is_refused():
    model = build()
    cache = pod.PodCache(model.config, eviction=Greedy(8, 4, dense_layers=0), value_pool=10)
    fed(model, cache, tokens(1, 30))
    with pytest.raises(ValueError, match="value_pool=10 tokens are fewer than the 15 that a step reads"):
        fed(model, cache, tokens(1, 1))
