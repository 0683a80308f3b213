"""A cache in blocks, as serving engines keep it (vLLM), and a step's queries in tiles: what its attention is given.

Legend: that of `block_tables.py`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pod_kernels.segments import on_device

TILE = 64  # queries of a tile of a prefill, at most; a power of two, as all widths are: a kernel is compiled for each


@dataclass(frozen=True)
class Store:
    """Vectors of one layer in blocks.

    Attributes:
        blocks: [number of blocks, S, b, D]: S vectors of each token.
        table: [R, most blocks of a request] int: the blocks of each request, in order.
    """

    blocks: Tensor
    table: Tensor

    def write(self, vectors: Tensor, places: Tensor) -> None:
        """Put [T, S, D] at `places` [T]: block * b + place in the block."""
        size = self.blocks.shape[2]
        self.blocks[places // size, :, places % size] = vectors

    def read(self, rows: Tensor, columns: Tensor, slots: Tensor) -> Tensor:
        """Of requests `rows` [N], the `columns` [N, C] of their tables: vectors `slots` [K] of each token.

        Returns:
            [N, K, C * b, D]. What a column below 0 or behind the table gives is for the caller to mask.
        """
        numbers = self.table[rows[:, None], columns.clamp(0, self.table.shape[1] - 1)]
        found = self.blocks[numbers[:, None], slots[:, None]]  # [N, K, C, b, D]
        return found.flatten(2, 3)


@dataclass(frozen=True)
class Part:
    """What one store holds of a layer's keys, or values: its vectors `slots` [K] are those of KV heads `heads` [K]."""

    store: Store
    slots: Tensor
    heads: Tensor


@dataclass(frozen=True)
class Tiles:
    """Queries of a step, cut into tiles of Q; the tiles that look farthest come first.

    Attributes:
        rows: [N] int64, the request of each tile.
        first, last: [N] int64, the positions of its first and its last query.
        tokens: [N, Q] int64, where its queries are among the T; a tile that is not full repeats one.
        queries: [n] int64, where the queries of all tiles are among the T, each once.
        places: [n] int64, and where each is among the N * Q.
        firsts: [N], `first` on the host.
        ends: [N], on the host: one position behind each tile's last query, falling.
    """

    rows: Tensor
    first: Tensor
    last: Tensor
    tokens: Tensor
    queries: Tensor
    places: Tensor
    firsts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> "list[Tiles]":
        """The tiles of a step: those of one query and, apart from them, those of longer chunks.

        Args:
            starts: [R + 1], where each request's queries begin among the T, and their end.
            lengths: [R], tokens of each request, its queries the last of them.
            device: of the tensors.
        """
        counts = np.diff(starts)
        kinds = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        return [cls._of(chosen, starts, lengths, device) for chosen in kinds if len(chosen)]

    @classmethod
    def _of(cls, chosen: np.ndarray, starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> "Tiles":
        counts = np.diff(starts)
        width = min(TILE, 1 << int(counts[chosen].max() - 1).bit_length())
        pieces = -(-counts[chosen] // width)
        rows = np.repeat(chosen, pieces)
        offsets = width * (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
        first = lengths[rows] - counts[rows] + offsets
        filled = np.minimum(width, counts[rows] - offsets)
        order = np.argsort(-(first + filled), kind="stable")
        rows, offsets, first, filled = rows[order], offsets[order], first[order], filled[order]
        inside = np.arange(width)
        tokens = (starts[rows] + offsets)[:, None] + np.minimum(inside, filled[:, None] - 1)
        is_query = inside < filled[:, None]
        arrays = rows, first, first + filled - 1, tokens, tokens[is_query], np.flatnonzero(is_query)
        return cls(*on_device(arrays, device), first, first + filled)

    def grouped(self, queries: Tensor, kv_heads: int) -> Tensor:
        """The tiles' queries of [T, H, D]: [N, H_kv, G * Q, D]."""
        return queries[self.tokens].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
