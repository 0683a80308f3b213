"""Load what `--ckpt` names, run it with the methods that `--eviction` names, and measure what a cache holds."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from pod import eviction
from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.files import opening
from pod.model import adapter
from pod.model.decoder import PodModel
from pod.model.families import convert
from pod.model.gguf import local
from pod.model.inputs import CACHE
from pod.model.reconstruction import reconstruct
from pod.model.weights import PodAdapterError, load_causal_lm

NO_EVICTION = "none"


def load(ckpt: str, device: str | None = None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of an export, of an adapter on its base, or of any causal LM that transformers opens.

    Args:
        ckpt: a directory, a hub id or a GGUF file.
        device: "cpu", "cuda:1", ...; by default this process's GPU (torchrun's LOCAL_RANK), where there is one.
        dtype: "float32", "bfloat16", ...; "auto" is what the weights are stored in.

    Raises:
        ValueError: nothing can be loaded from there, a file of it is damaged, some of its weights are missing, or it is
            a training run that was not exported.
    """
    require_model(ckpt)
    base = None
    try:
        with opening(ckpt):
            try:
                model = load_causal_lm(ckpt, dtype=dtype)
            except PodAdapterError as found:
                base = found.base
                model = adapter.load(base, ckpt, dtype)
            tokenizer = AutoTokenizer.from_pretrained(local(base or ckpt))
    except (OSError, ValueError) as error:
        where = "from there" if Path(ckpt).exists() else "from the hub, and it is no directory here"
        where += "" if base is None else f", an adapter of {base}"
        raise ValueError(f"--ckpt {ckpt}: no model and tokenizer can be loaded {where} ({error})") from error
    if device is None:
        count = torch.cuda.device_count()
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}" if count else "cpu"
    return model.to(device).eval(), tokenizer


def require_model(ckpt: str) -> None:
    """See that a checkpoint is not a training run.

    Raises:
        ValueError: it is one; says how to export it.
    """
    path = Path(ckpt)
    if (path / "steps").is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"--ckpt {ckpt} is a training run: export it first (python -m pod.export --ckpt {ckpt} --out DIR)"
        )


@dataclass(frozen=True, eq=False)
class Variant:
    """A model with one eviction method, or with none.

    Attributes:
        name: the method's text, which results are kept under; "none" without one.
        model: what to run. Without a method it is the model as loaded, with one a PoD model on the same weights.
        method: which tokens the cache keeps; None leaves the cache to the model.
    """

    name: str
    model: PreTrainedModel
    method: eviction.Method | None = None

    @property
    def cache_factory(self) -> Callable[[PreTrainedModel], PodCache] | None:
        """model -> an empty cache with the method, one for each batch; None without a method.

        The factory raises ValueError where the budget is below what the method always keeps in the model.
        """
        return None if self.method is None else lambda model: PodCache(model.config, eviction=self.method)

    @property
    def label(self) -> str:
        """What a progress bar puts after the name of a set; nothing without a method."""
        return "" if self.method is None else f" {self.name}"

    def folder(self, out: Path) -> Path:
        """Where results of this method go: `out` itself without one, else a folder in it."""
        return out if self.method is None else out / re.sub("[:/]", "-", self.name)

    @property
    def parameters(self) -> dict[str, Any] | None:
        """Every hyper-parameter of the method, defaults too: where one changes later, results are of another method."""
        return None if self.method is None else eviction.hyper_parameters(self.method)

    def settings(self) -> dict[str, Any]:
        """What results depend on, and what `eval/report.py` says of them: `model` (see `facts`), and of a method
        `eviction`, its text, and its `parameters`."""
        method = {"eviction": self.name, "parameters": self.parameters}
        return {"model": facts(self.model)} | ({} if self.method is None else method)


def parameters_of(methods: list[eviction.Method] | None) -> dict[str, dict[str, Any]]:
    """Text -> every hyper-parameter of each method, for results that are kept by the text."""
    return {eviction.unparse(method): eviction.hyper_parameters(method) for method in methods or []}


def label_of(ckpt: str, method: str) -> str:
    """What a table, picture or progress bar calls a checkpoint with an eviction method."""
    return Path(ckpt).name + ("" if method == NO_EVICTION else f", {method}")


def by_row(nested: dict[str, dict]) -> dict[str, Any]:
    """`[checkpoint][method]` -> one entry for each row of a table, by its label."""
    return {label_of(ckpt, method): values for ckpt, found in nested.items() for method, values in found.items()}


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """What a model is, for those who have its results and not its files.

    Returns:
        `kind` ("dense", "PoD", "window attention" or "CLA"), `tokens` it was made for (None where its config does not
        say), `kv_saving` of its blocks, 0 to 1; and of a model that is not dense `sink_size` and `recent_size`.
    """
    config = model.config
    tokens = getattr(config, "max_position_embeddings", None)
    share = getattr(config, "share", None)
    if share is None or (share != "window" and config.blocks.is_dense):
        return {"kind": "dense", "tokens": tokens, "kv_saving": 0.0}
    kind = {"window": "window attention", "kv": "CLA"}.get(share, "PoD")
    sizes = {"sink_size": config.sink_size, "recent_size": config.recent_size}
    return {"kind": kind, "tokens": tokens, "kv_saving": config.kv_saving} | sizes


