"""Tensor functions of PoD: no transformers, no lightning. A readable reference stands beside every fast version."""

from pod_kernels import reference
from pod_kernels.attention import shared_score_attention
from pod_kernels.cached import attention_weights, cached_attention
from pod_kernels.pages import paged_attention, refresh_pages
from pod_kernels.quantized import Quantization, QuantizedSegments
from pod_kernels.segments import LayerSlots, Segments
from pod_kernels.skipping import SkipStats

__all__ = [
    "LayerSlots",
    "Segments",
    "Quantization",
    "QuantizedSegments",
    "SkipStats",
    "attention_weights",
    "cached_attention",
    "paged_attention",
    "refresh_pages",
    "reference",
    "shared_score_attention",
]
