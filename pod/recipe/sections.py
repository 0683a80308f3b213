"""The sections of a recipe: what each key is, may be and means. The text under a field is its description and help.

What goes together inside a section is said here, what goes together across them in `pod/recipe/schema.py`.
"""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from pod.recipe.errors import RecipeError

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # projections of a layer's attention, and of its MLP


class Section(BaseModel):
    """Keys, strictly read: no other ones, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers as people write them: 1e3 is an int, and so is its text; neither is true."""
        if not {int, float} & _types(cls.model_fields[info.field_name].annotation):
            return value
        return [_number(each) for each in value] if isinstance(value, list) else _number(value)


def _types(hint: Any) -> set[type]:
    """The plain types that an annotation is made of: of list[float] | None, float and None's."""
    return {kind for part in get_args(hint) for kind in _types(part)} or ({hint} if isinstance(hint, type) else set())


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not abs(value) < 2**63:
        raise ValueError("it must be below 2**63")
    return value


def _want_one(key: str, value: Any, other_key: str, other: Any) -> None:
    """Refuse neither or both of two keys that say the same thing in two ways."""
    if (value is None) == (other is None):
        given = "neither is" if value is None else "both are"
        raise RecipeError(f"{key} or {other_key}: {given} given, wanted one; set the other to null")


