"""Early skip (tau) in PodCache and pod.generate: against PoD by its definition, token by token, with plain counts."""

import math

import pytest
import torch
from test_model import BLOCKS, DENSE, GROUPS, HEAD_DIM, HEADS, KV_HEADS, LAYERS, converted, tiny_model, tokens

import pod
from pod.eviction import SnapKV, StreamingLLM
from pod_kernels import SkipStats

SINKS, RECENT = 3, 5


@torch.no_grad()
def plain(stock, ids, prompt, tau, share):
    """Logits [T, V] of one row by the definition, and the counts; positions from `prompt` on are decoded."""
    anchors, counts = BLOCKS.anchors, SkipStats()
    cos, sin = stock.model.rotary_emb(ids[..., None].float(), position_ids=torch.arange(len(ids))[None])
    half = HEAD_DIM // 2

    def rotated(states, head, norm):
        head = states[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        head = head if norm is None else norm(head)
        return head * cos[0] + torch.cat((-head[:, half:], head[:, :half]), dim=-1) * sin[0]

    hidden, queries, keys = stock.model.embed_tokens(ids), [], []
    for index, layer in enumerate(stock.model.layers):
        attention, states = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = attention.q_proj(states), attention.k_proj(states), attention.v_proj(states)
        queries.append([rotated(q, head, getattr(attention, "q_norm", None)) for head in range(HEADS)])
        keys.append([rotated(k, head, getattr(attention, "k_norm", None)) for head in range(KV_HEADS)])
        out = torch.zeros(len(ids), HEADS * HEAD_DIM)
        for group in range(KV_HEADS):
            anchor = int(anchors[index, group])
            value = v[:, group * HEAD_DIM : (group + 1) * HEAD_DIM]
            for i in range(len(ids)):
                is_near = torch.tensor([j < SINKS or i - j < RECENT for j in range(i + 1)])
                skips = []
                for head in range(group * GROUPS, (group + 1) * GROUPS):
                    near = keys[index][group][: i + 1] @ queries[index][head][i]
                    far = keys[anchor][group][: i + 1] @ queries[anchor if share == "scores" else index][head][i]
                    logits = torch.where(is_near, near, far) / math.sqrt(HEAD_DIM)
                    gate = float(torch.softmax(logits, dim=0)[is_near].sum())
                    may = anchor != index and i >= prompt and not bool(is_near.all())
                    if may:
                        skips.append(gate >= tau)
                        assert abs(gate - tau) > 1e-6 or tau == 1
                    used = is_near if may and gate >= tau else torch.ones_like(is_near)
                    weights = torch.softmax(logits[used], dim=0)
                    out[i, head * HEAD_DIM : (head + 1) * HEAD_DIM] = weights @ value[: i + 1][used]
                distant = int((~is_near).sum())
                counts.decisions += len(skips)
                counts.skipped += sum(skips)
                counts.distant_values += distant if skips else 0
                counts.unread_values += distant if skips and all(skips) else 0
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return stock.lm_head(stock.model.norm(hidden)), counts


@torch.no_grad()
def decoded(model, cache, ids, mask, prompt):
    """Logits of a prefill of `prompt` columns and one token after the other."""
    steps = []
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        positions = (mask[:, :last].cumsum(1) - 1).clamp(min=0)[:, first:]
        inputs = dict(attention_mask=mask[:, :last], position_ids=positions)
        steps.append(model(ids[:, first:last], past_key_values=cache, **inputs).logits)
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("tau", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("family, share", [("llama", "scores"), ("qwen2", "scores"), ("qwen3", "keys")])
def test_equals_the_definition_with_left_padding(family, share, tau):
    stock = tiny_model(family)
    model = pod.convert(stock, BLOCKS, sink_size=SINKS, recent_size=RECENT, share=share)
    ids, lengths, prompt = tokens(3, 26), (26, 8, 19), 20
    mask = (torch.arange(26) >= 26 - torch.tensor(lengths)[:, None]).long()
    cache = pod.PodCache(model.config, tau=tau)
    logits = decoded(model, cache, ids, mask, prompt)
    total = SkipStats()
    for row, length in enumerate(lengths):
        expected, counts = plain(stock, ids[row, 26 - length :], prompt - 26 + length, tau, share)
        torch.testing.assert_close(logits[row, 26 - length :], expected, atol=2e-4, rtol=1e-3)
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
    assert cache.stats == total and total.decisions > total.skipped
    assert tau > 0.3 or 0 < total.unread_values < total.distant_values
    cache.reset()
    assert cache.stats == SkipStats()


def test_none_changes_nothing_and_the_config_is_the_default():
    model, ids = converted(tiny_model()), tokens(2, 26)
    mask = torch.ones_like(ids)
    caches = {"none": pod.PodCache(model.config), "tau": pod.PodCache(model.config, tau=0.3)}
    model.config.tau = 0.3
    caches["config"] = pod.PodCache(model.config)
    caches["over"] = pod.PodCache(model.config, tau=1.0)
    assert [cache.tau for cache in caches.values()] == [None, 0.3, 0.3, 1.0]
    logits = {name: decoded(model, cache, ids, mask, 20) for name, cache in caches.items()}
    assert caches["none"].stats == SkipStats() and caches["tau"].stats.skipped > 0
    assert torch.equal(logits["config"], logits["tau"])
    assert torch.equal(logits["none"][:, :20], logits["tau"][:, :20])  # a prefill never skips
    assert not torch.allclose(logits["none"], logits["tau"], atol=1e-3)
    torch.testing.assert_close(logits["over"], logits["none"], atol=1e-4, rtol=0)
    output = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert output.past_key_values.tau == 0.3 and output.past_key_values.stats.decisions > 0


def test_dense_models_have_nothing_to_skip():
    model, ids = converted(tiny_model(), DENSE), tokens(2, 26)
    cache = pod.PodCache(model.config, tau=0.0)
    logits = decoded(model, cache, ids, torch.ones_like(ids), 20)
    expected = decoded(model, pod.PodCache(model.config), ids, torch.ones_like(ids), 20)
    assert torch.equal(logits, expected) and cache.stats == SkipStats()
    assert len(model.model.layers) == LAYERS


def test_refused():
    config = converted(tiny_model()).config
    for tau in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"tau must be between 0 and 1, or None; got {tau}"):
            pod.PodCache(config, tau=tau)
    for method in (SnapKV(64, window=4), StreamingLLM(64)):
        with pytest.raises(ValueError, match=r"tau=0\.7 cannot be combined with eviction"):
            pod.PodCache(config, eviction=method, tau=0.7)
    config.tau = 0.5
    with pytest.raises(ValueError, match=r"tau=0\.5 cannot be combined with eviction.*config\.tau = None"):
        pod.PodCache(config, eviction=SnapKV(64, window=4))
