"""The PoD cache: decoding with it equals recomputing without it, its bytes are the formula's, misuse is refused."""

import copy
from functools import cache as memoized

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, set_seed

import pod
from pod.eviction import H2O, Quest, SnapKV, StreamingLLM
from pod.model.inputs import CACHE

# One row per layer, one column per KV head: blocks of one, two, three layers, begun in different layers.
ANCHORS = ((0, 0), (0, 1), (2, 1), (2, 1), (2, 4))
DENSE = tuple((layer, layer) for layer in range(5))
STREAMING = ((0, 0), (-1, 0), (2, -1), (2, 3), (-1, 3))
VOCAB, SINKS, RECENT = 97, 3, 8
EIGHT = pod.Quantization(8, group=4, residual=64)
STOCK = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}

ALL_MODELS = [
    pytest.param(("llama", "scores", ANCHORS), id="llama-scores"),
    pytest.param(("llama", "keys", ANCHORS), id="llama-keys", marks=pytest.mark.slow),
    pytest.param(("qwen3", "scores", ANCHORS), id="qwen3-scores", marks=pytest.mark.slow),
    pytest.param(("qwen3", "keys", ANCHORS), id="qwen3-keys"),
    pytest.param(("llama", "scores", DENSE), id="llama-dense"),
]
SHARES = [ALL_MODELS[0], pytest.param(*ALL_MODELS[3].values, id=ALL_MODELS[3].id, marks=pytest.mark.slow)]


