"""One query's attention split among programs, each with a part of what is stored, and merged by log-sum-exp.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, D head dimension.

`Parts` holds what the programs leave, and adds it up in a fixed order, so that equal inputs give equal bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.softmax import LN_2

# Tests on the interpreter take smaller ones: None chooses by head dimension and device.
BLOCK: int | None = None
SPLITS: int | None = None

NUMBERS = 5  # of each part: maximum, sum, its distant share; maximum and sum of what the output takes


@triton.jit
def _merge(
    parts,
    numbers,
    order,
    out,
    lse,
    gate,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ORDERED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    LANES: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (B, H_kv): one row's query heads of one KV head, their parts in order."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    kv_head = place
    if ORDERED:
        kv_head = tl.load(order + place).to(tl.int32)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM_2)
    part = tl.arange(0, SPLITS_2)
    is_lane = lane < GROUPS
    lane_dim = is_lane[:, None] & (dim < DIM)[None, :]
    unit = row * KV_HEADS + place
    known = (unit * SPLITS + part)[:, None] * (5 * GROUPS) + lane[None, :]
    is_part = (part < SPLITS)[:, None] & is_lane[None, :]
    head = (row * KV_HEADS + kv_head) * GROUPS + lane

    most = tl.load(numbers + known, mask=is_part, other=float("-inf"))
    top = tl.max(most, 0)
    factors = tl.exp2(most - tl.where(top == float("-inf"), 0.0, top)[None, :])
    mass = tl.sum(factors * tl.load(numbers + known + GROUPS, mask=is_part, other=0.0), 0)
    distant_mass = tl.sum(factors * tl.load(numbers + known + 2 * GROUPS, mask=is_part, other=0.0), 0)
    is_some = mass > 0
    mass = tl.where(is_some, mass, 1.0)
    tl.store(lse + head, tl.where(is_some, (top + tl.log2(mass)) * LN_2, float("-inf")), mask=is_lane)
    tl.store(gate + head, 1.0 - distant_mass / mass, mask=is_lane)

    top = tl.max(tl.load(numbers + known + 3 * GROUPS, mask=is_part, other=float("-inf")), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([LANES], 0.0, tl.float32)
    sums = tl.full([LANES, DIM_2], 0.0, tl.float32)
    for index in range(0, SPLITS):
        at = (unit * SPLITS + index) * (5 * GROUPS) + lane
        factor = tl.exp2(tl.load(numbers + at + 3 * GROUPS, mask=is_lane, other=float("-inf")) - top)
        total += factor * tl.load(numbers + at + 4 * GROUPS, mask=is_lane, other=0.0)
        # A part that counts nothing is not read.
        taken = lane_dim & (factor > 0)[:, None]
        at_part = ((unit * SPLITS + index) * GROUPS + lane)[:, None] * DIM + dim[None, :]
        sums += factor[:, None] * tl.load(parts + at_part, mask=taken, other=0.0)
    sums /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + head[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=lane_dim)


class Tiles(NamedTuple):
    """How the work is cut: slots of a tile, parts of a head's work, and how many of these are proximal."""

    block: int
    splits: int
    near_splits: int


def tiles(q: Tensor, kv_heads: int, length: int, near: int) -> Tiles:
    """Tiles for q [B, H, 1, D] and segments of `length` slots, `near` tokens of which are proximal.

    They follow from capacities, not from how much is stored: each other number of parts is a kernel to be compiled.
    """
    width = triton.next_power_of_2(max(16, q.shape[-1]))
    block = BLOCK or min(128, max(16, 16384 // (width * q.element_size())))
    splits = SPLITS
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        # Many programs for each processor, so that the last wave is a small part; each has a few tiles to load ahead.
        splits = min(128, triton.cdiv(16 * processors, q.shape[0] * kv_heads), triton.cdiv(length, 4 * block) + 1)
        splits = triton.next_power_of_2(splits)
    splits = max(2, splits)
    # A proximal token costs a key and a value, a distant one a value.
    near = min(near, length)
    near_splits = round(splits * 2 * near / max(1, 2 * near + length - near))
    return Tiles(block, splits, min(splits - 1, max(1, near_splits)))


class Parts:
    """What the programs of one layer leave: sums of values, and the numbers to weigh them by.

    Attributes:
        tiles: how the work is cut.
        sums: [B, H_kv, splits, G, D] float32.
        numbers: [B, H_kv, splits, 5, G] float32.
        sizes: what all kernels are told.
    """

    def __init__(self, q: Tensor, kv_heads: int, length: int, near: int) -> None:
        """For q [B, H, 1, D] and segments of `length` slots, `near` tokens of which are proximal."""
        batch, heads, _, dim = q.shape
        groups = heads // kv_heads
        self.tiles = tiles(q, kv_heads, length, near)
        splits = self.tiles.splits
        self.sums = torch.empty(batch, kv_heads, splits, groups, dim, dtype=torch.float32, device=q.device)
        self.numbers = torch.empty(batch, kv_heads, splits, NUMBERS, groups, dtype=torch.float32, device=q.device)
        self.sizes = {
            "KV_HEADS": kv_heads,
            "GROUPS": groups,
            "DIM": dim,
            "SPLITS": splits,
            "LANES": max(16, triton.next_power_of_2(groups)),
            "DIM_2": triton.next_power_of_2(max(16, dim)),
            "num_warps": 4,
        }

    @property
    def splits_2(self) -> int:
        return triton.next_power_of_2(self.tiles.splits)

    def merged(self, q: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """out like q, lse and gate [B, H, 1] float32.

        Args:
            q: [B, H, 1, D], contiguous.
            order: [H_kv] int64, the KV head at each place of the storage order; None where they are the same.
        """
        out = torch.empty_like(q)
        lse = torch.empty(*q.shape[:2], 1, dtype=torch.float32, device=q.device)
        gate = torch.empty_like(lse)
        _merge[self.sums.shape[:2]](
            self.sums,
            self.numbers,
            q if order is None else order,
            out,
            lse,
            gate,
            ORDERED=order is not None,
            SPLITS_2=self.splits_2,
            **self.sizes,
        )
        return out, lse, gate
