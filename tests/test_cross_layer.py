"""Cross-layer attention as a model option (`share: kv`), against plain loops that make keys and values once a block."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import pod
from pod.export import rebuild
from pod.recipe.loading import load_recipe
from pod.recipe.schema import RecipeError
from pod.training.module import PodModule

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 4, 4, 2, 8, 61
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
PAIRS = pod.LayerBlocks.uniform(LAYERS, KV_HEADS, 2)
# The heads share differently: layer 1 has no anchor, layers 2 and 3 have one, and layer 2 reads two layers' segments.
MIXED = pod.LayerBlocks([[0, 0], [0, 0], [2, 0], [2, 3]])
STOCK = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def stock(family: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    config_class, model_class = STOCK[family]
    model = model_class(config_class(**FIELDS, attn_implementation="eager"))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # at 1 the norms of queries and keys could be left out
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def cla(blocks: pod.LayerBlocks, family: str = "llama"):
    return pod.convert(stock(family), blocks, share="kv")


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def rotated(states: Tensor, model: nn.Module) -> Tensor:
    """RoPE of [T, D], row i at position i."""
    half = states.shape[1] // 2
    angle = torch.arange(len(states))[:, None] * model.model.rotary_emb.inv_freq
    first, second = states[:, :half], states[:, half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def plain_logits(model: nn.Module, blocks: pod.LayerBlocks, ids: Tensor) -> Tensor:
    """[T, vocab] of one row [T], by a stock model's modules, one head after the other."""
    states, stored = model.model.embed_tokens(ids), {}
    count = len(ids)
    for number, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(states)

        def head_of(kind, head, attention=attention, normed=normed):
            projected = getattr(attention, f"{kind}_proj")(normed)[:, head * DIM : (head + 1) * DIM]
            norm = getattr(attention, f"{kind}_norm", None)
            return projected if norm is None else norm(projected)

        outputs = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            anchor = int(blocks.anchors[number, group])
            if anchor == number:
                stored[number, group] = rotated(head_of("k", group), model), head_of("v", group)
            keys, values = stored[anchor, group]
            query = rotated(head_of("q", head), model)
            logits = (query @ keys.T) * DIM**-0.5
            logits = logits.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
            outputs.append(torch.softmax(logits, dim=1) @ values)
        states = states + attention.o_proj(torch.cat(outputs, dim=1))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return model.lm_head(model.model.norm(states))


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("blocks", [PAIRS, MIXED], ids=["pairs", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_gradients_are_those_of_keys_and_values_made_once(family, blocks, backend, monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", backend)
    ids, model, truth = tokens(2, 13), cla(blocks, family).train(), stock(family)
    wanted = torch.stack([plain_logits(truth, blocks, row) for row in ids])
    found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    probe = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (found * probe).sum().backward()
    (wanted * probe).sum().backward()
    frozen = {parameter for layer in model.model.layers for parameter in layer.self_attn.unused_parameters()}
    for (name, mine), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        if mine in frozen:
            assert mine.grad is None and (theirs.grad is None or not theirs.grad.any()), name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-4, atol=2e-4, msg=name)
    without = {"pairs": [1, 3], "mixed": [1]}["pairs" if blocks is PAIRS else "mixed"]
    each = 3 if family == "qwen3" else 2
    assert len(frozen) == each * len(without)
    dense = stock(family)(ids, use_cache=False).logits
    assert (dense - wanted).abs().max() > 0.1, "sharing changes the model"


def test_blocks_of_one_layer_are_the_dense_model(monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "reference")
    ids = tokens(2, 9)
    model = cla(pod.LayerBlocks.dense(LAYERS, KV_HEADS))
    assert torch.equal(model(ids, use_cache=False).logits, stock()(ids, use_cache=False).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_exact(reentrant):
    ids, gradients = tokens(2, 11), []
    for checkpoints in (False, True):
        model = cla(MIXED).train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is gradients[1][name] is None or torch.equal(gradient, gradients[1][name]), name


@torch.no_grad()
@pytest.mark.parametrize("blocks", [PAIRS, MIXED], ids=["pairs", "mixed"])
@pytest.mark.parametrize("chunks", [(19,), (7, 1, 1, 6, 4), (1,) * 19])
def test_decoding_is_recomputing(blocks, chunks):
    """Left-padded rows of 19, 13 and 16 tokens, in chunks and one by one."""
    model, truth, ids, starts = cla(blocks), stock(), tokens(3, 19), (0, 6, 3)
    mask = (torch.arange(19) >= torch.tensor(starts)[:, None]).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache, found, seen = pod.PodCache(model.config), [], 0
    for chunk in chunks:
        part = slice(seen, seen + chunk)
        seen += chunk
        out = model(ids[:, part], attention_mask=mask[:, :seen], position_ids=positions[:, part], past_key_values=cache)
        found.append(out.logits)
    found = torch.cat(found, dim=1)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for row, start in enumerate(starts):
        wanted = plain_logits(truth, blocks, ids[row, start:])
        torch.testing.assert_close(found[row, start:], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole[row, start:], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("blocks", [PAIRS, MIXED], ids=["pairs", "mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=["greedy", "beams", "chunks"]
)
def test_generate_uses_a_cache_of_the_formulas_bytes(blocks, options):
    model, prompt = cla(blocks), tokens(2, 11)
    cached = model.generate(prompt, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **options)
    options = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
    recomputed = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=False, **options)
    assert torch.equal(cached.sequences, recomputed)
    cache, rows = cached.past_key_values, 2 * options.get("num_beams", 1)
    if options:
        return
    # Of 8 layers and heads the anchors alone hold anything: keys and values.
    anchors = int(blocks.is_anchor.sum())
    assert model.config.kv_saving == 1 - anchors / (LAYERS * KV_HEADS) == {4: 0.5}.get(anchors)
    length = cache.max_length
    expected = rows * DIM * 4 * 2 * anchors * length
    assert cache.nbytes() == cache.expected_nbytes(length, batch=rows, itemsize=4) == expected
    assert sum(tensor.untyped_storage().nbytes() for tensor in cache.storages()) == expected


@torch.no_grad()
def test_cropped_and_reordered_rows():
    model, ids = cla(MIXED), tokens(2, 12)
    cache = pod.PodCache(model.config)
    model(ids[:, :9], past_key_values=cache)
    cache.crop(-4)
    cache.reorder_cache(torch.tensor([1, 1]))
    found = model(ids[[1, 1], 5:], past_key_values=cache).logits
    wanted = plain_logits(stock(), MIXED, ids[1])[5:]
    torch.testing.assert_close(found, wanted.expand(2, -1, -1), rtol=1e-4, atol=1e-4)


def test_no_gradient_flows_through_a_cache():
    model, ids = cla(PAIRS), tokens(1, 6)
    cache = pod.PodCache(model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match="do not flow through tokens that a cache holds"):
        model(ids[:, :1], past_key_values=cache).logits.sum().backward()


@torch.no_grad()
def test_saved_and_exported_models_share_the_same(tmp_path):
    model, ids = cla(MIXED), tokens(1, 20)
    wanted = model(ids, use_cache=False).logits
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.share == "kv" and torch.equal(again(ids, use_cache=False).logits, wanted)

    stock().save_pretrained(tmp_path / "base")
    model = {"base": str(tmp_path / "base"), "share": "kv"}
    module = PodModule(model, {"max_steps": 1, "tokens_per_batch": 20}, blocks=MIXED.anchors.tolist())
    module.configure_model()
    frozen = {name for name, parameter in module.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "kv"}
    groups = module.configure_optimizers()["optimizer"].param_groups
    trained = sum(parameter.numel() for group in groups for parameter in group["params"])
    unused = 2 * 32 * KV_HEADS * DIM
    assert trained == sum(parameter.numel() for parameter in module.parameters()) - unused
    assert module.flops_per_token() == 6 * trained
    assert torch.equal(module.model.eval()(ids, use_cache=False).logits, wanted)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    exported = rebuild(checkpoint)
    assert torch.equal(exported(ids, use_cache=False).logits, wanted)
    # What is unused is there: the weights still load as the family's own.
    kept = dict(exported.named_parameters())
    assert all(torch.equal(kept[name], dict(stock().named_parameters())[name]) for name in frozen)


def test_what_cannot_be_is_refused():
    config = cla(PAIRS).config
    with pytest.raises(ValueError, match="eviction cannot be combined with share='kv'"):
        pod.PodCache(config, eviction=pod.eviction.SnapKV(64))
    with pytest.raises(ValueError, match="eviction cannot be combined with share='kv'"):
        pod.PodCache(config, eviction=pod.eviction.StreamingLLM(64))
    with pytest.raises(ValueError, match="tau cannot be combined with share='kv'"):
        pod.PodCache(config, tau=0.5)
    with pytest.raises(ValueError, match="set tau=None"):
        type(config)(**{**config.to_dict(), "tau": 0.5})


def test_the_recipe():
    recipe = load_recipe(["recipe=llama3-32k-cla-cpt"])
    assert (recipe.model.share, recipe.blocks.size) == ("kv", 2)
    for wrong in ("blocks.file=x.json", "blocks.threshold=0.5"):
        with pytest.raises(RecipeError, match="are both given, wanted one"):
            load_recipe(["recipe=llama3-32k-cla-cpt", wrong])
    with pytest.raises(RecipeError, match="set blocks.size=2"):
        load_recipe(["recipe=llama3-32k", "model.share=kv"])
    assert load_recipe(["recipe=llama3-32k", "model.share=kv", "blocks.file=blocks.json"]).blocks.size is None
    with pytest.raises(RecipeError, match=r"blocks.size must be in \[1, inf\), got 0"):
        load_recipe(["recipe=llama3-32k-cla-cpt", "blocks.size=0"])
    # No token need be distant: near ones are shared too.
    short = ["data.sequence_length=4096", "trainer.tokens_per_batch=4194304"]
    assert load_recipe(["recipe=llama3-32k-cla-cpt", *short]).data.sequence_length == 4096
