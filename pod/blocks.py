"""Layer blocks: which neighbouring layers of a KV head share the attention scores of distant tokens.

A block is a run of consecutive layers of one KV head; its lowest layer, the anchor, holds the keys of distant tokens
for all of them. Blocks are found from a similarity of attention scores by the greedy grouping of PoD (arXiv 2412.02252,
Algorithm 1), or by the partition that is best for a saving, by that similarity or by what sharing was measured to cost;
per KV head because a key can only be dropped when every query head that reads it shares. The search is in
`pod.grouping`; here is what was found: the table, its file, and the fields of a config that hold it.

A third kind of KV head streams (DuoAttention, arXiv 2410.10819): it attends to sinks and recent tokens alone, so it
keeps no distant key and no distant value. Its anchor is `STREAMS`: there is none.

    blocks = LayerBlocks.for_saving(similarity, kv_saving=0.35)    # similarity: [H_kv, L, L]
    blocks = LayerBlocks.for_saving(similarity, kv_saving=0.35, method="sum")
    blocks = LayerBlocks.for_damage(costs, kv_saving=0.35)         # costs: [H_kv, L, L], of pod.similarity
    blocks = LayerBlocks.dense(32, 8).streaming(scores, 0.5)       # scores: [L, H_kv], of `pod.heads.head_scores`
    blocks.save("blocks.json")

Shapes: L layers, H_kv KV heads.
"""

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pod import grouping
from pod.extras import require
from pod.files import check_sum, read_json, replacing, with_sum, write_text
from pod.grouping import STREAMS

FORMAT = "pod-layer-blocks"
FORMAT_VERSION = 1
STREAMING_VERSION = 2  # of files with heads that stream, which version 1 could not read
SHARE_KINDS = ("scores", "keys", "kv", "window")
# Fields of a config by which its blocks become layers and caches: fixed from then on.
FIXED = ("anchors", "sink_size", "recent_size", "share", "num_hidden_layers", "num_attention_heads")
FIXED += ("num_key_value_heads", "head_dim")


Unit = tuple[int, int]  # a block of one KV head: its anchor layer, the head


@dataclass(frozen=True)
class Layout:
    """Who shares with whom, as integers; a layer's heads are stored with its anchors first, each kind in one piece.

    Attributes:
        anchors: `[L][H_kv]` the anchor layer of each.
        orders: [L] the KV heads that have slots, in storage order: all that do not stream.
        streams: [L] the KV heads that stream.
        num_anchors: [L] how many of them, the first ones, are anchors.
        score_heads: [L] the anchors whose distant scores a later layer reads.
        ends: `[L][H_kv]` whether the block of the head ends in this layer, as of every head that streams.
        last_layers: of each block.
        sizes: layers of each block.
        units: [L] the blocks of a layer's heads that have slots, in storage order.
        places: of each block, where in its anchor layer's storage order it is.
    """

    anchors: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    streams: tuple[tuple[int, ...], ...]
    num_anchors: tuple[int, ...]
    score_heads: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[bool, ...], ...]
    last_layers: dict[Unit, int]
    sizes: dict[Unit, int]
    units: tuple[tuple[Unit, ...], ...]
    places: dict[Unit, int]

    @property
    def borders(self) -> list[int]:
        """The layers, but the last, in which the blocks of all KV heads end: what follows may lie on another device."""
        return [layer for layer, ends in enumerate(self.ends[:-1]) if all(ends)]

    def column(self, head: int) -> list[int]:
        """The anchors of a KV head's layers, from the lowest up, those left out in which it streams."""
        return [row[head] for row in self.anchors if row[head] != STREAMS]

    @classmethod
    def of(cls, anchors: list[list[int]]) -> "Layout":
        """The layout of a table of anchors `[L][H_kv]`."""
        heads = range(len(anchors[0]))
        last_layers = {
            (anchor, head): layer
            for layer, row in enumerate(anchors)
            for head, anchor in enumerate(row)
            if anchor != STREAMS
        }
        sizes = {unit: last - unit[0] + 1 for unit, last in last_layers.items()}
        own = [[head for head in heads if row[head] == layer] for layer, row in enumerate(anchors)]
        shared = [[head for head in heads if 0 <= row[head] < layer] for layer, row in enumerate(anchors)]
        orders = tuple((*mine, *others) for mine, others in zip(own, shared, strict=True))
        return cls(
            tuple(map(tuple, anchors)),
            orders,
            tuple(tuple(head for head in heads if row[head] == STREAMS) for row in anchors),
            tuple(map(len, own)),
            tuple(tuple(head for head in mine if sizes[layer, head] > 1) for layer, mine in enumerate(own)),
            tuple(
                tuple(last_layers.get((anchor, head), layer) == layer for head, anchor in enumerate(row))
                for layer, row in enumerate(anchors)
            ),
            last_layers,
            sizes,
            tuple(tuple((row[head], head) for head in order) for row, order in zip(anchors, orders, strict=True)),
            {(layer, head): place for layer, mine in enumerate(own) for place, head in enumerate(mine)},
        )


