"""What a model takes of a GPU's memory, by kind: a training step (`Memory`) and generating (`Inference`).

By arithmetic: of the model only its `Shape` is needed. Bytes are counted as this library's code allocates them, and
the tests hold them against a real step and a real generation. What is searched for is the longest sample of a training
step and the largest batch of generating; PoD's Table 2 (arXiv 2412.02252) asks for the latter, with prompts of x tokens
and y new ones. Its peak is the end of the prefill: the cache is allocated for all tokens, and the last layer's
activations, or after it the logits, are there beside it.

Legend: N parameters, W processes (one GPU each), S of them share a sample (Ulysses), B micro-batch or rows, T tokens of
a sample, t = T / S of them on one GPU, x tokens of a prompt, y new ones, h hidden size, I MLP width, H and H_kv heads,
D head dimension, V vocabulary, L layers, b bytes of an element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pod.blocks import STREAMS, LayerBlocks
from pod.eviction import ChainPolicy, Eviction, LMInfinite, Method, ReadSelector, StreamingLLM
from pod.model.shape import Shape
from pod_kernels.segments import MAX_LOGITS
from pod_kernels.slots import CPU_LOGITS

CROP_SLACK = 64  # PodCache's default
# CUDA's context, NCCL's buffers and what an allocator cannot hand out because it lies in pieces.
RESERVED = 4 * 2**30
# Bytes of a weight in nf4: 4 bits, an 8-bit scale for every 64, and of every 256 such scales a float32 one.
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# ZeRO, in elements: DeepSpeed's stage3_max_live_parameters and sub_group_size, Lightning's reduce_bucket_size.
MAX_LIVE = 10**9
SUB_GROUP = 10**9
REDUCE_BUCKET = 2 * 10**8


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


def even_blocks(layers: int, kv_heads: int, kv_saving: float) -> LayerBlocks:
    """Blocks of as equal lengths as can be that save a share of the cache: for models that were not analysed.

    Args:
        layers, kv_heads: of the model.
        kv_saving: share of the cache, in [0, 0.5); of the keys it is twice as much.

    Raises:
        ValueError: a saving that no blocks have.
    """
    shared = round(2 * kv_saving * layers * kv_heads)
    if kv_saving < 0 or shared > (layers - 1) * kv_heads:
        most = (layers - 1) / layers / 2
        raise ValueError(f"kv_saving must lie between 0 and {most:.3f} in a model of {layers} layers, got {kv_saving}")
    columns = []
    for head in range(kv_heads):
        count = layers - shared // kv_heads - (head < shared % kv_heads)
        starts = [index * layers // count for index in range(count)]
        columns.append([max(start for start in starts if start <= layer) for layer in range(layers)])
    return LayerBlocks([list(row) for row in zip(*columns, strict=True)])


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
    def of(cls, blocks: LayerBlocks, share: str = "scores") -> "Sharing":
        """Of a model's blocks."""
        layout = blocks.layout()
        pairs = sum(size > 1 for size in layout.sizes.values())
        if share == "kv":
            return cls(pairs, values=True, idle=layout.num_anchors.count(0))
        layers = sum(len(order) > own for order, own in zip(layout.orders, layout.num_anchors, strict=True))
        return cls(pairs, layers, keys_only=share == "keys")

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
        quantized: the base's matrices are in 4 bits; the copy in full that is made of one at a time is not counted.
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
    quantized: bool = False
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
        saved = self.shape.layers * self.shape.layer_matrices * (self.weight_bytes - NF4) if self.quantized else 0.0
        return (self._all - self.adapters) * self.weight_bytes + 4 * self.adapters - saved

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
        return self.micro_batch * self.length * self.shape.queries / self.sequence_parallel

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
        queries = 1 if self.sharing.values else self.shape.groups
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


