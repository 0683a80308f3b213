"""Speed as ratios inside one run, on the device at hand.

    python eval/speed.py --suite decode --lengths 8192,16384
    python eval/speed.py --suite prefill --lengths 4096
    python eval/speed.py --suite all

A random model of 8 layers with 70 % of the keys shared; on a GPU in Llama-3-8B's shape with a window of 4,096 tokens:

    attention   shared-score attention, forward and with backward, against the dense causal attentions at hand
    decode      one token: its attention alone, against dense attention to as many keys; with early skip; after
                eviction; and the whole step: PoD against the same cache with blocks of one layer, and against
                transformers' DynamicCache
    cache       storing one token in all layers (keys, values, and what a method keeps to decide), without attention:
                into the cache's own storage against concatenation, as DynamicCache does it
    prefill     the prompt by the same three; and a cascade's strides in one layer against causal attention to all
    end-to-end  `generate`: a prompt and 32 new tokens

Each by torch's operations and, on a GPU, by the fused kernels. The works take turns, round after round, and a ratio is
the median over the rounds of one's time by the other's in the same round: a busy machine slows all alike. On a GPU,
time is between two CUDA events, the L2 cache emptied before; decoding and storing are replays of a CUDA graph, and the
page says where they could not be captured. Where a work's operations or bytes are known, its rate is printed too, with
its share of what a large product or copy reached in the same run. Where only attention or storing is measured the cache
is filled with random keys and values, without running the model.

Writes speed-SUITE.json after every measurement, then speed.md, and prints it; at its end are the lines of
`pod_kernels.winners` and the goals. What fails is said there, the rest is measured, and the exit status is 1. `--suite
all` runs each suite in a process of its own: an error that leaves a GPU unusable costs one suite.
"""

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod.evaluation import command, report, timing
from pod.evaluation.filled_cache import attend, fill, new_cache, received, write
from pod.evaluation.timing import BYTES, OPERATIONS, SCALE, Measured, Works, by
from pod.exit_status import exit_status
from pod.files import check_writable
from pod_kernels import shared_score_attention, winners

LAYERS, KV_HEADS = 8, 8
CASCADES = (2048, 8192)  # budgets; at most half of the tokens stored before, so that they are full
# One update of a cache is too short to be timed, and a cascade's differ from token to token.
UPDATES = 16
UPDATED_BYTES = 2**30  # of the dense cache that a GPU updates
NEW_TOKENS = 32
SHORTEST = 64  # tokens
TAU = 0.7
DENSE, STOCK = "blocks of one layer", "DynamicCache"
FUSED = ", fused"  # what a table adds to a name where the fused kernels run
FLASH = "SDPA flash"
DEVICE_ERROR = re.compile(r"CUDA error|Error \[CUDA\]")  # torch's and Triton's words; not for want of memory
MOST_SECONDS = 240  # of one suite's process on a GPU
OTHERS = (FLASH, "SDPA cuDNN", "FlexAttention", "flash-attn")  # dense attentions that a device may lack


@dataclass(frozen=True)
class Setting:
    """On what and how large everything is measured.

    Attributes:
        device, dtype: of all tensors.
        rounds: timed rounds.
        most_seconds: of one measurement, after which no further round begins; None for all rounds.
        has_fused: on a GPU, the fused kernels run too.
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
    has_fused: bool = True

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
        return {"": "composed", FUSED: "fused"} if self.device == "cuda" and self.has_fused else {"": "composed"}

    def room(self, length: int) -> int:
        """Tokens of a cache that holds `length` and is decoded from by every backend."""
        return length + len(self.backends) * (self.rounds + 4)  # the first run, one that looks, a capture, a replay

    def measured(self, works: Works, label: str, graphs: Any = ()) -> tuple:
        """`timing.measured` with these rounds, on this device."""
        return timing.measured(works, self.rounds, self.device, label, self.most_seconds, graphs)


def by_backends(setting: Setting, name: str, work: Callable[[], object]) -> Works:
    """The work by each backend, under its name in a table."""
    return {name + suffix: by(backend, work) for suffix, backend in setting.backends.items()}


def shared_blocks(layers: int = LAYERS) -> pod.LayerBlocks:
    """Blocks that share 70 % of the keys: of every 8 KV heads, 5 have an anchor every 4 layers and 3 one every 3."""
    steps = [3 if head % 8 in (1, 4, 6) else 4 for head in range(KV_HEADS)]
    return pod.LayerBlocks([[layer - layer % step for step in steps] for layer in range(layers)])


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
    return {
        "PoD": pod.convert(stock, shared_blocks(layers), setting.sinks, setting.recent),
        DENSE: pod.convert(stock, pod.LayerBlocks.dense(layers, KV_HEADS), setting.sinks, setting.recent),
        STOCK: stock,
    }


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """[batch, length] token ids, the same at every call."""
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1)).to(model.device)


def is_causal_pair(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """FlexAttention's name for causal attention."""
    return query >= key


