"""What the suite "cpu" of `eval/speed.py` measures: a real model's weights in PoD, in transformers and in kvpress."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache as once
from functools import partial

import torch
from dense_attention import FLASH
from filled_cache import attend, fill
from speed_setting import DENSE, STOCK, Setting, dense_decoding, random_ids, three_ways
from timing import BYTES, Measured, Works
from torch import Tensor
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, StaticCache

import pod
from pod.data.demo_corpus import held_out_text
from pod.eviction import Quest, RecentReader, unparse
from pod.model.gguf import local
from pod.similarity import attention_similarity

STATIC, KVPRESS = "StaticCache", "kvpress"
BUDGET, WINDOW, KERNEL = 512, 32, 7  # of SnapKV
EVICTED, DENSE_EVICTED = f"PoD, SnapKV({BUDGET})", f"{DENSE}, SnapKV({BUDGET})"
KVPRESS_EVICTED = f"{KVPRESS}, SnapKV({BUDGET})"
STEPS = 4  # of decoding, timed together
FEW, MOST_SECONDS = 3, 900  # rounds of what takes long, and after how long no further one begins
SPOKEN = 32  # tokens generated with and without drafts
MISSING = "not installed: pip install --no-deps kvpress==0.5.5 cachetools fire termcolor"


@once
def real_models(ckpt: str, blocks: str, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """One set of weights as a PoD model, as one with blocks of one layer, and as transformers' own.

    Args:
        ckpt: a causal LM, as `pod.load` takes it.
        blocks: a blocks file; its sinks and recent tokens, where it says some, else 16 and 240.
        dtype: of the weights.
    """
    stock = pod.load(local(ckpt), dtype=dtype)
    shared = pod.LayerBlocks.load(blocks)
    sizes = {"sink_size": 16, "recent_size": 240}
    sizes |= {name: shared.metadata[name] for name in sizes if name in shared.metadata}
    return three_ways(stock, shared, **sizes)


def _models(setting: Setting, dtype: torch.dtype | None = None) -> dict[str, PreTrainedModel]:
    return real_models(setting.ckpt, setting.blocks, dtype or setting.dtype)


def _room(setting: Setting, length: int) -> int:
    return length + STEPS * (setting.rounds + 2)


def _with_remedy(found: Measured) -> Measured:
    """The same, which says the remedy of what is left out as it is not installed."""
    reasons = {name: MISSING if why.startswith("ModuleNotFoundError") else why for name, why in found.left_out.items()}
    return replace(found, left_out=reasons)


def _few(setting: Setting) -> Setting:
    """The same with few rounds, for what takes long."""
    return replace(setting, rounds=min(FEW, setting.rounds), most_seconds=MOST_SECONDS)


def _static(model: PreTrainedModel, room: int) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=room)


def _steps(model: PreTrainedModel, cache: Cache, position: int | None = None) -> Callable[[], None]:
    """`STEPS` tokens, one after the other; from `position` on, where the cache does not know it."""
    token, ahead = torch.ones(1, 1, dtype=torch.long), iter(range(position or 0, 10**9))

    def run() -> None:
        for _ in range(STEPS):
            known = {} if position is None else {"position_ids": torch.tensor([[next(ahead)]])}
            model(token, past_key_values=cache, **known)

    return run


def kvpress_cache(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """A prompt's cache with `BUDGET` of its tokens, which kvpress's SnapKV chose.

    Raises:
        ImportError: kvpress is not installed.
    """
    from kvpress import SnapKVPress

    length = ids.shape[1]
    press = SnapKVPress(1 - (BUDGET + 0.5) / length, WINDOW, KERNEL)  # half a token more, as it rounds down
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache, cache_position=torch.arange(length), logits_to_keep=1)
    if cache.get_seq_length() != BUDGET:
        raise RuntimeError(f"kvpress keeps {cache.get_seq_length()} tokens, not {BUDGET}: another version?")
    return cache


def pod_cache(model: PreTrainedModel, ids: Tensor, room: int, evicts: bool) -> pod.PodCache:
    """A prompt's PodCache: all of it, or what the same SnapKV keeps."""
    method = pod.eviction.SnapKV(BUDGET, WINDOW, KERNEL, "avg") if evicts else None
    cache = pod.PodCache(model.config, room, method)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def decode_step(setting: Setting, length: int) -> Measured:
    """Decoding with `length` random tokens in the cache."""
    models, room = _models(setting), _room(setting, length)
    caches = {name: (models[name], pod.PodCache(models[name].config, room)) for name in ("PoD", DENSE)}
    stock = models[STOCK]
    caches |= {STOCK: (stock, DynamicCache(config=stock.config)), STATIC: (stock, _static(stock, room))}
    for model, cache in caches.values():
        fill(cache, model, 1, length)
    works = {name: _steps(*pair) for name, pair in caches.items()}
    notes = [f"{STEPS} steps; {KVPRESS} decodes from a DynamicCache, and where nothing is evicted is that."]
    pairs = [("PoD", other) for other in (DENSE, STOCK, STATIC)]
    return setting.measured(works, f"decode at {length}", pairs, notes=notes)


