"""Shared-score attention composed of plain attention pieces, merged by their log-sum-exps; never [T, T].

The pairs j <= i of PoD (arXiv 2412.02252, Eq. 3 and 4) fall into four kinds of piece, each of which a stock flash
attention can run (n_s = sink_size, n_r = recent_size, T > n_s + n_r):

    queries            keys               logits from           shape
    i                  i-n_r+1 .. i       q, k                  the window: a causal square, then a band
    n_r .. n_r+n_s-1   0 .. i-n_r         q, k                  sinks of the first later queries: a causal square
    n_r+n_s .. T-1     0 .. n_s-1         q, k                  sinks of the others: a full rectangle
    n_s+n_r .. T-1     n_s .. i-n_r       q_distant, k_distant  distant: a causal square

With T <= n_s + n_r, or without q_distant, everything is one causal square. Window attention leaves out the last kind.

The backward runs each piece's own backward with the *merged* output and log-sum-exp. A flash backward recomputes the
weights as exp(logit - lse) and subtracts rowsum(grad_out * out); with the merged two, these are the weights and the
correction of the whole softmax, so the sum over pieces is exact and no gradient has to flow through any log-sum-exp.

Three kernels run a piece: torch's flash attention on CPU, torch's flash attention on CUDA (half precision), and chunks
of eager matmuls (all else: float32 on CUDA, other devices, values of another head dimension).

On CUDA torch's own flash attention is FlashAttention 2, as the flash-attn package is. Faster ones take its place in
torch: with `torch.nn.attention.activate_flash_attention_impl`, or with the environment variable
POD_FLASH_IMPLEMENTATION, "FA3" or "FA4", for whoever has these installed. Nothing activates them unasked, since they
then run all of the process's attention and refuse some of it (dropout). cuDNN's has no window in torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from pod_kernels import reference

Kernel = Literal["flash_cpu", "flash_cuda", "eager"]

# Shorter chunks of the band waste fewer masked pairs but cost more calls; past this many queries there is no gain left.
LARGEST_SPEED_CHUNK = 256
# Logits that the eager kernel holds at once.
EAGER_LOGITS = 2**23
FLASH_VARIABLE = "POD_FLASH_IMPLEMENTATION"


@dataclass(frozen=True)
class Piece:
    """A rectangle of (query, key) pairs and the part of it that counts.

    Attributes:
        queries, keys: [start, stop) in the sequence.
        shape: `causal`: key u <= query t, both counted inside the piece (a square). `full`: all pairs. `band`: query t
            sees keys t .. t + recent_size - 1 of the piece. `window`: causal, and t - u < recent_size (a square).
        distant: logits from q_distant and k_distant instead of q and k.
        first: no earlier piece of the plan holds these queries.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    shape: Literal["causal", "full", "band", "window"]
    distant: bool = False
    first: bool = False

    @property
    def multiplied_pairs(self) -> int:
        """Pairs whose logit is computed, masked ones of a band included."""
        num_queries = self.queries[1] - self.queries[0]
        num_keys = self.keys[1] - self.keys[0]
        return num_queries * (num_queries + 1) // 2 if self.shape == "causal" else num_queries * num_keys