def causal_block_mask(length: int, device: str, block: int = 128) -> Any:
    """FlexAttention's causal mask, from its blocks: its own function looks at every pair, 16 GiB for 128K tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-length // block)
    place = torch.arange(count, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        torch.ones_like(place)[None, None],
        # In each row the diagonal block comes first, and the rest in any order.
        ((place[:, None] + place) % count).to(torch.int32)[None, None],
        place[None, None],
        place.expand(count, count).contiguous()[None, None],
        BLOCK_SIZE=block,
        mask_mod=is_causal_pair,
        seq_lengths=(length, length),
    )


def dense_attentions(device: str, is_causal: bool) -> dict[str, Callable[..., Tensor]]:
    """name -> (q, k, v) -> out: the dense attentions that this device might have.

    FlexAttention is left out of decoding, as every shape is compiled anew.
    """

    def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=is_causal).transpose(1, 2)

    kinds = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    flash, cudnn, flex, package = OTHERS
    found: dict[str, Callable[..., Tensor]] = {flash: partial(sdpa, kinds[0])}
    if device == "cuda":
        found |= {cudnn: partial(sdpa, kinds[1]), package: flash_attn}
    if device == "cuda" and is_causal:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # after a few shapes it would go on without compiling
        compiled, masks = torch.compile(flex_attention, dynamic=False), {}

        def run_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = q.shape[2]
            if length not in masks:
                masks[length] = causal_block_mask(length, device)
            return compiled(q, k, v, block_mask=masks[length], enable_gqa=True)

        found[flex] = run_flex
    return found


def _attention(setting: Setting, length: int, training: bool) -> Measured:
    batch = setting.batch or 1
    queries = (batch, setting.heads, length, setting.head_dim)
    keys = (batch, KV_HEADS, length, setting.head_dim)
    inputs = [setting.random(*size, requires_grad=training) for size in (queries, keys, keys, queries, keys)]
    grad = setting.random(*queries)

    def work(run: Callable[..., Tensor], used: int) -> None:
        tensors = inputs[:used]
        with torch.set_grad_enabled(training):
            out = run(*tensors)
        if training:
            torch.autograd.grad(out, tensors, grad)

    sizes = {"sink_size": setting.sinks, "recent_size": setting.recent}
    works = by_backends(setting, "PoD", partial(work, partial(shared_score_attention, **sizes), 5))
    ours = list(works)
    works |= {name: partial(work, run, 3) for name, run in dense_attentions(setting.device, True).items()}
    label = f"attention at {length}, {'forward and backward' if training else 'forward'}"
    seconds, left_out, notes = setting.measured(works, label)
    pairs = [(name, other) for name in ours for other in works if other not in ours]
    # Two products per pair forward, five backward; one of the two sources' logits for each pair.
    operations = (7 if training else 2) * 2 * setting.head_dim * batch * setting.heads * length * (length + 1) / 2
    return Measured(seconds, pairs, dict.fromkeys(works, (operations, OPERATIONS)), left_out, notes)


def attention_forward(setting: Setting, length: int) -> Measured:
    """Shared-score attention of a sample, all heads sharing, against dense causal attention."""
    return _attention(setting, length, training=False)


def attention_training(setting: Setting, length: int) -> Measured:
    """The same with its backward."""
    return _attention(setting, length, training=True)


def step(model: PreTrainedModel, cache: Cache, batch: int) -> Callable[[], object]:
    """One step of decoding."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    return lambda: model(token, past_key_values=cache)


