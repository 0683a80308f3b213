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
