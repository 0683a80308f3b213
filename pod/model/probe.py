"""Watch the attention layers of a running model, stock or PoD, one sample at a time and without its padding.

    watch(model, batches, [meter], "attention similarity", progress=True)

A *meter* is told of every sample: `begin(length, layers)`, which says whether it wants it; `enter(layer, seen)` as each
attention is called, and `leave(layer, hidden_states)` with what the decoder layer gives back, lowest layer first; then
`end()`. Several meters share the model's one forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

_POSITIONS = 256  # whose logits are in memory at once


@dataclass(frozen=True)
class Seen:
    """An attention module and what it is called with: hidden states [1, T, C], and RoPE's cos and sin [1, T, D]; and
    the loss's gradient [T, C] at what it gives out, where the meters want it."""

    module: nn.Module
    hidden_states: Tensor
    cos: Tensor
    sin: Tensor
    gradient: Tensor | None = None

    def project(self, name: str, tokens: slice | Tensor) -> Tensor:
        """Queries ("q") or keys ("k") after norm and RoPE, or values ("v"), of some tokens: [heads, n, D]."""
        module, hidden_states = self.module, self.hidden_states[:, tokens]
        if hasattr(module, "qkv_proj"):  # Phi-3's one matrix: queries, then keys, then values
            kv = module.num_key_value_heads * module.head_dim
            states = module.qkv_proj(hidden_states)
            parts = {"q": slice(None, -2 * kv), "k": slice(-2 * kv, -kv), "v": slice(-kv, None)}
            states = states[..., parts[name]]
        else:
            states = getattr(module, f"{name}_proj")(hidden_states)
        states = states.view(*states.shape[:2], -1, module.head_dim)
        norm = getattr(module, f"{name}_norm", None)
        if norm is not None:
            states = norm(states)
        states = states.transpose(1, 2)
        if name == "v":
            return states[0]
        # The function rotates a pair; queries and keys are of different lengths here, so its other half gets no heads.
        return apply_rotary_pos_emb(states, states[:, :0], self.cos[:, tokens], self.sin[:, tokens])[0][0]

    def logits(self, queries: slice | Tensor, keys: slice) -> Tensor:
        """[H_kv, G * n, N] float32, scaled, nothing masked; queries of a group side by side, each n rows.

        One matrix product per KV head serves its whole query group; keys are not repeated.
        """
        key = self.project("k", keys).float()
        query = self.project("q", queries).float().reshape(key.shape[0], -1, key.shape[-1])
        return torch.matmul(query, key.transpose(1, 2)).mul_(self.module.scaling)


class Meter(Protocol):
    """What `watch` tells of a model's layers; what a meter leaves out of it does nothing.

    `wants_gradients` is read where it is there.
    """

    def begin(self, length: int, layers: int) -> bool: ...

    def enter(self, layer: int, seen: Seen) -> None: ...

    def leave(self, layer: int, hidden_states: Tensor) -> None: ...

    def end(self) -> None: ...


@torch.no_grad()
def watch(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    meters: Sequence[Meter],
    label: str,
    progress: bool,
) -> None:
    """Run a model on samples, one forward each, in eval mode, without gradients or cache; modes are restored.

    Where a meter has `wants_gradients`, a forward with gradients and a backward come before it: the gradient of the
    summed loss of next tokens that are drawn from the model's own distribution, so that squares of it estimate the
    Fisher information. They take a sample's activations of all layers, as a training step without checkpointing.

    Args:
        model: a causal LM like Llama, Mistral, Qwen2, Qwen3 or Phi-3, stock or PoD.
        batches: `input_ids` [B, T] (integers), or mappings with `input_ids` and perhaps `attention_mask` [B, T] (1 for
            tokens, 0 for padding, which must be on the left and counts nowhere).
        meters: what is told of its layers.
        label, progress: a tqdm progress bar that counts samples.

    Raises:
        ValueError: no samples; right padding; a model of another build, or one with sliding-window layers.
    """
    from tqdm.auto import tqdm

    attentions = _attention_modules(model)
    draws = torch.Generator().manual_seed(0)
    device = model.get_input_embeddings().weight.device
    modes = [(module, module.training) for module in model.modules()]
    num_samples = 0
    model.eval()
    try:
        known = batches if isinstance(batches, list) else []
        total = sum(each.shape[0] for each in known if isinstance(each, Tensor) and each.ndim == 2) or None
        for input_ids in tqdm(_samples(batches), label, total, unit="sample", disable=not progress):
            num_samples += 1
            wanting = [meter for meter in meters if meter.begin(input_ids.numel(), len(attentions))]
            if wanting:
                ids = input_ids.to(device)
                wants = any(getattr(meter, "wants_gradients", False) for meter in wanting)
                gradients = _gradients(model, attentions, ids, draws) if wants else [None] * len(attentions)
                _forward(model, attentions, ids, wanting, gradients)
            for meter in wanting:
                meter.end()
    finally:
        for module, training in modes:
            module.training = training
    if num_samples == 0:
        raise ValueError("batches holds no samples: give at least one [B, T] tensor of input_ids")


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In the block no parameter of the model wants a gradient; what wanted one before, does after."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def attended(model: nn.Module) -> Iterator[list[Tensor]]:
    """In the block, what each layer's attention gives to its output projection, [B, T, H * D], as layers run."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for layer in model.model.layers:
            hooks.enter_context(layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0])))
        yield found


def _gradients(
    model: nn.Module, attentions: list[nn.Module], input_ids: Tensor, draws: torch.Generator
) -> list[Tensor]:
    """The gradient [T, C] at each attention's output, as `watch` says, of one sample [T]."""
    outputs: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        states.retain_grad()
        outputs.append(states)

    with ExitStack() as hooks, frozen(model), torch.enable_grad():
        for attention in attentions:
            hooks.enter_context(attention.register_forward_hook(hook))
        embedded = model.get_input_embeddings()(input_ids[None]).requires_grad_()
        hidden_states = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        # The logits of all positions at once would be the largest thing in memory.
        last = hidden_states.detach().requires_grad_()
        for part in last[0].split(_POSITIONS):
            logits = model.get_output_embeddings()(part).float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=draws)[:, 0]
            nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum").backward()
        hidden_states.backward(last.grad)
    return [states.grad[0] for states in outputs]


