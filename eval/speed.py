"""Speed as ratios inside one run, on the device at hand.

    python eval/speed.py --suite decode --lengths 8192,16384
    python eval/speed.py --suite prefill --lengths 4096
    python eval/speed.py --suite all

A random model of 8 layers with 70 % of the keys shared; on a GPU in Llama-3-8B's shape with a window of 4,096 tokens:

    attention   shared-score attention, forward and with backward, against the dense causal attentions at hand
    decode      one token: PoD against the same cache with blocks of one layer, and against transformers' DynamicCache;
                its attention alone, against dense attention to as many keys; and with eviction after a prompt
    prefill     the prompt by the same three; and a cascade's strides in one layer against causal attention to all
    cache       storing one token in all layers (keys, values, and what a method keeps to decide), without attention:
                into the cache's own storage against concatenation, as DynamicCache does it
    end-to-end  `generate`: a prompt and 32 new tokens

The works take turns, round after round, and a ratio is the median over the rounds of one's time by the other's in the
same round: a busy machine slows all alike. On a GPU, time is between two CUDA events. Where a work's operations or
bytes are known, its rate is printed too, with its share of what a large product or copy reached in the same run.
Where only attention or storing is measured the cache is filled with random keys and values, without running the model.
Writes speed-SUITE.json after every measurement, at the end speed.md, and prints it.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod.evaluation import command, report, timing
from pod.evaluation.filled_cache import attend, fill, new_cache, received, write
from pod.evaluation.timing import BYTES, OPERATIONS, SCALE, Measured, Works, by, interleaved, rotated, runnable
from pod.exit_status import exit_status
from pod.files import check_writable
from pod_kernels import shared_score_attention

LAYERS, KV_HEADS = 8, 8
CASCADES = (2048, 8192)  # budgets; at most half of the tokens stored before, so that they are full
# One update of a cache is too short to be timed, and a cascade's differ from token to token.
UPDATES = 16
NEW_TOKENS = 32
SHORTEST = 64  # tokens
DENSE, STOCK = "blocks of one layer", "DynamicCache"


@dataclass(frozen=True)
class Setting:
    """On what and how large everything is measured.

    Attributes:
        device, dtype: of all tensors.
        rounds: timed rounds.
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


def pod_backends(setting: Setting) -> dict[str, str]:
    """What a table calls PoD with each backend that the device might have."""
    return {"PoD": "composed", "PoD, fused": "fused"} if setting.device == "cuda" else {"PoD": "composed"}


def shared_blocks() -> pod.LayerBlocks:
    """Blocks that share 70 % of the keys: of every 8 KV heads, 5 have an anchor every 4 layers and 3 one every 3."""
    steps = [3 if head % 8 in (1, 4, 6) else 4 for head in range(KV_HEADS)]
    return pod.LayerBlocks([[layer - layer % step for step in steps] for layer in range(LAYERS)])


