"""What shared-score attention is asked: one description, checked once, that every backend takes."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """Which pairs are proximal, whether the others count, and the factor on the logits."""

    sink_size: int
    recent_size: int
    scale: float
    window_only: bool


@dataclass(frozen=True)
class Problem:
    """The arguments of `pod_kernels.shared_score_attention`, where they are documented; `scale` is never None.

    Raises:
        ValueError: shapes, dtypes or sizes that no backend can serve; names the argument, what it was and what it must
            be.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_distant: Tensor | None = None
    k_distant: Tensor | None = None
    _: KW_ONLY
    sink_size: int
    recent_size: int
    scale: float | None = None
    lengths: Tensor | None = None
    document_ids: Tensor | None = None
    window_only: bool = False
    return_lse: bool = False
    return_gate: bool = False

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(f"q and k must be [B, heads, T, D]; got shapes {tuple(q.shape)} and {tuple(k.shape)}")
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        if heads % kv_heads:
            raise ValueError(f"query heads ({heads}) must be a multiple of key/value heads ({kv_heads})")
        if self.window_only and self.q_distant is not None:
            raise ValueError("window_only leaves distant pairs out: pass no q_distant and k_distant with it")
        if (self.q_distant is None) != (self.k_distant is None):
            raise ValueError(
                "q_distant and k_distant come together: pass both, or None for both (plain causal attention)"
            )
        for name, tensor, shape in (
            ("k", k, (batch, kv_heads, length, dim)),
            ("v", v, (batch, kv_heads, length, v.shape[-1])),
            ("q_distant", self.q_distant, (batch, heads, length, dim)),
            ("k_distant", self.k_distant, (batch, kv_heads, length, dim)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                given = tuple(tensor.shape)
                raise ValueError(f"{name} must have shape {shape} to go with q {tuple(q.shape)}; got {given}")
            if tensor is not None and tensor.dtype != q.dtype:
                raise ValueError(f"{name} is {tensor.dtype} but q is {q.dtype}: cast them to one dtype")
        if self.sink_size < 0:
            raise ValueError(f"sink_size must be >= 0, got {self.sink_size}")
        if self.recent_size < 1:
            raise ValueError(f"recent_size must be >= 1 (the current token is recent), got {self.recent_size}")
        if self.lengths is not None and tuple(self.lengths.shape) != (batch,):
            raise ValueError(f"lengths must have shape ({batch},), one per row; got {tuple(self.lengths.shape)}")
        if self.document_ids is not None and tuple(self.document_ids.shape) != (batch, length):
            raise ValueError(f"document_ids must have shape {(batch, length)}; got {tuple(self.document_ids.shape)}")
        if self.lengths is not None and self.document_ids is not None:
            raise ValueError("pass lengths or document_ids, not both: document_ids mark padding with -1")
        if self.scale is None:
            object.__setattr__(self, "scale", dim**-0.5)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.sink_size, self.recent_size, self.scale, self.window_only)

    @property
    def sources(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v and the two for distant logits: where a gate is wanted of plain attention, its own once more."""
        if self.return_gate and self.q_distant is None and not self.window_only:
            return self.q, self.k, self.v, self.q, self.k
        return self.q, self.k, self.v, self.q_distant, self.k_distant

    def results(self, out: Tensor, lse: Tensor | None, gate: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """What the caller asked for, of what a backend returned."""
        results = (out, *[lse] * self.return_lse, *[gate] * self.return_gate)
        return out if len(results) == 1 else results
