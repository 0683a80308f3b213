"""Which backend was measured to be the fastest, per GPU and class of shapes.

One table, of the lines that `eval/speed.py` prints on a GPU for attention and decoding; `backend="auto"` and the cache
read it. It is empty: no GPU was at hand yet, and what was not measured is not claimed.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# A sequence belongs to the class of the longest of these that it reaches.
LENGTHS = (0, 1024, 4096, 16_384, 65_536)

Work = Literal["forward", "training", "decode"]


class ShapeClass(NamedTuple):
    """Shapes that one measurement stands for.

    Attributes:
        gpu: its name, as `torch.cuda.get_device_properties` has it.
        itemsize: bytes of a number: 2 (float16, bfloat16) or 4.
        head_dim: D.
        length: of `LENGTHS`, the longest that T reaches; 0 where it is decoded, from caches of any length.
        work: attention of whole sequences without or with a backward; or the steps of decoding, all that a cache does.
    """

    gpu: str
    itemsize: int
    head_dim: int
    length: int
    work: Work


class Winner(NamedTuple):
    """The fastest backend, and where that is from.

    Attributes:
        backend: as POD_ATTENTION_BACKEND names it.
        date, commit: of the measurement; the day as YYYY-MM-DD.
        flash: what runs the pieces of the composed backend, as POD_FLASH_IMPLEMENTATION names it; None: torch's own.
    """

    backend: str
    date: str
    commit: str
    flash: str | None = None


WINNERS: dict[ShapeClass, Winner] = {}


def shape_class(states: Tensor, work: Work) -> ShapeClass | None:
    """The class of queries [B, H, T, D], for decoding of any states [.., D]; None off a GPU: nothing is measured."""
    if states.device.type != "cuda":
        return None
    length = 0 if work == "decode" else max(reached for reached in LENGTHS if reached <= states.shape[2])
    gpu = torch.cuda.get_device_properties(states.device).name
    return ShapeClass(gpu, states.dtype.itemsize, states.shape[-1], length, work)


def measured(shapes: ShapeClass | None) -> str | None:
    """The backend that won for these shapes; None where none was measured."""
    winner = WINNERS.get(shapes)
    return None if winner is None else winner.backend


def flash(shapes: ShapeClass | None) -> str | None:
    """What ran the pieces of the composed backend when that won for these shapes; None for torch's own."""
    winner = WINNERS.get(shapes)
    return None if winner is None else winner.flash