def decode_after_snapkv(setting: Setting, length: int) -> Measured:
    """Decoding after a prompt of `length` tokens, of which SnapKV kept `BUDGET`."""
    models, room = _models(setting), _room(setting, length)
    stock, works = models[STOCK], {}
    ids = random_ids(stock, 1, length)
    for name, model in ((EVICTED, models["PoD"]), (DENSE_EVICTED, models[DENSE])):
        works[name] = _steps(model, pod_cache(model, ids, room, True))
    for name, cache in ((STOCK, DynamicCache(config=stock.config)), (STATIC, _static(stock, room))):
        fill(cache, stock, 1, length)
        works[name] = _steps(stock, cache)
    peer = once(lambda: _steps(stock, kvpress_cache(stock, ids), length))  # the first run, not counted, prefills
    works[KVPRESS_EVICTED] = lambda: peer()()
    notes = [f"{STEPS} steps; {STOCK} and {STATIC} keep all {length:,} tokens."]
    pairs = [(name, other) for name in (EVICTED, DENSE_EVICTED) for other in (KVPRESS_EVICTED, STOCK, STATIC)]
    return _with_remedy(setting.measured(works, f"decode after SnapKV of {length}", pairs, notes=notes))


def decode_attention_of_model(setting: Setting, length: int) -> Measured:
    """One token's attention in all layers and nothing else, against dense attention to as many keys."""
    models, room = _models(setting), _room(setting, length)
    config = models[STOCK].config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    new = [setting.random(1, count, 1, config.head_dim) for count in (heads, kv_heads, kv_heads)]
    works, amounts = {}, {}
    for name in ("PoD", DENSE):
        cache = pod.PodCache(models[name].config, room)
        fill(cache, models[name], 1, length)
        works[name] = partial(attend, cache, models[name], *new)
        amounts[name] = cache.nbytes(), BYTES
    others, size = dense_decoding(setting, new[0], kv_heads, length, config.num_hidden_layers)
    works |= others  # on a CPU, flash alone
    amounts[FLASH] = size, BYTES
    by_bytes = amounts["PoD"][0] / amounts[DENSE][0]
    notes = [f"The bytes alone make {by_bytes:.3g} of dense time."]
    known = {"notes": notes, "amounts": amounts, "by_bytes": by_bytes}
    return setting.measured(works, f"decode attention at {length}", [("PoD", DENSE), ("PoD", FLASH)], **known)


