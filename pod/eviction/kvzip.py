"""KVzip (arXiv 2505.23416): keep what the model looks at while it repeats the context, whatever will be asked."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pod.eviction.base import BEYOND_MEMORY, Eviction, Observation, Sharing


@dataclass(frozen=True)
class KVzip(Eviction):
    """The context's tokens that are attended to most while the model repeats it; layers and heads share one budget.

    A prefill keeps everything. `pod.reconstruct` then feeds the context once more, `chunk` tokens at a time behind a
    request to repeat them, and nothing of that stays. A token's score is the largest weight that any query of it pays,
    of any query head of its KV head, in a softmax over the sinks, the chunk and what is fed. The tokens of all layers
    and heads are then ranked together. In a block its anchor's attention decides, and a token counts for each layer;
    but `recent_in_blocks` of its budget are the last tokens, which its later layers read by keys of their own: without
    them PoD models lose what a dense one does not (docs/EVALUATE.md). Costs two further prefills; what comes later is
    only added.

    Args:
        budget: tokens kept per layer and KV head on average; or a share, see `Method`.
        sinks: first tokens, which are kept before all others; at least those of the system prompt.
        chunk: tokens that are repeated at once.
        recent_in_blocks: see `Eviction`; nothing in blocks of one layer, to which the paper's dense models come.

    Raises:
        ValueError: sinks negative, chunk below 1, recent_in_blocks no share, or query_aware, which this is not.
    """

    query_aware: bool = field(default=False, kw_only=True)
    sinks: int = 4
    chunk: int = 2048
    recent_in_blocks: float = 0.75

    waits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.chunk < 1:
            raise ValueError(
                f"KVzip: sinks must not be negative and chunk must be at least 1, got {self.sinks} and {self.chunk}"
            )
        if not 0 <= self.recent_in_blocks <= 1:
            raise ValueError(f"KVzip: recent_in_blocks must be a share, 0 to 1, got {self.recent_in_blocks}")
        if self.query_aware:
            raise ValueError("KVzip: query_aware must be False: the context alone is repeated, without a question")

    @property
    def threshold(self) -> int:
        return BEYOND_MEMORY  # a prefill evicts nothing

    def score(self, seen: Observation) -> Tensor:
        return torch.zeros(seen.positions.shape, device=seen.positions.device)

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        counts = super().allocate(sharing)
        if all(sharing.spared):
            return counts
        sizes = [sharing.blocks.layout().sizes[stage.layer, head] for stage in sharing.stages for head in stage.heads]
        costs = torch.tensor(sizes)
        # [B, units, N]; tokens are in order of position.
        scores = torch.cat([stage.scores.masked_fill(~stage.candidates, -torch.inf) for stage in sharing.stages], dim=1)
        always = torch.cat([torch.tensor(stage.held) for stage in sharing.stages]).t()
        always = always - torch.cat([stage.candidates.sum(dim=-1) for stage in sharing.stages], dim=1).cpu()
        rooms = self.budget * int(costs.sum()) - (always * costs).sum(dim=1)
        ends = np.cumsum([len(stage.heads) for stage in sharing.stages])[:-1]
        for row, (room, kept) in enumerate(zip(rooms.tolist(), always, strict=True)):
            if sharing.spared[row]:
                continue
            # The more recent of equal scores first, and of one position the lower layer's and head's.
            line = scores[row].flip(-1).t().flatten()
            line, order = line.sort(descending=True, stable=True)
            units = (order % len(sizes)).cpu()[~line.isneginf().cpu()]
            won = units[costs[units].cumsum(dim=0) <= room]
            total = kept + torch.bincount(won, minlength=len(sizes))
            for stage, mine in zip(counts, np.split(total.numpy(), ends), strict=True):
                stage[:, row] = mine
        return counts
