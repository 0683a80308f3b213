"""Tiny random PoD models, and how to feed them."""

from functools import cache as memoized

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import pod

ANCHORS = ((0, 0), (0, 1), (0, 1), (3, 1))  # blocks of one, two, three layers, begun in different layers
DENSE = tuple((layer, layer) for layer in range(3))
VOCAB = 61
STOCK = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@memoized
def stock_model(family: str, layers: int):
    config_class, model_class = STOCK[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return model_class(config).eval()


@memoized
def build(family="llama", share="scores", anchors=ANCHORS, sinks=2, recent=6):
    """A tiny random PoD model in float32."""
    stock = stock_model(family, len(anchors))
    blocks = pod.LayerBlocks([list(row) for row in anchors])
    return pod.convert(stock, blocks, sink_size=sinks, recent_size=recent, share=share)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fed(model, cache, ids: Tensor, mask: Tensor | None = None, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of ids, fed in chunks (one when not told), with `mask` [B, all tokens so far]."""
    seen, logits = cache.get_seq_length(), []
    for chunk in ids.split(list(chunks) or [ids.shape[1]], dim=1):
        kwargs = {}
        if mask is not None:
            so_far = mask[:, : seen + chunk.shape[1]]
            positions = (so_far.cumsum(dim=1) - 1).clamp(min=0)
            kwargs = dict(attention_mask=so_far, position_ids=positions[:, -chunk.shape[1] :])
        logits.append(model(chunk, past_key_values=cache, **kwargs).logits)
        seen += chunk.shape[1]
    return torch.cat(logits, dim=1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
