"""Which backend of `shared_score_attention` was measured to be the fastest, per GPU and class of shapes.

One table, written by hand from what `eval/speed.py --suite attention` prints on a GPU; `backend="auto"` reads it. It is
empty: no GPU was at hand yet, and what was not measured is not claimed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A sequence belongs to the class of the longest of these that it reaches.
LENGTHS = (0, 1024, 4096, 16_384, 65_536)


class ShapeClass(NamedTuple):
    """Shapes that one measurement stands for.

    Attributes:
        gpu: its name, as `torch.cuda.get_device_properties` has it.
        itemsize: bytes of a number: 2 (float16, bfloat16) or 4.
        head_dim: D.
        length: of `LENGTHS`, the longest that T reaches.
        training: whether a backward follows.
    """

    gpu: str
    itemsize: int
    head_dim: int
    length: int
    training: bool


class Winner(NamedTuple):
    """The fastest backend, and where that is from.

    Attributes:
        backend: of `shared_score_attention`.
        date, commit: of the measurement; the day as YYYY-MM-DD.
        flash: what runs the pieces of the composed backend, as POD_FLASH_IMPLEMENTATION names it; None: torch's own.
    """

    backend: str
    date: str
    commit: str
    flash: str | None = None


WINNERS: dict[ShapeClass, Winner] = {}


def shape_class(q: Tensor, training: bool) -> ShapeClass | None:
    """The class of queries [B, H, T, D]; None off a GPU, where nothing is measured."""
    if q.device.type != "cuda":
        return None
    length = max(reached for reached in LENGTHS if reached <= q.shape[2])
    return ShapeClass(torch.cuda.get_device_properties(q.device).name, q.dtype.itemsize, q.shape[3], length, training)


def measured(shapes: ShapeClass | None) -> str | None:
    """The backend that won for these shapes; None where none was measured."""
    winner = WINNERS.get(shapes)
    return None if winner is None else winner.backend


def flash(shapes: ShapeClass | None) -> str | None:
    """What ran the pieces of the composed backend when that won for these shapes; None for torch's own."""
    winner = WINNERS.get(shapes)
    return None if winner is None else winner.flash
