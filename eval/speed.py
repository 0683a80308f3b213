"""Speed as ratios inside one run, on the device at hand.

    python eval/speed.py --suite decode --lengths 8192,16384
    python eval/speed.py --suite prefill --lengths 4096
    python eval/speed.py --suite cache --lengths 16384

A random model of 8 layers, width 1,024, 8 KV heads, 70 % of the keys shared (16 sinks, 240 recent tokens):

    decode   one token: PoD against the same cache with blocks of one layer, and against transformers' DynamicCache;
             and with eviction after a prompt against the same after a quarter of the prompt
    prefill  the prompt by the same three
    cache    storing one token in all layers (keys, values, and what a method keeps to decide), without attention:
             into the cache's own storage against concatenation, as DynamicCache does it

The works take turns, round after round, and a ratio is the median over the rounds of one's time by the other's in the
same round: a busy machine slows all alike. For `decode` and `cache` the cache is filled with random keys and values,
without running the model (with eviction the prompt is really run). Writes speed-SUITE.json and prints a table.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod.evaluation import report
from pod.files import check_writable

SINKS, RECENT = 16, 240
SHAPE = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 16}
LAYERS, KV_HEADS = 8, 8
EVICTION = "snapkv:budget=1024"
CASCADES = (2048, 8192)  # budgets; at most half of the tokens stored before, so that they are full
FILLED_AT_ONCE = 1024
# One update of a cache is too short to be timed, and a cascade's differ from token to token.
UPDATES = 16
SHORTEST = 64  # tokens
DENSE, STOCK = "blocks of one layer", "DynamicCache"

Seconds = dict[str, list[float]]  # by name of the work, one per round
Measured = tuple[Seconds, list[tuple[str, str]]]  # and which works are compared


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds that `work` takes, the device's queue emptied before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(works: dict[str, Callable[[], object]], rounds: int, device: str, label: str) -> Seconds:
    """Seconds of every work in every round, one work after the other; the first time of each is not counted."""
    for work in works.values():
        work()
    seconds: Seconds = {name: [] for name in works}
    for _ in tqdm(range(rounds), desc=label, unit=" rounds"):
        for name, work in works.items():
            seconds[name].append(timed(work, device))
    return seconds


def ratio(seconds: Seconds, name: str, against: str) -> float:
    """Median over the rounds of `name`'s time over `against`'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[against], strict=True))


