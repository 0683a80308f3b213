"""A budget that is a share of the prompt: of each row's first prefill, in all storages, fixed from then on."""

import copy
import warnings

import pytest
import torch
from test_cache import ANCHORS, DENSE, assert_close, build, fed, left_padded, tokens
from test_padded_turns import assert_rows_are_alone_what_they_are_together, held

import pod
from pod.eviction import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    Cascade,
    Combined,
    LMInfinite,
    PyramidKV,
    Quest,
    SageKV,
    SnapKV,
    StreamingLLM,
)

BY_SCORES = {
    "snapkv": lambda budget: SnapKV(budget, window=4, kernel_size=3),
    "snapkv-once": lambda budget: SnapKV(budget, window=4, kernel_size=3, query_aware=False),
    "pyramidkv": lambda budget: PyramidKV(budget, window=4, kernel_size=3),
    "adakv": lambda budget: AdaKV(budget, window=4, kernel_size=3, normalize=True),
    "sagekv": SageKV,
    "h2o": H2O,
    "tova": TOVA,
    "cake": lambda budget: CAKE(budget, window=4, kernel_size=3),
    "combined": lambda budget: Combined(budget, SnapKV(budget, window=4), CAKE(budget, window=4)),
}
STORES = {
    "streamingllm": StreamingLLM,
    "absolute": lambda budget: StreamingLLM(budget, positions="absolute"),
    "lminfinite": LMInfinite,
    "cascade": lambda budget: Cascade(budget, sinks=4, num_cascades=3),
}
ALL = BY_SCORES | STORES | {"quest": lambda budget: Quest(budget, page_size=4, dense_layers=0)}
EACH = [pytest.param(name, make, id=name) for name, make in ALL.items()]
MODELS = pytest.mark.parametrize(
    "anchors", [pytest.param(DENSE, marks=pytest.mark.slow), ANCHORS], ids=["dense", "blocks"]
)


