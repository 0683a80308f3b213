"""`cache.fork()`: rows over one context are copies of its row, and the context is stored and read once."""

import copy
from functools import partial

import pytest
import torch
from test_cache import ANCHORS, DENSE, STREAMING, build, fed, left_padded, recomputed, tokens
from torch.nn.functional import pad
from transformers import set_seed

import pod
import pod_kernels.cached
from pod.eviction import H2O, AdaKV, Cascade, KVzip, Quest, SageKV, SnapKV, StreamingLLM
from pod_kernels.dispatch import forced

SNAP = {"window": 4, "kernel_size": 3}
MODELS = {
    "blocks": ("llama", "scores", ANCHORS),
    "keys": ("qwen3", "keys", ANCHORS),
    "dense": ("llama", "scores", DENSE),
    "kv": ("llama", "kv", ANCHORS),
}
EVICTED = {
    "snapkv": SnapKV(16, **SNAP, query_aware=False),
    "adakv": AdaKV(12, **SNAP, query_aware=False),  # heads of different lengths
    "h2o": H2O(16, query_aware=False),
    "a-share": SageKV(0.5, query_aware=False),
}
QUESTIONS = (5, 1, 9)  # tokens of each row's


def contexts(model, length, rows=3, **options):
    """A cache forked to so many rows over a context, and one whose rows are copies."""
    cache = pod.PodCache(model.config, **options)
    fed(model, cache, tokens(1, length))
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(rows)
    cache.fork(rows)
    return cache, copied


def turn(model, cache, mask, lengths, seed=0):
    """Logits of new tokens, so many in each row, and the mask with them."""
    ids, new = left_padded(lengths)
    ids = tokens(*ids.shape, seed=seed) * new
    mask = torch.cat([mask, new], dim=1)
    logits = fed(model, cache, ids, mask) * new[..., None]
    return logits, mask


def turns(model, cache, length, steps=4):
    """Logits of a left-padded question, some steps, and a turn that is longer than a ring and then some steps."""
    rows, out = cache.batch_size, []
    mask = torch.ones(rows, length, dtype=torch.long)
    for seed, lengths in enumerate([QUESTIONS[:rows], *[[1] * rows] * steps, [30] * rows, *[[1] * rows] * 2]):
        logits, mask = turn(model, cache, mask, lengths, seed)
        out.append(logits)
    return torch.cat(out, dim=1)


def assert_same(found, wanted):
    """To 1e-5 of the largest logit."""
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def together(cache, copied):
    assert cache._rows.host_counts() == copied._rows.host_counts()
    assert cache.get_seq_length() == copied.get_seq_length() and cache.batch_size == copied.batch_size
    for layer in range(len(cache)):
        assert torch.equal(cache.positions(layer), copied.positions(layer))


@pytest.mark.parametrize(
    "which, length",  # fewer tokens than there are sinks, and more than are proximal
    [("blocks", 2), ("blocks", 40), ("keys", 40), ("kv", 40), ("dense", 40)]
    + [pytest.param(which, 2, marks=pytest.mark.slow) for which in ("keys", "kv", "dense")],
)
def test_rows_are_copies_of_the_one(which, length):
    model = build(*MODELS[which])
    cache, copied = contexts(model, length)
    together(cache, copied)
    assert_same(turns(model, cache, length), turns(model, copied, length))
    together(cache, copied)


def test_logits_are_those_of_whole_texts():
    """Without a cache, row by row: nothing of the cache is in what is compared with."""
    model = build(*MODELS["blocks"])
    cache, _ = contexts(model, 21)
    ids, new = left_padded(QUESTIONS)
    found = fed(model, cache, ids, pad(new, (21, 0), value=1))
    step = fed(model, cache, tokens(3, 1, seed=5), pad(new, (21, 1), value=1))
    for row, count in enumerate(QUESTIONS):
        text = torch.cat([tokens(1, 21), ids[row : row + 1, -count:], tokens(3, 1, seed=5)[row : row + 1]], dim=1)
        wanted = recomputed(model, text)[0, 21:]
        assert_same(torch.cat([found[row, -count:], step[row]]), wanted)


@pytest.mark.parametrize("which", ["blocks", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in ("snapkv", "adakv") else pytest.mark.slow) for name in EVICTED]
)
def test_a_context_that_was_evicted_from(method, which):
    model = build(*MODELS[which])
    cache, copied = contexts(model, 40, eviction=EVICTED[method])
    together(cache, copied)
    assert_same(turns(model, cache, 40), turns(model, copied, 40))
    together(cache, copied)


