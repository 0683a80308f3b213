"""The online softmax of the Triton kernels, in powers of two."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def soften(most, total, logits):
    """One step: from the running peak and sum [ROWS] and logits [ROWS, COLUMNS] in powers of two, -inf where unseen.

    Returns:
        The new peak and sum, the logits' weights, and the factor on whatever was summed up with the old peak.
    """
    highest = tl.maximum(most, tl.max(logits, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(logits - shift[:, None])
    decay = tl.exp2(most - shift)
    return highest, total * decay + tl.sum(weight, 1), weight, decay


@triton.jit
def gather(most, total, sums, logits, value):
    """The same step with sums of values [ROWS, DIM], which the weights of value [COLUMNS, DIM] are added to."""
    most, total, weight, decay = soften(most, total, logits)
    return most, total, sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")


@triton.jit
def nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Peak, sum and sums of values before the first step."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    return most, tl.full([ROWS], 0.0, tl.float32), tl.full([ROWS, DIM], 0.0, tl.float32)
