"""One query's attention split among programs, each with a part of what is stored, and merged by log-sum-exp.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, D head dimension.

`Parts` holds what the programs leave, and adds it up in a fixed order, so that equal inputs give equal bits. Kernels
get it as (sums, numbers), and how the work is cut as one constant.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.triton.reading import vectors
from pod_kernels.triton.softmax import LN_2

# Tests on the interpreter take smaller ones: None chooses by head dimension and device.
BLOCK: int | None = None
SPLITS: int | None = None

NUMBERS = 5  # of each part: maximum, sum, its distant share; maximum and sum of what the output takes


class Tiles(NamedTuple):
    """How one query's attention is cut.

    Attributes:
        kv_heads, groups, dim: H_kv, G and D.
        block: slots of a tile.
        splits: parts of a head's work.
        near_splits: how many of these are proximal.
        lanes, dim_2, splits_2: G, D and the parts as kernels take them, powers of two.
    """

    kv_heads: int
    groups: int
    dim: int
    block: int
    splits: int
    near_splits: int
    lanes: int
    dim_2: int
    splits_2: int


@triton.jit
def asked_at(row, kv_head, CUT: tl.constexpr):
    """[LANES] where the vectors of a row's and KV head's queries begin in [B, H, 1, D]."""
    return ((row * CUT.kv_heads + kv_head) * CUT.groups + tl.arange(0, CUT.lanes)) * CUT.dim


@triton.jit
def all_numbers(numbers, unit, which, empty, CUT: tl.constexpr):
    """[SPLITS_2, LANES] one of the numbers of all parts of a row's KV head."""
    part, lane = tl.arange(0, CUT.splits_2), tl.arange(0, CUT.lanes)
    at = (unit * CUT.splits + part)[:, None] * (5 * CUT.groups) + which * CUT.groups + lane[None, :]
    return tl.load(numbers + at, mask=(part < CUT.splits)[:, None] & (lane < CUT.groups)[None, :], other=empty)


@triton.jit
def leave(parts, unit, split, most, total, total_distant, sums, HAS_NUMBERS: tl.constexpr, HAS_SUMS, CUT: tl.constexpr):
    """What one program has found: the numbers of its weights, and what the output takes of them."""
    lane, dim = tl.arange(0, CUT.lanes), tl.arange(0, CUT.dim_2)
    is_lane = lane < CUT.groups
    into = unit * CUT.splits + split
    numbers = parts[1] + into * (5 * CUT.groups) + lane
    if HAS_NUMBERS:
        tl.store(numbers, most, mask=is_lane)
        tl.store(numbers + CUT.groups, total, mask=is_lane)
        tl.store(numbers + 2 * CUT.groups, total_distant, mask=is_lane)
    if HAS_SUMS:
        tl.store(numbers + 3 * CUT.groups, most, mask=is_lane)
        tl.store(numbers + 4 * CUT.groups, total, mask=is_lane)
        into_part = (into * CUT.groups + lane)[:, None] * CUT.dim + dim[None, :]
        tl.store(parts[0] + into_part, sums, mask=is_lane[:, None] & (dim < CUT.dim)[None, :])


