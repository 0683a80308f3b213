"""What a run will take, by arithmetic: memory by kind, the longest sample that fits, FLOPs, hours.

    python -m pod.fit recipe=llama3-32k plan=true gpu=H100 utilisation=0.4

Nothing is loaded: of the model, only the fields of its config are needed. Bytes are counted as this library's code
allocates them; `Memory` says how. Where a number depends on blocks that are not known yet, it is the largest that the
recipe's saving allows.

Legend: N parameters, W processes (one GPU each), S of them share a sample (Ulysses), B micro-batch, T tokens of a
sample, t = T / S of them on one GPU, h hidden size, I MLP width, H and H_kv heads, D head dimension, V vocabulary,
L layers, b bytes of an activation.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pod.blocks import LayerBlocks
from pod.files import read_json
from pod.recipe import Recipe, RecipeError, accumulate, load_recipe, output_folder, recipes, steps


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: bytes of memory that torch reports, and the data sheet's dense bf16 FLOP/s."""

    memory: float
    flops: float


GPUS = {
    "H100": Gpu(79 * 2**30, 989e12),
    "H200": Gpu(139 * 2**30, 989e12),
    "A100": Gpu(79 * 2**30, 312e12),
    "A800": Gpu(79 * 2**30, 312e12),
    "L40S": Gpu(44 * 2**30, 362e12),
}
# CUDA's context, NCCL's buffers and what an allocator cannot hand out because it lies in pieces.
RESERVED = 4 * 2**30
# ZeRO-3, in elements: DeepSpeed's stage3_max_live_parameters and sub_group_size, Lightning's reduce_bucket_size.
MAX_LIVE = 10**9
SUB_GROUP = 10**9
REDUCE_BUCKET = 2 * 10**8

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
_LLAMA3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Llama-3.1-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-70B": {**_LLAMA3_8B, **_LLAMA3_70B},
    "meta-llama/Llama-3.1-70B": {**_LLAMA3_8B, **_LLAMA3_70B},
    "Qwen/Qwen3-8B": _QWEN3_8B,
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
            RecipeError: a family that PoD does not have.
        """
        family = config.get("model_type", "").removeprefix("pod_")
        if family not in ("llama", "mistral", "phi3", "qwen2", "qwen3"):
            raise RecipeError(f"model_type {family!r}: the plan knows llama, mistral, phi3, qwen2 and qwen3")
        defaults = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
        if family == "mistral":
            defaults.update(intermediate_size=14336, num_key_value_heads=8)
        if family == "phi3":
            defaults.update(hidden_size=3072, intermediate_size=8192, vocab_size=32064)
        if family == "qwen2":
            defaults.update(intermediate_size=22016, vocab_size=151936, num_key_value_heads=32)
        if family == "qwen3":
            defaults.update(intermediate_size=22016, vocab_size=151936, num_key_value_heads=32, head_dim=128)
        fields = {**defaults, "num_attention_heads": 32, **{k: v for k, v in config.items() if v is not None}}
        heads = fields["num_attention_heads"]
        return cls(
            layers=fields["num_hidden_layers"],
            hidden=fields["hidden_size"],
            intermediate=fields["intermediate_size"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads", heads),
            head_dim=fields.get("head_dim", fields["hidden_size"] // heads),
            vocab=fields["vocab_size"],
            tied=fields.get("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
        )

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def kv_parameters(self) -> int:
        """Parameters of one layer's projections to keys and values, and of the norm of keys."""
        each = self.kv_heads * self.head_dim * (self.hidden + (1 if self.qkv_bias else 0))
        return 2 * each + (self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.layer_matrices + norms + biases) + ends

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of LoRA's adapters of this rank beside these projections of every layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q": self.hidden + queries,
            "k": self.hidden + keys,
            "v": self.hidden + keys,
            "o": queries + self.hidden,
        }
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
        unused = idle * 2 * self.hidden * self.head_dim * self.kv_heads
        matrices = 6.0 * (self.layers * self.layer_matrices - unused + self.vocab * self.hidden)
        near = length if self.window is None else min(length, self.window)
        seen = near * (near + 1) / 2 + (length - near) * near
        return matrices, 3 * 4.0 * self.layers * self.heads * self.head_dim * seen / length


