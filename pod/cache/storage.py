"""What a `PodCache` counts, the tokens of its rows and what one forward adds to them, and what it asks of its storage.

Rows are packed: slot p of a row holds its p-th real token, so left padding is not stored, and sinks and recency count
from each row's first real token. `pod.cache.slots` and `pod.cache.chain` are the two kinds of storage.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.configuration_utils import PreTrainedConfig

from pod.eviction import Method
from pod_kernels import SkipStats
from pod_kernels.cached import Masks
from pod_kernels.segments import ring_places

Anchors = tuple[Tensor | None, Tensor | None]
"""The running anchors' queries [B, H, T, D] and keys [B, H_kv, T, D]; None where they are not needed."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A model's rotary embedding: (states, position_ids [1, n]) -> cos and sin [1, n, D] in the states' dtype."""

Pieces = list[tuple[Tensor | None, Tensor | None]]
"""What a forward is cut into; see `PodCache.open`."""

Outputs = Callable[[int], Tensor]
"""A model's output projections: layer -> [hidden, H * D]."""


def widened(parts: list[Tensor]) -> list[Tensor]:
    """Positions [.., n], of other n, with as many -1 behind them that all are as long as the longest."""
    widest = max(part.shape[-1] for part in parts)
    return [pad(part, (0, widest - part.shape[-1]), value=-1) for part in parts]


def oldest_first(held: Tensor) -> Tensor:
    """Positions [.., n] in their order, behind them -1 for the empty slots."""
    last = torch.iinfo(held.dtype).max
    ordered = held.masked_fill(held < 0, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, -1)


@dataclass
class Step:
    """What one forward adds to the cache; the same for all its layers.

    Attributes:
        positions: [B, T] int64, the position of each new token in its row, -1 for padding.
        before: [B] int64, real tokens of each row before the forward.
        seen, new: [B] the same on the host, and how many of the new ones are real.
        is_first: the cache was empty.
        in_prefill: it is one of several forwards that are one prefill.
        masks: what the layers' attention has in common.
        read: with Quest, the positions [B, R] that the blocks up to now read, by anchor layer and KV head.
    """

    positions: Tensor
    before: Tensor
    seen: list[int]
    new: list[int]
    is_first: bool
    in_prefill: bool
    masks: Masks = field(default_factory=dict)
    read: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _near: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    _by_device: dict[torch.device, "Step"] = field(default_factory=dict)  # the same one for all of them

    @cached_property
    def length(self) -> int:
        """Tokens of the longest row after it."""
        return max(map(sum, zip(self.seen, self.new, strict=True)))

    @cached_property
    def all_real(self) -> bool:
        """None of the new tokens is padding."""
        return min(self.new) == self.positions.shape[1]

    @cached_property
    def even(self) -> bool:
        """Every row has the same tokens, none of the new ones padding."""
        return self.all_real and len(set(self.seen)) == 1

    # Finding indices waits for the device: once in a forward, not in each of its layers.

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Rows and columns, [n] int64 each, of the tokens that are no padding."""
        return (self.positions >= 0).nonzero(as_tuple=True)

    @cached_property
    def to_be_stored(self) -> Tensor:
        """[1, B, T, 1] int32, the positions as tables of slots hold them."""
        return self.positions[None, ..., None].int()

    def put_near(self, held: Tensor, new: Tensor, sink_size: int, ring_size: int) -> None:
        """Write new [.., B, T, D], of sinks and a row's last `ring_size` tokens, to their places in [.., B, M, D]."""
        if self.even and self.positions.shape[1] == 1 and not new.is_cuda:  # the host knows where: a view is quicker
            place = self.length - 1
            place = place if place < sink_size else sink_size + (place - sink_size) % ring_size
            held[..., place : place + 1, :] = new
            return
        key = sink_size, ring_size
        if key not in self._near:
            if self.positions.shape[1] == 1 and not self.is_first:
                # Every row's token; the host need not know where: a CUDA graph repeats this.
                rows = torch.arange(len(self.positions), device=self.positions.device)
                columns = torch.zeros_like(rows)
            else:
                kept = (self.positions < sink_size) | (self.positions > self.positions[:, -1:] - ring_size)
                rows, columns = ((self.positions >= 0) & kept).nonzero(as_tuple=True)
            self._near[key] = rows, columns, ring_places(self.positions[rows, columns], *key)
        rows, columns, places = self._near[key]
        held[..., rows, places, :] = new[..., rows, columns, :]

    @cached_property
    def counts(self) -> Tensor | None:
        """[B] int64, the new tokens of each row that are no padding; None where none is padding in any row."""
        return None if self.even else (self.positions >= 0).sum(dim=1)

    def of_rows(self, rows: slice) -> "Step":
        """The same of some rows."""
        parts = {name: getattr(self, name)[rows] for name in ("positions", "before", "seen", "new")}
        return replace(self, **parts, masks={}, read={}, _near={}, _by_device={})

    def on(self, device: torch.device) -> "Step":
        """The same for layers on another device, copied there once in a forward."""
        if self.positions.device == device:
            return self
        self._by_device[self.positions.device] = self
        if device not in self._by_device:
            parts = {name: getattr(self, name).to(device) for name in ("positions", "before")}
            self._by_device[device] = replace(self, **parts, masks={}, read={}, _near={})
        return self._by_device[device]


