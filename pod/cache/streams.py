"""Keys and values of the heads of one layer that stream: sinks and a ring, whatever the other heads keep.

A head that streams (DuoAttention, arXiv 2410.10819) attends to sinks and recent tokens alone. Its ring is longer than
`recent_size` by what may be cropped, so that N tokens take min(N, sinks + ring) places for a key and for a value.
Positions are those of the text. With no table and nothing evicted by scores, it can be cropped, and a CUDA graph
repeats its steps.

Legend: B rows, W heads that stream, M places, T tokens of a forward, H query heads, D head dimension.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pod.cache.storage import Step
from pod_kernels.segments import ring_positions
from pod_kernels.window import window_attention, window_mask

LEAST_CHUNK = 64  # queries of a prefill that look at keys together, at least


@dataclass
class Streams:
    """What is held of one layer's heads that stream.

    Attributes:
        vectors: [2, W, B, M, D] keys and values.
        sink_size, recent_size, ring_size: tokens.
    """

    vectors: Tensor
    sink_size: int
    recent_size: int
    ring_size: int

    @property
    def most(self) -> int:
        """Places that a row has at most."""
        return self.sink_size + self.ring_size

    def is_full(self, length: int) -> bool:
        """Rows of `length` tokens need places that are not there."""
        return self.vectors.shape[3] < min(length, self.most)

    def widen(self, places: int) -> None:
        """See to so many places; what is held stays where it is."""
        short = places - self.vectors.shape[3]
        if short > 0:
            self.vectors = pad(self.vectors, (0, 0, 0, short))

    def of_rows(self, rows: Tensor) -> "Streams":
        """The same of the rows `rows` [n] int64, in that order."""
        return replace(self, vectors=self.vectors[:, :, rows])

    def held(self, lengths: Tensor, cropped: int = 0) -> Tensor:
        """[B, M] int64, the position in each place of rows of `lengths` [B] tokens, -1 where there is none.

        `cropped` tokens were behind these: what they pushed out of the ring is no longer there.
        """
        known = ring_positions(lengths, self.vectors.shape[3], self.sink_size, self.ring_size)
        if not cropped:
            return known
        lost = (known >= self.sink_size) & (known < lengths[:, None] + cropped - self.ring_size)
        return known.masked_fill(lost, -1)

    def write(self, new: Tensor, step: Step, places: int) -> None:
        """Store what later tokens can need of a forward's keys and values [2, W, B, T, D], in so many places."""
        self.widen(places)
        step.put_near(self.vectors, new, self.sink_size, self.ring_size)

    def attend(self, q: Tensor, new: Tensor, step: Step, places: int, scale: float) -> Tensor:
        """Store a forward's keys and values, and attend: each query to the sinks and recent tokens up to itself.

        Args:
            q: [B, H, T, D] queries of the heads that stream.
            new: [2, W, B, T, D].
            step: what the forward adds; not the first.
            places: that the tokens after it need.
            scale: factor on every logit.

        Returns:
            [B, H, T, D].
        """
        count, positions, sinks, recent = q.shape[2], step.positions, self.sink_size, self.recent_size
        before = self.vectors
        known = None if count == 1 else torch.cat([self.held(step.before), positions], dim=1)
        if count > 1:  # the last tokens push out what the first ones still need
            before = torch.cat([before, new], dim=3)
        self.write(new, step, places)
        is_padding = step.masks.get("padding")
        if is_padding is None:
            is_padding = step.masks["padding"] = (positions < 0)[:, None, :, None]
        if count == 1:
            # A forward that broke off may have given the first layers alone more places.
            name, (keys, values) = ("window", self.vectors.shape[3]), self.vectors.transpose(1, 2)
            if name not in step.masks:
                known = self.held(torch.maximum(step.before, positions[:, -1] + 1))
                step.masks[name] = window_mask(known, positions, sinks, recent)
            return window_attention(q, keys, values, step.masks[name], is_padding, scale)
        lengths = torch.maximum(step.before, positions[:, -1] + 1)
        # Sinks stand still, so those of the new tokens are in the ring's by now.
        sinks_known = self.held(lengths)[:, :sinks]
        later = positions.masked_fill(positions < sinks, -1)
        # A row with padding before its new tokens needs what it held for as many queries more.
        padded = max((count - own for seen, own in zip(step.seen, step.new, strict=True) if seen), default=0)
        chunk, first_new, parts = max(LEAST_CHUNK, recent // 4), known.shape[1] - count, []
        for first in range(0, count, chunk):
            stop = min(first + chunk, count)
            if first < recent + padded:
                seen, at = before[..., : first_new + stop, :], known[:, : first_new + stop]
            else:
                start = first - recent + 1
                seen = torch.cat([self.vectors[..., :sinks, :], new[..., start:stop, :]], dim=3)
                at = torch.cat([sinks_known, later[:, start:stop]], dim=1)
            keys, values = seen.transpose(1, 2)
            mask = window_mask(at, positions[:, first:stop], sinks, recent)
            here = q[:, :, first:stop], keys, values, mask, is_padding[:, :, first:stop]
            parts.append(window_attention(*here, scale))
        return torch.cat(parts, dim=2)