def _forward(
    model: nn.Module,
    attentions: list[nn.Module],
    input_ids: Tensor,
    meters: list[Meter],
    gradients: Sequence[Tensor | None],
) -> None:
    """One forward of one sample [T] without padding."""
    seen: set[int] = set()

    def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
        seen.add(layer)
        for meter in meters:
            meter.enter(layer, Seen(module, hidden_states, cos, sin, gradients[layer]))

    def leave(layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for meter in meters:
            meter.leave(layer, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for layer, (attention, whole) in enumerate(zip(attentions, model.model.layers, strict=True)):
            hooks.enter_context(attention.register_forward_pre_hook(partial(enter, layer), with_kwargs=True))
            hooks.enter_context(whole.register_forward_hook(partial(leave, layer)))
        # No cache, and the logits of one token: neither is looked at.
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
    if len(seen) != len(attentions):
        raise RuntimeError(f"only layers {sorted(seen)} of {len(attentions)} called their self_attn module")


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a supported model, lowest layer first; else a ValueError that names the model."""
    name = type(model).__name__
    layers = getattr(getattr(model, "model", None), "layers", None)
    modules = [getattr(layer, "self_attn", None) for layer in layers] if isinstance(layers, nn.ModuleList) else []
    is_fused = bool(modules) and hasattr(modules[0], "qkv_proj")
    needed = (*(("qkv_proj",) if is_fused else ("q_proj", "k_proj")), "head_dim", "scaling")
    if not modules or any(not hasattr(module, part) for module in modules for part in needed):
        raise ValueError(
            f"{name} is not supported: measuring attention needs model.model.layers[i].self_attn with "
            f"{', '.join(needed)}, as causal LMs of the Llama, Mistral, Qwen2, Qwen3 and Phi-3 families have"
        )
    config = getattr(model, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # Mistral's way: one window for all layers
        window = getattr(config, "sliding_window", None)
        layer_types = ["full_attention" if window is None else "sliding_attention"] * len(modules)
    other = [f"{layer} ({kind})" for layer, kind in enumerate(layer_types) if kind != "full_attention"]
    if other:
        raise ValueError(
            f"{name} has layers without full attention: {', '.join(other)}. Layers can only be compared when all "
            "of them attend to the same keys; use a model with full attention, or load this one with its "
            "sliding window off (config.sliding_window = None and every config.layer_types 'full_attention')"
        )
    return modules


def _samples(batches: Iterable[Tensor | Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """The rows of all batches, one by one and without their left padding: each a 1-D tensor of token ids."""
    for batch in batches:
        mask = None
        if isinstance(batch, Mapping):
            if "input_ids" not in batch:
                raise ValueError(f"a batch must have input_ids, got only {sorted(batch)}")
            input_ids, mask = batch["input_ids"], batch.get("attention_mask")
        else:
            input_ids = batch
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
            found = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(
                f"batches must be an iterable of input_ids tensors [B, T], or of dicts with them; got {found}"
            )
        if mask is None:
            yield from input_ids
            continue
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)}, input_ids {list(input_ids.shape)}: must be alike")
        real = mask != 0
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError(
                "attention_mask has padding after real tokens (right padding): pad on the left "
                "(tokenizer.padding_side = 'left'), or give rows of their own length one by one"
            )
        for row, row_is_real in zip(input_ids, real, strict=True):
            yield row[row_is_real.to(row.device)]