@lru_cache(maxsize=256)
def plan(
    length: int,
    sink_size: int,
    recent_size: int,
    distant: bool,
    native_window: bool = False,
    window_only: bool = False,
) -> tuple[Piece, ...]:
    """The disjoint pieces that cover all pairs j <= i that count; the proximal ones come first.

    Args:
        length: tokens of the sequence, T.
        sink_size, recent_size: as in `shared_score_attention`.
        distant: whether distant logits have queries and keys of their own.
        native_window: the kernel has a sliding window; without one, the window is cut into masked bands.
        window_only: distant pairs do not count.
    """
    end = sink_size + recent_size
    if not (distant or window_only) or length <= end:
        return (Piece((0, length), (0, length), "causal", first=True),)
    pieces = []
    if native_window:
        pieces.append(Piece((0, length), (0, length), "window", first=True))
    else:
        pieces.append(Piece((0, recent_size), (0, recent_size), "causal", first=True))
        # A chunk of c queries multiplies c - 1 pairs too many per query. Both terms are at most T / 32 once
        # T >= 4 * recent_size, which is at most 1/16 of the causal T / 2 pairs per query.
        chunk = max(1, recent_size // 8, min(length // 32, LARGEST_SPEED_CHUNK))
        for start in range(recent_size, length, chunk):
            stop = min(start + chunk, length)
            pieces.append(Piece((start, stop), (start - recent_size + 1, stop), "band", first=True))
    if sink_size > 0:
        pieces.append(Piece((recent_size, end), (0, sink_size), "causal"))
        pieces.append(Piece((end, length), (0, sink_size), "full"))
    if not window_only:
        pieces.append(Piece((end, length), (sink_size, length - recent_size), "causal", distant=True))
    return tuple(pieces)


def multiplied_pairs(length: int, sink_size: int, recent_size: int) -> int:
    """Query-key pairs that a kernel without a sliding window multiplies for one head, masked ones included.

    For length >= 4 * recent_size at most 1.1 * length * (length + 1) / 2, the pairs of plain causal attention.

    Args:
        length: tokens of the sequence, T.
        sink_size, recent_size: as in `shared_score_attention`.
    """
    return sum(piece.multiplied_pairs for piece in plan(length, sink_size, recent_size, distant=True))


def choose_kernel(q: Tensor, v: Tensor) -> Kernel:
    """The fastest kernel that takes these tensors."""
    dim = q.shape[-1]
    if v.shape[-1] != dim:
        return "eager"
    if q.device.type == "cpu":
        return "flash_cpu"
    if (
        q.device.type == "cuda"
        and torch.version.hip is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and dim % 8 == 0
        and dim <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    ):
        activate_named_flash()
        return "flash_cuda"
    return "eager"


@cache
def activate_named_flash() -> None:
    """Once, let torch's flash attention run the implementation that POD_FLASH_IMPLEMENTATION names, if it is set.

    Raises:
        ValueError: torch knows no such implementation, or it is not installed; says which.
    """
    name = os.environ.get(FLASH_VARIABLE)
    if not name:
        return
    valid = torch.nn.attention.list_flash_attention_impls()
    if name not in valid:
        raise ValueError(f"{FLASH_VARIABLE} {name!r} does not exist: this torch knows {', '.join(map(repr, valid))}")
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
    """[c, c + recent_size - 1], 0 or -inf, for the longest band, of c queries; others take its top left corner."""
    chunk = max((piece.queries[1] - piece.queries[0] for piece in pieces if piece.shape == "band"), default=0)
    if chunk == 0:
        return None
    outside = torch.ones(chunk, chunk + recent_size - 1, dtype=torch.bool, device=device)
    outside = ~outside.triu().tril(recent_size - 1)
    return torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, -torch.inf)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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
    if kernel == "eager":
        # Autocast would turn its float32 matmuls back into half precision.
        with torch.autocast(q.device.type, enabled=False):
            return _eager_forward(piece, q, k, v, mask, scale)
    causal = piece.shape == "causal"
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    if kernel == "flash_cpu":
        k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
        bias = mask[: q.shape[2], : k.shape[2]] if piece.shape == "band" else None
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    # CUDA: [B, T, h, D]; grouped queries and the window are native.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
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
        grad_out, out: [B, h, Tq, D], of the merged output. lse: [B, h, Tq], merged.
        The others are as in `forward_piece`.

    Returns:
        Gradients of q [B, h, Tq, D], k and v [B, h_kv, Tk, D].
    """
    if kernel == "eager":
        # Autocast would turn its float32 matmuls back into half precision.
        with torch.autocast(q.device.type, enabled=False):
            return _eager_backward(piece, grad_out, q, k, v, out, lse, mask, scale)
    causal = piece.shape == "causal"
    kv_heads = k.shape[1]
    grad_out, q, k, v, out = (_unit_stride(tensor) for tensor in (grad_out, q, k, v, out))
    if kernel == "flash_cpu":
        k, v = (tensor.expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
        bias = mask[: q.shape[2], : k.shape[2]] if piece.shape == "band" else None
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        if kv_heads != dk.shape[1]:
            dk, dv = dk.sum(1, keepdim=True, dtype=lse.dtype), dv.sum(1, keepdim=True, dtype=lse.dtype)
        return dq, dk, dv
    # Without dropout the random state is never read, but the operation wants a tensor.
    unused_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad_out.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
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


class Sizes(NamedTuple):
    sink_size: int
    recent_size: int
    scale: float
    window_only: bool

    def pieces(self, length: int, distant: bool, kernel: Kernel) -> tuple[Piece, ...]:
        return plan(length, self.sink_size, self.recent_size, distant, kernel == "flash_cuda", self.window_only)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    sizes: Sizes,
    want_gate: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out in q's dtype, lse, and the proximal keys' own lse, of full sequences."""
    kernel = choose_kernel(q, v)
    length = q.shape[2]
    pieces = sizes.pieces(length, q_distant is not None, kernel)
    splits = head_splits(kernel, q.shape[1], k.shape[1])
    mask = band_mask(pieces, sizes.recent_size, q.dtype, q.device)
    if len(pieces) == len(splits) == 1:
        out, lse = forward_piece(kernel, pieces[0], q, k, v, None, sizes.recent_size, sizes.scale)
        return out.to(q.dtype), lse, lse if want_gate else None
    accumulate = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=accumulate)
    lse = q.new_empty(q.shape[:3], dtype=accumulate)
    lse_proximal = lse if want_gate else None
    for piece in pieces:
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        if piece.distant and want_gate:
            lse_proximal = lse.clone()
        queries, keys = (q_distant, k_distant) if piece.distant else (q, k)
        for query_heads, kv_heads in splits:
            piece_out, piece_lse = forward_piece(
                kernel,
                piece,
                queries[:, query_heads, rows],
                keys[:, kv_heads, columns],
                v[:, kv_heads, columns],
                mask,
                sizes.recent_size,
                sizes.scale,
            )
            running_out, running_lse = out[:, query_heads, rows], lse[:, query_heads, rows]
            if piece.first:
                running_out.copy_(piece_out)
                running_lse.copy_(piece_lse)
            else:
                merged = torch.logaddexp(running_lse, piece_lse)
                running_out.mul_((running_lse - merged).exp_()[..., None])
                running_out.addcmul_(piece_out, (piece_lse - merged).exp_()[..., None])
                running_lse.copy_(merged)
    return out.to(q.dtype), lse, lse_proximal