class Model(Section):
    """The model to train."""

    base: str | None = Field(None, min_length=1)
    """The model to start from: a directory, a hub id or a GGUF file. null: start from scratch, from `model.config`."""
    config: dict[str, JsonValue] | None = None
    """The fields of a Hugging Face config, `model_type` among them, of a model trained from scratch. Any field may be
    set from the command line: model.config.hidden_size=64."""
    initialization: Literal["transformers", "torch"] = "transformers"
    """How a model from scratch is drawn: `transformers` (normal, `initializer_range`), or `torch` (its defaults, whose
    embeddings of unit variance stay visible through a deep and narrow stack; for untied heads, without DeepSpeed)."""
    rope_theta: float | None = Field(None, gt=0)
    """The base of the rotary position embedding, raised for longer contexts. null: that of the model or its config."""
    tokenizer: str | None = Field(None, min_length=1)
    """A directory, a hub id, or `bytes` (one token per byte, no file needed). null: the tokenizer of `model.base`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the weights are loaded as: float32 or bfloat16. An optimiser that keeps no float32 copy of bfloat16 weights
    loses small updates to rounding."""
    load_in_4bit: bool = False
    """QLoRA: the matrices of the base's layers are held in 4 bits (bitsandbytes' nf4, its scales quantised too) and
    computed with in `model.dtype`. With `lora.rank`, on a GPU, without DeepSpeed."""
    sink_size: int = Field(16, ge=0)
    """Tokens at the start of a sequence that each layer always attends to with its own scores (the paper's n_s)."""
    recent_size: int = Field(4080, ge=1)
    """Last tokens, the current one included, that each layer attends to with its own scores (the paper's n_r)."""
    share: Literal["scores", "keys", "kv", "window"] = "scores"
    """What a block's layers take from their anchor for distant tokens: `scores` (q_a . k_a, the paper's Eq. 3) or
    `keys` (q_l . k_a: the same memory, scores computed again). `kv`: its keys and values, for near tokens too, whatever
    `model.sink_size` and `model.recent_size` are (cross-layer attention); with `blocks.size` or `blocks.file`.
    `window`: there are no distant tokens; every layer attends to sinks and recent ones alone, without blocks."""
    gradient_checkpointing: bool = False
    """Compute the activations of each layer again in the backward pass instead of keeping them."""
    offload_checkpoints: bool = False
    """With `model.gradient_checkpointing`: what each layer's activations are computed from again (its input, and the
    anchors' queries and keys) waits in the CPU's memory, not the device's."""
    compile: bool = False
    """Run the layers through torch.compile; the first steps, and the first ones of another shape, then take minutes.
    Not with DeepSpeed or `model.offload_checkpoints`, whose hooks a graph cannot hold."""
    mlp_tiles: int = Field(1, ge=1)
    """Parts of the tokens on which each layer's MLP runs one after the other, and once more in the backward: its inner
    activations take so much less memory."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        base, config = self.base, self.config
        _want_one("model.base (start from a trained model)", base, "model.config (start from scratch)", config)
        if config is not None:
            if not isinstance(config.get("model_type"), str):
                raise RecipeError("model.config.model_type is required: the family's name, such as llama or qwen3")
            if self.initialization == "torch" and config.get("tie_word_embeddings"):
                raise RecipeError(
                    "model.initialization=torch draws embeddings of unit variance, which as a head give logits far too "
                    "large: set model.config.tie_word_embeddings=false"
                )
            if self.tokenizer is None:
                raise RecipeError("model.tokenizer is required with model.config: a path, a hub id, or bytes")
        if self.offload_checkpoints and not self.gradient_checkpointing:
            raise RecipeError(
                "model.offload_checkpoints needs model.gradient_checkpointing=true: without it there are none"
            )
        return self


class Blocks(Section):
    """Which layers share distant scores, and how that is found."""

    file: str | None = Field(None, min_length=1)
    """A blocks.json to use. null: analyse the model first, unless it stays dense."""
    streaming: float = Field(0.0, ge=0, lt=1)
    """Share of the layers' KV heads that stream: they attend to sinks and recent tokens alone, and store no others
    (DuoAttention). Those with the lowest `blocks.head_scores`; the layers of the others are then grouped, and
    `blocks.kv_saving` is of these others' bytes. With `blocks.file` or `blocks.size` whole blocks stream."""
    head_scores: str | None = Field(None, min_length=1)
    """How much each KV head needs distant tokens: DuoAttention's full_attention_heads.tsv or its folder, or a file of
    pod.calibrate, FILE.safetensors:razor (or induction, echo, kvzip, duo)."""
    size: int | None = Field(None, ge=1)
    """Layers of each block, from the lowest layer up, the same for every KV head, without looking at the model: wins
    over `blocks.kv_saving`. Cross-layer attention (`model.share=kv`) takes 2. null: the blocks are found."""
    kv_saving: float = Field(0.35, ge=0, le=0.5)
    """Share of the dense KV cache's bytes that is not stored, as length grows; the blocks are the most alike ones that
    save this. 0: the model stays dense. Only keys are shared, so 0.5 is the limit."""
    threshold: float | None = Field(None, ge=0, le=1)
    """The similarity from which layers share (the paper's delta), instead of a wanted saving: wins over
    `blocks.kv_saving` when given."""
    method: Literal["greedy", "damage", "fisher", "sum", "worst"] = "greedy"
    """How layers are grouped for `blocks.kv_saving`: `greedy` (the paper's Algorithm 1), or the best of all partitions:
    `damage` (the least measured change of what layers give out, at `model.sink_size` and `model.recent_size`), `fisher`
    (the same change as the loss feels it; needs the memory of a training step without checkpointing), `sum` (the
    largest summed similarity of sharing layers to their anchors), `worst` (the largest least one)."""
    samples: int = Field(1000, ge=1)
    """Training samples whose attention is compared to find the blocks."""
    last_q: int = Field(16, ge=1)
    """Last query tokens of each sample whose attention is compared."""
    distant_only: bool = False
    """Compare the attention to distant tokens alone, the only scores that are shared, instead of to all tokens."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        named = [key for key in ("file", "size", "threshold") if getattr(self, key) is not None]
        if self.size is not None and len(named) > 1:
            raise RecipeError(
                f"blocks.{named[0]} and blocks.{named[1]} are both given, wanted one; set the other to null"
            )
        if (self.streaming > 0) != (self.head_scores is not None):
            raise RecipeError(
                f"blocks.streaming={self.streaming:g} and blocks.head_scores={self.head_scores or 'null'}: a share of "
                "heads streams by their scores. Set both, or blocks.streaming=0 and blocks.head_scores=null"
            )
        if self.threshold is not None and self.method != "greedy":
            raise RecipeError(
                f"blocks.method={self.method} groups for blocks.kv_saving, not for a threshold: set "
                "blocks.threshold=null or blocks.method=greedy"
            )
        return self


class Data(Section):
    """What the model learns from."""

    path: str = Field(min_length=1)
    """A directory of prepared samples (see data/)."""
    validation_path: str | None = Field(None, min_length=1)
    """A directory of prepared samples to validate on. null: the held-out documents of `data.path`."""
    sequence_length: int = Field(ge=2)
    """Tokens in a sample."""
    length_intervals: list[Annotated[int, Field(ge=1)]] | None = None
    """The lengths in tokens that part the documents into intervals of which each gives equally many tokens; the data
    must have been prepared with them. null: as the data was prepared."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples in one forward and backward pass of a process."""
    num_workers: int = Field(0, ge=0)
    """Processes that load samples. 0: the training process does."""
    shuffle: bool = True
    """Visit the training samples in an order drawn from `seed`; false: in the order they are stored."""


