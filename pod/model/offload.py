"""Offloaded activations: what autograd saves for the backward waits in the CPU's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@contextmanager
def kept_on_cpu() -> Iterator[None]:
    """What autograd saves inside waits in the CPU's memory, pinned where it comes from a GPU.

    Unlike `torch.autograd.graph.save_on_cpu` this copies a tensor once, however often it is saved: a running anchor is
    saved by every layer of its block.
    """
    copies: dict[tuple, tuple[StorageWeakRef, Tensor]] = {}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version, tensor.dtype)
        # A weak reference that is alive says that the address still belongs to the tensor that was copied.
        if place not in copies or copies[place][0].expired():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[place] = StorageWeakRef(storage), copy.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device, copies[place][1]

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, copy = packed
        return copy.to(device, non_blocking=True)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        copies.clear()  # from here on autograd alone keeps the copies
