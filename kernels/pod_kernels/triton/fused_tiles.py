"""The tiles of the fused kernels: which of them are visited, which tokens are in one, and how it is read and written.

The pairs (query i, key j) of PoD (arXiv 2412.02252, Eq. 3 and 4) are taken in tiles, first those with distant pairs
(logits from q_distant and k_distant), then those with proximal ones (from q and k). In a plain tile all pairs belong
to the source and no mask is needed; the others, on a border (of the sinks, the window, the diagonal, a document), are
masked, and only these may be visited for both sources. Along one row of tiles of a long sequence, left to right:

    distant                   masked  plain ............... plain  masked
    proximal  masked (sinks)                                       masked (window)  plain .. plain  masked (diagonal)

Where each run begins and ends follows from the first and last token of a tile (`distant_keys`, `proximal_keys`, and
for a tile of keys `distant_queries`, `proximal_queries`), so that no empty tile is visited. Each of the four returns
the masked tiles and the plain ones as three runs (first tile, number of tiles), of which the plain ones need one.

S is sink_size and R is recent_size. `first` and `last` are the columns of a tile's first and last real token (last is
-1 where there is none), `low` and `high` the columns where the sequences of these two begin. Where the two differ,
several documents meet in the tile, and all is masked; if it is more than twice as long as the tiles of the other side,
one between two documents' pairs may be empty.

With padding or documents a tensor `spans` [2, B, T] holds, for each token, the first column of its sequence and the
column after the last one; a padded token has the first at T and the last at 0, so that it sees nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Numbers whose values are no reason to compile again.
ANY = ["batch", "heads", "kv_heads", "groups", "length", "section", "S", "R", "scale"]
NEVER = tl.constexpr(2**30)


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        dim, padded: D, and as kernels take it, a power of two.
        query_tile, key_tile: tokens of a tile.
    """

    dim: int
    padded: int
    query_tile: int
    key_tile: int


