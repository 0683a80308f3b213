"""What `eval/speed.py` measures: a function for each thing, of a `Setting` and a length, and the suites of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dense_attention import FLASH, dense_attentions
from filled_cache import attend, fill, new_cache, received, write
from speed_cpu import CPU_SUITE
from speed_setting import (
    DENSE,
    KV_HEADS,
    LAYERS,
    STOCK,
    Setting,
    by_backends,
    dense_decoding,
    for_backends,
    fused,
    random_ids,
    random_models,
)
from timing import BYTES, OPERATIONS, Measured, Works, by
from torch import Tensor
from transformers import Cache, PreTrainedModel

import pod
from pod.evaluation.models import generate_greedily
from pod_kernels import shared_score_attention
from pod_kernels.flash import CUDNN

CASCADES = (2048, 8192)  # budgets, sinks included; at most half of the tokens stored before, so that they are full
# One update of a cache is too short to be timed, and a cascade's differ from token to token.
UPDATES = 16
UPDATED_BYTES = 2**30  # of the dense cache that a GPU updates
NEW_TOKENS = 32
SHORTEST = 64  # tokens
TAU = 0.7
FORKED_ROWS = 16
FORKED, COPIED = "forked rows", "copied rows"
POD_CUDNN = "PoD, cuDNN"


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
    ours = partial(work, partial(shared_score_attention, **sizes), 5)
    works = by_backends(setting, "PoD", ours)
    if setting.device == "cuda" and setting.has_kernels and setting.dtype != torch.float32:  # cuDNN has no float32
        works[POD_CUDNN] = by("composed", ours, CUDNN)
    names = list(works)
    works |= {name: partial(work, run, 3) for name, run in dense_attentions(setting.device, True).items()}
    label = f"attention at {length}, {'forward and backward' if training else 'forward'}"
    pairs = [(name, other) for name in names for other in works if other not in names]
    # Two products per pair forward, five backward; one of the two sources' logits for each pair.
    operations = (7 if training else 2) * 2 * setting.head_dim * batch * setting.heads * length * (length + 1) / 2
    return setting.measured(works, label, pairs, amounts=dict.fromkeys(works, (operations, OPERATIONS)))


def attention_forward(setting: Setting, length: int) -> Measured:
    """Shared-score attention of a sample, all heads sharing, against dense causal attention."""
    return _attention(setting, length, training=False)


def attention_training(setting: Setting, length: int) -> Measured:
    """The same with its backward."""
    return _attention(setting, length, training=True)


def step(model: PreTrainedModel, batch: int) -> Callable[[Cache], object]:
    """One step of decoding with a cache."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    return lambda cache: model(token, past_key_values=cache)


def decoding_rows(setting: Setting, length: int) -> int:
    """Rows that decode together: on a GPU as many as have a quarter of a million tokens."""
    return setting.batch or (max(1, 2**18 // length) if setting.device == "cuda" else 1)


def note_of_rows(batch: int) -> list[str]:
    """What the page says of rows, where they are several."""
    return [f"{batch} rows."] if batch > 1 else []


def filled(setting: Setting, model: PreTrainedModel, batch: int, length: int, **options: Any) -> pod.PodCache:
    """A cache that keeps every token and holds `length` random ones."""
    cache = pod.PodCache(model.config, setting.room(length), **options)
    fill(cache, model, batch, length)
    return cache


def decode(setting: Setting, length: int) -> Measured:
    """One token with `length` tokens in the cache."""
    works, batch, models = {}, decoding_rows(setting, length), random_models(setting, length)
    for name in ("PoD", DENSE):
        caches = for_backends(setting, partial(filled, setting, models[name], batch, length))
        works |= by_backends(setting, name, step(models[name], batch), caches)
    cache = new_cache(models[STOCK], length)
    fill(cache, models[STOCK], batch, length)
    works[STOCK] = partial(step(models[STOCK], batch), cache)
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, STOCK)]
    return setting.measured(works, f"decode at {length}", pairs, fused(works), notes=note_of_rows(batch))


