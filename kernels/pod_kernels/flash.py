"""One piece of plain attention with its log-sum-exp, forward and backward, by what is there to run it.

What runs a piece: torch's flash attention on CPU, torch's flash attention on CUDA (half precision), cuDNN's there for
causal squares, and chunks of eager matmuls (all else: float32 on CUDA, other devices, values of another head
dimension).

On CUDA torch's own flash attention is FlashAttention 2, as the flash-attn package is. The environment variable
POD_FLASH_IMPLEMENTATION names another one: "FA3" or "FA4", for whoever has these installed, take its place in torch (as
with `torch.nn.attention.activate_flash_attention_impl`), and then run all of the process's attention; "cuDNN" takes the
causal squares, of which a long window is put together too, as cuDNN has none in torch, and leaves the sinks and a short
window to the flash attention. It plans each new shape anew, and so is for whole sequences of few lengths. "eager" is
the matmuls, on any device. Without the variable, what `pod.autotune` chose runs; where it is empty, torch's own.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

import torch
import torch.nn.attention
from torch import Tensor

from pod_kernels.dispatch import FLASH_VARIABLE, chosen, shape_class
from pod_kernels.pieces import Piece

Kernel = Literal["flash_cpu", "flash_cuda", "cudnn", "eager"]

# Logits that the eager kernel holds at once.
EAGER_LOGITS = 2**23
CUDNN, EAGER = "cuDNN", "eager"


def choose_kernel(q: Tensor, v: Tensor) -> Kernel:
    """The fastest kernel that takes these tensors.

    Raises:
        ValueError: POD_FLASH_IMPLEMENTATION names what does not exist or is not installed.
    """
    dim, name = q.shape[-1], os.environ.get(FLASH_VARIABLE)
    if v.shape[-1] != dim or name == EAGER:
        return "eager"
    if q.device.type == "cpu":
        return "flash_cpu"
    if (
        q.device.type != "cuda"
        or torch.version.hip is not None
        or q.dtype not in (torch.float16, torch.bfloat16)
        or dim % 8
        or dim > 256
        or torch.cuda.get_device_capability(q.device) < (8, 0)
    ):
        return "eager"
    if name is None:
        work = "training" if q.requires_grad or v.requires_grad else "forward"
        name = chosen(shape_class(q, work)).flash
    if name == CUDNN:
        # Its backward ends at 128 on most GPUs.
        return "cudnn" if dim <= 128 else "flash_cuda"
    if name:
        activate_flash(name)
    return "flash_cuda"


@cache
def activate_flash(name: str) -> None:
    """Once, let torch's flash attention run this implementation.

    Raises:
        ValueError: torch knows no such implementation, or it is not installed; says which.
    """
    valid = torch.nn.attention.list_flash_attention_impls()
    if name not in valid:
        names = ", ".join(map(repr, (CUDNN, EAGER, *valid)))
        raise ValueError(f"{FLASH_VARIABLE} {name!r} does not exist: there are {names}")
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except ImportError as error:
        raise ValueError(f"{FLASH_VARIABLE} {name!r} is not installed ({error}): install it or unset it") from error


def head_splits(kernel: Kernel, heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """The (query heads, KV heads) of each call of the kernel.

    CPU flash knows no grouped queries, so a call takes either all query heads of one KV head (the key is then expanded
    with stride 0) or one query head of every KV head: no key or value is copied. The fewer calls win.
    """
    groups = heads // kv_heads
    if kernel != "flash_cpu":
        return [(slice(None), slice(None))]
    if kv_heads < groups:
        return [(slice(g * groups, (g + 1) * groups), slice(g, g + 1)) for g in range(kv_heads)]
    return [(slice(member, None, groups), slice(None)) for member in range(groups)]


def band_mask(pieces: tuple[Piece, ...], recent_size: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[c, c + recent_size - 1], 0 or -inf, for the longest chunk, of c queries; others take its top left corner."""
    chunk = max((piece.step for piece in pieces if piece.shape == "band"), default=0)
    if chunk == 0:
        return None
    outside = torch.ones(chunk, chunk + recent_size - 1, dtype=torch.bool, device=device)
    outside = ~outside.triu().tril(recent_size - 1)
    return torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, -torch.inf)


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _takes_cudnn(kernel: Kernel, piece: Piece, q: Tensor) -> bool:
    """Whether cuDNN runs a piece: causal squares alone, and it refuses those of a single token."""
    return kernel == "cudnn" and piece.shape == "causal" and q.shape[2] > 1


def _flash_cuda_window(shape: str, recent_size: int) -> dict[str, int]:
    return {"window_size_left": recent_size - 1, "window_size_right": 0} if shape == "window" else {}


