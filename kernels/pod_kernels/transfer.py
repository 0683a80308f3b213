"""Integers that the host knows, on their way to a device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of integers on a device, in one copy.

    The host does not wait for it. From memory that can be paged out it would, until a GPU has done all it was given.

    Args:
        arrays: at least one, of any shapes; numbers or truth values.

    Returns:
        int64 tensors of the same shapes, views of one.
    """
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int64, copy=False))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.to(device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
