"""lm-evaluation-harness with a cache that evicts: a model class whose every answer is read through a `PodCache`.

    python -c "import pod.evaluation.harness, lm_eval.__main__ as m; m.cli_evaluate()" run --model pod \\
        --model_args '{"pretrained": "exports/llama3-32k", "eviction": "snapkv:budget=1024"}' --tasks mmlu

    lm = PodLM("exports/llama3-32k", eviction=pod.eviction.SnapKV(budget=1024))
    lm_eval.simple_evaluate(lm, tasks=["mmlu"], num_fewshot=5)

The harness's own class scores a multiple choice by the logits of one forward over prompt and answer, without a cache:
in it every method would equal the model without one. Here the prompt less its last tokens is read first and evicted
from, and only then its last tokens and the answer, of which the logits are taken. A method that reads in strides
(StreamingLLM, Cascade) evicts between them, and is given all at once. Tasks that generate get such a cache too.
"""

import importlib.util
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from pod import eviction as methods
from pod.cache import PodCache
from pod.evaluation import models
from pod.eviction.base import ChainPolicy
from pod.extras import require

if importlib.util.find_spec("lm_eval"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
else:  # said when a model is made; the module has its documentation all the same
    HFLM = object

    def register_model(*names: str) -> Any:
        return lambda kind: kind


Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (context, continuation), the ids of either


@register_model("pod")
class PodLM(HFLM):
    """The harness's Hugging Face model with a cache of ours.

    Args:
        pretrained: an export, whatever else `--ckpt` names, or a model; a dense one becomes blocks of one layer.
        eviction: a method or its text, `snapkv:budget=1024`; None keeps every token, in a cache all the same.
        last_tokens: as many tokens at a prompt's end are read after the eviction, with the answer; at least 1, as the
            answer's first token is foretold there. What the method sees of the question is before them.
        batch_size: of tasks that generate; answers are scored one by one.
        **options: of `HFLM`; with a model also its `tokenizer`.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: `last_tokens` below 1; a method with `query_aware=False`, as the harness does not say where a
            question begins; what `pod.evaluation.models.load` refuses.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        eviction: methods.Method | str | None = None,
        last_tokens: int = 1,
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        require("lm-eval", "lm_eval", what="lm-evaluation-harness's model")
        if last_tokens < 1:
            raise ValueError(f"last_tokens must be at least 1, got {last_tokens}")
        self.eviction = methods.parse(eviction) if isinstance(eviction, str) else eviction
        if models.asks_apart(self.eviction):
            raise ValueError(
                f"{methods.unparse(self.eviction)}: the harness does not say where a question begins: leave "
                "query_aware out, and hold back its tokens with last_tokens"
            )
        self.last_tokens = last_tokens
        if isinstance(pretrained, str):
            device, dtype = options.pop("device", None), options.pop("dtype", None)
            pretrained, tokenizer = models.load(pretrained, device, dtype or "auto")
            options.setdefault("tokenizer", tokenizer)
        super().__init__(models.as_pod(pretrained), backend="causal", batch_size=batch_size, **options)

    def new_cache(self) -> PodCache:
        """An empty cache with the method."""
        return PodCache(self.model.config, eviction=self.eviction)

    @property
    def acts_in_strides(self) -> bool:
        """The method evicts inside a forward."""
        return isinstance(self.eviction, ChainPolicy)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, greedy would have written it) of each continuation, in the requests' order."""
        found = []
        for said, context, continuation in tqdm(requests, desc="log-likelihoods", disable=disable_tqdm):
            answer = self._answer(context, continuation)
            if said is not None:  # of a part of a text there is nothing to remember
                self.cache_hook.add_partial("loglikelihood", said, answer)
            found.append(answer)
        return found

    @torch.inference_mode()
    def _answer(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([(context + continuation)[-(self.max_length + 1) :][:-1]], device=self.device)
        count = len(continuation)
        # The first of the continuation is foretold by the context's last token.
        prompt = 0 if self.acts_in_strides else max(0, ids.shape[1] - (count - 1) - self.last_tokens)
        cache = self.new_cache()
        if prompt:
            self.model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
        logits = self.model(ids[:, prompt:], past_key_values=cache, logits_to_keep=count).logits[0]
        wanted = torch.tensor(continuation, device=logits.device)
        chances = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return float(chances.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """As the harness has it.

        Raises:
            ValueError: a method that evicts after a prompt: a text that is scored from its first token has none.
        """
        if self.eviction is not None and not self.acts_in_strides:
            raise ValueError(
                f"{methods.unparse(self.eviction)} evicts after a prompt, and a text that is scored whole has none: "
                "`pod eval perplexity --stream N` feeds it in chunks"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        return super()._model_generate(context, max_length, stop, past_key_values=self.new_cache(), **options)
