"""Attention to sinks and recent tokens alone, of queries that follow what is held (DuoAttention, arXiv 2410.10819).

Legend: B rows, H query heads, W KV heads, T queries, N keys, D head dimension.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def window_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    known: Tensor,
    positions: Tensor,
    sink_size: int,
    recent_size: int,
    scale: float,
) -> Tensor:
    """Attention of each query to those of the keys that are sinks or recent to it.

    Args:
        q: [B, H, T, D].
        keys, values: [B, W, N, D], in any order.
        known: [B, N] int64, the keys' positions, -1 for none.
        positions: [B, T] int64, the queries', -1 for padding.
        sink_size, recent_size: tokens.
        scale: factor on every logit.

    Returns:
        [B, H, T, D], zero at padding.
    """
    key, query = known[:, None], positions[..., None]
    seen = (key >= 0) & (key <= query) & ((key < sink_size) | (query - key < recent_size))
    is_grouped = keys.shape[1] != q.shape[1]
    out = scaled_dot_product_attention(q, keys, values, seen[:, None], scale=scale, enable_gqa=is_grouped)
    return out.masked_fill((positions < 0)[:, None, :, None], 0)
