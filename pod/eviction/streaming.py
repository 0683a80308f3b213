"""The first tokens and the last ones: StreamingLLM (arXiv 2309.17453), LM-Infinite (arXiv 2308.16137), and the same for
models with a window."""

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers.configuration_utils import PreTrainedConfig

from pod.eviction.base import Chain, ChainPolicy, check_policy


@dataclass(frozen=True)
class StreamingLLM(ChainPolicy):
    """Keep the first tokens, the attention sinks, and a window of the last ones: a cascade of one sub-cache.

    Args:
        budget: tokens kept per layer and KV head, the sinks included; or a share, see `Method`.
        sinks: first tokens that stay for ever. In a model with blocks of more than one layer at least its `sink_size`.
        positions: "cache", the original: keys are rotated to their place among the kept tokens, so that no distance
            exceeds the budget. "absolute": they keep the angle of their position.
        stride: queries processed at once; they attend to what is kept and to the stride itself. None: a quarter of the
            budget. Above the budget it warns.

    Raises:
        ValueError: a value is out of range; names it.
    """

    sinks: int = 4
    positions: str = "cache"
    stride: int | None = None

    def __post_init__(self) -> None:
        check_policy(self)
        self._check_room(self.sinks, f"the {self.sinks} sinks, which it includes")

    def _check_room(self, sinks: int, named: str) -> None:
        if not self.is_share and self.budget <= sinks:
            raise ValueError(f"budget must be larger than {named}; got {self.budget}. Use at least {sinks + 1}.")

    def least(self, sinks: int, groups: int) -> int:
        return max(self.sinks, sinks) + 1

    def chain(self, config: PreTrainedConfig) -> Chain:
        """Sinks and window in a model.

        Raises:
            ValueError: the model's sinks alone exceed the budget.
        """
        sinks = self.sinks if config.blocks.is_dense else max(self.sinks, config.sink_size)
        always = f"the model's sink_size of {sinks} tokens, which are always kept in blocks of more than one layer"
        self._check_room(sinks, always)
        return Chain(sinks, self.budget - sinks, rotates=self.positions == "cache")


@dataclass(frozen=True)
class LMInfinite(StreamingLLM):
    """StreamingLLM's tokens under a Lambda-shaped mask, no distance larger than the window.

    A query sees the first tokens and the last `budget - sinks` before it, however many queries are processed at once.
    The distance to a first token counts as that of the window's first one where it is larger; the distances inside the
    window are the true ones. Rows of at most `budget - sinks + 1` tokens so see what they see without eviction.

    Args:
        budget: tokens kept per layer and KV head, the sinks included; or a share, see `Method`.
        sinks: first tokens that stay for ever. In a model with blocks of more than one layer at least its `sink_size`.
        stride: queries processed at once; results do not depend on it.

    Raises:
        ValueError: a value is out of range; names it.
    """

    stride: int = 4096

    positions: ClassVar[str] = "cache"
    sees_stride: ClassVar[bool] = False

    def chain(self, config: PreTrainedConfig) -> Chain:
        """Sinks and window in a model; raises as `StreamingLLM.chain`."""
        kept = super().chain(config)
        return replace(kept, window=(kept.sinks, kept.tokens + 1))


@dataclass(frozen=True)
class WindowAttention(ChainPolicy):
    """What a model with `share: window` attends to and nothing else: `PodCache` uses it for such a model.

    A query sees `sink_size` first tokens and `recent_size` last ones, itself included, as in training, however many are
    processed at once.

    Args:
        stride: queries processed at once.
    """

    stride: int = 4096

    budget: ClassVar[None] = None  # the model's window
    positions: ClassVar[str] = "absolute"

    def chain(self, config: PreTrainedConfig) -> Chain:
        """Sinks and window of the model."""
        # A step's own tokens are not in the slots yet.
        return Chain(config.sink_size, config.recent_size - 1, window=(config.sink_size, config.recent_size))
