"""Shared-score attention: one signature, checked once for several backends that agree.

With padding or several documents in a row a fast backend asks for its sequences (`sequence_groups`) or for each token's
(`sequence_spans`); both take `lengths` and `document_ids` as `shared_score_attention` does.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pod_kernels.dispatch import resolve_backend, shape_class

# The rows (a slice, or [n] on the queries' device) and the columns [start, stop) of equally placed sequences.
Group = tuple[slice | Tensor, int, int]

# What the last tensor on a device held: itself, its version, the queries' columns and device, its groups.
_last_read: tuple[weakref.ref, int, int, torch.device, list[Group] | None] | None = None


class Sizes(NamedTuple):
    """Which pairs are proximal, whether the others count, and the factor on the logits."""

    sink_size: int
    recent_size: int
    scale: float
    window_only: bool


@dataclass(frozen=True)
class Problem:
    """The arguments of `shared_score_attention`, where they are documented; `scale` is never None.

    Raises:
        ValueError: shapes, dtypes or sizes that no backend can serve; names the argument, what it was and what it must
            be.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_distant: Tensor | None = None
    k_distant: Tensor | None = None
    _: KW_ONLY
    sink_size: int
    recent_size: int
    scale: float | None = None
    lengths: Tensor | None = None
    document_ids: Tensor | None = None
    window_only: bool = False
    return_lse: bool = False
    return_gate: bool = False

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(f"q and k must be [B, heads, T, D]; got shapes {tuple(q.shape)} and {tuple(k.shape)}")
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        if heads % kv_heads:
            raise ValueError(f"query heads ({heads}) must be a multiple of key/value heads ({kv_heads})")
        if not isinstance(self.window_only, bool):
            raise ValueError(f"window_only is True or False of all heads here, got {self.window_only!r}")
        if self.window_only and self.q_distant is not None:
            raise ValueError("window_only leaves distant pairs out: pass no q_distant and k_distant with it")
        if (self.q_distant is None) != (self.k_distant is None):
            raise ValueError(
                "q_distant and k_distant come together: pass both, or None for both (plain causal attention)"
            )
        for name, tensor, shape in (
            ("k", k, (batch, kv_heads, length, dim)),
            ("v", v, (batch, kv_heads, length, v.shape[-1])),
            ("q_distant", self.q_distant, (batch, heads, length, dim)),
            ("k_distant", self.k_distant, (batch, kv_heads, length, dim)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                given = tuple(tensor.shape)
                raise ValueError(f"{name} must have shape {shape} to go with q {tuple(q.shape)}; got {given}")
            if tensor is not None and tensor.dtype != q.dtype:
                raise ValueError(f"{name} is {tensor.dtype} but q is {q.dtype}: cast them to one dtype")
        if self.sink_size < 0:
            raise ValueError(f"sink_size must be >= 0, got {self.sink_size}")
        if self.recent_size < 1:
            raise ValueError(f"recent_size must be >= 1 (the current token is recent), got {self.recent_size}")
        if self.lengths is not None and tuple(self.lengths.shape) != (batch,):
            raise ValueError(f"lengths must have shape ({batch},), one per row; got {tuple(self.lengths.shape)}")
        if self.document_ids is not None and tuple(self.document_ids.shape) != (batch, length):
            raise ValueError(f"document_ids must have shape {(batch, length)}; got {tuple(self.document_ids.shape)}")
        if self.lengths is not None and self.document_ids is not None:
            raise ValueError("pass lengths or document_ids, not both: document_ids mark padding with -1")
        if self.scale is None:
            object.__setattr__(self, "scale", dim**-0.5)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.sink_size, self.recent_size, self.scale, self.window_only)

    @property
    def sources(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v and the two for distant logits: where a gate is wanted of plain attention, its own once more."""
        if self.return_gate and self.q_distant is None and not self.window_only:
            return self.q, self.k, self.v, self.q, self.k
        return self.q, self.k, self.v, self.q_distant, self.k_distant

    def results(self, out: Tensor, lse: Tensor | None, gate: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """What the caller asked for, of what a backend returned."""
        results = (out, *[lse] * self.return_lse, *[gate] * self.return_gate)
        return out if len(results) == 1 else results


# By `dispatch.NAMES`, filled by the package: each gives out, and lse and gate at least where they are asked for.
BACKENDS: dict[str, Callable[[Problem], tuple[Tensor, Tensor | None, Tensor | None]]] = {}


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
    window_only: bool | tuple[int, ...] = False,
    return_lse: bool = False,
    return_gate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Causal attention whose distant logits come from another layer's queries and keys.

    PoD, arXiv 2412.02252, Eq. 3 and 4. For a query at position i and a key at position j <= i of the same sequence,
    the pair is proximal when j < sink_size or i - j < recent_size, and distant otherwise:

        logit(i, j) = q(i) . k(j) * scale                       proximal
                      q_distant(i) . k_distant(j) * scale       distant
        out(i)      = softmax over j <= i of logit(i, .), applied to v

    Args:
        q: [B, H, T, D] queries, after RoPE; any floating dtype, one for all tensors.
        k, v: [B, H_kv, T, D] keys (after RoPE) and values; H is a multiple of H_kv.
        q_distant, k_distant: [B, H, T, D] and [B, H_kv, T, D], the anchor layer's, for distant pairs (q_distant = q
            shares keys instead of scores); None for both is plain causal attention.
        sink_size: number of first tokens that are always proximal, >= 0.
        recent_size: number of last tokens, the current one included, that are proximal, >= 1.
        scale: factor on every logit; D ** -0.5 when None.
        lengths: [B] real tokens of each row, right-aligned (left padding). Positions count from the first real token.
        document_ids: [B, T] non-decreasing, -1 padding; tokens see their own document only, positions count from its
            first token.
        window_only: distant pairs do not count at all: window attention with sinks, without q_distant and k_distant.
            Or the KV heads of which that is so, whose q_distant and k_distant are not looked at; their gate is 1.
        return_lse, return_gate: also return these, in this order.
        backend: "auto", "reference" (eager, [T, T] in memory), "composed" (torch's flash attention, linear memory) or
            "fused" (one Triton kernel, linear memory; NVIDIA GPUs). "auto" is the environment variable
            POD_ATTENTION_BACKEND if set, else what `dispatch` has for the GPU and the shapes, else composed.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding. lse [B, H, T] float32: log of the sum of exp of the logits, -inf
        at padding. gate [B, H, T] float32: the share of the softmax on proximal keys, 1 at padding. Neither lse nor
        gate carries a gradient.

    Raises:
        ValueError: shapes, dtypes, sizes or lengths do not fit, no such backend, or it cannot run here; says which.
    """
    options = {"sink_size": sink_size, "recent_size": recent_size, "scale": scale, "lengths": lengths}
    options |= {"document_ids": document_ids, "return_lse": return_lse, "return_gate": return_gate}
    if window_only and not isinstance(window_only, bool):
        return _by_heads(q, k, v, q_distant, k_distant, window_only, backend=backend, **options)
    problem = Problem(q, k, v, q_distant, k_distant, window_only=bool(window_only), **options)
    training = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, q_distant, k_distant)
    )
    name = resolve_backend(backend, shape_class(q, "training" if training else "forward"))
    return problem.results(*BACKENDS[name](problem))


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    windows: tuple[int, ...],
    **options,
) -> Tensor | tuple[Tensor, ...]:
    """`shared_score_attention` where the KV heads `windows` have no distant pairs, and the others have."""
    kv_heads = k.shape[1]
    others = tuple(head for head in range(kv_heads) if head not in windows)

    def part(heads: tuple[int, ...], distant: tuple[Tensor | None, ...]) -> list[Tensor]:
        mine = (None if x is None else _of_heads(x, heads, x.shape[1] // kv_heads) for x in (q, k, v, *distant))
        # By its length: torch.compile does not trace `not` of a tuple of tensors.
        found = shared_score_attention(*mine, window_only=len(distant) == 0, **options)
        return [found] if isinstance(found, Tensor) else list(found)

    parts = [part(windows, ())] + ([part(others, (q_distant, k_distant))] if others else [])
    back = [(*windows, *others).index(head) for head in range(kv_heads)]
    groups = q.shape[1] // kv_heads
    results = tuple(_of_heads(torch.cat(each, dim=1), back, groups) for each in zip(*parts, strict=True))
    return results[0] if len(results) == 1 else results


def _of_heads(x: Tensor, heads: Sequence[int], groups: int) -> Tensor:
    """The `groups` entries in [:, H] of each of some KV heads, by slices: no index has to come from the host."""
    return torch.cat([x[:, head * groups : (head + 1) * groups] for head in heads], dim=1)


def sequence_groups(q: Tensor, lengths: Tensor | None, document_ids: Tensor | None) -> list[Group] | None:
    """The sequences of queries [B, H, T, D], those of the same columns together; None when every row is one sequence.

    Reads `lengths` or `document_ids` on the host, and waits for the device they are on; but once only for one tensor,
    as all layers of a forward are given the same.

    Raises:
        ValueError: lengths outside 0..T, or the ids of a row decrease.
    """
    global _last_read
    placement, total = lengths if document_ids is None else document_ids, q.shape[2]
    if q.shape[0] == 0 or total == 0:
        return []
    if placement is None:
        return None
    # A tensor on the CPU is read for nothing, and numpy may change it without a new version.
    is_kept = placement.device.type != "cpu" and not placement.is_inference()
    if is_kept and _last_read is not None:
        known, *rest, groups = _last_read
        if known() is placement and rest == [placement._version, total, q.device]:
            return groups
    places = _rows_by_length(lengths, total) if document_ids is None else _rows_by_document(document_ids)
    whole = len(places) == 1 and places.get((0, total)) == list(range(q.shape[0]))
    groups = None if whole else [(_rows(rows, q.device), *columns) for columns, rows in places.items()]
    if is_kept:
        _last_read = weakref.ref(placement), placement._version, total, q.device, groups
    return groups


def _rows(rows: list[int], device: torch.device) -> slice | Tensor:
    """Rows that follow one another are a slice, which copies nothing."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _rows_by_length(lengths: Tensor, total: int) -> dict[tuple[int, int], list[int]]:
    values = lengths.tolist()
    rows: dict[tuple[int, int], list[int]] = {}
    for row, value in enumerate(values):
        if not 0 <= value <= total:
            raise ValueError(f"lengths must lie in 0..{total}, the number of columns; row {row} has {value}")
        if value > 0:
            rows.setdefault((total - value, total), []).append(row)
    return rows


def _rows_by_document(document_ids: Tensor) -> dict[tuple[int, int], list[int]]:
    length = document_ids.shape[1]
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
    return places


def sequence_spans(
    batch: int, length: int, lengths: Tensor | None, document_ids: Tensor | None, device: torch.device
) -> Tensor | None:
    """Where each token's sequence begins and ends, without a read on the host.

    Lengths outside 0..T are taken as the nearest inside; each run of one id >= 0 is a document.

    Returns:
        [2, B, T] int32: the first column of the sequence, T at padding; the column after its last, 0 at padding. None
        when every row is one sequence.
    """
    if lengths is None and document_ids is None:
        return None
    column = torch.arange(length, device=device).expand(batch, length)
    if lengths is not None:
        starts = (length - lengths.to(device=device, dtype=torch.long).clamp(0, length))[:, None].expand(batch, length)
        stops, is_padding = torch.full_like(column, length), column < starts
    else:
        document_ids = document_ids.to(device)
        changes = document_ids[:, 1:] != document_ids[:, :-1]
        begins = torch.nn.functional.pad(changes, (1, 0), value=True)
        ends = torch.nn.functional.pad(changes, (0, 1), value=True)
        starts = torch.where(begins, column, 0).cummax(dim=1).values
        stops = torch.where(ends, column + 1, length).flip(1).cummin(dim=1).values.flip(1)
        is_padding = document_ids < 0
    spans = torch.stack([starts.masked_fill(is_padding, length), stops.masked_fill(is_padding, 0)])
    return spans.to(torch.int32)