@pytest.mark.parametrize("which", ["blocks", pytest.param("keys", marks=pytest.mark.slow)])
def test_one_row_one_token_and_a_prefill_in_chunks(which):
    model = build(*MODELS[which])
    for rows, chunks in ((1, (1, 1, 1)), (3, (1, 2, 1)), (5, (4, 3, 1))):
        cache, copied = contexts(model, 17, rows)
        ids, found = tokens(rows, sum(chunks), seed=3), []
        for one in (cache, copied):
            with one.prefill():
                found.append(fed(model, one, ids, chunks=chunks))
        assert_same(*found)


@pytest.mark.parametrize("method", [None, "snapkv"])
def test_bytes_and_addresses(method):
    """The context where it was, once; beside it each row's own tokens."""
    model = build(*MODELS["blocks"])
    own, rows, itemsize = 26, 4, 4
    settings = {"crop_slack": 16, "eviction": EVICTED.get(method)}
    cache = pod.PodCache(model.config, **settings)
    fed(model, cache, tokens(1, 30))
    context, held = cache.nbytes(), [part.data_ptr() for part in cache.storages()]
    cache.expect(30 + own)
    cache.fork(rows)
    assert cache.nbytes() == context and [part.data_ptr() for part in cache.storages()] == held
    ids = tokens(rows, own)
    fed(model, cache, ids, chunks=(7, *[1] * (own - 7)))
    # Of every layer and KV head a value; of anchors a key, of the others a key in a ring without sinks.
    anchors, shared = 5, 5
    vectors = 10 * own + anchors * own + shared * (8 + 16)
    assert cache.nbytes() == context + rows * model.config.head_dim * itemsize * vectors
    assert [part.data_ptr() for part in cache.storages()][: len(held)] == held
    assert repr(cache).startswith(f"PodCache(tokens={30 + own}, bytes={cache.nbytes()}")
    if method is None:
        exact = pod.PodCache(model.config, max_length=30, **settings)
        assert cache.expected_nbytes(30 + own, rows, itemsize) - exact.expected_nbytes(30, 1, itemsize) == (
            cache.nbytes() - context
        )


def test_the_context_is_read_once(monkeypatch):
    """Of every layer its keys are multiplied with all rows' queries at once, where they lie."""
    model = build(*MODELS["blocks"])
    cache, _ = contexts(model, 40, rows=3)
    fed(model, cache, tokens(3, 2))
    held = {layer.keys.data.data_ptr() for layer in cache._storage.prefix.layers if layer.num_anchors}
    seen = []

    def spied(queries, keys, *args, products=pod_kernels.cached.products):
        if keys.untyped_storage().data_ptr() in held and keys.shape[2] == 40:
            seen.append((queries.shape[1:4].numel(), keys.shape[1], keys.untyped_storage().data_ptr()))
        return products(queries, keys, *args)

    monkeypatch.setattr(pod_kernels.cached, "products", spied)
    fed(model, cache, tokens(3, 1))
    groups = 2
    assert {address for *_, address in seen} == held and len(seen) == len(held)
    assert {(queries, rows) for queries, rows, _ in seen} == {(3 * groups, 1)}


def test_rows_are_selected_and_repeated():
    model = build(*MODELS["blocks"])
    cache, copied = contexts(model, 40)
    mask = torch.ones(3, 40, dtype=torch.long)
    out = []
    for one in (cache, copied):
        one.reorder_cache(torch.tensor([2, 0, 1]))  # no tokens yet
        _, after = turn(model, one, mask, QUESTIONS)
        for change in (
            partial(one.reorder_cache, torch.tensor([1, 1, 0])),
            partial(one.batch_select_indices, torch.tensor([True, False, True])),
            partial(one.batch_repeat_interleave, 2),
        ):
            change()
        after = after[[1, 1, 0]][[0, 2]].repeat_interleave(2, dim=0)
        out.append(turn(model, one, after, [3] * 4, seed=3)[0])
    assert_same(*out)
    together(cache, copied)


