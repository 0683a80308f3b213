"""What a `PodCache` keeps its tokens in: one protocol, of which `pod.cache.slots` and `pod.cache.chain` are kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.cache.rows import Rows, Step
from pod.eviction import Method
from pod_kernels import SkipStats

Anchors = tuple[Tensor | None, Tensor | None]
"""The running anchors' queries [B, H, T, D] and keys [B, H_kv, T, D]; None where they are not needed."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A model's rotary embedding: (states, position_ids [1, n]) -> cos and sin [1, n, D] in the states' dtype."""


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
        workspace: what layers leave each other during a step; None where there is nothing.
        by_kernels: Triton's kernels run; None before the first layer has asked (`pod_kernels.dispatch`).
        stats: what tau decided and left unread.
    """

    rotates = False
    is_croppable = False
    is_fixed = False
    repeats_steps = False
    workspace: Tensor | None = None

    def __init__(self, config: PreTrainedConfig, rows: Rows, method: Method | None) -> None:
        self.config, self.rows, self.method, self.layout = config, rows, method, config.blocks.layout()
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.has_share = method is not None and method.is_share
        self.in_prefill = False
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self.step: Step | None = None
        self.by_kernels: bool | None = None
        self.stats = SkipStats()

    # ------------------------------------------------------------------ one forward

    @abstractmethod
    def pieces(
        self, mask: Tensor | None, count: int, device: torch.device
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """Cut a forward into what can be processed at once; see `PodCache.open`."""

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

    def open_prefill(self) -> None:
        """The forwards up to `close_prefill` are one prefill."""
        self.in_prefill = True

    def close_prefill(self) -> None:
        """All of them are done: what acts at the end of a prefill acts."""
        self.in_prefill = False

    def abandon_prefill(self) -> None:
        """One of them failed: nothing acts."""
        self.in_prefill = False

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
        """What `restore` needs, between two forwards: tensors by name, and what else there is as JSON."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the storage whose `state` this is, of the rows that the cache has restored; this one is empty."""