@pytest.mark.parametrize(
    "anchors, share, lengths, budgets",
    [pytest.param(DENSE, 0.4, (30, 21), (12, 8), marks=pytest.mark.slow), (ANCHORS, 0.55, (18, 25), (9, 13))],
    ids=["dense", "blocks"],
)
@pytest.mark.parametrize("name, make", EACH)
def test_a_row_keeps_what_it_keeps_alone_with_as_many_tokens(name, make, anchors, share, lengths, budgets):
    # Also where strides are of a quarter of each row's own tokens, and in a second turn, which is no share of.
    model, turns = build(anchors=anchors), [lengths, (9, 2)]
    assert_rows_are_alone_what_they_are_together(
        model,
        lambda: pod.PodCache(model.config, eviction=make(share)),
        turns,
        make_alone=lambda row: pod.PodCache(model.config, eviction=make(budgets[row])),
    )


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize("name, make", EACH)
def test_rows_take_their_budgets_along(name, make, anchors, tmp_path):
    """Into other places, into copies of themselves and into a file."""
    model, lengths, rows = build(anchors=anchors), (30, 16, 30, 23), [2, 1, 1, 0, 3, 2]
    ids, mask = left_padded(lengths)
    cache = pod.PodCache(model.config, eviction=make(0.5))
    fed(model, cache, ids, mask)
    cache.batch_select_indices(torch.tensor(rows))
    cache.save(tmp_path / "cache")
    loaded = pod.PodCache.load(tmp_path / "cache", model.config)
    assert loaded.eviction == cache.eviction == make(0.5)
    truths = []
    for row in range(4):
        truths.append(pod.PodCache(model.config, eviction=make(lengths[row] // 2)))
        fed(model, truths[row], ids[row : row + 1, 30 - lengths[row] :])
    mask = mask[rows]
    for new in (tokens(6, 1), tokens(6, 7, seed=1), tokens(6, 1, seed=2)):
        mask = torch.nn.functional.pad(mask, (0, new.shape[1]), value=1)
        logits = [fed(model, one, new, mask) for one in (cache, loaded)]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-6, rtol=0)
    for place, row in enumerate(rows):
        alone = copy.deepcopy(truths[row])
        for new in (tokens(6, 1), tokens(6, 7, seed=1), tokens(6, 1, seed=2)):
            expected = fed(model, alone, new[place : place + 1])
        assert_close(logits[0][place], expected[0])
        for layer in range(5):
            assert held(cache, layer, place) == held(loaded, layer, place) == held(alone, layer, 0)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())


@pytest.mark.slow
@pytest.mark.parametrize("name, make", EACH)
def test_a_share_counts_as_it_is_written_and_not_below_what_is_always_kept(name, make):
    model = build()  # 3 sinks
    cache = pod.PodCache(model.config, eviction=make(0.29))
    fed(model, cache, tokens(1, 100))
    truth = pod.PodCache(model.config, eviction=make(29))  # the float is a little less
    fed(model, truth, tokens(1, 100))
    assert [held(cache, layer, 0) for layer in range(5)] == [held(truth, layer, 0) for layer in range(5)]
    cache.reset()
    fed(model, cache, tokens(1, 60))  # of which 17 are kept
    truth = pod.PodCache(model.config, eviction=make(17))
    fed(model, truth, tokens(1, 60))
    assert [held(cache, layer, 0) for layer in range(5)] == [held(truth, layer, 0) for layer in range(5)]
    least = next(tokens for tokens in range(1, 100) if is_possible(make, tokens, model.config))
    small = pod.PodCache(model.config, eviction=make(0.01))
    truth = pod.PodCache(model.config, eviction=make(least))
    assert_close(fed(model, small, tokens(1, 60)), fed(model, truth, tokens(1, 60)))
    assert_close(fed(model, small, tokens(1, 1)), fed(model, truth, tokens(1, 1)))
    assert [held(small, layer, 0) for layer in range(5)] == [held(truth, layer, 0) for layer in range(5)]


def is_possible(make, budget, config) -> bool:
    try:
        pod.PodCache(config, eviction=make(budget))
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name, make", EACH)
def test_generate(name, make):
    model = build()
    ids, mask = left_padded((30, 19))
    common = dict(attention_mask=mask, suppress_tokens=[0], max_new_tokens=6)
    for options in (dict(num_beams=3), dict(do_sample=False)):
        cache = pod.PodCache(model.config, eviction=make(0.5))
        assert model.generate(ids, past_key_values=cache, **common, **options).shape == (2, 36)
    cache = pod.PodCache(model.config, eviction=make(0.5))
    chunked = dict(common, past_key_values=cache, prefill_chunk_size=7, do_sample=False)
    if name in STORES:
        with pytest.raises(ValueError, match="budget=0.5 is a share of the prompt, which has to come in one forward"):
            model.generate(ids, **chunked)
        return
    assert model.generate(ids, **chunked).shape == (2, 36)  # all chunks are the first prefill
    whole = pod.PodCache(model.config, eviction=make(0.5))
    model.generate(ids, **dict(chunked, past_key_values=whole, prefill_chunk_size=None))
    for layer in range(5):
        assert torch.equal(cache.positions(layer), whole.positions(layer))


@pytest.mark.parametrize("name, make", EACH)
def test_a_first_prefill_that_failed_is_none(name, make):
    model = build()

    def fail(*args):
        raise RuntimeError("out of memory")

    cache, truth = (pod.PodCache(model.config, eviction=make(0.5)) for _ in range(2))
    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fed(model, cache, tokens(2, 60))
    handle.remove()
    if name in STORES:
        cache.reset()
    assert_close(fed(model, cache, tokens(2, 30)), fed(model, truth, tokens(2, 30)))
    assert_close(fed(model, cache, tokens(2, 1)), fed(model, truth, tokens(2, 1)))
    for layer in range(5):
        assert torch.equal(cache.positions(layer), truth.positions(layer))


@pytest.mark.parametrize("name, make", BY_SCORES.items(), ids=BY_SCORES)
def test_a_first_prefill_that_broke_off_between_forwards_is_what_it_was(name, make):
    # Nothing is evicted by it; the share is of all that was seen when something first is.
    model = build()
    cache = pod.PodCache(model.config, eviction=make(0.5))
    with pytest.raises(RuntimeError, match="stop"), cache.prefill():
        fed(model, cache, tokens(2, 29), chunks=(20, 9))
        raise RuntimeError("stop")
    fed(model, cache, tokens(2, 1))
    counts = torch.stack([(cache.positions(layer) >= 0).sum(dim=-1) for layer in range(5)])
    assert (counts == (15 if make(0.5).when else 30)).all()


@pytest.mark.parametrize("budget", [0.0, 1.0, -0.5, 64.0, float("nan"), float("inf"), 0, -3])
@pytest.mark.parametrize("name, make", EACH)
def test_what_is_neither_tokens_nor_a_share_is_named(name, make, budget):
    with pytest.raises(ValueError, match=f"budget must be .*got {budget}"):
        make(budget)


def test_half_of_a_share_is_no_window():
    with pytest.raises(
        ValueError, match="H2O: recent, half of a budget of 0.5, is not known before the prompt: give it"
    ):
        Combined(0.5, H2O(0.5), CAKE(0.5, window=4))
    Combined(0.5, H2O(0.5, recent=4), CAKE(0.5, window=4))
    with pytest.raises(ValueError, match="budget is 0.5 but SnapKV has 0.4"):
        Combined(0.5, SnapKV(0.4), CAKE(0.5))


# ---------------------------------------------------------------------- strides


@pytest.mark.parametrize("make", [StreamingLLM, lambda *args, **kwargs: Cascade(*args, sinks=4, **kwargs)])
def test_a_stride_is_a_quarter_of_the_budget_and_one_above_it_warns(make):
    model, ids = build(), tokens(2, 60)
    assert (make(26).at_once, make(9).at_once, StreamingLLM(3, sinks=1).at_once) == (6, 2, 1)
    default, six, whole = (pod.PodCache(model.config, eviction=make(26, **o)) for o in ({}, {"stride": 6}, {}))
    logits = fed(model, default, ids)
    assert_close(logits, fed(model, six, ids))
    assert_close(logits, fed(model, whole, ids, chunks=(6,) * 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(26, stride=26), make(0.5), LMInfinite(26), LMInfinite(26, stride=99)
    with pytest.warns(UserWarning, match="a stride of 27 queries is above the budget of 26 tokens"):
        dense = make(26, stride=27)
    assert dense.at_once == 27
    with pytest.warns(UserWarning, match="a stride of 40 queries is above the budget of 30 tokens"):
        fed(model, pod.PodCache(model.config, eviction=make(0.5, stride=40)), ids)
