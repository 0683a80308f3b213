"""What a cache counts: the tokens of its rows, and what one forward adds to them.

Rows are packed: slot p of a row holds its p-th real token, so left padding is not stored, and sinks and recency count
from each row's first real token.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod_kernels import shared_score_attention
from pod_kernels.cached import Masks


@dataclass
class Step:
    """What one forward adds to the cache; the same for all its layers.

    Attributes:
        positions: [B, T] int64, the position of each new token in its row, -1 for padding.
        before: [B] int64, real tokens of each row before the forward.
        length: the longest row after it.
        even: every row has the same tokens, none of them padding.
        all_real: none of the new tokens is padding.
        is_first: the cache was empty.
        in_prefill: it is one of several forwards that are one prefill.
        masks: what the layers' attention has in common.
        read: with Quest, the positions [B, R] that the blocks up to now read, by anchor layer and KV head.
    """

    positions: Tensor
    before: Tensor
    length: int
    even: bool
    all_real: bool
    is_first: bool
    in_prefill: bool
    masks: Masks = field(default_factory=dict)
    read: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _near: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    # Finding indices waits for the device: once in a forward, not in each of its layers.

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Rows and columns, [n] int64 each, of the tokens that are no padding."""
        return (self.positions >= 0).nonzero(as_tuple=True)

    def near(self, sink_size: int, ring_size: int) -> tuple[Tensor, Tensor]:
        """Rows and columns, [n] int64 each, of the tokens that are sinks or among their row's last `ring_size`."""
        key = sink_size, ring_size
        if key not in self._near:
            last = self.positions[:, -1:]
            kept = (self.positions < sink_size) | (self.positions > last - ring_size)
            self._near[key] = ((self.positions >= 0) & kept).nonzero(as_tuple=True)
        return self._near[key]

    @cached_property
    def counts(self) -> Tensor | None:
        """[B] int64, the new tokens of each row that are no padding; None where none is padding in any row."""
        return None if self.even else (self.positions >= 0).sum(dim=1)

    def attend_prompt(
        self,
        config: PreTrainedConfig,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_distant: Tensor | None,
        k_distant: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Attention of the first forward's tokens among themselves, which no storage changes: as `PodCache.attend`."""
        return shared_score_attention(
            q,
            k,
            v,
            q_distant,
            k_distant,
            sink_size=config.sink_size,
            recent_size=config.recent_size,
            scale=scale,
            lengths=self.counts,
        )


@dataclass
class Rows:
    """The tokens that a cache has seen.

    Attributes:
        lengths: [B] int64, real tokens of each row, None before the first forward. Segments share this tensor.
        longest: the most of them.
        columns: the tokens with padding, what `generate` counts.
        most_columns: the most there ever were: cropping does not bring back what they pushed out of a ring.
        even: every row has the same tokens, none of them padding.
        budgets: [B] tokens that a method's share of the first prefill came to; None before, and without a share.
        starts: the columns at which forwards with padding began.
        padding: [F, B] int64, with how many columns of it each of them began; None where there was none.
    """

    lengths: Tensor | None = None
    longest: int = 0
    columns: int = 0
    most_columns: int = 0
    even: bool = True
    budgets: list[int] | None = None
    starts: list[int] = field(default_factory=list)
    padding: Tensor | None = None

    def reset(self) -> None:
        """Forget all rows."""
        self.__init__()

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

    def step(self, count: int, mask: Tensor | None, in_prefill: bool) -> Step:
        """What a forward adds.

        Args:
            count: its tokens T, padding included.
            mask: [B, T] bool, False for padding tokens, of which there are some; None when all are real.
            in_prefill: see `Step`.

        Raises:
            ValueError: padding that is not on the left of this forward, a row that has tokens and gets none, or a later
                chunk of a prefill with padding; names the row.
        """
        column = torch.arange(count, device=self.lengths.device)
        positions, longest = self.lengths[:, None] + column, self.longest + count
        if mask is not None:
            real = mask.sum(dim=1)
            is_left_padded = (mask == (column >= count - real[:, None])).all(dim=1)
            # The window of a prefill's last queries is cut from its chunks: padding between them would be in it.
            is_allowed = is_left_padded & ((self.lengths == 0) | (real == count) | ((real > 0) & (not in_prefill)))
            if not bool(is_allowed.all()):
                row = int((~is_allowed).nonzero()[0])
                if not is_left_padded[row]:
                    raise ValueError(
                        f"row {row} of attention_mask has padding after its first real token. The cache supports left "
                        "padding only: set tokenizer.padding_side = 'left', or pass use_cache=False."
                    )
                if not real[row]:
                    raise ValueError(
                        f"row {row} of attention_mask is all padding in this forward, and the cache holds tokens of "
                        "it: each row needs a token. Leave the row out with cache.batch_select_indices"
                    )
                raise ValueError(
                    f"row {row} of attention_mask has padding in a later chunk of one prefill: pad the prompts on the "
                    "left of all chunks, or feed this one after cache.prefill() is closed"
                )
            positions = (positions - (count - real[:, None])).masked_fill(~mask, -1)
            longest = int((self.lengths + real).max())
        even = self.even and mask is None
        return Step(positions, self.lengths.clone(), longest, even, mask is None, self.columns == 0, in_prefill)

    def add(self, step: Step) -> None:
        """Count what a forward has added."""
        self.lengths.copy_(torch.maximum(step.before, step.positions.amax(dim=1) + 1))
        self.count(step.length - self.longest, step.positions.shape[1])
        self.even = step.even

    def count(self, tokens: int, columns: int) -> None:
        """Count what the host counts: by so many tokens the longest row grows, by so many columns the rows."""
        self.longest += tokens
        self.columns += columns
        self.most_columns = max(self.most_columns, self.columns)

    def add_padding(self, start: int, padding: Tensor) -> None:
        """Note with how many columns of padding [B] the forward from column `start` on began."""
        self.starts = [*self.starts, start]
        self.padding = padding[None] if self.padding is None else torch.cat([self.padding, padding[None]])

    def select(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        if self.lengths is not None:
            is_fewer = len(rows) < len(self.lengths)
            self.lengths = self.lengths[rows]
            if is_fewer and not self.even:  # the longest may have gone
                self.longest = int(self.lengths.max())
        self.padding = None if self.padding is None else self.padding[:, rows]

    def end_of_padding(self) -> int:
        """The first column from which on no row has padding."""
        ends = zip(self.starts, () if self.padding is None else self.padding.amax(dim=1).tolist(), strict=True)
        return max((start + padding for start, padding in ends if padding), default=0)

    def crop(self, removed: int) -> None:
        """Take back the last tokens of every row."""
        self.lengths -= removed
        self.longest -= removed
        self.columns -= removed
