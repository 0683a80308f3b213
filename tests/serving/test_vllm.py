"""PoD models inside vLLM against the library's own `generate`, the pool by vLLM's own counters, what is refused.

vLLM has an environment of its own: `make test-vllm`.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from engines import (
    DENSE,
    DIM,
    FAMILIES,
    KV_HEADS,
    LAYERS,
    MIXED,
    SIZES,
    STREAMING,
    answered,
    answers,
    assert_as_generate,
    core,
    engine,
    free_blocks,
    needs_vllm,
    prompts,
    saved,
    stop,
)

import pod

pytestmark = needs_vllm
LENGTHS = (1, 5, 30, 64, 65, 130, 200, 301)  # chunks of 64: some prefill while others decode
BLOCK = 16
MOSTLY = [[0, -1], [-1, -1], [-1, -1], [3, -1]]
CASES = {
    **{family: {"family": family} for family in FAMILIES},
    "all near": {"sizes": SIZES["all near"]},
    "no sinks": {"sizes": (0, 40)},
    "dense": {"anchors": DENSE},
    "keys": {"share": "keys"},
    "kv": {"share": "kv"},
    "kv, layers of anchors and of none": {"share": "kv", "anchors": [[0, 0], [0, 0], [2, 2], [2, 2]]},
    "window": {"share": "window", "anchors": DENSE},
    "heads that stream": {"anchors": STREAMING},
    "heads that stream, keys": {"share": "keys", "anchors": STREAMING},
    "layers of heads that stream": {"anchors": [[-1, -1], [1, -1], [2, 2], [3, 2]]},
}


@contextmanager
def running(path, **options):
    llm = engine(path, **options)
    try:
        yield llm
    finally:
        stop(llm)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_eight_requests_at_once_answer_as_generate(case, tmp_path):
    """Then again, with prefixes in common: what vLLM finds in its cache, sinks included, gives the same answers."""
    path, asked = saved(tmp_path, **case), prompts(LENGTHS)
    with running(path) as llm:
        before = free_blocks(llm)
        assert_as_generate(path, asked, answers(llm, asked))
        longest = asked[-1]
        again = [
            longest[:cut] + more for cut, more in zip((300, 250, 96, 40), prompts((3, 80, 17, 90), seed=2), strict=True)
        ]
        outputs = answered(llm, again)
        assert_as_generate(path, again, [list(output.outputs[0].token_ids) for output in outputs])
        assert [output.num_cached_tokens for output in outputs] == [288, 240, 96, 32]  # whole blocks of 16
        assert free_blocks(llm) == before


@pytest.mark.parametrize("share", ["scores", "window"])
def test_a_prefix_whose_sinks_are_gone_is_computed_again(share, tmp_path):
    """The blocks of its window are cached still: without the sinks' they are of no use."""
    path = saved(tmp_path, share=share, sizes=(20, 28), anchors=DENSE if share == "window" else MIXED)
    asked = prompts((200,))
    with running(path) as llm:
        assert_as_generate(path, asked, answers(llm, asked))
        pool = core(llm).scheduler.kv_cache_manager.block_pool
        group = len(core(llm).scheduler.kv_cache_config.kv_cache_groups) - 1  # of near keys
        from vllm.v1.core.kv_cache_utils import get_group_id

        near = [block for block in pool.blocks if block.block_hash and get_group_id(block.block_hash) == group]
        pool.evict_blocks({min(near, key=lambda block: block.block_id).block_id})
        again = [asked[0] + [7]]
        (output,) = answered(llm, again)
        assert_as_generate(path, again, [list(output.outputs[0].token_ids)])
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_near_as_the_library_in_half_precision(dtype, tmp_path):
    """Log-probabilities of the prompts' next tokens: at most twice the library's own distance from float32."""
    path, asked = saved(tmp_path), prompts((40, 120, 200))
    from vllm import SamplingParams

    with running(path, dtype=dtype, max_logprobs=-1) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": one} for one in asked], sampling, use_tqdm=False)
    exact, half = pod.load(path).float().eval(), pod.load(path).to(getattr(torch, dtype)).eval()
    ours = theirs = 0.0
    for prompt, output in zip(asked, outputs, strict=True):
        ids = torch.tensor([prompt])
        wanted = exact(ids).logits[0, -1].log_softmax(dim=-1)
        given = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        given = torch.tensor([given[token] for token in range(len(wanted))])
        theirs = max(theirs, (given - wanted).abs().max().item())
        ours = max(ours, (half(ids).logits[0, -1].float().log_softmax(dim=-1) - wanted).abs().max().item())
    assert theirs <= 2 * ours