def ratios(seconds: Seconds, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Each pair's ratio by the name that tables and JSON give it."""
    return {f"{name} / {against}": ratio(seconds, name, against) for name, against in pairs}


def shared_blocks() -> pod.LayerBlocks:
    """Blocks that share 70 % of the keys: of every 8 KV heads, 5 have an anchor every 4 layers and 3 one every 3."""
    steps = [3 if head % 8 in (1, 4, 6) else 4 for head in range(KV_HEADS)]
    return pod.LayerBlocks([[layer - layer % step for step in steps] for layer in range(LAYERS)])


def random_models(device: str, dtype: torch.dtype, length: int) -> dict[str, PreTrainedModel]:
    """The same random weights as a PoD model, as one with blocks of one layer, and as transformers' own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        num_hidden_layers=LAYERS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=length,
        **SHAPE,
    )
    stock = LlamaForCausalLM(config).to(device, dtype).eval()
    return {
        "PoD": pod.convert(stock, shared_blocks(), SINKS, RECENT),
        DENSE: pod.convert(stock, pod.LayerBlocks.dense(LAYERS, KV_HEADS), SINKS, RECENT),
        STOCK: stock,
    }


def new_cache(model: PreTrainedModel, length: int) -> Cache:
    """An empty cache with room for `length` tokens."""
    if hasattr(model.config, "share"):
        return pod.PodCache(model.config, max_length=length)
    return DynamicCache(config=model.config)


def random_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """[batch, length] token ids, the same at every call."""
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1)).to(model.device)


def fill(cache: Cache, model: PreTrainedModel, batch: int, count: int) -> None:
    """Put `count` random tokens into every layer of a cache, without attention."""
    for first in range(0, count, FILLED_AT_ONCE):
        shape = (batch, KV_HEADS, min(FILLED_AT_ONCE, count - first), SHAPE["head_dim"])
        k, v = torch.randn(2, *shape, device=model.device, dtype=model.dtype)
        write(cache, model, k, v, received(cache, batch, shape[2], model.device))


def received(cache: Cache, batch: int, count: int, device: torch.device) -> torch.Tensor | None:
    """Random attention that the slots of a cascade of a dense model, and `count` new tokens, received; else None."""
    if not isinstance(cache, pod.PodCache) or cache.eviction is None:
        return None
    used = min(cache.get_seq_length(), cache.store.cascades.slots)
    groups = SHAPE["num_attention_heads"] // KV_HEADS
    return torch.rand(KV_HEADS, batch, groups, used + count, device=device)


def write(
    cache: Cache, model: PreTrainedModel, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor | None = None
) -> None:
    """Put the same keys and values [B, H_kv, T, D] into every layer of a cache, without attention."""
    if not isinstance(cache, pod.PodCache):
        for layer in range(LAYERS):
            cache.update(k, v, layer)
        return
    cache.begin(model.config, k[:, 0], None, model.model.rotary_emb)
    for layer in range(LAYERS):
        if sums is None:
            cache.write(layer, k, v)
        else:
            cache.store.write(layer, k.transpose(0, 1), v.transpose(0, 1), sums)
    cache.finish()


def step(model: PreTrainedModel, cache: Cache, batch: int) -> Callable[[], object]:
    """One step of decoding."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    return lambda: model(token, past_key_values=cache)


def decode(device: str, dtype: torch.dtype, batch: int, length: int, rounds: int) -> Measured:
    """One token with `length` tokens in the cache."""
    works = {}
    for name, model in random_models(device, dtype, 2 * length).items():
        cache = new_cache(model, length + rounds + 1)
        fill(cache, model, batch, length)
        works[name] = step(model, cache, batch)
    return interleaved(works, rounds, device, f"decode at {length}"), [("PoD", DENSE), ("PoD", STOCK)]


def decode_after_eviction(device: str, dtype: torch.dtype, batch: int, length: int, rounds: int) -> Measured:
    """One token after a prompt of `length` tokens, most of them dropped, and after a quarter of it."""
    works = {}
    model = random_models(device, dtype, 2 * length)["PoD"]
    for prompt in (length, length // 4):
        cache = pod.PodCache(model.config, prompt + rounds + 1, pod.eviction.parse(EVICTION))
        ids = random_ids(model, batch, prompt)
        model(ids, past_key_values=cache, logits_to_keep=1)
        works[f"after {prompt:,}"] = step(model, cache, batch)
    return interleaved(works, rounds, device, f"{EVICTION} after {length}"), [tuple(works)]


def prefill(device: str, dtype: torch.dtype, batch: int, length: int, rounds: int) -> Measured:
    """A prompt of `length` tokens."""
    works = {}
    for name, model in random_models(device, dtype, length).items():
        ids = random_ids(model, batch, length)
        works[name] = lambda model=model, ids=ids: model(
            ids, past_key_values=new_cache(model, length), logits_to_keep=1
        )
    return interleaved(works, rounds, device, f"prefill of {length}"), [("PoD", DENSE), ("PoD", STOCK)]


def update(device: str, dtype: torch.dtype, batch: int, length: int, rounds: int) -> Measured:
    """`UPDATES` tokens stored one by one after `length` tokens."""
    models = random_models(device, dtype, 2 * length)
    room = length + UPDATES * (rounds + 1)
    caches = {
        "PodCache": (models["PoD"], new_cache(models["PoD"], room)),
        "PodCache, blocks of one layer": (models[DENSE], new_cache(models[DENSE], room)),
    }
    for budget in CASCADES:
        method = pod.eviction.Cascade(budget=min(budget, length // 8 * 4), sinks=SINKS)
        cache = pod.PodCache(models[DENSE].config, eviction=method)
        caches[f"cascade:budget={method.budget}"] = models[DENSE], cache
    caches["concatenation"] = models[STOCK], new_cache(models[STOCK], room)
    works = {}
    for name, (model, cache) in caches.items():
        fill(cache, model, batch, length)
        # A layer's new states, made beforehand as a model would have made them.
        states = torch.randn(2, batch, KV_HEADS, 1, SHAPE["head_dim"], device=device, dtype=dtype)

        sums = received(cache, batch, 1, model.device)

        def work(model=model, cache=cache, states=states, sums=sums) -> None:
            for _ in range(UPDATES):
                write(cache, model, *states, sums)

        works[name] = work
    return interleaved(works, rounds, device, f"update at {length}"), [
        ("concatenation", name) for name in works if name != "concatenation"
    ]


SUITES = {"decode": [decode, decode_after_eviction], "prefill": [prefill], "cache": [update]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[8192, 16384])
    parser.add_argument("--batch", type=int, default=1, help="rows (1)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--out", type=Path, default=report.default_folder("speed"), help="folder to write to")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if min(options.batch, options.rounds) < 1 or min(options.lengths) < SHORTEST:
        print(f"error: --batch and --rounds are at least 1, --lengths at least {SHORTEST}", file=sys.stderr)
        return 2
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    facts = {
        "suite": options.suite,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "batch": options.batch,
        "shared_keys": 2 * shared_blocks().kv_saving,
    }
    path = options.out / f"speed-{options.suite}.json"
    results = []
    for length in options.lengths:
        for run in SUITES[options.suite]:
            with torch.no_grad():
                seconds, pairs = run(options.device, dtype, options.batch, length, options.rounds)
            measured = {"tokens": length, "what": run.__name__, "ratios": ratios(seconds, pairs)}
            results.append(measured | {"seconds": seconds})
            # Written as it grows: a long run that is stopped has not been for nothing.
            report.write_json(path, facts | {"results": results})
    print(table(results))
    print(f"written: {path}")
    return 0


def table(results: list[dict]) -> str:
    """A line for each ratio; the medians beside it are in milliseconds and belong to this machine at this hour."""
    rows = []
    for measured in results:
        for name, value in measured["ratios"].items():
            one, other = (1e3 * statistics.median(measured["seconds"][part]) for part in name.split(" / "))
            rows.append([name, f"{measured['tokens']:,}", f"{value:.3g}", f"{one:.2f}", f"{other:.2f}"])
    return report.markdown_table(["time by time", "tokens", "ratio", "ms", "by ms"], rows)


if __name__ == "__main__":
    sys.exit(main())
