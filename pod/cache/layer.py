"""What is stored of one layer: slots, own keys of proximal tokens, and a table of the blocks anchored in it.

Own keys, which heads that are no anchors keep beside their block's slots, lie in sinks and a ring where nothing is
evicted. Else each has its position and its slot beside it: first those that are kept and still recent or sinks, later
those of new tokens. A new one takes an empty place, else that of the oldest which is no sink, which by then is not
recent any more. So a block of N tokens has at most min(N, sinks + recent + crop_slack) for each row, head and layer.

Slots beyond what is held are for the tokens up to `max_length` where that is known, else there are none at first, then
some. All segments get the same number more, so that they are full at the same step: `spare` of what they hold on
average. Places for own keys grow with them, by as many, up to what a row and head can need. A method that evicts at
every step never holds more than its budget: its slots are for that, once and for all.

Legend: B rows, A blocks anchored in the layer, S heads of it that are no anchors, M places of own keys of each, N slots
of the largest segment, S slots of all, T tokens of a forward, D head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pod.cache.storage import Step
from pod.cache.streams import Streams
from pod.eviction.base import BEYOND_MEMORY
from pod_kernels import LayerSlots, Quantization, QuantizedSegments, Segments
from pod_kernels.quantized import quantized
from pod_kernels.segments import Change, repacked

VECTORS = ("values", "keys")
OWN = ("near_keys", "near_positions", "near_slots")
COUNTS = ("sizes", "held", "budgets")
FACTS = ("heads", *COUNTS, "room", "is_packed", "has_holes")
EMPTY = torch.iinfo(torch.int32).max


def spare(tokens: int) -> int:
    """Slots beyond so many tokens where storage grows and it is not known how many are to come.

    A part of them, so that n tokens cost O(n) copies: to copy takes about a hundredth of a step's time.
    """
    return min(tokens // 8, 8 + tokens // 32)


@dataclass
class Headroom:
    """Capacities of a cache that evicts.

    Attributes:
        max_length: tokens that each row will reach, None when unknown.
        every: decoded tokens between two evictions; 0: none while decoding.
        most_near: own keys of proximal tokens that a row and head has at most.
    """

    max_length: int | None
    every: int
    most_near: int

    def after(self, length: int) -> int | None:
        """Tokens still to come after `length`, None when unknown."""
        return None if self.max_length is None else max(0, min(self.max_length, BEYOND_MEMORY) - length)

    def evicted(self, counts: np.ndarray, budgets: np.ndarray, length: int) -> np.ndarray:
        """[A, B] slots of units' rows that were evicted down to `counts` tokens after `length` were seen."""
        headroom = self.after(length)
        if not self.every:
            return counts + (headroom or 0)
        most = np.maximum(counts, budgets) + self.every
        return most if headroom is None else np.minimum(counts + headroom, most)

    def grown(self, held: np.ndarray, new: int, length: int) -> np.ndarray:
        """[A, B] slots of units' rows that hold so many tokens and get `new` more, which make it `length` seen."""
        return held + new + (self.after(length) or spare(int(held.sum()) // held.size))

    def near(self, held: int, widest: int, length: int, more: int = 0) -> int:
        """Places for own keys: `held` at most, and at least `more` to come; the largest unit has `widest` slots."""
        headroom = self.after(length)
        if headroom is None:
            headroom = self.most_near if self.every else 0
        return max(held, min(self.most_near, widest, held + max(headroom, more)))


@dataclass
class Layer(LayerSlots):
    """A layer's slots and own keys. With quantization, `values` and `keys` are at rest but while the layer attends.

    Attributes:
        headroom: how many places for own keys are allocated.
        quantization: how they are at rest; None: as they are.
        room: places that every row and head has empty at least; below 0 where tokens took those of older ones.
        streams: the heads that stream; None where none does.
    """

    headroom: Headroom = field(kw_only=True)
    quantization: Quantization | None = field(kw_only=True, default=None)
    room: int = 0
    streams: Streams | None = None
    _attends: bool = field(init=False, default=False)
    _resting: dict[str, QuantizedSegments] = field(init=False, default_factory=dict)  # what it was made full from
    _plain: dict[str, tuple] = field(init=False, default_factory=dict)  # sizes for which quantization does not pay

    # ------------------------------------------------------------------ all of it

    @property
    def _own(self) -> tuple[str, ...]:
        return OWN if self.near_positions is not None else OWN[:1]

    def tensors(self, used: int | None, pages: int | None) -> dict[str, Tensor]:
        """What is kept between two forwards, by name; only the first `used` tokens and `pages` of each row, if told."""
        tensors, counts = {}, {"values": used, "keys": used, "pages": pages}
        for name, count in counts.items():
            part = getattr(self, name)
            if part is not None:
                tensors |= part.named(name) if count is None else {name: part.rectangle[:, :, :count].flatten(0, 2)}
        if self.streams is not None:
            tensors["streams"] = self.streams.vectors[:, :, :, :used]
        return tensors | {name: getattr(self, name)[:, :, :used] for name in self._own}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        self.values, self.keys = self.values.of_rows(rows), self.keys.of_rows(rows)
        self.pages = None if self.pages is None else self.pages.of_rows(rows)
        self.streams = None if self.streams is None else self.streams.of_rows(rows)
        for name in self._own:
            setattr(self, name, getattr(self, name)[:, rows])

    def resize(self, name: str, sizes: np.ndarray) -> None:
        """Give keys, values or pages capacities that are no smaller, and what they were made full from."""
        segments = getattr(self, name)
        if not np.array_equal(segments.sizes, sizes):
            setattr(self, name, segments.resized(sizes))
            if name in self._resting:
                self._resting[name] = self._resting[name].resized(sizes)

    def repack(self, name: str, changes: dict[int, Change]) -> None:
        """Give keys or values of some heads, by their place, new slots."""
        setattr(self, name, repacked(getattr(self, name).full(), changes))
        self._resting.pop(name, None)

    def dequantize(self) -> None:
        """Keys and values in full precision, until the layer is through."""
        self._attends, self._resting = True, {}
        for name in VECTORS:
            if isinstance(getattr(self, name), QuantizedSegments):
                self._resting[name] = getattr(self, name)
                setattr(self, name, self._resting[name].full())

    def quantize(self, used: Callable[[int], Tensor], new: int, is_through: bool = False) -> None:
        """Quantise what is in full precision; while the layer attends only when it is through.

        Args:
            used: slots in use of so many heads, the first ones in storage order, [h * B] int64.
            new: tokens that were written since they were made full.
            is_through: the layer has attended.
        """
        self._attends &= not is_through
        if self.quantization is None or self._attends:
            return
        for name in VECTORS:
            full = getattr(self, name)
            if isinstance(full, QuantizedSegments) or self._plain.get(name) is full.sizes:
                continue
            if not self.quantization.pays(full.sizes, full.data.shape[1], full.data.element_size()):
                self._plain[name] = full.sizes
                continue
            rest, counts = self._resting.pop(name, None), used(len(full.sizes))
            if rest is None:
                rest = quantized(full, counts, self.quantization, is_key=name == "keys")
            else:
                rest.absorb(full, counts, new)
            setattr(self, name, rest)

    # ------------------------------------------------------------------ own keys

    @property
    def reach(self) -> int:
        """How far behind the newest token own keys are kept, so that cropped ones need not be computed again."""
        return self.headroom.most_near - self.sink_size - 1

    def add_own(self, keys: Tensor, step: Step, slots: Tensor | None) -> None:
        """The own keys of one new token in each row.

        Args:
            keys: [S, B, 1, D].
            step: what the forward adds.
            slots: [S, B, 1] of the values; not read with a ring.
        """
        self.room -= 1
        if self.ring_size:
            step.put_near(self.near_keys, keys, self.sink_size, self.ring_size)
            return
        is_sink = (self.near_positions >= 0) & (self.near_positions < self.sink_size)
        place = self.near_positions.masked_fill(is_sink, torch.iinfo(torch.int32).max).argmin(dim=-1, keepdim=True)
        self.near_positions.scatter_(2, place, step.positions.expand(slots.shape).int())
        self.near_slots.scatter_(2, place, slots.int())
        self.near_keys.scatter_(2, place[..., None].expand(*place.shape, keys.shape[-1]), keys)

    def with_own(self, keys: Tensor, step: Step, slots: Tensor | None) -> "Layer":
        """The layer as several queries see it: all old own keys, and those of their own tokens; see `add_own`."""
        seen = copy(self)
        if self.ring_size:
            known = step.positions
            if not step.is_first:
                known = torch.cat([self.ring_positions(step.before), known], dim=1)
            seen.near_positions = seen.near_slots = known[None]
        else:
            positions = step.positions.expand(slots.shape).int()
            seen.near_positions = torch.cat([self.near_positions, positions], dim=2)
            seen.near_slots = torch.cat([self.near_slots, slots.int()], dim=2)
        seen.near_keys = keys if step.is_first else torch.cat([self.near_keys, keys], dim=2)
        return seen

    def keep_own(self, seen: "Layer", step: Step) -> None:
        """After several queries, which saw `seen`: keep the own keys that a later token can need."""
        if self.ring_size:
            places = self.near_keys.shape[2]
            self.widen_own(step.length - (places - self.room), step.length)
            new = seen.near_keys[:, :, -step.positions.shape[1] :]
            step.put_near(self.near_keys, new, self.sink_size, self.ring_size)
            self.room = self.near_keys.shape[2] - step.length
        else:
            newest = step.positions[:, -1]
            self.pack_own(seen.near_keys, seen.near_positions, seen.near_slots, newest, self.reach, step.length)

    @property
    def is_own_full(self) -> bool:
        """One more token's own key needs a place that is not there yet."""
        heads, _, places, _ = self.near_keys.shape
        return heads > 0 and self.room < 1 and places < self.headroom.most_near and places < self._widest

    def widen_own(self, room: int, length: int) -> None:
        """See to empty places for `room` more tokens, while there may be more of them; `length` are seen."""
        places = self.near_keys.shape[2]
        held = places - max(0, self.room)
        short = self.headroom.near(held, self._widest, length, room) - places
        if short > 0:
            if self.near_positions is not None:
                self.near_positions = pad(self.near_positions, (0, short), value=-1)
                self.near_slots = pad(self.near_slots, (0, short))
            self.near_keys = pad(self.near_keys, (0, 0, 0, short))
            self.room = places + short - held

    def pack_own(self, keys: Tensor, positions: Tensor, slots: Tensor, newest: Tensor, reach: int, length: int) -> None:
        """Keep of own keys [S, B, M, D] the sinks and those at most `reach` behind the newest, rows have
        `length` tokens at most."""
        keep = (positions >= 0) & (slots >= 0)
        keep &= (positions < self.sink_size) | (positions >= newest[:, None] - reach)
        most = int(keep.sum(dim=-1).max()) if keep.numel() else 0
        capacity = self.headroom.near(most, self._widest, length)
        order = torch.where(keep, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)
        order = order[..., :capacity]
        short = capacity - order.shape[-1]
        held = positions.gather(2, order).masked_fill(~keep.gather(2, order), -1)
        self.near_positions = pad(held, (0, short), value=-1).int()
        self.near_slots = pad(slots.gather(2, order).clamp(min=0), (0, short)).int()
        packed = keys.gather(2, order[..., None].expand(*order.shape, keys.shape[-1]))
        self.near_keys = pad(packed, (0, 0, 0, short)).contiguous()
        self.room = capacity - most

    def relink_own(self, held: list[Tensor], newest: Tensor, reach: int | None, length: int) -> None:
        """Find the slots of own keys again, and drop those whose token is gone.

        Args:
            held: for each of the S heads the positions [B, N] of its slots.
            newest: [B].
            reach: as `pack_own`; None as far as they may be cropped.
            length: above every position.
        """
        positions, spare = self.near_positions.long(), length
        slots = torch.empty_like(positions)
        for place, row in enumerate(held):
            found = torch.full((row.shape[0], spare + 1), -1, device=row.device)
            index = torch.arange(row.shape[1], device=row.device).expand(row.shape)
            found.scatter_(1, torch.where(row < 0, spare, row), index)
            found[:, spare] = -1
            slots[place] = found.gather(1, torch.where(positions[place] < 0, spare, positions[place]))
        self.pack_own(self.near_keys, positions, slots, newest, self.reach if reach is None else reach, length)

    @property
    def _widest(self) -> int:
        return int(self.values.sizes.max(initial=0))


@dataclass
class Table:
    """The blocks anchored in one layer.

    Attributes:
        heads: their KV heads, in storage order.
        sizes: [A, B] slots of each; keys and values lie the same way. This and other counts are the host's.
        held: [A, B] tokens of each; known only until a token is decoded.
        slots: [B, A] segments of positions, [S, 1] int32, -1 where a slot is empty; None: slot = position.
        scores: the same of float32, where scores are needed later.
        budgets: [A, B] what decoding keeps of each; None until a prefill has decided.
        targets: [A, B] what a prefill leaves of each, once decided.
        room: empty slots that every segment has at least.
        is_packed: these are every segment's last slots, and all others hold a token.
        has_holes: slots are not in order of position.
        new_slots: [A, B, T] where the tokens of this forward are; an integer: the first of them, everywhere.
        received: [B, A, N] scores of this forward, a step, to be added to those that are carried.
        evicted: [A, B, N] slots that are given up when this forward ends.
    """

    heads: tuple[int, ...]
    sizes: np.ndarray
    held: np.ndarray
    slots: Segments | None = None
    scores: Segments | None = None
    budgets: np.ndarray | None = None
    targets: np.ndarray | None = None
    room: int = 0
    is_packed: bool = False
    has_holes: bool = False
    new_slots: Tensor | int | None = None
    received: Tensor | None = None
    evicted: Tensor | None = None

    def positions(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] int64, -1 where a slot is empty; of some blocks, when told."""
        return _some(self.slots.padded(-1)[..., 0], units).transpose(0, 1).long()

    def carried(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] float32, the scores; of some blocks, when told."""
        return _some(self.scores.padded(0)[..., 0], units).transpose(0, 1)

    def live(self) -> Tensor:
        """[A, B] int64, tokens of each."""
        return (self.slots.padded(-1)[..., 0] >= 0).sum(dim=-1)

    def add_scores(self, more: Tensor) -> None:
        """Add [B, A, N] to the scores."""
        for place, view in _views(self.scores):
            view += more.transpose(0, 1)[place]

    def set_scores(self, scores: Tensor) -> None:
        """Give the tokens these scores, [B, A, N]."""
        sizes = self.slots.sizes
        self.scores = Segments.packed(sizes, sizes.shape[1], 1, dtype=torch.float32, device=self.slots.data.device)
        self.add_scores(scores)

    def over_target(self, index: int) -> bool:
        """A row of this block holds more than the prefill may leave of it."""
        return self.targets is not None and bool((self.held[index] > self.targets[index]).any())

    def count_room(self, at_budget: bool = False) -> None:
        """Note how many empty slots every segment has; `at_budget`: none holds more than its budget."""
        spare = self.sizes - (self.budgets if at_budget else self.held)
        room = int(spare.min())
        self.room = max(self.room, room) if at_budget else room
        self.is_packed = not (at_budget or self.has_holes) and room == int(spare.max())

    def place(self, step: Step, count: int) -> None:
        """Choose the slots of a forward's tokens, T of them; `write` then puts their positions there."""
        size = int(self.sizes[0, 0])
        if self.slots is None:
            # A row of which nothing but padding was seen: what lands in its last slot is overwritten before it is read.
            self.new_slots = step.length - count if step.even else step.positions.remainder(size)[None]
            self.room = size - step.length
            return
        if count > 1:
            self.new_slots = self.live()[..., None] + (step.positions >= 0).cumsum(dim=1) - 1
        elif self.is_packed:
            same = self.slots.is_rectangle
            self.new_slots = (size if same else self.slots.capacities.t()[..., None]) - self.room
        else:
            self.new_slots = self.slots.padded(EMPTY)[..., 0].argmin(dim=-1, keepdim=True)  # the first empty one
        self.room -= count
        self.is_packed &= step.all_real

    def write(self, step: Step, real: tuple[Tensor, Tensor] | None) -> None:
        """Note the positions of a forward's tokens, which have no score yet; see `Segments.write`."""
        if self.slots is None:
            return
        positions = step.to_be_stored.expand(len(self.heads), -1, -1, -1)
        self.slots.write(self.new_slots, positions, real)
        if self.scores is not None:
            self.scores.write(self.new_slots, torch.zeros_like(positions, dtype=torch.float32), real)

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on, `removed` of each row; 0: what a failed forward has left."""
        if self.slots is None:
            return
        for (_, rows, _), held in _views(self.slots):
            held.masked_fill_(held >= lengths[rows, None], -1)
        self.room += removed
        self.is_packed &= removed > 0

    def resize(self, sizes: np.ndarray) -> None:
        """More slots; what is held stays in its slot."""
        self.sizes = sizes
        if self.slots is not None:
            self.slots = self.slots.resized(sizes, fill=-1)
        if self.scores is not None:
            self.scores = self.scores.resized(sizes)

    def drop_evicted(self) -> None:
        """Mark slots that a step gives up as empty."""
        for piece, held in _views(self.slots):
            held.masked_fill_(self.evicted[piece], -1)
        self.evicted = None
        self.has_holes = True
        self.count_room(at_budget=True)

    def of_rows(self, rows: Tensor) -> "Table":
        """The table of some rows [n] int64, in that order."""
        if self.slots is None:
            sizes = self.sizes[:, :1].repeat(len(rows), axis=1)
            return replace(self, sizes=sizes, held=sizes)
        counts = {name: getattr(self, name) for name in COUNTS if getattr(self, name) is not None}
        counts = {name: each[:, rows.tolist()] for name, each in counts.items()}
        scores = None if self.scores is None else self.scores.of_rows(rows)
        return replace(self, slots=self.slots.of_rows(rows), scores=scores, **counts)

    def repack(self, changes: dict[int, Change]) -> None:
        """Give some blocks, by their place, new slots."""
        self.slots = repacked(self.slots, changes, fill=-1)
        self.sizes = self.slots.sizes
        if self.scores is not None:
            self.scores = repacked(self.scores, changes)
        for place, (chosen, _) in changes.items():
            self.held[place] = chosen.counts
        self.has_holes &= len(changes) < len(self.heads)
        self.count_room()

    def tensors(self) -> dict[str, Tensor]:
        """What is kept between two forwards, by name."""
        parts = {"slots": self.slots, "scores": self.scores}
        return {name: part.data for name, part in parts.items() if part is not None}


def _some(rows: Tensor, chosen: Sequence[int] | None) -> Tensor:
    """Some of the first dimension's; a list as an index would be copied to the device."""
    return rows if chosen is None else torch.stack([rows[index] for index in chosen])


def _views(segments: Segments) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Views [h, b, C] of segments of single numbers, each with its place in the padded [H, B, N]."""
    for piece in segments.pieces:
        heads, rows = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        yield (heads, rows, slice(piece.capacity)), segments.view(piece)[..., 0]
