"""Which implementation runs: the one that is named, else the one that was measured to be the fastest.

`WINNERS` has the lines that `eval/speed.py` prints on a GPU for attention and decoding; `backend="auto"` and the cache
read it. It is empty: no GPU was at hand yet, and what was not measured is not claimed.
"""

import difflib
import importlib.util
import os
from typing import Literal, NamedTuple

import torch
from torch import Tensor

VARIABLE = "POD_ATTENTION_BACKEND"
NAMES = ("reference", "composed", "fused")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

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


def resolve_backend(backend: str, shapes: ShapeClass | None = None) -> str:
    """The name of the backend that will run.

    Args:
        backend: "auto" or one of `NAMES`. "auto" is what the environment variable POD_ATTENTION_BACKEND names, if
            it is set.
        shapes: for "auto" without the variable: the backend that was measured to be the fastest for these, if any
            was, else "composed".

    Raises:
        ValueError: no such backend; names the closest one and lists all.
    """
    source = "backend"
    if backend == "auto":
        source, backend = VARIABLE, _wanted()
    if backend == "auto":
        return measured(shapes) or "composed"
    if backend not in NAMES:
        names = ["auto", *NAMES]
        closest = difflib.get_close_matches(str(backend), names, n=1, cutoff=0.5)
        hint = f"did you mean {closest[0]!r}? " if closest else ""
        raise ValueError(f"{source} {backend!r} does not exist: {hint}valid are {', '.join(map(repr, names))}")
    return backend


def _wanted() -> str:
    """What the environment variable names; "auto" where it is not set."""
    return os.environ.get(VARIABLE) or "auto"


def runs_triton(states: Tensor) -> bool:
    """Whether Triton's kernels take these states.

    The environment variable POD_ATTENTION_BACKEND decides, as for `shared_score_attention`: "fused" takes the kernels
    or refuses, "auto" (as when it is not set) takes them where they were measured to be the fastest (`WINNERS`), so far
    nowhere, and all other names are plain torch. On a CPU the kernels run in Triton's interpreter, for tests:
    TRITON_INTERPRET=1, set before triton is imported.

    Args:
        states: [.., D] the queries, or what is stored.

    Raises:
        ValueError: no such backend; the kernels are asked for and cannot run here, with the reason.
    """
    shapes = shape_class(states, "decode")
    if resolve_backend("auto", shapes) != "fused":
        return False
    reason = _obstacle(states)
    if reason and _wanted() == "fused":
        raise ValueError(f"{VARIABLE}=fused cannot run here: {reason}")
    return not reason


def _obstacle(states: Tensor) -> str:
    """Why the kernels cannot take these states; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not states.is_cuda and not interpreted:
        return f"the tensors are on {states.device.type}, not on a CUDA device"
    if states.dtype not in DTYPES:
        return f"{states.dtype} is none of {', '.join(map(str, DTYPES))}"
    if interpreted and states.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16 with TRITON_INTERPRET=1"
    if states.shape[-1] > 256:
        return f"head dimension {states.shape[-1]} is above 256"
    return ""