def prefill_of_model(setting: Setting, length: int) -> Measured:
    """A prompt of `length` tokens into a new cache, kept whole and by SnapKV."""
    models = _models(setting)
    stock = models[STOCK]

    def works(ids: Tensor) -> Works:
        def stored(cache: Callable[[], Cache]) -> None:
            stock(ids, past_key_values=cache(), logits_to_keep=1)

        size = ids.shape[1]
        return {
            "PoD": lambda: pod_cache(models["PoD"], ids, size, False),
            STOCK: lambda: stored(lambda: DynamicCache(config=stock.config)),
            STATIC: lambda: stored(lambda: _static(stock, size)),
            EVICTED: lambda: pod_cache(models["PoD"], ids, size, True),
            KVPRESS_EVICTED: lambda: kvpress_cache(stock, ids),
        }

    ids = random_ids(stock, 1, length)
    # The first run, which is not counted, is of a part; SnapKV's has to have something to drop.
    first = works(ids[:, : max(length // 8, BUDGET + WINDOW)])
    pairs = [("PoD", STOCK), ("PoD", STATIC), (EVICTED, KVPRESS_EVICTED)]
    return _with_remedy(_few(setting).measured(works(ids), f"prefill of {length}", pairs, first=first))


def training_step(setting: Setting, length: int) -> Measured:
    """Loss and gradients of one sample; in bfloat16 as training has it, float32 weights under autocast."""
    models = _models(setting, torch.float32)
    ids = random_ids(models[STOCK], 1, length)

    def step(model: PreTrainedModel) -> None:
        with torch.enable_grad(), torch.autocast("cpu", setting.dtype, enabled=setting.dtype != torch.float32):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad()

    works = {name: partial(step, model) for name, model in models.items()}
    return _few(setting).measured(works, f"training step of {length}", [("PoD", DENSE), ("PoD", STOCK)])


def similarity_by_forward(setting: Setting, length: int) -> Measured:
    """`attention_similarity` of one sample by the stock model's own forward."""
    model = _models(setting)[STOCK]
    ids = random_ids(model, 1, length)
    works = {
        "attention_similarity": lambda: attention_similarity(model, [ids], progress=False),
        "forward": lambda: model(ids, use_cache=False, logits_to_keep=1),
    }
    return _few(setting).measured(works, f"similarity of {length}", [("attention_similarity", "forward")])


def speculation(setting: Setting, length: int) -> Measured:
    """`SPOKEN` greedy tokens behind `length` of Python source: decoded one by one, and drafted by a sparse read."""
    model, new = _models(setting)["PoD"], {"min_new_tokens": SPOKEN, "max_new_tokens": SPOKEN, "do_sample": False}
    text = held_out_text()[: 8 * length]
    tokenizer = AutoTokenizer.from_pretrained(local(setting.ckpt))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, :length]
    cache, mask, said = pod.PodCache(model.config, length + SPOKEN), torch.ones_like(ids), {}
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)

    def speak(name: str, draft: pod.eviction.ReadSelector | None) -> None:
        with cache.peek():
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, draft=draft, **new)
            said[name] = out[0, length:].tolist(), cache.drafted, cache.accepted

    drafts = {f"drafts by {unparse(one)}": one for one in (Quest(BUDGET), RecentReader(BUDGET))}
    works = {name: partial(speak, name, draft) for name, draft in {"plain": None, **drafts}.items()}
    found = _few(setting).measured(works, f"speculation at {length}", [("plain", name) for name in drafts])
    for name, (text, drafted, accepted) in said.items():
        if drafted:
            same = "the same text" if text == said["plain"][0] else "another text: rounding decided a tie"
            found.notes.append(f"{name}: {accepted} of {drafted} accepted ({accepted / drafted:.0%}), {same}.")
    return found


# The most important first, and the quick before the slow.
CPU_SUITE = [
    decode_attention_of_model,
    decode_step,
    decode_after_snapkv,
    similarity_by_forward,
    speculation,
    training_step,
    prefill_of_model,
]
CPU_LENGTHS = {decode_after_snapkv: [4000], similarity_by_forward: [2048], training_step: [2048]}
