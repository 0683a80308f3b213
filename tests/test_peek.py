"""`cache.peek()`: inside, a cache is its deep copy; behind it, it is what it was, and what it held was not copied."""

import copy

import pytest
import torch
from calibrated import with_filters
from test_cache import ANCHORS, DENSE, STREAMING, assert_close, build, fed, greedy, left_padded, tokens

import pod
from pod.eviction import CAKE, H2O, Cascade, KeyDiff, QFilters, Quest, SageKV, SnapKV, StreamingLLM

SNAP = {"window": 4, "kernel_size": 3}
ADDING = {  # from now on tokens are only added
    "none": {},
    "tau": {"tau": 0.3},
    "quest": {"eviction": Quest(8, page_size=4, dense_layers=1)},
    "snapkv-once": {"eviction": SnapKV(16, **SNAP, query_aware=False)},
    "h2o-once": {"eviction": H2O(16, query_aware=False)},
    "share-once": {"eviction": SageKV(0.5, query_aware=False)},
}
COPIED = {
    "snapkv": {"eviction": SnapKV(16, **SNAP)},
    "h2o": {"eviction": H2O(16)},
    "cake": {"eviction": CAKE(16, **SNAP)},
    "keydiff": {"eviction": KeyDiff(16, every=2)},
    "qfilters": {"eviction": QFilters(16, window=2, every=3, filters="measured")},
    "streamingllm": {"eviction": StreamingLLM(16)},
    "streamingllm-share": {"eviction": StreamingLLM(0.5)},
    "cascade": {"eviction": Cascade(16, sinks=4, num_cascades=2)},
    "8-bits": {"quantization": pod.Quantization(8, group=4, residual=64)},
}
MODELS = {
    "dense": ("llama", "scores", DENSE),
    "blocks": ("llama", "scores", ANCHORS),
    "keys": ("qwen3", "keys", ANCHORS),
    "kv": ("llama", "kv", ANCHORS),
    "window": ("llama", "window", DENSE),
    "streams": ("llama", "scores", STREAMING),
}
# Where heads stream, methods by places are refused (tests/test_streaming_heads.py).
WHOLE = [
    pytest.param(which, setting, id=f"{name}-{which}", marks=[] if which == "blocks" else pytest.mark.slow)
    for name, setting in (ADDING | COPIED).items()
    for which in ("blocks", "dense", "streams")
    if which != "streams" or not isinstance(setting.get("eviction"), StreamingLLM | Cascade)
]


def filled(model, setting, lengths=(40, 31), **options):
    """A cache with two rows of a context, one padded, and the mask."""
    setting = setting | {"eviction": with_filters(setting.get("eviction"), model.config)}
    cache = pod.PodCache(model.config, **setting, **options)
    ids, mask = left_padded(lengths)
    fed(model, cache, ids, mask)
    return cache, mask


def asked(model, cache, mask, seed, count=7, steps=4):
    """The logits of a question and some steps, which follow the context."""
    out = []
    for step, new in enumerate([count, *[1] * steps]):
        mask = torch.nn.functional.pad(mask, (0, new), value=1)
        out.append(fed(model, cache, tokens(len(mask), new, seed=seed + step), mask))
    return torch.cat(out, dim=1)


def state(cache):
    """All there is of a cache but for what empty slots hold."""
    layers = range(len(cache))
    counts = (cache.nbytes(), cache.get_seq_length(), cache.max_length, cache._rows.host_counts())
    return counts, [cache.positions(layer).tolist() for layer in layers], cache._rows.lengths.tolist()


def is_alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("which, setting", WHOLE)
def test_inside_is_a_copy_and_behind_it_nothing_was(setting, which):
    model = build(*MODELS[which])
    cache, mask = filled(model, setting)
    before, stored = state(cache), [part.clone() for part in cache.storages()]
    for seed, count in ((10, 7), (20, 1), (30, 30)):  # more than fits into a ring too
        wanted = asked(model, copy.deepcopy(cache), mask, seed, count)
        with cache.peek():
            assert torch.equal(asked(model, cache, mask, seed, count), wanted)
            assert cache.get_seq_length() == mask.shape[1] + count + 4
        assert state(cache) == before
    for now, then in zip(cache.storages(), stored, strict=True):
        assert now.shape == then.shape  # empty slots may hold something else
    other, _ = filled(model, setting)
    assert torch.equal(asked(model, cache, mask, 40), asked(model, other, mask, 40))
    assert state(cache) == state(other)


@pytest.mark.parametrize("which", ["keys", "kv", "window", "streams"])
def test_other_kinds_of_sharing(which):
    model = build(*MODELS[which])
    cache, mask = filled(model, {})
    wanted, before = asked(model, copy.deepcopy(cache), mask, 10, 30), state(cache)
    with cache.peek():
        assert torch.equal(asked(model, cache, mask, 10, 30), wanted)
    assert state(cache) == before
    other, _ = filled(model, {})
    assert torch.equal(asked(model, cache, mask, 20), asked(model, other, mask, 20))


