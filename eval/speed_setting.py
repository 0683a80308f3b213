"""On what and how large speed is measured: random models and states, and the backends that take turns."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from dense_attention import dense_attentions
from timing import Measured, Works, by
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod_kernels.dispatch import forced

LAYERS, KV_HEADS = 8, 8
DENSE, STOCK = "blocks of one layer", "DynamicCache"
FUSED = ", fused"  # what a table adds to a name where the fused kernels run


@dataclass(frozen=True)
class Setting:
    """On what and how large everything is measured.

    Attributes:
        device, dtype: of all tensors.
        rounds: timed rounds.
        most_seconds: of one measurement, after which no further round begins; None for all rounds.
        ckpt, blocks: the real model of the suite "cpu", and the blocks file that it is converted by.
        has_kernels: on a GPU, the fused kernels run too, and cuDNN's in the composed backend.
        recent: recent tokens of the PoD model; the sinks come on top.
        eviction: methods after a prompt.
        shape: of the model.
        sinks: of the PoD model, and of cascades.
        batch: rows; None chooses by the suite and the length.
    """

    device: str
    dtype: torch.dtype
    rounds: int
    recent: int
    eviction: tuple[str, ...]
    shape: dict[str, int]
    sinks: int = 16
    batch: int | None = None
    most_seconds: float | None = None
    has_kernels: bool = True
    ckpt: str = "checkpoints/smollm2-135m"
    blocks: str = "checkpoints/smollm2-pod-35/blocks.json"

    @property
    def heads(self) -> int:
        return self.shape["num_attention_heads"]

    @property
    def head_dim(self) -> int:
        return self.shape["head_dim"]

    def random(self, *sizes: int, **options) -> Tensor:
        """Normal random numbers. Never zeros: they hide wrong indices and are faster to multiply."""
        return torch.randn(*sizes, device=self.device, dtype=self.dtype, **options)

    def states(self, batch: int, count: int) -> list[Tensor]:
        """Random queries [B, H, T, D], keys and values [B, H_kv, T, D] of `count` tokens."""
        return [self.random(batch, heads, count, self.head_dim) for heads in (self.heads, KV_HEADS, KV_HEADS)]

    @property
    def backends(self) -> dict[str, str]:
        """Backends of PoD that the device might have, by what a table adds to a name."""
        return {"": "composed", FUSED: "fused"} if self.device == "cuda" and self.has_kernels else {"": "composed"}

    def room(self, length: int) -> int:
        """Tokens of a cache that holds `length` and is decoded from in every round."""
        return length + self.rounds + 5  # and before: two first runs, one that looks, a capture, a replay

    def measured(
        self,
        works: Works,
        label: str,
        pairs: list[tuple[str, str]],
        graphs: Collection[str] = (),
        first: Works | None = None,
        notes: Iterable[str] = (),
        **known: Any,
    ) -> Measured:
        """`timing.measured` with these rounds, on this device; its notes come before `notes`.

        Args:
            works, label, graphs, first: as there.
            pairs, notes, known: of `Measured`.
        """
        limits = (self.rounds, self.device, label, self.most_seconds)
        seconds, left_out, found = timing.measured(works, *limits, graphs, first)
        return Measured(seconds, pairs, left_out=left_out, notes=[*found, *notes], **known)


def by_backends(
    setting: Setting, name: str, work: Callable[..., object], caches: dict[str, Cache] | None = None
) -> Works:
    """The work by each backend, under its name in a table; on its own cache of `for_backends`, where it needs one."""
    return {
        name + suffix: by(backend, work if caches is None else partial(work, caches[suffix]))
        for suffix, backend in setting.backends.items()
    }


def for_backends(setting: Setting, make: Callable[[], Cache]) -> dict[str, Cache]:
    """A cache for each backend, by what a table adds to a name: the one that attends first to a cache keeps it."""
    caches = {}
    for suffix, backend in setting.backends.items():
        with forced(backend):
            caches[suffix] = make()
    return caches


def dense_decoding(setting: Setting, q: Tensor, kv_heads: int, length: int, layers: int) -> tuple[Works, int]:
    """The dense attentions at hand from q [B, H, 1, D] to random keys of `length` tokens a layer, and those' bytes."""
    stored = [setting.random(2, len(q), kv_heads, length, q.shape[-1]) for _ in range(layers)]

    def work(run: Callable[..., Tensor]) -> None:
        for k, v in stored:
            run(q, k, v)

    works = {name: partial(work, run) for name, run in dense_attentions(setting.device, False).items()}
    return works, sum(one.nbytes for one in stored)


def fused(works: Works) -> list[str]:
    """The works by the fused kernels, which count on the device: what torch's operations read, the host has counted."""
    return [name for name in works if name.endswith(FUSED)]


def shared_blocks(layers: int = LAYERS) -> pod.LayerBlocks:
    """Blocks that share 70 % of the keys: of every 8 KV heads, 5 have an anchor every 4 layers and 3 one every 3."""
    steps = [3 if head % 8 in (1, 4, 6) else 4 for head in range(KV_HEADS)]
    return pod.LayerBlocks([[layer - layer % step for step in steps] for layer in range(layers)])


def three_ways(
    stock: PreTrainedModel, blocks: pod.LayerBlocks, sink_size: int, recent_size: int
) -> dict[str, PreTrainedModel]:
    """The same weights as a PoD model, as one with blocks of one layer, and as transformers' own."""
    kinds = {"PoD": blocks, DENSE: pod.LayerBlocks.dense(*blocks.anchors.shape)}
    return {name: pod.convert(stock, kind, sink_size, recent_size) for name, kind in kinds.items()} | {STOCK: stock}


def random_models(
    setting: Setting, length: int, layers: int = LAYERS, is_whole: bool = True
) -> dict[str, PreTrainedModel]:
    """The same random weights as a PoD model, as one with blocks of one layer, and as transformers' own.

    Args:
        length: the longest position, and as many tokens again to decode.
        layers: of the models; PoD's blocks begin with the first.
        is_whole: with the setting's widths. Else only heads are right, and the models say shapes to caches.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        num_hidden_layers=layers,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2 * length,
        **(setting.shape if is_whole else setting.shape | {"hidden_size": setting.heads, "intermediate_size": 16}),
    )
    with torch.device(setting.device):
        stock = LlamaForCausalLM(config).to(setting.dtype).eval()
    return three_ways(stock, shared_blocks(layers), setting.sinks, setting.recent)


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """[batch, length] token ids, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


SETTINGS = {
    "cpu": Setting(
        device="cpu",
        dtype=torch.float32,
        rounds=9,
        recent=240,
        eviction=("snapkv:budget=1024",),
        shape={"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 16},
    ),
    "cuda": Setting(
        device="cuda",
        dtype=torch.bfloat16,
        rounds=15,
        most_seconds=5,
        recent=4080,
        eviction=("snapkv:budget=1024", "cake:budget=1024"),
        shape={"hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128, "num_attention_heads": 32},
    ),
}
