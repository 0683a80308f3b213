"""Window attention as a model option (`share: window`), against plain loops and a stock model with an explicit mask."""

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pod
from pod.export import rebuild
from pod.recipe.loading import load_recipe
from pod.recipe.schema import RecipeError
from pod.training.module import PodModule
from pod_kernels import shared_score_attention

LAYERS, KV_HEADS, VOCAB = 3, 2, 61
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def plain_window(q: Tensor, k: Tensor, v: Tensor, sinks: int, recent: int, length: int) -> Tensor:
    """One query after the other, of the last `length` tokens of one row: [H, T, D]."""
    heads, count, dim = q.shape
    groups, out = heads // k.shape[0], torch.zeros_like(q)
    for head in range(heads):
        keys, values = (tensor[head // groups, count - length :] for tensor in (k, v))
        for i in range(length):
            seen = sorted({j for j in range(i + 1) if j < sinks} | set(range(max(0, i - recent + 1), i + 1)))
            logits = keys[seen] @ q[head, count - length + i] / math.sqrt(dim)
            out[head, count - length + i] = torch.softmax(logits, dim=0) @ values[seen]
    return out


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("sinks, recent, lengths", [(0, 4, (13, 5)), (3, 2, (13, 4)), (2, 5, (7, 1)), (0, 1, (6, 6))])
def test_attention_and_gradients_are_those_of_plain_loops(backend, sinks, recent, lengths):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, max(lengths), 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = torch.stack(
        [plain_window(*(t[row] for t in inputs), sinks, recent, length) for row, length in enumerate(lengths)]
    )
    sizes = {"sink_size": sinks, "recent_size": recent, "lengths": torch.tensor(lengths), "backend": backend}
    out, gate = shared_score_attention(*inputs, **sizes, window_only=True, return_gate=True)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    assert bool((gate == 1).all())
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, upstream)
    for mine, theirs in zip(ours, torch.autograd.grad(wanted, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="pass no q_distant"):
        shared_score_attention(*inputs, inputs[0], inputs[1], **sizes, window_only=True)


def stock() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**FIELDS, attn_implementation="eager")).eval()


def window_model(sinks: int, recent: int):
    return pod.convert(stock(), pod.LayerBlocks.dense(LAYERS, KV_HEADS), sinks, recent, share="window")


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def masked_logits(ids: Tensor, sinks: int, recent: int, documents: Tensor | None = None) -> Tensor:
    """A stock model's, that is told every pair it may see."""
    count = ids.shape[1]
    mask = torch.full((len(ids), 1, count, count), torch.finfo(torch.float32).min)
    positions = torch.zeros_like(ids)
    for row in range(len(ids)):
        start = 0
        for i in range(count):
            if documents is not None and i and documents[row, i] != documents[row, i - 1]:
                start = i
            positions[row, i] = i - start
            for j in range(start, i + 1):
                if j - start < sinks or i - j < recent:
                    mask[row, 0, i, j] = 0
    position_ids = torch.arange(count)[None] if documents is None else positions
    return stock()(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits


@pytest.mark.parametrize("sinks, recent", [(0, 4), (3, 5), (2, 40)])
def test_the_model_is_the_stock_one_with_a_mask(sinks, recent):
    model, ids = window_model(sinks, recent), tokens(2, 19)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
        documents = (torch.arange(19) >= torch.tensor([[7], [12]])).long()
        positions = torch.arange(19) - documents * torch.tensor([[7], [12]])
        packed = model(ids, document_ids=documents, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, masked_logits(ids, sinks, recent), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed, masked_logits(ids, sinks, recent, documents), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("sinks, recent", [(0, 4), (3, 5), (0, 2), (5, 30)])
@pytest.mark.parametrize("chunks", [(19,), (7, 1, 1, 6, 4), (1,) * 19])
def test_decoding_is_recomputing(sinks, recent, chunks):
    """Left-padded rows, one of them shorter than the sinks at first."""
    model, ids = window_model(sinks, recent), tokens(3, 19)
    mask = (torch.arange(19) >= torch.tensor([[0], [6], [3]])).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache, found, seen = pod.PodCache(model.config), [], 0
    for chunk in chunks:
        part = slice(seen, seen + chunk)
        seen += chunk
        out = model(ids[:, part], attention_mask=mask[:, :seen], position_ids=positions[:, part], past_key_values=cache)
        found.append(out.logits)
    found = torch.cat(found, dim=1)
    for row, start in enumerate((0, 6, 3)):
        wanted = masked_logits(ids[row : row + 1, start:], sinks, recent)
        torch.testing.assert_close(found[row : row + 1, start:], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_cache_is_bounded_and_generate_uses_it():
    model = window_model(2, 6)
    prompt = tokens(2, 15)
    ids = prompt
    for _ in range(9):
        ids = torch.cat([ids, masked_logits(ids, 2, 6)[:, -1:].argmax(dim=-1)], dim=1)
    out = model.generate(prompt, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, ids)
    cache = out.past_key_values
    vectors = sum(tensor.nbytes for tensor in cache.storages() if tensor.is_floating_point())
    # Keys and values of every layer and KV head: 2 sinks and the last 5; the next token is its own sixth.
    assert vectors == 2 * LAYERS * KV_HEADS * 2 * (2 + 5) * 8 * 4 == cache.expected_nbytes(10**6, batch=2, itemsize=4)
    assert cache.positions(1)[0, 0].tolist() == [0, 1, *range(18, 23)]
    for _ in range(30):
        model(prompt, past_key_values=cache)
    assert sum(tensor.nbytes for tensor in cache.storages() if tensor.is_floating_point()) == vectors


@torch.no_grad()
def test_saved_and_exported_models_keep_the_window(tmp_path):
    model, ids = window_model(2, 6), tokens(1, 20)
    wanted = model(ids, use_cache=False).logits
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(ids, use_cache=False).logits, wanted)

    stock().save_pretrained(tmp_path / "base")
    model = {"base": str(tmp_path / "base"), "sink_size": 2, "recent_size": 6, "share": "window"}
    module = PodModule(model, {"max_steps": 1, "tokens_per_batch": 20})
    module.configure_model()
    assert torch.equal(module.model.eval()(ids, use_cache=False).logits, wanted)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    assert torch.equal(rebuild(checkpoint)(ids, use_cache=False).logits, wanted)


def test_what_means_nothing_is_refused():
    with pytest.raises(ValueError, match="no distant tokens to share"):
        pod.convert(stock(), pod.LayerBlocks([[0, 0]] * LAYERS), 2, 6, share="window")
    with pytest.raises(ValueError, match="recent_size >= 2"):
        window_model(0, 1)
    with pytest.raises(ValueError, match="without eviction"):
        pod.PodCache(window_model(0, 4).config, eviction=pod.eviction.StreamingLLM(8))
    with pytest.raises(RecipeError, match="set blocks.kv_saving=0"):
        load_recipe(["recipe=llama3-32k", "model.share=window"])
    assert load_recipe(["recipe=llama3-32k-wa-cpt"]).model.share == "window"