def decode_attention(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers, and nothing else, against dense attention to as many keys."""
    batch, models = decoding_rows(setting, length), random_models(setting, length, is_whole=False)
    (q, k, v), works, amounts = setting.states(batch, 1), {}, {}
    for name in ("PoD", DENSE):
        caches = for_backends(setting, partial(filled, setting, models[name], batch, length))
        mine = by_backends(setting, name, partial(attend, model=models[name], q=q, k=k, v=v), caches)
        works |= mine
        amounts |= dict.fromkeys(mine, (caches[""].nbytes(), BYTES))
    others, size = dense_decoding(setting, q, KV_HEADS, length, LAYERS)
    works |= others
    amounts |= dict.fromkeys(others, (size, BYTES))
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, *others)]
    label, graphs = f"decode attention at {length}", [*fused(works), *others]
    return setting.measured(works, label, pairs, graphs, notes=note_of_rows(batch), amounts=amounts)


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
    names, works = ("PoD", f"PoD, tau={TAU}"), {}
    for name, tau in zip(names, (None, TAU), strict=True):
        caches = for_backends(setting, partial(filled, setting, model, batch, length, tau=tau))
        works |= by_backends(setting, name, partial(attend, model=model, q=q, k=k, v=v), caches)
    pairs = [(names[1] + kind, names[0] + kind) for kind in setting.backends]
    label = f"decode attention with tau at {length}"
    found = setting.measured(works, label, pairs, fused(works), notes=note_of_rows(batch))
    stats = next((cache.stats for cache in caches.values() if cache.stats.decisions), caches[""].stats)
    whole = caches[""].nbytes()
    unread = stats.unread_values / max(1, stats.distant_values)
    distant = max(0, length - setting.sinks - setting.recent) * batch * setting.head_dim * setting.dtype.itemsize
    shared = int((~model.config.blocks.is_anchor).sum())
    left = whole - unread * distant * shared
    for kind in setting.backends:
        found.amounts |= {names[0] + kind: (whole, BYTES), names[1] + kind: (left, BYTES)}
    found.notes.append(
        f"With tau = {TAU}, {stats.skipped / max(1, stats.decisions):.0%} of the query heads of shared scores skipped, "
        f"and {unread:.0%} of their distant values were not read: the bytes alone make {left / whole:.3g} of the time."
    )
    found.by_bytes = left / whole
    return found


def decode_after_eviction(setting: Setting, length: int) -> Measured:
    """One token after a prompt of `length` tokens, most of them dropped, and after a quarter of it."""
    works: Works = {}
    batch, method = setting.batch or 1, setting.eviction[0]
    model = random_models(setting, length)["PoD"]
    names = [f"after {prompt:,}" for prompt in (length, length // 4)]

    def evicted(prompt: int) -> pod.PodCache:
        cache = pod.PodCache(model.config, setting.room(prompt), pod.eviction.parse(method))
        model(random_ids(model, batch, prompt), past_key_values=cache, logits_to_keep=1)
        return cache

    for name, prompt in zip(names, (length, length // 4), strict=True):
        caches = for_backends(setting, partial(evicted, prompt))
        works |= by_backends(setting, name, step(model, batch), caches)
    pairs = [(names[0] + kind, names[1] + kind) for kind in setting.backends]
    return setting.measured(works, f"{method} after {length}", pairs, fused(works))


def decode_forked(setting: Setting, length: int) -> Measured:
    """One token of 16 rows over one context of `length` tokens, against rows that are copies of it."""
    works, held, batch, model = {}, {}, setting.batch or FORKED_ROWS, random_models(setting, length)["PoD"]
    run = step(model, batch)

    def rows(name: str) -> pod.PodCache:
        cache = pod.PodCache(model.config)
        cache.expect(length)
        fill(cache, model, 1, length)
        (cache.fork if name == FORKED else cache.batch_repeat_interleave)(batch)
        cache.expect(setting.room(length))
        run(cache)
        held[name] = cache.nbytes()
        return cache

    works[FORKED] = by("composed", partial(run, rows(FORKED)))
    works |= by_backends(setting, COPIED, run, for_backends(setting, partial(rows, COPIED)))
    share = held[FORKED] / held[COPIED]
    notes = [*note_of_rows(batch), f"{held[FORKED]:,} bytes forked, {held[COPIED]:,} in copies: {share:.3f} of them."]
    pairs = [(FORKED, other) for other in [*works][1:]]
    return setting.measured(works, f"decode forked at {length}", pairs, fused(works), notes=notes)


def decode_attention_after_eviction(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers after a prompt of which most is dropped, against the full cache."""
    batch, model = decoding_rows(setting, length), random_models(setting, length, is_whole=False)["PoD"]
    prompt, (q, k, v) = setting.states(1, length), setting.states(batch, 1)
    works: Works = {}
    amounts = {}

    def evicted(method: str) -> pod.PodCache:
        cache = pod.PodCache(model.config, setting.room(length), pod.eviction.parse(method))
        attend(cache, model, *prompt)
        cache.batch_repeat_interleave(batch)  # rows alike, each with its own memory
        return cache

    for method in (None, *setting.eviction):
        make = partial(evicted, method) if method else partial(filled, setting, model, batch, length)
        caches = for_backends(setting, make)
        mine = by_backends(setting, method or "PoD", partial(attend, model=model, q=q, k=k, v=v), caches)
        works |= mine
        amounts |= dict.fromkeys(mine, (caches[""].nbytes(), BYTES))
    pairs = [("PoD" + kind, method + kind) for method in setting.eviction for kind in setting.backends]
    label = f"decode attention after {length}"
    return setting.measured(works, label, pairs, fused(works), notes=note_of_rows(batch), amounts=amounts)


def prefill(setting: Setting, length: int) -> Measured:
    """A prompt of `length` tokens."""
    works, batch = {}, setting.batch or 1
    for name, model in random_models(setting, length).items():
        ids = random_ids(model, batch, length)

        def work(model=model, ids=ids) -> None:
            model(ids, past_key_values=new_cache(model, length), logits_to_keep=1)

        works |= by_backends(setting, name, work) if name == "PoD" else {name: by("composed", work)}
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE, STOCK)]
    return setting.measured(works, f"prefill of {length}", pairs)


