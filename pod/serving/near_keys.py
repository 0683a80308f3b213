"""The cache of near keys: a layer's own keys of sinks and recent tokens, where another layer has its distant ones.

vLLM knows sliding windows. Here the first tokens stay besides, so a request's blocks between its sinks and its window
are freed, and a prefix that is found in the cache needs the sinks' blocks as well as the window's.
"""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec


class NearKeysManager(SlidingWindowManager):
    """Frees the blocks between sinks and window."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """0: no request is without its first blocks."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free what the token at position `processed_computed_tokens` and all after it do not see."""
        oldest = max(0, processed_computed_tokens - self.sliding_window + 1)
        sinks = cdiv(self.kv_cache_spec.sink_size, self.block_size)
        self._remove_blocks_in_range(request_id, sinks, oldest // self.block_size)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **parallel: int,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix whose window and whose sinks are cached: the sinks' blocks in the place of null blocks."""
        where = (kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens)
        blocks, length = super().find_longest_cache_hit(block_hashes, max_length, *where, **parallel)
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(cdiv(kv_cache_spec.sink_size, size), len(blocks[0]))):
            if not blocks[0][number].is_null:
                continue
            found = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if found is None:  # what is cached behind it is of no use
                return cls.find_longest_cache_hit(block_hashes, number * size, *where, **parallel)
            for of_group, block in zip(blocks, found, strict=True):
                of_group[number] = block
        return blocks, length

    @classmethod
    def reachable_block_mask(cls, *args: object, **kwargs: object) -> None:
        """None: every block may serve a later request, the sinks' always."""
        return None


KVCacheSpecRegistry._ensure_registered()  # else ours alone would be the registry


@register_kv_cache_spec(manager_class=NearKeysManager, uniform_type_base_spec=SlidingWindowSpec)
@dataclass(frozen=True, kw_only=True)
class NearKeysSpec(SlidingWindowSpec):
    """Of one layer: so many vectors of each token among its sinks and the `sliding_window` most recent."""

    sink_size: int

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks that a request holds at most: the window's, those of tokens in flight, the sinks'."""
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return min(window + cdiv(self.sink_size, self.block_size), cdiv(max_model_len, self.block_size))
