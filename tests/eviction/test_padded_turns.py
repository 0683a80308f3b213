"""Turns of unequal lengths, padded on the left: every row is what it is alone, whatever the storage."""

import pytest
import torch
from test_cache import ANCHORS, DENSE, build, fed, tokens

import pod
from pod import eviction

METHODS = {
    "none": None,
    "snapkv": eviction.SnapKV(12, window=4, kernel_size=3),
    "snapkv-once": eviction.SnapKV(12, window=4, kernel_size=3, query_aware=False),
    "pyramidkv": eviction.PyramidKV(12, window=4, kernel_size=3),
    "adakv": eviction.AdaKV(12, window=4, kernel_size=3),
    "sagekv": eviction.SageKV(12),
    "h2o": eviction.H2O(12),
    "tova": eviction.TOVA(12),
    "cake": eviction.CAKE(12, window=4, kernel_size=3),
    "quest": eviction.Quest(8, page_size=4, dense_layers=0),
    "streamingllm": eviction.StreamingLLM(16),
    "lminfinite": eviction.LMInfinite(16),
    "cascade": eviction.Cascade(20, sinks=4),
}
TURNS = [[(30, 21), (3, 7)], [(18, 25), (9, 2), (1, 5)]]  # tokens of each row in each turn


def mask_of(turns):
    parts = [torch.arange(max(reals)) >= max(reals) - torch.tensor(reals)[:, None] for reals in turns]
    return torch.cat(parts, dim=1).long()


def held(cache, layer, row):
    return [sorted(p for p in head.tolist() if p >= 0) for head in cache.positions(layer)[row]]


def assert_rows_are_alone_what_they_are_together(model, make_cache, turns, atol=1e-4, make_alone=None):
    """`make_alone`, of a row's number, where it is alone in another cache than `make_cache` makes."""
    together, ids = make_cache(), [tokens(2, max(reals), seed=turn) for turn, reals in enumerate(turns)]
    mask = mask_of(turns)
    ends = torch.tensor([max(reals) for reals in turns]).cumsum(0).tolist()
    logits = [fed(model, together, new, mask[:, :end]) for new, end in zip(ids, ends, strict=True)]
    steps = [tokens(2, 1, seed=50 + step) for step in range(4)]
    for step, new in enumerate(steps):
        logits.append(fed(model, together, new, torch.nn.functional.pad(mask, (0, step + 1), value=1)))
    for row in range(2):
        alone = make_cache() if make_alone is None else make_alone(row)
        for turn, reals in enumerate(turns):
            with alone.prefill():  # a turn of one token is a turn, and no step
                found = fed(model, alone, ids[turn][row : row + 1, -reals[row] :])
            torch.testing.assert_close(logits[turn][row, -reals[row] :], found[0], atol=atol, rtol=1e-4)
        for step, new in enumerate(steps):
            found = fed(model, alone, new[row : row + 1])
            torch.testing.assert_close(logits[len(turns) + step][row], found[0], atol=atol, rtol=1e-4)
        for layer in range(len(model.model.layers)):
            assert held(together, layer, row) == held(alone, layer, 0)


@pytest.mark.parametrize("turns", TURNS, ids=["two", "three"])
@pytest.mark.parametrize("anchors", [pytest.param(DENSE, marks=pytest.mark.slow), ANCHORS], ids=["dense", "blocks"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, anchors, turns):
    model = build(anchors=anchors)
    assert_rows_are_alone_what_they_are_together(
        model, lambda: pod.PodCache(model.config, eviction=METHODS[name]), turns
    )


@pytest.mark.parametrize("turns", TURNS, ids=["two", "three"])
@pytest.mark.parametrize("share", ["keys", "kv"])
def test_other_kinds_of_sharing(share, turns):
    model = build(anchors=ANCHORS, share=share)
    assert_rows_are_alone_what_they_are_together(model, lambda: pod.PodCache(model.config), turns)


def test_variances_leave_padding_out():
    torch.manual_seed(0)
    weights = torch.rand(3, 2, 2, 5, 9).softmax(-1)
    asked = torch.tensor([5, 2, 1])
    for row, count in enumerate(asked.tolist()):
        weights[row, :, :, : 5 - count] = 0
    seen = eviction.Observation(weights, torch.arange(9).expand(3, 2, 9), torch.full((3,), 8), True, False, asked)
    for row, count in enumerate(asked.tolist()):
        own = weights[row, :, :, 5 - count :]
        torch.testing.assert_close(seen.means()[row], own.mean(dim=2))
        wanted = own.var(dim=2) if count > 1 else torch.zeros(2, 2, 9)
        torch.testing.assert_close(seen.variances()[row], wanted, atol=1e-7, rtol=1e-4)


def test_what_cannot_be_is_named():
    model = build()
    cache = pod.PodCache(model.config, eviction=METHODS["snapkv"])
    fed(model, cache, tokens(2, 20))
    for last, message in [
        (
            [[1, 1, 1], [1, 1, 0]],
            "row 1 of attention_mask has padding after its first real token.*padding_side = 'left'",
        ),
        ([[0, 0, 0], [1, 1, 1]], "row 0 of attention_mask is all padding in this forward.*batch_select_indices"),
    ]:
        mask = torch.cat([torch.ones(2, 20, dtype=torch.long), torch.tensor(last)], dim=1)
        with pytest.raises(ValueError, match=message):
            fed(model, cache, tokens(2, 3), mask)
    cache.reset()
    mask = torch.cat([torch.ones(2, 20, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])], dim=1)
    with pytest.raises(ValueError, match="row 0 of attention_mask has padding in a later chunk of one prefill"):
        with cache.prefill():
            fed(model, cache, tokens(2, 23), mask, (20, 3))
