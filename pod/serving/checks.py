"""What of vLLM's settings a PoD model cannot run with: refused by name before anything is loaded."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from pod.blocks import LayerBlocks


class PodConfigCheck(VerifyAndUpdateConfig):
    """vLLM asks it of every PoD model, in each of its processes."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what would compute something else; run without torch.compile and CUDA graphs.

        Raises:
            ValueError: names the setting, and what to write instead.
        """
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        if config.tau is not None:
            raise ValueError(
                f"tau={config.tau}: vLLM serves PoD models without early skip; "
                "give it --hf-overrides '{\"tau\": null}'"
            )
        dtype = vllm_config.cache_config.cache_dtype
        if dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
            raise ValueError(f"--kv-cache-dtype {dtype}: a PoD model's cache is in the model's own type; leave it out")
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: the layers of a block share keys, so "
                "they have to be on one device; use --tensor-parallel-size"
            )
        for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, option) > 1:
                raise ValueError(f"--{option.replace('_', '-')} {getattr(parallel, option)}: PoD models want 1")
        if vllm_config.speculative_config is not None:
            raise ValueError("--speculative-config: PoD models were not tried with speculative decoding; leave it out")
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "--kv-transfer-config: connectors move keys and values of all layers alike, and a PoD model has two "
                "kinds of cache; leave it out"
            )
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            raise ValueError(
                "--disable-hybrid-kv-cache-manager: it would keep all keys of all layers; leave it out, PoD's saving "
                "is two kinds of cache"
            )
        check_tensor_parallel(config.blocks, parallel.tensor_parallel_size)
        # A step's tiles change with its requests: there is no one graph to record.
        vllm_config.model_config.enforce_eager = True


def check_tensor_parallel(blocks: LayerBlocks, size: int) -> None:
    """Refuse a number of ranks whose caches would differ: vLLM has one allocator for all of them.

    Raises:
        ValueError: the KV heads do not divide, or a layer has more anchors, or heads that stream, on one rank than on
            another; names the sizes that fit.
    """
    heads = blocks.num_kv_heads

    def fits(ranks: int) -> bool:
        return heads % ranks == 0 and all(
            len(set(layer.reshape(ranks, -1).sum(dim=1).tolist())) == 1
            for kind in (blocks.is_anchor, blocks.is_streaming)
            for layer in kind
        )

    if not fits(size):
        fitting = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
        raise ValueError(
            f"--tensor-parallel-size {size}: every rank must hold as many KV heads as the others, and of each layer as "
            f"many anchors and heads that stream; of this model's {heads} KV heads and blocks that is so for {fitting}"
        )
