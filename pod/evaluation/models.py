"""Load what `--ckpt` names, and measure what its cache holds."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

import pod  # noqa: F401  registers the PoD models
from pod.cache import PodCache
from pod.model import PodModel


def load(ckpt: str, device: str | None = None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of an export, or of any causal LM that transformers opens.

    Args:
        ckpt: a directory or a hub id.
        device: "cpu", "cuda:1", ...; by default this process's GPU (torchrun's LOCAL_RANK), where there is one.
        dtype: "float32", "bfloat16", ...; "auto" is what the weights are stored in.

    Raises:
        ValueError: nothing can be loaded from there, or it is a training run that was not exported.
    """
    path = Path(ckpt)
    if (path / "steps").is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"--ckpt {ckpt} is a training run: export it first (python -m pod.export --ckpt {ckpt} --out DIR)"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(ckpt, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(ckpt)
    except (OSError, ValueError) as error:
        raise ValueError(f"--ckpt {ckpt}: no model and tokenizer can be loaded from there ({error})") from error
    if device is None:
        count = torch.cuda.device_count()
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}" if count else "cpu"
    return model.to(device).eval(), tokenizer


def cache_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache holds, measured on its tensors."""
    if isinstance(cache, PodCache):
        return cache.nbytes()
    return sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))


@torch.inference_mode()
def measured_saving(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache | None = None) -> dict[str, float]:
    """Fill a cache with one prompt and weigh it against the dense one.

    Args:
        model: in evaluation mode.
        input_ids: [1, T].
        cache: an empty one; the model's own default when None.

    Returns:
        `tokens` T, `bytes` of the cache's tensors after the prefill, `dense_bytes` of T keys and values in every layer
        and KV head, and `saving`, the share of these that is gone.
    """
    if cache is None and isinstance(getattr(model, "model", None), PodModel):
        cache = PodCache(model.config, max_length=input_ids.shape[1])
    output = model(input_ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = cache_bytes(output.past_key_values)
    dense = 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize * input_ids.shape[1]
    return {"tokens": input_ids.shape[1], "bytes": size, "dense_bytes": dense, "saving": 1 - size / dense}
