"""The PoD cache: a transformers `Cache` that counts tokens, and hands each layer's keys and values to its storage.

Which storage depends on the eviction method: `pod.cache.slots` keeps every token or evicts by scores, `pod.cache.chain`
is for methods that keep tokens by their places.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import FIXED, LayerBlocks, whole_number
from pod.cache.chain import ChainStorage
from pod.cache.file import read_cache, write_cache
from pod.cache.fork import SharedPrefix, refusal
from pod.cache.offload import Offloaded, OffloadedValues
from pod.cache.row_runs import RowRuns
from pod.cache.slots import SlotStorage
from pod.cache.storage import Outputs, Pieces, Rotary, Rows, Storage, broken_off
from pod.eviction import ChainPolicy, Eviction, Method, ReadSelector, hyper_parameters, of_hyper_parameters
from pod.eviction.streaming import WindowAttention
from pod_kernels import Quantization, SkipStats, TriangleMix


def _outlives_inference(method: Callable) -> Callable:
    """Under `torch.inference_mode` too, what the method makes are usual tensors: others could not be written later."""

    @wraps(method)
    def wrapped(*args, **kwargs):
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


class PodCache(Cache):
    """Key/value cache of a PoD model, the default of its `generate`.

    Args:
        config: the PoD model's config; says layers, heads, blocks, sink and recent sizes.
        max_length: tokens that each row will reach. Storage is then allocated once; without it, storage that is full
            grows by 8 tokens and a 32nd, or by an eighth if that is less, and `generate` says how long the text will
            get (`expect`). A chain's needs none: it has a fixed size.
        eviction: a method of `pod.eviction`, such as `SnapKV(budget=4096)`; None keeps every token. What is stored then
            is described in `pod.cache.slots` and `pod.cache.chain`; with Quest it is everything, and pages. A budget
            that is a share, `SnapKV(budget=0.25)`, comes to tokens in the first prefill, of each row's own.
        tau: early skip: at decode, in layers that are no anchors, a query head whose gate is at least tau leaves the
            distant tokens out, 0 to 1; the config's when None, and if that is None too, nothing is skipped.
        crop_slack: how many of the last tokens `crop` can take back (rejected draft tokens).
        quantization: stores values and distant keys in 8 or 4 bits, but for the last tokens, as
            `pod.Quantization(bits=4)` says; own keys of proximal tokens stay as they are. A forward of several tokens
            into an empty cache attends in full precision; every other one makes one layer at a time full and reads
            that. Where few tokens are kept, so that they would take more bytes, they are stored as they come. None
            stores all as it comes.
        sparse_prefill: a `pod.TriangleMix`: the first forward, the prompt, leaves out pairs in the upper layers; what
            follows reads everything. None reads all. It is not saved with the tokens.
        value_pool: with a method that chooses what is read, such as ShadowKV: values lie in CPU memory, and on the
            model's device those of so many tokens of each layer and KV head, at least `budget`, that were read last
            (`pod.cache.offload`); outputs are the same. The method's `dense_layers` keep theirs on the device. None
            keeps all values there.

    Attributes:
        stats: what tau decided and left unread since the cache was empty, a `pod_kernels.SkipStats`.

    Raises:
        ValueError: `config` is not a PoD config; a size is out of range; the budget is below what is always kept; tau
            with eviction; tau, eviction or quantization with `share: kv`; quantization with tau, with a method that
            evicts while decoding, shares a budget between layers, keeps a chain or reads pages, or with less than
            `crop_slack` tokens of `residual`; value_pool without a method that chooses what is read, or with one that
            reads more tokens, or a share of the prompt.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int | None = None,
        eviction: Method | None = None,
        tau: float | None = None,
        crop_slack: int = 64,
        quantization: Quantization | None = None,
        sparse_prefill: TriangleMix | None = None,
        value_pool: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        if not hasattr(config, "share") or not hasattr(config, "blocks"):
            raise ValueError(
                f"PodCache needs the config of a PoD model, got {type(config).__name__}. Convert the model first: "
                "pod.convert(model, pod.LayerBlocks.dense(num_layers, num_kv_heads)) keeps it dense."
            )
        max_length = None if max_length is None else whole_number("max_length", max_length, "at least 1 token", 1)
        crop_slack = whole_number("crop_slack", crop_slack, ">= 0 tokens", 0)
        self.tau = config.tau if tau is None else tau
        if self.tau is not None and not (isinstance(self.tau, Real) and 0 <= self.tau <= 1):
            raise ValueError(f"tau must be between 0 and 1, or None; got {self.tau!r}")
        if self.tau is not None and eviction is not None:
            raise ValueError(
                f"tau={self.tau} cannot be combined with eviction: a method chooses what is read. Leave one of them out"
                + (" (the model's config sets tau: config.tau = None takes it away)" if tau is None else "")
            )
        choices = {"tau": self.tau, "eviction": eviction, "quantization": quantization}
        for name, value in choices.items() if config.share == "kv" else ():
            if value is not None:
                raise ValueError(
                    f"{name} cannot be combined with share='kv', cross-layer attention, whose layers share keys and "
                    f"values and no scores. Make the cache without {name}"
                )
        if eviction is not None and not isinstance(eviction, Method):
            raise ValueError(
                f"eviction must be a method such as pod.eviction.SnapKV(budget=256), got {eviction!r}; "
                "pod.eviction.parse makes one from text"
            )
        if isinstance(eviction, ChainPolicy) and config.blocks.is_streaming.any():
            raise ValueError(
                f"{type(eviction).__name__} keeps tokens by their places in every head, and some heads of this model "
                "stream, which keeps others: choose a method that evicts by scores, such as SnapKV, or blocks without "
                "such heads"
            )
        if config.share == "window":
            if eviction is not None:
                raise ValueError("a model with share='window' keeps its window alone: make its cache without eviction")
            eviction = WindowAttention()
        if quantization is not None:
            _check_quantization(quantization, self.tau, eviction, crop_slack)
        if value_pool is not None:
            value_pool = _checked_pool(value_pool, eviction)
        self.config = config
        self._made_by = copy.deepcopy(config.fixed())
        self.max_length = max_length
        self.may_grow = max_length is None
        self.eviction = eviction
        self.crop_slack = crop_slack
        self.quantization = quantization
        self.value_pool = value_pool
        self.blocks: LayerBlocks = config.blocks
        self.drafted = self.accepted = 0  # tokens of `generate(draft=..)`, and those that verification agreed with
        self.fed_before = 0  # columns that assisted decoding, which begins with all ids, must leave out once
        self._rows = Rows()
        self._left_out = 0  # columns of the open forward that are in no piece
        self._pieces = 0  # of the forward that is open, those that are not finished
        self._is_cut = False  # its pieces have some of its columns each
        self._padding: tuple[int, Tensor] | None = None  # its first column, and with how many of padding it begins
        self._watch: Callable[[int, Tensor, Tensor, float], None] | None = None
        # Inside `peek` all there is, is a copy's, of which the first so many columns lie where the cache's own do.
        self._lent: int | None = None
        self._is_counted = True  # False while a forward is counted, and between its pieces
        self._dtype: torch.dtype | None = None  # of what the model computes
        self._storage: Storage
        if not isinstance(eviction, ChainPolicy):
            options = (eviction, self.tau, quantization, max_length, crop_slack, value_pool)
            self._storage = SlotStorage(config, self._rows, *options)
        elif eviction.is_share:
            self._storage = RowRuns(config, self._rows, eviction)
        else:
            self._storage = ChainStorage(config, self._rows, eviction)
        self.sparse_prefill = sparse_prefill
        if sparse_prefill is not None:
            self._check_sparse_prefill()
            self._storage.sparse = sparse_prefill

    def _check_sparse_prefill(self) -> None:
        if not isinstance(self.sparse_prefill, TriangleMix):
            raise ValueError(f"sparse_prefill must be such as pod.TriangleMix(), got {self.sparse_prefill!r}")
        for name, is_so in {
            f"eviction={self.eviction!r}, which has a window of its own": isinstance(self.eviction, ChainPolicy),
            "heads that stream": self.blocks.is_streaming.any(),
        }.items():
            if is_so:
                raise ValueError(f"sparse_prefill cannot be combined with {name}: leave sparse_prefill out")

    # ------------------------------------------------------------------ what transformers asks

    is_compileable = False

    @property
    def is_croppable(self) -> bool:
        return self._storage.is_croppable

    def check_croppable(self) -> None:
        """Refuse drafts where rejected ones cannot be taken back.

        Raises:
            ValueError: the method evicts while decoding; names it and the remedy.
        """
        if not self.is_croppable:
            self._storage.check_crop(1)

    def __len__(self) -> int:
        return self.blocks.num_layers

    def __repr__(self) -> str:
        return f"PodCache(tokens={self.get_seq_length()}, bytes={self.nbytes()}, {self.blocks})"

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    # `generate` takes a cache whose layers are all linear for one that holds no tokens, and no layers are all linear.
    is_linear = is_dummy = is_sliding

    @property
    def batch_size(self) -> int:
        # A first forward that was refused leaves rows without a token.
        is_filled = self._rows.most_columns > 0 or self._storage.step is not None
        return len(self._rows.seen) if is_filled else -1

    @property
    def max_cache_len(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit without growing, -1 when there is no limit."""
        return -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, left padding included, as `generate` counts them."""
        return self._rows.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple:
        raise ValueError(
            "PodCache belongs to PoD models: a dense model cannot use it, because distant keys are not stored in "
            "every layer. Convert the model with pod.convert(model, blocks) first, or use transformers' DynamicCache."
        )

    @property
    def in_prefill(self) -> bool:
        """Whether `prefill()` is open: forwards are parts of one."""
        return self._storage.in_prefill

    @property
    def has_padding(self) -> bool:
        """Whether a row has padding among the tokens seen; the host waits for the device."""
        return self._rows.end_of_padding() > 0

    @property
    def stats(self) -> SkipStats:
        return self._storage.stats.collect()

    # ------------------------------------------------------------------ size

    def nbytes(self) -> int:
        """Bytes of the storages, capacity included; the workspace of one step's distant scores is not in it.

        With `value_pool`, those on the model's device.
        """
        return sum(storage.untyped_storage().nbytes() for storage in self.storages())

    @property
    def offloaded(self) -> Offloaded:
        """What `value_pool` has put into CPU memory, and copied from there; nothing without it."""
        values = [layer.values for layer in getattr(self._storage, "layers", ()) if layer is not None]
        values = [each for each in values if isinstance(each, OffloadedValues)]
        return Offloaded(sum(each.host.nbytes() for each in values), sum(each.copied for each in values))

    def expected_nbytes(self, length: int, batch: int = 1, itemsize: int = 2) -> int:
        """Bytes by the formula of `pod.cache.slots` for `length` tokens in each of `batch` rows, none evicted.

        Quest's pages, two vectors each, are in it, and quantization's scales and open groups. After `fork` the tokens
        that the rows share are counted once.
        """
        shared, sinks = min(length, self._storage.shared), self.config.sink_size
        own = self._expected_nbytes(length - shared, batch, itemsize, max(0, sinks - shared))
        return own + self._expected_nbytes(shared, 1, itemsize, sinks) if shared else own

    def _expected_nbytes(self, length: int, batch: int, itemsize: int, sinks: int) -> int:
        near = min(length, sinks + self.config.recent_size + self.crop_slack)
        streams = int(self.blocks.is_streaming.sum())
        total = self.blocks.anchors.numel() - streams
        streamed = batch * self.config.head_dim * itemsize * 2 * streams * near
        if self.config.share == "window":
            length = self.config.sink_size + self.config.recent_size - 1
        anchors = self.blocks.num_blocks
        if self.config.share == "kv":
            return batch * self.config.head_dim * itemsize * 2 * anchors * length
        vectors = total * length + anchors * length + (total - anchors) * near
        if self.value_pool is not None:
            pooled = int((~self.blocks.is_streaming[self.eviction.dense_layers :]).sum())
            vectors -= pooled * (length - self.value_pool)
            streamed += 8 * batch * pooled * self.value_pool
        spec, dim = self.quantization, self.config.head_dim
        if spec is not None and spec.pays([length], dim, itemsize):
            stored = total * spec.nbytes(length, dim, itemsize, is_key=False)
            stored += anchors * spec.nbytes(length, dim, itemsize, is_key=True)
            return streamed + batch * (stored + (total - anchors) * near * dim * itemsize)
        if isinstance(self.eviction, ReadSelector):
            pages = anchors * self.eviction.pages(length)
            streamed += batch * itemsize * pages * self.eviction.index_width(dim)
        return streamed + batch * dim * itemsize * vectors

    def storages(self) -> list[Tensor]:
        """Every tensor that `nbytes` counts."""
        return self._storage.storages()

    def positions(self, layer: int) -> Tensor:
        """Positions whose values are kept, in the layer or, under `share: kv`, in its anchors.

        Inside a forward (of a hook), and after one that broke off until the next call, with its tokens.

        Returns:
            [B, H_kv, n] int64, counted from each row's first real token; -1 where a slot is empty.

        Raises:
            ValueError: nothing is stored yet.
        """
        if self.batch_size < 0:
            raise ValueError("the cache is empty: run the model with it first")
        return self._storage.positions(layer)

    # ------------------------------------------------------------------ one forward of the model

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Several forwards inside are one prefill: whatever acts at the end of a prefill acts when the block ends."""
        if self.in_prefill:
            raise ValueError("cache.prefill() is already open: close it before opening another")
        self._storage.mark_prefill(True)
        try:
            yield
            self._close_prefill()
        finally:
            self._storage.mark_prefill(False)

    @_outlives_inference
    def _close_prefill(self) -> None:
        self._rollback()
        self._storage.close_prefill()

    @contextmanager
    def peek(self, watch: Callable[[int, Tensor, Tensor, float], None] | None = None) -> Iterator[None]:
        """Forwards inside attend to what is stored and to each other, and when the block ends they have not been.

        Each is what it would be on a `copy.deepcopy`, eviction included; also rows may be reordered, as beams are. No
        copy is made of what is held where a method only adds tokens from now on: without eviction, after the context
        with `query_aware=False`, with Quest. Own keys of proximal tokens are then copied, and new tokens lie in slots
        that are empty; where these are too few, a larger storage stands beside this one until the block ends
        (`max_length` avoids that). Methods that evict again, those that keep tokens by their places, and quantization
        copy what they hold.

        Args:
            watch: is told of each layer before it attends: its index, queries [B, H, T, D] and keys [B, H_kv, T, D],
                and the factor on every logit.

        Raises:
            ValueError: nothing is stored yet, or `prefill()` or another `peek()` is open.
        """
        self._rollback()
        if self.batch_size < 0 or self.in_prefill or self._lent is not None:
            raise ValueError("cache.peek() is for a cache that holds tokens, outside prefill() and another peek()")
        kept = vars(self).copy()
        self._go_apart()
        self._watch = watch
        try:
            yield
        finally:
            vars(self).update(kept)

    @_outlives_inference
    def _go_apart(self) -> None:
        self._rows, storage = self._rows.apart(), self._storage
        self._storage, self._lent = storage.apart(self._rows), self._rows.columns

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are handed over before RoPE, and the cache rotates them."""
        return self._storage.rotates

    def takes_anchors(self, count: int) -> bool:
        """Whether `attend` needs the running anchors' queries and keys in a forward of `count` tokens."""
        return self._storage.takes_anchors(count)

    @_outlives_inference
    def open(self, inputs: Tensor, mask: Tensor | None) -> Pieces:
        """Check a forward's tokens, and cut it into what can be processed at once: the first thing that the model asks.

        Args:
            inputs: [B, T, hidden] embeddings.
            mask: [B, T] or [B, tokens so far and T] bool, False for padding tokens; None when all are real.

        Returns:
            For each piece its columns [B or 1, n] int64, None where there is one of all columns, and which of them are
            real [B, n] bool, None when all are.

        Raises:
            ValueError: another number of rows, another dtype, a mask that is not that of the tokens held, or a forward
                before this one broke off and what it left cannot be taken back.
        """
        self._rollback()
        rows, (batch, count), kind = self._rows, inputs.shape[:2], inputs.device.type
        is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else inputs.dtype
        if rows.columns == 0:
            self._dtype = dtype
        elif self.batch_size != batch:
            raise ValueError(
                f"the cache holds {self.batch_size} rows but the input has {batch}: cache.batch_repeat_interleave(n) "
                "makes n of each, cache.fork(n) n over the tokens of one, cache.batch_select_indices(rows) keeps some"
            )
        elif dtype != (self._dtype or dtype):
            raise ValueError(
                f"the cache holds {self._dtype} and the model computes in {dtype}: go on in {self._dtype}, or fill a "
                "cache with the model as it is"
            )
        mask = None if mask is None else rows.new_part(mask, count)
        if rows.columns == 0:
            rows.reset(batch, inputs.device)
        pieces = self._storage.pieces(mask, count, inputs.device)
        self._pieces, self._is_cut = len(pieces), pieces[0][0] is not None
        # Columns that are padding in every row are in no piece, but they count.
        self._left_out = count - sum(columns.shape[1] for columns, _ in pieces) if self._is_cut else 0
        self._padding = None if mask is None else (rows.columns, count - mask.sum(dim=1))
        return pieces

    @_outlives_inference
    def begin(
        self,
        config: PreTrainedConfig,
        inputs: Tensor,
        mask: Tensor | None,
        rotary: Rotary,
        outputs: Outputs | None = None,
    ) -> None:
        """Make room for the tokens of one forward; the model calls this before its layers.

        Args:
            config: the config of the calling model, which must be this cache's.
            inputs: [B, T, hidden] embeddings; gives rows, tokens and device.
            mask: [B, T] bool, False for padding tokens; None when all are real.
            rotary: the model's rotary embedding, (states, position_ids) -> cos and sin.
            outputs: its output projections, layer -> [hidden, H * D].

        Raises:
            ValueError: another model's cache, another number of rows, padding after a row's first token, more tokens
                than `max_length`.
        """
        if [vars(self.config)[name] for name in FIXED] != self._made_by:
            self.config.check_unchanged(self._made_by, "the cache")
        if config is not self.config and config.fixed() != self._made_by:
            theirs, ours = _shape_of(config), _shape_of(self.config)
            if theirs != ours or config.blocks != self.blocks:
                raise ValueError(
                    f"this cache was made for another model: it has {ours} and {self.blocks}, the model has {theirs} "
                    f"and {config.blocks}. Make one with pod.PodCache(model.config)."
                )
        rows, batch = self._rows, len(inputs)
        if rows.columns == 0:
            budgets = rows.budgets  # of the whole prompt, of which this may be the first piece
            self._clear()  # whatever a first forward that broke off has left
            rows.reset(batch, inputs.device)
            rows.budgets = budgets
        may_be_empty = self._is_cut or self._storage.is_fixed
        step = rows.step(inputs.shape[1], mask, self.in_prefill, may_be_empty)
        if step.all_real and not self._is_cut:
            self._padding = None
        most = step.length if self.may_grow or self._storage.is_fixed else self.max_length
        if step.length > most:
            raise ValueError(
                f"the cache was made for {self.max_length} tokens per row and {step.length} are needed: pass a larger "
                "max_length to pod.PodCache, or none, and it grows"
            )
        if getattr(self.eviction, "reads_outputs", False):
            self._storage.outputs = outputs
        self._storage.begin(step, inputs, rotary)

    def _rollback(self) -> None:
        """Forget what a forward that broke off has left in some layers.

        Raises:
            ValueError: tokens that were there before have made room for it.
        """
        if not self._is_counted:
            raise broken_off()
        if self._storage.step is None:
            return
        if self._rows.columns == 0:
            self._clear()
        else:
            self._storage.rollback()

    @_outlives_inference
    def finish(self) -> None:
        """Count the tokens of the forward as stored; the model calls this after its last layer."""
        self._is_counted = False
        step = self._storage.step
        self._storage.finish()
        self._rows.add(step)
        self._pieces -= 1
        if self._pieces < 1:
            # Only now: rows of different strides have more columns in all pieces together than there are.
            self._rows.columns += self._left_out
            self._left_out = 0
            if self._padding is not None:
                self._rows.add_padding(*self._padding)
                self._padding = None
            self._is_counted = True

    def place_of_a_step(self) -> tuple | None:
        """Where all lies that a step of decoding reads and writes; None where a CUDA graph cannot repeat one.

        As long as this is the same, a step does the same on the device, but for what lies there.
        """
        rows, storage = self._rows, self._storage
        if storage.in_prefill or storage.step is not None or rows.columns == 0 or not storage.repeats_steps:
            return None
        if not self.may_grow and rows.longest >= self.max_length:
            return None
        workspace = storage.workspace
        held = [rows.lengths, *storage.storages(), *([] if workspace is None else [workspace])]
        return (tuple(rows.lengths.shape), *(tensor.data_ptr() for tensor in held))

    def host_state(self) -> tuple:
        """What the host counts of the tokens stored."""
        return self._rows.host_counts(), self._storage.host_state()

    def set_host_state(self, state: tuple) -> None:
        """Put back what `host_state` said."""
        counts, stored = state
        vars(self._rows).update(counts)
        self._storage.set_host_state(stored)

    def advance(self) -> None:
        """Count one token more in every row, which a CUDA graph stores."""
        self._rows.count([1] * len(self._rows.seen), 1)
        self._storage.advance()

    @_outlives_inference
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_distant: Tensor | None,
        k_distant: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Store one layer's keys and values and attend to everything stored.

        Args:
            layer: index of the layer.
            q, k, v: [B, H, T, D] and [B, H_kv, T, D], after RoPE; q and k before it when the cache `rotates`. Under
                `share: kv`, where the cache takes anchors, heads that are no anchors have their anchor's k and v;
                elsewhere what they have is not looked at, and where no head is an anchor there may be none.
            q_distant, k_distant: the running anchors' [B, H, T, D] and [B, H_kv, T, D]; may be None for a layer of
                anchors, and where the cache does not take anchors.
            scale: factor on every logit.

        Returns:
            [B, H, T, D].
        """
        if self._watch is not None:
            self._watch(layer, q, k, scale)
        out = self._storage.attend(layer, q, k, v, (q_distant, k_distant), scale)
        is_cut = not out.requires_grad and (q.requires_grad or v.requires_grad)
        return _CacheBoundary.apply(out, q, v) if is_cut else out

    @_outlives_inference
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store one layer's keys and values [B, H_kv, T, D] without attention, in a cache that keeps every token."""
        self._storage.store(layer, k, v)

    def anchor_keys(self, layer: int) -> tuple[Tensor, list[int]]:
        """Keys [B, A, N, D] that a layer holds as an anchor, and the KV heads that they are of.

        Of an evicting method's cache, in the order of slots, which before an eviction is that of positions.
        """
        heads = self.blocks.layout().orders[layer][: self.blocks.layout().num_anchors[layer]]
        return self._storage.keys(layer).transpose(0, 1), list(heads)

    @_outlives_inference
    def evict(self, scores: Mapping[int, Tensor]) -> None:
        """Evict once from the context, by scores that were made of it outside; for `pod.eviction.KVzip`.

        Args:
            scores: by layer with anchors, in storage order of these [B, A, N] float32, of the positions 0 to N - 1.

        Raises:
            ValueError: the method is another, the context is evicted from, or there is none.
        """
        self._rollback()
        if self.batch_size < 0 or self.in_prefill or self._lent is not None:
            raise ValueError("cache.evict is for a cache that holds a context, outside prefill() and peek()")
        self._storage.evict(scores)

    # ------------------------------------------------------------------ rows

    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self._clear()
        if self.may_grow:
            self._expect(None)

    def _clear(self) -> None:
        self._rows.reset()
        self._is_counted = True
        self.drafted = self.accepted = 0
        self._storage = self._storage.cleared()

    def expect(self, length: int) -> None:
        """Rows will reach `length` tokens: storage that may grow then grows to that, once."""
        if self.may_grow and length > (self.max_length or 0):
            self._expect(length)

    def _expect(self, length: int | None) -> None:
        self.max_length = length
        self._storage.expect(length)

    @_outlives_inference
    def __deepcopy__(self, memo: dict) -> "PodCache":
        if self.in_prefill:
            raise ValueError("a copy inside cache.prefill() could not be closed: copy the cache before or after it")
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo), _lent=None, _watch=None)
        return made

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put row `beam_idx[b]` in the place of row b (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.batch_size < 0:
            return
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    @property
    def forks(self) -> bool:
        """Whether `fork` takes a cache with these settings."""
        return refusal(self._storage) is None

    @_outlives_inference
    def fork(self, rows: int) -> None:
        """Become `rows` rows over the tokens of the one row that is there: stored once, read once, never changed.

        What follows is each row's own: a question of each, left-padded as any turn, or tokens that are sampled. Logits
        are those of copied rows (`batch_repeat_interleave`); bytes are those of the one row and of the rows' own
        tokens. Own tokens can be cropped, and rows be selected, repeated and saved; inside `peek` the one row is there
        again afterwards. Steps take torch's operations, without Triton's kernels and CUDA graphs.

        Args:
            rows: at least 1.

        Raises:
            ValueError: there is not one row, `prefill()` is open or was not closed, what evicts has not done so yet, or
                the cache has tau, quantization, heads that stream, or a method that evicts again, reads pages or keeps
                a chain.

        Source:
            Hydragen (arXiv 2402.05099), section 3; ChunkAttention (arXiv 2402.15220).
        """
        count = whole_number("rows", rows, "at least 1 row", 1)
        self._rollback()
        reason, storage = refusal(self._storage), self._storage
        if reason is not None:
            raise ValueError(f"cache.fork is for rows of tokens that stay, and {reason}")
        if self.batch_size != 1 or storage.in_prefill:
            raise ValueError(
                f"cache.fork is for a cache that holds one row, outside prefill(); it holds {max(0, self.batch_size)}: "
                "fill it with one, or keep one with cache.batch_select_indices"
            )
        if storage.policy is not None and (storage.is_waiting or not storage.is_frozen):
            raise ValueError(
                f"{type(self.eviction).__name__} has not evicted from the context yet: end its prefill (and for KVzip "
                "call pod.reconstruct) before cache.fork"
            )
        shared = self._rows.apart()
        self._rows.select(torch.zeros(count, dtype=torch.long, device=shared.lengths.device))
        self._storage = SharedPrefix(storage, shared, self._rows, self.max_length)

    @_outlives_inference
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n] int64, or those of a mask [B] bool, in that order.

        Raises:
            ValueError: it is no row.
        """
        self._rollback()
        if self.batch_size < 0:
            return
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        if not len(rows):
            raise ValueError("no row of the cache would be left: cache.reset() forgets all of them")
        rows = rows.to(self._rows.lengths.device)
        self._rows.select(rows)
        self._storage.select_rows(rows)

    @_outlives_inference
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row (rejected drafts).

        Args:
            tokens_to_remove: a negative number of tokens, as transformers counts. Together with what was cropped and
                not written again, at most `crop_slack`.

        Raises:
            ValueError: positive, more than `crop_slack`, more than a row holds, or up to where a row has padding.
        """
        removed = -whole_number("tokens_to_remove", tokens_to_remove, "a negative number of tokens")
        self._rollback()
        if removed < 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        if removed == 0:
            return
        self._storage.check_crop(removed)
        shortest = min(self._rows.seen, default=0)
        gone = self._rows.most_columns - self._rows.columns
        if gone + removed > self.crop_slack or removed > shortest:
            raise ValueError(
                f"cannot take back {removed} tokens: recent keys are kept for {self.crop_slack} (crop_slack), {gone} "
                f"are taken back already and the shortest row holds {shortest}. Make the cache with a larger "
                "crop_slack."
            )
        if self._rows.columns - removed < self._rows.end_of_padding():
            raise ValueError(
                f"cannot take back {removed} tokens: some of them are padding of a turn whose rows had different "
                "lengths. Take a copy (copy.deepcopy) before such a turn, and go on with that"
            )
        if self._rows.columns - removed < (self._lent or 0):  # what comes instead is written there
            self._storage, self._lent = self._storage.apart(self._rows, lends=False), 0
        self._rows.crop(removed)
        self._storage.crop(removed)

    @contextmanager
    def drafts_by(self, reader: ReadSelector) -> Iterator[None]:
        """What tokens decoded inside `drafting()` read, until the block ends; all others read everything, as before.

        Args:
            reader: a method that chooses what is read, its budget a number of tokens.

        Raises:
            ValueError: it is no reader, or this cache does not keep and read every token as it came.
        """
        self._check_reader(reader)
        self._rollback()
        self._draft_by(reader)
        try:
            yield
        finally:
            self._draft_by(None)

    @_outlives_inference
    def _draft_by(self, reader: ReadSelector | None) -> None:
        self._storage.draft_by(reader)

    def _check_reader(self, reader: object) -> None:
        if not isinstance(reader, ReadSelector) or reader.is_share:
            raise ValueError(
                f"draft must be a method that chooses what is read, such as pod.eviction.Quest(budget=256) with a "
                f"number of tokens, got {reader!r}"
            )
        choices = {"eviction": self.eviction, "tau": self.tau, "quantization": self.quantization}
        if self.config.share in ("kv", "window"):
            choices = {"share": self.config.share}
        if self._storage.shared:
            choices = {"rows of cache.fork": self.batch_size}
        for name, value in choices.items():
            if value is not None:
                raise ValueError(
                    f"draft={type(reader).__name__} needs a cache of which plain decoding reads every token as it "
                    f"came, and this one has {name}={value!r}: leave one of the two out"
                )

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Tokens decoded inside read what `drafts_by` said; when the block ends they are taken back (`crop`)."""
        columns, self._storage.reads = self._rows.columns, True
        try:
            yield
        finally:
            self._storage.reads = False
            self.crop(columns - self._rows.columns)

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file, so that another process goes on where this one is.

        Tokens, settings (eviction method with all its hyper-parameters, tau, crop_slack, max_length) and counts are in
        it; the model's weights are not, and the file says nothing about them. Unused capacity is not written where
        slots are positions.

        Args:
            path: the file; written aside and renamed, so that a reader never meets half of it. Folders are made.

        Raises:
            ValueError: nothing is stored yet, `prefill()` is open, a method that `pod.eviction` does not have, or the
                last forward broke off and what it left cannot be taken back.
            OSError: it cannot be written.
        """
        self._rollback()
        if self.batch_size < 0 or self.in_prefill:
            raise ValueError("a cache is saved when it holds tokens, and outside cache.prefill()")
        is_window, rows = self.config.share == "window", self._rows
        facts = {
            "max_length": self.max_length,
            "may_grow": self.may_grow,
            "crop_slack": self.crop_slack,
            "tau": self.tau,
            "quantization": None if self.quantization is None else asdict(self.quantization),
            "value_pool": self.value_pool,
            "eviction": None if self.eviction is None or is_window else hyper_parameters(self.eviction),
            "stats": asdict(self.stats),
            **rows.host_counts(),
        }
        more, storage = self._storage.state()
        tensors = rows.tensors() | more
        facts["storage"] = storage
        write_cache(path, tensors, facts, self.config)

    @classmethod
    @_outlives_inference
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig, device: str | torch.device = "cpu"
    ) -> "PodCache":
        """A cache that `save` wrote, as it was.

        Args:
            path: the file.
            config: of the model that filled it.
            device: where the model is.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: truncated or no cache, or the config is another one; names the file and what differs.
        """
        tensors, facts = read_cache(path, config, device)
        try:
            eviction = None if facts["eviction"] is None else of_hyper_parameters(facts["eviction"])
            quantization = facts["quantization"] and Quantization(**facts["quantization"])
            options = (facts["max_length"], eviction, facts["tau"], facts["crop_slack"], quantization)
            cache = cls(config, *options, value_pool=facts.get("value_pool"))
            cache._restore(tensors, facts)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}: the tensors are not those that the metadata describes: {error!r}") from error
        return cache

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.may_grow = facts["may_grow"]
        held = {name: facts[name] for name in self._rows.host_counts()}
        vars(self._rows).update(held, lengths=tensors.get("lengths"), padding=tensors.get("padding"))
        self._storage.stats = SkipStats(**facts["stats"])
        if "prefix" in facts["storage"]:
            self._storage = SharedPrefix.restored(self._storage, tensors, facts["storage"])
        else:
            self._storage.restore(tensors, facts["storage"])
        self._dtype = next((tensor.dtype for tensor in self.storages() if tensor.is_floating_point()), None)


