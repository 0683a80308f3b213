"""Paired intervals: what they cover, what pairing is worth, what is refused."""

import math

import pytest
import torch

from pod.evaluation.intervals import of_first, ratio


def test_a_known_ratio_is_covered_as_often_as_promised():
    draws = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        theirs = torch.rand(40, generator=draws) + 1
        ours = 1.02 * theirs + 0.05 * torch.randn(40, generator=draws)
        value, low, high = ratio(ours.tolist(), theirs.tolist())
        assert low <= value <= high
        covered += low <= 1.02 <= high
    assert 178 <= covered <= 198  # 95 %, within what 200 trials tell


def test_pairs_are_drawn_together():
    theirs = [1.0, 10.0, 100.0]
    assert ratio([1.5 * each for each in theirs], theirs) == pytest.approx((1.5, 1.5, 1.5))
    _, low, high = ratio([150.0, 15.0, 1.5], theirs)
    assert high / low > 100  # the same numbers in another order


def test_the_seed_and_the_confidence_decide():
    ours, theirs = torch.rand(2, 30, generator=torch.Generator().manual_seed(0)).tolist()
    assert ratio(ours, theirs) == ratio(ours, theirs) != ratio(ours, theirs, seed=1)
    _, low, high = ratio(ours, theirs, 0.5)
    _, lowest, highest = ratio(ours, theirs)
    assert lowest < low < high < highest


def test_nothing_right_on_the_other_side():
    assert all(map(math.isnan, ratio([1.0, 0.0], [0.0, 0.0])))
    value, low, high = ratio([1.0, 0.0], [0.0, 1.0])
    assert value == 1 and low == 0 and high >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "at least one pair; got 0 and 0"),
        (([1.0], [1.0, 2.0]), "got 1 and 2"),
        (([1.0], [1.0], 1.5), "confidence must lie between 0 and 1, got 1.5"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ratio(*arguments)


def test_cells_of_a_table():
    theirs = [1.0, 1.0, 0.0, 1.0]
    found = of_first({"dense": theirs, "the same": theirs, "half": [1.0, 0.0, 0.0, 0.5], "none": [0.0] * 4})
    assert list(found) == ["dense", "the same", "half", "none"]
    assert (found["dense"], found["the same"], found["none"]) == ("1", "1.00 [1.00, 1.00]", "0.00 [0.00, 0.00]")
    _, low, high = ratio([1.0, 0.0, 0.0, 0.5], theirs)
    assert found["half"] == f"0.50 [{low:.2f}, {high:.2f}]"
    assert of_first({"dense": [0.0, 0.0], "other": [1.0, 0.0]}) == of_first({"dense": [], "other": []}) == {}
