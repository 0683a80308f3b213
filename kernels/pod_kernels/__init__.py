"""Tensor functions of PoD: no transformers, no lightning. A readable reference stands beside every fast version.

attention.py           shared_score_attention: what it is asked, checked, and where the sequences lie in the rows
reference.py           the eager truth of shared-score attention
composed.py            the same from torch's flash attention pieces, exact backward; one operation for torch.compile
pieces.py              the plan of those pieces: every pair once
flash.py               one piece and its log-sum-exp: torch's flash attention, cuDNN's, or eager chunks
dispatch.py            which implementation runs: the one that is named, or was found right and fastest here
segments.py            how a cache stores vectors: packed segments, rings, what is chosen of them
cached.py              attention of a few queries to a cache, and its reference
skipping.py            early skip: distant values that a decode step leaves unread, and their counts
quantized.py           vectors in 8 or 4 bits: keys per channel, values per token, the last ones as they are
pages.py               pages of keys with their bounds, and attention to some pages only (Quest)
block_tables.py        attention of many requests whose cache lies in blocks, as serving engines keep it
window.py              attention of heads that stream, to sinks and a ring of recent tokens
triangle.py            attention of a prompt of which most queries see sinks and recent keys alone (TriangleMix)
tables.py              such blocks, their tables, and the queries of a step in tiles
slots.py               attention to a store of fixed slots and to a chunk, rotated by place or by position
cascade.py             which token goes where in a cascading cache
triton/                everything that imports triton: the same by kernels
"""

from torch import Tensor

from pod_kernels import composed, reference
from pod_kernels.attention import BACKENDS, Problem, shared_score_attention
from pod_kernels.cached import attention_weights, cached_attention
from pod_kernels.pages import paged_attention, refresh_pages
from pod_kernels.quantized import Quantization, QuantizedSegments
from pod_kernels.segments import LayerSlots, Segments
from pod_kernels.skipping import SkipStats
from pod_kernels.triangle import TriangleMix


def _fused(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    try:
        from pod_kernels.triton import fused  # only here, since this imports triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("backend 'fused' needs triton: pip install triton, or choose 'composed'") from error
    return fused.attend(problem)


BACKENDS.update(reference=reference.attend, composed=composed.attend, fused=_fused)

__all__ = [
    "LayerSlots",
    "Segments",
    "Quantization",
    "QuantizedSegments",
    "SkipStats",
    "TriangleMix",
    "attention_weights",
    "cached_attention",
    "paged_attention",
    "refresh_pages",
    "reference",
    "shared_score_attention",
]