@memoized
def stock_model(family: str, layers: int, hidden: int):
    config_class, model_class = STOCK[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=8192,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return model_class(config).eval()


@memoized
def build(family="llama", share="scores", anchors=ANCHORS, sinks=SINKS, recent=RECENT, hidden=64):
    """A tiny random PoD model in float32."""
    blocks = pod.LayerBlocks([list(row) for row in anchors])
    stock = stock_model(family, len(anchors), hidden)
    return pod.convert(stock, blocks, sink_size=sinks, recent_size=recent, share=share)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """ids and mask [B, T] of rows of different lengths."""
    ids = tokens(len(lengths), max(lengths))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def positions_of(mask: Tensor) -> Tensor:
    """position_ids as `generate` makes them."""
    return (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)


@torch.no_grad()
def recomputed(model, ids: Tensor, **kwargs) -> Tensor:
    return model(ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def fed(model, cache: pod.PodCache, ids: Tensor, mask: Tensor | None = None, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of `ids`, fed to the model in chunks (one when not told), beside what the cache holds already."""
    seen, logits = cache.get_seq_length(), []
    for chunk in ids.split(list(chunks) or [ids.shape[1]], dim=1):
        kwargs = {}
        if mask is not None:
            so_far = mask[:, : seen + chunk.shape[1]]
            kwargs = dict(attention_mask=so_far, position_ids=positions_of(so_far)[:, -chunk.shape[1] :])
        logits.append(model(chunk, past_key_values=cache, **kwargs).logits)
        seen += chunk.shape[1]
    return torch.cat(logits, dim=1)


def greedy(model, cache: pod.PodCache, logits: Tensor, steps: int, mask: Tensor | None = None) -> tuple:
    """Decode token by token. Returns the new ids [B, steps], their logits, and the mask with them."""
    ids, all_logits = [], []
    for _ in range(steps):
        ids.append(logits[:, -1:].argmax(dim=-1))
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = fed(model, cache, ids[-1], mask)
        all_logits.append(logits)
    return torch.cat(ids, dim=1), torch.cat(all_logits, dim=1), mask


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def split_into(total: int, size: int) -> tuple[int, ...]:
    return tuple(min(size, total - first) for first in range(0, total, size))


# ---------------------------------------------------------------------- decoding equals recomputing


@pytest.mark.parametrize("which", ALL_MODELS)
@pytest.mark.parametrize("slack, prompt, steps", [(0, 5, 30), (3, 25, 12), (64, 2, 90)])
def test_greedy_equals_recomputation_at_every_step(which, slack, prompt, steps):
    # From below the proximal window to far beyond it; the ring goes round in each case.
    model, ids = build(*which), tokens(2, prompt)
    cache = pod.PodCache(model.config, crop_slack=slack)
    first = fed(model, cache, ids)
    new, logits, _ = greedy(model, cache, first, steps)
    whole = torch.cat([ids, new], dim=1)
    assert cache.get_seq_length() == prompt + steps
    # Every step against a computation that never saw a later token.
    for end in range(prompt, prompt + steps + 1, 1 if steps < 40 else 7):
        got = first[:, -1] if end == prompt else logits[:, end - prompt - 1]
        assert_close(got, recomputed(model, whole[:, :end])[:, -1])
    assert_close(torch.cat([first, logits], dim=1), recomputed(model, whole))


@pytest.mark.parametrize("sinks, recent", [(0, 1), (0, 6), (2, 12), (4, 6)])
@pytest.mark.parametrize("share", ["scores", "keys"])
def test_greedy_equals_recomputation_for_other_sizes(sinks, recent, share):
    model, ids = build("llama", share, ANCHORS, sinks, recent), tokens(2, 3)
    cache = pod.PodCache(model.config, crop_slack=1)
    first = fed(model, cache, ids)
    new, logits, _ = greedy(model, cache, first, 25)
    assert_close(torch.cat([first, logits], dim=1), recomputed(model, torch.cat([ids, new], dim=1)))


def test_sharing_matters_in_these_models():
    # Otherwise the tests above would compare dense models.
    ids = tokens(1, 40)
    dense, shared = recomputed(build(anchors=DENSE), ids), recomputed(build(), ids)
    keys = recomputed(build(share="keys"), ids)
    assert (dense[:, SINKS + RECENT :] - shared[:, SINKS + RECENT :]).abs().max() > 0.1
    assert (keys[:, SINKS + RECENT :] - shared[:, SINKS + RECENT :]).abs().max() > 0.1


@pytest.mark.parametrize("which", ALL_MODELS)
def test_sampling_equals_recomputation(which):
    model, ids = build(*which), tokens(2, 6)
    options = dict(max_new_tokens=30, do_sample=True, temperature=1.5, output_logits=True, return_dict_in_generate=True)
    set_seed(3)
    cached = model.generate(ids, **options)
    set_seed(3)
    plain = model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, plain.sequences)
    assert cached.sequences.unique().numel() > 10
    assert_close(torch.stack(cached.logits), torch.stack(plain.logits))
    assert isinstance(cached.past_key_values, pod.PodCache) and plain.past_key_values is None


@pytest.mark.parametrize("which", ALL_MODELS)
@pytest.mark.parametrize("slack", [0, 64])
def test_left_padded_rows_equal_themselves_alone(which, slack):
    model, lengths, steps = build(*which), (23, 1, 9), 25
    ids, mask = left_padded(lengths)  # the row of one token goes on filling its sinks while decoding
    cache = pod.PodCache(model.config, crop_slack=slack)
    first = fed(model, cache, ids, mask)
    new, logits, mask = greedy(model, cache, first, steps, mask)
    whole = torch.cat([ids, new], dim=1)
    got = torch.cat([first, logits], dim=1)
    together = recomputed(model, whole, attention_mask=mask, position_ids=positions_of(mask))
    for row, length in enumerate(lengths):
        start = max(lengths) - length
        assert_close(got[row, start:], recomputed(model, whole[row : row + 1, start:])[0])
        assert_close(got[row, start:], together[row, start:])


@pytest.mark.parametrize("which", SHARES)
def test_generate_with_left_padding_equals_recomputation(which):
    model = build(*which)
    ids, mask = left_padded((17, 2, 8))
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, output_logits=True)
    options["return_dict_in_generate"] = True
    cached, plain = model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, plain.sequences)
    assert_close(torch.stack(cached.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("which", ALL_MODELS)
@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("slack, max_length", [(0, None), (64, 100)])
def test_prefill_in_chunks_equals_one_piece(which, size, slack, max_length):
    model, ids = build(*which), tokens(2, 85)
    cache = pod.PodCache(model.config, max_length=max_length, crop_slack=slack)
    with cache.prefill():
        first = fed(model, cache, ids, chunks=split_into(85, size))
    new, logits, _ = greedy(model, cache, first, 10)
    assert_close(torch.cat([first, logits], dim=1), recomputed(model, torch.cat([ids, new], dim=1)))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, SINKS])
@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("slack", [0, 64])
def test_left_padded_prefill_in_chunks(sinks, size, slack):
    model, lengths = build(sinks=sinks), (30, 2, 13)
    ids, mask = left_padded(lengths)  # whole chunks of the short rows are padding
    cache = pod.PodCache(model.config, crop_slack=slack)
    with cache.prefill():
        first = fed(model, cache, ids, mask, split_into(30, size))
    new, logits, _ = greedy(model, cache, first, 15, mask)
    whole, got = torch.cat([ids, new], dim=1), torch.cat([first, logits], dim=1)
    for row, length in enumerate(lengths):
        assert_close(got[row, 30 - length :], recomputed(model, whole[row : row + 1, 30 - length :])[0])


@pytest.mark.parametrize("which", SHARES)
@pytest.mark.parametrize("lengths", [pytest.param((50,), marks=pytest.mark.slow), (50, 2, 31)], ids=["even", "padded"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_generate_with_prefill_chunk_size(which, lengths, size):
    model = build(*which)
    ids, mask = left_padded(lengths)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True)
    options["return_dict_in_generate"] = True
    chunked = model.generate(ids, prefill_chunk_size=size, **options)
    plain = model.generate(ids, use_cache=False, **options)
    assert torch.equal(chunked.sequences, plain.sequences)
    assert_close(torch.stack(chunked.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("which", ALL_MODELS)
@pytest.mark.parametrize("added, max_length", [(1, 80), (9, None)])
def test_generate_twice_on_one_cache(which, added, max_length):
    model, ids = build(*which), tokens(2, 6)
    cache = pod.PodCache(model.config, max_length=max_length, crop_slack=2)
    # No padding token is generated: `generate` would take it for padding in the second turn.
    options = dict(max_new_tokens=14, do_sample=False, suppress_tokens=[0], output_logits=True)
    options["return_dict_in_generate"] = True
    first = model.generate(ids, past_key_values=cache, **options)
    assert first.past_key_values is cache and cache.get_seq_length() == 19
    turn = torch.cat([first.sequences, tokens(2, added, seed=1)], dim=1)
    second = model.generate(turn, past_key_values=cache, **options)
    plain = model.generate(turn, use_cache=False, **options)
    assert torch.equal(second.sequences, plain.sequences)
    assert_close(torch.stack(second.logits), torch.stack(plain.logits))
    assert cache.get_seq_length() == second.sequences.shape[1] - 1


def test_generate_takes_the_cache_it_is_given_though_the_model_says_none():
    """It fed the whole text at every token, to a cache that held it."""
    model, ids = copy.deepcopy(build()), tokens(1, 20)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    model.generation_config.use_cache = False
    cache = pod.PodCache(model.config)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert cache.get_seq_length() == 27
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.generation_config.use_cache is False


@pytest.mark.parametrize("given", [20, 12, 3])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}])
@pytest.mark.parametrize("how", ["ids", "embeddings", "padded"])
def test_generate_without_a_new_token_is_refused(given, options, how):
    """It would feed the text, or its end, a second time."""
    model, ids = build(), tokens(1, 20)
    mask = (torch.arange(20) >= (2 if how == "padded" else 0)).long()[None]
    cache = pod.PodCache(model.config)
    fed(model, cache, ids, mask)
    if how == "embeddings":
        options = options | {"inputs_embeds": model.model.embed_tokens(ids[:, :given])}
    else:
        options = options | {"input_ids": ids[:, :given], "attention_mask": mask[:, :given]}
    with pytest.raises(ValueError, match=f"cache holds 20 tokens and generate is given {given}, none of them new"):
        model.generate(past_key_values=cache, max_new_tokens=4, **options)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}])
@pytest.mark.parametrize(
    ("how", "given", "masked"), [("ids", 20, 21), ("ids", 8, 17), ("ids", 8, 23), ("embeds", 8, 20), ("embeds", 15, 20)]
)
def test_generate_with_a_mask_of_something_else_is_refused(how, given, masked, options):
    """A mask of ones was dropped unseen: the text was fed a second time, at other angles, or only a part of it."""
    model, ids = build(), tokens(1, 20)
    cache = pod.PodCache(model.config)
    fed(model, cache, ids[:, :12])
    last = ids[:, -given:]
    text = {"input_ids": last} if how == "ids" else {"inputs_embeds": model.model.embed_tokens(last)}
    options = options | {"attention_mask": torch.ones(1, masked), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=f"cache holds 12 tokens, in.* has {given} and attention_mask {masked}: pass"):
        model.generate(past_key_values=cache, **text, **options)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize(("how", "given", "masked"), [("ids", 20, 20), ("ids", 8, 20), ("embeds", 20, 20)])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_generate_takes_the_whole_text_or_what_is_new(how, given, masked, options):
    model, ids = build(), tokens(1, 20)
    options = options | {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)[:, 20:]
    cache = pod.PodCache(model.config)
    fed(model, cache, ids[:, :12])
    last = ids[:, -given:]
    text = {"input_ids": last} if how == "ids" else {"inputs_embeds": model.model.embed_tokens(last)}
    options |= {"attention_mask": torch.ones(1, masked)}
    assert torch.equal(model.generate(past_key_values=cache, **text, **options)[:, -4:], expected)


@pytest.mark.parametrize("method", [None, SnapKV(16, window=4)], ids=["none", "SnapKV"])
def test_generate_tells_a_cache_of_ones_own_the_length(method):
    model, held = build(), []
    told, open_ended = pod.PodCache(model.config, 40, method), pod.PodCache(model.config, eviction=method)
    for cache in (told, open_ended):
        ids = model.generate(tokens(2, 30), past_key_values=cache, max_new_tokens=11, suppress_tokens=[0])
        held.append(cache.nbytes())
    assert held[0] == held[1] and open_ended.max_length == 40
    # A further turn is told of its own; a limit that was asked for is none that may grow.
    turn = torch.cat([ids, tokens(2, 9, seed=3)], dim=1)
    model.generate(turn, past_key_values=open_ended, max_new_tokens=11, suppress_tokens=[0])
    assert open_ended.max_length == 60
    if method is None:
        assert open_ended.nbytes() == open_ended.expected_nbytes(60, batch=2, itemsize=4)
    with pytest.raises(ValueError, match="made for 40 tokens per row and 50 are needed"):
        model.generate(turn, past_key_values=told, max_new_tokens=11, suppress_tokens=[0])
    open_ended.reset()
    assert open_ended.max_length is None and told.max_length == 40


@pytest.mark.parametrize("which", SHARES)
@pytest.mark.parametrize("lengths", [(16, 16), (16, 2)], ids=["even", "padded"])
def test_beam_search_equals_recomputation(which, lengths):
    model = build(*which)
    ids, mask = left_padded(lengths)
    options = dict(attention_mask=mask, max_new_tokens=16, do_sample=False, num_beams=3, num_return_sequences=2)
    options.update(output_scores=True, return_dict_in_generate=True)
    cached, plain = model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    assert isinstance(cached.past_key_values, pod.PodCache)
    assert torch.equal(cached.sequences, plain.sequences)
    assert_close(cached.sequences_scores, plain.sequences_scores)


def test_generate_uses_a_pod_cache_of_the_right_size():
    model = build()
    out = model.generate(tokens(1, 20), max_new_tokens=30, return_dict_in_generate=True)
    cache = out.past_key_values
    assert type(cache) is pod.PodCache and cache.max_length in (49, 50) and cache.get_seq_length() == 49
    assert cache.nbytes() == cache.expected_nbytes(cache.max_length, itemsize=4)


def test_generate_sees_padding_and_asks_for_the_last_logits(monkeypatch):
    # Both hang on the names in the signature of `forward`, which generate reads.
    model = build()
    ids, mask = left_padded((12, 2))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    sizes, head = [], model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: sizes.append(hidden.shape[1]) or head(hidden))
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert sizes == [1] * 6


def test_forward_makes_a_cache_when_asked():
    model = build()
    assert type(model(tokens(1, 4)).past_key_values) is pod.PodCache
    assert model(tokens(1, 4), use_cache=False).past_key_values is None


def test_a_cache_is_passed_by_either_of_its_names(recwarn):
    # transformers renamed it, and warns of the old name.
    model, ids = build(), tokens(1, 20)
    found, names = [], ("past_key_values", "cache")
    for name in names:
        held = pod.PodCache(model.config)
        for part in (model(ids[:, :9], **{name: held}), model.model(ids[:, 9:12], **{name: held})):
            assert part[CACHE] is held
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False, **{name: held}))
        assert held.get_seq_length() == 27
    assert torch.equal(*found)
    assert torch.equal(found[0], model.generate(ids, max_new_tokens=8, do_sample=False))
    assert not [warning for warning in recwarn if "past_key_values" in str(warning.message)]
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument: pass one"):
            call(ids, **{name: pod.PodCache(model.config) for name in names})


@pytest.mark.parametrize("which", SHARES)
def test_bfloat16_decodes(which):
    model = pod.convert(
        stock_model(which[0], 5, 64), build(*which).config.blocks, sink_size=SINKS, recent_size=RECENT, share=which[1]
    )
    model = type(model)(model.config).to(torch.bfloat16).eval()
    ids = tokens(2, 8)
    cache = pod.PodCache(model.config, crop_slack=0)
    first = fed(model, cache, ids)
    new, logits, _ = greedy(model, cache, first, 20)
    expected = recomputed(model, torch.cat([ids, new], dim=1))
    assert {storage.dtype for storage in cache.storages()} == {torch.bfloat16}
    difference = (torch.cat([first, logits], dim=1) - expected).float().abs().max()
    assert difference < 0.1 * expected.float().abs().max()


def assistant(anchors=None, seed=1):
    """A model that drafts five tokens whatever it thinks of them, many of them wrong: the stock one or PoD, shaken."""
    model = copy.deepcopy(stock_model("llama", 5, 64) if anchors is None else build(anchors=anchors))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


ASSISTED = {
    "default": dict(),
    "slack": dict(crop_slack=6, max_length=80),
    "frozen": dict(eviction=SnapKV(20, window=4, query_aware=False)),
    "frozen-h2o": dict(eviction=H2O(20, query_aware=False), max_length=80),
}


@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=pytest.mark.slow), "pod", pytest.param("lookup", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ASSISTED)
def test_assisted_decoding_equals_greedy(name, kind, monkeypatch):
    model, ids, cropped = build(), tokens(1, 30), []
    caches = [pod.PodCache(model.config, **ASSISTED[name]) for _ in range(2)]
    if "eviction" in ASSISTED[name]:  # the first drafts would come with the prompt, and be evicted from with it
        for cache in caches:
            fed(model, cache, ids[:, :-1])
    crop = pod.PodCache.crop
    monkeypatch.setattr(pod.PodCache, "crop", lambda cache, count: cropped.append((cache, count)) or crop(cache, count))
    options = dict(do_sample=False, max_new_tokens=30, suppress_tokens=[0])
    expected = model.generate(ids, past_key_values=caches[0], **options)
    drafts = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    if kind != "lookup":
        drafts = dict(assistant_model=assistant(DENSE if kind == "pod" else None))
    out = model.generate(ids, past_key_values=caches[1], **drafts, **options)
    assert torch.equal(out, expected)
    assert any(cache is caches[1] and count < 0 for cache, count in cropped)  # some drafts were rejected
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 59


def test_early_exit_is_refused_and_the_model_stays_what_it_is():
    model = build()
    with pytest.raises(ValueError, match="assistant_early_exit is not supported"):
        model.generate(tokens(1, 9), assistant_early_exit=2, max_new_tokens=3)
    assert model.generate(tokens(1, 9), max_new_tokens=3, do_sample=False).shape == (1, 12)


def test_drafts_that_cannot_be_taken_back_are_refused_by_name():
    model, ids = build(), tokens(1, 30)
    for options, message in [
        (dict(crop_slack=2), "kept for 2 .crop_slack.*larger crop_slack"),
        (dict(eviction=SnapKV(20, window=4)), "SnapKV evicted.*query_aware=False"),
        (dict(eviction=SnapKV(20, window=4, query_aware=False)), "in the prefill that SnapKV.*before generate"),
        (dict(eviction=H2O(20)), "H2O evicts while decoding"),
        (dict(eviction=StreamingLLM(20)), "StreamingLLM cannot take tokens back.*no assistant_model"),
    ]:
        cache = pod.PodCache(model.config, **options)
        with pytest.raises(ValueError, match=message):
            model.generate(ids, past_key_values=cache, assistant_model=assistant(), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("which", SHARES)
def test_stats_of_tau_with_beams_and_chosen_rows(which):
    # Every decoded token of every beam is decided once in each layer and query head that shares.
    model, (ids, mask) = build(*which), left_padded((30, 26))
    shared = 2 * sum(anchor != layer for layer, row in enumerate(which[2]) for anchor in row)  # 2 query heads each
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, num_beams=3, suppress_tokens=[0])
    options.update(output_scores=True, return_dict_in_generate=True)
    cache, plain = pod.PodCache(model.config, tau=1.0), pod.PodCache(model.config)
    out = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(out.sequences, model.generate(ids, past_key_values=plain, **options).sequences)
    assert cache.stats.decisions == 7 * 6 * shared
    assert cache.stats.distant_values == sum(
        3 * (length + step - SINKS - RECENT) * shared // 2 for length in (30, 26) for step in range(1, 8)
    )
    cache = pod.PodCache(model.config, tau=0.5)
    fed(model, cache, ids, mask)
    cache.batch_select_indices(torch.tensor([1]))
    fed(model, cache, tokens(1, 1), torch.nn.functional.pad(mask[1:], (0, 1), value=1))
    assert cache.stats.decisions == shared and 0 < cache.stats.skipped < shared
    assert cache.stats.distant_values == (27 - SINKS - RECENT) * shared // 2
    assert 0 < cache.stats.unread_values < cache.stats.distant_values


@pytest.mark.parametrize("chunks", [(1,) * 24, (23, 1)])
def test_a_prefill_in_chunks_skips_nothing(chunks):
    """tau is for decoding: the last chunk of a prefill may be one token."""
    model, ids = build(), tokens(1, 24)
    cache = pod.PodCache(model.config, tau=0.3)
    with cache.prefill():
        assert_close(fed(model, cache, ids, chunks=chunks), recomputed(model, ids))
    assert cache.stats.decisions == 0
    fed(model, cache, tokens(1, 1))
    assert cache.stats.skipped > 0


@pytest.mark.parametrize("options", [{}, {"max_length": 40}, {"tau": 0.3}, {"eviction": Quest(8, page_size=4)}])
@pytest.mark.parametrize("chunks", [(4, 9), (1, 1, 1, 10), (3, 1, 1, 4, 4)])
@pytest.mark.parametrize("anchors", [ANCHORS, STREAMING])
def test_chunks_that_are_all_padding(options, chunks, anchors):
    """Prompts padded to a multiple may begin with columns in which no row has a token."""
    model, (ids, mask) = build(anchors=anchors), left_padded((9, 5))
    ids, mask = (torch.nn.functional.pad(part, (4, 0)) for part in (ids, mask))
    cache = pod.PodCache(model.config, **options)
    with cache.prefill():
        logits = fed(model, cache, ids, mask, chunks)
    for row, length in enumerate((9, 5)):
        assert_close(logits[row, -length:], recomputed(model, ids[row : row + 1, -length:])[0])


# ---------------------------------------------------------------------- cropping and rows


@pytest.mark.parametrize("which", SHARES)
@pytest.mark.parametrize("removed, slack", [(1, 4), (4, 4), (64, 64)])
@pytest.mark.parametrize("chunks", [(1,) * 6, (6,), (3, 1, 2)], ids=str)
def test_crop_then_continue_equals_recomputation(which, removed, slack, chunks):
    model = build(*which)
    ids, mask = left_padded((92, 70))
    cache = pod.PodCache(model.config, crop_slack=slack)
    fed(model, cache, ids[:, :60], mask[:, :60])
    fed(model, cache, ids[:, 60:], mask, chunks=(1,) * 32)
    cache.crop(-removed)
    kept = 92 - removed
    assert cache.get_seq_length() == kept
    new = tokens(2, 6, seed=5)
    whole = torch.cat([ids[:, :kept], new], dim=1)
    mask = torch.cat([mask[:, :kept], torch.ones(2, 6, dtype=torch.long)], dim=1)
    got = fed(model, cache, new, mask, chunks)
    for row, start in enumerate((0, 22)):
        assert_close(got[row], recomputed(model, whole[row : row + 1, start:])[0, -6:])


def test_crop_to_the_prompt_and_back_to_nothing():
    model, ids = build(), tokens(2, 12)
    cache = pod.PodCache(model.config)
    expected = fed(model, cache, ids)
    cache.crop(0)
    assert cache.get_seq_length() == 12
    cache.crop(-12)
    assert cache.get_seq_length() == 0 and not (cache.positions(0) >= 0).any()
    assert_close(fed(model, cache, ids), expected)


def test_crop_beyond_the_slack_is_refused():
    model = build()
    cache = pod.PodCache(model.config, crop_slack=5)
    fed(model, cache, tokens(1, 40))
    with pytest.raises(ValueError, match="crop_slack"):
        cache.crop(-6)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(3)
    assert cache.get_seq_length() == 40
    # The slack is counted from the longest the rows have been: what was pushed out of the ring stays out.
    cache.crop(-3)
    with pytest.raises(ValueError, match="crop_slack"):
        cache.crop(-3)
    cache.crop(-2)
    assert cache.get_seq_length() == 35
    # What is written again moves the border on only when it goes beyond.
    fed(model, cache, tokens(1, 3))
    with pytest.raises(ValueError, match="crop_slack"):
        cache.crop(-4)
    fed(model, cache, tokens(1, 4))
    cache.crop(-5)
    assert cache.get_seq_length() == 37


def test_repeated_crops_within_the_slack_stay_exact():
    # Speculative decoding: four drafts at a time, two or four of them rejected.
    model, ids = build(), tokens(1, 30)
    cache = pod.PodCache(model.config, crop_slack=4)
    fed(model, cache, ids)
    for turn, rejected in enumerate((2, 4, 2, 4, 3, 1)):
        drafts = tokens(1, 4, seed=10 + turn)
        got = fed(model, cache, drafts)
        assert_close(got, recomputed(model, torch.cat([ids, drafts], dim=1))[:, -4:])
        cache.crop(-rejected)
        ids = torch.cat([ids, drafts[:, : 4 - rejected]], dim=1)
    assert cache.get_seq_length() == ids.shape[1]


def test_crop_of_more_than_a_row_holds_is_refused():
    model = build()
    ids, mask = left_padded((9, 2))
    cache = pod.PodCache(model.config)
    with pytest.raises(ValueError, match="cannot take back"):
        cache.crop(-1)
    fed(model, cache, ids, mask)
    with pytest.raises(ValueError, match="shortest row holds 2"):
        cache.crop(-3)


@pytest.mark.parametrize("which", SHARES)
@pytest.mark.parametrize("kind", ["select", "mask", "repeat", "reorder"])
def test_rows_selected_repeated_and_reordered(which, kind):
    model = build(*which)
    ids, mask = left_padded((25, 2, 11))
    cache = pod.PodCache(model.config, crop_slack=1)
    fed(model, cache, ids, mask)
    fed(model, cache, tokens(3, 1), torch.nn.functional.pad(mask, (0, 1), value=1))
    rows = {"select": [2, 0], "mask": [0, 2], "repeat": [0, 0, 1, 1, 2, 2], "reorder": [1, 1, 0]}[kind]
    if kind == "select":
        cache.batch_select_indices(torch.tensor(rows))
    elif kind == "mask":
        cache.batch_select_indices(torch.tensor([True, False, True]))
    elif kind == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        cache.reorder_cache(torch.tensor(rows))
    assert cache.batch_size == len(rows)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
    new = tokens(len(rows), 14, seed=4)
    mask = torch.nn.functional.pad(mask[rows], (0, 15), value=1)
    got = fed(model, cache, new, mask, (1,) * 8 + (6,))
    whole = torch.cat([ids[rows], tokens(3, 1)[rows], new], dim=1)
    for place, row in enumerate(rows):
        start = 25 - (25, 2, 11)[row]
        assert_close(got[place], recomputed(model, whole[place : place + 1, start:])[0, -14:])


def test_a_row_that_leaves_takes_its_length_with_it():
    model, (ids, mask) = build(), left_padded((25, 2))
    cache = pod.PodCache(model.config, max_length=25)
    fed(model, cache, ids, mask)
    cache.batch_select_indices(torch.tensor([1]))
    mask = torch.nn.functional.pad(mask[1:], (0, 24), value=1)
    got = fed(model, cache, tokens(1, 23, seed=4), mask, (1,) * 23)  # as many as there is room for
    whole = torch.cat([ids[1:, 23:], tokens(1, 23, seed=4)], dim=1)
    assert_close(got[0], recomputed(model, whole)[0, -23:])
    with pytest.raises(ValueError, match="made for 25 tokens per row and 26 are needed"):
        fed(model, cache, tokens(1, 1), mask)


@pytest.mark.parametrize("options", [{}, {"eviction": SnapKV(8, window=2)}, {"eviction": StreamingLLM(8)}], ids=repr)
def test_no_row_at_all_is_refused(options):
    model = build()
    cache = pod.PodCache(model.config, **options)
    fed(model, cache, tokens(2, 20), None)
    with pytest.raises(ValueError, match="no row of the cache would be left: cache.reset"):
        cache.batch_select_indices(torch.tensor([False, False]))
    assert cache.batch_size == 2


def test_a_copy_inside_a_prefill_is_refused():
    model = build()
    cache = pod.PodCache(model.config)
    with cache.prefill():
        fed(model, cache, tokens(1, 9), None)
        with pytest.raises(ValueError, match="copy inside cache.prefill.. could not be closed"):
            copy.deepcopy(cache)
    fed(model, copy.deepcopy(cache), tokens(1, 3), None)


def test_rows_of_an_empty_cache():
    # What transformers calls before anything is stored.
    cache = pod.PodCache(build().config)
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.crop(0)
    assert cache.nbytes() == 0 and cache.get_seq_length() == 0 and cache.batch_size == -1


def test_reset_frees_and_starts_again():
    model = build()
    cache = pod.PodCache(model.config)
    expected = fed(model, cache, tokens(2, 20))
    cache.reset()
    assert cache.nbytes() == 0 and cache.get_seq_length() == 0 and not cache.is_initialized
    assert_close(fed(model, cache, tokens(2, 20)), expected)


def test_positions_of_left_padded_rows():
    model, lengths = build(), (20, 2, 7)
    ids, mask = left_padded(lengths)
    cache = pod.PodCache(model.config)
    with pytest.raises(ValueError, match="empty"):
        cache.positions(0)
    fed(model, cache, ids, mask)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    fed(model, cache, tokens(3, 1), mask)
    for layer in range(5):
        positions = cache.positions(layer)
        assert positions.shape == (3, 2, 21) and positions.dtype == torch.long
        for row, length in enumerate(lengths):
            for head in range(2):
                held = sorted(p for p in positions[row, head].tolist() if p >= 0)
                assert held == list(range(length + 1))
                assert (positions[row, head] == -1).sum() == 20 - length


# ---------------------------------------------------------------------- bytes and storage


def formula(anchors, *, length: int, batch: int, dim: int, itemsize: int, sinks: int, recent: int, slack: int) -> int:
    """DESIGN's count, one layer and KV head at a time."""
    total = 0
    for layer, row in enumerate(anchors):
        for anchor in row:
            values = length
            keys = length if anchor == layer else min(length, sinks + recent + slack)
            total += values + keys
    return batch * dim * itemsize * total


@pytest.mark.parametrize("anchors", [ANCHORS, DENSE], ids=["blocks", "dense"])
@pytest.mark.parametrize("max_length", [4, 50, 200])
@pytest.mark.parametrize("slack", [0, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_nbytes_is_the_formula_and_the_storages(anchors, max_length, slack, batch):
    model = build(anchors=anchors)
    cache = pod.PodCache(model.config, max_length=max_length, crop_slack=slack)
    assert cache.nbytes() == 0
    fed(model, cache, tokens(batch, 4))
    sizes = dict(length=max_length, batch=batch, dim=16, itemsize=4, sinks=SINKS, recent=RECENT, slack=slack)
    assert cache.nbytes() == formula(anchors, **sizes)
    assert cache.nbytes() == cache.expected_nbytes(max_length, batch=batch, itemsize=4)
    storages = {storage.untyped_storage().data_ptr(): storage for storage in cache.storages() if storage.numel()}
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in storages.values())


def test_bytes_saved_at_35_percent():
    # 14 of 20 pairs of layer and KV head share their keys.
    first, second = (0, 0, 0, 0, 4, 4, 4, 4, 8, 8), (0, 1, 1, 1, 1, 5, 5, 5, 5, 5)
    anchors = tuple(zip(first, second, strict=True))
    shared = build(anchors=anchors, sinks=4, recent=60, hidden=16)
    dense = build(anchors=tuple((layer, layer) for layer in range(10)), sinks=4, recent=60, hidden=16)
    assert shared.config.blocks.kv_saving == pytest.approx(0.35)
    held = {}
    for name, model in (("shared", shared), ("dense", dense)):
        cache = pod.PodCache(model.config, max_length=4096)
        fed(model, cache, tokens(1, 8))
        held[name] = cache.nbytes()
        assert held[name] == cache.expected_nbytes(4096, itemsize=4)
    assert held["dense"] == 10 * 2 * 2 * 4096 * 4 * 4
    assert 0.33 <= 1 - held["shared"] / held["dense"] < 0.35


@pytest.mark.parametrize("which", SHARES)
@pytest.mark.parametrize("lengths", [(20, 20), (20, 2)], ids=["even", "padded"])
def test_nothing_is_reallocated_while_decoding(which, lengths):
    model = build(*which)
    ids, mask = left_padded(lengths)
    cache = pod.PodCache(model.config, max_length=121, crop_slack=4)
    first = fed(model, cache, ids, mask)

    def pointers() -> list[int]:
        return [storage.data_ptr() for storage in cache.storages()]

    after_prefill = pointers()
    new, logits, mask = greedy(model, cache, first, 1, mask)
    workspace = cache._storage.workspace
    assert (workspace is None) == (which[1] == "keys" or which[2] is DENSE)  # what no layer leaves for another
    held = [workspace.data_ptr() if workspace is not None else None]
    nbytes = cache.nbytes()
    for _ in range(100):
        _, logits, mask = greedy(model, cache, logits, 1, mask)
        assert pointers() == after_prefill
        assert [cache._storage.workspace.data_ptr() if cache._storage.workspace is not None else None] == held
    assert cache.get_seq_length() == 121 and cache.nbytes() == nbytes


def test_growth_without_max_length():
    model, ids = build(), tokens(2, 64)
    cache = pod.PodCache(model.config, crop_slack=0)
    logits = [fed(model, cache, ids)]
    sizes = dict(batch=2, dim=16, itemsize=4, sinks=SINKS, recent=RECENT, slack=0)
    assert cache.nbytes() == formula(ANCHORS, length=64, **sizes)
    grown = []
    for step in range(1, 81):
        pointers, before = [storage.data_ptr() for storage in cache.storages()], cache.nbytes()
        logits.append(fed(model, cache, tokens(2, 1, seed=step)))
        if cache.nbytes() != before:
            grown.append(64 + step)
        else:
            assert [storage.data_ptr() for storage in cache.storages()] == pointers
        assert cache.nbytes() <= formula(ANCHORS, length=(64 + step) * 9 // 8, **sizes)
        assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
    # 65 needs more than 64 and takes 65 + 8; 74 takes 74 + 9; 84, 84 + 8 + 2; and so on.
    assert grown == [65, 74, 84, 95, 106, 118, 130, 143]
    whole = torch.cat([ids, *(tokens(2, 1, seed=step) for step in range(1, 81))], dim=1)
    assert_close(torch.cat(logits, dim=1), recomputed(model, whole))


# ---------------------------------------------------------------------- misuse


def test_a_cache_of_another_model_is_refused():
    model = build()
    others = {
        "blocks": build(anchors=DENSE),
        "recent_size": build(recent=9),
        "share": build(share="keys"),
        "layers": build(anchors=ANCHORS[:4]),
        "heads of 8": build(hidden=32),
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match="made for another model"):
            model(tokens(1, 4), past_key_values=pod.PodCache(other.config))
        with pytest.raises(ValueError, match=name if name != "blocks" else "LayerBlocks"):
            model.generate(tokens(1, 4), past_key_values=pod.PodCache(other.config), max_new_tokens=2)


def test_a_filled_cache_of_another_model_is_refused():
    cache = pod.PodCache(build().config)
    fed(build(), cache, tokens(1, 4))
    with pytest.raises(ValueError, match="made for another model"):
        build(anchors=DENSE)(tokens(1, 1), past_key_values=cache)


def test_a_cache_of_an_equal_config_is_taken():
    model = build()
    copy = type(model.config).from_dict(model.config.to_dict())
    assert_close(fed(model, pod.PodCache(copy), tokens(1, 20)), recomputed(model, tokens(1, 20)))


def test_other_caches_are_refused():
    model = build()
    with pytest.raises(ValueError, match="DynamicCache.*PodCache"):
        model(tokens(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="DynamicCache.*PodCache"):
        model.generate(tokens(1, 4), past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(tokens(1, 4), cache_implementation="static", max_new_tokens=2)


def test_continuous_batching_is_refused(monkeypatch):
    model = build()
    monkeypatch.setattr(torch, "empty", None)  # at once, before memory is taken
    for call in (
        lambda: model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=3),
        lambda: model.generate(tokens(1, 4), cache_implementation="paged", max_new_tokens=3),
        lambda: model.init_continuous_batching(),
        lambda: model.continuous_batching_context_manager().__enter__(),
    ):
        with pytest.raises(ValueError, match=r"continuous batching \(generate_batch, cache_implementation='paged'\)"):
            call()


def test_a_cache_goes_on_in_the_dtype_it_was_filled_in(tmp_path):
    model = build()
    half = copy.deepcopy(model).bfloat16()
    for options in ({}, {"eviction": SnapKV(16, window=4)}, {"eviction": StreamingLLM(16)}, {"quantization": EIGHT}):
        cache = pod.PodCache(model.config, **options)
        fed(model, cache, tokens(2, 20))
        cache.save(tmp_path / "cache")
        for one in (cache, pod.PodCache.load(tmp_path / "cache", model.config)):
            with pytest.raises(
                ValueError, match="holds torch.float32 and the model computes in torch.bfloat16: go on in"
            ):
                fed(half, one, tokens(2, 1))
            with pytest.raises(ValueError, match="the model computes in torch.bfloat16"):
                with torch.autocast("cpu", torch.bfloat16):
                    fed(model, one, tokens(2, 1))
            fed(model, one, tokens(2, 1))  # a refused forward leaves the cache as it was
        cache.reset()
        fed(half, cache, tokens(2, 20))
        fed(half, cache, tokens(2, 1))
    cache = pod.PodCache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        fed(model, cache, tokens(2, 20))
        fed(model, cache, tokens(2, 1))


def test_a_dense_model_refuses_the_pod_cache():
    cache = pod.PodCache(build().config)
    with pytest.raises(ValueError, match="dense model cannot use it"):
        stock_model("llama", 5, 64)(tokens(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="dense model cannot use it"):
        stock_model("llama", 5, 64).generate(tokens(1, 4), past_key_values=cache, max_new_tokens=2)


def test_max_length_is_a_limit():
    model = build()
    cache = pod.PodCache(model.config, max_length=10)
    with pytest.raises(ValueError, match="11 are needed.*max_length"):
        model(tokens(1, 11), past_key_values=cache)
    expected = recomputed(model, tokens(1, 10))
    assert_close(fed(model, cache, tokens(1, 10)), expected)
    with pytest.raises(ValueError, match="made for 10 tokens.*max_length"):
        model(tokens(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 10
    # Padding is not stored, and takes nothing from the limit.
    ids, mask = left_padded((10, 3))
    padded = torch.nn.functional.pad(mask, (6, 0))
    cache.reset()
    fed(model, cache, torch.nn.functional.pad(ids, (6, 0)), padded)
    assert cache.positions(0).shape[-1] == 10


@pytest.mark.parametrize(
    "mask", [[[1, 1, 1, 1], [1, 1, 1, 0]], [[1, 1, 1, 1], [1, 0, 1, 1]], [[0, 1, 1, 1], [0, 1, 0, 1]]], ids=str
)
def test_right_padding_and_holes_are_refused(mask):
    model = build()
    mask = torch.tensor(mask)
    with pytest.raises(ValueError, match="row 1 of attention_mask has padding after.*left padding"):
        model(tokens(2, 4), attention_mask=mask, past_key_values=pod.PodCache(model.config))
    with pytest.raises(ValueError, match="row 1 of attention_mask has padding after"):
        model.generate(tokens(2, 4), attention_mask=mask, max_new_tokens=2)


def test_padding_after_a_real_token_is_refused():
    model = build()
    cache = pod.PodCache(model.config)
    model(tokens(2, 4), past_key_values=cache)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    with pytest.raises(ValueError, match="row 1 of attention_mask has padding after"):
        model(tokens(2, 2), attention_mask=mask, past_key_values=cache)
    # A refused input leaves the cache as it was.
    ids = torch.cat([tokens(2, 4), tokens(2, 2)], dim=1)
    assert_close(fed(model, cache, tokens(2, 2)), recomputed(model, ids)[:, -2:])


def test_another_number_of_rows_is_refused():
    model = build()
    cache = pod.PodCache(model.config)
    fed(model, cache, tokens(2, 4))
    for rows in (1, 3):
        message = f"holds 2 rows but the input has {rows}: cache.batch_repeat_interleave.*batch_select_indices"
        with pytest.raises(ValueError, match=message):
            model(tokens(rows, 1), past_key_values=cache)


def test_training_with_a_cache_is_refused():
    model = build(sinks=1)
    model.train()
    try:
        with pytest.raises(ValueError, match="gradients do not flow through a cache"):
            model(tokens(1, 4), past_key_values=pod.PodCache(model.config))
        assert model(tokens(1, 4)).past_key_values is None
    finally:
        model.eval()


def test_bad_sizes_and_configs_are_refused():
    config = build().config
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        pod.PodCache(config, max_length=0)
    with pytest.raises(ValueError, match="crop_slack must be >= 0"):
        pod.PodCache(config, crop_slack=-1)
    for wrong, message in (
        ({"max_length": "10"}, "max_length must be at least 1 token, a whole number; got '10'"),
        ({"max_length": 10.0}, "max_length must be at least 1 token, a whole number; got 10.0"),
        ({"crop_slack": 1.5}, "crop_slack must be >= 0 tokens, a whole number; got 1.5"),
        ({"crop_slack": None}, "crop_slack must be >= 0 tokens, a whole number; got None"),
        ({"tau": "0.5"}, "tau must be between 0 and 1, or None; got '0.5'"),
        ({"tau": 1.5}, "tau must be between 0 and 1, or None; got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            pod.PodCache(config, **wrong)
    cache = pod.PodCache(config, max_length=torch.tensor(30))
    fed(build(), cache, tokens(1, 20))
    for wrong in (None, 1.5, "-1", True):
        with pytest.raises(ValueError, match="tokens_to_remove must be a negative number of tokens"):
            cache.crop(wrong)
    cache.crop(torch.tensor(-2))
    assert cache.get_seq_length() == 18 and cache.max_length == 30
    for stock in (LlamaConfig(), Qwen3Config()):
        with pytest.raises(ValueError, match=f"config of a PoD model, got {type(stock).__name__}"):
            pod.PodCache(stock)


def test_nested_prefill_is_refused():
    model = build()
    cache = pod.PodCache(model.config)
    with cache.prefill():
        with pytest.raises(ValueError, match="already open"):
            with cache.prefill():
                pass
        fed(model, cache, tokens(1, 3))
    with cache.prefill():  # closed, it can be opened again
        fed(model, cache, tokens(1, 3))
    with pytest.raises(RuntimeError), cache.prefill():
        raise RuntimeError("a forward that failed")
    with cache.prefill():
        fed(model, cache, tokens(1, 3))
    assert cache.get_seq_length() == 9


def test_a_cache_that_generate_made_serves_a_longer_turn():
    model, ids = build(*SHARES[0].values[0]), tokens(2, 6)
    options = dict(do_sample=False, suppress_tokens=[0], return_dict_in_generate=True, output_logits=True)
    first = model.generate(ids, max_new_tokens=4, **options)
    turn = torch.cat([first.sequences, tokens(2, 3, seed=1)], dim=1)
    second = model.generate(turn, past_key_values=first.past_key_values, max_new_tokens=20, **options)
    plain = model.generate(turn, use_cache=False, max_new_tokens=20, **options)
    assert_close(torch.stack(second.logits), torch.stack(plain.logits))


def test_backward_through_stored_tokens_is_refused():
    model, ids = build(*SHARES[0].values[0]), tokens(1, 12)
    cache = pod.PodCache(model.config)
    model(ids[:, :8], past_key_values=cache)
    with torch.enable_grad():
        loss = model(ids[:, 8:], past_key_values=cache).logits.sum()
        assert loss.requires_grad
        with pytest.raises(RuntimeError, match="use_cache=False"):
            loss.backward()


@pytest.mark.parametrize(
    "name, value", [("anchors", [list(row) for row in DENSE]), ("recent_size", 9), ("sink_size", 0), ("share", "keys")]
)
def test_a_config_changed_in_place_is_refused(name, value):
    model = copy.deepcopy(build())
    cache, config = pod.PodCache(model.config), model.config
    expected = fed(model, cache, tokens(1, 20))
    was = copy.deepcopy(getattr(config, name))
    setattr(config, name, value)
    message = rf"config.{name} was changed in place: the {{}} was made with .*, and it is .* now. Set it back"
    for call in (
        lambda: model(tokens(1, 20), use_cache=False),
        lambda: model.model(tokens(1, 20)),
        lambda: fed(model, cache, tokens(1, 1)),
        lambda: model.generate(tokens(1, 20), max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=message.format("model")):
            call()
    # A cache that was made in between is of the config as it was then; a model that was loaded with it, too.
    other = pod.PodCache(config)
    setattr(config, name, was)
    with pytest.raises(ValueError, match=message.format("cache")):
        fed(model, other, tokens(1, 20))
    cache.reset()
    assert torch.equal(fed(model, cache, tokens(1, 20)), expected)
    # Also where the very list is written to.
    config.anchors[1][0] = 1
    with pytest.raises(ValueError, match="config.anchors was changed in place"):
        fed(model, cache, tokens(1, 1))


# On a GPU the host must not wait for the device where it need not: it has the next layers' kernels to start.


class Waits(TorchFunctionMode):
    """Notes what would make the host wait for a GPU: reading a tensor, finding indices, a list as an index."""

    READS = ("item", "tolist", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__", "cpu")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.READS or function is torch.tensor:
            self.found.append(name)
        elif name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list | tuple | range) for part in parts):
                self.found.append(f"{name} of a list")
            if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts):
                self.found.append(f"{name} of a mask")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """The waits of each forward of the models' layers and of what the cache does for it, one list each."""
    forwards: list[list[str]] = []

    def watched(self, *args, forward=pod.model.decoder.PodModel.forward, **kwargs):
        with Waits() as mode:
            output = forward(self, *args, **kwargs)
        forwards.append(mode.found)
        return output

    monkeypatch.setattr(pod.model.decoder.PodModel, "forward", watched)
    return forwards


@pytest.mark.parametrize("share", ["scores", "keys", "kv"])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 4)], ids=["even", "padded"])
def test_a_step_of_generate_waits_for_nothing(share, lengths, waits):
    model = build(share=share)
    real = torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]
    options = {"max_new_tokens": 5, "do_sample": False, "past_key_values": pod.PodCache(model.config, max_length=16)}
    model.generate(tokens(2, 9), attention_mask=real.long(), **options)
    assert len(waits) == 5 and waits[0]  # the prompt's mask is looked at
    assert waits[1:] == [[]] * 4


@pytest.mark.parametrize("method", [None, SnapKV(8, window=4), StreamingLLM(8)], ids=["none", "SnapKV", "StreamingLLM"])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 4)], ids=["even", "padded"])
def test_a_mask_that_agrees_is_read_once_in_a_step(lengths, method, waits):
    """Whether it has padding is asked, with one wait; whether it agrees with what is stored comes with the answer."""
    model = build()
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    cache = pod.PodCache(model.config, max_length=20, eviction=method)
    for step in range(4):
        with torch.no_grad():
            model(tokens(2, 1 if step else 9), attention_mask=mask, past_key_values=cache)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert [found for found in waits[2:]] == [["tolist"]] * 2


def test_the_places_of_a_padded_prompt_are_found_once(waits):
    real = torch.arange(9) >= 9 - torch.tensor([9, 4])[:, None]
    for anchors in (ANCHORS, ANCHORS[:2]):
        model = build(anchors=anchors)
        with torch.no_grad():
            model(tokens(2, 9), attention_mask=real.long(), past_key_values=pod.PodCache(model.config))
    assert [found.count("nonzero") for found in waits] == [2, 2]  # for values and anchors' keys, and for the rings


def test_padding_in_a_continued_prompt_of_one_token_is_still_refused():
    """A turn of `generate` on a filled cache begins with a prompt: its mask says what is padding."""
    model = build()
    cache, ids = pod.PodCache(model.config), tokens(2, 9)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 8] = 0
    with pytest.raises(ValueError, match="row 1 of attention_mask is all padding"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2, do_sample=False)


def test_rows_are_moved_without_reading_where_to(monkeypatch):
    """Beam search moves them at every step. Quantised groups are told apart on the host."""
    model = build()
    cache = pod.PodCache(model.config)
    with torch.no_grad():
        model(tokens(3, 9), past_key_values=cache)
    with Waits() as mode:
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert [name for name in mode.found if name != "tensor"] == []
