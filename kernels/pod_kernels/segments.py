"""Where a cache keeps its vectors: packed segments, one per row and KV head, each with an offset, a length, a capacity.

Legend: B rows, H heads stored here, D head dimension, C capacity of a segment, S segments' slots in all.

A rectangle (every capacity equal) lies in memory as [H, B, C, D]: a run of heads is then one contiguous piece, so that
a batched product over a run of heads reads the cache in place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Segments:
    """Vectors of the tokens of B rows and H heads, packed into one tensor.

    Attributes:
        data: [S, D], all segments after one another.
        offsets: [B, H] int64, the first slot of each segment.
        lengths: [B, H] int64, how many tokens were written; a ring holds the last of them.
        capacities: [B, H] int64, the slots of each segment.
        is_rectangle: all capacities are equal and the order is head, row, slot.
    """

    data: Tensor
    offsets: Tensor
    lengths: Tensor
    capacities: Tensor
    is_rectangle: bool = True

    @classmethod
    def allocate(
        cls, heads: int, capacity: int, dim: int, lengths: Tensor, *, dtype: torch.dtype, device: torch.device
    ) -> "Segments":
        """Empty segments of one capacity.

        Args:
            heads: H, may be 0.
            capacity: slots of each segment.
            dim: D.
            lengths: [B] int64; shared with the caller, who advances it in place.
        """
        batch = lengths.shape[0]
        data = torch.zeros(heads * batch * capacity, dim, dtype=dtype, device=device)
        offsets = torch.arange(heads * batch, device=device).view(heads, batch).t() * capacity
        capacities = torch.full((batch, heads), capacity, device=device, dtype=torch.long)
        return cls(data, offsets, lengths[:, None].expand(batch, heads), capacities)

    @property
    def rectangle(self) -> Tensor:
        """[H, B, C, D] view of the storage.

        Raises:
            ValueError: the segments have different capacities.
        """
        if not self.is_rectangle:
            raise ValueError("these segments have different capacities and cannot be viewed as [H, B, C, D]")
        batch, heads = self.offsets.shape
        capacity = self.data.shape[0] // max(1, batch * heads)
        return self.data.view(heads, batch, capacity, self.data.shape[1])

    def nbytes(self) -> int:
        """Bytes of the storage, used or not."""
        return self.data.untyped_storage().nbytes()


@dataclass
class LayerSegments:
    """What the cache holds for one layer.

    Attributes:
        order: the KV heads in the order in which they are stored: the layer's anchor heads first, then the others.
        num_anchors: how many of them are anchors of their block (a block of one layer counts).
        values: [B, H_kv] segments in that order: slot = position.
        keys: [B, num_anchors] segments of the anchor heads' keys: slot = position.
        near: [B, H_kv - num_anchors] segments of the other heads' own keys: sinks, then a ring of `ring_size`.
        sink_size, recent_size, ring_size: tokens; ring_size >= recent_size.
    """

    order: tuple[int, ...]
    num_anchors: int
    values: Segments
    keys: Segments
    near: Segments
    sink_size: int
    recent_size: int
    ring_size: int

    def near_slots(self, positions: Tensor) -> Tensor:
        """The slot of each position in `near`: positions below `sink_size` stand still, the others go round."""
        ring = self.sink_size + (positions - self.sink_size).remainder(self.ring_size)
        return torch.where(positions < self.sink_size, positions, ring)

    def near_positions(self, lengths: Tensor) -> Tensor:
        """The position that each slot of `near` holds.

        Args:
            lengths: [B] int64, tokens written to each row.

        Returns:
            [B, C] int64, -1 where a slot is empty.
        """
        slots = torch.arange(self.near.rectangle.shape[2], device=lengths.device)
        last = lengths[:, None] - 1 - self.sink_size
        age = (last - (slots - self.sink_size)).remainder(self.ring_size)
        ring = torch.where(last - age >= 0, self.sink_size + last - age, -1)
        sinks = torch.where(slots < lengths[:, None], slots, -1)
        return torch.where(slots < self.sink_size, sinks, ring)
