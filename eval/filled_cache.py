"""A cache as it stands after any number of tokens, and attention to it, without running the model."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from pod.cache import PodCache

FILLED_AT_ONCE = 1024


def new_cache(model: PreTrainedModel, length: int) -> Cache:
    """An empty cache with room for `length` tokens: PoD's for a PoD model, else transformers' own."""
    if hasattr(model.config, "share"):
        return PodCache(model.config, max_length=length)
    return DynamicCache(config=model.config)


def fill(cache: Cache, model: PreTrainedModel, batch: int, count: int) -> None:
    """Put `count` random tokens into every layer of a cache, without attention."""
    config = model.config
    # Concatenation copies at every turn what is there.
    at_once = FILLED_AT_ONCE if isinstance(cache, PodCache) else count
    for first in range(0, count, at_once):
        shape = (batch, config.num_key_value_heads, min(at_once, count - first), config.head_dim)
        k, v = torch.randn(2, *shape, device=model.device, dtype=model.dtype)
        write(cache, model, k, v, received(cache, model, batch, shape[2]))


def received(cache: Cache, model: PreTrainedModel, batch: int, count: int) -> Tensor | None:
    """Random attention that the slots of a cascade of a dense model, and `count` new tokens, received; else None."""
    if not isinstance(cache, PodCache) or cache.eviction is None:
        return None
    used = min(cache.get_seq_length(), cache._storage.cascades.slots)
    kv_heads = model.config.num_key_value_heads
    groups = model.config.num_attention_heads // kv_heads
    return torch.rand(kv_heads, batch, groups, used + count, device=model.device)


def write(cache: Cache, model: PreTrainedModel, k: Tensor, v: Tensor, sums: Tensor | None = None) -> None:
    """Put the same keys and values [B, H_kv, T, D] into every layer of a cache, without attention.

    Args:
        cache: of `new_cache`, or a PodCache with a cascade.
        model: that the cache is of.
        k, v: of T new tokens.
        sums: what `received` says; for a cascade.
    """
    layers = range(model.config.num_hidden_layers)
    if not isinstance(cache, PodCache):
        for layer in layers:
            cache.update(k, v, layer)
        return
    cache.begin(model.config, k[:, 0], None, model.model.rotary_emb)
    for layer in layers:
        if sums is None:
            cache.write(layer, k, v)
        else:
            cache._storage.write(layer, k.transpose(0, 1), v.transpose(0, 1), sums)
    cache.finish()


def attend(cache: PodCache, model: PreTrainedModel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Store the same k, v [B, H_kv, T, D] in every layer and attend from q [B, H, T, D]: a forward's attention."""
    cache.begin(model.config, k[:, 0], None, model.model.rotary_emb)
    for layer in range(len(model.model.layers)):
        out = cache.attend(layer, q, k, v, q, k, q.shape[-1] ** -0.5)
    cache.finish()
    return out
