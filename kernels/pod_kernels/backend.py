"""Which implementation of the cache's functions runs: plain torch, or Triton's kernels."""

import importlib.util
import os

import torch
from torch import Tensor

from pod_kernels import winners

VARIABLE = "POD_ATTENTION_BACKEND"
NAMES = ("auto", "reference", "composed", "fused")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_triton(states: Tensor) -> bool:
    """Whether Triton's kernels take these states.

    The environment variable POD_ATTENTION_BACKEND decides, as for `shared_score_attention`: "fused" takes the kernels
    or refuses, "auto" (as when it is not set) takes them where they were measured to be the fastest (`winners`), so far
    nowhere, and all other names are plain torch. On a CPU the kernels run in Triton's interpreter, for tests:
    TRITON_INTERPRET=1, set before triton is imported.

    Args:
        states: [.., D] the queries, or what is stored.

    Raises:
        ValueError: no such backend; the kernels are asked for and cannot run here, with the reason.
    """
    backend = os.environ.get(VARIABLE) or "auto"
    if backend not in NAMES:
        raise ValueError(f"{VARIABLE} {backend!r} does not exist: valid are {', '.join(map(repr, NAMES))}")
    if backend == "auto":
        return winners.measured(winners.shape_class(states, "decode")) == "fused" and not _obstacle(states)
    if backend != "fused":
        return False
    reason = _obstacle(states)
    if reason:
        raise ValueError(f"{VARIABLE}=fused cannot run here: {reason}")
    return True


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