@triton.jit
def _merge(parts, order, out, lse, gate, CUT: tl.constexpr, TOGETHER: tl.constexpr):
    """Grid (B, H_kv, G): one query head, the numbers of its parts at once and their sums so many at a time."""
    sums_of, numbers = parts
    row, place, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_head = place
    if order is not None:
        kv_head = tl.load(order + place).to(tl.int32)
    first = (row * CUT.kv_heads + place) * CUT.splits
    head = (row * CUT.kv_heads + kv_head) * CUT.groups + group

    part = tl.arange(0, CUT.splits_2)
    at, inside = numbers + (first + part) * (5 * CUT.groups) + group, part < CUT.splits
    most = tl.load(at, mask=inside, other=float("-inf"))
    top = tl.max(most, 0)
    factors = tl.exp2(most - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(factors * tl.load(at + CUT.groups, mask=inside, other=0.0), 0)
    distant_mass = tl.sum(factors * tl.load(at + 2 * CUT.groups, mask=inside, other=0.0), 0)
    counted = tl.where(mass > 0, (top + tl.log2(mass)) * LN_2, float("-inf"))
    mass = tl.where(mass > 0, mass, 1.0)
    tl.store(lse + head, counted)
    tl.store(gate + head, 1.0 - distant_mass / mass)

    top = tl.max(tl.load(at + 3 * CUT.groups, mask=inside, other=float("-inf")), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total, sums = 0.0, tl.full([CUT.dim_2], 0.0, tl.float32)
    for start in range(0, CUT.splits, TOGETHER):
        some = start + tl.arange(0, TOGETHER)
        here, is_some = numbers + (first + some) * (5 * CUT.groups) + group, some < CUT.splits
        factor = tl.exp2(tl.load(here + 3 * CUT.groups, mask=is_some, other=float("-inf")) - top)
        total += tl.sum(factor * tl.load(here + 4 * CUT.groups, mask=is_some, other=0.0), 0)
        # A part that counts nothing is not read.
        found = ((first + some) * CUT.groups + group) * CUT.dim
        sums += tl.sum(factor[:, None] * vectors(sums_of, found, factor > 0, CUT.dim, CUT.dim_2), 0)
    dim = tl.arange(0, CUT.dim_2)
    sums = (sums / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty)
    tl.store(out + head * CUT.dim + dim, sums, mask=dim < CUT.dim)


def tiles(q: Tensor, kv_heads: int, length: int, near: int) -> Tiles:
    """Tiles for q [B, H, 1, D] and segments of `length` slots, `near` tokens of which are proximal.

    They follow from capacities, not from how much is stored: each other number of parts is a kernel to be compiled.
    """
    batch, heads, _, dim = q.shape
    groups, width = heads // kv_heads, triton.next_power_of_2(max(16, dim))
    block = BLOCK or min(128, max(16, 16384 // (width * q.element_size())))
    splits = SPLITS
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        # Many programs for each processor, so that the last wave is a small part; each has a few tiles to load ahead.
        splits = min(128, triton.cdiv(16 * processors, batch * kv_heads), triton.cdiv(length, 4 * block) + 1)
        splits = triton.next_power_of_2(splits)
    splits = max(2, splits)
    # A proximal token costs a key and a value, a distant one a value.
    near = min(near, length)
    near_splits = min(splits - 1, max(1, round(splits * 2 * near / max(1, 2 * near + length - near))))
    lanes = max(16, triton.next_power_of_2(groups))
    return Tiles(kv_heads, groups, dim, block, splits, near_splits, lanes, width, triton.next_power_of_2(splits))


class Parts:
    """What the programs of one layer leave: sums of values, and the numbers to weigh them by.

    Attributes:
        tiles: how the work is cut.
        sums: [B, H_kv, splits, G, D] float32.
        numbers: [B, H_kv, splits, 5, G] float32.
    """

    def __init__(self, q: Tensor, kv_heads: int, length: int, near: int) -> None:
        """For q [B, H, 1, D] and segments of `length` slots, `near` tokens of which are proximal."""
        self.tiles = cut = tiles(q, kv_heads, length, near)
        shape = len(q), kv_heads, cut.splits
        self.sums = torch.empty(*shape, cut.groups, cut.dim, dtype=torch.float32, device=q.device)
        self.numbers = torch.empty(*shape, NUMBERS, cut.groups, dtype=torch.float32, device=q.device)

    def merged(self, q: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """out like q, lse and gate [B, H, 1] float32.

        Args:
            q: [B, H, 1, D], contiguous.
            order: [H_kv] int64, the KV head at each place of the storage order; None where they are the same. Nothing
                is written of KV heads that are not among them.
        """
        out, places = torch.empty_like(q), self.tiles.kv_heads if order is None else len(order)
        lse = torch.empty(*q.shape[:2], 1, dtype=torch.float32, device=q.device)
        gate = torch.empty_like(lse)
        parts, cut = (self.sums, self.numbers), self.tiles
        _merge[len(q), places, cut.groups](parts, order, out, lse, gate, cut, min(16, cut.splits_2), num_warps=4)
        return out, lse, gate
