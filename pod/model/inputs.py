"""What a model is called with: padding and packed documents read off it, and what PoD cannot run refused by name."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from pod.cache import PodCache
from pod.cache.storage import left_padded

# What transformers calls a cache among arguments and results: it was renamed in 5.24.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


def check_devices(model: PreTrainedModel) -> None:
    """Refuse to convert a model that a device_map has spread out: the hooks that move its tensors stay with it."""
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): load it with "
            "device_map={'': 0} or without one, convert it and save it (save_pretrained); what was saved loads with "
            "device_map='auto'"
        )


def check_supported(config: PreTrainedConfig, training: bool, output_attentions: bool | None) -> None:
    """Refuse what would act on attention weights, or on a layer's output, and does not exist here."""
    if output_attentions or (output_attentions is None and config.output_attentions):
        raise ValueError(
            "output_attentions is not supported: PoD never holds the [T, T] weights. Use "
            "pod.similarity.attention_similarity, or the dense model, to look at attention."
        )
    if training and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout} is not supported: PoD never holds "
            "the [T, T] weights it would act on. Set config.attention_dropout = 0.0 to train."
        )
    if training and getattr(config, "resid_pdrop", 0):
        raise ValueError(
            f"resid_pdrop={config.resid_pdrop} is not supported: PoD's layers add what they computed without "
            "dropout. Set config.resid_pdrop = 0.0 to train."
        )


def check_tokens(rows: int, count: int) -> None:
    """Refuse an input without rows or without tokens."""
    if not rows:
        raise ValueError("the input has no rows: a batch needs at least one")
    if not count:
        raise ValueError("the input has no tokens: an empty prompt needs at least one, such as the tokenizer's BOS")


def check_cache(cache: object, training: bool) -> None:
    """Refuse another cache than PoD's, and any in training."""
    if not isinstance(cache, PodCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}: PoD models need pod.PodCache(model.config), or no cache at "
            "all, then generate makes one"
        )
    if training:
        raise ValueError("gradients do not flow through a cache: call model.eval(), or train without past_key_values")


def check_turn(held: int, given: int, masked: int, are_embeddings: bool) -> None:
    """Refuse a mask from which `generate` would not tell the tokens that a cache holds from new ones.

    Args:
        held: tokens that the cache holds.
        given: tokens of the input.
        masked: columns of its attention_mask.
        are_embeddings: the input is `inputs_embeds`, of which `generate` leaves out as many as are held.
    """
    if not held or masked == given or (masked == held + given and not are_embeddings):
        return
    what, new = "input_ids", f", or what is new and a mask of {held + given}, what is held included"
    if are_embeddings:
        what, new = "inputs_embeds", ", of which what is held is not computed again"
    raise ValueError(
        f"the cache holds {held} tokens, {what} has {given} and attention_mask {masked}: pass the whole text and a "
        f"mask of as many{new}"
    )


def token_mask(attention_mask: Tensor, batch: int, seen: int, count: int) -> Tensor:
    """The mask as bool, [B, T] or [B, tokens so far and T]."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be [B, tokens] with 0 for padding; got {shape}. A 4-D mask cannot say which keys are "
            "distant: pass document_ids for packed documents."
        )
    if attention_mask.shape[0] != batch or attention_mask.shape[1] not in (count, seen + count):
        raise ValueError(
            f"attention_mask must be [{batch}, {seen + count}] (tokens in the cache and new ones); got "
            f"{tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()


def lengths_of(mask: Tensor) -> Tensor | None:
    """[B] real tokens of left-padded rows; None when no row has padding on the left.

    Padding on the right needs nothing: no real token sees what comes after it, and sinks count from the left.
    """
    if bool(mask.all()):
        return None
    real, is_left = left_padded(mask)
    if bool(left_padded(mask.flip(1))[1].all()):  # on the right
        return None
    if not bool(is_left.all()):
        row = int((~is_left).nonzero()[0])
        raise ValueError(
            f"row {row} of attention_mask is not left-padded while other rows are, or has a hole. Pad all rows on one "
            "side (tokenizer.padding_side = 'left')."
        )
    return real


def documents_of(position_ids: Tensor, batch: int) -> Tensor | None:
    """[B, T] documents of packed samples, whose positions start again; None when they do not."""
    starts = torch.zeros_like(position_ids)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(starts.any()):
        return None
    return starts.cumsum(dim=1).expand(batch, -1)