@triton.jit
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def distant_keys(queries, S, R, KEY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Tiles of keys with distant pairs for a tile of queries."""
    columns, starts, real, first, last, low, high = queries
    last_low = last
    other_begin, other_end = 0, 0
    if SPANS:
        # The queries of the first sequence, whose keys may lie far back, and those of the others, which begin here.
        last_low = tl.max(tl.where(real & (starts == low), columns, -1), 0)
        is_other = real & (starts > low) & (columns - R >= starts + S)
        other_begin = tl.min(tl.where(is_other, starts + S, NEVER), 0) // KEY_TILE
        other_end = tl.cdiv(tl.max(tl.where(is_other, columns - R + 1, 0), 0), KEY_TILE)
    begin = (low + S) // KEY_TILE
    end = tl.where(last_low - R >= low + S, tl.cdiv(tl.maximum(last_low - R + 1, 0), KEY_TILE), begin)
    # All keys are past the sinks, and none is recent for any query.
    plain = tl.minimum(tl.where(low == high, tl.cdiv(low + S, KEY_TILE), end), end)
    plain_end = _clamp(tl.maximum(first - R + 1, 0) // KEY_TILE, plain, end)
    other_begin = tl.maximum(other_begin, end)
    other = tl.maximum(other_end - other_begin, 0)
    masked = (begin, plain - begin, plain_end, end - plain_end, other_begin, other)
    return masked, (plain, plain_end - plain, 0, 0, 0, 0)


@triton.jit
def proximal_keys(queries, S, R, KEY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Tiles of keys with proximal pairs for a tile of queries."""
    columns, starts, real, first, last, low, high = queries
    last_low = last
    if SPANS:
        last_low = tl.max(tl.where(real & (starts == low), columns, -1), 0)
    end = tl.cdiv(last + 1, KEY_TILE)
    begin = tl.minimum(low // KEY_TILE, end)
    sink_end = tl.cdiv(tl.minimum(low + S, last_low + 1), KEY_TILE)
    sink_end = tl.where(S > 0, _clamp(sink_end, begin, end), begin)
    window = _clamp(tl.maximum(first - R + 1, low) // KEY_TILE, sink_end, end)
    # All keys are in the window of every query, and in its sequence; then: seen by every query.
    plain = tl.maximum(tl.cdiv(tl.maximum(last - R + 1, 0), KEY_TILE), tl.cdiv(low, KEY_TILE))
    plain = tl.where(low == high, _clamp(plain, window, end), end)
    plain_end = _clamp((first + 1) // KEY_TILE, plain, end)
    masked = (begin, sink_end - begin, window, plain - window, plain_end, end - plain_end)
    return masked, (plain, plain_end - plain, 0, 0, 0, 0)


@triton.jit
def distant_queries(keys, stops, stop, S, R, QUERY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Tiles of queries with distant pairs for a tile of keys; `stop` is the column after the last one's sequence."""
    columns, starts, real, first, last, low, high = keys
    other_begin, other_end = 0, 0
    if SPANS:
        # The keys of all sequences but the last, whose queries lie before the tile's end.
        is_other = real & (starts < high) & (columns >= starts + S) & (columns + R < stops)
        other_begin = tl.min(tl.where(is_other, columns + R, NEVER), 0) // QUERY_TILE
        other_end = tl.cdiv(tl.max(tl.where(is_other, stops, 0), 0), QUERY_TILE)
        other_begin = tl.minimum(other_begin, other_end)
    first_distant = tl.maximum(first, high + S)
    begin = tl.maximum((first_distant + R) // QUERY_TILE, other_end)
    any_distant = (first_distant <= last) & (first_distant + R < stop)
    end = tl.where(any_distant, tl.maximum(tl.cdiv(stop, QUERY_TILE), begin), begin)
    # No key is a sink, and none is recent for any query; then: no query is of a later sequence.
    is_plain = (low == high) & (first >= low + S)
    plain = tl.where(is_plain, _clamp(tl.cdiv(last + R, QUERY_TILE), begin, end), end)
    plain_end = _clamp(stop // QUERY_TILE, plain, end)
    other = other_end - other_begin
    masked = (begin, plain - begin, plain_end, end - plain_end, other_begin, other)
    return masked, (plain, plain_end - plain, 0, 0, 0, 0)


@triton.jit
def proximal_queries(keys, stop, S, R, QUERY_TILE: tl.constexpr):
    """Tiles of queries with proximal pairs for a tile of keys; `stop` is the column after the last one's sequence."""
    _, _, _, first, last, low, high = keys
    has_sinks = tl.maximum(first, high) < high + S
    end = tl.cdiv(tl.where(has_sinks, stop, tl.minimum(stop, last + R)), QUERY_TILE)
    begin = tl.minimum(first // QUERY_TILE, end)
    # All keys are seen by every query; then: in its window (or sinks), and no query is of a later sequence.
    plain = tl.where(low == high, _clamp(tl.cdiv(last, QUERY_TILE), begin, end), end)
    window = tl.where(last < low + S, NEVER, (first + R) // QUERY_TILE)
    plain_end = _clamp(tl.minimum(window, stop // QUERY_TILE), plain, end)
    masked = (begin, plain - begin, plain_end, end - plain_end, 0, 0)
    return masked, (plain, plain_end - plain, 0, 0, 0, 0)


@triton.jit
def tile_of(index, runs):
    """The index-th tile of three runs, one after the other."""
    start_0, count_0, start_1, count_1, start_2, _ = runs
    second = index - count_0
    third = second - count_1
    return tl.where(second < 0, start_0 + index, tl.where(third < 0, start_1 + second, start_2 + third))


@triton.jit
def wanted(rows, columns, starts, S, R, DISTANT: tl.constexpr):
    """Which pairs are visible and of the source; all broadcast against one another."""
    if DISTANT:
        return (columns >= starts + S) & (rows - columns >= R)
    else:
        return (columns <= rows) & (columns >= starts) & ((columns < starts + S) | (rows - columns < R))


@triton.jit
def program_of(tiles, heads, section):
    """(tile, head of all rows) of this program: `section` heads together, in each of these all heads of a tile."""
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = tl.minimum(section, heads - first)
    rest = program - first * tiles
    return rest // width, first + rest % width


@triton.jit
def tokens(spans, row, first, length, TILE: tl.constexpr, SPANS: tl.constexpr):
    """A tile's tokens: their columns and starts, which of them are real; first, last, low and high as above."""
    columns = first + tl.arange(0, TILE)
    if SPANS:
        starts = tl.load(spans + row.to(tl.int64) * length + columns, mask=columns < length, other=length)
        real = starts < length
        first_real = tl.min(tl.where(real, columns, length), 0)
        last_real = tl.max(tl.where(real, columns, -1), 0)
        return columns, starts, real, first_real, last_real, tl.min(starts, 0), tl.max(tl.where(real, starts, 0), 0)
    else:
        starts = tl.zeros([TILE], tl.int32)
        return columns, starts, columns < length, first, tl.minimum(first + TILE, length) - 1, 0, 0


@triton.jit
def head_of(tensor, row, head):
    """Pointer and token stride of one head of a tensor, given as its pointer and its strides of row, head, token."""
    pointer, row_stride, head_stride, token_stride = tensor
    return pointer + row * row_stride + head * head_stride, token_stride


@triton.jit
def group_of(tensor, row, head):
    """Pointer, head stride and token stride of a tensor's heads from `head` on."""
    pointer, row_stride, head_stride, token_stride = tensor
    return pointer + row * row_stride + head * head_stride, head_stride, token_stride


@triton.jit
def load(head, first, real, ROWS: tl.constexpr, CUT: tl.constexpr, CHECK: tl.constexpr):
    """[ROWS, padded] from row `first` on; zero beyond dim, and in rows not `real` where that is to be checked."""
    base, stride = head
    rows, dims = tl.arange(0, ROWS), tl.arange(0, CUT.padded)
    # 64 bits: a token's offset in a sequence of a million passes 2 ** 31.
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    if CHECK and CUT.dim != CUT.padded:
        return tl.load(pointers, mask=real[:, None] & (dims < CUT.dim)[None, :], other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=real[:, None], other=0.0)
    elif CUT.dim != CUT.padded:
        return tl.load(pointers, mask=(dims < CUT.dim)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store(head, first, length, values, ROWS: tl.constexpr, CUT: tl.constexpr):
    base, stride = head
    rows, dims = tl.arange(0, ROWS), tl.arange(0, CUT.padded)
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (first + rows < length)[:, None] & (dims < CUT.dim)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)
