"""Packed segments cut to what was chosen of them.

Legend: B rows, H heads, N slots of a head, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod_kernels.segments import Segments


@dataclass
class Chosen:
    """Tokens of one head that are kept: where they come from and where they go.

    Attributes:
        rows, sources, slots: [n] int64 each, ordered by row and position; slots count from each row's first.
        counts: tokens of each row.
    """

    rows: Tensor
    sources: Tensor
    slots: Tensor
    counts: list[int]

    @classmethod
    def of(cls, keep: Tensor, positions: Tensor) -> "Chosen":
        """What `keep` [B, N] says, in the order of `positions` [B, N]."""
        last = torch.iinfo(torch.long).max
        order = torch.where(keep, positions, last).argsort(dim=-1)
        counts = keep.sum(dim=-1)
        rows, slots = (torch.arange(keep.shape[1], device=keep.device) < counts[:, None]).nonzero(as_tuple=True)
        return cls(rows, order[rows, slots], slots, counts.tolist())

    def put(self, segments: Segments, head: int, data: Tensor) -> None:
        """Write the tokens' `data` [n, D] into one head of packed segments."""
        segments.data[segments.offsets[self.rows, head] + self.slots] = data


Change = tuple[Chosen, list[int]]  # tokens of a head, and how many slots each of its rows gets


def repacked(segments: Segments, changes: dict[int, Change], fill: float = 0) -> Segments:
    """The same segments with those of some heads chosen from and resized; the other heads' are copied whole.

    Args:
        segments: packed ones.
        changes: by head.
        fill: what unwritten slots hold.
    """
    sizes = [changes[head][1] if head in changes else old for head, old in enumerate(segments.sizes)]
    data, batch = segments.data, segments.offsets.shape[0]
    new = Segments.packed(sizes, batch, data.shape[1], dtype=data.dtype, device=data.device, fill=fill)
    for head in range(len(sizes)):
        if head in changes:
            chosen = changes[head][0]
            chosen.put(new, head, data[segments.offsets[chosen.rows, head] + chosen.sources])
        else:
            new.run(head).copy_(segments.run(head))
    return new
