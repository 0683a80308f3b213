"""Configs of PoD models: the family's own config, and which layers share distant scores.

A PoD config.json says all that is needed to rebuild the model: `anchors` (the blocks), `sink_size`, `recent_size`,
`share` and `tau`, beside the family's fields.
"""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from pod.blocks import FIXED, LayerBlocks

SHARE_KINDS = ("scores", "keys", "kv", "window")


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class PodConfigMixin:
    """The PoD fields of a config, checked.

    Attributes:
        anchors: `[L][H_kv]` integers, the anchor layer of each layer and KV head, -1 where the head streams, which is
            to attend to sinks and recent tokens alone; None means blocks of one layer (dense).
        sink_size: first tokens that are always attended with the layer's own scores.
        recent_size: last tokens, the current one included, that are.
        share: "scores" (distant logits are q_anchor . k_anchor, the paper's Eq. 3) or "keys" (q . k_anchor). "kv" is
            cross-layer attention (arXiv 2405.12981): a block's layers attend with their own queries to the anchor's
            keys and values at all positions, near and distant, and have none of their own. "window" has no distant
            pairs at all: window attention, with sinks unless sink_size is 0, in blocks of one layer.
        tau: gate from which a non-anchor layer skips distant values at decode; None never skips.
    """

    # A tensor-parallel plan is a promise of the family's own layers: see `pod.model.decoder.Capabilities`.
    base_model_tp_plan = None
    base_model_pp_plan = None

    anchors: list[list[int]] | None = None
    sink_size: int = 16
    recent_size: int = 4080
    share: str = "scores"
    tau: float | int | None = None

    @property
    def blocks(self) -> LayerBlocks:
        """The layer blocks that `anchors` describes."""
        if self.anchors is None:
            return LayerBlocks.dense(self.num_hidden_layers, self.num_key_value_heads)
        return LayerBlocks(self.anchors)

    @property
    def kv_saving(self) -> float:
        """The share of the dense KV cache's bytes that is not stored as length grows, in [0, 1]."""
        if self.share == "window":
            return 1.0
        return self.blocks.kv_saving * (2 if self.share == "kv" else 1)

    def fixed(self) -> list:
        """The fields that models and caches are made by, as they are now (`FIXED`)."""
        return [vars(self)[name] for name in FIXED]  # many times as quick as getattr, and asked at every step

    def check_unchanged(self, made_by: list, what: str) -> None:
        """Refuse a config that was changed in place.

        Args:
            made_by: a copy of `fixed` from when `what`, the model or its cache, was made.

        Raises:
            ValueError: names the field, what it was and what it is.
        """
        now = self.fixed()
        if now == made_by:
            return
        name, was, value = next(one for one in zip(FIXED, made_by, now, strict=True) if one[1] != one[2])
        raise ValueError(
            f"config.{name} was changed in place: {what} was made with {was}, and it is {value} now. Set it back, or "
            "make another: pod.convert(model, blocks, sink_size, recent_size, share), which shares the weights, and "
            "pod.PodCache(model.config)"
        )

    def __post_init__(self, **kwargs) -> None:
        if self.head_dim is None:  # some families compute it in their attention only
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        check_sizes(self.sink_size, self.recent_size, self.share)
        if self.tau is not None and not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be between 0 and 1, or None; got {self.tau}")
        if self.tau is not None and self.share == "kv":
            raise ValueError("tau leaves an anchor's distant scores out, and share='kv' has none: set tau=None")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        sliding = [i for i, kind in enumerate(getattr(self, "layer_types", None) or []) if kind != "full_attention"]
        if sliding:
            raise ValueError(
                f"layers {sliding} are not full attention: PoD shares scores of distant tokens, which sliding-window "
                "layers do not see. Set use_sliding_window=False (max_window_layers then means nothing), or use a "
                "model with full attention in all layers."
            )
        if getattr(self, "sliding_window", None) is not None and not getattr(self, "layer_types", None):
            raise ValueError(
                f"sliding_window is {self.sliding_window} tokens in all layers: PoD shares scores of distant tokens, "
                "which sliding-window layers do not see. Set sliding_window=None, or use a model that was trained "
                "without one (Mistral-7B from v0.2 on, Phi-4)."
            )
        self.blocks.check(self.num_hidden_layers, self.num_key_value_heads)
        if self.share == "kv" and self.blocks.is_streaming.any():
            raise ValueError(
                "share='kv' cannot be combined with heads that stream (anchor -1), whose keys and values no other "
                "layer has: choose share='scores' or 'keys', or blocks without such heads"
            )
        if self.share == "window" and not self.blocks.is_dense:
            raise ValueError("share='window' has no distant tokens to share: leave anchors out (blocks of one layer)")


def check_sizes(sink_size: int, recent_size: int, share: str) -> None:
    """Refuse proximal sizes and share kinds that mean nothing.

    Raises:
        ValueError: names the value and what it may be.
    """
    if sink_size < 0:
        raise ValueError(f"sink_size must be >= 0 tokens, got {sink_size}")
    if recent_size < 1:
        raise ValueError(f"recent_size must be >= 1 token (the current one is recent), got {recent_size}")
    if share not in SHARE_KINDS:
        raise ValueError(f"share must be one of {', '.join(SHARE_KINDS)}; got {share!r}")
    if share == "window" and recent_size < 2:
        raise ValueError("share='window' needs recent_size >= 2: the current token and one before it")


@strict
class PodLlamaConfig(PodConfigMixin, LlamaConfig):
    """Config of a Llama with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_llama"


@strict
class PodMistralConfig(PodConfigMixin, MistralConfig):
    """Config of a Mistral with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_mistral"

    sliding_window: int | None = None


@strict
class PodPhi3Config(PodConfigMixin, Phi3Config):
    """Config of a Phi-3 (or Phi-4) with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_phi3"

    head_dim: int | None = None  # no field of the family's

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.rope_parameters["rope_type"] != "default" or self.rope_parameters["partial_rotary_factor"] != 1:
            raise ValueError(
                f"rope_parameters is {self.rope_parameters}: a Phi-3 with LongRoPE computes its whole cache again "
                "where the text outgrows original_max_position_embeddings, and one with partial_rotary_factor rotates "
                "a part of each head; PoD does neither. Use a model with plain RoPE, such as Phi-4."
            )


@strict
class PodQwen2Config(PodConfigMixin, Qwen2Config):
    """Config of a Qwen2 (or Qwen2.5) with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_qwen2"

    head_dim: int | None = None  # no field of the family's


@strict
class PodQwen3Config(PodConfigMixin, Qwen3Config):
    """Config of a Qwen3 with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_qwen3"
