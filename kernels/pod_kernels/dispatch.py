"""Which implementation runs: the one that is named, else the one that was found right and fastest on this machine.

`python -m pod.autotune` tries the candidates, each in a process of its own, and keeps what it chose in a file for this
GPU, these versions and these sources. `backend="auto"` and the cache read it once. Without it they take torch's own
operations: a kernel of ours that nobody has tried here could end the process, or be wrong.
"""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

VARIABLE = "POD_ATTENTION_BACKEND"
FLASH_VARIABLE = "POD_FLASH_IMPLEMENTATION"
NAMES = ("reference", "composed", "fused")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMAT = 1  # of the file of choices

# A sequence belongs to the class of the longest of these that it reaches.
LENGTHS = (0, 1024, 4096, 16_384, 65_536)

Work = Literal["forward", "training", "decode", "serving"]
logger = logging.getLogger("pod_kernels")


class ShapeClass(NamedTuple):
    """Shapes that one choice stands for.

    Attributes:
        gpu: its name, as `torch.cuda.get_device_properties` has it.
        dtype: as torch writes it, such as "bfloat16".
        head_dim: D.
        length: of `LENGTHS`, the longest that T reaches; 0 where it is decoded or served, from caches of any length.
        work: attention of whole sequences without or with a backward; the steps of decoding, all that a cache does; or
            those of an engine whose cache lies in blocks.
    """

    gpu: str
    dtype: str
    head_dim: int
    length: int
    work: Work


class Choice(NamedTuple):
    """What runs a class.

    Attributes:
        backend: as POD_ATTENTION_BACKEND names it.
        flash: what runs the pieces of the composed backend, as POD_FLASH_IMPLEMENTATION names it; None: torch's own.
    """

    backend: str
    flash: str | None = None


TORCH = Choice("composed")
Choices = dict[ShapeClass, Choice]
_fixed: Choices | None = None


def shape_class(states: Tensor, work: Work) -> ShapeClass | None:
    """The class of queries [B, H, T, D], for decoding and serving of any states [.., D].

    None off a GPU: nothing is chosen.
    """
    if states.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(states.device).name
    return ShapeClass(gpu, name_of(states.dtype), states.shape[-1], length_class(work, states.shape[-2]), work)


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def length_class(work: Work, tokens: int) -> int:
    """What `ShapeClass.length` is of so many tokens."""
    return 0 if work in ("decode", "serving") else max(reached for reached in LENGTHS if reached <= tokens)


@cache
def machine(gpu: str) -> dict[str, str]:
    """What choices depend on: the GPU, the versions below these kernels, and a hash of their sources."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton}
    return {"gpu": gpu, **versions, "kernels": sources.hexdigest()[:16]}


def choices_path(gpu: str) -> Path:
    """The file of this machine's choices: in pod/kernels of the user's cache, $XDG_CACHE_HOME or ~/.cache."""
    key = hashlib.sha256(json.dumps(machine(gpu), sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pod" / "kernels"
    return folder / f"{'-'.join(gpu.lower().split())}-{key}.json"


def read_classes(path: Path) -> list[dict]:
    """The entries of a file of choices: the fields of `ShapeClass` and `Choice`, and the trials behind them.

    Raises:
        ValueError: the file is damaged; names it.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, not {FORMAT}")
        for entry in found["classes"]:
            _entry(entry)
        return found["classes"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): python -m pod.autotune writes it anew") from error


def _entry(entry: dict) -> tuple[ShapeClass, Choice]:
    shapes, choice = (kind(*(entry[name] for name in kind._fields)) for kind in (ShapeClass, Choice))
    if choice.backend not in NAMES:
        raise ValueError(f"there is no backend {choice.backend!r}")
    return shapes, choice


@cache
def _of_machine(gpu: str) -> Choices:
    path = choices_path(gpu)
    try:
        return dict(map(_entry, read_classes(path)))
    except FileNotFoundError:
        if importlib.util.find_spec("triton") is not None:
            logger.warning(
                "Attention runs by torch's own operations: no other was tried on this %s with these versions. "
                "`python -m pod.autotune` checks and times them, and keeps what is right and fastest.",
                gpu,
            )
    except ValueError as error:
        logger.warning("Attention runs by torch's own operations: %s", error)
    return {}


def fix(choices: list[list]) -> None:
    """From here on these choices hold, whatever the file says: rows of `known`, another process's or a checkpoint's."""
    global _fixed
    width = len(ShapeClass._fields)
    _fixed = {ShapeClass(*row[:width]): Choice(*row[width:]) for row in choices}


def known() -> list[list]:
    """What holds here, a row of plain values for each class; empty without a GPU."""
    choices = _fixed
    if choices is None:
        choices = _of_machine(torch.cuda.get_device_properties("cuda").name) if torch.cuda.is_available() else {}
    return [[*shapes, *choice] for shapes, choice in choices.items()]


def chosen(shapes: ShapeClass | None) -> Choice:
    """What runs these shapes; torch's own operations where nothing was chosen."""
    if shapes is None:
        return TORCH
    return (_of_machine(shapes.gpu) if _fixed is None else _fixed).get(shapes, TORCH)


@contextmanager
def forced(backend: str, flash: str | None = None) -> Iterator[None]:
    """In the block this backend runs attention and the cache's functions.

    Args:
        backend: of `NAMES`.
        flash: what runs the composed backend's pieces, as POD_FLASH_IMPLEMENTATION names it. None: what that says, and
            torch's own where it is not set.
    """
    names = {VARIABLE: backend, FLASH_VARIABLE: os.environ.get(FLASH_VARIABLE, "") if flash is None else flash}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def resolve_backend(backend: str, shapes: ShapeClass | None = None) -> str:
    """The name of the backend that will run.

    Args:
        backend: "auto" or one of `NAMES`. "auto" is what the environment variable POD_ATTENTION_BACKEND names, if
            it is set.
        shapes: for "auto" without the variable: the backend that was chosen for these, if any was, else "composed".

    Raises:
        ValueError: no such backend; names the closest one and lists all.
    """
    source = "backend"
    if backend == "auto":
        source, backend = VARIABLE, _wanted()
    if backend == "auto":
        return chosen(shapes).backend
    if backend not in NAMES:
        names = ["auto", *NAMES]
        closest = difflib.get_close_matches(str(backend), names, n=1, cutoff=0.5)
        hint = f"did you mean {closest[0]!r}? " if closest else ""
        raise ValueError(f"{source} {backend!r} does not exist: {hint}valid are {', '.join(map(repr, names))}")
    return backend


def _wanted() -> str:
    """What the environment variable names; "auto" where it is not set."""
    return os.environ.get(VARIABLE) or "auto"


def runs_triton(states: Tensor, work: Work = "decode") -> bool:
    """Whether Triton's kernels take these states.

    The environment variable POD_ATTENTION_BACKEND decides, as for `shared_score_attention`: "fused" takes the kernels
    or refuses, "auto" (as when it is not set) takes them where `pod.autotune` found them right and fastest, and all
    other names are plain torch. On a CPU the kernels run in Triton's interpreter, for tests:
    TRITON_INTERPRET=1, set before triton is imported.

    Args:
        states: [.., D] the queries, or what is stored.
        work: the kernels' kind.

    Raises:
        ValueError: no such backend; the kernels are asked for and cannot run here, with the reason.
    """
    if resolve_backend("auto", shape_class(states, work)) != "fused":
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
