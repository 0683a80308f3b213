"""What generating takes in memory: bytes by kind, by arithmetic and measured, and the largest batch that fits.

PoD's Table 2 (arXiv 2412.02252) asks for the largest batch with prompts of x tokens and y new ones. The peak is the end
of the prefill: the cache is allocated for all tokens, and the last layer's activations, or after it the logits, are
there beside it. `Inference` counts them as this library's code allocates them; `peak_bytes` measures them.

Legend: B rows, x tokens of a prompt, y new ones, h hidden size, I MLP width, H and H_kv heads, D head dimension, V
vocabulary, L layers, b bytes of an element.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.eviction import ChainPolicy, Eviction, LMInfinite, Method, Quest, StreamingLLM
from pod.model.shape import Shape
from pod.training.memory import largest
from pod_kernels.cached import MAX_LOGITS
from pod_kernels.slots import CPU_LOGITS

CROP_SLACK = 64  # PodCache's default


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
    def _anchors(self) -> int:
        return sum(anchor == layer for layer, row in enumerate(self.blocks.anchors.tolist()) for anchor in row)

    @property
    def _method(self) -> Method | None:
        """The eviction method; a budget that is a share has come to tokens of the prompt."""
        if self.eviction is None or not self.eviction.is_share:
            return self.eviction
        sinks, groups = 0 if self.blocks.is_dense else self.sink_size, self.shape.heads // self.shape.kv_heads
        return self.eviction.with_budget(self.eviction.tokens_of(self.prompt, sinks, groups))

    @property
    def stays_whole(self) -> bool:
        """The method evicts nothing of the prompt, though it is above the budget: CAKE, up to its first new token."""
        method = self._method
        return isinstance(method, Eviction) and method.budget < self.prompt <= method.threshold

    @property
    def _stored(self) -> tuple[float, int, float]:
        """(slots of a layer and KV head on average, slots of own proximal keys, bytes beside each of an anchor's)."""
        # The last new token is never stored.
        total = self.prompt + self.output - 1
        near = self.sink_size + self.recent_size
        method = self._method
        if method is None:
            return total, min(total, near + CROP_SLACK), 0
        if isinstance(method, Quest):
            pages = 2 * self.shape.head_dim * self.itemsize * method.pages(total)
            return total, min(total, near + CROP_SLACK), pages / total
        if isinstance(method, ChainPolicy):
            slots = method.chain(_Sizes(self)).slots
            return slots, min(near, slots), 16 + (4 if hasattr(method, "gamma") else 0)
        kept = self.prompt if self.prompt <= method.threshold else method.budget
        headroom = total - self.prompt
        if method.when and method.query_aware:
            headroom = min(headroom, max(0, method.budget - kept) + method.when)
            near -= CROP_SLACK
        slots = kept + headroom
        return slots, min(slots, near + CROP_SLACK), 4 + (4 if method.scores_stay == "sum" else 0)

    @property
    def cache(self) -> float:
        """Bytes of one row's cache, capacity included."""
        slots, near, beside = self._stored
        heads, anchors = self.shape.layers * self.shape.kv_heads, self._anchors
        vectors = heads * slots + anchors * slots + (heads - anchors) * near
        own = 8 * (heads - anchors) * near if isinstance(self.eviction, Eviction) else 0
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
            {(anchor, head) for head, anchor in enumerate(row) if anchor == before[head]}
            for before, row in zip(anchors, anchors[1:], strict=False)
        ]
        # A layer holds what it was handed and what it hands on.
        pairs = max(len(taken | given) for taken, given in zip([set(), *handed], [*handed, set()], strict=True))
        return pairs * (self.shape.heads // self.shape.kv_heads + 1) * self.shape.head_dim

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
        q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        held = shape.hidden + q + 2 * k + self._handed  # normed input, q, k, v, anchors
        rotation = b * (held + 3 * q)
        distant = b * (q + k)
        splits = 1 if self.fused else min(shape.kv_heads, shape.heads // shape.kv_heads)
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
        for anchors in {
            sum(anchor == index for anchor in row) for index, row in enumerate(self.blocks.anchors.tolist())
        }:
            own = b * held + copies + (distant if anchors < shape.kv_heads else 0)
            if 0 < anchors < shape.kv_heads or not isinstance(self.eviction, Eviction):
                own += b * 2 * k  # keys and values in storage order
            scores = self._scores(batch, anchors) / (batch * self._tokens)
            most = max(most, own + out, own + b * q + scores)
        return batch * (b * self._streams + self._tokens * most)

    def _scores(self, batch: int, anchors: int) -> float:
        """Bytes of logits, weights and masks of the queries that a method looks at, in a layer of so many anchors."""
        method, shape = self.eviction, self.shape
        groups = shape.heads // shape.kv_heads
        if method is None or isinstance(method, Quest):
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


class _Sizes:
    """The fields of a config that a storage policy reads."""

    def __init__(self, inference: Inference) -> None:
        self.sink_size, self.recent_size = inference.sink_size, inference.recent_size
        self.blocks = inference.blocks


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as anything refers to their storage.

    What a kernel allocates inside, and what an allocator keeps in reserve, are not seen.

    Attributes:
        live: bytes that are there now.
        peak: the most that ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before: set[int] | None = None
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            # What came in from outside (weights, the prompt) is not this run's.
            if before is None:
                before = {given.untyped_storage()._cdata for given in _tensors((*args, *kwargs.values()))}
            if key in before:
                continue
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, which may come in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the most bytes that tensors made inside take at once; what was there before is not counted.

    On CUDA it is the allocator's own peak, elsewhere `TensorBytes`.

    Yields:
        a function that returns the bytes; call it when the block has ended.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
    else:
        with TensorBytes() as mode:
            yield lambda: mode.peak


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    batch: int,
    prompt: int,
    output: int,
    eviction: Method | None = None,
    whole_logits: bool = False,
) -> PodCache:
    """Generate greedily from prompts of token 3; returns the cache.

    Args:
        model: a PoD model, in evaluation mode.
        batch, prompt, output: rows, tokens of each prompt, new tokens of each.
        eviction, whole_logits: as in `Inference`.
    """
    cache = PodCache(model.config, max_length=prompt + output - 1, eviction=eviction)
    new = torch.full((batch, prompt), 3, device=model.device)
    for step in range(output):
        keep = 0 if whole_logits and step == 0 else 1
        logits = model(new, past_key_values=cache, logits_to_keep=keep).logits
        logits = logits.float() if keep == 0 else logits
        new = logits[:, -1].argmax(dim=-1, keepdim=True)
        del logits
    return cache


def measured_bytes(model: PreTrainedModel, batch: int, prompt: int, output: int, **options) -> int:
    """Bytes of the weights and of everything else at the peak of `generate`; arguments are its own."""
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
    with peak_bytes(model.device) as peak:
        generate(model, batch, prompt, output, **options)
    return sum(weights.values()) + peak()


def measured_batch(model: PreTrainedModel, memory: float, prompt: int, output: int, **options) -> int:
    """The most rows whose measured peak is within `memory` bytes, 0 if not even one."""

    def fits(batch: int) -> bool:
        try:
            return measured_bytes(model, batch, prompt, output, **options) <= memory
        except torch.cuda.OutOfMemoryError:
            return False

    return largest(fits)