@pytest.mark.parametrize("setting", [pytest.param(setting, id=name) for name, setting in ADDING.items()])
def test_what_is_held_is_not_copied(setting):
    """Inside, distant keys and values lie where they lay; all that is more are own keys, tables and pages."""
    model = build(*MODELS["blocks"])
    cache, mask = filled(model, setting, max_length=80)
    held = {one.data_ptr(): one for one in cache.storages()}
    distant = [part.data for layer in cache._storage.layers for part in (layer.values, layer.keys)]
    with cache.peek():
        asked(model, cache, mask, 10)
        inside = {one.data_ptr() for one in cache.storages()}
        assert {one.data_ptr() for one in distant} <= inside
        more = sum(one.nbytes for address, one in held.items() if address not in inside)
        assert more <= sum(one.nbytes for one in held.values()) - sum(one.nbytes for one in distant)
    assert {one.data_ptr() for one in cache.storages()} == held.keys()


def test_a_storage_that_must_grow_is_given_back():
    model = build(*MODELS["blocks"])
    cache, mask = filled(model, {})
    before, addresses = cache.nbytes(), [one.data_ptr() for one in cache.storages()]
    with cache.peek():
        asked(model, cache, mask, 10, 60)
        assert cache.nbytes() > 1.5 * before
    assert cache.nbytes() == before and [one.data_ptr() for one in cache.storages()] == addresses


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}, {"prefill_chunk_size": 3}], ids=str)
def test_many_questions_are_answered_on_one_context(options):
    model = build(*MODELS["blocks"])
    context = tokens(1, 40)
    cache = pod.PodCache(model.config, eviction=SnapKV(24, **SNAP, query_aware=False))
    fed(model, cache, context)
    for seed in (1, 2):
        ids = torch.cat([context, tokens(1, 7, seed=seed)], dim=1)
        settings = {"max_new_tokens": 6, "attention_mask": torch.ones_like(ids), **options}
        other = copy.deepcopy(cache)
        other.batch_repeat_interleave(options.get("num_beams", 1))
        wanted = model.generate(ids, past_key_values=other, **settings)
        with cache.peek():
            cache.batch_repeat_interleave(options.get("num_beams", 1))
            assert torch.equal(model.generate(ids, past_key_values=cache, **settings), wanted)
        assert (cache.get_seq_length(), cache.max_length) == (40, None)


def test_rows_and_crop_inside():
    model = build(*MODELS["blocks"])
    cache, mask = filled(model, {})
    other, before = copy.deepcopy(cache), state(cache)
    with cache.peek():
        for one in (cache, other):
            one.batch_select_indices(torch.tensor([1, 0, 1]))
            fed(model, one, tokens(3, 5), torch.nn.functional.pad(mask[[1, 0, 1]], (0, 5), value=1))
            one.crop(-3)
        rows = torch.nn.functional.pad(mask[[1, 0, 1]], (0, 2), value=1)
        assert torch.equal(asked(model, cache, rows, 10), asked(model, other, rows, 10))
    assert state(cache) == before


@pytest.mark.parametrize("setting", ["none", "snapkv-once", "quest", "h2o-once"])
def test_tokens_from_before_are_cropped_inside(setting):
    """What is written instead is not written where the cache's own tokens are."""
    model = build(*MODELS["blocks"])
    cache, mask = filled(model, ADDING.get(setting, {}), (40, 40), crop_slack=8)
    more = torch.nn.functional.pad(mask, (0, 4), value=1)
    fed(model, cache, tokens(2, 4), more)
    other, before = copy.deepcopy(cache), state(cache)
    with cache.peek():
        copied = copy.deepcopy(cache)
        for one in (cache, copied):
            one.crop(-3)
        assert torch.equal(asked(model, cache, more[:, 3:], 10), asked(model, copied, more[:, 3:], 10))
    assert state(cache) == before
    assert torch.equal(asked(model, cache, more, 20), asked(model, other, more, 20))


@pytest.mark.parametrize("setting", [{}, COPIED["h2o"]], ids=["none", "h2o"])
def test_a_forward_that_breaks_off_inside_leaves_nothing(setting):
    model = build(*MODELS["blocks"])
    cache, mask = filled(model, setting)

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), cache.peek():
        asked(model, cache, mask, 10)
    handle.remove()
    other, _ = filled(model, setting)
    assert torch.equal(asked(model, cache, mask, 20), asked(model, other, mask, 20))


def test_inference_mode_and_greedy_steps():
    model = build(*MODELS["blocks"])
    cache, _ = filled(model, {}, (40, 40))
    out = fed(model, copy.deepcopy(cache), tokens(2, 3))
    with torch.inference_mode(), cache.peek():
        assert_close(fed(model, cache, tokens(2, 3)), out)
    with cache.peek():
        greedy(model, cache, fed(model, cache, tokens(2, 3)), 3)
    assert cache.get_seq_length() == 40


def test_misuse_is_named():
    model = build(*MODELS["blocks"])
    empty = pod.PodCache(model.config)
    message = r"cache.peek\(\) is for a cache that holds tokens, outside prefill\(\) and another peek\(\)"
    with pytest.raises(ValueError, match=message), empty.peek():
        pass
    cache, _ = filled(model, {})
    with pytest.raises(ValueError, match=message), cache.peek(), cache.peek():
        pass
    with pytest.raises(ValueError, match=message), cache.prefill(), cache.peek():
        pass
    with cache.peek():
        other = copy.deepcopy(cache)  # which is a cache like any other
    with other.peek():
        pass