@pytest.mark.parametrize("anchors", [MIXED, STREAMING, MOSTLY], ids=["shared", "streaming", "mostly streaming"])
def test_the_pool_is_the_formula(anchors, tmp_path):
    """vLLM's own accounting: bytes of a block, blocks of a request while it runs, requests that fit."""
    sinks, recent = sizes = (4, 100)
    pool = 2**30  # VLLM_CPU_KVCACHE_SPACE
    path, blocks = saved(tmp_path, sizes=sizes, anchors=anchors), pod.LayerBlocks(anchors)
    with running(path, max_num_batched_tokens=64, async_scheduling=False) as llm:
        config = core(llm).scheduler.kv_cache_config
        own, streams = (int(kind.sum()) for kind in (blocks.is_anchor, blocks.is_streaming))
        far, near = LAYERS * KV_HEADS - streams + own, LAYERS * KV_HEADS - own + streams
        assert far == 2 * LAYERS * KV_HEADS * (1 - blocks.kv_saving) and (near > far) == (anchors is MOSTLY)
        bytes_of_block = BLOCK * DIM * 4 * max(far, near)
        assert {tensor.block_stride for tensor in config.kv_cache_tensors} == {bytes_of_block}
        assert config.num_blocks == pool // bytes_of_block
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        options = llm.llm_engine.vllm_config
        most = options.model_config.max_model_len
        near = math.ceil((recent - 1 + options.max_in_flight_tokens) / BLOCK) + 1 + math.ceil(sinks / BLOCK)
        assert get_max_concurrency_for_kv_cache_config(options, config) == config.num_blocks / (
            math.ceil(most / BLOCK) + near
        )
        manager = core(llm).scheduler.kv_cache_manager
        before, length = free_blocks(llm), 400
        sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
        llm.llm_engine.add_request("one", {"prompt_token_ids": prompts((length,))[0]}, sampling)
        computed = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            following = min(computed + 64, length) if computed < length else computed + 1
            if following == length + 39:
                break  # the last step gave everything back
            # Freed before the step, so by what was computed before it.
            freed = max(0, max(0, computed - recent + 1) // BLOCK - math.ceil(sinks / BLOCK))
            held = 2 * math.ceil(following / BLOCK) - freed
            assert before - free_blocks(llm) == held, following
            assert held - math.ceil(following / BLOCK) <= near
            computed = following
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert free_blocks(llm) == before and manager.usage == 0


def test_preempted_requests_are_computed_again(tmp_path):
    """A pool of 70 blocks: all eight begin, and each grows to 17 blocks of values alone."""
    path, asked = saved(tmp_path), prompts((60,) * 8)
    with running(path, num_gpu_blocks_override=70, enable_prefix_caching=False) as llm:
        scheduler, before = core(llm).scheduler, free_blocks(llm)
        preempted = []
        put_back = scheduler._preempt_request
        scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args[0]), put_back(*args, **kwargs))[1]
        assert_as_generate(path, asked, answers(llm, asked, count=200))
        assert preempted
        assert free_blocks(llm) == before


def test_aborted_requests_give_their_blocks_back(tmp_path):
    path, asked = saved(tmp_path), prompts((200, 90, 90, 30))
    from vllm import SamplingParams

    with running(path) as llm:
        before, sampling = free_blocks(llm), SamplingParams(temperature=0, max_tokens=24, detokenize=False)
        for number, prompt in enumerate(asked):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        done = {}
        for step in range(200):
            if step in (1, 6):  # while it is prefilled, and while it decodes
                llm.llm_engine.abort_request(["0" if step == 1 else "1"])
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            if not llm.llm_engine.has_unfinished_requests():
                break
        assert_as_generate(path, asked[2:], [done["2"], done["3"]])
        assert free_blocks(llm) == before


def test_several_answers_with_log_probabilities(tmp_path):
    """n > 1, sampled: what vLLM says of each token is what the library's logits say."""
    path, (prompt,) = saved(tmp_path), prompts((120,))
    from vllm import SamplingParams

    with running(path) as llm:
        sampling = SamplingParams(n=3, temperature=1.0, max_tokens=12, logprobs=1, detokenize=False, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    model = pod.load(path).float().eval()
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        logits = model(torch.tensor([prompt + list(one.token_ids)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(dim=-1)
        for place, (token, given) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            assert given[token].logprob == pytest.approx(wanted[place, token].item(), abs=1e-4)


REFUSED = {
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    "pipeline": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2: the layers of a block share keys"),
    "hybrid manager": ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager: it would keep"),
    "tensor parallel": ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: every rank .* that is so for 1 "),
    "speculation": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "--speculative-config: PoD models were not tried",
    ),
    "tau": ({"hf_overrides": {"tau": 0.5}}, "tau=0.5: vLLM serves PoD models without early skip"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name(case, tmp_path):
    options, says = case
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    arguments = EngineArgs(str(saved(tmp_path)), skip_tokenizer_init=True, dtype="float32", **options)
    with pytest.raises(ValueError, match=f"(?m){says}"):
        arguments.create_engine_config()


def test_tensor_parallel_sizes_that_fit():
    from pod.serving.checks import check_tensor_parallel

    alike = pod.LayerBlocks([[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1]])
    check_tensor_parallel(alike, 2)
    with pytest.raises(
        ValueError, match=r"--tensor-parallel-size 4: .* this model's 4 KV heads and blocks .* for 1, 2$"
    ):
        check_tensor_parallel(alike, 4)
    check_tensor_parallel(pod.LayerBlocks.uniform(4, 4, 2), 4)
    streaming = pod.LayerBlocks([[0, 0, 0, 0], [0, -1, -1, 0], [2, 2, -1, -1]])
    with pytest.raises(ValueError, match="as many anchors and heads that stream; .* is so for 1$"):
        check_tensor_parallel(streaming, 2)
