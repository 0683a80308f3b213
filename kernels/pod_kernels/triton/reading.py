"""How the Triton kernels read what a cache stores, and other tensors."""

import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.segments import Segments


def segments_of(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    """Segments as the kernels take them: the vectors, and where each begins, with that table's strides of row, head."""
    return segments.data, segments.offsets, *segments.offsets.stride()


def strided(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor as the kernels take it: itself and the strides of its first three dimensions."""
    return tensor, *tensor.stride()[:3]


@triton.jit
def begin(segments, row, head):
    """The first slot of a row's and head's segment."""
    _, offsets, row_stride, head_stride = segments
    return tl.load(offsets + row * row_stride + head * head_stride)


@triton.jit
def vectors(tensor, at, inside, DIM: tl.constexpr, DIM_2: tl.constexpr):
    """[ROWS, DIM_2] of the vectors that begin at `at` [ROWS]; zero beyond DIM, and where one is not `inside`."""
    dim = tl.arange(0, DIM_2)
    return tl.load(tensor + at[:, None] + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def portion(count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of `count` slots each of some programs takes, in whole tiles."""
    return (count + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