def as_pod(model: PreTrainedModel) -> PreTrainedModel:
    """A PoD model with the same weights, none of them copied; a dense one gets blocks of one layer.

    Raises:
        ValueError: the family is not supported.
    """
    if hasattr(model.config, "share"):
        return model
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return convert(model, LayerBlocks.dense(config.num_hidden_layers, heads))


def windowed(model: PreTrainedModel, sinks: int, recent: int) -> PreTrainedModel:
    """The same weights with window attention: every layer attends to sinks and recent tokens alone.

    Raises:
        ValueError: the family is not supported.
    """
    blocks = LayerBlocks.dense(*as_pod(model).config.blocks.anchors.shape)
    return convert(model, blocks, sinks, recent, "window").eval()


def variants(model: PreTrainedModel, methods: list[eviction.Method] | None) -> list[Variant]:
    """The model without eviction, then with each of the methods.

    Raises:
        ValueError: two equal methods, a family that is not supported, a budget below what is always kept.
    """
    found = [Variant(NO_EVICTION, model)]
    if methods:
        converted = as_pod(model)
        found += [Variant(eviction.unparse(method), converted, method) for method in methods]
    names = [one.name for one in found]
    for one in found:
        if names.count(one.name) > 1:
            raise ValueError(f"the eviction method {one.name} is named twice")
        if one.cache_factory is not None:
            one.cache_factory(one.model)  # a budget that cannot be is found before hours of work
    return found


def asks_apart(method: object) -> bool:
    """Whether a context is to be evicted from before its question is read: the method has `query_aware=False`."""
    return isinstance(method, eviction.Eviction) and not method.query_aware


@torch.no_grad()
def read_context(
    model: PreTrainedModel,
    cache: PodCache,
    input_ids: torch.Tensor,
    question: int,
    attention_mask: torch.Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    suffix: str = "\n",
) -> None:
    """Read prompts without their questions into an empty cache; `generate` on the whole prompts goes on from there.

    Args:
        model: that the cache is of, in evaluation mode.
        cache: an empty one. Where its method evicts after a prefill, it evicts at the end of the contexts.
        input_ids: [B, T] whole prompts.
        question: how many last tokens of each row are its question, at least 1.
        attention_mask: [B, T], 0 for padding on the left; None when all are real.
        tokenizer, suffix: make KVzip's requests, see `pod.reconstruct`; without them the context alone is repeated.

    Raises:
        ValueError: a row without a context or without a question.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    context = mask[:, : input_ids.shape[1] - question]
    if question < 1 or not bool(context.any(dim=1).all()):
        raise ValueError(
            f"query_aware=false evicts the context before the question is read: a prompt of {input_ids.shape[1]} "
            f"tokens of which {question} are the question has not both"
        )
    # Those that `generate` counts for the question, so that distances across the two are right in padded rows.
    positions = (context.cumsum(dim=1) - 1).clamp(min=0)
    model(
        input_ids[:, : context.shape[1]],
        attention_mask=context,
        position_ids=positions,
        past_key_values=cache,
        logits_to_keep=1,
    )
    if cache.eviction.waits:
        reconstruct(model, cache, input_ids[:, : context.shape[1]], tokenizer, context, suffix)


def generate_greedily(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    count: int,
    question: int = 0,
    cache: Cache | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """[B, T] -> the next `count` tokens [B, count], greedily, with `cache` or the model's own default cache.

    Where the cache's method has `query_aware=False`, the `question` last tokens are read after it has evicted; the
    tokenizer makes KVzip's requests.

    Args:
        attention_mask: [B, T], 0 for padding on the left; None when all are real.
        **options: of `generate`; with any, a text may also end before it has `count` tokens.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if isinstance(cache, PodCache) and asks_apart(cache.eviction):
        read_context(model, cache, input_ids, question, mask, tokenizer)
    output = model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        num_beams=1,
        # Sampling settings that a checkpoint brings along would only cause warnings.
        temperature=None,
        top_p=None,
        top_k=None,
        **{CACHE: cache},
        **(options or {"min_new_tokens": count, "pad_token_id": 0}),
    )
    return output[:, input_ids.shape[1] :]


def cache_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache holds, measured on its tensors."""
    if isinstance(cache, PodCache):
        return cache.nbytes()
    return sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))


def dense_token_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in every layer and KV head, in the model's precision."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize


@torch.inference_mode()
def measured_saving(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache | None = None, question: int = 0
) -> dict[str, float]:
    """Fill a cache with one prompt and weigh it against the dense one.

    Args:
        model: in evaluation mode.
        input_ids: [1, T].
        cache: an empty one; the model's own default when None.
        question: how many last tokens are the question, for a cache whose method `asks_apart`.

    Returns:
        `tokens` T, `bytes` of the cache's tensors after the prefill, `dense_bytes` of T keys and values in every layer
        and KV head, and `saving`, the share of these that is gone.
    """
    if cache is None and isinstance(getattr(model, "model", None), PodModel):
        cache = PodCache(model.config, max_length=input_ids.shape[1])
    input_ids, seen = input_ids.to(model.device), 0
    if isinstance(cache, PodCache) and asks_apart(cache.eviction):
        read_context(model, cache, input_ids, question)
        seen = input_ids.shape[1] - question
    output = model(input_ids[:, seen:], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    size = cache_bytes(output[CACHE])
    dense = dense_token_bytes(model) * input_ids.shape[1]
    return {"tokens": input_ids.shape[1], "bytes": size, "dense_bytes": dense, "saving": 1 - size / dense}