def random_models(setting: Setting, length: int) -> dict[str, PreTrainedModel]:
    """The same random weights as a PoD model, as one with blocks of one layer, and as transformers' own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        num_hidden_layers=LAYERS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=length,
        **setting.shape,
    )
    stock = LlamaForCausalLM(config).to(setting.device, setting.dtype).eval()
    return {
        "PoD": pod.convert(stock, shared_blocks(), setting.sinks, setting.recent),
        DENSE: pod.convert(stock, pod.LayerBlocks.dense(LAYERS, KV_HEADS), setting.sinks, setting.recent),
        STOCK: stock,
    }


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """[batch, length] token ids, the same at every call."""
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1)).to(model.device)


def dense_attentions(device: str) -> dict[str, Callable[..., Tensor]]:
    """name -> (q, k, v, is_causal) -> out: the dense attentions that this device might have."""

    def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        from flash_attn import flash_attn_func

        return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=is_causal).transpose(1, 2)

    found: dict[str, Callable[..., Tensor]] = {"SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    if device == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled, masks = torch.compile(flex_attention), {}

        def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
            lengths = q.shape[2], k.shape[2]
            if is_causal and lengths not in masks:
                masks[lengths] = create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths, device=device)
            return compiled(q, k, v, block_mask=masks[lengths] if is_causal else None, enable_gqa=True)

        cudnn = partial(sdpa, SDPBackend.CUDNN_ATTENTION)
        found |= {"SDPA cuDNN": cudnn, "FlexAttention": flex, "flash-attn": flash_attn}
    return found


def _attention(setting: Setting, length: int, training: bool) -> Measured:
    batch = setting.batch or 1
    queries = (batch, setting.heads, length, setting.head_dim)
    keys = (batch, KV_HEADS, length, setting.head_dim)

    def inputs() -> list[Tensor]:
        sizes = queries, keys, keys, queries, keys
        return [setting.random(*size, requires_grad=training) for size in sizes]

    sets, grad = rotated(setting.device, inputs), setting.random(*queries)

    def work(run: Callable[..., Tensor], used: int) -> None:
        tensors = next(sets)[:used]
        with torch.set_grad_enabled(training):
            out = run(*tensors)
        if training:
            torch.autograd.grad(out, tensors, grad)

    works = {
        name: partial(
            work, partial(shared_score_attention, sink_size=setting.sinks, recent_size=setting.recent, backend=kind), 5
        )
        for name, kind in pod_backends(setting).items()
    }
    dense = {
        name: partial(work, lambda q, k, v, run=run: run(q, k, v, True), 3)
        for name, run in dense_attentions(setting.device).items()
    }
    works, left_out = runnable(works | dense)
    label = f"attention at {length}, {'forward and backward' if training else 'forward'}"
    seconds = interleaved(works, setting.rounds, setting.device, label)
    pairs = [(name, other) for name in works if name not in dense for other in works if other in dense]
    # Two products per pair forward, five backward; one of the two sources' logits for each pair.
    operations = (7 if training else 2) * 2 * setting.head_dim * batch * setting.heads * length * (length + 1) / 2
    return Measured(seconds, pairs, dict.fromkeys(works, (operations, OPERATIONS)), left_out)


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


def decode(setting: Setting, length: int) -> Measured:
    """One token with `length` tokens in the cache."""
    works, batch, models = {}, decoding_rows(setting, length), random_models(setting, 2 * length)
    kinds = pod_backends(setting)
    for name in (*kinds, DENSE, STOCK):
        model = models["PoD" if name in kinds else name]
        cache = new_cache(model, length + setting.rounds + 2)
        fill(cache, model, batch, length)
        works[name] = by(kinds.get(name, "composed"), step(model, cache, batch))
    works, left_out = runnable(works)
    seconds = interleaved(works, setting.rounds, setting.device, f"decode at {length}")
    pairs = [(name, other) for name in works if name in kinds for other in (DENSE, STOCK)]
    return Measured(seconds, pairs, left_out=left_out)


def decoding_rows(setting: Setting, length: int) -> int:
    """Rows that decode together: on a GPU as many as have half a million tokens."""
    return setting.batch or (max(1, 2**19 // length) if setting.device == "cuda" else 1)


def decode_attention(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers, and nothing else, against dense attention to as many keys."""
    batch, itemsize = decoding_rows(setting, length), setting.dtype.itemsize
    models = random_models(setting, 2 * length)
    new = setting.states(batch, 1)
    works: Works = {}
    amounts = {}
    kinds = pod_backends(setting)
    for name in (*kinds, DENSE):
        model = models["PoD" if name in kinds else DENSE]
        cache = new_cache(model, length + setting.rounds + 2)
        fill(cache, model, batch, length)
        works[name] = by(kinds.get(name, "composed"), partial(attend, cache, model, *new))
        amounts[name] = cache.nbytes(), BYTES
    stored = [setting.random(2, batch, KV_HEADS, length, setting.head_dim) for _ in range(LAYERS)]

    def dense(run: Callable[..., Tensor]) -> None:
        for k, v in stored:
            run(new[0], k, v, False)

    others = {name: partial(dense, run) for name, run in dense_attentions(setting.device).items()}
    amounts |= dict.fromkeys(others, (2 * batch * KV_HEADS * length * setting.head_dim * itemsize * LAYERS, BYTES))
    works, left_out = runnable(works | others)
    seconds = interleaved(works, setting.rounds, setting.device, f"decode attention at {length}")
    pairs = [(name, other) for name in works if name in kinds for other in works if other not in kinds]
    return Measured(seconds, pairs, {name: amounts[name] for name in works}, left_out)