class _CacheBoundary(torch.autograd.Function):
    """Stored keys and values have no history: a backward through them would be silently partial, so it is refused."""

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor, v: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        raise RuntimeError(
            "gradients do not flow through tokens that a cache holds: pass the whole sequence at once with "
            "use_cache=False, or decode under torch.no_grad()"
        )


def _checked_pool(places: object, method: Method | None) -> int:
    places = whole_number("value_pool", places, "at least 1 token", 1)
    if not isinstance(method, ReadSelector) or method.is_share:
        raise ValueError(
            f"value_pool={places} needs a method that chooses what a step reads, its budget a number of tokens, such "
            f"as pod.eviction.ShadowKV(budget=1024), got eviction={method!r}: choose one, or leave value_pool out"
        )
    if places < method.budget:
        raise ValueError(
            f"value_pool ({places} tokens) is below the {method.budget} that a step reads (budget): raise it, or lower "
            "the budget"
        )
    return places


def _check_quantization(spec: Quantization, tau: float | None, eviction: Method | None, crop_slack: int) -> None:
    if not isinstance(spec, Quantization):
        raise ValueError(f"quantization must be such as pod.Quantization(bits=4), got {spec!r}")
    if tau is not None:
        raise ValueError(f"tau={tau} cannot be combined with quantization: every value is read to be made full")
    name = type(eviction).__name__
    if eviction is not None and not isinstance(eviction, Eviction):
        raise ValueError(f"quantization cannot be combined with {name}, which organises storage or pages itself")
    if eviction is not None and eviction.when and eviction.query_aware:
        raise ValueError(
            f"quantization cannot be combined with {name}, which evicts while decoding: a quantised token cannot be "
            "replaced by another. Make it with query_aware=False, or choose SnapKV, PyramidKV or AdaKV"
        )
    if eviction is not None and eviction.has_preference:
        raise ValueError(
            f"quantization cannot be combined with {name}, which takes tokens from layers that are quantised already"
        )
    if spec.residual < crop_slack:
        raise ValueError(
            f"quantization keeps {spec.residual} tokens in full precision (residual), but crop_slack is {crop_slack}: "
            "what is quantised cannot be taken back. Lower crop_slack, or raise residual"
        )


def _shape_of(config: PreTrainedConfig) -> str:
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, {config.num_key_value_heads} KV "
        f"heads of {config.head_dim}, sink_size {config.sink_size}, recent_size {config.recent_size}, "
        f"share {config.share}"
    )
