"""Triton kernels of a cascade: a decoded token's place in the sub-caches, and the scores.

Legend: B rows, A KV heads that decide, G query heads per KV head, P slots, F of them in use.

What is stored equals, bit for bit, what the torch path stores. Imports triton, so it is imported only where
`dispatch.runs_triton` says so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.cascade import Cascades, CascadeState

BLOCK = 1024  # slots looked at together


@triton.jit
def _entries(level, size, budget, count):
    """`Cascades.entries`: how many tokens sub-cache `level` has accepted when `count` tokens were added."""
    last = count - 1
    eager = tl.maximum(tl.minimum(last, budget) - level * size + 1, 0)
    return eager + tl.where(last > budget, (last >> level) - (budget >> level), 0)


@triton.jit
def _insert(held, scores, rings, new_scores, positions, slots, sizes, LEVELS: tl.constexpr):
    """Grid (A, B): one token into one chain of sub-caches."""
    row = tl.program_id(1)
    sinks, budget, size = sizes
    unit = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + row
    position = tl.load(positions + row)
    scores += unit * (sinks + budget + 1)
    held += unit * (sinks + budget + 1)
    rings += unit * LEVELS * (size + 1)
    slot = position
    if position >= sinks:
        count = position - sinks
        nobody = count * 0 - 1
        newest = nobody + 1 + sinks + budget  # the new token's name until it has a slot
        offered = newest
        dropped = nobody
        for level in tl.static_range(LEVELS):
            if offered >= 0:
                old = _entries(level, size, budget, count)
                ring = rings + level * (size + 1)
                if (_entries(level, size, budget, count + 1) > old) | (level == 0):
                    # In a full ring the oldest entry is where the new one goes.
                    oldest = tl.load(ring + old % size)
                    tl.store(ring + old % size, offered)
                    offered = tl.where(old >= size, oldest, -1)
                else:
                    last = tl.load(ring + (old - 1) % size)
                    # Of equals the later one stays.
                    wins = tl.load(scores + offered) >= tl.load(scores + last)
                    tl.store(ring + (old - 1) % size, tl.where(wins, offered, last))
                    dropped = tl.where(wins, last, offered)
                    offered = nobody
        dropped = tl.where(offered >= 0, offered, dropped)
        # Before the cache is full nobody is dropped, and an empty slot is taken.
        slot = tl.where(dropped >= 0, dropped, position)
        tl.store(rings + count % size, slot)
    tl.store(slots + unit, slot)
    if position >= 0:
        tl.store(held + slot, position)
        if new_scores is not None:
            tl.store(scores + slot, tl.load(new_scores + unit))


def insert(state: CascadeState, cascades: Cascades, positions: Tensor, scores: Tensor | None) -> Tensor:
    """`CascadeState.insert` of one token in each row: the contests are decided on the device, without a plan.

    Args:
        positions: [B, 1] int64, -1 for padding.
        scores: [A, B, 1] float32 of the new tokens; those of the state are up to date. Needed when N > 1.

    Returns:
        [A, B, 1] int64, the slot of each new token; -1 for padding.
    """
    heads, batch = state.positions.shape[:2]
    slots = torch.empty(heads, batch, 1, dtype=torch.long, device=positions.device)
    known = (slots, None) if state.scores is None else (state.scores, scores.contiguous())
    sizes, levels = (cascades.sinks, cascades.budget, cascades.size), cascades.num_cascades
    _insert[heads, batch](
        state.positions, known[0], state.rings, known[1], positions.contiguous(), slots, sizes, levels, num_warps=1
    )
    return slots


@triton.jit
def _average(scores, sums, factors, new_scores, sizes, GROUPS: tl.constexpr, IS_MAX: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (A, B, tiles of the slots in use and the new token)."""
    row = tl.program_id(1)
    unit = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + row
    slots, used, factor_row = sizes
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column <= used
    sums += unit * GROUPS * (used + 1)
    found = tl.load(sums + column, mask=inside, other=0.0)
    for group in range(1, GROUPS):
        more = tl.load(sums + group * (used + 1) + column, mask=inside, other=0.0)
        found = tl.maximum(found, more) if IS_MAX else found + more
    if not IS_MAX:
        found = found / GROUPS
    scores += unit * (slots + 1)
    factor = tl.load(factors + row * factor_row)
    old = tl.load(scores + column, mask=column < used, other=0.0)
    tl.store(scores + column, old * factor + found, mask=column < used)
    tl.store(new_scores + unit + column * 0, found, mask=column == used)


def average(scores: Tensor, sums: Tensor, factors: Tensor, head_reduction: str) -> Tensor:
    """Bring moving averages up to date with what one query gave, mu <- factor mu + sum.

    Args:
        scores: [A, B, P + 1] float32, changed in place; the first F columns are in use.
        sums: [A, B, G, F + 1] float32, the last column the new token's.
        factors: [B or 1] float32.
        head_reduction: "max" or "mean" over a KV head's query heads.

    Returns:
        [A, B, 1] float32, the new tokens' scores.
    """
    heads, batch, groups, width = sums.shape
    new_scores = torch.empty(heads, batch, 1, dtype=torch.float32, device=sums.device)
    sizes, is_max = (scores.shape[2] - 1, width - 1, 0 if len(factors) == 1 else 1), head_reduction == "max"
    _average[heads, batch, triton.cdiv(width, BLOCK)](
        scores, sums.contiguous(), factors, new_scores, sizes, groups, is_max, BLOCK,
        enable_fp_fusion=False,  # two roundings, as torch does it
    )  # fmt: skip
    return new_scores
