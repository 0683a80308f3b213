"""The Cascading KV cache (arXiv 2406.17808): sub-caches that pass on every second token, the better of two."""

from dataclasses import dataclass
from typing import ClassVar

from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks
from pod.eviction.base import check_types
from pod.eviction.slots import Scoring, SlotStore
from pod.eviction.storage import StoragePolicy, check_policy
from pod_kernels.cascade import Cascades

HEAD_REDUCTIONS = ("max", "mean")


@dataclass(frozen=True)
class Cascade(StoragePolicy):
    """Keep sinks, recent tokens, and ever sparser older ones, chosen by a moving average of their attention.

    Sub-cache i accepts every 2^i-th token; where it does not, the token offered and its newest contest by their
    scores. The kept tokens so reach back about `budget / num_cascades * (2^num_cascades - 1)` tokens (Eq. 4). Until the
    cache is full it keeps everything. A prompt is processed in strides: the queries of one stride attend to what is
    kept and to the stride itself, so that the work grows linearly with the prompt.

    Args:
        budget: tokens kept per layer and KV head, the sinks on top; a multiple of `num_cascades`.
        sinks: first tokens that stay for ever. In a model with blocks of more than one layer at least its `sink_size`.
        num_cascades: sub-caches, newest first.
        gamma: weight of the past in the scores' moving average, in (0, 1), per query.
        stride: queries processed at once.
        head_reduction: "max" or "mean", over the query heads of a KV head.

    Raises:
        ValueError: a value is out of range; names it.
    """

    budget: int
    sinks: int = 64
    num_cascades: int = 4
    gamma: float = 0.9999
    stride: int = 4096
    head_reduction: str = "max"

    positions: ClassVar[str] = "cache"

    def __post_init__(self) -> None:
        check_types(self)
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1 token, got {self.budget}")
        if self.sinks < 0:
            raise ValueError(f"sinks must be >= 0 tokens, got {self.sinks}")
        if self.num_cascades < 1:
            raise ValueError(f"num_cascades must be at least 1, got {self.num_cascades}")
        if self.budget % self.num_cascades:
            lower = self.budget - self.budget % self.num_cascades
            raise ValueError(
                f"budget must be a multiple of num_cascades, which are equal; got {self.budget} and "
                f"{self.num_cascades}. Use {lower or self.num_cascades} or {lower + self.num_cascades}."
            )
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must be between 0 and 1, both excluded; got {self.gamma}")
        if self.head_reduction not in HEAD_REDUCTIONS:
            names = ", ".join(map(repr, HEAD_REDUCTIONS))
            raise ValueError(f"head_reduction must be one of {names}; got {self.head_reduction!r}")
        check_policy(self.positions, self.stride)

    def make_store(self, config: PreTrainedConfig, blocks: LayerBlocks) -> SlotStore:
        """An empty store for a model."""
        sinks = self.sinks if blocks.is_dense else max(self.sinks, config.sink_size)
        cascades = Cascades(sinks, self.budget, self.num_cascades)
        return SlotStore(config, blocks, cascades, rotates=True, scoring=Scoring(self.gamma, self.head_reduction))