class Optimizer(Section):
    """AdamW, and a cosine schedule of its learning rate with linear warm-up."""

    lr: float = Field(1e-5, gt=0)
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr: float = Field(0.0, ge=0)
    """The learning rate at the last step, where the cosine ends: a rate, not a share of `optimizer.lr`."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = [0.9, 0.95]
    """AdamW's decay rates of the running means of the gradient and of its square."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's weight decay; norms and embeddings are left out."""
    warmup_steps: int | None = Field(None, ge=0)
    """Optimiser steps in which the learning rate rises from 0. Or give `optimizer.warmup_tokens`; neither: no
    warm-up."""
    warmup_tokens: int | None = Field(None, ge=0)
    """Tokens during which the learning rate rises from 0, rounded up to whole steps."""
    gradient_clip: float = Field(1.0, ge=0)
    """The largest norm of the whole gradient; a larger one is scaled down to it. 0: never."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.warmup_steps is not None:
            _want_one("optimizer.warmup_steps", self.warmup_steps, "optimizer.warmup_tokens", self.warmup_tokens)
        if len(self.betas) != 2:
            raise RecipeError(f"optimizer.betas must be two floats, got {self.betas}")
        if self.min_lr > self.lr:
            raise RecipeError(f"optimizer.min_lr ({self.min_lr:g}) is above optimizer.lr ({self.lr:g})")
        return self


class Distill(Section):
    """Learning from the model as it was: the dense base, frozen, teaches the one that shares."""

    weight: float = Field(0.0, ge=0, le=1)
    """Share of the training loss that is the divergence from the dense base's next-token distribution; the rest is the
    cross-entropy. 0: no teacher. It takes another forward pass and, without `lora.rank`, a second copy of the
    weights."""
    temperature: float = Field(1.0, gt=0)
    """What both models' logits are divided by before they are compared: above 1, unlikely tokens count for more."""


class Lora(Section):
    """Adapters of low rank, trained in the place of all weights (LoRA); `pod.export` merges them."""

    rank: int = Field(0, ge=0)
    """The rank of the adapters; the model's own weights stay frozen, and neither their gradients nor the optimiser's
    state for them exist. 0: no adapters, all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are set to 0 in training."""
    targets: list[str] = ["q", "k", "v", "o"]
    """Which projections of each layer have adapters: of q, k, v, o (attention), gate, up, down (MLP)."""
    adapter: str | None = Field(None, min_length=1)
    """A folder that `pod.export --adapter` wrote, of the same rank, alpha and targets: training goes on from it with a
    new optimiser (its blocks are `blocks.file=FOLDER/blocks.json`). null: from nothing."""

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: list[str]) -> list[str]:
        if not set(targets) <= set(LORA_TARGETS) or not targets or len(set(targets)) != len(targets):
            raise RecipeError(f"lora.targets must be some of {', '.join(LORA_TARGETS)}, none twice; got {targets}")
        return targets