@pytest.mark.parametrize("which", ["blocks", "keys", "kv", "dense"])
@pytest.mark.parametrize("how", ["crop", "select"])
def test_a_context_that_was_longer(which, how, tmp_path):
    """Slots behind what is left of it are not read, nor those that `max_length` wants."""
    model = build(*MODELS[which])
    for length in (None, 45, 90):
        cache = pod.PodCache(model.config, max_length=length)
        if how == "crop":
            fed(model, cache, tokens(1, 30))
            cache.crop(-8)
        else:
            ids, mask = left_padded((30, 22))
            fed(model, cache, tokens(2, 30) * mask, mask)
            cache.batch_select_indices(torch.tensor([1]))
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(3)
        cache.fork(3)
        mask = torch.ones(3, cache.get_seq_length(), dtype=torch.long)
        mask[:, : cache.get_seq_length() - 22] = 0
        for count in (0, 4):
            if count:
                found, wanted = (turn(model, one, mask, [count] * 3)[0] for one in (cache, copied))
                assert_same(found, wanted)
                mask = pad(mask, (0, count), value=1)
            cache.save(tmp_path / "cache")
            cache = pod.PodCache.load(tmp_path / "cache", model.config)
        found, wanted = (turn(model, one, mask, [6] * 3)[0] for one in (cache, copied))
        assert_same(found, wanted)
        together(cache, copied)


def test_a_reset_behind_a_peek_was_not():
    model = build(*MODELS["keys"])
    cache, copied = contexts(model, 20)
    with cache.peek():
        cache.reset()
        fed(model, cache, tokens(1, 30))
    together(cache, copied)
    assert_same(turns(model, cache, 20), turns(model, copied, 20))


def test_own_tokens_are_cropped_and_shared_ones_are_not():
    model = build(*MODELS["blocks"])
    cache, copied = contexts(model, 40, crop_slack=8)
    mask = torch.ones(3, 40, dtype=torch.long)
    with pytest.raises(ValueError, match="cannot take back 1 tokens: the shortest row has 0 since cache.fork"):
        cache.crop(-1)
    for one in (cache, copied):
        turn(model, one, mask, [6, 6, 6])
        one.crop(-4)
    longer = pad(mask, (0, 2), value=1)
    assert_same(turn(model, cache, longer, [12] * 3, 1)[0], turn(model, copied, longer, [12] * 3, 1)[0])
    together(cache, copied)
    with pytest.raises(ValueError, match=r"cannot take back 9 tokens: .* \(crop_slack\)"):
        cache.crop(-9)
    with pytest.raises(ValueError, match="cannot take back 15 tokens: the shortest row has 14 since cache.fork"):
        cache.crop(-15)
    assert cache.is_croppable


@pytest.mark.parametrize("method", [None, "adakv"])
def test_copies_peeks_and_files(tmp_path, method):
    model = build(*MODELS["blocks"])
    cache, _ = contexts(model, 40, eviction=EVICTED.get(method))
    mask = torch.ones(3, 40, dtype=torch.long)
    for count in (0, 5):  # without own tokens, and with some
        if count:
            _, mask = turn(model, cache, mask, QUESTIONS)
        other = copy.deepcopy(cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = pod.PodCache.load(tmp_path / "cache.safetensors", model.config)
        assert loaded.nbytes() <= cache.nbytes()
        wanted = turn(model, other, mask, [4, 2, 4], seed=7)[0]
        with cache.peek():
            assert torch.equal(turn(model, cache, mask, [4, 2, 4], seed=7)[0], wanted)
        together(cache, loaded)
        assert torch.equal(turn(model, loaded, mask, [4, 2, 4], seed=7)[0], wanted)
        assert loaded._storage.prefix.layers[0].values.sizes.shape[1] == 1


def test_the_one_row_is_there_again_behind_a_peek():
    model = build(*MODELS["blocks"])
    cache = pod.PodCache(model.config)
    fed(model, cache, tokens(1, 40))
    wanted = fed(model, copy.deepcopy(cache), tokens(1, 5))
    before = cache.nbytes()
    with cache.peek():
        cache.fork(4)
        fed(model, cache, tokens(4, 30))
    assert (cache.batch_size, cache.get_seq_length(), cache.nbytes()) == (1, 40, before)
    assert torch.equal(fed(model, cache, tokens(1, 5)), wanted)


def test_reset_forgets_the_context_and_the_rows():
    model = build(*MODELS["blocks"])
    cache, _ = contexts(model, 40, eviction=EVICTED["snapkv"])
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.nbytes()) == (-1, 0, 0)
    other = pod.PodCache(model.config, eviction=EVICTED["snapkv"])
    for seed in (1, 2):
        ids = tokens(2, 25, seed=seed)
        assert torch.equal(fed(model, cache, ids), fed(model, other, ids))


