"""Tensor functions of PoD: no transformers, no lightning. A readable reference stands beside every fast version."""

from pod_kernels import reference
from pod_kernels.attention import shared_score_attention
from pod_kernels.cached import cached_attention
from pod_kernels.segments import LayerSegments, Segments
from pod_kernels.slots import SlotLayer, attention_weights, slot_attention

__all__ = [
    "LayerSegments",
    "Segments",
    "SlotLayer",
    "attention_weights",
    "cached_attention",
    "reference",
    "shared_score_attention",
    "slot_attention",
]