def decoding_rows(setting: Setting, length: int) -> int:
    """Rows that decode together: on a GPU as many as have half a million tokens."""
    return setting.batch or (max(1, 2**19 // length) if setting.device == "cuda" else 1)


def filled(setting: Setting, model: PreTrainedModel, batch: int, length: int, **options: Any) -> pod.PodCache:
    """A cache that keeps every token and holds `length` random ones."""
    cache = pod.PodCache(model.config, setting.room(length), **options)
    fill(cache, model, batch, length)
    return cache


def decode(setting: Setting, length: int) -> Measured:
    """One token with `length` tokens in the cache."""
    works, batch, models = {}, decoding_rows(setting, length), random_models(setting, length)
    for name in ("PoD", DENSE):
        cache = filled(setting, models[name], batch, length)
        works |= by_backends(setting, name, step(models[name], cache, batch))
    graphs = list(works)
    cache = new_cache(models[STOCK], length)
    fill(cache, models[STOCK], batch, length)
    works[STOCK] = step(models[STOCK], cache, batch)
    seconds, left_out, notes = setting.measured(works, f"decode at {length}", graphs)
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, STOCK)]
    return Measured(seconds, pairs, left_out=left_out, notes=notes)


def decode_attention(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers, and nothing else, against dense attention to as many keys."""
    batch, models = decoding_rows(setting, length), random_models(setting, length, is_whole=False)
    new, works, amounts = setting.states(batch, 1), {}, {}
    for name in ("PoD", DENSE):
        cache = filled(setting, models[name], batch, length)
        mine = by_backends(setting, name, partial(attend, cache, models[name], *new))
        works |= mine
        amounts |= dict.fromkeys(mine, (cache.nbytes(), BYTES))
    stored = [setting.random(2, batch, KV_HEADS, length, setting.head_dim) for _ in range(LAYERS)]

    def dense(run: Callable[..., Tensor]) -> None:
        for k, v in stored:
            run(new[0], k, v)

    others = {name: partial(dense, run) for name, run in dense_attentions(setting.device, False).items()}
    works |= others
    amounts |= dict.fromkeys(others, (sum(one.nbytes for one in stored), BYTES))
    seconds, left_out, notes = setting.measured(works, f"decode attention at {length}", works)
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, *others)]
    return Measured(seconds, pairs, amounts, left_out, notes)


def decode_attention_skipping(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers with early skip, against the same without.

    The queries of every second KV head look at their own token alone, the others at all tokens alike.
    """
    batch, model = decoding_rows(setting, length), random_models(setting, length, is_whole=False)["PoD"]
    q, k, v = setting.states(batch, 1)
    looking = torch.nn.functional.normalize(setting.random(batch, KV_HEADS // 2, 1, setting.head_dim), dim=-1)
    root = setting.head_dim**0.5
    k[:, ::2] = looking * 40  # the logit, far above the logarithm of the tokens
    q.unflatten(1, (KV_HEADS, -1))[:, ::2] = looking[:, :, None] * root
    names, caches, works, amounts = ("PoD", f"PoD, tau={TAU}"), {}, {}, {}
    for name, tau in zip(names, (None, TAU), strict=True):
        caches[name] = filled(setting, model, batch, length, tau=tau)
        works |= by_backends(setting, name, partial(attend, caches[name], model, q, k, v))
    label = f"decode attention with tau at {length}"
    seconds, left_out, notes = setting.measured(works, label, works)
    stats, whole = caches[names[1]].stats, caches[names[0]].nbytes()
    unread = stats.unread_values / max(1, stats.distant_values)
    distant = max(0, length - setting.sinks - setting.recent) * batch * setting.head_dim * setting.dtype.itemsize
    shared = int((~model.config.blocks.is_anchor).sum())
    left = whole - unread * distant * shared
    for kind in setting.backends:
        amounts |= {names[0] + kind: (whole, BYTES), names[1] + kind: (left, BYTES)}
    notes.append(
        f"With tau = {TAU}, {stats.skipped / max(1, stats.decisions):.0%} of the query heads of shared scores skipped, "
        f"and {unread:.0%} of their distant values were not read: the bytes alone make {left / whole:.3g} of the time."
    )
    pairs = [(names[1] + kind, names[0] + kind) for kind in setting.backends]
    return Measured(seconds, pairs, amounts, left_out, notes, left / whole)


def decode_after_eviction(setting: Setting, length: int) -> Measured:
    """One token after a prompt of `length` tokens, most of them dropped, and after a quarter of it."""
    works: Works = {}
    batch, method = setting.batch or 1, setting.eviction[0]
    model = random_models(setting, length)["PoD"]
    names = [f"after {prompt:,}" for prompt in (length, length // 4)]
    for name, prompt in zip(names, (length, length // 4), strict=True):
        cache = pod.PodCache(model.config, setting.room(prompt), pod.eviction.parse(method))
        model(random_ids(model, batch, prompt), past_key_values=cache, logits_to_keep=1)
        works |= by_backends(setting, name, step(model, cache, batch))
    seconds, left_out, notes = setting.measured(works, f"{method} after {length}", works)
    pairs = [(names[0] + kind, names[1] + kind) for kind in setting.backends]
    return Measured(seconds, pairs, left_out=left_out, notes=notes)


def decode_attention_after_eviction(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers after a prompt of which most is dropped, against the full cache."""
    batch, model = decoding_rows(setting, length), random_models(setting, length, is_whole=False)["PoD"]
    prompt, new = setting.states(1, length), setting.states(batch, 1)
    works: Works = {}
    amounts = {}
    for method in (None, *setting.eviction):
        if method is None:
            cache = filled(setting, model, batch, length)
        else:
            cache = pod.PodCache(model.config, setting.room(length), pod.eviction.parse(method))
            attend(cache, model, *prompt)
            cache.batch_repeat_interleave(batch)  # rows alike, each with its own memory
        mine = by_backends(setting, method or "PoD", partial(attend, cache, model, *new))
        works |= mine
        amounts |= dict.fromkeys(mine, (cache.nbytes(), BYTES))
    del prompt
    seconds, left_out, notes = setting.measured(works, f"decode attention after {length}", works)
    pairs = [("PoD" + kind, method + kind) for method in setting.eviction for kind in setting.backends]
    return Measured(seconds, pairs, amounts, left_out, notes)


def prefill(setting: Setting, length: int) -> Measured:
    """A prompt of `length` tokens."""
    works, batch = {}, setting.batch or 1
    for name, model in random_models(setting, length).items():
        ids = random_ids(model, batch, length)

        def work(model=model, ids=ids) -> None:
            model(ids, past_key_values=new_cache(model, length), logits_to_keep=1)

        works |= by_backends(setting, name, work) if name == "PoD" else {name: by("composed", work)}
    seconds, left_out, notes = setting.measured(works, f"prefill of {length}")
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE, STOCK)]
    return Measured(seconds, pairs, left_out=left_out, notes=notes)


def cascade_prefill(setting: Setting, length: int) -> Measured:
    """A prompt's attention in one layer by a cascade's strides, against causal attention to all of it.

    The cache and the stride are the Cascade paper's for 1M tokens (16K and 4K), in proportion for shorter prompts.
    """
    batch = setting.batch or 1
    model = random_models(setting, length, layers=1, is_whole=False)[DENSE]
    budget, stride = (max(SHORTEST // 4, min(most, length // part)) for most, part in ((16_384, 16), (4096, 64)))
    states = setting.states(batch, length)

    def strides(tensors: list[Tensor]) -> None:
        cache = pod.PodCache(model.config, eviction=pod.eviction.Cascade(budget // 4 * 4, sinks=setting.sinks))
        with cache.prefill():
            for parts in zip(*(tensor.split(stride, dim=2) for tensor in tensors), strict=True):
                attend(cache, model, *parts)

    flash = dense_attentions(setting.device, True)[FLASH]
    name = f"cascade of {budget:,} in strides of {stride:,}"

    def works(tensors: list[Tensor]) -> Works:
        return by_backends(setting, name, partial(strides, tensors)) | {FLASH: partial(flash, *tensors)}

    # The first run, which is not counted, is of an eighth: 1M tokens take half a minute.
    good, left_out = timing.runnable(works([tensor[:, :, : length // 8] for tensor in states]))
    whole = {name: work for name, work in works(states).items() if name in good}
    label = f"cascade prefill of {length}"
    seconds = timing.interleaved(whole, setting.rounds, setting.device, label, setting.most_seconds)
    return Measured(seconds, [(FLASH, name + kind) for kind in setting.backends], left_out=left_out)


def _update(setting: Setting, length: int, layers: int) -> Measured:
    models = random_models(setting, length, layers, is_whole=False)
    row = 2 * layers * KV_HEADS * length * setting.head_dim * setting.dtype.itemsize
    batch = setting.batch or (max(1, UPDATED_BYTES // row) if setting.device == "cuda" else 1)
    room = length + UPDATES * (setting.room(0))
    caches = {"PodCache": (models["PoD"], new_cache(models["PoD"], room))}
    if layers > 1:
        caches["PodCache, blocks of one layer"] = models[DENSE], new_cache(models[DENSE], room)
    for budget in CASCADES:
        method = pod.eviction.Cascade(budget=min(budget, length // 8 * 4), sinks=setting.sinks)
        cache = pod.PodCache(models[DENSE].config, eviction=method)
        caches[f"cascade:budget={method.budget}"] = models[DENSE], cache
    concatenation = "concatenation"
    caches[concatenation] = models[STOCK], new_cache(models[STOCK], room)
    works = {}
    for name, (model, cache) in caches.items():
        fill(cache, model, batch, length)
        # A layer's new states, made beforehand as a model would have made them.
        states = setting.random(2, batch, KV_HEADS, 1, setting.head_dim)
        sums = received(cache, model, batch, 1)

        def work(model=model, cache=cache, states=states, sums=sums) -> None:
            for _ in range(UPDATES):
                write(cache, model, *states, sums)

        works |= {name: work} if name == concatenation else by_backends(setting, name, work)
    ours = [name for name in works if name != concatenation]
    seconds, left_out, notes = setting.measured(works, f"update at {length}, layers: {layers}", ours)
    notes.append(f"layers: {layers}, rows: {batch}; a dense cache of {batch * row / 2**30:.3g} GiB.")
    return Measured(seconds, [(concatenation, name) for name in ours], left_out=left_out, notes=notes)


def update(setting: Setting, length: int) -> Measured:
    """`UPDATES` tokens stored one by one after `length` tokens; on a GPU into a dense cache of 1 GiB."""
    return _update(setting, length, LAYERS)


def update_one_layer(setting: Setting, length: int) -> Measured:
    """The same in a model of one layer: as many bytes, and an eighth of the starts."""
    return _update(setting, length, 1)


def generation(setting: Setting, length: int) -> Measured:
    """`generate` with `NEW_TOKENS` new tokens, from the prompt on."""
    batch, works = setting.batch or 1, {}
    models = random_models(setting, length)

    def run(model: PreTrainedModel, method: str | None = None) -> None:
        kept, ids = None, random_ids(model, batch, length)
        if method is not None:
            kept = pod.PodCache(model.config, length + NEW_TOKENS, pod.eviction.parse(method))
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=kept,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )

    for name in ("PoD", DENSE):
        works |= by_backends(setting, name, partial(run, models[name]))
    for method in setting.eviction:
        works |= by_backends(setting, f"PoD, {method}", partial(run, models["PoD"], method))
    works[STOCK] = by("composed", partial(run, models[STOCK]))
    seconds, left_out, notes = setting.measured(works, f"generate after {length}")
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, STOCK)]
    pairs += [(f"PoD, {method}{kind}", STOCK) for method in setting.eviction for kind in setting.backends]
    return Measured(seconds, pairs, left_out=left_out, notes=notes)


# The most important first: a run may be cut off.
SUITES = {
    "attention": [attention_training, attention_forward],
    "decode": [
        decode_attention,
        decode_attention_skipping,
        decode_attention_after_eviction,
        decode,
        decode_after_eviction,
    ],
    "cache": [update, update_one_layer],
    "prefill": [cascade_prefill, prefill],
    "end-to-end": [generation],
}
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
LENGTHS = {
    "cpu": {"attention": [2048], "decode": [8192, 16_384], "prefill": [4096], "cache": [16_384], "end-to-end": [2048]},
    "cuda": {
        "attention": [8192, 32_768, 131_072],
        "decode": [32_768, 131_072],
        "cache": [16_384],
        "prefill": [32_768, 2**20],
        "end-to-end": [32_768],
    },
}
# Longer prompts do not fit into the whole model, or would take minutes.
LONGEST = {prefill: 131_072, decode_after_eviction: 32_768}


class Goal(NamedTuple):
    """What the design wants of a time.

    Attributes:
        text: what is measured against what.
        device, what, tokens: where it is measured.
        ours: pattern of the names of our works, by whichever backend; the best counts.
        others: the names of those they are compared with; the hardest to beat counts.
        most: ours by theirs, at most; None for what the bytes make of it.
        least: theirs by ours, at least; in the place of `most`.
    """

    text: str
    device: str
    what: Callable[[Setting, int], Measured]
    tokens: int
    ours: str
    others: tuple[str, ...]
    most: float | None = None
    least: float | None = None

    def reached(self, record: dict[str, Any]) -> float | None:
        """The number of this goal in a record of `Measured`; None where a side is missing."""
        seconds = record["seconds"]
        ours = [name for name in seconds if fnmatch(name.removesuffix(FUSED), self.ours)]
        others = [name for name in seconds if name in self.others]
        if not ours or not others:
            return None
        if self.least is None:
            return min(max(timing.ratio(seconds, name, other) for other in others) for name in ours)
        return max(min(timing.ratio(seconds, other, name) for other in others) for name in ours)


FULL = ("PoD", "PoD" + FUSED)
CONCATENATION = ("concatenation",)
GOALS = [
    *(
        Goal(f"training attention, {size}: throughput of the fastest dense", "cuda", attention_training, tokens, "PoD",
             OTHERS, least=0.95)
        for size, tokens in (("32K", 32_768), ("128K", 131_072))
    ),
    *(
        Goal(f"decode attention, {size}: time by dense flash decoding", "cuda", decode_attention, tokens, "PoD", OTHERS,
             most=most)
        for size, tokens, most in (("32K", 32_768, 0.76), ("128K", 131_072, 0.73))
    ),
    *(
        Goal(f"the same with tau = {TAU}, {size}: time by that without", "cuda", decode_attention_skipping, tokens,
             f"PoD, tau={TAU}", FULL)
        for size, tokens in (("32K", 32_768), ("128K", 131_072))
    ),
    *(
        Goal(f"decode attention after {name}, 1,024 of 128K: full cache by it", "cuda", decode_attention_after_eviction,
             131_072, f"{method}:*", FULL, least=10)
        for name, method in (("SnapKV", "snapkv"), ("CAKE", "cake"))
    ),
    *(
        Goal(f"storing a token, {name}, {size}: concatenation by it", device, what, 16_384, ours, CONCATENATION,
             least=100)
        for device, size, what in (
            ("cpu", "16K", update),
            ("cuda", "1 GiB in 8 layers", update),
            ("cuda", "1 GiB in one layer", update_one_layer),
        )
        for name, ours in (("ring", "PodCache"), ("cascade", "cascade:*"))
    ),
    Goal("prefill by a cascade, 1M, one layer: full flash by it", "cuda", cascade_prefill, 2**20, "cascade of *",
         (FLASH,), least=6.8),
]  # fmt: skip


def goals(suites: list[dict[str, Any]], kind: str) -> str:
    """What of the goals was reached, of those that these suites measure on this kind of device; else empty."""
    records = {(record["what"], record["tokens"]): record for facts in suites for record in facts["results"]}
    names = {run.__name__ for facts in suites for run in SUITES[facts["suite"]]}
    rows = []
    for goal in GOALS:
        record = records.get((goal.what.__name__, goal.tokens))
        if goal.device != kind or goal.what.__name__ not in names:
            continue
        reached = None if record is None else goal.reached(record)
        wanted = goal.most if goal.least is None else goal.least
        if wanted is None and record is not None:
            wanted = record["by_bytes"]
        sign = "<=" if goal.least is None else ">="
        rows.append(
            [
                goal.text,
                "not measured" if reached is None else f"{reached:.3g}",
                "the bytes'" if wanted is None else f"{sign} {wanted:.3g}",
            ]
        )
    return report.markdown_table(["goal", "reached", "goal's number"], rows) if rows else ""


def winner_lines(suites: list[dict[str, Any]], commit: str) -> str:
    """Lines of `pod_kernels.winners.WINNERS`, from the attentions that ran by both backends; empty without."""
    lines = {}
    for facts in suites:
        for record in facts["results"]:
            times = {
                backend: statistics.median(record["seconds"].get(f"PoD{suffix}", [float("nan")]))
                for suffix, backend in (("", "composed"), (FUSED, "fused"))
            }
            if facts["suite"] != "attention" or any(time != time for time in times.values()):
                continue
            shapes = winners.ShapeClass(
                facts["device"],
                getattr(torch, facts["dtype"]).itemsize,
                facts["head_dim"],
                max(reached for reached in winners.LENGTHS if reached <= record["tokens"]),
                record["what"] == attention_training.__name__,
            )
            lines[shapes] = winners.Winner(min(times, key=times.get), facts["date"], commit)
    return "\n".join(f"    {shapes!r}: {winner!r},".replace("'", '"') for shapes, winner in lines.items())


def run_suite(suite: str, lengths: list[int], setting: Setting, path: Path) -> dict[str, Any]:
    """Measure one suite; what is there is written after every measurement, so that a long run that is stopped has not
    been for nothing, and neither has one of which a part fails."""
    facts = {
        "suite": suite,
        "device": torch.cuda.get_device_properties(0).name if setting.device == "cuda" else setting.device,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "threads": torch.get_num_threads(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "head_dim": setting.head_dim,
        "batch": setting.batch,
        "shared_keys": 2 * shared_blocks().kv_saving,
        "ceilings": timing.ceilings(setting.device, setting.dtype, setting.rounds),
        "results": [],
        "failed": [],
    }
    for length in lengths:
        for run in SUITES[suite]:
            if length > LONGEST.get(run, length):
                continue
            where = f"{run.__name__} at {length:,}"
            try:
                if setting.device == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()
                with torch.no_grad():
                    found = run(setting, length)
            except Exception as error:
                facts["failed"].append(f"{where}: {timing.reason(error)}")
            else:
                facts["results"].append(found.record(run.__name__, length))
                # What a device may lack is no failure.
                broken = {name: why for name, why in found.left_out.items() if name not in OTHERS}
                facts["failed"] += [f"{where}, {name}: {why}" for name, why in broken.items()]
            report.write_json(path, facts)
    return facts


@exit_status
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], required=True)
    command.add_numbers(parser, "--lengths", None, "tokens, by the device")
    parser.add_argument("--batch", type=int, help="rows (1; where a GPU decodes, half a million tokens of them)")
    parser.add_argument("--rounds", type=int, help="timed rounds (9, on a GPU 15)")
    parser.add_argument("--device", choices=list(SETTINGS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--out", type=Path, default=command.default_folder("speed"), help="folder to write to")
    arguments = sys.argv[1:] if arguments is None else arguments
    parser.add_argument("--without-fused", action="store_true", help="leave the fused kernels out")
    options = parser.parse_args(arguments)
    check_writable(options.out)
    too_few = any(number is not None and number < 1 for number in (options.batch, options.rounds))
    if too_few or min(options.lengths or [SHORTEST]) < SHORTEST:
        raise ValueError(f"--batch and --rounds are at least 1, --lengths at least {SHORTEST}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here. Choose --device cpu, or a torch built for CUDA")
    broken: list[str] = []
    if options.suite == "all":
        done, broken = run_all(arguments, options.out, options.device)
    else:
        setting = SETTINGS[options.device]
        given = {
            "batch": options.batch,
            "rounds": options.rounds,
            "dtype": options.dtype and getattr(torch, options.dtype),
            "has_fused": not options.without_fused,
        }
        setting = replace(setting, **{name: value for name, value in given.items() if value is not None})
        lengths = options.lengths or LENGTHS[options.device][options.suite]
        done = [run_suite(options.suite, lengths, setting, results_file(options.out, options.suite))]
    text = page(done, options.device, broken)
    report.write(options.out / "speed.md", text + "\n")
    print(text)
    print(f"written: {options.out}/speed.md and speed-SUITE.json")
    return int(bool(broken) or any(facts["failed"] for facts in done))


def run_all(arguments: list[str], folder: Path, kind: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Each suite in a process of its own; their results, and which ended without or too early.

    A process that fails on a GPU so that nothing more can run there, or does not end, is followed by one without the
    fused kernels, which measures what is missing.

    Args:
        arguments: of this script.
        folder: for results; the page is written after every suite.
        kind: of the device.
    """
    done, broken = [], []
    for suite in SUITES:
        results_file(folder, suite).unlink(missing_ok=True)
    for suite in SUITES:
        found, ending = run_process(
            [*arguments, "--suite", suite], folder, suite, kind
        )  # of two suites the last counts
        is_unusable = found is None or any(DEVICE_ERROR.search(line) for line in found["failed"])
        if kind == "cuda" and (ending or is_unusable):
            broken += [f"{ending}, and was run again without the fused kernels"] if ending else []
            again, ending = run_process([*arguments, "--suite", suite, "--without-fused"], folder, suite, kind)
            if found is None or again is None:
                found = found or again
            else:
                known = {(record["what"], record["tokens"]) for record in found["results"]}
                new = [record for record in again["results"] if (record["what"], record["tokens"]) not in known]
                found["results"] += new
                found["failed"] += [f"without the fused kernels: {line}" for line in again["failed"]]
            if found is not None:
                report.write_json(results_file(folder, suite), found)
        done += [] if found is None else [found]
        broken += [ending] if ending else []
        report.write(folder / "speed.md", page(done, kind, broken) + "\n")
    return done, broken


def run_process(arguments: list[str], folder: Path, suite: str, kind: str) -> tuple[dict[str, Any] | None, str | None]:
    """One suite in a process: its results, None without, and how it ended where that is not as `main` does."""
    path = results_file(folder, suite)
    path.unlink(missing_ok=True)
    seconds = MOST_SECONDS if kind == "cuda" else None
    ending = None
    try:
        started = [sys.executable, __file__, *arguments]
        status = subprocess.run(started, stdout=subprocess.DEVNULL, timeout=seconds).returncode
        if status not in (0, 1) or not path.exists():
            ending = f"suite {suite}: ended with exit status {status}"
    except subprocess.TimeoutExpired:
        ending = f"suite {suite}: not done after {seconds} seconds"
    return json.loads(path.read_text()) if path.exists() else None, ending


def results_file(folder: Path, suite: str) -> Path:
    """Where a suite's results go."""
    return folder / f"speed-{suite}.json"


def page(suites: list[dict[str, Any]], kind: str, broken: list[str]) -> str:
    """All that is printed: what the figures are from, the suites' tables, what failed, the goals, the winners.

    Args:
        suites: what `run_suite` returned.
        kind: of the device.
        broken: suites that ended otherwise than `main` does.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    commit = commit or "unknown"
    parts = [heading(suites[0], commit)] if suites else []
    parts += [timing.table(facts["suite"], facts["results"], facts["ceilings"]) for facts in suites]
    failed = broken + [line for facts in suites for line in facts["failed"]]
    if failed:
        parts.append("### failed\n\n" + "\n".join(f"- {line}" for line in failed))
    lines = winner_lines(suites, commit)
    if lines:
        parts.append(f"For kernels/pod_kernels/winners.py:\n\n{lines}")
    table = goals(suites, kind)
    return "\n\n".join(parts + ([f"### goals\n\n{table}"] if table else []))


def heading(facts: dict[str, Any], commit: str) -> str:
    """Where and when: what a figure needs to be believed."""
    ceiling = facts["ceilings"]
    return (
        f"## {facts['device']}, {facts['date']}, commit {commit}\n\n"
        f"{facts['dtype']}, torch {torch.__version__}, {facts['threads']} threads; {facts['shared_keys']:.0%} of the "
        f"keys shared. A large copy reached {ceiling[BYTES] / SCALE[BYTES]:,.0f} {BYTES}, a large product "
        f"{ceiling[OPERATIONS] / SCALE[OPERATIONS]:,.2f} {OPERATIONS}."
    )


if __name__ == "__main__":
    sys.exit(main())
