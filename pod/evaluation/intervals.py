"""How sure a comparison is: paired, by resampling (the percentile bootstrap, Efron 1979)."""

from collections.abc import Mapping, Sequence

import torch

RESAMPLES = 4000


def ratio(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Sum of `ours` over sum of `theirs`, and an interval around it.

    Args:
        ours, theirs: [n] numbers >= 0 of the same n samples, in the same order: whole samples are drawn again, so that
            what is hard for both widens nothing.
        confidence: of the interval, in (0, 1).
        seed: of the drawing.

    Returns:
        (ratio, low, high). Where `theirs` add up to 0 the ratio is nan, and of resamples where they do, left out.

    Raises:
        ValueError: no samples, or not as many of both; a confidence out of its range.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired numbers are wanted, at least one pair; got {len(ours)} and {len(theirs)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence:g}")
    pairs = torch.tensor([list(ours), list(theirs)], dtype=torch.float64)
    drawn = torch.randint(len(ours), (RESAMPLES, len(ours)), generator=torch.Generator().manual_seed(seed))
    above, below = pairs[:, drawn].sum(-1)
    ratios = (above / below)[below > 0]
    tail = (1 - confidence) / 2
    low, high = (
        ratios.quantile(torch.tensor([tail, 1 - tail]).double()).tolist() if len(ratios) else (float("nan"),) * 2
    )
    above, below = pairs.sum(-1).tolist()
    return (above / below if below else float("nan")), low, high


def of_first(samples: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Each row's samples against the first row's as a table shows it: "0.93 [0.88, 0.98]", and "1" for the first.

    Args:
        samples: row -> the scores of the same samples, in the same order.

    Returns:
        row -> cell; nothing where the first row has no sample or scores 0 in all of them.
    """
    (first, theirs), *others = samples.items()
    if not sum(theirs):
        return {}
    found = {name: ratio(ours, theirs) for name, ours in others}
    return {first: "1"} | {name: f"{share:.2f} [{low:.2f}, {high:.2f}]" for name, (share, low, high) in found.items()}