@dataclass
class Rows:
    """The tokens that a cache has seen.

    Attributes:
        lengths: [B] int64, real tokens of each row, None before the first forward. Segments share this tensor.
        seen: [B] the same on the host.
        columns: the tokens with padding, what `generate` counts.
        most_columns: the most there ever were: cropping does not bring back what they pushed out of a ring.
        budgets: [B] tokens that a method's share of the first prefill came to; None before, and without a share.
        starts: the columns at which forwards with padding began.
        padding: [F, B] int64, with how many columns of it each of them began; None where there was none.
    """

    lengths: Tensor | None = None
    seen: list[int] = field(default_factory=list)
    columns: int = 0
    most_columns: int = 0
    budgets: list[int] | None = None
    starts: list[int] = field(default_factory=list)
    padding: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.seen, default=0)

    def reset(self, batch: int | None = None, device: torch.device | None = None) -> None:
        """Forget all rows; where told, `batch` rows without tokens are there."""
        self.__init__()
        if batch is not None:
            self.lengths, self.seen = torch.zeros(batch, dtype=torch.long, device=device), [0] * batch

    def apart(self) -> "Rows":
        """A copy that counts on by itself."""
        return replace(self, lengths=self.lengths.clone())

    def host_counts(self) -> dict[str, Any]:
        """All but the tensors, which may lie on another device."""
        return {name: value for name, value in vars(self).items() if name not in ("lengths", "padding")}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        both = {"lengths": self.lengths, "padding": self.padding}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    def new_part(self, mask: Tensor, count: int) -> Tensor | None:
        """What of a mask is of the new tokens; the rest agrees with what the cache holds.

        Args:
            mask: [B, T] or [B, columns + T] bool, False for padding.
            count: T.

        Returns:
            [B, T]; None where all are real, if the rest, for which the host waits, says so.

        Raises:
            ValueError: it does not agree; names the token.
        """
        past, new = mask[:, :-count], mask[:, -count:]
        if not past.shape[1]:
            return new
        column, held = torch.arange(self.columns, device=mask.device), torch.ones_like(past)
        for start, padding in zip(self.starts, () if self.padding is None else self.padding, strict=True):
            held &= (column < start) | (column >= start + padding[:, None])
        # The host waits once for both.
        is_whole, differs = torch.stack([new.all(), (past != held).any()]).tolist()
        if differs:
            row, token = (past != held).nonzero()[0].tolist()
            said, was = ("padding", "real") if held[row, token] else ("real", "padding")
            raise ValueError(
                f"row {row} of attention_mask says that token {token} is {said}, and the cache holds it as {was}: what "
                "was stored can be neither masked nor unmasked. Pass the mask that it was stored with, with ones for "
                "the tokens since (without one, generate takes every pad token for padding), or call cache.reset()"
            )
        return None if is_whole else new

    def step(self, count: int, mask: Tensor | None, in_prefill: bool, may_be_empty: bool = False) -> Step:
        """What a forward adds; with a mask the host waits, once.

        Args:
            count: its tokens T, padding included.
            mask: [B, T] bool, False for padding tokens; None when all are real.
            in_prefill: see `Step`.
            may_be_empty: rows may have no token in it.

        Raises:
            ValueError: padding that is not on the left of this forward, a row that has tokens and gets none, or a later
                chunk of a prefill with padding; names the row.
        """
        new = [count] * len(self.seen) if mask is None else real_tokens(mask)
        for row, (real, seen) in enumerate(zip(new, self.seen, strict=True)):
            if may_be_empty or not seen or real == count:
                continue
            if not real:
                raise ValueError(
                    f"row {row} of attention_mask is all padding in this forward, and the cache holds tokens of it: "
                    "each row needs a token. Leave the row out with cache.batch_select_indices"
                )
            # The window of a prefill's last queries is cut from its chunks: padding between them would be in it.
            if in_prefill:
                raise ValueError(
                    f"row {row} of attention_mask has padding in a later chunk of one prefill: pad the prompts on the "
                    "left of all chunks, or feed this one after cache.prefill() is closed"
                )
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        if min(new) < count:
            positions = (positions - (count - mask.sum(dim=1))[:, None]).masked_fill(~mask, -1)
        return Step(
            positions,
            self.lengths.clone(),
            self.seen,
            new,
            is_first=self.columns == 0,
            in_prefill=in_prefill,
        )

    def add(self, step: Step) -> None:
        """Count what a forward has added."""
        step = step.on(self.lengths.device)
        columns = step.positions.shape[1]
        self.lengths += columns if step.all_real else step.counts
        self.count(step.new, columns)

    def count(self, new: list[int], columns: int) -> None:
        """Count what the host counts: `new` [B] tokens, in so many columns."""
        self.seen = [seen + more for seen, more in zip(self.seen, new, strict=True)]
        self.columns += columns
        self.most_columns = max(self.most_columns, self.columns)

    def add_padding(self, start: int, padding: Tensor) -> None:
        """Note with how many columns of padding [B] the forward from column `start` on began."""
        self.starts = [*self.starts, start]
        self.padding = padding[None] if self.padding is None else torch.cat([self.padding, padding[None]])

    def select(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        self.lengths = self.lengths[rows]
        each = list(zip(self.seen, self.budgets or self.seen, strict=True))
        # Where rows are alike the host need not know which these are.
        chosen = each[:1] * len(rows) if len(set(each)) == 1 else [each[row] for row in rows.tolist()]
        self.seen = [seen for seen, _ in chosen]
        self.budgets = self.budgets and [budget for _, budget in chosen]
        self.padding = None if self.padding is None else self.padding[:, rows]

    def end_of_padding(self) -> int:
        """The first column from which on no row has padding."""
        ends = zip(self.starts, () if self.padding is None else self.padding.amax(dim=1).tolist(), strict=True)
        return max((start + padding for start, padding in ends if padding), default=0)

    def crop(self, removed: int) -> None:
        """Take back the last tokens of every row."""
        self.lengths -= removed
        self.seen = [seen - removed for seen in self.seen]
        self.columns -= removed


def left_padded(mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] each: the real tokens of rows of mask [B, T] bool, and whether all their padding is on the left."""
    real = mask.sum(dim=1)
    column = torch.arange(mask.shape[1], device=mask.device)
    return real, (mask == (column >= mask.shape[1] - real[:, None])).all(dim=1)


def real_tokens(mask: Tensor) -> list[int]:
    """[B] the real tokens of each row of mask [B, T] bool; the host waits once.

    Raises:
        ValueError: there is padding other than on the left; names the row.
    """
    real, is_left_padded = torch.stack([part.long() for part in left_padded(mask)]).tolist()
    if not all(is_left_padded):
        raise ValueError(
            f"row {is_left_padded.index(0)} of attention_mask has padding after its first real token. The cache "
            "supports left padding only: set tokenizer.padding_side = 'left', or pass use_cache=False."
        )
    return real


def strides(mask: Tensor | None, count: int, stride: list[int], device: torch.device) -> Pieces:
    """Cut a forward that is longer than a stride into strides, counted in each row from its first real token.

    A left-padded row is thereby cut as it would be alone.

    Args:
        mask: [B, T] bool, False for padding on the left; None when all are real.
        count: T.
        stride: [B or 1] queries of one piece.

    Returns:
        For each piece its columns [B or 1, n] int64, each row's right-aligned, None where it is not cut, and which of
        them are real [B, n] bool, None when all are.

    Raises:
        ValueError: there is padding other than on the left.
    """
    if count <= min(stride):
        return [(None, mask)]
    real = torch.tensor([count] if mask is None else real_tokens(mask))
    pieces, stride = [], torch.tensor(stride)
    for number in range(max(1, int((-(-real // stride)).max()))):
        first = number * stride
        mine = (real - first).clamp(min=0).minimum(stride)
        width = max(1, int(mine.max()))
        place = torch.arange(width) - (width - mine)[:, None]
        columns = ((count - real + first)[:, None] + place).clamp(0, count - 1)
        is_real = place >= 0
        pieces.append((columns.to(device), None if bool(is_real.all()) else is_real.to(device)))
    return pieces


def broken_off() -> ValueError:
    """What is raised where a forward broke off that cannot be forgotten."""
    return ValueError(
        "the last forward broke off, and tokens that the cache held have made room for its own in some layers: call "
        "cache.reset() and feed the whole text again"
    )


class Storage(ABC):
    """Keys and values; the cache hands over every forward: `begin`, `attend` once per layer upwards, `finish`.

    Args:
        config: the PoD model's config.
        rows: what the cache counts.
        method: says what is kept, or read; None: everything.

    Attributes:
        rotates: queries and keys are handed over before RoPE, and rotated here.
        is_croppable: the last tokens can be taken back.
        is_fixed: more tokens take no more room.
        repeats_steps: a CUDA graph can repeat a step of decoding while nothing moves.
        in_prefill: forwards are parts of one prefill.
        step: what the forward that is running adds; None between two.
        shared: first tokens of every row that are stored once for all of them.
        workspace: what layers leave each other during a step; None where there is nothing.
        by_kernels: Triton's kernels run; None before the first layer has asked (`pod_kernels.dispatch`).
        stats: what tau decided and left unread.
        outputs: the model's output projections, where the method reads them.
    """

    rotates = False
    is_croppable = False
    is_fixed = False
    repeats_steps = False
    shared = 0
    workspace: Tensor | None = None
    outputs: Outputs | None = None

    def __init__(self, config: PreTrainedConfig, rows: Rows, method: Method | None) -> None:
        self.config, self.rows, self.method, self.layout = config, rows, method, config.blocks.layout()
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.has_share = method is not None and method.is_share
        self.in_prefill = False
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is the model's, which a forward brings: copies and pickles are of the tokens alone."""
        return {name: value for name, value in vars(self).items() if name not in ("outputs", "rotary")}

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self.step: Step | None = None
        self.by_kernels: bool | None = None
        self.stats = SkipStats()

    # ------------------------------------------------------------------ one forward

    def pieces(self, mask: Tensor | None, count: int, device: torch.device) -> Pieces:
        """Cut a forward into what can be processed at once; see `PodCache.open`."""
        return [(None, mask)]

    def takes_anchors(self, count: int) -> bool:
        """Whether `attend` needs the running anchors' queries and keys in a forward of `count` tokens."""
        return False

    @abstractmethod
    def begin(self, step: Step, inputs: Tensor, rotary: Rotary) -> None:
        """Take note of what one forward adds.

        Args:
            step: that.
            inputs: [B, T, hidden]; gives dtype and device.
            rotary: the model's rotary embedding.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, scale: float) -> Tensor:
        """Store one layer's keys and values and attend; arguments as `PodCache.attend`, both of the anchors' in one."""

    @abstractmethod
    def finish(self) -> None:
        """The forward is through all layers; the cache counts its tokens after this."""

    def rollback(self) -> None:
        """Forget a forward that broke off, whose tokens are in some layers.

        Raises:
            ValueError: tokens that were there before have made room for it.
        """
        raise broken_off()

    def take_share(self, tokens: Sequence[int]) -> None:
        """Fix the rows' budgets, of a method whose budget is a share, by the [B] tokens of their first prefill."""
        sinks = 0 if self.config.blocks.is_dense else self.config.sink_size
        self.rows.budgets = [self.method.tokens_of(count, sinks, self.groups) for count in tokens]

    # ------------------------------------------------------------------ several forwards that are one prefill

    def mark_prefill(self, is_open: bool) -> None:
        """The forwards up to the next call are one prefill, or no more; where `close_prefill` was not, nothing acts."""
        self.in_prefill = is_open

    def close_prefill(self) -> None:  # noqa: B027 - most storages act on every forward
        """All of them are done: what acts at the end of a prefill acts."""

    def cleared(self) -> "Storage":
        """A storage like it without tokens: itself, after `reset`."""
        self.reset()
        return self

    def apart(self, rows: Rows, lends: bool = True) -> "Storage":
        """A storage of the same tokens, for forwards that this one is not to know of.

        Args:
            rows: what counts its tokens, a copy of this one's.
            lends: what is held may be held in common, where tokens are only added.
        """
        common = (self.config, self.layout, *(self.lent() if lends else ()))
        return deepcopy(self, {id(each): each for each in common} | {id(self.rows): rows})

    def lent(self) -> list[object]:
        """What a storage `apart` may hold in common with this one."""
        return []

    def evict(self, scores: Mapping[int, Tensor]) -> None:
        """Evict as `PodCache.evict` says."""
        raise ValueError(
            f"cache.evict is for a method that waits for scores, pod.eviction.KVzip, and before anything follows the "
            f"prefill; this cache has {self.method!r}"
        )

    # ------------------------------------------------------------------ between two forwards

    @abstractmethod
    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 positions kept by head, oldest first, -1 behind them."""

    @abstractmethod
    def storages(self) -> list[Tensor]:
        """Every tensor that is kept between two forwards, the workspace left out."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order; the cache counts them already."""

    def expect(self, length: int | None) -> None:  # noqa: B027 - what has a fixed size need not know
        """Rows will reach so many tokens; None: that is not known."""

    def check_crop(self, removed: int) -> None:
        """Refuse to take back what eviction has acted on.

        Raises:
            ValueError: what the last tokens pushed out is gone.
        """
        raise ValueError(
            f"{type(self.method).__name__} cannot take tokens back: what they pushed out is gone. Decode without "
            "draft tokens (no assistant_model, no prompt_lookup_num_tokens), or make the cache without eviction."
        )

    def crop(self, removed: int) -> None:
        """Forget `removed` positions of each row, whose lengths the cache has lowered already, after `check_crop`."""
        self.check_crop(removed)  # which refuses, where this is not redefined

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs, between two forwards: tensors by name, and what `write_cache` takes of facts."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the storage whose `state` this is, of the rows that the cache has restored; this one is empty."""