@dataclass(frozen=True)
class Sharing:
    """How many heads of a model share, as far as memory is concerned.

    Attributes:
        pairs: anchors (layer, KV head) whose query group and key a later layer reads, or whose value and key.
        layers: layers in which some head takes its distant scores from below.
        values: `share: kv`, a pair is a value and a key, and no layer has distant queries and keys beside its own.
        idle: layers whose projections to keys and values are frozen: under `share: kv`, those without anchors.
    """

    pairs: int = 0
    layers: int = 0
    values: bool = False
    idle: int = 0

    @classmethod
    def of_anchors(cls, anchors: list[list[int]], share: str = "scores") -> "Sharing":
        """From `LayerBlocks.anchors` as lists, [L][H_kv]."""
        below = [[anchor < row for anchor in heads] for row, heads in enumerate(anchors)]
        read = {
            (anchor, head) for row, heads in enumerate(anchors) for head, anchor in enumerate(heads) if anchor < row
        }
        if share == "kv":
            return cls(len(read), values=True, idle=sum(map(all, below)))
        return cls(len(read), sum(map(any, below)))

    @classmethod
    def uniform(cls, shape: Shape, size: int, share: str = "scores") -> "Sharing":
        """Of blocks of `size` layers each."""
        return cls.of_anchors([[layer - layer % size] * shape.kv_heads for layer in range(shape.layers)], share)

    @classmethod
    def at_most(cls, shape: Shape, kv_saving: float) -> "Sharing":
        """The most that blocks of this saving may take: every anchor goes on, every layer but the first shares."""
        shared = math.ceil(2 * kv_saving * shape.layers * shape.kv_heads)
        return cls(min(shared, shape.layers * shape.kv_heads - shared), shape.layers - 1 if shared else 0)


