"""The dense attentions that shared-score attention is measured against, those that a device has."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH = "SDPA flash"
OTHERS = (FLASH, "SDPA cuDNN", "FlexAttention", "flash-attn")  # that a device may lack


def is_causal_pair(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """FlexAttention's name for causal attention."""
    return query >= key


def causal_block_mask(length: int, device: str, block: int = 128) -> Any:
    """FlexAttention's causal mask, from its blocks: its own function looks at every pair, 16 GiB for 128K tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-length // block)
    place = torch.arange(count, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        torch.ones_like(place)[None, None],
        # In each row the diagonal block comes first, and the rest in any order.
        ((place[:, None] + place) % count).to(torch.int32)[None, None],
        place[None, None],
        place.expand(count, count).contiguous()[None, None],
        BLOCK_SIZE=block,
        mask_mod=is_causal_pair,
        seq_lengths=(length, length),
    )


def dense_attentions(device: str, is_causal: bool) -> dict[str, Callable[..., Tensor]]:
    """name -> (q, k, v) -> out: the dense attentions that this device might have.

    FlexAttention is left out of decoding, as every shape is compiled anew.
    """

    def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=is_causal).transpose(1, 2)

    kinds = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    flash, cudnn, flex, package = OTHERS
    found: dict[str, Callable[..., Tensor]] = {flash: partial(sdpa, kinds[0])}
    if device == "cuda":
        found |= {cudnn: partial(sdpa, kinds[1]), package: flash_attn}
    if device == "cuda" and is_causal:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # after a few shapes it would go on without compiling
        compiled, masks = torch.compile(flex_attention, dynamic=False), {}

        def run_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = q.shape[2]
            if length not in masks:
                masks[length] = causal_block_mask(length, device)
            return compiled(q, k, v, block_mask=masks[length], enable_gqa=True)

        found[flex] = run_flex
    return found
