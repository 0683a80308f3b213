"""PoD models and configs: exact against the stock models and against a plain recomputation; what is refused."""

import copy
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import pod
from pod.model.sequence_parallel import SequenceShard
from pod.similarity import attention_similarity

ROOT = Path(__file__).parents[1]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 5, 4, 2, 16, 64, 97
GROUPS = HEADS // KV_HEADS
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
FAMILIES = sorted(CLASSES)
SCALED = [family for family in FAMILIES if family != "phi3"]  # whose config allows no scaling but LongRoPE


def some_slow(names: list[str], quick: set[str]) -> list:
    """Parameters of a test, of which `make test` takes the quick ones: one layer serves all families."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


EACH = some_slow(FAMILIES, {"llama", "phi3", "qwen3"})
EACH_SCALED = some_slow(SCALED, {"llama"})
# Head-wise: blocks of different sizes in the two heads, a block that starts above layer 0, a last layer of its own.
BLOCKS = pod.LayerBlocks([[0, 0], [0, 1], [0, 1], [3, 1], [3, 4]])
DENSE = pod.LayerBlocks.dense(LAYERS, KV_HEADS)
SINKS, RECENT = 3, 5
ORIGINAL = 32  # tokens of the original length
ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)]},
}
CHANGING = ["dynamic", "longrope"]  # their frequencies depend on the longest position at hand


def tiny_config(family="llama", **overrides):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    if family == "phi3":
        sizes["pad_token_id"] = None
    return CLASSES[family][0](**{**sizes, **overrides}, attn_implementation="eager")


def tiny_model(family="llama", **overrides):
    """A random GQA model in eval mode, its weights so large that attention is far from uniform; no bias is zero."""
    torch.manual_seed(0)
    model = CLASSES[family][1](tiny_config(family, **overrides)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def scaled_model(family, rope):
    settings = {"rope_type": rope, "rope_theta": 10000.0, **ROPE[rope]}
    if rope not in ("linear", "dynamic"):
        settings["original_max_position_embeddings"] = ORIGINAL
    # Of dynamic scaling this is the original length.
    longest = ORIGINAL if rope == "dynamic" else 256
    return tiny_model(family, rope_parameters=settings, max_position_embeddings=longest)


def converted(stock, blocks=BLOCKS, share="scores"):
    return pod.convert(stock, blocks, sink_size=SINKS, recent_size=RECENT, share=share)


def tokens(*shape, seed=1):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths, width):
    """input_ids, attention_mask and position_ids of a left-padded batch."""
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return tokens(len(lengths), width), mask, (mask.cumsum(1) - 1).clamp(min=0)


def loss_of(logits, real=None):
    """A scalar every logit of a real token weighs in differently."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits.dtype)
    if real is not None:
        weights = weights * real[..., None]
    return (torch.log_softmax(logits, dim=-1) * weights).sum()


def gradients(model, logits, real=None):
    """Every parameter's gradient by name; none is left behind on the model."""
    model.zero_grad()
    loss_of(logits, real).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert all(grad is not None for grad in grads.values())
    return grads


def relative(ours, theirs):
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def assert_gradients(ours, theirs, tolerance):
    """Every one for itself; where it must vanish (q and k of a single token), against all gradients together.

    A bias of keys moves all logits of a query by nearly the same, which softmax takes away: what is left of its
    gradient is a small difference of large terms, so it is measured beside that of the weight.
    """
    assert ours.keys() == theirs.keys()
    together = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, grad in theirs.items():
        beside = theirs[name.replace("k_proj.bias", "k_proj.weight")]
        size = beside.norm() if bool(beside.any()) else together
        assert float((ours[name] - grad).norm() / size) <= tolerance, name


def assert_equals_stock(stock, blocks, backend, monkeypatch, count, mask=None, position_ids=None, share="scores"):
    """Acceptance 2: exact with the reference, 1e-5 with composed; every parameter's gradient."""
    monkeypatch.setenv("POD_ATTENTION_BACKEND", backend)
    input_ids = tokens(3, count)
    real = torch.ones(3, count) if mask is None else mask.float()
    inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    expected = stock(**inputs).logits
    expected_grads = gradients(stock, expected, real)
    model = converted(stock, blocks, share)
    logits = model(**inputs).logits
    grads = gradients(model, logits, real)
    is_real = real.bool()
    if backend == "reference":
        assert torch.equal(logits[is_real], expected[is_real])
    else:
        assert relative(logits[is_real], expected[is_real]) <= 1e-5
    assert_gradients(grads, expected_grads, 1e-6 if backend == "reference" else 1e-5)


# Exactly the stock model


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("family", EACH)
class TestEqualsStock:
    def test_blocks_of_one_layer(self, family, backend, monkeypatch):
        assert_equals_stock(tiny_model(family), DENSE, backend, monkeypatch, count=29)

    @pytest.mark.parametrize("share", ["scores", "keys"])
    @pytest.mark.parametrize("count", [1, 2, SINKS + RECENT])
    def test_any_blocks_while_nothing_is_distant(self, family, backend, count, share, monkeypatch):
        assert_equals_stock(tiny_model(family), BLOCKS, backend, monkeypatch, count, share=share)

    def test_left_padded_blocks_of_one_layer(self, family, backend, monkeypatch):
        _, mask, position_ids = left_padded([29, 2, 13], 29)
        assert_equals_stock(tiny_model(family), DENSE, backend, monkeypatch, 29, mask, position_ids)

    def test_left_padding_counts_from_the_first_real_token(self, family, backend, monkeypatch):
        _, mask, position_ids = left_padded([SINKS + RECENT, 2, 5], 14)  # 14 columns, and still nothing is distant
        assert_equals_stock(tiny_model(family), BLOCKS, backend, monkeypatch, 14, mask, position_ids)

    def test_tied_weights(self, family, backend, monkeypatch):
        stock = tiny_model(family, tie_word_embeddings=True)
        model = converted(stock)
        assert model.lm_head.weight is model.model.embed_tokens.weight is stock.lm_head.weight
        assert_equals_stock(stock, DENSE, backend, monkeypatch, count=29)


# PoD's mathematics, recomputed