@dataclass(frozen=True)
class Memory:
    """The bytes of one GPU in one training step, as properties; `total` is their peak.

    Attributes:
        shape, sharing: the model.
        length: T. micro_batch: B.
        zero: ZeRO-3 over all processes; otherwise each has everything.
        processes: W. sequence_parallel: S.
        weight_bytes: of a parameter outside of ZeRO, whose gradient and AdamW moments have the same type.
        activation_bytes: b, and under ZeRO also of a parameter and of its gradient.
        autocast: float32 weights outside of ZeRO compute in bfloat16: hidden states and norms stay float32, and each
            matrix keeps a bfloat16 copy of what it multiplies.
        checkpointing: each layer is computed again in the backward.
        loss_chunk: positions whose logits are in memory at once.
        tiled_mlp: the MLP runs over min(t, h) positions at once.
        offload_checkpoints, offload_optimizer, offload_parameters: these lie in the host's memory.
        adapters: parameters of LoRA's adapters, the only ones that are trained, float32 outside of ZeRO; 0: all are
            trained. What a layer keeps is counted as if all were: frozen matrices keep less, and peft's float32 copies
            of a bfloat16 layer's inputs are not counted.
        distills: a dense teacher's logits are compared. teacher: it is a second copy of the weights.
    """

    shape: Shape
    sharing: Sharing
    length: int
    micro_batch: int = 1
    zero: bool = False
    processes: int = 1
    sequence_parallel: int = 1
    weight_bytes: int = 4
    activation_bytes: int = 4
    autocast: bool = False
    checkpointing: bool = True
    loss_chunk: int = 1024
    tiled_mlp: bool = False
    offload_checkpoints: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    adapters: int = 0
    distills: bool = False
    teacher: bool = False

    # What the model weighs

    @property
    def _all(self) -> int:
        """Parameters, trained or not: the model's, its adapters', the teacher's."""
        return self.shape.parameters * (1 + self.teacher) + self.adapters

    @property
    def _share(self) -> float:
        """Parameters that this GPU keeps."""
        return self._all / (self.processes if self.zero else 1)

    @property
    def _trained(self) -> float:
        """Of these, the ones that are trained: what no output depends on is frozen."""
        used = self.shape.parameters - self.sharing.idle * self.shape.kv_parameters
        return (self.adapters or used) / (self.processes if self.zero else 1)

    @property
    def _gradient_bytes(self) -> int:
        """Of a parameter that is trained."""
        return self.activation_bytes if self.zero else 4 if self.adapters else self.weight_bytes

    @property
    def parameters(self) -> float:
        if self.offload_parameters:
            return 0.0
        if self.zero:
            return self._share * self.activation_bytes
        return (self._all - self.adapters) * self.weight_bytes + 4 * self.adapters

    @property
    def gradients(self) -> float:
        # With the optimiser offloaded, ZeRO-3 keeps its gradients beside it.
        if self.zero and self.offload_optimizer:
            return 0.0
        return self._trained * self._gradient_bytes

    @property
    def optimizer(self) -> float:
        """AdamW's two moments, and under ZeRO the float32 weights beside them, float32 too, whatever computes."""
        if self.offload_optimizer:
            return 0.0
        return self._trained * (12 if self.zero else 2 * self._gradient_bytes)

    # What a sample leaves

    @property
    def _tokens(self) -> float:
        return self.micro_batch * self.length / self.sequence_parallel

    @property
    def _queries(self) -> float:
        """Elements of all positions' queries, for the heads of this GPU."""
        return self.micro_batch * self.length * self.shape.head_dim * self.shape.heads / self.sequence_parallel

    @property
    def _keys(self) -> float:
        """The same of the keys, which are repeated where there are fewer KV heads than GPUs."""
        heads = max(1.0, self.shape.kv_heads / self.sequence_parallel)
        return self.micro_batch * self.length * self.shape.head_dim * heads

    @property
    def _states(self) -> float:
        """The hidden states between two layers."""
        return (4 if self.autocast else self.activation_bytes) * self._tokens * self.shape.hidden

    def _norm(self, readers: int = 1) -> float:
        """What an RMSNorm keeps: its input in float32, the normalised states, its output (for each that reads it)."""
        each = 8 + 2 * readers if self.autocast else 4 + 2 * self.activation_bytes
        return self._tokens * self.shape.hidden * each

    @property
    def _norms(self) -> float:
        """Both norms of a layer, the one before q, k and v and the one before the MLP's gate and up."""
        return self._norm(3) + self._norm(2)

    def _attention_kept(self, shares: bool) -> float:
        """q, k, v, the output as computed and as projected, log-sum-exp; the distant queries and keys; q/k norms."""
        sums = 4 * self.micro_batch * self.length * self.shape.heads / self.sequence_parallel
        distant = self._queries + self._keys if shares else 0
        norms = (4 + self.activation_bytes) * (self._queries + self._keys) if self.shape.qk_norm else 0
        return self.activation_bytes * (3 * self._queries + 2 * self._keys + distant) + sums + norms

    @property
    def _anchors(self) -> float:
        """The running anchors that checkpoints keep: each pair once, however far it goes."""
        queries = 1 if self.sharing.values else self.shape.heads / self.shape.kv_heads
        group = (queries + 1) * self.shape.head_dim
        return self.activation_bytes * self._tokens * group * self.sharing.pairs

    @property
    def _handed(self) -> float:
        """The most running anchors that are there between two layers."""
        pairs = min(self.sharing.pairs, self.shape.kv_heads)
        return self._anchors * pairs / max(1, self.sharing.pairs)

    @property
    def _end(self) -> float:
        """The last norm, whose output the loss reads."""
        return self._norm(2 if self.autocast else 1)

    @property
    def checkpoints(self) -> float:
        """What the forward keeps for the backward: each layer's input and the running anchors, or all of each layer."""
        if not self.checkpointing:
            mlp = 4 * self.activation_bytes * self._tokens * self.shape.intermediate
            shared = self.sharing.layers
            casts = 2 * self.shape.layer_matrices if self.autocast else 0
            layers = self.shape.layers * (self._norms + mlp + casts)
            plain = (self.shape.layers - shared) * self._attention_kept(False)
            return layers + plain + shared * self._attention_kept(True) + self._end
        if self.offload_checkpoints:
            # On the GPU: the layer at work, the one on its way, and the anchors that a layer may be handed.
            return 2 * self._states + self._handed + self._end
        return self.shape.layers * self._states + self._anchors + self._end

    # What is there for a moment; of these only the largest counts

    @property
    def attention(self) -> float:
        """One layer's attention in its backward: what it keeps, and the float32 gradients of all its inputs."""
        return self._attention_kept(self.sharing.layers > 0) + self._attention_buffers

    @property
    def _attention_buffers(self) -> float:
        inputs = self._queries + 2 * self._keys
        if self.sharing.layers:
            inputs += self._queries + self._keys
        # The gradient of the output, and the gradients of one piece before they are added.
        return 4 * inputs + self.activation_bytes * (2 * self._queries + 2 * self._keys)

    @property
    def mlp(self) -> float:
        """One layer's MLP in its backward: four products of its width and the gradients of three."""
        rows = min(self._tokens, self.shape.hidden) if self.tiled_mlp else self._tokens
        return 7 * self.activation_bytes * rows * self.shape.intermediate

    @property
    def logits(self) -> float:
        """One chunk's logits, in float32 with their log-softmax and gradient, and the head's gradient in its type.

        With a teacher: its log-softmax and its exponential, the student's log-softmax at the temperature, a gradient.
        """
        rows = self.micro_batch * min(self.loss_chunk, self.length / self.sequence_parallel)
        each = 12 + (16 if self.distills else 0)
        return rows * self.shape.vocab * (each + (2 * self.activation_bytes if self.activation_bytes < 4 else 0))

    @property
    def communication(self) -> float:
        """Gathered parameters and the reduction's bucket of ZeRO-3, or DDP's buckets; the exchange of heads."""
        total = 0.0
        if self.zero and (self.processes > 1 or self.offload_parameters):
            total += self.activation_bytes * min(MAX_LIVE, self._all)
        if self.zero:
            largest = self.shape.vocab * self.shape.hidden
            trained = self.adapters or self.shape.parameters
            total += self.activation_bytes * min(max(REDUCE_BUCKET, largest), trained)
        elif self.processes > 1:
            total += self._gradient_bytes * self._trained
        if self.sequence_parallel > 1:
            total += self.activation_bytes * 2 * (self._queries + self._keys)
        return total

    @property
    def working(self) -> float:
        """The largest of a layer in its MLP's backward or its attention's, a chunk of logits, the optimiser's step."""
        passing = 2 * self._states + self._handed  # gradients on their way down
        step = 4 * min(SUB_GROUP, self._trained) if self.zero and not self.offload_optimizer else 0
        if not self.checkpointing:
            return max(passing + self.mlp * 3 / 7, passing + self._attention_buffers, self._states + self.logits, step)
        kept = self._attention_kept(self.sharing.layers > 0)
        # By the time of the attention's backward, what the MLP and its norm kept is gone.
        mlp = passing + self._norms + kept + self.mlp
        attention = passing + self._norm(3) + self.attention
        return max(mlp, attention, self._end + self._states + self.logits, step)

    @property
    def total(self) -> float:
        """The peak: the states and checkpoints, the largest moment, what moves, and what is reserved."""
        states = self.parameters + self.gradients + self.optimizer
        # The last norm's share of the checkpoints is gone before the layers' backward begins.
        before = self._end if self.checkpointing else 0
        taught = self._states if self.distills else 0  # the teacher's hidden states wait for the loss
        return states + self.checkpoints - before + taught + self.working + self.communication + RESERVED

    @property
    def host(self) -> float:
        """Bytes of the host's memory that this GPU's process takes for what is offloaded."""
        total = 0.0
        if self.offload_parameters:
            total += self._share * self.activation_bytes
        if self.offload_optimizer:
            total += self._trained * (12 + (self.activation_bytes if self.zero else 0))
        if self.offload_checkpoints and self.checkpointing:
            total += self.shape.layers * self._states + self._anchors
        return total

    def longest(self, memory: float) -> int:
        """The most tokens of a sample, a multiple of S, whose `total` is within `memory` bytes; 0 if none is."""
        unit = self.sequence_parallel
        return unit * largest(lambda units: replace(self, length=units * unit).total <= memory)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, found by doubling and halving; 0 if not even 1 does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Plan:
    """A run's arithmetic.

    Attributes:
        name: of the run.
        memory: of one GPU.
        gpu, gpu_name: which GPU; utilisation: share of its peak FLOP/s that counts towards the model.
        nodes, devices: machines, and GPUs of each.
        strategy: "ddp" or "deepspeed".
        accumulation: micro-batches of a step. steps: of the run.
        upper_bound: the blocks are not known yet, so anchors are counted at their most.
    """

    name: str
    memory: Memory
    gpu: Gpu
    gpu_name: str
    utilisation: float
    nodes: int
    devices: int
    strategy: str
    accumulation: int
    steps: int
    upper_bound: bool

    @property
    def data_parallel(self) -> int:
        return self.memory.processes // self.memory.sequence_parallel

    @property
    def tokens_per_step(self) -> int:
        return self.memory.micro_batch * self.memory.length * self.data_parallel * self.accumulation

    @property
    def longest(self) -> int:
        return self.memory.longest(self.gpu.memory)

    @property
    def flops_per_token(self) -> tuple[float, float]:
        """As `Shape.flops_per_token`; a frozen matrix takes 4 FLOPs per parameter, a dense teacher its forward."""
        memory = self.memory
        matrices, attention = memory.shape.flops_per_token(memory.length, memory.sharing.idle)
        forward, seen = replace(memory.shape, window=None).flops_per_token(memory.length)
        if memory.adapters:
            matrices = matrices * 4 / 6 + 6.0 * memory.adapters
        if memory.distills:
            matrices, attention = matrices + forward / 3, attention + seen / 3
        return matrices, attention

    @property
    def hours(self) -> float:
        """At `utilisation` of the GPUs' peak, recomputation not counted as use."""
        flops = sum(self.flops_per_token) * self.tokens_per_step * self.steps
        return flops / (self.memory.processes * self.gpu.flops * self.utilisation) / 3600

    def lines(self) -> Iterator[str]:
        """The report."""
        memory, shape = self.memory, self.memory.shape
        matrices, attention = self.flops_per_token
        fits = "fits" if memory.total <= self.gpu.memory else "DOES NOT FIT"
        bound = ", anchors at their most" if self.upper_bound and memory.sharing.pairs else ""
        stay = "on the host" if memory.offload_parameters else "half of them the teacher's" if memory.teacher else ""
        kinds = [
            ("parameters", memory.parameters, stay),
            ("gradients", memory.gradients, "on the host" if memory.zero and memory.offload_optimizer else ""),
            ("optimiser", memory.optimizer, "on the host" if memory.offload_optimizer else ""),
            ("checkpoints", memory.checkpoints, f"of these running anchors {gib(memory._anchors)}{bound}"),
            ("working", memory.working, "the largest moment; of it or beside it:"),
            ("  attention", memory.attention, "one layer, backward"),
            ("  mlp", memory.mlp, "one layer, backward"),
            ("  logits", memory.logits, f"{memory.loss_chunk} positions"),
            ("communication", memory.communication, ""),
            ("reserved", RESERVED, "context, NCCL, fragments"),
        ]
        if not memory.checkpointing:
            kinds[3] = ("activations", memory.checkpoints, "no gradient checkpointing")
        elif memory.offload_checkpoints:
            kinds[3] = ("checkpoints", memory.checkpoints, "the rest on the host")
        zero = "ZeRO-3" if memory.zero else "DDP" if memory.processes > 1 else "one process"
        trained = f", {memory.adapters / 1e6:.1f}M of adapters trained" if memory.adapters else ""
        taught = ", taught by the dense base" if memory.distills else ""
        yield f"plan of {self.name}: {shape.parameters / 1e9:.3f}B parameters{trained}{taught}"
        yield (
            f"layout         {self.nodes} node(s) x {self.devices} {self.gpu_name}, {zero}: "
            f"{self.data_parallel} sample(s) at a time, each over {memory.sequence_parallel} GPU(s)"
        )
        yield (
            f"step           {self.tokens_per_step:,} tokens = {self.data_parallel} x {memory.micro_batch} samples of "
            f"{memory.length:,} tokens x {self.accumulation} accumulated"
        )
        yield f"per GPU        {gib(memory.total)} of {gib(self.gpu.memory)}: {fits}"
        for kind, value, remark in kinds:
            yield f"  {kind:<14}{gib(value):>12}  {remark}".rstrip()
        if memory.host:
            yield f"host memory    {gib(memory.host)} for each GPU, {gib(memory.host * self.devices)} a node"
        yield f"longest        {self.longest:,} tokens in a sample"
        yield (
            f"FLOPs          {(matrices + attention) / 1e9:,.1f}G per token, "
            f"{100 * attention / (matrices + attention):.1f} % of them attention ({attention / 1e9:,.1f}G)"
        )
        yield (
            f"time           {self.steps:,} steps, {self.steps * self.tokens_per_step / 1e9:,.3f}B tokens: "
            f"{self.hours:,.1f} hours at {100 * self.utilisation:g} % of {self.gpu.flops / 1e12:g} TFLOP/s"
        )