@dataclass(frozen=True)
class Inference:
    """Bytes at the peak of generating, as methods of the batch; every row has the same lengths.

    Attributes:
        shape: the model's sizes.
        blocks: of one layer each: dense. Of layers that share scores (or keys, which takes a little less).
        prompt, output: x and y, in tokens.
        sink_size, recent_size: proximal tokens.
        eviction: a method of `pod.eviction`, None keeps every token.
        whole_logits: the prefill computes the logits of all positions and casts them to float32, as transformers did
            before it had `logits_to_keep`; otherwise the last position's only.
        itemsize: b, of weights, activations and cache.
        fused: attention is a fused kernel for grouped heads, as on CUDA in half precision. On a CPU it is torch's
            flash attention head by head.
    """

    shape: Shape
    blocks: LayerBlocks
    prompt: int
    output: int
    sink_size: int = 16
    recent_size: int = 4080
    eviction: Method | None = None
    whole_logits: bool = False
    itemsize: int = 2
    fused: bool = True

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return self.shape.parameters * self.itemsize

    @property
    def _method(self) -> Method | None:
        """The eviction method; a budget that is a share has come to tokens of the prompt."""
        if self.eviction is None or not self.eviction.is_share:
            return self.eviction
        sinks = 0 if self.blocks.is_dense else self.sink_size
        return self.eviction.with_budget(self.eviction.tokens_of(self.prompt, sinks, self.shape.groups))

    @property
    def stays_whole(self) -> bool:
        """The method evicts nothing of the prompt, though it is above the budget: CAKE, up to its first new token."""
        method = self._method
        return isinstance(method, Eviction) and method.budget < self.prompt <= method.threshold

    @property
    def _stored(self) -> tuple[float, int, float]:
        """(slots of a layer and KV head on average, slots of own proximal keys, bytes beside each of an anchor's)."""
        total = self.prompt + self.output - 1  # the last new token is never stored
        near, method = self._near, self._method
        if method is None:
            return total, near, 0
        if isinstance(method, ReadSelector):
            pages = method.index_width(self.shape.head_dim) * self.itemsize * method.pages(total)
            return total, near, pages / total
        if isinstance(method, ChainPolicy):
            slots = method.chain(self).slots
            return slots, min(self.sink_size + self.recent_size, slots), 16 + (4 if hasattr(method, "gamma") else 0)
        kept = self.prompt if self.prompt <= method.threshold else method.budget
        headroom = total - self.prompt
        if method.when and method.query_aware:
            headroom = min(headroom, max(0, method.budget - kept) + method.when)
        slots = kept + headroom
        return slots, min(slots, near), 4 + (4 if method.scores_stay == "sum" else 0)

    @property
    def _near(self) -> int:
        """Slots of own proximal keys, and of the keys and of the values of a head that streams."""
        method = self._method
        evicts_at_steps = isinstance(method, Eviction) and method.when and method.query_aware
        near = self.sink_size + self.recent_size + (0 if evicts_at_steps else CROP_SLACK)
        return min(self.prompt + self.output - 1, near)

    @property
    def cache(self) -> float:
        """Bytes of one row's cache, capacity included."""
        slots, near, beside = self._stored
        streams = int(self.blocks.is_streaming.sum())
        heads, anchors = self.blocks.anchors.numel() - streams, self.blocks.num_blocks
        vectors = heads * slots + anchors * slots + (heads - anchors) * near
        own = 8 * (heads - anchors) * near if isinstance(self.eviction, Eviction) else 0
        vectors += 2 * streams * self._near
        return self.shape.head_dim * self.itemsize * vectors + beside * anchors * slots + own

    @property
    def logits(self) -> int:
        """Bytes of one row's logits at the end of the prefill."""
        if not self.whole_logits:
            return self.itemsize * self.shape.vocab
        return self.prompt * self.shape.vocab * (self.itemsize + (4 if self.itemsize < 4 else 0))

    @property
    def _tokens(self) -> int:
        """Tokens that the layers see at once."""
        return min(self.prompt, self._method.at_once) if isinstance(self.eviction, ChainPolicy) else self.prompt

    @property
    def _handed(self) -> int:
        """Elements of the most running anchors that there are beside one layer, of one token."""
        anchors = self.blocks.anchors.tolist()
        handed = [
            {(anchor, head) for head, anchor in enumerate(row) if anchor == before[head] != STREAMS}
            for before, row in zip(anchors, anchors[1:], strict=False)
        ]
        # A layer holds what it was handed and what it hands on.
        pairs = max(len(taken | given) for taken, given in zip([set(), *handed], [*handed, set()], strict=True))
        return pairs * (self.shape.groups + 1) * self.shape.head_dim

    @property
    def _streams(self) -> int:
        """Elements of hidden states [.., h] that a forward holds beside a layer's own, of one row."""
        states = 2 * self._tokens * self.shape.hidden  # embeddings and the layer's input
        if self._tokens < self.prompt:  # in strides: the whole embeddings and the whole output are there too
            states += 2 * self.prompt * self.shape.hidden
        return states

    @property
    def mlp(self) -> int:
        """Bytes of one row in the MLP: what attention gave, the sum, its norm, three products of the MLP's width."""
        own = 3 * self.shape.hidden + 3 * self.shape.intermediate + self._handed
        return self.itemsize * (self._streams + self._tokens * own)

    def attention(self, batch: int) -> float:
        """Bytes of all rows in attention: in RoPE, or with the anchors', the output's sums and what scores take."""
        shape, shares, b = self.shape, not self.blocks.is_dense, self.itemsize
        q, k = shape.queries, shape.keys
        held = shape.hidden + q + 2 * k + self._handed  # normed input, q, k, v, anchors
        rotation = b * (held + 3 * q)
        distant = b * (q + k)
        splits = 1 if self.fused else min(shape.kv_heads, shape.groups)
        out = b * q
        if shares or splits > 1:
            # Sums in float32, log-sum-exps, and two pieces: the one that is added and the one before it.
            out = 4 * q + 12 * shape.heads + max(b * min(q, 2 * q // splits), b * (q + q // splits) if b < 4 else 0)
        copies = 0
        if isinstance(self.eviction, ChainPolicy):
            copies += b * (2 * q + 2 * k)  # queries in storage order and rotated, keys and values behind the kept
        if isinstance(self.eviction, LMInfinite):
            copies += b * q  # the queries once more, as far away as distances go
        most = rotation
        kinds = (kind.sum(dim=1).tolist() for kind in (self.blocks.is_anchor, self.blocks.is_streaming))
        for anchors, streams in set(zip(*kinds, strict=True)):
            own = b * held + copies + (distant if anchors + streams < shape.kv_heads else 0)
            if streams:
                own += b * (2 * q + 2 * k)  # each kind's queries, keys and values, and outputs put together
            if 0 < anchors < shape.kv_heads or not isinstance(self.eviction, Eviction):
                own += b * 2 * k  # keys and values in storage order
            scores = self._scores(batch, anchors) / (batch * self._tokens)
            most = max(most, own + out, own + b * q + scores)
        return batch * (b * self._streams + self._tokens * most)

    def _scores(self, batch: int, anchors: int) -> float:
        """Bytes of logits, weights and masks of the queries that a method looks at, in a layer of so many anchors."""
        method, shape = self.eviction, self.shape
        groups = shape.groups
        if method is None or isinstance(method, ReadSelector):
            return 0
        if isinstance(self.eviction, ChainPolicy):
            width = min(self.prompt, self._stored[0] + self._tokens)
            if self.blocks.is_dense and type(method) is StreamingLLM:  # one fused call, with a mask
                return batch * shape.kv_heads * self._tokens * width * (1 + self.itemsize)
            most = MAX_LOGITS if self.fused else CPU_LOGITS
            return min(most, batch * shape.heads * self._tokens * width) * (12 if self.blocks.is_dense else 20)
        if method.scores_stay == "sum":
            return min(MAX_LOGITS, batch * anchors * groups * self.prompt**2) * (8 + 1 / groups)
        window = max(method.observed, method.protected(groups) if method.has_preference else 0)
        each = 16 if method.has_preference else 8
        return batch * anchors * window * self.prompt * (each * groups + 1)

    @property
    def end(self) -> int:
        """Bytes of one row after the last layer: the last norm in float32, or its output beside the logits."""
        # In float32 the norm needs no copy of its input.
        norm = self.itemsize * self._streams + self._tokens * self.shape.hidden * (8 if self.itemsize < 4 else 4)
        return max(norm, self.itemsize * self.prompt * self.shape.hidden + self.logits)

    def by_kind(self, batch: int) -> dict[str, float]:
        """Bytes at the peak; logits are 0 where the peak is in a layer, before there are any."""
        in_layer = max(batch * self.mlp, self.attention(batch))
        logits = batch * self.logits if batch * self.end > in_layer else 0
        return {
            "weights": self.weights,
            "cache": batch * self.cache,
            "prefill logits": logits,
            "activations": max(in_layer, batch * self.end) - logits,
        }

    def total(self, batch: int) -> float:
        """Bytes at the peak."""
        return sum(self.by_kind(batch).values())

    def largest_batch(self, memory: float) -> int:
        """The most rows within `memory` bytes, 0 if not even one."""
        return largest(lambda batch: self.total(batch) <= memory)
