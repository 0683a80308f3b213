"""TOVA (arXiv 2401.06104): keep what the newest query attends to."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pod.eviction.base import Eviction, Observation


@dataclass(frozen=True)
class TOVA(Eviction):
    """The newest query's attention decides: after a prefill, and then one token at every step.

    The weights are averaged over all query heads of the layer (in a PoD model: those of the KV heads anchored there),
    so all its KV heads keep the same positions. The newest token is not protected. Where one of the layer's blocks has
    several layers, so that its sinks are kept, all of the layer's KV heads keep them.

    Args:
        budget: tokens kept per layer and KV head; or a share, see `Method`.
    """

    when: ClassVar[int] = 1
    per_layer: ClassVar[bool] = True

    def score(self, seen: Observation) -> Tensor:
        heads = seen.weights.shape[1]
        return seen.weights[:, :, :, -1].mean(dim=(1, 2))[:, None].expand(-1, heads, -1)