@dataclass(frozen=True, eq=False, repr=False)
class LayerBlocks:
    """The blocks of a model: for every layer and KV head, the layer whose distant scores it uses.

    Two LayerBlocks are equal when their anchors are; metadata does not count. Do not write into `anchors`.

    Args:
        anchors: [L, H_kv] integers (a tensor or nested lists). `anchors[l, g] == l` says that layer l computes its own
            scores for KV head g, `STREAMS` (-1) that this head streams there; otherwise it is the lowest layer of the
            block that l belongs to. Kept as a copy, int64 on the CPU.
        metadata: anything JSON can hold that tells where the blocks come from (`threshold`, the model, ...).

    Raises:
        ValueError: not a [L, H_kv] table of integers, an anchor below -1 or above its layer, a gap (a block whose
            layers are not consecutive), or all heads stream. The message names layer, KV head and value.
    """

    anchors: Tensor
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchors", _validated_anchors(self.anchors))
        object.__setattr__(self, "metadata", dict(self.metadata))

    # Construction

    @classmethod
    def from_similarity(
        cls, similarity: Tensor, threshold: float = 0.5, streaming: Tensor | None = None
    ) -> "LayerBlocks":
        """Group layers greedily: PoD's Algorithm 1, for every KV head apart.

        From the lowest layer up, a layer joins the current block when its similarity to **all** the block's members is
        at least the threshold, and opens a new block otherwise.

        Args:
            similarity: [H_kv, L, L], within [0, 1], 1 for identical attention scores, symmetric. Compared in float64;
                of two entries that differ by rounding, [higher layer, lower layer] counts.
            threshold: the paper's delta, in [0, 1].
            streaming: [L, H_kv] bool, the heads that stream, which no block has; None: none does.

        Raises:
            ValueError: the similarity is not such a tensor, or the threshold is outside [0, 1].
        """
        return cls(*grouping.by_threshold(similarity, threshold, streaming))

    @classmethod
    def for_saving(
        cls, similarity: Tensor, kv_saving: float = 0.35, method: str = "greedy", streaming: Tensor | None = None
    ) -> "LayerBlocks":
        """Group layers so that at least the wanted share of the KV cache is saved.

        greedy: Algorithm 1 with the largest threshold that saves enough. Greedy grouping only changes at the
        similarities themselves, so these are all the thresholds there are, and every one is tried, in one pass. A part
        of a block would be a block too, so greedy blocks are the fewest and a lower threshold never saves less: no
        other threshold comes closer to what is wanted from above. It often saves more, as several layers may join at
        one threshold.

        sum, worst: of all partitions of all heads that share exactly as many layers as the wanted saving takes, the one
        whose sharing layers are most like **their anchors**, the only layers whose scores they are given: `sum`
        maximises the summed similarity of each to its anchor, `worst` the smallest of these, and among partitions
        equal in that the sum. The heads' tables (best sum for each number of shared layers) are put together by dynamic
        programming over the heads, so the result is exact, not a relaxation's.

        Args:
            similarity: [H_kv, L, L], as in `from_similarity`.
            kv_saving: the wanted share of the dense cache's bytes, in [0, 0.5]; 0 gives `dense`. With heads that
                stream, of the bytes of the others.
            method: "greedy", "sum" or "worst".
            streaming: as in `from_similarity`.

        Raises:
            ValueError: the similarity is not valid, the method is unknown, `kv_saving` is outside [0, 0.5], or it is
                more than a model of L layers can give, (L - 1) / 2L, or less where heads stream. The message names that
                maximum.
        """
        return cls(*grouping.by_saving(similarity, kv_saving, method, streaming))

    @classmethod
    def for_damage(cls, costs: Tensor, kv_saving: float = 0.35, streaming: Tensor | None = None) -> "LayerBlocks":
        """The cheapest blocks that save the wanted share of the KV cache, by what sharing was measured to cost.

        Of all partitions of all heads that share exactly as many layers as the saving takes, the one whose summed cost
        is least, a block costing what its layers cost with the block's anchor. As with `for_saving`'s `sum`, dynamic
        programming over the partitions of each head and then over the heads finds it; nothing is relaxed.

        Args:
            costs: [H_kv, L, L], from `pod.similarity.sharing_damage`: entry [g, a, l] is what it costs KV head g of
                layer l to take its distant scores from layer a < l, at least 0; inf forbids it. Others are not read.
            kv_saving, streaming: as in `for_saving`.

        Raises:
            ValueError: `costs` is not such a tensor, `kv_saving` is outside [0, 0.5], or it is more than a model of L
                layers, or these costs, can give. The message names that maximum.
        """
        return cls(*grouping.by_damage(costs, kv_saving, streaming))

    @classmethod
    def dense(cls, num_layers: int, num_kv_heads: int) -> "LayerBlocks":
        """Blocks of one layer: nothing is shared, the model is the dense one.

        Raises:
            ValueError: a number below 1.
        """
        if num_layers < 1 or num_kv_heads < 1:
            raise ValueError(f"num_layers and num_kv_heads must be at least 1, got {num_layers} and {num_kv_heads}")
        return cls(torch.arange(num_layers, device="cpu")[:, None].expand(num_layers, num_kv_heads))

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, size: int) -> "LayerBlocks":
        """Blocks of `size` layers each, from the lowest layer up, the same for every KV head: nothing is measured.

        With `share="kv"` and size 2 this is cross-layer attention as published (arXiv 2405.12981). Where `size` does
        not divide the layers, the last block is shorter.

        Raises:
            ValueError: a number below 1, or more layers in a block than there are.
        """
        if not 1 <= size <= num_layers:
            raise ValueError(f"a block has at least 1 and at most all of the {num_layers} layers, got size {size}")
        layers = cls.dense(num_layers, num_kv_heads).anchors
        return cls(layers - layers % size, {"size": size})

    def streaming(self, scores: Tensor, share: float) -> "LayerBlocks":
        """The same blocks, of which those that need the distant past least stream.

        A block streams in all its layers, and needs what the neediest of them does. DuoAttention takes the heads below
        the `share` quantile of the scores and breaks ties by noise; of equal ones, here the lower layer streams, then
        the lower head.

        Args:
            scores: [L, H_kv], higher where a head needs distant tokens more.
            share: of the layers' KV heads, in [0, 1), at most so many stream: whole blocks, the neediest last.

        Raises:
            ValueError: the scores have another shape or are not finite, the share is outside [0, 1), or heads stream
                already.
        """
        scores = torch.as_tensor(scores).detach().to("cpu", torch.float64)
        if scores.shape != self.anchors.shape or not scores.isfinite().all():
            raise ValueError(
                f"scores must be finite and [layers, kv_heads] = {list(self.anchors.shape)}, got {list(scores.shape)}"
            )
        if not 0 <= share < 1:
            raise ValueError(
                f"the share of heads that stream must be in [0, 1), got {share:g}; all of them are window attention, "
                "share='window'"
            )
        layout = self.layout()
        if any(layout.streams):
            raise ValueError("these blocks have heads that stream already: choose among the heads of blocks without")
        needs = {unit: float(scores[unit[0] : last + 1, unit[1]].max()) for unit, last in layout.last_layers.items()}
        left, anchors = math.ceil(share * (scores.numel() - 1)), self.anchors.clone()
        for anchor, head in sorted(needs, key=lambda unit: (needs[unit], unit)):
            left -= layout.sizes[anchor, head]
            if left < 0:
                break
            anchors[anchor : layout.last_layers[anchor, head] + 1, head] = STREAMS
        return LayerBlocks(anchors, {**self.metadata, "streaming": share})

    # What the blocks say

    def layout(self) -> Layout:
        """Who shares with whom, and in which order heads are stored; computed once."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        return Layout.of(self.anchors.tolist())

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.anchors.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H_kv, the number of KV heads."""
        return self.anchors.shape[1]

    @property
    def is_anchor(self) -> Tensor:
        """[L, H_kv] bool: whether the layer stores all keys of this KV head."""
        return self.anchors == torch.arange(self.num_layers, device="cpu")[:, None]

    @property
    def is_streaming(self) -> Tensor:
        """[L, H_kv] bool: whether this KV head streams there: it stores no distant key and no distant value."""
        return self.anchors == STREAMS

    @property
    def is_dense(self) -> bool:
        """Whether every block is one layer, and no head streams."""
        return bool(self.is_anchor.all())

    @property
    def num_blocks(self) -> int:
        """The number of blocks, summed over KV heads."""
        return int(self.is_anchor.sum())

    @property
    def sizes(self) -> list[list[int]]:
        """For every KV head the number of layers of each block, from the lowest layer up.

        H_kv lists that sum to L, but for the layers in which the head streams.
        """
        kept = (head[head != STREAMS] for head in self.anchors.unbind(1))
        return [head.unique_consecutive(return_counts=True)[1].tolist() for head in kept]

    @property
    def kv_saving(self) -> float:
        """The share of the dense KV cache's bytes that is not stored as length grows, in [0, 0.5); more with streaming.

        (shared + 2 * streaming) / (2 * L * H_kv), where shared counts the layers and KV heads that share: their keys
        are dropped, all values stay; those that stream drop both. Where values are dropped too (`share="kv"`) it is
        twice that: `config.kv_saving`.
        """
        dropped = self.anchors.numel() - self.num_blocks + int(self.is_streaming.sum())
        return dropped / (2 * self.anchors.numel())

    def check(self, num_layers: int, num_kv_heads: int) -> None:
        """Check that the blocks are made for a model of this shape.

        Raises:
            ValueError: they are for another one; both shapes are named.
        """
        if (num_layers, num_kv_heads) != (self.num_layers, self.num_kv_heads):
            raise ValueError(
                f"blocks for another model: they have {self.num_layers} layers x {self.num_kv_heads} KV heads, "
                f"the model has {num_layers} layers x {num_kv_heads} KV heads; analyse this model to get its own"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerBlocks):
            return NotImplemented
        return torch.equal(self.anchors, other.anchors)

    def __hash__(self) -> int:
        return hash((self.num_kv_heads, tuple(self.anchors.flatten().tolist())))

    def __repr__(self) -> str:
        streams = int(self.is_streaming.sum())
        return (
            f"LayerBlocks(layers={self.num_layers}, kv_heads={self.num_kv_heads}, blocks={self.num_blocks}, "
            f"{f'streaming={streams}, ' if streams else ''}kv_saving={self.kv_saving:.3f})"
        )

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the blocks as JSON, one line per layer; folders are made as needed.

        The file is written aside and renamed, so that a reader never meets half of it. `kv_saving` is in it for people
        to read, and lets `load` notice an anchor that was changed; a checksum, whatever else was. With heads that
        stream the file has a version that code from before them refuses.

        Raises:
            TypeError: the metadata holds something that JSON cannot.
        """
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.anchors.tolist())
        head = {
            "format": FORMAT,
            "version": STREAMING_VERSION if self.is_streaming.any() else FORMAT_VERSION,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "kv_saving": self.kv_saving,
            "metadata": self.metadata,
        }
        lines = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        text = f'{{\n{lines}  "anchors": [\n{rows}\n  ]\n}}\n'

        write_text(path, with_sum(text, '  "sha256 of the other lines": "{}",\n'))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LayerBlocks":
        """Read a file written by `save`, or by hand in the same form.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not JSON, not a blocks file of this version, a field is missing, or the anchors are not valid.
                The message names the path and what is wrong.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such blocks file; LayerBlocks.save writes one")
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path}: a blocks file is a JSON object, this is a {type(content).__name__}")
        for name in ("format", "version", "num_layers", "num_kv_heads", "anchors"):
            if name not in content:
                raise ValueError(f"{path}: the field {name!r} is missing")
        if content["format"] != FORMAT:
            raise ValueError(f"{path}: format is {content['format']!r}, expected {FORMAT!r}")
        if content["version"] not in (FORMAT_VERSION, STREAMING_VERSION):
            raise ValueError(
                f"{path}: version is {content['version']!r}, this library reads versions {FORMAT_VERSION} and "
                f"{STREAMING_VERSION}"
            )
        metadata = content.get("metadata", {})
        if not isinstance(metadata, dict):
            raise ValueError(f"{path}: metadata must be a JSON object, got {metadata!r}")
        try:
            blocks = cls(content["anchors"], metadata)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if (blocks.num_layers, blocks.num_kv_heads) != (content["num_layers"], content["num_kv_heads"]):
            raise ValueError(
                f"{path}: anchors are {blocks.num_layers} layers x {blocks.num_kv_heads} KV heads, but the file says "
                f"num_layers={content['num_layers']!r}, num_kv_heads={content['num_kv_heads']!r}"
            )
        if content.get("kv_saving", blocks.kv_saving) != blocks.kv_saving:
            raise ValueError(
                f"{path}: the anchors save {blocks.kv_saving}, but the file says kv_saving={content['kv_saving']!r}: "
                "damaged, or written by hand; leave that line out there"
            )
        check_sum(path, path.read_text(encoding="utf-8"))
        return blocks

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the blocks into a PNG: layers across, KV heads down, a colour for each block of more than one layer.

        Grey is a block of one layer, white a head that streams; a dot marks the anchor of a larger block. Folders are
        made as needed.

        Raises:
            ImportError: matplotlib is not installed.
        """
        require("train", "matplotlib", what="a picture of the blocks")
        # Imported here: the model needs blocks, not pictures. A bare Figure draws with Agg and leaves the user's
        # choice of matplotlib backend alone.
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        palette = [colormaps["tab10"](index)[:3] for index in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # 7 is grey
        picture = torch.full((self.num_kv_heads, self.num_layers, 3), 0.88, device="cpu")
        dots: list[tuple[int, int]] = []
        picture[self.is_streaming.t()] = 1.0
        for (layer, head), size in sorted(self.layout().sizes.items(), key=lambda unit: unit[0][::-1]):
            if size > 1:
                # Neighbours differ because colours are taken in turn, over all heads.
                colour = palette[len(dots) % len(palette)]
                picture[head, layer : layer + size] = torch.tensor(colour, device="cpu")
                dots.append((layer, head))

        width = min(max(0.28 * self.num_layers + 1.2, 6.0), 24.0)
        height = min(max(0.28 * self.num_kv_heads + 1.6, 2.4), 16.0)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(picture.numpy(), aspect="auto", interpolation="nearest")
        axes.set_xticks([layer - 0.5 for layer in range(1, self.num_layers)], minor=True)
        axes.set_yticks([head - 0.5 for head in range(1, self.num_kv_heads)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        if dots:
            axes.scatter(*zip(*dots, strict=True), s=14, color="black", zorder=3)
        streams = "; white: streams" if self.is_streaming.any() else ""
        axes.set_xlabel(f"layer (dot: anchor; grey: block of one layer{streams})")
        axes.set_ylabel("KV head")
        axes.set_title(f"{self.num_blocks} blocks, kv_saving {100 * self.kv_saving:.1f} %")
        with replacing(path) as aside:
            figure.savefig(aside, format="png", dpi=120)


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
        for name, was, now in zip(FIXED, made_by, self.fixed(), strict=True):
            if now != was:
                raise ValueError(
                    f"config.{name} was changed in place: {what} was made with {was}, and it is {now} now. Set it "
                    "back, or make another: pod.convert(model, blocks, sink_size, recent_size, share), which shares "
                    "the weights, and pod.PodCache(model.config)"
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


def whole_number(name: str, value: Any, what: str, least: int | None = None) -> int:
    """The value as an integer.

    Args:
        name, what: which argument it is, and what that must be, for the error.
        least: the smallest it may be; None: any.

    Raises:
        ValueError: it is none, or too small.
    """
    number = _integer(value)
    if number is None or (least is not None and number < least):
        raise ValueError(f"{name} must be {what}, a whole number; got {value!r}")
    return number


def _integer(value: Any) -> int | None:
    """The value as an integer; None of what is none, truth values among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _validated_anchors(anchors: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Check a table of anchors and return a copy of it as [L, H_kv] int64 on the CPU."""
    if isinstance(anchors, Tensor):
        if anchors.is_floating_point() or anchors.is_complex() or anchors.dtype == torch.bool:
            raise ValueError(f"anchors must be integers, got a tensor of {anchors.dtype}")
        if anchors.dim() != 2 or anchors.numel() == 0:
            raise ValueError(f"anchors must be [layers, kv_heads], got a tensor of shape {list(anchors.shape)}")
        anchors = anchors.tolist()
    rows = [_validated_row(layer, row) for layer, row in enumerate(_items(anchors, "anchors"))]
    if not rows or not rows[0]:
        raise ValueError("anchors must be [layers, kv_heads], got an empty table")
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"anchors must be [layers, kv_heads]: layer {layer} has {len(row)} KV heads, layer 0 has {len(rows[0])}"
            )
    for layer, row in enumerate(rows):
        for head, anchor in enumerate(row):
            where = f"layer {layer}, KV head {head}"
            if anchor == STREAMS:
                continue
            if anchor < 0:
                raise ValueError(f"{where}: negative anchor {anchor}; {STREAMS} alone means something: it streams")
            if anchor > layer:
                raise ValueError(f"{where}: anchor {anchor} is above its layer; the anchor is a block's lowest layer")
            # With this for every layer, an anchor is its own anchor too.
            if anchor != layer and anchor != rows[layer - 1][head]:
                below = rows[layer - 1][head]
                raise ValueError(
                    f"{where}: anchor {anchor} leaves a gap; a block's layers are consecutive, so it is {below}, "
                    f"the anchor of the layer below, or {layer}, a new block"
                )
    if all(anchor == STREAMS for row in rows for anchor in row):
        raise ValueError("all heads stream: that is window attention, share='window' with blocks of one layer")
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _items(value: Any, name: str) -> list[Any]:
    """A list of what is in `value`, which must be a list or alike."""
    if isinstance(value, (str, bytes, Mapping)):
        raise ValueError(f"{name} must be a list, got {value!r}")
    try:
        return list(value)
    except TypeError:
        raise ValueError(f"{name} must be a list, got {value!r}") from None


def _validated_row(layer: int, row: Any) -> list[int]:
    """The anchors of one layer as Python integers."""
    values = _items(row, f"anchors: layer {layer}")
    numbers = [_integer(value) for value in values]
    if None in numbers:
        head = numbers.index(None)
        raise ValueError(f"layer {layer}, KV head {head}: the anchor must be an integer, got {values[head]!r}")
    return numbers
