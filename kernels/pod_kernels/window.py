"""Attention to sinks and recent tokens alone, of queries that follow what is held (DuoAttention, arXiv 2410.10819).

Legend: B rows, H query heads, W KV heads, T queries, N keys, D head dimension.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def window_mask(known: Tensor, positions: Tensor, sink_size: int, recent_size: int) -> Tensor:
    """[B, 1, T, N] bool: the keys that are sinks or recent to each query; none to padding.

    Args:
        known: [B, N] int64, the keys' positions, -1 for none.
        positions: [B, T] int64, the queries', -1 for padding.
        sink_size, recent_size: tokens.
    """
    key, query = known[:, None], positions[..., None]
    return ((key >= 0) & (key <= query) & ((key < sink_size) | (query - key < recent_size)))[:, None]


def window_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, is_padding: Tensor, scale: float) -> Tensor:
    """Attention of each query to the keys that `window_mask` gives it.

    Args:
        q: [B, H, T, D].
        keys, values: [B, W, N, D], in any order.
        seen: [B, 1, T, N] bool.
        is_padding: [B, 1, T, 1] bool, the queries that are padding.
        scale: factor on every logit.

    Returns:
        [B, H, T, D], zero at padding.
    """
    is_grouped = keys.shape[1] != q.shape[1]
    out = scaled_dot_product_attention(q, keys, values, seen, scale=scale, enable_gqa=is_grouped)
    return out.masked_fill(is_padding, 0)