@pytest.mark.parametrize("own", [0, 3])
def test_a_forward_that_breaks_off_leaves_nothing(own):
    model = build(*MODELS["blocks"])
    cache, copied = contexts(model, 40)
    mask = torch.ones(3, 40 + own, dtype=torch.long)
    for one in (cache, copied) if own else ():
        turn(model, one, mask[:, :40], [own] * 3)

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.layers[3].register_forward_pre_hook(fail)
    expected = copy.deepcopy(copied)
    for one in (cache, copied):
        with pytest.raises(RuntimeError, match="out of memory"):
            turn(model, one, mask, QUESTIONS, seed=9)
    handle.remove()
    wanted = turn(model, expected, mask, QUESTIONS)[0]
    for one in (cache, copied):  # the first layers have widened their rings already
        assert_same(turn(model, one, mask, QUESTIONS)[0], wanted)
        together(one, expected)


def test_inference_mode_and_gradients():
    model = build(*MODELS["blocks"])
    with torch.inference_mode():
        cache, _ = contexts(model, 20)
    logits = model(tokens(3, 4), past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="gradients do not flow through tokens that a cache holds"):
        logits.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        pytest.param({"num_beams": 4, "do_sample": True, "num_return_sequences": 2}, marks=pytest.mark.slow),
        pytest.param({"num_beams": 3, "prefill_chunk_size": 7}, marks=pytest.mark.slow),
        pytest.param({"do_sample": True, "num_return_sequences": 3, "output_hidden_states": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [None, pytest.param("snapkv", marks=pytest.mark.slow)])
def test_generate_prefills_one_row_of_copies(options, method, monkeypatch):
    """The texts are those of transformers' expansion, which prefills every copy."""
    model = build(*MODELS["blocks"])
    options |= {"max_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}
    prompt, found = tokens(1, 40), []
    fill = model.model.layers[0].register_forward_hook(lambda _, args, out: rows.append(args[0].shape[:2]))
    for forks in (True, False):
        if not forks:
            monkeypatch.setattr(pod.PodCache, "forks", False)
        set_seed(3)
        rows = []
        cache = None if method is None else pod.PodCache(model.config, eviction=EVICTED[method])
        found.append(model.generate(prompt, past_key_values=cache, **options))
        assert all((row == 1) == forks for row, count in rows if count > 1) and rows[-1][0] > 1
    fill.remove()
    one, other = found
    assert torch.equal(one.sequences, other.sequences)
    assert_same(torch.stack(one.logits), torch.stack(other.logits))
    copies = one.past_key_values.batch_size
    if "output_hidden_states" in options:
        assert all(states.shape[0] == copies for step in one.hidden_states for states in step)
    if method is None:
        assert one.past_key_values.nbytes() == one.past_key_values.expected_nbytes(49, copies, 4)
        assert one.past_key_values.nbytes() < other.past_key_values.nbytes() / 1.5


def test_samples_that_go_on_from_a_filled_cache():
    """The question is prefilled into the one row, behind the context; left padding may be in it."""
    model = build(*MODELS["blocks"])
    ids, mask = tokens(1, 30), (torch.arange(30) >= 6).long()[None]
    prompt, whole = torch.cat([ids, tokens(1, 5, seed=2)], dim=1), pad(mask, (0, 5), value=1)
    found = []
    for filled in (True, False):
        cache = pod.PodCache(model.config)
        if filled:
            fed(model, cache, ids, mask)
        set_seed(0)
        options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6, "attention_mask": whole}
        found.append(model.generate(prompt, past_key_values=cache, **options))
        assert cache.batch_size == 3 and cache.has_padding
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_context_that_kernels_stored():
    """Triton's kernels, interpreted, fill the context; forked rows take torch's operations."""
    pytest.importorskip("triton")
    model = build(*MODELS["blocks"])
    with forced("fused"):
        cache = pod.PodCache(model.config)
        fed(model, cache, tokens(1, 14), chunks=(13, 1))
        assert cache._storage.by_kernels
    cache.fork(2)
    ids = tokens(2, 5, seed=1)
    found = fed(model, cache, ids, chunks=(1, 3, 1))
    assert not cache._storage.by_kernels
    text = torch.cat([tokens(1, 14).expand(2, -1), ids], dim=1)
    assert_same(found, recomputed(model, text)[:, 14:])


def test_a_batch_of_questions_on_one_document():
    """`generate` on a forked cache answers as on rows that were prefilled each."""
    model = build(*MODELS["blocks"])
    document = tokens(1, 40)
    ids, new = left_padded(QUESTIONS)
    mask, prompt = pad(new, (40, 0), value=1), torch.cat([document.expand(3, -1), ids], dim=1)
    cache, copied = contexts(model, 40)
    answers = [
        model.generate(prompt, attention_mask=mask, past_key_values=one, max_new_tokens=8, do_sample=False)
        for one in (cache, copied)
    ]
    assert torch.equal(*answers)
    for row, count in enumerate(QUESTIONS):
        text = torch.cat([document, ids[row : row + 1, -count:]], dim=1)
        alone = model.generate(text, max_new_tokens=8, do_sample=False)
        assert torch.equal(alone[0, -8:], answers[0][row, -8:])


REFUSED = {
    "tau": ({"tau": 0.5}, "tau=0.5"),
    "quantization": ({"quantization": pod.Quantization(8, group=4, residual=64)}, "Quantization"),
    "quest": ({"eviction": Quest(8, page_size=4)}, "Quest, whose pages are a row's own"),
    "h2o": ({"eviction": H2O(16)}, "H2O, which evicts again .query_aware=False evicts once, and is taken."),
    "snapkv": ({"eviction": SnapKV(16, **SNAP)}, "SnapKV, which evicts again"),
    "chain": ({"eviction": Cascade(16, sinks=4, num_cascades=2)}, "Cascade, which keeps tokens by their places"),
    "runs": ({"eviction": StreamingLLM(0.5)}, "StreamingLLM, which keeps tokens by their places"),
}


@pytest.mark.parametrize("setting, has", REFUSED.values(), ids=REFUSED)
def test_what_rows_cannot_share_is_named_and_generate_copies(setting, has):
    model = build(*MODELS["blocks"])
    cache = pod.PodCache(model.config, **setting)
    fed(model, cache, tokens(1, 40))
    with pytest.raises(ValueError, match=rf"this cache has {has}.*cache.batch_repeat_interleave\(n\) copies a row"):
        cache.fork(2)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 3}
    out = model.generate(tokens(1, 40), past_key_values=pod.PodCache(model.config, **setting), **options)
    assert out.shape == (2, 43)