def forward_piece(
    kernel: Kernel, piece: Piece, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, recent_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one piece alone.

    Args:
        kernel: what runs it.
        piece: its shape; q, k, v are already cut to it.
        q: [B, h, Tq, D]; k, v: [B, h_kv, Tk, D].
        mask: from `band_mask`, for shape `band`.

    Returns:
        out [B, h, Tq, D], lse [B, h, Tq] in float32 (float64 for float64 inputs).
    """
    if piece.reversed:
        q, k, v = (tensor.flip(2) for tensor in (q, k, v))
        out, lse = forward_piece(kernel, replace(piece, reversed=False), q, k, v, mask, recent_size, scale)
        return out.flip(2), lse.flip(2)
    if kernel == "eager":
        # Autocast would turn its float32 matmuls back into half precision.
        with torch.autocast(q.device.type, enabled=False):
            return _eager_forward(piece, q, k, v, mask, scale)
    causal = piece.shape == "causal"
    q, k, v = map(unit_stride, (q, k, v))
    if kernel == "flash_cpu":
        k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
        bias = mask[: q.shape[2], : k.shape[2]] if piece.shape == "band" else None
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    if _takes_cudnn(kernel, piece, q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])  # [B, h, Tq, 1]
    # CUDA: [B, T, h, D]; grouped queries and the window are native.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        False,
        scale=scale,
        **_flash_cuda_window(piece.shape, recent_size),
    )
    return out.transpose(1, 2), lse


def backward_piece(
    kernel: Kernel,
    piece: Piece,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    recent_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The piece's share of the gradients.

    Args:
        grad_out, out: [B, h, Tq, D], of the merged output.
        lse: [B, h, Tq], merged. The others are as in `forward_piece`.

    Returns:
        Gradients of q [B, h, Tq, D], k and v [B, h_kv, Tk, D].
    """
    if piece.reversed:
        states = [tensor.flip(2) for tensor in (grad_out, q, k, v, out, lse)]
        grads = backward_piece(kernel, replace(piece, reversed=False), *states, mask, recent_size, scale)
        return tuple(grad.flip(2) for grad in grads)
    if kernel == "eager":
        # Autocast would turn its float32 matmuls back into half precision.
        with torch.autocast(q.device.type, enabled=False):
            return _eager_backward(piece, grad_out, q, k, v, out, lse, mask, scale)
    causal = piece.shape == "causal"
    kv_heads = k.shape[1]
    grad_out, q, k, v, out = map(unit_stride, (grad_out, q, k, v, out))
    if kernel == "flash_cpu":
        k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
        bias = mask[: q.shape[2], : k.shape[2]] if piece.shape == "band" else None
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        if kv_heads != dk.shape[1]:
            dk, dv = dk.sum(1, keepdim=True, dtype=lse.dtype), dv.sum(1, keepdim=True, dtype=lse.dtype)
        return dq, dk, dv
    # Without dropout the random state is never read, but the operations want a tensor.
    if _takes_cudnn(kernel, piece, q):
        unused_state = torch.empty((), dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse[..., None].contiguous(),  # packed, whatever strides it says
            unused_state,
            unused_state,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            True,
            scale=scale,
        )
    unused_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        *(tensor.transpose(1, 2) for tensor in (grad_out, q, k, v, out)),
        lse.contiguous(),  # the kernel takes its strides from the shape
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        unused_state,
        unused_state,
        scale=scale,
        **_flash_cuda_window(piece.shape, recent_size),
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _eager_chunks(piece: Piece, q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first query, past the last query, past the last visible key) of each run whose logits fit EAGER_LOGITS."""
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    rows = max(1, EAGER_LOGITS // (batch * heads * num_keys))
    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)
        yield start, stop, stop if piece.shape == "causal" else num_keys


def _eager_logits(
    piece: Piece, q: Tensor, k: Tensor, mask: Tensor | None, start: int, stop: int, seen: int, scale: float
) -> Tensor:
    """[B, h_kv, G, stop - start, seen] logits, -inf where the pair is not of the piece."""
    # One matmul per KV head for all its query heads, so that no key is repeated.
    rows = q[:, :, start:stop].unflatten(1, (k.shape[1], -1))
    logits = torch.matmul(rows.flatten(2, 3), k[:, :, :seen].transpose(2, 3)).unflatten(2, rows.shape[2:4]) * scale
    if piece.shape == "causal":
        above = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu(start + 1)
        logits.masked_fill_(above, -torch.inf)
    elif piece.shape == "band":
        logits += mask[start:stop, :seen]
    return logits


def _eager_forward(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    accumulate = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(accumulate), k.to(accumulate), v.to(accumulate)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3])
    for start, stop, seen in _eager_chunks(piece, q, k):
        logits = _eager_logits(piece, q, k, mask, start, stop, seen, scale)
        lse_chunk = torch.logsumexp(logits, dim=-1)
        weights = logits.sub_(lse_chunk[..., None]).exp_()
        chunk = torch.matmul(weights.flatten(2, 3), v[:, :, :seen])
        out[:, :, start:stop] = chunk.unflatten(2, weights.shape[2:4]).flatten(1, 2)
        lse[:, :, start:stop] = lse_chunk.flatten(1, 2)
    return out, lse


def _eager_backward(
    piece: Piece,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    accumulate = torch.promote_types(q.dtype, torch.float32)
    grad_out, q, k, v, out = (tensor.to(accumulate) for tensor in (grad_out, q, k, v, out))
    correction = (grad_out * out).sum(dim=-1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kv_heads = k.shape[1]

    def grouped(tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[:, :, start:stop].unflatten(1, (kv_heads, -1)).flatten(2, 3)

    for start, stop, seen in _eager_chunks(piece, q, k):
        weights = _eager_logits(piece, q, k, mask, start, stop, seen, scale).flatten(2, 3)
        weights = weights.sub_(grouped(lse, start, stop)[..., None]).exp_()
        rows = grouped(grad_out, start, stop)
        dv[:, :, :seen] += torch.matmul(weights.transpose(2, 3), rows)
        grad_logits = torch.matmul(rows, v[:, :, :seen].transpose(2, 3))
        grad_logits = grad_logits.sub_(grouped(correction, start, stop)[..., None]).mul_(weights).mul_(scale)
        dk[:, :, :seen] += torch.matmul(grad_logits.transpose(2, 3), grouped(q, start, stop))
        grad_rows = torch.matmul(grad_logits, k[:, :, :seen]).unflatten(2, (-1, stop - start))
        dq[:, :, start:stop] = grad_rows.flatten(1, 2)
    return dq, dk, dv
