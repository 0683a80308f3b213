"""KVzip's second look at a context (arXiv 2505.23416): the model repeats it, and what it looked at stays in the cache.

    cache = pod.PodCache(model.config, eviction=pod.eviction.KVzip(budget=0.3))
    model(context, past_key_values=cache)
    pod.reconstruct(model, cache, context, tokenizer)

Legend: B rows, A KV heads anchored in a layer, G query heads per KV head, T tokens fed, N of the context, C of a chunk,
D head dimension.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod.cache import PodCache

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens that the request for a later chunk names
_QUERIES = 128  # whose weights are in memory at once


@torch.no_grad()
def reconstruct(
    model: PreTrainedModel,
    cache: PodCache,
    input_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: Tensor | None = None,
    suffix: str = "\n",
) -> None:
    """Evict from a cache that holds a context and nothing else, whose method is `pod.eviction.KVzip`.

    Args:
        model: the PoD model that filled it, in evaluation mode.
        cache: of the context, in one or several forwards that are one prefill.
        input_ids: [B, N] the context.
        tokenizer: makes tokens of the requests; None feeds the context's tokens alone.
        attention_mask: [B, N], 0 for padding on the left; None when all are real.
        suffix: text behind a request; where the context is a user's turn, how a chat template ends it.

    What is fed needs room: where the cache's storage is full, a larger one stands beside it meanwhile.

    Raises:
        ValueError: the cache's method does not wait for this, or it holds other tokens than these.
    """
    columns, method = cache.get_seq_length(), cache.eviction
    if not getattr(method, "waits", False):
        raise ValueError(f"reconstruct is for a cache with pod.eviction.KVzip, this one has {method!r}")
    if input_ids.shape != (cache.batch_size, columns):
        raise ValueError(
            f"reconstruct needs the tokens that the cache holds, [{cache.batch_size}, {columns}], got "
            f"{list(input_ids.shape)}"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.dtype)
    rows = [ids[real.bool()] for ids, real in zip(input_ids, mask, strict=True)]
    longest = max(len(row) for row in rows)
    scores: dict[int, Tensor] = {}
    for start in range(0, longest, method.chunk):
        end = min(start + method.chunk, longest)
        fed = [torch.cat([_request(row, start, tokenizer, suffix), row[start:end]]) for row in rows]
        if not min(map(len, fed)):  # a row that has ended gets a token, which is not looked at
            fed = [part if len(part) else row[-1:] for part, row in zip(fed, rows, strict=True)]
        width = max(map(len, fed))
        ids = torch.stack([torch.nn.functional.pad(part, (width - len(part), 0)) for part in fed])
        real = torch.stack([torch.arange(width, device=ids.device) >= width - len(part) for part in fed])
        whole = torch.cat([mask, real.to(mask.dtype)], dim=1)
        positions = (whole.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
        ends = torch.tensor([min(end, len(row)) for row in rows], device=ids.device)

        def watch(layer: int, q: Tensor, k: Tensor, scale: float, start=start, real=real, ends=ends) -> None:
            keys, heads = cache.anchor_keys(layer)
            if not heads:
                return
            if layer not in scores:
                # Sinks first, then by weights, which are at most 1.
                scores[layer] = torch.full((*keys.shape[:2], longest), -1.0, device=q.device)
                scores[layer][..., : method.sinks] = 2.0
            first = max(start, method.sinks)
            if first < int(ends.max()):
                q = q.unflatten(1, (k.shape[1], -1))[:, heads]
                found = chunk_scores(q, keys, k[:, heads], real, method.sinks, first, ends, scale)
                scores[layer][..., first : first + found.shape[-1]] = found

        with cache.peek(watch):
            cache.may_grow = True  # what is fed is none of the tokens that a limit counts
            model(ids, attention_mask=whole, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    cache.evict(scores)


def chunk_scores(
    q: Tensor, keys: Tensor, own: Tensor, real: Tensor, sinks: int, first: int, ends: Tensor, scale: float
) -> Tensor:
    """The largest weight that each key of a chunk gets from any query that is fed.

    Args:
        q: [B, A, G, T, D], the queries.
        keys: [B, A, N, D], of the context, in order of position.
        own: [B, A, T, D], of the tokens that are fed.
        real: [B, T] bool, False for padding.
        sinks: the first keys, which are in every softmax.
        first: of the chunk, not below `sinks`.
        ends: [B], behind the last key of the chunk in each row.
        scale: factor on every logit.

    Returns:
        [B, A, C] float32; -1 behind a row's end.
    """
    chunk = keys[:, :, first : int(ends.max())]
    seen = torch.cat([keys[:, :, :sinks], chunk, own], dim=2).float()
    sinks = min(sinks, keys.shape[2])
    positions = torch.arange(chunk.shape[2], device=q.device) + first
    in_chunk = positions < ends[:, None]  # [B, C]
    known = torch.cat([torch.ones_like(in_chunk[:, :1]).expand(-1, sinks), in_chunk], dim=1)
    known[:, :sinks] &= torch.arange(sinks, device=q.device) < ends[:, None]
    count, best = q.shape[3], torch.full((*chunk.shape[:3],), -torch.inf, device=q.device)
    column = torch.arange(count, device=q.device)
    for at in column.split(_QUERIES):
        own_seen = column[: int(at[-1]) + 1]
        sees = (own_seen <= at[:, None]) & real[:, None, : len(own_seen)]  # [B, t, ..]
        sees = torch.cat([known[:, None].expand(-1, len(at), -1), sees], dim=2)[:, None, None]
        logits = (q[:, :, :, at].float() * scale) @ seen[:, :, None, : sees.shape[-1]].mT
        logits.masked_fill_(~sees, -torch.inf)
        weights = logits[..., sinks : sinks + chunk.shape[2]] - logits.logsumexp(dim=-1, keepdim=True)
        best = torch.maximum(best, weights.masked_fill_(~real[:, None, None, at, None], -torch.inf).amax(dim=(2, 3)))
    return best.exp().masked_fill(~in_chunk[:, None], -1)


def _request(row: Tensor, start: int, tokenizer: PreTrainedTokenizerBase | None, suffix: str) -> Tensor:
    """[n] the tokens that ask for the chunk of a row that begins at `start`."""
    if tokenizer is None:
        return row[:0]
    asked, ended = (
        row.new_tensor(tokenizer(text, add_special_tokens=False).input_ids if text else [])
        for text in (LATER if start else FIRST, suffix)
    )
    return torch.cat([asked, row[max(0, start - LEAD) : start], ended])
