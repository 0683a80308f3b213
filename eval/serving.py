"""What PoD brings in vLLM: requests that fit into a pool, by its own accounting; requests, tokens, waits measured.

python eval/serving.py --fit                        # Llama-3-8B's cache, nothing is loaded
python eval/serving.py --ckpt checkpoints/tiny-base exports/tiny-base-pod --lengths 512,1000 --pool 48

Each model runs in vLLM in this process, one after the other, with the same pool and the same requests at once: prompts
of random tokens, greedy. Wants vLLM's environment: docs/SERVE.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, LlamaConfig

import pod
from pod.evaluation.command import add_numbers, add_out
from pod.extras import require
from pod.model.families import pod_config
from pod.terminal import exit_status

LLAMA3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def fits(blocks: pod.LayerBlocks, length: int, pool: int, sizes: tuple[int, int]) -> tuple[float, int]:
    """How many requests of `length` tokens a pool of that many bytes holds, by vLLM; and bytes of a block of 16 tokens.

    vLLM's own functions group the caches of a bfloat16 Llama-3-8B and count their blocks; a step is of 2,048 tokens.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.core import kv_cache_utils

    load_general_plugins()
    from pod.serving.attention import BlockTables, CacheLayer, PodAttention

    stock = LlamaConfig(**LLAMA3_8B, max_position_embeddings=length)
    with tempfile.TemporaryDirectory() as folder:
        pod_config(stock, blocks, *sizes, share="scores").save_pretrained(folder)
        arguments = EngineArgs(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=length,
            block_size=16,
            max_num_batched_tokens=2048,
        )
        vllm_config = arguments.create_engine_config()
        config = AutoConfig.from_pretrained(folder)
    vllm_config.cache_config.kv_cache_layout = BlockTables.supported_kv_cache_layouts()[0].name
    with set_current_vllm_config(vllm_config):
        layers: list[PodAttention] = []
        for number in range(blocks.num_layers):
            layers.append(
                PodAttention(config, number, range(blocks.num_kv_heads), 1.0, f"model.layers.{number}", layers)
            )
    caches = vllm_config.compilation_config.static_forward_context
    specs = {name: one.get_kv_cache_spec(vllm_config) for name, one in caches.items() if isinstance(one, CacheLayer)}
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    found = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, pool)
    return kv_cache_utils.get_max_concurrency_for_kv_cache_config(vllm_config, found), pool // found.num_blocks


def print_fits(lengths: list[int], pool: int, saving: float) -> None:
    """A table of requests that fit, dense and PoD, and their ratio."""
    # Which layers share does not matter to the sum; how many do.
    layers, heads = LLAMA3_8B["num_hidden_layers"], LLAMA3_8B["num_key_value_heads"]
    similarity = torch.rand(heads, layers, layers, generator=torch.Generator().manual_seed(0))
    blocks = pod.LayerBlocks.for_saving((similarity + similarity.mT) / 2, saving, method="sum")
    print(
        f"Llama-3-8B, bfloat16, a pool of {pool / 2**30:g} GiB, sinks 16 and recent 4,080, {blocks.kv_saving:.1%} saved"
    )
    print("| tokens | dense | PoD | ratio |\n|-------:|------:|----:|------:|")
    for length in lengths:
        dense, shared = (
            fits(one, length, pool, (16, 4080))[0] for one in (pod.LayerBlocks.dense(layers, heads), blocks)
        )
        print(f"| {length:,} | {dense:.2f} | {shared:.2f} | {shared / dense:.3f} |")


def measure(ckpt: str, dtype: str, length: int, pool: int, requests: int, new_tokens: int) -> dict[str, float]:
    """Requests that fit and are done, tokens generated, each second; and the mean seconds until a first token."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    engine = LLM(
        ckpt,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=length,
        kv_cache_memory_bytes=pool,
        block_size=32,  # the least that vLLM's own attention on CPUs takes
        max_num_batched_tokens=512,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).llm_engine
    core = engine.engine_core.engine_core
    vocabulary = engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start, first, told, most = time.perf_counter(), {}, {}, 0
    for number in range(requests):
        ids = torch.randint(1, vocabulary, (length - new_tokens,), generator=generator).tolist()
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    with tqdm(total=requests * new_tokens, desc=f"{Path(ckpt).name}: {length:,} tokens", unit="tok") as bar:
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - start)
                bar.update(len(output.outputs[0].token_ids) - told.get(output.request_id, 0))
                told[output.request_id] = len(output.outputs[0].token_ids)
            most = max(most, len(core.scheduler.running))
    seconds = time.perf_counter() - start
    fitting = get_max_concurrency_for_kv_cache_config(engine.vllm_config, core.scheduler.kv_cache_config)
    engine.engine_core.shutdown()
    return {
        "fit": fitting,
        "at once": most,
        "requests/s": requests / seconds,
        "tokens/s": requests * new_tokens / seconds,
        "first token, s": sum(first.values()) / requests,
    }


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="what fits, by vLLM's accounting, of Llama-3-8B")
    parser.add_argument("--ckpt", nargs="+", default=[], help="exports and stock models to run, a row each")
    add_numbers(parser, "--lengths", None, "tokens of a request, prompt and answer (8192,32768,131072; 1024)")
    parser.add_argument("--pool", type=float, help="of all requests' caches: GiB for --fit (64), else MiB (64)")
    parser.add_argument("--saving", type=float, default=0.35, help="of --fit's blocks (0.35)")
    parser.add_argument("--dtype", default="auto", help="of --ckpt: vLLM's --dtype, such as float32 on a CPU (auto)")
    parser.add_argument("--requests", type=int, default=16, help="that are asked at once (16)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer (32)")
    add_out(parser, "serving")
    options = parser.parse_args(arguments)
    require("vllm", "vllm", what="eval/serving.py")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what is counted is in the engine
    if options.fit:
        print_fits(options.lengths or [8192, 32768, 131072], int((options.pool or 64) * 2**30), options.saving)
    rows, pool = [], int((options.pool or 64) * 2**20)
    for length in options.lengths or [1024] if options.ckpt else []:
        for ckpt in options.ckpt:
            one = measure(ckpt, options.dtype, length, pool, options.requests, options.new_tokens)
            rows.append({"model": Path(ckpt).name, "tokens": length, **one})
            print(json.dumps(rows[-1]), flush=True)
    if rows:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "serving.json").write_text(json.dumps({"pool": pool, "rows": rows}, indent=1))
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()) + " |")


if __name__ == "__main__":
    sys.exit(main())
