"""Self-speculation: the model drafts on its own cache by a sparse read, and verifies by the full one.

TriForce (arXiv 2404.11912) and MagicDec (arXiv 2408.11049) draft on a second, small cache. Here it is the same one:
each of gamma drafted tokens reads what a method such as Quest chooses of it, they are taken back (`PodCache.drafting`),
and one forward of gamma + 1 tokens reads everything and writes their true keys and values. Which of them are accepted
is transformers' assisted decoding: greedy text stays what it is, samples keep their distribution.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationMode

from pod.cache import PodCache
from pod.eviction import ReadSelector
from pod.model.inputs import CACHE

GAMMA = 4  # between MagicDec's 3 and TriForce's 6
OTHERS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def with_draft(model: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate`, so that it drafts.

    Raises:
        ValueError: they name another way to draft.
    """
    for name in OTHERS:
        if options.get(name):
            raise ValueError(f"draft and {name} are two ways to draft: leave one of them out")
    given = options.get("generation_config") or model.generation_config
    gamma = {} if given.num_assistant_tokens else {"num_assistant_tokens": GAMMA}
    return gamma | options | {"assistant_model": model}


def check_draft(model: PreTrainedModel, config: GenerationConfig, mode: GenerationMode) -> None:
    """Refuse to draft where transformers would not, or for layers on several devices.

    Raises:
        ValueError: names what is in the way.
    """
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"draft is for greedy search and sampling, not for {mode.value}: leave out draft, or num_beams"
        )
    if config.use_cache is False:
        raise ValueError("draft reads parts of the cache, and use_cache=False has none: leave one of them out")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError("draft works on one device, and the model lies on several: load it with device_map={'': 0}")


def drafting(reader: ReadSelector, cache: PodCache, input_ids: Tensor) -> AbstractContextManager[None]:
    """`PodCache.drafts_by` for a prompt [B, T], of which a share is one."""
    if isinstance(reader, ReadSelector) and reader.is_share:
        reader = reader.with_budget(reader.tokens_of(input_ids.shape[1], 0, 1))
    return cache.drafts_by(reader)


class SelfDraft(CandidateGenerator):
    """Drafts of a model on its own cache; `num_assistant_tokens` in every round.

    Args:
        model: a PoD model.
        input_ids: [1, T] int64, the prompt; its cache is inside `PodCache.drafts_by`.
        generation_config, logits_processor, model_kwargs: as `generate` has prepared them.

    Raises:
        ValueError: several rows, or more draft tokens than the cache can take back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ) -> None:
        rows, length = input_ids.shape
        if rows > 1:
            raise ValueError(f"draft is for one row, and there are {rows}: generate one after the other")
        self.model, self.config, self.processor = model, generation_config, logits_processor
        self.cache = model_kwargs[CACHE]
        if self.config.num_assistant_tokens > self.cache.crop_slack:
            raise ValueError(
                f"num_assistant_tokens={self.config.num_assistant_tokens} is more than the {self.cache.crop_slack} "
                "tokens that the cache can take back (crop_slack): lower one, or make a cache with more of the other"
            )
        positions = model_kwargs.get("position_ids")
        # RoPE's angle of a token less its column: padding is before the prompt's last token.
        self.offset = 0 if positions is None else positions[:, -1:] - (length - 1)

    def get_candidates(self, input_ids: Tensor, **kwargs) -> tuple[Tensor, Tensor | None]:
        """Draft what may follow.

        Args:
            input_ids: [1, T] int64, the text so far.

        Returns:
            [1, T + n] int64 and the logits [1, n, V] float32 that the n tokens were drawn by; without any, and None,
            where more than the last token is not in the cache yet, as of a prompt, or no two tokens may follow.
        """
        length, held = input_ids.shape[1], self.cache.get_seq_length()
        count = min(self.config.num_assistant_tokens, self.config.max_length - length - 1)
        if count < 1 or not held or length - held > 1:
            return input_ids, None
        ids, logits = input_ids, []
        with self.cache.drafting():
            for place in range(held, held + count):
                position = self.offset + torch.full((1, 1), place, device=ids.device)
                out = self.model(input_ids=ids[:, -1:], position_ids=position, past_key_values=self.cache)
                logits.append(self.processor(ids, out.logits[:, -1].float()))
                if self.config.do_sample:
                    token = torch.multinomial(logits[-1].softmax(dim=-1), 1)
                else:
                    token = logits[-1].argmax(dim=-1, keepdim=True)
                ids = torch.cat([ids, token], dim=1)
        ends = getattr(self.config, "_eos_token_tensor", None)
        if ends is not None:  # nothing follows the text's end, which itself is verified like any other token
            count = min([count, *(torch.isin(ids[0, length:], ends).nonzero()[:1, 0] + 1).tolist()])
        return ids[:, : length + count], torch.stack(logits[:count], dim=1)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Count what was drafted, one less than the logits [1, n + 1, V], and what was accepted of it."""
        self.cache.drafted += scores.shape[1] - 1
        self.cache.accepted += int(num_matches)