def test_other_misuse_is_named():
    model = build(*MODELS["blocks"])
    cache = pod.PodCache(model.config)
    one_row = "cache.fork is for a cache that holds one row, outside prefill"
    with pytest.raises(ValueError, match=rf"{one_row}\(\); it holds 0"):
        cache.fork(2)
    fed(model, cache, tokens(2, 5))
    with pytest.raises(ValueError, match=rf"{one_row}\(\); it holds 2"):
        cache.fork(2)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match=one_row), cache.prefill():
        cache.fork(2)
    with pytest.raises(ValueError, match="rows must be at least 1 row, a whole number; got 0"):
        cache.fork(0)
    cache.fork(1)
    with pytest.raises(ValueError, match="this cache has rows that share a context already"):
        cache.fork(2)
    for share, blocks, has in (("scores", STREAMING, "heads that stream"), ("window", DENSE, "WindowAttention")):
        other = build("llama", share, blocks)
        cache = pod.PodCache(other.config)
        fed(other, cache, tokens(1, 20))
        with pytest.raises(ValueError, match=f"this cache has {has}"):
            cache.fork(2)
    cache = pod.PodCache(model.config, eviction=KVzip(0.5))
    fed(model, cache, tokens(1, 20))
    with pytest.raises(ValueError, match="KVzip has not evicted from the context yet"):
        cache.fork(2)
    cache, _ = contexts(model, 20)
    with pytest.raises(ValueError, match=r"row 1 of attention_mask is all padding"):
        mask = torch.tensor([[1, 1], [0, 0], [0, 1]])
        fed(model, cache, tokens(3, 2), pad(mask, (20, 0), value=1))
    fixed, _ = contexts(model, 20, max_length=24)
    fed(model, fixed, tokens(3, 4))
    with pytest.raises(ValueError, match="the cache was made for 24 tokens per row and 25 are needed"):
        fed(model, fixed, tokens(3, 1))
