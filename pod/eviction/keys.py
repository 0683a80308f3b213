"""Scores of what is stored alone, keys or keys and values; no query is looked at, so nothing hangs on a question.

Knorm (arXiv 2406.11430), KeyDiff (arXiv 2504.15364), LagKV (arXiv 2504.04704) and Q-Filters (arXiv 2503.02812). In a
block its anchor's keys and values decide: the keys are those that all its layers read, the values are not.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod import calibration
from pod.eviction.base import Eviction, Observation


@dataclass(frozen=True)
class KeyScores(Eviction):
    """Base of the methods below: evicts after a prefill, and with `every` while decoding too.

    Args:
        budget: tokens kept per layer and KV head; or a share, see `Method`.
        every: also evict after every so many decoded tokens; 0: after a prefill only.

    Raises:
        ValueError: every is negative.
    """

    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 0:
            raise ValueError(f"{type(self).__name__}: every must not be negative, got {self.every}")

    @property
    def when(self) -> int:
        return self.every


@dataclass(frozen=True)
class Knorm(KeyScores):
    """Small keys: tokens whose keys have a small norm are attended to most, and stay.

    A token's score is the negative L2 norm of its key; nothing is always kept beside a block's sinks, whose keys are
    small anyway. The paper leaves the first two layers whole; this does not.
    """

    def score(self, seen: Observation) -> Tensor:
        return -seen.keys.norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(KeyScores):
    """Distinct keys: tokens whose keys are least like all others stay.

    A token's score is the negative cosine between its key, after RoPE, and the mean of all held keys, each scaled to
    length 1 first.
    """

    def score(self, seen: Observation) -> Tensor:
        directions = torch.nn.functional.normalize(seen.keys, dim=-1)
        is_held = (seen.positions >= 0)[..., None]
        mean = (directions * is_held).sum(dim=2, keepdim=True) / is_held.sum(dim=2, keepdim=True).clamp(min=1)
        return -torch.cosine_similarity(directions, mean, dim=-1)


@dataclass(frozen=True)
class LagKV(KeyScores):
    """What the next tokens do not foretell: each part of the text is measured by the one that follows.

    Tokens after the sinks are parted into `lag` each. Keys and values of a part are scaled, channel by channel, by the
    least and the largest of the next part; a token's score is the standard deviation of its channels, in a softmax over
    its part, the mean of keys and values. The rank inside the part then decides, so that all parts lose alike. Sinks,
    the last whole part and what follows it come first whatever the scores, and rows of fewer than two parts beside the
    sinks lose nothing.

    Args:
        sinks: first tokens that are kept before all others.
        lag: tokens of a part.
        cross_scoring: compare the scores themselves instead of ranks.

    Raises:
        ValueError: sinks negative, lag below 2.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.lag < 2:
            raise ValueError(
                f"LagKV: sinks must not be negative and lag must be at least 2, got {self.sinks} and {self.lag}"
            )

    @property
    def threshold(self) -> int:
        return max(self.budget, self.sinks + 2 * self.lag - 1)

    def score(self, seen: Observation) -> Tensor:
        held = seen.positions >= 0
        rank = seen.positions.masked_fill(~held, torch.iinfo(torch.long).max).argsort(dim=-1).argsort(dim=-1)
        place = rank - self.sinks  # among the tokens that are parted, in order of position
        whole = (held.sum(dim=-1) - self.sinks).div(self.lag, rounding_mode="floor").clamp(min=0)
        is_scored = held & (place >= 0) & (place < ((whole - 1) * self.lag)[..., None])
        parts = max((held.shape[-1] - self.sinks) // self.lag, 2)  # at most; read from no device
        is_parted = held & (place >= 0) & (place < (whole * self.lag)[..., None])
        spare = parts * self.lag  # where everything else goes
        column = torch.where(is_parted, place, spare)
        found = 0.0
        for states in (seen.keys, seen.values):
            lines = states.new_zeros(*states.shape[:2], spare + 1, states.shape[-1])
            lines = lines.scatter_(2, column[..., None].expand_as(states), states)[:, :, :spare]
            lines = lines.unflatten(2, (parts, self.lag))
            low, high = (lines[:, :, 1:].amin(3, keepdim=True), lines[:, :, 1:].amax(3, keepdim=True))
            # The values of one token again and again are all alike in the first layer.
            reach = (high - low).clamp(min=torch.finfo(states.dtype).eps)
            found = found + ((lines[:, :, :-1] - low) / reach).std(dim=-1).softmax(dim=-1) / 2
        if not self.cross_scoring:
            found = found.argsort(dim=-1).argsort(dim=-1) / self.lag
        found = torch.nn.functional.pad(found.flatten(2), (0, self.lag + 1))
        scores = found.gather(2, torch.where(is_scored, place, 0))
        # Above every rank and every softmax; where the budget is below them, recent ones and sinks go last.
        return torch.where(is_scored, scores, torch.where(place < 0, 3.0, 2.0))


@dataclass(frozen=True)
class QFilters(KeyScores):
    """Keys in the direction of the queries: tokens with the largest product with their head's filter stay.

    A filter is the first direction of a head's queries, measured once by `python -m pod.calibrate`; no query of the
    text at hand is looked at. A block goes by its anchor's filter. The authors' cache evicts at every step:
    `every=1`, with 64 of 128 tokens as the window.

    Args:
        window: last tokens that are always kept.
        filters: the calibration file.

    Raises:
        ValueError: window negative.
    """

    window: int = 64
    filters: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 0:
            raise ValueError(f"QFilters: window must not be negative, got {self.window}")

    def table(self, config: PreTrainedConfig) -> Tensor:
        return calibration.load(self.filters).of(calibration.FILTERS, config)

    def score(self, seen: Observation) -> Tensor:
        return torch.einsum("band,ad->ban", seen.keys, seen.table)
