"""What the tests of serving share: tiny random models on disk, and engines in this process."""

import importlib.util
import os
from pathlib import Path

import pytest

# Before anything imports vLLM: the engine in this process, a small pool, no usage statistics.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import pod

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"
)
LAYERS, HEADS, KV_HEADS, DIM, VOCAB, LONGEST = 4, 4, 2, 16, 97, 512
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Heads share differently: layer 1 has one anchor, layer 2 none, and layer 3's have theirs in two layers.
MIXED = [[0, 0], [0, 1], [0, 1], [3, 1]]
STREAMING = [[0, -1], [0, 1], [-1, 1], [3, 1]]
DENSE = [[layer] * KV_HEADS for layer in range(LAYERS)]
SIZES = {"window": (4, 28), "all near": (4, 1000)}  # the second is longer than any prompt


def tiny(family: str = "llama", seed: int = 0):
    """A stock model with weights wide enough that its greedy answers are not all one token."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    fields = {"head_dim": DIM} if family in ("llama", "mistral", "qwen3") else {}
    fields |= {"sliding_window": None} if family in ("mistral", "phi3") else {}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=HEADS * DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LONGEST,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **fields,
    )
    return model_class(config).eval()


def saved(folder: Path, family="llama", share="scores", anchors=MIXED, sizes=SIZES["window"]) -> Path:
    """A PoD model, written to `folder`."""
    pod.convert(tiny(family), pod.LayerBlocks(anchors), *sizes, share=share).save_pretrained(folder)
    return folder


def prompts(lengths, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def generated(model, prompt: list[int], count: int) -> list[int]:
    """The library's own greedy answer."""
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


def engine(path: Path, **options):
    """A vLLM engine in this process, by default with eight requests at once and chunks of 64 tokens."""
    from vllm import LLM

    fields = {"dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    fields |= {"skip_tokenizer_init": True, "block_size": 16, "seed": 0}
    return LLM(str(path), **(fields | options))


def answered(llm, asked: list[list[int]], count: int = 24) -> list:
    """vLLM's outputs for prompts of tokens, asked at once, greedy."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": one} for one in asked], sampling, use_tqdm=False)


def answers(llm, asked: list[list[int]], count: int = 24) -> list[list[int]]:
    """The tokens of these."""
    return [list(output.outputs[0].token_ids) for output in answered(llm, asked, count)]


def assert_as_generate(path: Path, asked: list[list[int]], given: list[list[int]]) -> None:
    """Token for token, or parting where the library's two best logits are less than 1e-4 apart."""
    model = pod.load(path).float().eval()
    for prompt, answer in zip(asked, given, strict=True):
        wanted = generated(model, prompt, len(answer))
        parts = [place for place, (mine, theirs) in enumerate(zip(answer, wanted, strict=True)) if mine != theirs]
        if parts:
            logits = model(torch.tensor([prompt + wanted[: parts[0]]]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            assert answer[parts[0]] in best.indices.tolist(), (len(prompt), parts[0], answer, wanted)
            assert best.values[0] - best.values[1] < 1e-4, (len(prompt), parts[0], answer, wanted)


def core(llm):
    """The engine's core, whose scheduler and pool are vLLM's own."""
    return llm.llm_engine.engine_core.engine_core


def free_blocks(llm) -> int:
    """Blocks that nobody holds, of vLLM's pool."""
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def stop(llm) -> None:
    """Give the pool back."""
    llm.llm_engine.engine_core.shutdown()
