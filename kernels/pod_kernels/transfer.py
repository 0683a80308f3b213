"""Integers that the host knows, on their way to a device."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of integers on a device, in one copy.

    The host does not wait for it. From memory that can be paged out it would, until a GPU has done all it was given.

    Args:
        arrays: of any shapes; numbers or truth values.

    Returns:
        int64 tensors of the same shapes, parts of one. Each begins at a multiple of 16 bytes: for other addresses
        Triton compiles a kernel anew.
    """
    lengths = [array.size + array.size % 2 for array in arrays]
    flat = np.zeros(sum(lengths), dtype=np.int64)
    for array, end, length in zip(arrays, accumulate(lengths), lengths, strict=True):
        flat[end - length : end - length + array.size] = array.reshape(-1)
    there = torch.from_numpy(flat)
    if device.type == "cuda":
        there = there.pin_memory().to(device, non_blocking=True)
    parts = there.to(device).split(lengths)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class KeptOnDevice:
    """Integers of the host as tensors, each copied to its device once: layers and steps ask for the same ones."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def __call__(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """[n] int64 on the device, not to be written to."""
        key = numbers, device
        if key not in self._tensors:
            [self._tensors[key]] = on_device([np.array(numbers, dtype=np.int64)], device)
        return self._tensors[key]