def gib(value: float) -> str:
    """Bytes as text, in GiB, or in MiB below a tenth of one."""
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.2f} MiB"


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The config of the recipe's model: its own, that of a local folder or of the run that will write it, or that of a
    known hub model.

    Raises:
        RecipeError: the model is none of these.
    """
    base = recipe.model.base
    if base is None:
        return dict(recipe.model.config)
    file = Path(base) / "config.json"
    if file.is_file():
        return read_json(file)
    if base in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[base]
    for name in recipes():
        earlier = load_recipe([f"recipe={name}"])
        if name != recipe.name and output_folder(earlier) in (Path(base), *Path(base).parents):
            return config_of(earlier)
    raise RecipeError(
        f"model.base={base}: there is no {file}, and the plan does not know that model's sizes. Put its config.json "
        f"into a folder and name that, or name one of {', '.join(KNOWN_CONFIGS)}"
    )


def make_plan(
    recipe: Recipe,
    *,
    gpu: str = "H100",
    utilisation: float = 0.4,
    strategy: str = "auto",
    num_nodes: int = 1,
    sequence_parallel_size: int = 1,
    tiled_mlp: bool = False,
    offload_checkpoints: bool = False,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> Plan:
    """Plan a recipe.

    Args:
        recipe: what to plan.
        gpu: a key of `GPUS`.
        utilisation: the share of the peak FLOP/s that the model's FLOPs take, in (0, 1].
        strategy: ddp, deepspeed, or auto: deepspeed on more than one process.
        num_nodes, sequence_parallel_size: machines; GPUs that share a sample.
        tiled_mlp, offload_checkpoints, offload_optimizer, offload_parameters: as in `Memory`.

    Raises:
        RecipeError: an unknown GPU or model, or a layout that cannot be.
    """
    if gpu not in GPUS:
        raise RecipeError(f"gpu={gpu}: must be one of {', '.join(GPUS)}")
    if not 0 < utilisation <= 1:
        raise RecipeError(f"utilisation={utilisation}: must be in (0, 1]")
    shape = Shape.from_config(config_of(recipe))
    if recipe.model.share == "window":
        shape = replace(shape, window=recipe.model.sink_size + recipe.model.recent_size)
    world = recipe.trainer.devices * num_nodes
    if strategy == "auto":
        strategy = "deepspeed" if world > 1 else "ddp"
    spread = sequence_parallel_size
    if world % spread or shape.heads % spread or recipe.data.sequence_length < spread:
        raise RecipeError(
            f"a sample cannot be spread over sequence_parallel_size={spread} GPUs: it must divide the "
            f"{world} processes and the {shape.heads} query heads, and data.sequence_length="
            f"{recipe.data.sequence_length} must not be below it"
        )
    if strategy != "deepspeed" and (spread > 1 or offload_optimizer or offload_parameters):
        raise RecipeError("sequence parallelism and offloading of the model's states need strategy=deepspeed")
    share = recipe.model.share
    if recipe.blocks.file is not None:
        sharing = Sharing.of_anchors(LayerBlocks.load(recipe.blocks.file).anchors.tolist(), share)
    elif recipe.blocks.size is not None:
        sharing = Sharing.uniform(shape, recipe.blocks.size, share)
    elif recipe.blocks.threshold is not None:
        sharing = Sharing.at_most(shape, 0.25)  # where the most pairs go on
    else:
        sharing = Sharing.at_most(shape, recipe.blocks.kv_saving)
    if share == "keys":
        raise RecipeError("model.share=keys: the plan counts model.share=scores, which is at least as much")
    zero = strategy == "deepspeed"
    half = recipe.trainer.precision != "32-true"
    memory = Memory(
        shape,
        sharing,
        length=recipe.data.sequence_length,
        micro_batch=recipe.data.micro_batch_size,
        zero=zero,
        processes=world,
        sequence_parallel=spread,
        weight_bytes=2 if recipe.trainer.precision == "bf16-true" or recipe.model.dtype == "bfloat16" else 4,
        activation_bytes=2 if half else 4,
        autocast=recipe.trainer.precision == "bf16-mixed" and recipe.model.dtype == "float32" and not zero,
        checkpointing=recipe.model.gradient_checkpointing,
        loss_chunk=recipe.trainer.loss_chunk,
        tiled_mlp=tiled_mlp,
        offload_checkpoints=offload_checkpoints,
        offload_optimizer=offload_optimizer,
        offload_parameters=offload_parameters,
        adapters=shape.adapters(recipe.lora.rank, recipe.lora.targets),
        distills=recipe.distill.weight > 0,
        teacher=recipe.distill.weight > 0 and recipe.lora.rank == 0,
    )
    return Plan(
        name=recipe.name,
        memory=memory,
        gpu=GPUS[gpu],
        gpu_name=gpu,
        utilisation=utilisation,
        nodes=num_nodes,
        devices=recipe.trainer.devices,
        strategy=strategy,
        accumulation=accumulate(recipe, world // spread),
        steps=steps(recipe),
        upper_bound=recipe.blocks.file is None and recipe.blocks.size is None,
    )


def show_plan(arguments: Sequence[str]) -> int:
    """`python -m pod.fit recipe=NAME [key=value ...] plan=true [gpu=NAME] [utilisation=X]`: print the plan.

    Returns:
        the exit status: 2 after an error, whose message went to stderr.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    try:
        if given["plan"] != "true":
            raise RecipeError(f"plan={given['plan']}: write plan=true, or leave it out to train")
        try:
            utilisation = float(given.get("utilisation", "0.4"))
        except ValueError:
            raise RecipeError(f"utilisation={given['utilisation']}: wanted a number") from None
        own = ("plan=", "gpu=", "utilisation=")
        recipe = load_recipe([argument for argument in arguments if not argument.startswith(own)])
        trainer = recipe.trainer
        if trainer.strategy == "deepspeed" and trainer.zero_stage != 3:
            raise RecipeError(f"trainer.zero_stage={trainer.zero_stage}: the plan knows ZeRO-3 only")
        plan = make_plan(
            recipe,
            gpu=given.get("gpu", "H100"),
            utilisation=utilisation,
            strategy=trainer.strategy,
            num_nodes=trainer.num_nodes,
            sequence_parallel_size=trainer.sequence_parallel_size,
            tiled_mlp=recipe.model.mlp_tiles > 1,
            offload_checkpoints=recipe.model.offload_checkpoints,
            offload_optimizer=trainer.offload != "nothing",
            offload_parameters=trainer.offload == "parameters",
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(plan.lines()))
    return 0
