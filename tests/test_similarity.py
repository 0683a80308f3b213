"""pod.similarity against plain loops over `output_attentions`; padding, memory, side effects, errors, the picture."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pod
from pod.model.probe import watch
from pod.similarity import (
    Damage,
    Similarity,
    _common_blocks,
    _divergence_sums,
    attention_similarity,
    plot_damage,
    plot_similarity,
    sharing_damage,
)

LAYERS, HEADS, KV_HEADS = 5, 4, 2
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": None}),
}


def tiny_model(family="llama", attn_implementation="eager", **overrides):
    """A random GQA model whose weights are large enough that its attention is far from uniform."""
    config_class, model_class, extra = FAMILIES[family]
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = config_class(**{**sizes, **extra, **overrides}, attn_implementation=attn_implementation)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def tokens(*shape, seed=1):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def kl(p, m):
    """Kullback-Leibler divergence of two distributions [N] in bits; a term with p = 0 is 0."""
    p, m = p[p > 0], m[p > 0]
    return (p * torch.log2(p / m)).sum()


def expected_similarity(samples, last_q, keep=None):
    """Plain loops in float64. samples: attentions [L, H, T, T] of each; keep(i, j): is the pair compared?"""
    sums, count = torch.zeros(KV_HEADS, LAYERS, LAYERS, dtype=torch.float64), 0
    for attentions in samples:
        length = attentions.shape[-1]
        for i in range(length - last_q, length):
            keys = [j for j in range(i + 1) if keep is None or keep(i, j)]
            if not keys:
                continue
            count += HEADS // KV_HEADS
            rows = attentions[:, :, i, keys].double()
            rows = rows / rows.sum(-1, keepdim=True)
            for head in range(HEADS):
                for a in range(LAYERS):
                    for b in range(LAYERS):
                        p, r = rows[a, head], rows[b, head]
                        m = (p + r) / 2
                        sums[head // (HEADS // KV_HEADS), a, b] += 1 - (kl(p, m) + kl(r, m)) / 2
    return (sums / count).float()


def attentions_of(model, input_ids, attention_mask=None):
    """Per row of the batch [L, H, T, T], from the stock model's eager attention."""
    with torch.no_grad():
        out = model(input_ids=input_ids, attention_mask=attention_mask, output_attentions=True, use_cache=False)
    return list(torch.stack(out.attentions).transpose(0, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_output_attentions(family):
    model = tiny_model(family)
    batches = [tokens(2, 19), tokens(1, 12, seed=2)]
    got = attention_similarity(model, batches, last_q=4, progress=False)
    expected = expected_similarity([row for batch in batches for row in attentions_of(model, batch)], last_q=4)
    assert got.shape == (KV_HEADS, LAYERS, LAYERS) and got.dtype == torch.float32 and got.device.type == "cpu"
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    off_diagonal = got[:, ~torch.eye(LAYERS, dtype=torch.bool)]
    assert off_diagonal.max() < 0.95 and off_diagonal.std() > 0.01  # the comparison means something
    assert torch.equal(got, got.transpose(1, 2))
    assert torch.equal(got.diagonal(dim1=1, dim2=2), torch.ones(KV_HEADS, LAYERS))
    assert got.min() >= 0 and got.max() <= 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sink_size,recent_size", [(2, 5), (0, 1), (3, 12)])
def test_distant_only_equals_output_attentions(family, sink_size, recent_size):
    """With (3, 12) the samples of 19, 16, 13 and 6 tokens have 4, 1, 0 and 0 queries with distant keys."""
    model = tiny_model(family)
    batches = [tokens(2, 19), tokens(1, 16, seed=2), tokens(1, 13, seed=3), tokens(1, 6, seed=4)]
    got = attention_similarity(
        model, batches, 4, distant_only=True, sink_size=sink_size, recent_size=recent_size, progress=False
    )
    expected = expected_similarity(
        [row for batch in batches for row in attentions_of(model, batch)],
        last_q=4,
        keep=lambda i, j: j >= sink_size and i - j >= recent_size,
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("distant_only", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_left_padding_counts_nowhere(family, distant_only):
    model = tiny_model(family)
    rows = [tokens(1, length, seed=length) for length in (17, 9, 23)]
    input_ids = torch.cat([torch.nn.functional.pad(row, (23 - row.shape[1], 0), value=5) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (23 - row.shape[1], 0)) for row in rows])
    options = {"last_q": 4, "distant_only": distant_only, "sink_size": 2, "recent_size": 3, "progress": False}
    padded = attention_similarity(model, [{"input_ids": input_ids, "attention_mask": mask}], **options)
    assert torch.equal(padded, attention_similarity(model, rows, **options))
    # ... and the model itself, given the padded batch, attends alike.
    attentions = [
        attention[:, :, 23 - row.shape[1] :, 23 - row.shape[1] :]
        for attention, row in zip(attentions_of(model, input_ids, mask), rows, strict=True)
    ]
    keep = (lambda i, j: j >= 2 and i - j >= 3) if distant_only else None
    torch.testing.assert_close(padded, expected_similarity(attentions, 4, keep), rtol=0, atol=1e-5)


def test_sdpa_and_batching_give_the_same():
    batch = tokens(3, 21)
    eager = attention_similarity(tiny_model(), [batch], 5, progress=False)
    sdpa = attention_similarity(tiny_model(attn_implementation="sdpa"), [{"input_ids": batch}], 5, progress=True)
    torch.testing.assert_close(sdpa, eager, rtol=0, atol=1e-5)
    assert torch.equal(attention_similarity(tiny_model(), batch.split(1), 5, progress=False), eager)


def test_one_layer_and_last_q_of_whole_sample():
    model = tiny_model(num_hidden_layers=1)
    assert torch.equal(attention_similarity(model, [tokens(1, 7)], 7, progress=False), torch.ones(KV_HEADS, 1, 1))


def test_divergence_of_identical_and_disjoint_rows():
    same = torch.softmax(torch.randn(1, 2, 3, 40, generator=torch.Generator().manual_seed(0)) * 5, -1)
    left, right = torch.zeros(1, 2, 3, 40), torch.zeros(1, 2, 3, 40)
    left[..., :20], right[..., 20:] = 1 / 20, 1 / 20
    sums = _divergence_sums(torch.cat([same, same, left, right]))  # each of 3 rows
    assert sums.shape == (2, 4, 4) and sums.dtype == torch.float64
    assert torch.equal(sums, sums.transpose(1, 2))
    assert sums[:, 0, 1].abs().max() < 1e-6
    torch.testing.assert_close(sums[:, 2, 3], torch.full((2,), 3.0, dtype=torch.float64), rtol=0, atol=1e-5)


def test_divergence_in_chunks_equals_the_definition(monkeypatch):
    rows = torch.softmax(torch.randn(4, 2, 3, 50, generator=torch.Generator().manual_seed(0)) * 4, -1)
    p, r = rows.double()[:, None], rows.double()[None]
    m = (p + r) / 2
    expected = ((p * (p / m).log2() + r * (r / m).log2()) / 2).sum((-1, -2)).permute(2, 0, 1)
    torch.testing.assert_close(_divergence_sums(rows), expected, rtol=0, atol=1e-5)
    monkeypatch.setattr("pod.similarity._SCRATCH_BYTES", 7 * 4 * 2 * 3 * 4)  # 7 keys at a time, the last chunk is short
    torch.testing.assert_close(_divergence_sums(rows), expected, rtol=0, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gives back."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def layers_of(model, input_ids):
    """Of one row and every layer: queries, keys and values as its attention gets them, and its output."""
    seen, hidden = [], []

    def record(module, query, key, value, attention_mask, **kwargs):
        seen.append((query[0].double(), key[0].double(), value[0].double()))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", record)
    ALL_MASK_ATTENTION_FUNCTIONS.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    handles = [
        layer.register_forward_hook(lambda _, __, out: hidden.append(out[0].double())) for layer in model.model.layers
    ]
    try:
        model.config._attn_implementation = "recording"
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()
    return [(*qkv, out) for qkv, out in zip(seen, hidden, strict=True)]


def gradients_of(model, row, draws):
    """[L, T, C]: the gradient of the loss of tokens drawn from the model, at what each layer's attention gives out."""
    added = torch.zeros(LAYERS, *row.shape[1:], model.config.hidden_size, requires_grad=True)
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out, extra=extra: (out[0] + extra, *out[1:]))
        for layer, extra in zip(model.model.layers, added, strict=True)
    ]
    logits = model(row, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draws)
    (gradients,) = torch.autograd.grad(-logits.log_softmax(-1).gather(-1, drawn).sum(), added)
    return gradients.double()


def expected_damage(model, rows, sink_size, recent_size, queries, fisher=False):
    """Plain loops in float64: [H_kv, L, L]."""
    draws = torch.Generator().manual_seed(0)
    groups, count = HEADS // KV_HEADS, 0
    costs = torch.zeros(KV_HEADS, LAYERS, LAYERS, dtype=torch.float64)
    for row in rows:
        layers, length = layers_of(model, row), row.shape[1]
        gradients = gradients_of(model, row, draws) if fisher else None
        first = sink_size + recent_size
        for i in (
            torch.linspace(first, length - 1, min(queries, length - first), dtype=torch.double).round().long().tolist()
        ):
            count += 1
            for layer in range(LAYERS):
                q, _, v, hidden = layers[layer]
                o_proj = model.model.layers[layer].self_attn.o_proj.weight.double()
                scale = q.shape[-1] ** -0.5

                def attended(head, anchor, i=i, layer=layer, v=v, scale=scale, layers=layers):
                    logits = []
                    for j in range(i + 1):
                        near = j < sink_size or i - j < recent_size
                        q, k, *_ = layers[layer if near else anchor]
                        logits.append(q[head, i] @ k[head // groups, j] * scale)
                    return torch.stack(logits).softmax(0) @ v[head // groups, : i + 1]

                own = [attended(head, layer) for head in range(HEADS)]
                for anchor in range(layer):
                    for kv_head in range(KV_HEADS):
                        changed = list(own)
                        for head in range(kv_head * groups, (kv_head + 1) * groups):
                            changed[head] = attended(head, anchor)
                        change = o_proj @ (torch.cat(changed) - torch.cat(own))
                        if fisher:
                            costs[kv_head, anchor, layer] += (change @ gradients[layer, i]).square()
                        else:
                            costs[kv_head, anchor, layer] += change.square().sum() / hidden[i].square().sum()
    return (costs / count).float()


@pytest.mark.parametrize("family,sink_size,recent_size", [*((family, 2, 5) for family in FAMILIES), ("llama", 0, 1)])
def test_damage_equals_direct_recomputation(family, sink_size, recent_size):
    model = tiny_model(family)
    rows = [tokens(1, 17), tokens(1, 9, seed=2), tokens(1, 7, seed=3)]  # with (2, 5) the last has no distant key
    usable = [row for row in rows if row.shape[1] > sink_size + recent_size]
    got = sharing_damage(model, rows, sink_size, recent_size, queries=4, progress=False)
    assert got.shape == (KV_HEADS, LAYERS, LAYERS) and got.dtype == torch.float32 and got.device.type == "cpu"
    expected = expected_damage(model, usable, sink_size, recent_size, 4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    upper = torch.ones(LAYERS, LAYERS, dtype=torch.bool).triu(1)
    assert (got[:, upper] > 1e-5).all() and got[:, upper].std() > 1e-4 and not got[:, ~upper].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_damage_equals_direct_recomputation(family):
    model = tiny_model(family)
    rows = [tokens(1, 17), tokens(1, 9, seed=2)]
    frozen = next(model.parameters()).requires_grad_(False)
    got = sharing_damage(model, rows, 2, 5, queries=4, fisher=True, progress=False)
    torch.testing.assert_close(got, expected_damage(model, rows, 2, 5, 4, fisher=True), rtol=1e-3, atol=1e-9)
    assert got.any() and not frozen.requires_grad and all(p.grad is None for p in model.parameters())
    assert sum(not p.requires_grad for p in model.parameters()) == 1  # as they were
    converted = pod.convert(model, pod.LayerBlocks.dense(LAYERS, KV_HEADS), 2, 5)
    again = sharing_damage(converted, rows, 2, 5, queries=4, fisher=True, progress=False)
    torch.testing.assert_close(again, got, rtol=1e-3, atol=1e-9)


def test_damage_of_a_pod_model_without_shared_layers_is_the_stock_models():
    model, rows = tiny_model(), [tokens(2, 15)]
    converted = pod.convert(model, pod.LayerBlocks.dense(LAYERS, KV_HEADS), 2, 3)
    stock = sharing_damage(model, rows, 2, 3, queries=5, progress=False)
    torch.testing.assert_close(sharing_damage(converted, rows, 2, 3, queries=5, progress=False), stock)


def test_damage_of_left_padded_rows_and_in_one_pass_with_the_similarity():
    model, rows = tiny_model("qwen3"), [tokens(1, length, seed=length) for length in (17, 9, 23)]
    input_ids = torch.cat([torch.nn.functional.pad(row, (23 - row.shape[1], 0), value=5) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (23 - row.shape[1], 0)) for row in rows])
    alone = sharing_damage(model, rows, 2, 3, queries=6, progress=False)
    assert torch.equal(
        sharing_damage(model, [{"input_ids": input_ids, "attention_mask": mask}], 2, 3, queries=6, progress=False),
        alone,
    )
    similarity, damage = Similarity(4), Damage(2, 3, 6)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    watch(model, rows, [similarity, damage], "both", progress=False)
    assert len(forwards) == 3
    assert torch.equal(damage.result(), alone)
    assert torch.equal(similarity.result(), attention_similarity(model, rows, 4, progress=False))


def test_damage_refuses():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"longest has 9 tokens.*4 \+ 5 = 9"):
        sharing_damage(model, [tokens(1, 9)], 4, 5, progress=False)
    with pytest.raises(ValueError, match="recent_size must be >= 1 token"):
        sharing_damage(model, [tokens(1, 9)], 4, 0, progress=False)
    with pytest.raises(ValueError, match="queries must be at least 1, got 0"):
        sharing_damage(model, [tokens(1, 9)], 1, 1, queries=0, progress=False)
    with pytest.raises(ValueError, match="no samples"):
        sharing_damage(model, [], 1, 1, progress=False)
    with torch.no_grad():
        model.model.layers[3].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        sharing_damage(model, [tokens(1, 9)], 1, 1, progress=False)


def test_plot_damage(tmp_path):
    costs = torch.rand(KV_HEADS, LAYERS, LAYERS, generator=torch.Generator().manual_seed(0)).triu(1)
    for name, values in {"some": costs, "one": torch.zeros(1, 1, 1)}.items():
        plot_damage(values, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plot_damage(costs, tmp_path / "blocks.png", pod.LayerBlocks.uniform(LAYERS, KV_HEADS, 2))
    assert (tmp_path / "blocks.png").read_bytes() != (tmp_path / "some.png").read_bytes()
    with pytest.raises(ValueError, match=r"costs must be \[H_kv, L, L\], got \[5, 5\]"):
        plot_damage(costs[0], tmp_path / "bad.png")


def test_damage_never_forms_a_square():
    length = 1024
    with LargestTensor() as largest:
        sharing_damage(tiny_model(attn_implementation="sdpa"), [tokens(1, length)], 2, 64, queries=4, progress=False)
    assert largest.numel <= max(LAYERS * HEADS * 4 * length, length * 96)


@pytest.mark.parametrize("distant_only", [False, True])
def test_never_forms_a_square(distant_only):
    length = 1024
    with LargestTensor() as largest:
        attention_similarity(
            tiny_model(attn_implementation="sdpa"),
            [tokens(1, length)],
            last_q=4,
            distant_only=distant_only,
            recent_size=64,
            progress=False,
        )
    assert largest.numel <= max(LAYERS * HEADS * 4 * length, length * 96)  # the rows, or the MLP's hidden layer


def test_restores_mode_and_removes_hooks():
    model = tiny_model()
    model.train()
    model.model.layers[1].eval()  # partly frozen models stay as they were
    before = [module.training for module in model.modules()]

    def untouched():
        no_hooks = all(not module._forward_pre_hooks for module in model.modules())
        return no_hooks and [module.training for module in model.modules()] == before

    result = attention_similarity(model, [tokens(1, 9)], 2, progress=False)
    assert untouched() and not result.requires_grad and torch.is_grad_enabled()
    with pytest.raises(ValueError):
        attention_similarity(model, [tokens(1, 9), tokens(1, 1)], 2, progress=False)
    assert untouched()

    def fail(*args, **kwargs):
        raise KeyError("broken layer")

    model.model.layers[2].mlp.forward = fail
    with pytest.raises(KeyError, match="broken layer"):
        attention_similarity(model, [tokens(1, 9)], 2, progress=False)
    assert untouched()


def test_refuses_bad_arguments():
    model = tiny_model()

    def similarity(batches, last_q=4, **options):
        return attention_similarity(model, batches, last_q, progress=False, **options)

    with pytest.raises(ValueError, match="no samples"):
        similarity([])
    with pytest.raises(ValueError, match="last_q must be at least 1, got 0"):
        similarity([tokens(1, 9)], 0)
    with pytest.raises(ValueError, match="sink_size must be >= 0 tokens, got -1"):
        similarity([tokens(1, 9)], sink_size=-1)
    with pytest.raises(ValueError, match="recent_size must be >= 1 token"):
        similarity([tokens(1, 9)], recent_size=0)
    with pytest.raises(ValueError, match="3 tokens, fewer than last_q=4"):
        similarity([tokens(1, 3)])
    with pytest.raises(ValueError, match=r"longest has 9 tokens.*4 \+ 5 = 9"):
        similarity([tokens(1, 8), tokens(1, 9)], distant_only=True, sink_size=4, recent_size=5)
    with pytest.raises(ValueError, match=r"\[B, T\].*got \[9\]"):
        similarity(tokens(1, 9))  # a batch where a list of batches is wanted
    with pytest.raises(ValueError, match="list"):
        similarity([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="input_ids"):
        similarity([{"labels": tokens(1, 9)}])
    with pytest.raises(ValueError, match="must be alike"):
        similarity([{"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 8)}])


@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1]])
def test_refuses_padding_that_is_not_left(mask):
    batch = {"input_ids": tokens(1, 6), "attention_mask": torch.tensor([mask])}
    with pytest.raises(ValueError, match="right padding"):
        attention_similarity(tiny_model(), [batch], 2, progress=False)


def test_refuses_other_models():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*q_proj"):
        attention_similarity(gpt2, [tokens(1, 9)], 2, progress=False)
    with pytest.raises(ValueError, match="MistralForCausalLM.*sliding_attention"):
        attention_similarity(tiny_model("mistral", sliding_window=8), [tokens(1, 9)], 2, progress=False)
    sliding = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM.*: 3 \(sliding_attention\), 4 \(sliding_attention\)"):
        attention_similarity(sliding, [tokens(1, 9)], 2, progress=False)


def test_refuses_scores_that_are_not_finite():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[3].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        attention_similarity(model, [tokens(1, 9)], 2, progress=False)


def test_the_same_inside_a_device_context():
    """With another default device the sums stay on the CPU. "meta" stands for a GPU: its numbers cannot be read."""
    model, batch = tiny_model(), tokens(1, 9)
    with torch.device("meta"):
        inside = attention_similarity(model, [batch], 2, progress=False)
    assert torch.equal(inside, attention_similarity(model, [batch], 2, progress=False))


def test_plot_similarity(tmp_path):
    similarity = torch.rand(KV_HEADS, LAYERS, LAYERS, generator=torch.Generator().manual_seed(0))
    common = torch.tensor([[0, 0], [0, 0], [2, 2], [3, 3], [3, 3]])
    differing = torch.tensor([[0, 0], [0, 1], [2, 2], [3, 3], [3, 3]])
    assert _common_blocks(common) == [(0, 2), (2, 1), (3, 2)]
    assert _common_blocks(differing) == []
    pictures = []
    for name, blocks in {"none": None, "common": common, "differing": differing}.items():
        path = tmp_path / f"{name}.png"
        plot_similarity(similarity, path, None if blocks is None else SimpleNamespace(anchors=blocks))
        pictures.append(path.read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[2] != pictures[1]  # boxes only where all heads agree
    with pytest.raises(ValueError, match=r"\[H_kv, L, L\], got \[5, 5\]"):
        plot_similarity(similarity[0], tmp_path / "bad.png")
    with pytest.raises(ValueError, match=r"\[4, 2\].*\[5, 2\]"):
        plot_similarity(similarity, tmp_path / "bad.png", SimpleNamespace(anchors=common[:4]))
