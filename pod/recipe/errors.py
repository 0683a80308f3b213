"""The error of everything that is wrong with a recipe, and the closest valid name that its message gives."""

from collections.abc import Sequence
from difflib import SequenceMatcher


class RecipeError(ValueError):
    """A recipe, or an override of it, that cannot be run; the message says what to write instead."""


def closest(name: str, valid: Sequence[str]) -> str:
    """` Did you mean X?`, or nothing when no valid name is like this one.

    Keys are also compared by their last part, so that `max_steps` and `optimizer.max_steps` find trainer.max_steps.
    """

    def alike(a: str, b: str) -> float:
        return SequenceMatcher(None, a, b, autojunk=False).ratio()

    name = name.lstrip("-+").lower()[:100]
    last = name.rpartition(".")[2]
    score, best = max(
        ((max(alike(name, other), 0.95 * alike(last, other.rpartition(".")[2])), other) for other in valid),
        default=(0.0, ""),
    )
    return f" Did you mean {best}?" if score >= 0.5 else ""