def cascade_prefill(setting: Setting, length: int) -> Measured:
    """A prompt's attention in one layer by a cascade's strides, against causal attention to all of it.

    The cache and the stride are the Cascade paper's for 1M tokens (16K and 4K), in proportion for shorter prompts.
    """
    batch = setting.batch or 1
    model = random_models(setting, length, layers=1, is_whole=False)[DENSE]
    budget, stride = (max(SHORTEST // 4, min(most, length // part)) for most, part in ((16_384, 16), (4096, 64)))
    states = setting.states(batch, length)

    def strides(tensors: list[Tensor]) -> None:
        method = pod.eviction.Cascade(budget=setting.sinks + budget, sinks=setting.sinks)
        cache = pod.PodCache(model.config, eviction=method)
        with cache.prefill():
            for parts in zip(*(tensor.split(stride, dim=2) for tensor in tensors), strict=True):
                attend(cache, model, *parts)

    flash = dense_attentions(setting.device, True)[FLASH]
    name = f"cascade of {budget:,} in strides of {stride:,}"

    def works(tensors: list[Tensor]) -> Works:
        return by_backends(setting, name, partial(strides, tensors)) | {FLASH: partial(flash, *tensors)}

    # The first run, which is not counted, is of an eighth: 1M tokens take half a minute.
    first = works([tensor[:, :, : length // 8] for tensor in states])
    pairs = [(FLASH, name + kind) for kind in setting.backends]
    return setting.measured(works(states), f"cascade prefill of {length}", pairs, first=first)


def _update(setting: Setting, length: int, layers: int) -> Measured:
    models = random_models(setting, length, layers, is_whole=False)
    row = 2 * layers * KV_HEADS * length * setting.head_dim * setting.dtype.itemsize
    batch = setting.batch or (max(1, UPDATED_BYTES // row) if setting.device == "cuda" else 1)
    room = length + UPDATES * (setting.room(0))
    kinds = {"PodCache": (models["PoD"], None)}
    if layers > 1:
        kinds["PodCache, blocks of one layer"] = models[DENSE], None
    for budget in CASCADES:
        method = pod.eviction.Cascade(budget=min(budget, length // 8 * 4), sinks=setting.sinks)
        kinds[f"cascade:budget={method.budget}"] = models[DENSE], method

    def made(model: PreTrainedModel, method: pod.eviction.Cascade | None) -> Cache:
        cache = new_cache(model, room) if method is None else pod.PodCache(model.config, eviction=method)
        fill(cache, model, batch, length)
        if isinstance(cache, pod.PodCache):  # the first attention decides what runs it
            attend(cache, model, *setting.states(batch, 1))
        return cache

    def updates(model: PreTrainedModel, cache: Cache) -> Callable[[Cache], None]:
        """The work, with any cache like this one."""
        # A layer's new states, made beforehand as a model would have made them.
        states = setting.random(2, batch, KV_HEADS, 1, setting.head_dim)
        sums = received(cache, model, batch, 1)

        def work(cache: Cache) -> None:
            for _ in range(UPDATES):
                write(cache, model, *states, sums)

        return work

    works = {}
    for name, (model, method) in kinds.items():
        caches = for_backends(setting, partial(made, model, method))
        works |= by_backends(setting, name, updates(model, caches[""]), caches)
    ours, concatenation = list(works), "concatenation"
    cache = made(models[STOCK], None)
    works[concatenation] = partial(updates(models[STOCK], cache), cache)
    size = f"a dense cache of {batch * row / 2**30:.3g} GiB"
    notes = [f"layers: {layers}, rows: {batch}; {size}; times of {UPDATES} tokens."]
    pairs = [(concatenation, name) for name in ours]
    return setting.measured(works, f"update at {length}, layers: {layers}", pairs, fused(works), notes=notes)


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
        kept = None
        if method is not None:
            kept = pod.PodCache(model.config, length + NEW_TOKENS, pod.eviction.parse(method))
        generate_greedily(model, random_ids(model, batch, length), NEW_TOKENS, cache=kept)

    for name in ("PoD", DENSE):
        works |= by_backends(setting, name, partial(run, models[name]))
    for method in setting.eviction:
        works |= by_backends(setting, f"PoD, {method}", partial(run, models["PoD"], method))
    works[STOCK] = by("composed", partial(run, models[STOCK]))
    pairs = [("PoD" + kind, other) for kind in setting.backends for other in (DENSE + kind, STOCK)]
    pairs += [(f"PoD, {method}{kind}", STOCK) for method in setting.eviction for kind in setting.backends]
    return setting.measured(works, f"generate after {length}", pairs)


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
    "fork": [decode_forked],
    "cpu": CPU_SUITE,
}