def _backward(
    grad_out: Tensor,
    inputs: tuple[Tensor | None, ...],
    out: Tensor,
    lse: Tensor,
    sizes: Sizes,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of (q, k, v, q_distant, k_distant), None where not needed."""
    q, k, v, q_distant, k_distant = inputs
    kernel = choose_kernel(q, v)
    length = q.shape[2]
    pieces = sizes.pieces(length, q_distant is not None, kernel)
    splits = head_splits(kernel, q.shape[1], k.shape[1])
    mask = band_mask(pieces, sizes.recent_size, q.dtype, q.device)
    grads = [
        torch.zeros(tensor.shape, dtype=lse.dtype, device=q.device) if need else None
        for tensor, need in zip(inputs, needed, strict=True)
    ]
    for piece in pieces:
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        queries, keys = (q_distant, k_distant) if piece.distant else (q, k)
        buffers = (*(grads[3:5] if piece.distant else grads[0:2]), grads[2])
        if all(buffer is None for buffer in buffers):
            continue
        for query_heads, kv_heads in splits:
            piece_grads = backward_piece(
                kernel,
                piece,
                grad_out[:, query_heads, rows],
                queries[:, query_heads, rows],
                keys[:, kv_heads, columns],
                v[:, kv_heads, columns],
                out[:, query_heads, rows],
                lse[:, query_heads, rows],
                mask,
                sizes.recent_size,
                sizes.scale,
            )
            wheres = ((query_heads, rows), (kv_heads, columns), (kv_heads, columns))
            for buffer, (heads, tokens), piece_grad in zip(buffers, wheres, piece_grads, strict=True):
                if buffer is not None:
                    buffer[:, heads, tokens] += piece_grad
    # One at a time, so that a float32 buffer is freed as soon as it is cast.
    for index, tensor in enumerate(inputs):
        if grads[index] is not None:
            grads[index] = grads[index].to(tensor.dtype)
    return grads


class _ComposedAttention(torch.autograd.Function):
    """groups: None, or the rows [n] and the columns [start, stop) of each set of equally placed sequences."""

    @staticmethod
    def forward(ctx, q, k, v, q_distant, k_distant, sizes, groups, want_gate):
        inputs = (q, k, v, q_distant, k_distant)
        if groups is None:
            out, lse, lse_proximal = _forward(*inputs, sizes, want_gate)
            gate = torch.exp(lse_proximal - lse).float() if want_gate else None
        else:
            accumulate = torch.promote_types(q.dtype, torch.float32)
            out = q.new_zeros(*q.shape[:3], v.shape[-1])
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulate)
            gate = q.new_ones(q.shape[:3], dtype=torch.float32) if want_gate else None
            for rows, start, stop in groups:
                cut = [None if tensor is None else tensor[rows, :, start:stop] for tensor in inputs]
                cut_out, cut_lse, cut_proximal = _forward(*cut, sizes, want_gate)
                out[rows, :, start:stop] = cut_out
                lse[rows, :, start:stop] = cut_lse
                if want_gate:
                    gate[rows, :, start:stop] = torch.exp(cut_proximal - cut_lse).float()
        ctx.save_for_backward(*inputs, out, lse)
        ctx.sizes, ctx.groups = sizes, groups
        ctx.set_materialize_grads(False)
        public_lse = lse.float()
        ctx.mark_non_differentiable(*(tensor for tensor in (public_lse, gate) if tensor is not None))
        return out, public_lse, gate

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse, grad_gate):
        if grad_out is None:
            return (None,) * 8
        *inputs, out, lse = ctx.saved_tensors
        needed = tuple(tensor is not None and need for tensor, need in zip(inputs, ctx.needs_input_grad, strict=False))
        if ctx.groups is None:
            grads = _backward(grad_out, tuple(inputs), out, lse, ctx.sizes, needed)
        else:
            grads = [torch.zeros_like(t) if need else None for t, need in zip(inputs, needed, strict=True)]
            for rows, start, stop in ctx.groups:
                cut = tuple(None if tensor is None else tensor[rows, :, start:stop] for tensor in inputs)
                merged = (tensor[rows, :, start:stop] for tensor in (grad_out, out, lse))
                cut_grad_out, cut_out, cut_lse = merged
                cut_grads = _backward(cut_grad_out, cut, cut_out, cut_lse, ctx.sizes, needed)
                for grad, cut_grad in zip(grads, cut_grads, strict=True):
                    if grad is not None:
                        grad[rows, :, start:stop] = cut_grad
        return (*grads, None, None, None)


Group = tuple[Tensor, int, int]


def _rows_by_length(lengths: Tensor, total: int) -> list[Group] | None:
    """The rows of each distinct length and the columns of their tokens; None when no row is padded."""
    values = lengths.tolist()
    for row, value in enumerate(values):
        if not 0 <= value <= total:
            raise ValueError(f"lengths must lie in 0..{total}, the number of columns; row {row} has {value}")
    if all(value == total for value in values):
        return None
    rows: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    return [(torch.tensor(members), total - value, total) for value, members in sorted(rows.items()) if value > 0]


def _rows_by_document(document_ids: Tensor) -> list[Group] | None:
    """The documents of all rows, those of the same columns together; None when every row is one document.

    Raises:
        ValueError: the ids of a row decrease.
    """
    batch, length = document_ids.shape
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    starts = torch.nn.functional.pad(changes, (1, 0), value=True).nonzero()
    found = torch.cat([starts, document_ids[starts[:, 0], starts[:, 1]][:, None]], dim=1).tolist()  # one read for all
    places: dict[tuple[int, int], list[int]] = {}
    last = {}
    for (row, start, document), following in zip(found, [*found[1:], [-1, 0, 0]], strict=True):
        stop = following[1] if following[0] == row else length
        if document < 0:
            continue
        if document < last.get(row, 0):
            raise ValueError(f"document_ids must not decrease: row {row} has {document} after {last[row]}")
        last[row] = document
        places.setdefault((start, stop), []).append(row)
    if list(places) == [(0, length)] and len(places[0, length]) == batch:
        return None
    return [(torch.tensor(rows), start, stop) for (start, stop), rows in places.items()]


def shared_score_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None = None,
    k_distant: Tensor | None = None,
    *,
    sink_size: int,
    recent_size: int,
    scale: float | None = None,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    window_only: bool = False,
    return_lse: bool = False,
    return_gate: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Causal attention whose distant logits come from another layer's queries and keys, without [T, T] in memory.

    Same meaning as `reference.shared_score_attention`. Accumulates in float32 (float64 for float64 inputs). Once
    differentiable. With `lengths` or `document_ids`, sequences that lie in the same columns are one call, so these two
    are read on the host.

    Args:
        q: [B, H, T, D] queries, after RoPE.
        k, v: [B, H_kv, T, D] keys (after RoPE) and values.
        q_distant, k_distant: [B, H, T, D] and [B, H_kv, T, D], the anchor layer's, for distant pairs; None for both is
            plain causal attention.
        sink_size: number of first tokens that are always proximal, >= 0.
        recent_size: number of last tokens, the current one included, that are proximal, >= 1.
        scale: factor on every logit; D ** -0.5 when None.
        lengths: [B] real tokens of each row, right-aligned (left padding).
        document_ids: [B, T] non-decreasing, -1 padding; tokens see their own document only.
        window_only: distant pairs do not count at all: window attention with sinks.
        return_lse, return_gate: also return these, in this order.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding. lse [B, H, T] float32: log of the sum of exp of the logits, -inf
        at padding. gate [B, H, T] float32: the share of the softmax on proximal keys, 1 at padding. Neither lse nor
        gate carries a gradient.

    Raises:
        ValueError: shapes, dtypes, sizes or lengths do not fit; says which.
    """
    reference.check_inputs(q, k, v, q_distant, k_distant, sink_size, recent_size, lengths, document_ids, window_only)
    if return_gate and q_distant is None and not window_only:
        q_distant, k_distant = q, k  # its own scores, split where shared ones are
    sizes = Sizes(sink_size, recent_size, q.shape[-1] ** -0.5 if scale is None else scale, window_only)
    groups = None if lengths is None else _rows_by_length(lengths, q.shape[2])
    if q.shape[0] == 0 or q.shape[2] == 0:
        groups = []
    elif document_ids is not None:
        groups = _rows_by_document(document_ids)
    out, lse, gate = _ComposedAttention.apply(q, k, v, q_distant, k_distant, sizes, groups, return_gate)
    results = [out]
    if return_lse:
        results.append(lse)
    if return_gate:
        results.append(gate)
    return results[0] if len(results) == 1 else tuple(results)
