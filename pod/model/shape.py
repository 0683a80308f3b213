"""The sizes of a model, read from the fields of its config: parameters and FLOPs by arithmetic, nothing loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from pod.recipe.errors import RecipeError

# Fields that say how large a model is.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "vocab_size", "tie_word_embeddings")
# Configs of hub models, from their published config.json, for machines that cannot reach the hub.
_LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
_SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Llama-3.1-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-70B": {**_LLAMA3_8B, **_LLAMA3_70B},
    "meta-llama/Llama-3.1-70B": {**_LLAMA3_8B, **_LLAMA3_70B},
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
    "checkpoints/smollm2-135m": _SMOLLM2,  # the same, where `make smollm2` writes it
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, Mistral, Phi-3, Qwen2 or Qwen3.

    Attributes:
        tied: the head is the embedding.
        qk_norm: queries and keys have a norm of their own.
        window: the most tokens that a token attends to; None: all before it.
        qkv_bias: the projections to queries, keys and values have a bias.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    window: int | None = None
    qkv_bias: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Shape":
        """From the fields of a Hugging Face config; absent ones have their family's defaults.

        Raises:
            RecipeError: a family that PoD does not have, or sizes that the family cannot have.
        """
        family = config.get("model_type", "").removeprefix("pod_")
        if family not in ("llama", "mistral", "phi3", "qwen2", "qwen3"):
            raise RecipeError(f"model_type {family!r}: the plan knows llama, mistral, phi3, qwen2 and qwen3")
        sizes = {name: config[name] for name in _SIZES if config.get(name) is not None}
        try:
            # Special tokens are of no matter here, and a family's own may be beyond a small vocabulary.
            stock = CONFIG_MAPPING[family](**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        except StrictDataclassError as error:
            raise RecipeError(f"no {family} has such sizes: {sizes} ({' '.join(str(error).split())})") from error
        heads = stock.num_attention_heads
        return cls(
            layers=stock.num_hidden_layers,
            hidden=stock.hidden_size,
            intermediate=stock.intermediate_size,
            heads=heads,
            kv_heads=stock.num_key_value_heads or heads,
            head_dim=getattr(stock, "head_dim", None) or stock.hidden_size // heads,
            vocab=stock.vocab_size,
            tied=stock.tie_word_embeddings,
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
        )

    @property
    def queries(self) -> int:
        """Elements of one token's queries, in one layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The same of its keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def groups(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices."""
        return 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.intermediate

    @property
    def kv_parameters(self) -> int:
        """Parameters of one layer's projections to keys and values, and of the norm of keys."""
        each = self.keys * (self.hidden + (1 if self.qkv_bias else 0))
        return 2 * each + (self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.queries + 2 * self.keys if self.qkv_bias else 0
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.layer_matrices + norms + biases) + ends

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of LoRA's adapters of this rank beside these projections of every layer."""
        sides = dict.fromkeys(("q", "o"), self.hidden + self.queries)
        sides |= dict.fromkeys(("k", "v"), self.hidden + self.keys)
        sides |= dict.fromkeys(("gate", "up", "down"), self.hidden + self.intermediate)
        return self.layers * rank * sum(sides[target] for target in targets)

    def flops_per_token(self, length: int, idle: int = 0) -> tuple[float, float]:
        """(of the matrices, of attention), forward and backward of one token in a sample of `length` tokens.

        `idle` layers make no keys and values of their own.

        A matrix takes 2 FLOPs per parameter forward and 4 backward. A token attends to half of the sample on average,
        at most to the window: 2 products of 2 * D FLOPs for each query head and pair, and twice that backward. Sharing
        scores in training changes which queries and keys are multiplied, not how many. What is computed again is not
        counted.
        """
        unused = idle * 2 * self.hidden * self.keys
        matrices = 6.0 * (self.layers * self.layer_matrices - unused + self.vocab * self.hidden)
        near = length if self.window is None else min(length, self.window)
        seen = near * (near + 1) / 2 + (length - near) * near
        return matrices, 3 * 4.0 * self.layers * self.queries * seen / length