def decode_after_eviction(setting: Setting, length: int) -> Measured:
    """One token after a prompt of `length` tokens, most of them dropped, and after a quarter of it."""
    works: Works = {}
    batch, method = setting.batch or 1, setting.eviction[0]
    model = random_models(setting, 2 * length)["PoD"]
    for prompt in (length, length // 4):
        cache = pod.PodCache(model.config, prompt + setting.rounds + 1, pod.eviction.parse(method))
        model(random_ids(model, batch, prompt), past_key_values=cache, logits_to_keep=1)
        works[f"after {prompt:,}"] = step(model, cache, batch)
    seconds = interleaved(works, setting.rounds, setting.device, f"{method} after {length}")
    return Measured(seconds, [tuple(works)])


def decode_attention_after_eviction(setting: Setting, length: int) -> Measured:
    """The attention of one token in all layers after a prompt of which most is dropped, against the full cache."""
    batch = setting.batch or 1
    model = random_models(setting, 2 * length)["PoD"]
    prompt, new = setting.states(batch, length), setting.states(batch, 1)
    works: Works = {}
    for method in (None, *setting.eviction):
        cache = pod.PodCache(model.config, length + setting.rounds + 1, method and pod.eviction.parse(method))
        attend(cache, model, *prompt)
        works[method or "PoD"] = partial(attend, cache, model, *new)
    seconds = interleaved(works, setting.rounds, setting.device, f"decode attention after {length}")
    return Measured(seconds, [("PoD", method) for method in setting.eviction])


def prefill(setting: Setting, length: int) -> Measured:
    """A prompt of `length` tokens."""
    works, batch = {}, setting.batch or 1
    for name, model in random_models(setting, length).items():
        ids = random_ids(model, batch, length)
        works[name] = lambda model=model, ids=ids: model(
            ids, past_key_values=new_cache(model, length), logits_to_keep=1
        )
    seconds = interleaved(works, setting.rounds, setting.device, f"prefill of {length}")
    return Measured(seconds, [("PoD", DENSE), ("PoD", STOCK)])


def cascade_prefill(setting: Setting, length: int) -> Measured:
    """A prompt's attention in one layer by a cascade's strides, against causal attention to all of it.

    The cache and the stride are the Cascade paper's for 1M tokens (16K and 4K), in proportion for shorter prompts.
    """
    batch = setting.batch or 1
    model = random_models(setting, length)[DENSE]
    model.model.layers = model.model.layers[:1]
    budget, stride = (max(SHORTEST // 4, min(most, length // part)) for most, part in ((16_384, 16), (4096, 64)))
    q, k, v = setting.states(batch, length)

    def strides() -> None:
        cache = pod.PodCache(model.config, eviction=pod.eviction.Cascade(budget // 4 * 4, sinks=setting.sinks))
        with cache.prefill():
            for parts in zip(*(tensor.split(stride, dim=2) for tensor in (q, k, v)), strict=True):
                attend(cache, model, *parts)

    dense = {name: partial(run, q, k, v, True) for name, run in dense_attentions(setting.device).items()}
    others, left_out = runnable(dense)
    name = f"cascade of {budget:,} in strides of {stride:,}"
    seconds = interleaved({name: strides} | others, setting.rounds, setting.device, f"cascade prefill of {length}")
    return Measured(seconds, [(other, name) for other in others], left_out=left_out)


def update(setting: Setting, length: int) -> Measured:
    """`UPDATES` tokens stored one by one after `length` tokens."""
    batch = setting.batch or 1
    models = random_models(setting, 2 * length)
    room = length + UPDATES * (setting.rounds + 1)
    caches = {
        "PodCache": (models["PoD"], new_cache(models["PoD"], room)),
        "PodCache, blocks of one layer": (models[DENSE], new_cache(models[DENSE], room)),
    }
    for budget in CASCADES:
        method = pod.eviction.Cascade(budget=min(budget, length // 8 * 4), sinks=setting.sinks)
        cache = pod.PodCache(models[DENSE].config, eviction=method)
        caches[f"cascade:budget={method.budget}"] = models[DENSE], cache
    caches["concatenation"] = models[STOCK], new_cache(models[STOCK], room)
    works = {}
    for name, (model, cache) in caches.items():
        fill(cache, model, batch, length)
        # A layer's new states, made beforehand as a model would have made them.
        states = setting.random(2, batch, KV_HEADS, 1, setting.head_dim)
        sums = received(cache, model, batch, 1)

        def work(model=model, cache=cache, states=states, sums=sums) -> None:
            for _ in range(UPDATES):
                write(cache, model, *states, sums)

        works[name] = work
    seconds = interleaved(works, setting.rounds, setting.device, f"update at {length}")
    return Measured(seconds, [("concatenation", name) for name in works if name != "concatenation"])


def generation(setting: Setting, length: int) -> Measured:
    """`generate` with `NEW_TOKENS` new tokens, from the prompt on."""
    batch, works = setting.batch or 1, {}
    models = random_models(setting, 2 * length)

    def run(model: PreTrainedModel, ids: Tensor, method: str | None) -> None:
        kept = None
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

    kinds = pod_backends(setting)
    for name in (*kinds, DENSE, STOCK):
        model = models["PoD" if name in kinds else name]
        whole = partial(run, model, random_ids(model, batch, length), None)
        works[name] = by(kinds.get(name, "composed"), whole)
    for method in setting.eviction:
        works[f"PoD, {method}"] = partial(run, models["PoD"], random_ids(models["PoD"], batch, length), method)
    works, left_out = runnable(works)
    seconds = interleaved(works, setting.rounds, setting.device, f"generate after {length}")
    pairs = [(name, other) for name in works if name in kinds for other in (DENSE, STOCK)]
    pairs += [(f"PoD, {method}", STOCK) for method in setting.eviction]
    return Measured(seconds, pairs, left_out=left_out)


SUITES = {
    "attention": [attention_forward, attention_training],
    "decode": [decode, decode_attention, decode_after_eviction, decode_attention_after_eviction],
    "prefill": [prefill, cascade_prefill],
    "cache": [update],
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
        "prefill": [32_768, 2**20],
        "cache": [16_384],
        "end-to-end": [32_768],
    },
}
# The whole model does not fit with so long a prompt, or would take minutes: one layer's attention only.
LONGEST = {prefill: 131_072}


def run_suite(suite: str, lengths: list[int], setting: Setting, path: Path) -> dict:
    """Measure one suite; what is there is written after every measurement, so that a long run that is stopped has not
    been for nothing."""
    facts = {
        "suite": suite,
        "device": torch.cuda.get_device_name() if setting.device == "cuda" else setting.device,
        "threads": torch.get_num_threads(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "batch": setting.batch,
        "shared_keys": 2 * shared_blocks().kv_saving,
        "ceilings": timing.ceilings(setting.device, setting.dtype, setting.rounds),
        "results": [],
    }
    for length in lengths:
        for run in SUITES[suite]:
            if length > LONGEST.get(run, length):
                continue
            with torch.no_grad():
                found = run(setting, length)
            facts["results"].append(found.record(run.__name__, length))
            report.write_json(path, facts)
            if setting.device == "cuda":
                torch.cuda.empty_cache()
    return facts


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], required=True)
    command.add_numbers(parser, "--lengths", None, "tokens, by the device")
    parser.add_argument("--batch", type=int, help="rows (1; where a GPU decodes, half a million tokens of them)")
    parser.add_argument("--rounds", type=int, help="timed rounds (9, on a GPU 15)")
    parser.add_argument("--device", choices=list(SETTINGS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--out", type=Path, default=command.default_folder("speed"), help="folder to write to")
    options = parser.parse_args(arguments)
    check_writable(options.out)
    too_few = any(number is not None and number < 1 for number in (options.batch, options.rounds))
    if too_few or min(options.lengths or [SHORTEST]) < SHORTEST:
        raise ValueError(f"--batch and --rounds are at least 1, --lengths at least {SHORTEST}")
    setting = SETTINGS[options.device]
    given = {"batch": options.batch, "rounds": options.rounds, "dtype": options.dtype and getattr(torch, options.dtype)}
    setting = replace(setting, **{name: value for name, value in given.items() if value is not None})
    suites = []
    for suite in SUITES if options.suite == "all" else [options.suite]:
        lengths = options.lengths or LENGTHS[options.device][suite]
        suites.append(run_suite(suite, lengths, setting, options.out / f"speed-{suite}.json"))
    tables = [timing.table(facts["suite"], facts["results"], facts["ceilings"]) for facts in suites]
    page = "\n\n".join([heading(suites[0]), *tables])
    report.write(options.out / "speed.md", page + "\n")
    print(page)
    print(f"written: {options.out}/speed.md and speed-SUITE.json")


def heading(facts: dict) -> str:
    """Where and when: what a figure needs to be believed."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    ceiling = facts["ceilings"]
    return (
        f"## {facts['device']}, {datetime.now(UTC):%Y-%m-%d}, commit {commit or 'unknown'}\n\n"
        f"{facts['dtype']}, torch {torch.__version__}, {facts['threads']} threads; {facts['shared_keys']:.0%} of the "
        f"keys shared. A large copy reached {ceiling[BYTES] / SCALE[BYTES]:,.0f} {BYTES}, a large product "
        f"{ceiling[OPERATIONS] / SCALE[OPERATIONS]:,.2f} {OPERATIONS}."
    )


if __name__ == "__main__":
    sys.exit(main())
