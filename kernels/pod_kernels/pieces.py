"""The plan of composed attention: plain attention pieces that hold every pair of PoD once.

The pairs j <= i of PoD (arXiv 2412.02252, Eq. 3 and 4) fall into four kinds of piece, each of which a stock flash
attention can run (n_s = sink_size, n_r = recent_size, T > n_s + n_r):

    queries            keys               logits from           shape
    i                  i-n_r+1 .. i       q, k                  the window: a causal square, then a band; or squares
    n_r .. n_r+n_s-1   0 .. i-n_r         q, k                  sinks of the first later queries: a causal square
    n_r+n_s .. T-1     0 .. n_s-1         q, k                  sinks of the others: a full rectangle
    n_s+n_r .. T-1     n_s .. i-n_r       q_distant, k_distant  distant: a causal square

With T <= n_s + n_r, or without q_distant, everything is one causal square. Window attention leaves out the last kind.

A window of squares cuts the sequence into chunks of n_r tokens. What a chunk sees of itself is a causal square. Of the
chunk before it, its query t sees the keys u > t: read from the end, a causal square too, one token shorter. A kernel
that is fast for causal squares alone multiplies no pair in vain then.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
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
        chunks, step: into how many pieces of one size it is cut, that go together, and by how many tokens the queries
            and keys of each begin after those of the one before.
        reversed: the shape is that of queries and keys read from their end.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    shape: Literal["causal", "full", "band", "window"]
    distant: bool = False
    first: bool = False
    chunks: int = 1
    step: int = 0
    reversed: bool = False

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Queries and keys of one chunk."""
        return tuple(stop - start - (self.chunks - 1) * self.step for start, stop in (self.queries, self.keys))

    @property
    def multiplied_pairs(self) -> int:
        """Pairs whose logit is computed, masked ones of a band included."""
        num_queries, num_keys = self.widths
        return self.chunks * (
            num_queries * (num_queries + 1) // 2 if self.shape == "causal" else num_queries * num_keys
        )


@lru_cache(maxsize=256)
def plan(
    length: int,
    sink_size: int,
    recent_size: int,
    distant: bool,
    window: Literal["bands", "native", "squares"] = "bands",
    window_only: bool = False,
) -> tuple[Piece, ...]:
    """The disjoint pieces that cover all pairs j <= i that count; the proximal ones come first.

    Args:
        length: tokens of the sequence, T.
        sink_size, recent_size: as in `shared_score_attention`.
        distant: whether distant logits have queries and keys of their own.
        window: what runs it: masked bands, a kernel that has a sliding window, or causal squares.
        window_only: distant pairs do not count.
    """
    end = sink_size + recent_size
    if not (distant or window_only) or length <= end:
        return (Piece((0, length), (0, length), "causal", first=True),)
    pieces = []
    if window == "native":
        pieces.append(Piece((0, length), (0, length), "window", first=True))
    elif window == "squares":
        pieces += _squares(length, recent_size)
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
                pieces.append(Piece((start, stop), keys, "band", first=True, chunks=chunks, step=size))
    if sink_size > 0:
        pieces.append(Piece((recent_size, end), (0, sink_size), "causal"))
        pieces.append(Piece((end, length), (0, sink_size), "full"))
    if not window_only:
        pieces.append(Piece((end, length), (sink_size, length - recent_size), "causal", distant=True))
    return tuple(pieces)


def _squares(length: int, recent_size: int) -> list[Piece]:
    """The window of causal squares: of `recent_size` tokens, and of those that are left over."""
    chunks, rest = divmod(length, recent_size)
    whole = length - rest
    pieces = [Piece((0, whole), (0, whole), "causal", first=True, chunks=chunks, step=recent_size)]
    if chunks > 1 and recent_size > 1:
        before = (recent_size, whole - 1), (1, whole - recent_size)
        pieces.append(Piece(*before, "causal", chunks=chunks - 1, step=recent_size, reversed=True))
    if rest:
        pieces.append(Piece((whole, length), (whole, length), "causal", first=True))
        # The last chunk before: its end is seen by all that are left over.
        pieces.append(Piece((whole, length), (whole - recent_size + rest, whole), "full"))
    if rest > 1:
        first = whole - recent_size
        pieces.append(Piece((whole, length - 1), (first + 1, first + rest), "causal", reversed=True))
    return pieces
