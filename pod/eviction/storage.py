"""Methods that organise the cache's storage themselves: a policy holds the hyper-parameters, its store the tokens.

A further one takes a dataclass derived from `StoragePolicy`, a `Store` that it makes, and a line in
`pod/eviction/__init__.py`. The cache hands every forward to the store: `begin`, then `attend` once per layer from the
lowest up, then `finish`. Quest, which drops nothing, makes no store: the cache's own storage holds its pages too.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks
from pod.eviction.base import Method, check_budget, check_types

POSITIONS = ("cache", "absolute")

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A model's rotary embedding: (states, position_ids [1, n]) -> cos and sin [1, n, D] in the states' dtype."""


class StoragePolicy(Method):
    """Hyper-parameters of a method that organises storage; many caches can be made with one.

    Attributes:
        positions: "absolute" (keys come after RoPE and keep the angle of their position) or "cache" (queries and keys
            come before RoPE, the store rotates each to its place among the kept tokens).
        stride: queries that are processed at once; a longer forward is cut into strides. None: a quarter of the budget,
            at least 1.

    Class attributes:
        sees_stride: a query attends to its whole stride up to itself, so that results depend on the stride.
    """

    positions: str
    stride: int | None

    sees_stride: ClassVar[bool] = True

    @property
    def at_once(self) -> int:
        """Queries that are processed at once."""
        return max(1, self.budget // 4) if self.stride is None else self.stride

    @abstractmethod
    def make_store(self, config: PreTrainedConfig, blocks: LayerBlocks) -> "Store | None":
        """An empty store for a model; None for a method that keeps every token in the cache's own storage (Quest).

        Not of a budget that is a share: rows have stores of what it comes to.

        Raises:
            ValueError: the policy and the model do not go together.
        """


class Store(ABC):
    """The tokens that one cache keeps.

    Attributes:
        pairs: (query, key) pairs multiplied so far, over rows, layers and query heads; what masks hide is in it.
        moved: vectors (a key or a value of one KV head) written into slots so far.
    """

    pairs: int = 0
    moved: int = 0

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""

    @abstractmethod
    def begin(self, inputs: Tensor, mask: Tensor | None, rotary: Rotary) -> None:
        """Prepare for the tokens of one forward.

        Args:
            inputs: [B, T, hidden]; gives rows, tokens, dtype and device. T is at most the policy's `at_once`.
            mask: [B, T] bool, False for padding on the left; None when all are real.
            rotary: the model's rotary embedding, for policies that rotate.

        Raises:
            ValueError: another number of rows, or padding after a row's first token in this forward.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend to what is kept and to the forward's own tokens, then store these.

        Args:
            layer: index of the layer; its anchors' layers have attended before.
            q, k, v: [B, H, T, D] and [B, H_kv, T, D]; q and k before RoPE when `positions` is "cache".
            scale: factor on every logit.

        Returns:
            [B, H, T, D].
        """

    @abstractmethod
    def finish(self) -> None:
        """Count the forward's tokens as seen."""

    @abstractmethod
    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 positions kept, oldest first, -1 where a slot is empty."""

    @abstractmethod
    def storages(self) -> list[Tensor]:
        """Every tensor held between forwards."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs, between two forwards: tensors by name, and what else there is as JSON."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the store whose `state` this is; this one is empty and of the same policy and model."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens and free the storage."""

    def nbytes(self) -> int:
        """Bytes of all storages, used or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages())


def check_policy(policy: StoragePolicy) -> None:
    """Refuse fields of a policy with slots that mean nothing, and warn of a stride that makes it another method.

    Raises:
        ValueError: names the value and what it may be.
    """
    check_types(policy)
    check_budget(policy)
    if policy.sinks < 0:
        raise ValueError(f"sinks must be >= 0 tokens, got {policy.sinks}")
    if policy.positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}; got {policy.positions!r}")
    if policy.stride is not None and policy.stride < 1:
        raise ValueError(f"stride must be at least 1 query, got {policy.stride}")
    if policy.sees_stride and not policy.is_share and (policy.stride or 0) > policy.budget:
        warnings.warn(
            f"{type(policy).__name__}: a stride of {policy.stride} queries is above the budget of {policy.budget} "
            "tokens: a prompt up to the stride is attended to as without eviction. Left out, it is a quarter of budget",
            stacklevel=4,
        )


def real_tokens(mask: Tensor) -> Tensor:
    """[B] int64 on the CPU, the real tokens of each row of mask [B, T] bool.

    Raises:
        ValueError: there is padding other than on the left; names the row.
    """
    real = mask.sum(dim=1)
    column = torch.arange(mask.shape[1], device=mask.device)
    is_left_padded = (mask == (column >= mask.shape[1] - real[:, None])).all(dim=1)
    real, is_left_padded = torch.stack([real, is_left_padded.long()]).cpu()  # the host waits once
    if not bool(is_left_padded.all()):
        row = int((is_left_padded == 0).nonzero()[0])
        raise ValueError(
            f"row {row} of attention_mask has padding after a real token. The cache supports left padding only: set "
            "tokenizer.padding_side = 'left', or pass use_cache=False."
        )
    return real


def strides(
    mask: Tensor | None, count: int, stride: list[int], device: torch.device
) -> list[tuple[Tensor, Tensor | None]]:
    """Cut a forward into strides, counted in each row from its first real token.

    A left-padded row is thereby cut as it would be alone.

    Args:
        mask: [B, T] bool, False for padding on the left; None when all are real.
        count: T.
        stride: [B or 1] queries of one piece.

    Returns:
        For each piece its columns [B or 1, n] int64, each row's right-aligned, and which of them are real
        [B, n] bool, None when all are.

    Raises:
        ValueError: there is padding other than on the left.
    """
    real = torch.tensor([count]) if mask is None else real_tokens(mask)
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
