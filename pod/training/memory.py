"""What a training step takes of a GPU's memory, by kind, and the longest sample that fits.

Bytes are counted as this library's code allocates them; `Memory` says how.

Legend: N parameters, W processes (one GPU each), S of them share a sample (Ulysses), B micro-batch, T tokens of a
sample, t = T / S of them on one GPU, h hidden size, I MLP width, H and H_kv heads, D head dimension, V vocabulary,
L layers, b bytes of an activation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pod.blocks import LayerBlocks
from pod.model.shape import Shape

# CUDA's context, NCCL's buffers and what an allocator cannot hand out because it lies in pieces.
RESERVED = 4 * 2**30
# ZeRO, in elements: DeepSpeed's stage3_max_live_parameters and sub_group_size, Lightning's reduce_bucket_size.
MAX_LIVE = 10**9
SUB_GROUP = 10**9
REDUCE_BUCKET = 2 * 10**8


@dataclass(frozen=True)
class Sharing:
    """How many heads of a model share, as far as memory is concerned.

    Attributes:
        pairs: anchors (layer, KV head) of which a later layer reads query group and key, value and key, or the key.
        layers: layers in which some head takes its distant scores from below.
        values: `share: kv`, a pair is a value and a key, and no layer has distant queries and keys beside its own.
        keys_only: `share: keys`, a pair is a key alone, and the distant queries are a layer's own.
        idle: layers whose projections to keys and values are frozen: under `share: kv`, those without anchors.
    """

    pairs: int = 0
    layers: int = 0
    values: bool = False
    idle: int = 0
    keys_only: bool = False

    @classmethod
    def of_anchors(cls, anchors: list[list[int]], share: str = "scores") -> "Sharing":
        """From `LayerBlocks.anchors` as lists, [L][H_kv]."""
        below = [[anchor < row for anchor in heads] for row, heads in enumerate(anchors)]
        read = {
            (anchor, head) for row, heads in enumerate(anchors) for head, anchor in enumerate(heads) if anchor < row
        }
        if share == "kv":
            return cls(len(read), values=True, idle=sum(map(all, below)))
        return cls(len(read), sum(map(any, below)), keys_only=share == "keys")

    @classmethod
    def uniform(cls, shape: Shape, size: int, share: str = "scores") -> "Sharing":
        """Of blocks of `size` layers each."""
        return cls.of_anchors(LayerBlocks.uniform(shape.layers, shape.kv_heads, size).anchors.tolist(), share)

    @classmethod
    def at_most(cls, shape: Shape, kv_saving: float, share: str = "scores") -> "Sharing":
        """The most that blocks of this saving may take: every anchor goes on, every layer but the first shares."""
        shared = math.ceil(2 * kv_saving * shape.layers * shape.kv_heads)
        pairs = min(shared, shape.layers * shape.kv_heads - shared)
        return cls(pairs, shape.layers - 1 if shared else 0, keys_only=share == "keys")


@dataclass(frozen=True)
class Memory:
    """The bytes of one GPU in one training step, as properties; `total` is their peak.

    Attributes:
        shape, sharing: the model.
        length: T. micro_batch: B.
        zero: ZeRO over all processes; otherwise each has everything. stage: of ZeRO: what it shards.
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
    stage: int = 3
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

    def _kept(self, count: int, stage: int) -> float:
        """Of so many elements, those that this GPU keeps, if ZeRO shards them from a stage on."""
        return count / (self.processes if self.zero and self.stage >= stage else 1)

    @property
    def _share(self) -> float:
        """Parameters that this GPU keeps."""
        return self._kept(self._all, 3)

    @property
    def _trained(self) -> int:
        """Of all, the ones that are trained: what no output depends on is frozen."""
        return self.adapters or self.shape.parameters - self.sharing.idle * self.shape.kv_parameters

    @property
    def _stepped(self) -> float:
        """Of those, the ones whose optimiser's state this GPU keeps."""
        return self._kept(self._trained, 1)

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
        # With the optimiser offloaded, ZeRO-2 and 3 keep their gradients beside it.
        if self.zero and self.offload_optimizer and self.stage > 1:
            return 0.0
        return self._kept(self._trained, 2) * self._gradient_bytes

    @property
    def optimizer(self) -> float:
        """AdamW's two moments, and under ZeRO the float32 weights beside them, float32 too, whatever computes."""
        if self.offload_optimizer:
            return 0.0
        return self._stepped * (12 if self.zero else 2 * self._gradient_bytes)

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
        distant = (0 if self.sharing.keys_only else self._queries) + self._keys if shares else 0
        norms = (4 + self.activation_bytes) * (self._queries + self._keys) if self.shape.qk_norm else 0
        return self.activation_bytes * (3 * self._queries + 2 * self._keys + distant) + sums + norms

    @property
    def anchors(self) -> float:
        """The running anchors that checkpoints keep: each pair once, however far it goes."""
        queries = 1 if self.sharing.values else self.shape.heads / self.shape.kv_heads
        group = ((0 if self.sharing.keys_only else queries) + 1) * self.shape.head_dim
        return self.activation_bytes * self._tokens * group * self.sharing.pairs

    @property
    def _handed(self) -> float:
        """The most running anchors that are there between two layers."""
        pairs = min(self.sharing.pairs, self.shape.kv_heads)
        return self.anchors * pairs / max(1, self.sharing.pairs)

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
        return self.shape.layers * self._states + self.anchors + self._end

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
        """Gathered parameters (ZeRO-3) and the reduction's buckets, two of ZeRO-2, or DDP's; the exchange of heads."""
        total = 0.0
        if self.zero and self.stage == 3 and (self.processes > 1 or self.offload_parameters):
            total += self.activation_bytes * min(MAX_LIVE, self._all)
        if self.zero:
            largest = self.shape.vocab * self.shape.hidden
            trained = self.adapters or self.shape.parameters
            total += self.activation_bytes * min(max(REDUCE_BUCKET, largest), trained) * (2 if self.stage == 2 else 1)
        elif self.processes > 1:
            total += self._gradient_bytes * self._trained
        if self.sequence_parallel > 1:
            total += self.activation_bytes * 2 * (self._queries + self._keys)
        return total

    @property
    def working(self) -> float:
        """The largest of a layer in its MLP's backward or its attention's, a chunk of logits, the optimiser's step."""
        passing = 2 * self._states + self._handed  # gradients on their way down
        # The float32 gradients of what ZeRO steps at once: below stage 3 that is all of this GPU's share.
        at_once = min(SUB_GROUP, self._stepped) if self.stage == 3 else self._stepped
        step = 4 * at_once if self.zero and not self.offload_optimizer else 0
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
            total += self._stepped * (12 + (self.activation_bytes if self.zero and self.stage > 1 else 0))
        if self.offload_checkpoints and self.checkpointing:
            total += self.shape.layers * self._states + self.anchors
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