class Trainer(Section):
    """How long, on what, and what is written when."""

    max_steps: int | None = Field(None, ge=1)
    """Optimiser steps to train for. Give this or `trainer.max_tokens`."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens to train on, rounded up to whole optimiser steps."""
    tokens_per_batch: int = Field(ge=1)
    """Tokens of one optimiser step over all processes. A multiple of micro_batch_size * sequence_length * processes
    that read samples of their own (devices * num_nodes / sequence_parallel_size): the rest is made up by accumulating
    gradients."""
    devices: int = Field(1, ge=1)
    """Processes of one machine, each with its device."""
    num_nodes: int = Field(1, ge=1)
    """Machines, each with so many devices."""
    strategy: Literal["auto", "ddp", "deepspeed"] = "auto"
    """How processes work together. auto: alone, or as ddp where there are several; ddp: each holds the whole model;
    deepspeed: ZeRO shards the model over all of them, also with `trainer.sequence_parallel_size`."""
    zero_stage: int = Field(3, ge=1, le=3)
    """What ZeRO shards over the processes, with deepspeed: 1 the optimiser's state, 2 also the gradients, 3 also the
    parameters."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Processes that share a sample, each with its part of the sequence (Ulysses), with deepspeed. A divisor of the
    number of processes, of the model's query heads, and a divisor or multiple of its KV heads."""
    offload: Literal["nothing", "optimizer", "parameters"] = "nothing"
    """What waits in the CPU's memory, with deepspeed: nothing, the optimizer's state, or, with `trainer.zero_stage` 3,
    the parameters too. AdamW then runs on the CPU."""
    accelerator: str = "auto"
    """Lightning's name of the kind of device: auto, cpu, gpu, ..."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true"
    """Lightning's name of what is computed in: 32-true, bf16-mixed (weights stay as they are) or bf16-true."""
    validate_every: int = Field(100, ge=1)
    """Optimiser steps between two validations."""
    validation_batches: int = Field(16, ge=1)
    """Batches of `data.micro_batch_size` samples in one validation, of each process."""
    checkpoint_every: int = Field(100, ge=1)
    """Optimiser steps between two checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The last so many checkpoints are kept; the best one by validation loss is kept beside them."""
    log_every: int = Field(1, ge=1)
    """Optimiser steps between two lines of the log."""
    loss_chunk: int = Field(1024, ge=1)
    """Positions whose logits are in memory at once while the loss is computed."""
    answer_weight: float = Field(0.0, ge=0)
    """Weight of the mean loss over the answers that the data marks (the demo's asked digits), added to the loss. A new
    model learns to look back only when that pays; 0: answers count as any other token."""
    time_limit: str | None = None
    """Stop, with a checkpoint, at the end of the step in which training has taken this wall-clock time: DD:HH:MM:SS. A
    resumed run has it anew. null: no limit."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        _want_one("trainer.max_steps", self.max_steps, "trainer.max_tokens", self.max_tokens)
        if self.time_limit is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", self.time_limit):
            raise RecipeError(f"trainer.time_limit must be DD:HH:MM:SS, got {self.time_limit!r}")
        if self.offload != "nothing" and self.strategy != "deepspeed":
            raise RecipeError(f"trainer.offload={self.offload} needs trainer.strategy=deepspeed, got {self.strategy}")
        if self.offload == "parameters" and self.zero_stage < 3:
            raise RecipeError(f"trainer.offload=parameters needs trainer.zero_stage=3, got {self.zero_stage}")
        size, processes = self.sequence_parallel_size, self.devices * self.num_nodes
        if size > 1 and self.strategy != "deepspeed":
            raise RecipeError(
                f"trainer.sequence_parallel_size={size} needs trainer.strategy=deepspeed, got {self.strategy!r}"
            )
        if processes % size:
            raise RecipeError(
                f"trainer.sequence_parallel_size={size} does not divide the {processes} processes (trainer.devices "
                f"{self.devices} * trainer.num_nodes {self.num_nodes})"
            )
        return self