def plain_pod_logits(stock, input_ids, anchors, share, sinks=SINKS, recent=RECENT):
    """PoD by the definition, head by head: the stock model's parameters, every layer's q and k kept in a list."""
    count = input_ids.shape[1]
    i, j = torch.arange(count)[:, None], torch.arange(count)[None, :]
    proximal = (j < sinks) | (i - j < recent)
    hidden = stock.model.embed_tokens(input_ids)
    cos, sin = stock.model.rotary_emb(hidden, position_ids=torch.arange(count)[None])
    cos, sin = cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]

    def heads_of(states, norm):
        heads = []
        for head in states.split(HEAD_DIM, dim=-1):
            head = head if norm is None else norm(head)
            first, second = head.chunk(2, dim=-1)
            heads.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        return heads

    def projected(attention, states):
        if not hasattr(attention, "qkv_proj"):
            return attention.q_proj(states), attention.k_proj(states), attention.v_proj(states)
        parts = attention.qkv_proj.weight.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        return [states @ part.mT for part in parts]

    queries, keys = [], []
    for index, layer in enumerate(stock.model.layers):
        attention = layer.self_attn
        q, k, v = projected(attention, layer.input_layernorm(hidden))
        queries.append(heads_of(q, getattr(attention, "q_norm", None)))
        keys.append(heads_of(k, getattr(attention, "k_norm", None)))
        values = v.split(HEAD_DIM, dim=-1)
        outputs = []
        for head in range(HEADS):
            group = head // GROUPS
            anchor = int(anchors[index][group])
            own = queries[index][head] @ keys[index][group].mT
            shared = queries[anchor if share == "scores" else index][head] @ keys[anchor][group].mT
            logits = torch.where(proximal, own, shared) / HEAD_DIM**0.5
            outputs.append(torch.softmax(logits.masked_fill(j > i, -torch.inf), dim=-1) @ values[group])
        hidden = hidden + attention.o_proj(torch.cat(outputs, dim=-1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return stock.lm_head(stock.model.norm(hidden))


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("family", EACH)
class TestPodMathematics:
    def test_equals_a_plain_recomputation(self, family, share, backend, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", backend)
        stock = tiny_model(family)
        input_ids = tokens(2, 31)
        expected = plain_pod_logits(stock, input_ids, BLOCKS.anchors, share)
        assert relative(stock(input_ids).logits, expected) > 0.05  # sharing does something
        expected_grads = gradients(stock, expected)
        model = converted(stock, share=share)
        logits = model(input_ids, use_cache=False).logits
        assert relative(logits, expected) <= 1e-5
        assert_gradients(gradients(model, logits), expected_grads, 1e-5)

    def test_left_padding_changes_nothing(self, family, share, backend, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", backend)
        stock = tiny_model(family)
        lengths = [31, 2, 17]
        input_ids, mask, position_ids = left_padded(lengths, 31)
        model = converted(stock, share=share)
        logits = model(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        rows = [input_ids[row : row + 1, 31 - length :] for row, length in enumerate(lengths)]
        expected = [plain_pod_logits(stock, row, BLOCKS.anchors, share)[0] for row in rows]
        assert relative(logits[mask.bool()], torch.cat(expected)) <= 1e-5
        expected_grads = gradients(stock, torch.cat(expected))
        assert_gradients(gradients(model, logits[mask.bool()]), expected_grads, 1e-5)


@pytest.mark.parametrize("sinks, recent", [(0, 1), (0, 6), (4, 1)])
def test_smallest_proximal_sizes(sinks, recent):
    stock = tiny_model()
    model = pod.convert(stock, BLOCKS, sink_size=sinks, recent_size=recent)
    expected = plain_pod_logits(stock, tokens(1, 19), BLOCKS.anchors, "scores", sinks, recent)
    assert relative(model(tokens(1, 19), use_cache=False).logits, expected) <= 1e-5


# Gradient checkpointing


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("family", EACH)
def test_gradients_equal_with_both_kinds_of_checkpointing(family, share):
    model = converted(tiny_model(family), share=share).train()
    input_ids = tokens(2, 31)
    expected_logits = model(input_ids).logits
    expected = gradients(model, expected_logits)
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        ran = count_forwards(model.model.layers[2].self_attn)
        output = model(input_ids)
        assert output.past_key_values is None
        assert torch.equal(output.logits, expected_logits)
        assert_gradients(gradients(model, output.logits), expected, 1e-6)
        assert len(ran) == 2  # once forward, once recomputed: checkpointing was on
        model.gradient_checkpointing_disable()


def count_forwards(module):
    ran = []
    module.register_forward_hook(lambda *_: ran.append(1))
    return ran


def thirty_percent():
    """Ten layers of which three are anchors in each KV head, in different places."""
    return pod.LayerBlocks([[i // 4 * 4, 0 if i < 3 else 3 if i < 6 else 6] for i in range(10)])


def stored(tensors):
    """Bytes of the distinct storages of tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def pairs_on_the_way(blocks):
    """How many (query group, key) pairs are put on the way: the blocks of more than one layer."""
    return sum(size > 1 for head in blocks.sizes for size in head)


def layer_inputs(model, input_ids):
    """Per layer its positional arguments [hidden states, anchors...]; and all tensors that autograd saved."""
    inputs, saved = [], []
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args)) for layer in model.model.layers]

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(input_ids)
    for hook in hooks:
        hook.remove()
    return inputs, saved, output  # the output keeps the graph alive, so that no address is used twice


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("share", ["scores", "keys"])
def test_what_checkpointing_keeps_grows_by_the_formula(share, use_reentrant):
    blocks = thirty_percent()
    stock = tiny_model(num_hidden_layers=10)
    batch, count = 2, 23
    input_ids = tokens(batch, count)

    def run(blocks):
        model = converted(stock, blocks, share).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return layer_inputs(model, input_ids)

    inputs, saved, _graph = run(blocks)
    token_bytes = batch * count * 4
    hidden = 10 * token_bytes * HIDDEN
    queries = token_bytes * GROUPS * HEAD_DIM if share == "scores" else 0
    expected = pairs_on_the_way(blocks) * (queries + token_bytes * HEAD_DIM)
    kept = [tensor for args in inputs for tensor in args if tensor is not None]
    assert stored(kept) == hidden + expected
    if share == "scores":  # 0.3 anchors: 1 + 0.3 * (H + H_kv) / H of the hidden state's, here with H * D = hidden
        assert stored(kept) / hidden == pytest.approx(1 + 0.3 * (HEADS + KV_HEADS) / HEADS)
        merged = 10 * token_bytes * (HEADS + KV_HEADS) * HEAD_DIM  # what one merged tensor per layer would add
        assert expected < merged / 3

    # Autograd itself kept these, and beside them just what it keeps for the same model without sharing.
    dense_inputs, dense_saved, _dense_graph = run(pod.LayerBlocks.dense(10, KV_HEADS))
    assert stored([tensor for args in dense_inputs for tensor in args if tensor is not None]) == hidden
    addresses = {tensor.untyped_storage().data_ptr() for tensor in saved}
    assert all(tensor.untyped_storage().data_ptr() in addresses for tensor in kept)
    assert stored(saved) - stored(dense_saved) == expected

    # No view of all heads' storage; a pair travels while its block lasts, and not a layer longer.
    for layer, args in enumerate(inputs):
        assert len(args) == 1 + 2 * KV_HEADS
        for head in range(KV_HEADS):
            query, key = args[1 + 2 * head : 3 + 2 * head]
            reads = int(blocks.anchors[layer, head]) != layer
            assert (key is not None) == reads
            assert (query is not None) == (reads and share == "scores")
            if key is not None:
                assert key.shape == (batch, count, HEAD_DIM)
                assert key.untyped_storage().nbytes() == key.numel() * key.element_size()
            if query is not None:
                assert query.shape == (batch, GROUPS, count, HEAD_DIM)
                assert query.untyped_storage().nbytes() == query.numel() * query.element_size()


# What transformers' users pass


@pytest.mark.parametrize("family", EACH)
class TestForward:
    def test_bf16(self, family):
        stock = tiny_model(family)
        exact = stock(tokens(2, 29)).logits
        stock.to(torch.bfloat16)
        model = converted(stock, DENSE)
        assert model.dtype == torch.bfloat16
        logits = model(tokens(2, 29), use_cache=False).logits
        assert logits.dtype == torch.bfloat16
        assert relative(logits.float(), exact) <= 2 * relative(stock(tokens(2, 29)).logits.float(), exact)
        shared = converted(stock)(tokens(2, 29), use_cache=False).logits
        assert shared.dtype == torch.bfloat16 and bool(shared.isfinite().all())

    def test_logits_to_keep(self, family):
        model = converted(tiny_model(family))
        whole = model(tokens(2, 29), use_cache=False).logits
        last = model(tokens(2, 29), use_cache=False, logits_to_keep=3).logits
        assert last.shape == (2, 3, VOCAB)
        torch.testing.assert_close(last, whole[:, -3:], rtol=0, atol=1e-5)
        some = model(tokens(2, 29), use_cache=False, logits_to_keep=torch.tensor([0, 11])).logits
        torch.testing.assert_close(some, whole[:, [0, 11]], rtol=0, atol=1e-5)

    def test_output_hidden_states(self, family, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
        stock = tiny_model(family)
        expected = stock(tokens(2, 29), output_hidden_states=True, use_cache=False).hidden_states
        model = converted(stock, DENSE)
        states = model(tokens(2, 29), output_hidden_states=True, use_cache=False).hidden_states
        assert len(states) == len(expected) == LAYERS + 1
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states, expected, strict=True))
        assert model(tokens(2, 29), use_cache=False).hidden_states is None
        model.config.output_hidden_states = True
        assert len(model(tokens(2, 29), use_cache=False).hidden_states) == LAYERS + 1

    def test_inputs_embeds(self, family):
        model = converted(tiny_model(family))
        embedded = model.get_input_embeddings()(tokens(2, 29))
        expected = model(tokens(2, 29), use_cache=False).logits
        assert torch.equal(model(inputs_embeds=embedded, use_cache=False).logits, expected)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(tokens(2, 29), inputs_embeds=embedded)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model()

    def test_generate_from_inputs_embeds_is_the_stock_models(self, family):
        stock = tiny_model(family)
        model = converted(stock, DENSE)
        ids, mask, _ = left_padded((29, 17), 29)
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "suppress_tokens": [0]}
        for one in (model, converted(stock)):
            expected = one.generate(ids, **options)[:, 29:]
            assert torch.equal(one.generate(inputs_embeds=one.get_input_embeddings()(ids), **options), expected)
        # A further turn on a cache, and beams.
        full, caches, found = torch.cat([ids, tokens(2, 14, seed=3)], dim=1), {}, []
        options |= {"attention_mask": torch.nn.functional.pad(mask, (0, 14), value=1)}
        for one, cache in ((stock, DynamicCache()), (model, pod.PodCache(model.config))):
            with torch.no_grad():
                one(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
            embedded = one.get_input_embeddings()(full)
            found.append(one.generate(inputs_embeds=embedded, past_key_values=cache, **options))
            caches[one] = one.generate(inputs_embeds=embedded, num_beams=3, **options)
        assert torch.equal(*found) and torch.equal(*caches.values())
        with pytest.raises(ValueError, match="prefill_chunk_size cuts input_ids, not inputs_embeds"):
            model.generate(inputs_embeds=embedded, prefill_chunk_size=7, **options)

    def test_unshared_is_a_property_of_the_call(self, family, monkeypatch):
        """Another call may run meanwhile: one that is shared within one that is not, and the other way round."""
        monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
        stock, inner = tiny_model(family), {}
        expected = stock(tokens(2, 29)).logits
        for share, blocks in (("scores", BLOCKS), ("keys", BLOCKS), ("kv", BLOCKS), ("window", DENSE)):
            model = converted(stock, blocks, share)
            wanted = {True: expected, False: model(tokens(2, 29), use_cache=False).logits}
            assert relative(wanted[False], expected) > 0.01

            for unshared in (True, False):

                def between(*args, model=model, unshared=unshared):
                    if "running" not in inner:
                        inner["running"] = True
                        inner["logits"] = model(tokens(2, 29), use_cache=False, unshared=not unshared).logits

                inner.clear()
                handle = model.model.layers[2].register_forward_pre_hook(between)
                logits = model(tokens(2, 29), use_cache=False, unshared=unshared).logits
                handle.remove()
                assert relative(logits, wanted[unshared]) <= 1e-5
                assert relative(inner["logits"], wanted[not unshared]) <= 1e-5
            assert model(tokens(2, 29), unshared=True).past_key_values is None
            for options in ({"use_cache": True}, {"past_key_values": pod.PodCache(model.config)}):
                with pytest.raises(ValueError, match="a cache stores what layers share: .*use_cache=False"):
                    model(tokens(2, 29), unshared=True, **options)

    def test_labels(self, family, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
        stock = tiny_model(family)
        labels = tokens(2, 29)
        labels[:, :5] = -100
        for extra in ({}, {"num_items_in_batch": torch.tensor(11)}):
            inputs = {"input_ids": tokens(2, 29), "labels": labels, "use_cache": False, **extra}
            assert torch.equal(converted(stock, DENSE)(**inputs).loss, stock(**inputs).loss)

    def test_return_dict_false(self, family):
        model = converted(tiny_model(family))
        expected = model(tokens(2, 29), labels=tokens(2, 29), use_cache=False)
        loss, logits = model(tokens(2, 29), labels=tokens(2, 29), use_cache=False, return_dict=False)
        assert torch.equal(loss, expected.loss) and torch.equal(logits, expected.logits)
        (last,) = model.model(tokens(2, 29), use_cache=False, return_dict=False)
        assert torch.equal(last, model.model(tokens(2, 29), use_cache=False).last_hidden_state)

    def test_own_position_ids(self, family, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
        stock = tiny_model(family)
        model = converted(stock, DENSE)
        for position_ids in (torch.arange(40, 69)[None], torch.arange(40, 69).expand(2, -1)):
            inputs = {"input_ids": tokens(2, 29), "position_ids": position_ids, "use_cache": False}
            assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
        # RoPE is relative: where sinks and recent tokens lie is told by the rows, not by position_ids.
        shared = converted(stock)
        moved = shared(tokens(2, 29), position_ids=torch.arange(40, 69)[None], use_cache=False).logits
        torch.testing.assert_close(moved, shared(tokens(2, 29), use_cache=False).logits, rtol=0, atol=2e-3)

    def test_position_ids_with_a_cache(self, family):
        model = converted(tiny_model(family))
        # With gaps, and decoded: RoPE takes them as they are, as in the stock model.
        position_ids = torch.cat([torch.arange(5), torch.arange(9, 33)])[None]
        mask = torch.ones(2, 29)
        whole = model(tokens(2, 29), position_ids=position_ids, attention_mask=mask, use_cache=False).logits
        cache, seen, steps = pod.PodCache(model.config), 0, []
        for part in tokens(2, 29).split([20] + [1] * 9, dim=1):
            at = position_ids[:, seen : seen + part.shape[1]]
            steps.append(model(part, position_ids=at, past_key_values=cache).logits)
            seen += part.shape[1]
        assert relative(torch.cat(steps, dim=1), whole) <= 1e-5
        packed = torch.cat([torch.arange(13), torch.arange(16)])[None]
        with pytest.raises(ValueError, match="position_ids start again .*packed documents .*use_cache=False"):
            model(tokens(2, 29), position_ids=packed)

    def test_packed_documents(self, family):
        model = converted(tiny_model(family))
        sizes = [13, 2, 21]
        input_ids = tokens(2, sum(sizes))
        position_ids = torch.cat([torch.arange(size) for size in sizes])[None]
        document_ids = torch.cat([torch.full((size,), index) for index, size in enumerate(sizes)]).expand(2, -1)
        parts = input_ids.split(sizes, dim=1)
        expected = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
        expected_grads = gradients(model, expected)
        for inputs in (
            {"position_ids": position_ids},
            {"position_ids": position_ids.expand(2, -1)},
            {"position_ids": position_ids, "document_ids": document_ids},
            {"document_ids": document_ids},  # positions run on: RoPE is relative
        ):
            logits = model(input_ids, use_cache=False, **inputs).logits
            tolerance = 1e-5 if "position_ids" in inputs else 1e-4
            assert relative(logits, expected) <= tolerance
            assert_gradients(gradients(model, logits), expected_grads, tolerance)
        padded = torch.cat([document_ids, torch.full((2, 4), -1)], dim=1)
        logits = model(torch.cat([input_ids, tokens(2, 4)], dim=1), document_ids=padded, use_cache=False).logits
        assert relative(logits[:, : sum(sizes)], expected) <= 1e-4

    def test_right_padding_without_a_cache(self, family):
        model = converted(tiny_model(family))
        lengths = [29, 2, 17]
        mask = (torch.arange(29) < torch.tensor(lengths)[:, None]).long()
        logits = model(tokens(3, 29), attention_mask=mask, use_cache=False).logits
        for row, length in enumerate(lengths):
            expected = model(tokens(3, 29)[row : row + 1, :length], use_cache=False).logits
            assert relative(logits[row : row + 1, :length], expected) <= 1e-5

    def test_a_mask_of_ones_changes_nothing(self, family):
        model = converted(tiny_model(family))
        logits = model(tokens(2, 29), attention_mask=torch.ones(2, 29), use_cache=False).logits
        assert torch.equal(logits, model(tokens(2, 29), use_cache=False).logits)

    def test_gradients_in_eval_mode_with_the_default_cache(self, family):
        model = converted(tiny_model(family))
        expected = gradients(model, model(tokens(2, 29), use_cache=False).logits)
        output = model(tokens(2, 29))
        assert isinstance(output.past_key_values, pod.PodCache)
        assert_gradients(gradients(model, output.logits), expected, 1e-5)

    def test_mixed_padding_is_refused(self, family):
        model = converted(tiny_model(family))
        mask = torch.ones(2, 29, dtype=torch.long)
        mask[0, :3] = 0
        mask[1, -3:] = 0
        with pytest.raises(ValueError, match="row 1 of attention_mask is not left-padded .*padding_side = 'left'"):
            model(tokens(2, 29), attention_mask=mask, use_cache=False)
        mask = torch.ones(2, 29, dtype=torch.long)
        mask[1, 7] = 0
        with pytest.raises(ValueError, match="row 1 of attention_mask .* has a hole"):
            model(tokens(2, 29), attention_mask=mask, use_cache=False)

    def test_gate_is_the_share_of_the_softmax_on_proximal_tokens(self, family):
        stock = tiny_model(family)
        ids = tokens(2, 40)
        i, j = torch.arange(40)[:, None], torch.arange(40)
        proximal = (j <= i) & ((j < SINKS) | (i - j < RECENT))
        weights = stock(ids, output_attentions=True, use_cache=False).attentions
        expected = [float((layer * proximal).sum(dim=-1).mean()) for layer in weights]
        model = converted(stock, pod.LayerBlocks.dense(LAYERS, KV_HEADS))
        shared = converted(stock)
        for layers in (model.model.layers, shared.model.layers):
            for layer in layers:
                layer.self_attn.measure_gate = True
        logits = model(ids, use_cache=False).logits
        assert [float(layer.self_attn.gate) for layer in model.model.layers] == pytest.approx(expected, rel=1e-5)
        assert relative(logits, stock(ids, use_cache=False).logits) <= 1e-5
        shared(ids, use_cache=False)
        assert float(shared.model.layers[0].self_attn.gate) == pytest.approx(expected[0], rel=1e-5)
        assert all(0 < float(layer.self_attn.gate) < 1 for layer in shared.model.layers)
        padded = torch.nn.functional.pad(ids, (0, 12))  # padding counts nowhere
        model(padded, document_ids=torch.zeros_like(padded).index_fill_(1, torch.arange(40, 52), -1), use_cache=False)
        assert [float(layer.self_attn.gate) for layer in model.model.layers] == pytest.approx(expected, rel=1e-5)

    def test_similarity_of_a_dense_pod_model_is_the_stock_models(self, family):
        stock = tiny_model(family)
        expected = attention_similarity(stock, [tokens(2, 31)], last_q=8, progress=False)
        ours = attention_similarity(converted(stock, DENSE), [tokens(2, 31)], last_q=8, progress=False)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


# Conversion


@pytest.mark.parametrize("family", EACH)
class TestConvert:
    def test_shares_every_parameter_and_leaves_the_stock_model_usable(self, family):
        stock = tiny_model(family)
        before = stock(tokens(2, 29)).logits
        model = converted(stock)
        ours, theirs = dict(model.named_parameters()), dict(stock.named_parameters())
        assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        assert type(stock) is CLASSES[family][1] and stock.config.model_type == family
        assert not hasattr(stock.config, "anchors")
        assert torch.equal(stock(tokens(2, 29)).logits, before)

    def test_training_one_trains_the_other(self, family, monkeypatch):
        monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
        stock = tiny_model(family)
        before = stock(tokens(2, 29)).logits
        model = converted(stock).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens(2, 29), labels=tokens(2, 29)).loss.backward()
        optimizer.step()
        after = stock(tokens(2, 29)).logits
        assert relative(after, before) > 1e-3
        assert torch.equal(converted(stock, DENSE)(tokens(2, 29), use_cache=False).logits, after)

    def test_a_pod_model_takes_other_blocks(self, family):
        stock = tiny_model(family)
        first = converted(stock)
        first.config.tau = 0.5
        other = pod.LayerBlocks([[0, 0], [0, 0], [2, 0], [2, 0], [2, 0]])
        second = pod.convert(first, other, sink_size=1, recent_size=2, share="keys")
        assert type(second) is type(first) and second.config.blocks == other and first.config.blocks == BLOCKS
        assert second.config.tau == 0.5
        expected = plain_pod_logits(stock, tokens(2, 29), other.anchors, "keys", 1, 2)
        assert relative(second(tokens(2, 29), use_cache=False).logits, expected) <= 1e-5
        expected = plain_pod_logits(stock, tokens(2, 29), BLOCKS.anchors, "scores")
        assert relative(first(tokens(2, 29), use_cache=False).logits, expected) <= 1e-5
        dense = pod.convert(second, DENSE)
        assert relative(dense(tokens(2, 29), use_cache=False).logits, stock(tokens(2, 29)).logits) <= 1e-5

    def test_keeps_mode_frozen_parameters_and_generation_config(self, family):
        stock = tiny_model(family)
        stock.generation_config.max_new_tokens = 5
        stock.model.embed_tokens.weight.requires_grad_(False)
        model = converted(stock)
        assert not model.training and converted(stock.train()).training
        assert not stock.model.embed_tokens.weight.requires_grad
        assert not model.model.embed_tokens.weight.requires_grad
        assert model.lm_head.weight.requires_grad
        assert model.generation_config.max_new_tokens == 5

    def test_from_a_path(self, family, tmp_path):
        stock = tiny_model(family).to(torch.bfloat16)
        stock.save_pretrained(tmp_path)
        for path in (tmp_path, str(tmp_path)):
            model = pod.convert(path, BLOCKS, sink_size=SINKS, recent_size=RECENT)
            assert model.dtype == torch.bfloat16 and not model.training
            # Loaded again, as Module.to(bfloat16) rounds RoPE's frequencies too.
            expected = converted(CLASSES[family][1].from_pretrained(path))(tokens(2, 29), use_cache=False).logits
            assert torch.equal(model(tokens(2, 29), use_cache=False).logits, expected)

    def test_defaults(self, family):
        config = pod.convert(tiny_model(family), BLOCKS).config
        assert (config.sink_size, config.recent_size, config.share, config.tau) == (16, 4080, "scores", None)
        assert config.model_type == f"pod_{family}" and config.blocks == BLOCKS


# Saving, loading, importing


def python(code, *arguments, timeout=300):
    """Run code in a fresh interpreter, in another folder than the repository."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=arguments[0] if arguments else None,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a saved PoD model of each family, tied and not, and the logits that each gave."""
    folder = tmp_path_factory.mktemp("saved")
    for family, tied in [("llama", False), ("mistral", False), ("phi3", False), ("qwen2", True), ("qwen3", True)]:
        model = converted(tiny_model(family, tie_word_embeddings=tied), share="keys" if tied else "scores")
        model.config.tau = 0.75
        with torch.no_grad():
            torch.save(model(tokens(2, 29), use_cache=False).logits, folder / f"{family}.pt")
        model.save_pretrained(folder / family)
    return folder


LOAD = """
import sys
from pathlib import Path
import torch
import pod
print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}))
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
folder = Path(sys.argv[1])
input_ids = torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(1))
for family in ("llama", "mistral", "phi3", "qwen2", "qwen3"):
    model = AutoModelForCausalLM.from_pretrained(folder / family).eval()
    assert torch.equal(model(input_ids, use_cache=False).logits, torch.load(folder / f"{family}.pt")), family
    base = AutoModel.from_pretrained(folder / family).eval()
    states = base(input_ids, use_cache=False).last_hidden_state
    assert torch.equal(states, model.model(input_ids, use_cache=False).last_hidden_state)
    config = AutoConfig.from_pretrained(folder / family)
    print(family, type(model).__name__, type(base).__name__, type(config).__name__, config.sink_size,
          config.recent_size, config.share, config.tau, config.anchors)
print("done")
"""


@pytest.mark.slow
def test_round_trip_in_another_process_after_import_pod_which_is_light(saved):
    result = python(LOAD, saved)
    assert result.returncode == 0 and result.stdout.endswith("done\n"), result.stderr
    loaded, *lines = result.stdout.splitlines()
    assert {"pod", "pod_kernels", "torch", "transformers"} <= set(loaded.split())
    assert not {"lightning", "pytorch_lightning", "deepspeed", "wandb", "matplotlib"} & set(loaded.split())
    anchors = BLOCKS.anchors.tolist()
    assert lines == [
        f"llama PodLlamaForCausalLM PodLlamaModel PodLlamaConfig {SINKS} {RECENT} scores 0.75 {anchors}",
        f"mistral PodMistralForCausalLM PodMistralModel PodMistralConfig {SINKS} {RECENT} scores 0.75 {anchors}",
        f"phi3 PodPhi3ForCausalLM PodPhi3Model PodPhi3Config {SINKS} {RECENT} scores 0.75 {anchors}",
        f"qwen2 PodQwen2ForCausalLM PodQwen2Model PodQwen2Config {SINKS} {RECENT} keys 0.75 {anchors}",
        f"qwen3 PodQwen3ForCausalLM PodQwen3Model PodQwen3Config {SINKS} {RECENT} keys 0.75 {anchors}",
        "done",
    ]


def test_without_import_pod_transformers_names_the_model_type(saved):
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1] + '/llama')"
    result = python(code, saved)
    assert result.returncode != 0
    error = result.stderr.strip()
    assert "ValueError" in error and "model type `pod_llama`" in error and "does not recognize" in error


def test_config_json_holds_what_rebuilds_the_model(saved):
    content = json.loads((saved / "qwen3" / "config.json").read_text())
    assert content["model_type"] == "pod_qwen3" and content["architectures"] == ["PodQwen3ForCausalLM"]
    assert content["anchors"] == BLOCKS.anchors.tolist()
    names = ("sink_size", "recent_size", "share", "tau", "tie_word_embeddings")
    assert [content[name] for name in names] == [SINKS, RECENT, "keys", 0.75, True]


def test_a_loaded_model_trains_saves_and_converts_again(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved / "qwen3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    logits = model.eval()(tokens(2, 29), use_cache=False).logits
    expected = gradients(model, logits)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert_gradients(gradients(model, model(tokens(2, 29)).logits), expected, 1e-6)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and again.config.blocks == BLOCKS
    assert pod.convert(again, DENSE).config.blocks == DENSE


@pytest.mark.parametrize("name", EACH)
def test_from_config_builds_a_model(name):
    config = converted(tiny_model(name)).config
    model = AutoModelForCausalLM.from_config(config)
    assert model(tokens(1, 19)).logits.shape == (1, 19, VOCAB)
    assert AutoModel.from_config(config)(tokens(1, 19)).last_hidden_state.shape == (1, 19, HIDDEN)
    assert copy.deepcopy(config).blocks == config.blocks


def test_a_config_without_anchors_is_dense():
    config = pod.PodLlamaConfig(num_hidden_layers=3, num_key_value_heads=2, num_attention_heads=4)
    assert config.blocks == pod.LayerBlocks.dense(3, 2)


def test_root_folders_are_no_packages():
    assert (ROOT / "kernels").is_dir()
    for folder in ("kernels", "data", "eval", "recipes", "checkpoints"):
        assert not (ROOT / folder / "__init__.py").exists(), folder


# Loaded in other ways


class Rounded(torch.nn.Linear):
    """A stand-in for a quantised layer: rows of int8 with a scale each, as bitsandbytes' 8-bit layers hold them."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        weight, self.bias = layer.weight.detach(), layer.bias
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden_states):
        return torch.nn.functional.linear(hidden_states, self.weight * self.scale, self.bias)


def quantise(model):
    """Replace every layer that bitsandbytes would replace: all linear ones but the head."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, Rounded(layer))
    return model.eval()


@pytest.mark.parametrize("family", EACH)
def test_a_saved_model_works_with_quantised_layers(family, tmp_path, monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
    for name, blocks in (("dense", DENSE), ("shared", BLOCKS)):
        converted(tiny_model(family), blocks).save_pretrained(tmp_path / name)
    stock, dense, shared = (
        quantise(model)
        for model in (
            tiny_model(family),
            AutoModelForCausalLM.from_pretrained(tmp_path / "dense"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "shared"),
        )
    )
    input_ids = tokens(2, 29)
    with torch.no_grad():
        expected = stock(input_ids).logits
        assert relative(expected, tiny_model(family)(input_ids).logits) > 1e-3  # rounding does something
        assert torch.equal(dense(input_ids, use_cache=False).logits, expected)
        whole = shared(input_ids, use_cache=False).logits
        cache = pod.PodCache(shared.config)
        steps = [shared(part, past_key_values=cache).logits for part in input_ids.split([20] + [1] * 9, dim=1)]
        assert relative(torch.cat(steps, dim=1), whole) <= 1e-5
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(dense.generate(input_ids, **options), stock.generate(input_ids, **options))


def test_device_maps(tmp_path):
    model = converted(tiny_model())
    model.save_pretrained(tmp_path / "pod")
    tiny_model().save_pretrained(tmp_path / "stock")
    expected = model(tokens(2, 29), use_cache=False).logits

    def load(name, device_map):
        folder = tmp_path / "offloaded"
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, device_map=device_map, offload_folder=folder)

    # On one device, and from the disk to one device layer by layer.
    for device_map in ("auto", {"": "cpu"}, {"": "disk"}):
        loaded = load("pod", device_map).eval()
        assert torch.equal(loaded(tokens(2, 29), use_cache=False).logits, expected), device_map
        cache = pod.PodCache(model.config)
        steps = [loaded(part, past_key_values=cache).logits for part in tokens(2, 29).split([20] + [1] * 9, dim=1)]
        assert relative(torch.cat(steps, dim=1), expected) <= 1e-5
    apart = {"model": "cpu", "lm_head": "disk"}
    assert torch.equal(load("pod", apart)(tokens(2, 29), use_cache=False).logits, expected)  # all of it runs on the CPU
    with pytest.raises(ValueError, match=r"several devices \(cpu, disk\)"):
        converted(load("stock", apart))
    with pytest.raises(ValueError, match=r"offloaded \(device_map=\{'': 'disk'\}\): .*convert it and save it"):
        converted(load("stock", {"": "disk"}))


# Refused by name


@pytest.mark.parametrize("family", EACH)
class TestForwardRefusals:
    def test_masks(self, family):
        model = converted(tiny_model(family))
        with pytest.raises(ValueError, match=r"attention_mask must .*\(2, 1, 9, 9\)\. A 4-D mask .*document_ids"):
            model(tokens(2, 9), attention_mask=torch.ones(2, 1, 9, 9))
        with pytest.raises(ValueError, match=r"attention_mask must be .* got dict"):
            model(tokens(2, 9), attention_mask={"full_attention": None}, use_cache=False)
        for shape in ((2, 7), (1, 9), (9,)):
            with pytest.raises(ValueError, match=r"attention_mask must be \["):
                model(tokens(2, 9), attention_mask=torch.ones(shape), use_cache=False)

    def test_no_tokens(self, family):
        model = converted(tiny_model(family))
        none = tokens(2, 0)
        for call in (
            lambda: model(none),
            lambda: model(none, use_cache=False),
            lambda: model(inputs_embeds=torch.zeros(2, 0, HIDDEN)),
            lambda: model.generate(none, max_new_tokens=2),
            lambda: model.generate(input_ids=none[:1], max_new_tokens=2),
        ):
            with pytest.raises(ValueError, match="the input has no tokens: an empty prompt needs at least one"):
                call()
        for call in (model, partial(model, use_cache=False), partial(model.generate, max_new_tokens=2)):
            with pytest.raises(ValueError, match="the input has no rows: a batch needs at least one"):
                call(tokens(0, 5))
        for size in (0, -1, "4", 1.5):
            message = f"prefill_chunk_size must be at least 1 token, or None, a whole number; got {size!r}"
            with pytest.raises(ValueError, match=message):
                model.generate(tokens(2, 9), prefill_chunk_size=size, max_new_tokens=2)

    def test_output_attentions(self, family):
        model = converted(tiny_model(family))
        with pytest.raises(ValueError, match="output_attentions is not supported: .*attention_similarity"):
            model(tokens(2, 9), output_attentions=True)
        model.set_attn_implementation("eager")  # transformers lets it be set in the config only so
        model.config.output_attentions = True
        with pytest.raises(ValueError, match="output_attentions is not supported"):
            model(tokens(2, 9))

    def test_attention_dropout_in_training(self, family):
        model = converted(tiny_model(family, attention_dropout=0.1))
        assert model(tokens(2, 9)).logits.shape == (2, 9, VOCAB)
        with pytest.raises(ValueError, match=r"attention_dropout=0\.1 is not supported"):
            model.train()(tokens(2, 9))

    def test_right_padding_with_a_cache(self, family):
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, -3:] = 0
        with pytest.raises(ValueError, match=r"row 1 of attention_mask .*left padding only: .*padding_side = 'left'"):
            converted(tiny_model(family))(tokens(2, 9), attention_mask=mask)

    def test_document_ids_with_a_cache_or_a_mask(self, family):
        model = converted(tiny_model(family))
        documents = torch.zeros(2, 9, dtype=torch.long)
        with pytest.raises(ValueError, match="document_ids are for training without a cache: pass use_cache=False"):
            model(tokens(2, 9), document_ids=documents)
        with pytest.raises(ValueError, match="attention_mask or document_ids, not both"):
            model(tokens(2, 9), document_ids=documents, attention_mask=torch.ones(2, 9), use_cache=False)

    def test_other_caches(self, family):
        model = converted(tiny_model(family))
        with pytest.raises(ValueError, match=r"past_key_values is a DynamicCache: .*pod\.PodCache"):
            model(tokens(2, 9), past_key_values=DynamicCache())
        with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
            model.train()(tokens(2, 9), past_key_values=pod.PodCache(model.config))

    def test_several_devices(self, family):
        stock = tiny_model(family)
        stock.hf_device_map = {"model": 0, "lm_head": "cpu"}
        with pytest.raises(ValueError, match=r"several devices \(0, cpu\): .*device_map=\{'': 0\}"):
            converted(stock)
        stock.hf_device_map = {"": "cpu"}
        assert converted(stock)(tokens(2, 9)).logits.shape == (2, 9, VOCAB)


@pytest.mark.parametrize("family", EACH)
class TestConvertRefusals:
    def test_blocks_for_another_model(self, family):
        message = "blocks for another model: they have 6 layers x 2 KV heads, the model has 5 layers x 2 KV heads"
        with pytest.raises(ValueError, match=message):
            converted(tiny_model(family), pod.LayerBlocks.dense(6, 2))
        with pytest.raises(ValueError, match="they have 5 layers x 4 KV heads, the model has 5 layers x 2 KV heads"):
            converted(tiny_model(family), pod.LayerBlocks.dense(5, 4))

    def test_sizes_and_share(self, family):
        stock = tiny_model(family)
        with pytest.raises(ValueError, match="sink_size must be >= 0 tokens, got -1"):
            pod.convert(stock, BLOCKS, sink_size=-1)
        with pytest.raises(ValueError, match="recent_size must be >= 1 token .*got 0"):
            pod.convert(stock, BLOCKS, recent_size=0)
        with pytest.raises(ValueError, match="share must be one of scores, keys, kv, window; got 'values'"):
            pod.convert(stock, BLOCKS, share="values")

    def test_quantised(self, family):
        stock = tiny_model(family)
        stock.hf_quantizer = object()
        with pytest.raises(ValueError, match="quantised: load it without quantization_config, convert it and save it"):
            converted(stock)

    def test_base_model(self, family):
        with pytest.raises(ValueError, match="Model has no lm_head: pass a causal LM"):
            converted(tiny_model(family).model)


def test_a_classifier_is_no_causal_lm():
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no lm_head"):
        converted(LlamaForSequenceClassification(tiny_config()))


def test_unknown_families():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=VOCAB))
    opt = OPTForCausalLM(
        OPTConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_size=16,
            ffn_dim=32,
            vocab_size=VOCAB,
            word_embed_proj_dim=16,
        )
    )
    for model, name in ((gpt2, "gpt2"), (opt, "opt")):
        with pytest.raises(
            ValueError,
            match=f"model family '{name}' is not supported; supported are llama, mistral, phi3, qwen2, qwen3",
        ):
            pod.convert(model, pod.LayerBlocks.dense(2, 2))


def test_sliding_window_layers():
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    with pytest.raises(ValueError, match=r"layers \[3, 4\] are not full attention.*use_sliding_window=False"):
        converted(tiny_model("qwen3", **sliding))
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layers \[1\] are not full attention"):
        converted(tiny_model("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=8))


def test_max_window_layers_of_qwen2():
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    with pytest.raises(
        ValueError, match=r"layers \[3, 4\] are not full attention.*use_sliding_window=False.*max_window"
    ):
        converted(tiny_model("qwen2", **sliding))
    # Off is off, whatever else the config says; so is a window that begins above the last layer.
    stock = tiny_model("qwen2", **{**sliding, "use_sliding_window": False})
    logits = converted(stock, DENSE)(tokens(2, 29), use_cache=False).logits
    assert relative(logits, stock(tokens(2, 29)).logits) <= 1e-5
    assert converted(tiny_model("qwen2", **{**sliding, "max_window_layers": LAYERS})).config.model_type == "pod_qwen2"


def test_sliding_window_of_mistral(tmp_path):
    with pytest.raises(ValueError, match=r"sliding_window is 8 tokens in all layers.*sliding_window=None"):
        converted(tiny_model("mistral", sliding_window=8))
    with pytest.raises(ValueError, match=r"sliding_window is 4096 tokens in all layers"):
        pod.PodMistralConfig(sliding_window=4096)
    model = converted(tiny_model("mistral"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 8}))
    with pytest.raises(ValueError, match=r"sliding_window is 8 tokens"):
        AutoConfig.from_pretrained(tmp_path)


def test_what_phi3_has_and_pod_has_not():
    with pytest.raises(ValueError, match=r"sliding_window is 8 tokens in all layers.*Phi-4"):
        converted(tiny_model("phi3", sliding_window=8))
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": ORIGINAL}
    for rope in ({"rope_type": "longrope", **factors}, {"partial_rotary_factor": 0.5}):
        with pytest.raises(ValueError, match="LongRoPE computes its whole cache again .*partial_rotary_factor .*Phi-4"):
            converted(tiny_model("phi3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope}))
    model = converted(tiny_model("phi3", resid_pdrop=0.1))
    assert model(tokens(2, 9)).logits.shape == (2, 9, VOCAB)
    with pytest.raises(ValueError, match=r"resid_pdrop=0\.1 is not supported"):
        model.train()(tokens(2, 9))


def test_phi3_keeps_its_cache_where_the_stock_model_makes_a_new_one():
    stock = tiny_model("phi3", original_max_position_embeddings=ORIGINAL)
    model = converted(stock, DENSE)
    cache = pod.PodCache(model.config)
    ours = model.generate(tokens(2, 21), past_key_values=cache, max_new_tokens=24, do_sample=False)
    # Without its cache: transformers 5.19 forgets tokens with it.
    assert torch.equal(ours, stock.generate(tokens(2, 21), max_new_tokens=24, do_sample=False, use_cache=False))
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("family", ["phi3", "qwen2"])
def test_head_dim_is_what_the_familys_attention_computes(family, tmp_path):
    sizes = {name: value for name, value in tiny_config(family).to_dict().items() if name != "head_dim"}
    config_class, model_class = CLASSES[family]
    stock = model_class(config_class(**{**sizes, "hidden_size": 48})).eval()
    assert not hasattr(stock.config, "head_dim")
    model = pod.convert(stock, DENSE)
    assert model.config.head_dim == model.model.layers[0].self_attn.head_dim == 12
    assert relative(model(tokens(2, 29)).logits, stock(tokens(2, 29)).logits) <= 1e-5
    cache = pod.PodCache(model.config)
    model(tokens(2, 29), past_key_values=cache)
    assert cache.nbytes() == cache.expected_nbytes(29, batch=2, itemsize=4)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 12


@pytest.mark.parametrize("rope", sorted(ROPE))
@pytest.mark.parametrize("family", EACH_SCALED)
class TestRopeScaling:
    """Within and beyond the original length, decoded token by token, and read back from disk."""

    @pytest.mark.parametrize("count", [29, 47])
    @pytest.mark.parametrize("backend", ["reference", "composed"])
    def test_equals_stock(self, family, rope, count, backend, monkeypatch):
        assert_equals_stock(scaled_model(family, rope), DENSE, backend, monkeypatch, count)

    def test_the_scaling_does_something(self, family, rope):
        plain = tiny_model(family)(tokens(1, 47)).logits
        assert not torch.allclose(scaled_model(family, rope)(tokens(1, 47)).logits, plain, atol=1e-3)

    def test_generates_beyond_the_original_length_as_stock_does(self, family, rope):
        stock, input_ids = scaled_model(family, rope), tokens(2, 21)
        options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        expected = stock.generate(input_ids, **options)
        # Anew, as a dynamic scaling remembers the longest text that it saw.
        ours = converted(scaled_model(family, rope), DENSE).generate(input_ids, **options)
        assert torch.equal(ours.sequences, expected.sequences) and ours.sequences.shape[1] > ORIGINAL
        assert relative(torch.stack(ours.logits), torch.stack(expected.logits)) <= 1e-5

    def test_blocks_equal_a_plain_recomputation(self, family, rope):
        stock = scaled_model(family, rope)
        model, input_ids = converted(stock), tokens(2, 47)
        expected = plain_pod_logits(stock, input_ids, BLOCKS.anchors, "scores")
        with torch.no_grad():
            assert relative(model(input_ids, use_cache=False).logits, expected) <= 1e-5
            if rope in CHANGING:  # keys that are in the cache keep the angles of their time, in the stock model too
                return
            cache = pod.PodCache(model.config)
            steps = [model(part, past_key_values=cache).logits for part in input_ids.split([40] + [1] * 7, dim=1)]
        assert relative(torch.cat(steps, dim=1), expected) <= 1e-5

    def test_saved_and_loaded(self, family, rope, tmp_path):
        model = converted(scaled_model(family, rope))
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        assert again.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
        assert (again.model.rotary_emb.attention_scaling != 1) == (rope in ("longrope", "yarn"))
        inputs = {"input_ids": tokens(2, 47), "use_cache": False}
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("rope", CHANGING)
def test_a_rope_that_changes_with_length_is_refused_on_shared_sequences(rope):
    class Group:
        size, rank = 2, 0

    model = converted(scaled_model("llama", rope)).train()
    with pytest.raises(ValueError, match=f"'{rope}' .*differs from rank to rank.*sequence_parallel_size=1"):
        model(tokens(1, 20), sequence=SequenceShard(20, Group()))


BROKEN = [
    ({"sink_size": -1}, "sink_size must be >= 0 tokens, got -1"),
    ({"recent_size": 0}, "recent_size must be >= 1 token .*got 0"),
    ({"share": "values"}, "share must be one of scores, keys, kv, window; got 'values'"),
    ({"tau": 1.5}, "tau must be between 0 and 1, or None; got 1.5"),
    ({"tau": -1}, "tau must be between 0 and 1, or None; got -1"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ({"anchors": [[0, 0]]}, "blocks for another model: they have 1 layers x 2 KV heads, the model has 5 layers"),
    ({"anchors": [[0, 1]] + [[0, 0]] * 4}, "layer 0, KV head 1: anchor 1 is above its layer"),
    ({"anchors": [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]]}, "layer 2, KV head 0: anchor 0 leaves a gap"),
]


@pytest.mark.parametrize("broken, message", BROKEN, ids=lambda value: next(iter(value)) if type(value) is dict else "")
@pytest.mark.parametrize("family", EACH)
def test_broken_configs_are_refused_when_made_and_when_loaded(family, broken, message, tmp_path):
    config = converted(tiny_model(family)).config
    fields = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    with pytest.raises(ValueError, match=message):
        type(config)(**{**fields, "anchors": None, **broken})
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **broken}))
    message = message if "num_key_value_heads" not in broken else "num_key_value_heads|blocks for another model"
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


def test_sliding_layers_in_a_config_json(tmp_path):
    config = converted(tiny_model("qwen3")).config
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": ["sliding_attention"] * LAYERS}))
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2, 3, 4\] are not full attention"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("tau", [None, 0, 0.0, 0.7, 1, 1.0])
def test_tau_may_be_a_whole_number(tau):
    assert pod.PodLlamaConfig(tau=tau).tau == tau


# What transformers is told


FLAGS = ("sdpa", "flash_attn", "flex_attn", "attention_backend")


@pytest.mark.parametrize("family", CLASSES)
def test_flags_say_what_a_model_does_not_do(family):
    stock, model = tiny_model(family), converted(tiny_model(family))
    for one in (model, model.model):
        assert not any(getattr(one, f"_supports_{flag}") for flag in FLAGS) and not one._can_compile_fullgraph
        assert not one._tp_plan and not one._pp_plan and not one.supports_tp_plan and not one.supports_pp_plan
        assert not one.config.base_model_tp_plan and not one.config.base_model_pp_plan
        assert one.config._attn_implementation == "eager"
    assert stock._supports_sdpa and stock.config.base_model_tp_plan  # the family's own are as they were


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention"])
def test_an_attention_implementation_says_that_it_has_no_effect(name, tmp_path):
    model = converted(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    message = f"attn_implementation='{name}' has no effect on PodLlamaForCausalLM, .*POD_ATTENTION_BACKEND"
    with pytest.warns(UserWarning, match=message) as caught:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name).eval()
    assert len([one for one in caught if "attn_implementation" in str(one.message)]) == 1
    assert torch.equal(loaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
    with pytest.warns(UserWarning, match=message):
        loaded.set_attn_implementation(name)
    assert loaded.config._attn_implementation == "eager"


def test_an_attention_implementation_that_is_none_says_nothing(tmp_path):
    converted(tiny_model("llama")).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
