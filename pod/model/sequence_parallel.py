"""Ulysses sequence parallelism: P ranks hold T / P tokens each, and for attention H / P heads each.

Outside attention every rank of a group runs its own part of the sequence. Around attention one all-to-all turns
sequence-sharded queries, keys and values into head-sharded ones, and another turns the output back (Jacobs et al.,
"DeepSpeed Ulysses", arXiv 2309.14509). In between each rank sees the whole sequence for its own heads: masks, packed
documents, left padding, sinks and recency are those of one process. The running anchors of PoD stay head-sharded from
layer to layer, so that shared scores are never communicated.

What one layer exchanges, in one forward and on each rank, with t = ceil(T / P) tokens:

    calls           2        one with q, k and v, one with the output; a backward is 2 more, a recomputation too
    tensor bytes    B * t * D * itemsize * (2 * H + 2 * max(H_kv, P))
    sent to others  (P - 1) / P of these; the rest stays on the rank

A backward moves the same bytes as a forward. Fewer KV heads than ranks are repeated, P / H_kv times each, so that every
rank has one. Under `share: kv` a layer without anchors has neither k nor v: B * t * D * itemsize * 2 * H bytes.

Legend: B rows, T tokens, H query heads, H_kv KV heads, D head dimension, P ranks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share one sequence, as seen from one of them.

    Attributes:
        size: P, how many ranks there are.
        rank: which of them this is, in [0, P); rank r holds the r-th part of the sequence.
        process_group: torch's group of exactly these ranks, in this order.
    """

    size: int
    rank: int
    process_group: dist.ProcessGroup | None

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send part i of a contiguous [P, ...] tensor to rank i; part i of the result came from rank i."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.process_group)
        return received


class _AllToAll(torch.autograd.Function):
    """`SequenceGroup.all_to_all` with a gradient. It is a permutation that is its own inverse, so its own adjoint."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.all_to_all(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_to_all(gradient.contiguous()), None


def check_heads(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Check that heads can be shared out among the ranks of a group.

    Raises:
        ValueError: the query heads are no multiple of `size`, or the KV heads neither a multiple nor a divisor of it.
    """
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        fitting = [p for p in range(1, num_heads + 1) if not (num_heads % p or (num_kv_heads % p and p % num_kv_heads))]
        raise ValueError(
            f"sequence_parallel_size={size} does not fit {num_heads} query heads and {num_kv_heads} KV heads: a rank "
            f"takes whole heads. This model allows {', '.join(map(str, fitting))}"
        )


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of sequences of `length` tokens: tokens rank * t to (rank + 1) * t - 1, with t = ceil(T / P).

    Where T is no multiple of P the last parts are filled up at the right; the filling never reaches attention.

    Attributes:
        length: T, tokens of the whole sequences.
        group: who shares them.

    Raises:
        ValueError: fewer tokens than ranks.
    """

    length: int
    group: SequenceGroup

    def __post_init__(self) -> None:
        if self.length < self.group.size:
            raise ValueError(
                f"a sequence of {self.length} tokens cannot be shared by {self.group.size} ranks: lower "
                "sequence_parallel_size, or use longer samples"
            )

    @property
    def chunk(self) -> int:
        """t, the tokens that every rank holds, filling included."""
        return -(-self.length // self.group.size)

    def take(self, whole: Tensor, fill: int = 0) -> Tensor:
        """This rank's part of [B, T, ...]: [B, t, ...], filled up with `fill`."""
        if whole.shape[1] != self.length:
            raise ValueError(f"expected whole sequences of {self.length} tokens, got {tuple(whole.shape)}")
        first = self.group.rank * self.chunk
        mine = whole[:, first : first + self.chunk]
        behind = (0, 0) * (whole.dim() - 2) + (0, self.chunk - mine.shape[1])
        return torch.nn.functional.pad(mine, behind, value=fill)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The model's KV heads that this rank computes: H_kv / P of them, or one."""
        size, rank = self.group.size, self.group.rank
        first = rank * num_kv_heads // size
        return range(first, first + max(num_kv_heads // size, 1))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All heads of this rank's tokens -> all tokens of this rank's heads.

        Args:
            q: [B, H, t, D].
            k, v: [B, H_kv, t, D], or both without heads, [B, 0, t, D], which is what they stay.

        Returns:
            q [B, H / P, T, D]; k and v [B, max(H_kv / P, 1), T, D], the heads of `kv_heads`.

        Raises:
            ValueError: the heads cannot be shared out, see `check_heads`.
        """
        size = self.group.size
        if k.shape[1]:
            check_heads(q.shape[1], k.shape[1], size)
            repeats = max(size // k.shape[1], 1)
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        # [P, B, heads of one rank, t, D]: one call for all three, in one buffer.
        parts = torch.cat([x.unflatten(1, (size, x.shape[1] // size)).movedim(1, 0) for x in (q, k, v)], dim=2)
        whole = _AllToAll.apply(parts, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.length]
        heads, kv_heads = q.shape[1] // size, k.shape[1] // size
        return whole.split([heads, kv_heads, kv_heads], dim=1)

    def to_tokens(self, out: Tensor) -> Tensor:
        """All tokens of this rank's heads, [B, H / P, T, D] -> all heads of its tokens, [B, H, t, D]."""
        size = self.group.size
        filled = torch.nn.functional.pad(out, (0, 0, 0, size * self.chunk - self.length))
        parts = filled.unflatten(2, (size, self.chunk)).permute(2, 0, 1, 3, 4).contiguous()
        return _AllToAll.apply(parts, self.group).movedim(0, 1).flatten(1, 2)
