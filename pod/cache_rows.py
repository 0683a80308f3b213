"""What a cache counts: the tokens of its rows, and what one forward adds to them.

Rows are packed: slot p of a row holds its p-th real token, so left padding is not stored, and sinks and recency count
from each row's first real token.
"""

from dataclasses import dataclass, field
from functools import cached_property

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
        is_first: the cache was empty.
        in_prefill: it is one of several forwards that are one prefill.
        masks: what the layers' attention has in common.
        read: with Quest, the positions [B, R] that the blocks up to now read, by anchor layer and KV head.
    """

    positions: Tensor
    before: Tensor
    length: int
    even: bool
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
    """

    lengths: Tensor | None = None
    longest: int = 0
    columns: int = 0
    most_columns: int = 0
    even: bool = True
    budgets: list[int] | None = None

    def reset(self) -> None:
        """Forget all rows."""
        self.__init__()

    def host_counts(self) -> dict[str, int | bool | list[int] | None]:
        """All but the lengths, which may lie on another device."""
        return {name: value for name, value in vars(self).items() if name != "lengths"}

    def step(self, count: int, mask: Tensor | None, in_prefill: bool) -> Step:
        """What a forward adds.

        Args:
            count: its tokens T, padding included.
            mask: [B, T] bool, False for padding tokens; None when all are real.
            in_prefill: see `Step`.

        Raises:
            ValueError: padding that is not on the left of this forward, a row that has tokens and gets none, or a later
                chunk of a prefill with padding; names the row.
        """
        column = torch.arange(count, device=self.lengths.device)
        positions, longest = self.lengths[:, None] + column, self.longest + count
        if mask is not None and bool(mask.all()):
            mask = None
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
        return Step(positions, self.lengths.clone(), longest, even, self.columns == 0, in_prefill)

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

    def crop(self, removed: int) -> None:
        """Take back the last tokens of every row."""
        self.lengths -= removed
        self.longest -= removed
        self.columns -= removed
