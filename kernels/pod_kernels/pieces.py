"""The plan of composed attention: plain attention pieces that hold every pair of PoD once.

The pairs j <= i of PoD (arXiv 2412.02252, Eq. 3 and 4) fall into four kinds of piece, each of which a stock flash
attention can run (n_s = sink_size, n_r = recent_size, T > n_s + n_r):

    queries            keys               logits from           shape
    i                  i-n_r+1 .. i       q, k                  the window: a causal square, then a band
    n_r .. n_r+n_s-1   0 .. i-n_r         q, k                  sinks of the first later queries: a causal square
    n_r+n_s .. T-1     0 .. n_s-1         q, k                  sinks of the others: a full rectangle
    n_s+n_r .. T-1     n_s .. i-n_r       q_distant, k_distant  distant: a causal square

With T <= n_s + n_r, or without q_distant, everything is one causal square. Window attention leaves out the last kind.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

# Shorter chunks of the band waste fewer masked pairs; below this many queries torch's CPU kernel gains nothing.
SHORTEST_FAST_CHUNK = 64


@dataclass(frozen=True)
class Piece:
    """A rectangle of (query, key) pairs and the part of it that counts.

    Attributes:
        queries, keys: [start, stop) in the sequence.
        shape: `causal`: key u <= query t, both counted inside the piece (a square). `full`: all pairs. `band`: query t
            sees keys t .. t + recent_size - 1 of the piece. `window`: causal, and t - u < recent_size (a square).
        distant: logits from q_distant and k_distant instead of q and k.
        first: no earlier piece of the plan holds these queries.
        chunks, chunk: of a band: into how many its queries are cut, each with the keys that it sees, and their size.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    shape: Literal["causal", "full", "band", "window"]
    distant: bool = False
    first: bool = False
    chunks: int = 1
    chunk: int = 0

    @property
    def multiplied_pairs(self) -> int:
        """Pairs whose logit is computed, masked ones of a band included."""
        num_queries = self.queries[1] - self.queries[0]
        num_keys = self.keys[1] - self.keys[0] - (self.chunks - 1) * self.chunk
        return num_queries * (num_queries + 1) // 2 if self.shape == "causal" else num_queries * num_keys


@lru_cache(maxsize=256)
def plan(
    length: int,
    sink_size: int,
    recent_size: int,
    distant: bool,
    native_window: bool = False,
    window_only: bool = False,
) -> tuple[Piece, ...]:
    """The disjoint pieces that cover all pairs j <= i that count; the proximal ones come first.

    Args:
        length: tokens of the sequence, T.
        sink_size, recent_size: as in `shared_score_attention`.
        distant: whether distant logits have queries and keys of their own.
        native_window: the kernel has a sliding window; without one, the window is cut into masked bands.
        window_only: distant pairs do not count.
    """
    end = sink_size + recent_size
    if not (distant or window_only) or length <= end:
        return (Piece((0, length), (0, length), "causal", first=True),)
    pieces = []
    if native_window:
        pieces.append(Piece((0, length), (0, length), "window", first=True))
    else:
        pieces.append(Piece((0, recent_size), (0, recent_size), "causal", first=True))
        # A chunk of c queries multiplies c - 1 pairs too many per query. Both terms are at most T / 32 once
        # T >= 4 * recent_size, which is at most 1/16 of the causal T / 2 pairs per query.
        chunk = max(1, recent_size // 8, min(length // 32, SHORTEST_FAST_CHUNK))
        whole = length - (length - recent_size) % chunk
        for start, stop, chunks in ((recent_size, whole, (whole - recent_size) // chunk), (whole, length, 1)):
            if start < stop:
                keys = start - recent_size + 1, stop
                size = (stop - start) // chunks
                pieces.append(Piece((start, stop), keys, "band", first=True, chunks=chunks, chunk=size))
    if sink_size > 0:
        pieces.append(Piece((recent_size, end), (0, sink_size), "causal"))
        pieces.append(Piece((end, length), (0, sink_size), "full"))
    if not window_only:
        pieces.append(Piece((end, length), (sink_size, length - recent_size), "causal", distant=True))
    return tuple(pieces)


def multiplied_pairs(length: int, sink_size: int, recent_size: int) -> int:
    """Query-key pairs that a kernel without a sliding window multiplies for one head, masked ones included.

    For length >= 4 * recent_size at most 1.1 * length * (length + 1) / 2, the pairs of plain causal attention.

    Args:
        length: tokens of the sequence, T.
        sink_size, recent_size: as in `shared_score_attention`.
    """
    return sum(piece.multiplied_pairs for piece in plan(length, sink_size, recent_size, distant=True))
