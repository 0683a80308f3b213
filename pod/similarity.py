"""How alike are the attention scores of two layers? PoD's Eq. 2 (arXiv 2412.02252), measured on a few samples.

The paper names the Jensen-Shannon divergence a similarity and merges layers where it is *high*; here
`similarity = 1 - JS` with base-2 logarithms, so that 1 means identical rows of attention and 0 disjoint ones. The rows
are those of the last `last_q` tokens of each sample, after RoPE, q/k norm and softmax. A layer can drop the key of a KV
head only if every query head that reads it shares, hence the average over each group of query heads.

    similarity = attention_similarity(model, batches)          # [H_kv, L, L], the input of LayerBlocks
    plot_similarity(similarity, "similarity.png")              # the heat map of the paper's Figure 1-(d)

Shapes: B batch, T tokens, L layers, H query heads, H_kv KV heads, G = H / H_kv, D head size, q queries, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pod.extras import require
from pod.files import replacing

if TYPE_CHECKING:
    from pod.blocks import LayerBlocks

_SCRATCH_BYTES = 64 * 2**20  # size of each of the at most three temporaries while divergences are computed


@torch.no_grad()
def attention_similarity(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    last_q: int = 16,
    *,
    distant_only: bool = False,
    sink_size: int = 16,
    recent_size: int = 4080,
    progress: bool = True,
) -> Tensor:
    """Similarity of the attention scores of every two layers, for each KV head (PoD's Eq. 2, arXiv 2412.02252).

    Entry [g, a, b] is 1 - JS (base 2) between the attention rows of layers a and b for the same query and query head,
    averaged over the query heads of KV head g and over all queries of all samples. Scores and softmax are float32.

    Memory: no [T, T] is formed here, and samples run one at a time without their padding. Beside the model's own
    forward of one sample there are the rows, `4 * L * H * last_q * T` bytes; with them either the keys and scores of
    one layer (while the model runs) or 192 MiB of scratch (after it). For an 8B Llama (L = 32, H = 32) at T = 32,768
    and last_q = 16 the rows are 2,147,483,648 bytes (2 GiB) and all of it stays below 3 GiB; with 16 GB of bf16 weights
    that leaves most of an 80 GB GPU free. (At such lengths load the model with `attn_implementation="sdpa"` or a flash
    one: its *eager* attention would form [T, T] itself.)

    Args:
        model: a causal LM like Llama, Mistral, Qwen2, Qwen3 or Phi-3, stock or PoD: `model.model.layers[l].self_attn`
            with `q_proj`, `k_proj` (or `qkv_proj`), `head_dim`, `scaling` and perhaps `q_norm`, `k_norm`, called with
            `position_embeddings`.
            Runs in eval mode without gradients or cache; every module's mode is restored afterwards.
        batches: `input_ids` [B, T] (integers), or mappings with `input_ids` and perhaps `attention_mask` [B, T] (1 for
            tokens, 0 for padding, which must be on the left and counts nowhere).
        last_q: the number of last tokens of each sample whose rows are compared.
        distant_only: compare distant keys only (those with `j >= sink_size` and `i - j >= recent_size`, counted from
            the sample's first token), rows renormalised; queries without distant keys are left out of the average.
        sink_size: number of sink tokens, >= 0; matters only with `distant_only`.
        recent_size: number of recent tokens up to and including the query itself, >= 1; only with `distant_only`.
        progress: show a tqdm progress bar that counts samples.

    Returns:
        [H_kv, L, L], float32, on the CPU: symmetric, ones on the diagonal, all within [0, 1].

    Raises:
        ValueError: no samples; `last_q`, `sink_size` or `recent_size` too small; a sample of fewer than `last_q`
            tokens; right padding; no sample with distant keys though `distant_only`; a model of another build, or one
            with sliding-window layers.
        RuntimeError: the model's attention scores are not finite.
    """
    from tqdm.auto import tqdm

    if last_q < 1:
        raise ValueError(f"last_q must be at least 1, got {last_q}")
    if sink_size < 0:
        raise ValueError(f"sink_size must be at least 0, got {sink_size}")
    if recent_size < 1:
        raise ValueError(f"recent_size must be at least 1 (the token itself), got {recent_size}")
    attentions = _attention_modules(model)
    device = model.get_input_embeddings().weight.device
    # Allowed keys of query i are first_key <= j <= i - offset.
    first_key, offset = (sink_size, recent_size) if distant_only else (0, 0)

    divergence: Tensor | None = None  # [H_kv, L, L] float64, summed over queries and query heads
    num_samples = num_rows = longest = 0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for input_ids in tqdm(_samples(batches), desc="attention similarity", unit="sample", disable=not progress):
            length = input_ids.numel()
            if length < last_q:
                raise ValueError(f"a sample has {length} tokens, fewer than last_q={last_q}: lower last_q or drop it")
            num_samples += 1
            longest = max(longest, length)
            num_queries = min(last_q, length - first_key - offset)  # earlier ones have no allowed key
            if num_queries < 1:
                continue
            rows = _attention_rows(model, attentions, input_ids.to(device), num_queries, first_key, offset)
            sample_divergence = _divergence_sums(rows)
            num_rows += rows.shape[2]
            del rows  # before the next sample's are allocated
            divergence = sample_divergence if divergence is None else divergence + sample_divergence
    finally:
        for module, training in modes:
            module.training = training
    if num_samples == 0:
        raise ValueError("batches holds no samples: give at least one [B, T] tensor of input_ids")
    if divergence is None:
        raise ValueError(
            f"the sequences are too short for distant_only=True: the longest has {longest} tokens, and a distant key "
            f"needs more than sink_size + recent_size = {sink_size} + {recent_size} = {sink_size + recent_size}"
        )
    if not divergence.isfinite().all():
        raise RuntimeError("the model's attention scores are not finite: is its dtype too narrow or a weight broken?")
    similarity = (1.0 - divergence / num_rows).clamp_(0.0, 1.0).float()
    similarity.diagonal(dim1=1, dim2=2).fill_(1.0)
    return similarity


def plot_similarity(similarity: Tensor, path: str | Path, blocks: LayerBlocks | None = None) -> None:
    """Draw the similarity, averaged over KV heads, as a heat map of layers x layers (the paper's Figure 1-(d)).

    Args:
        similarity: [H_kv, L, L], values in [0, 1], from `attention_similarity`.
        path: the picture to write; its suffix (.png, .pdf, .svg, ...) is the format.
        blocks: blocks of the same model. Where all KV heads have the same ones, each gets a red box; else none is
            drawn, as an average over heads cannot show blocks that differ between them.

    Raises:
        ValueError: `similarity` is not [H_kv, L, L], or `blocks` are of another shape.
        ImportError: matplotlib is not installed.
    """
    if similarity.ndim != 3 or similarity.shape[1] != similarity.shape[2]:
        raise ValueError(f"similarity must be [H_kv, L, L], got {list(similarity.shape)}")
    num_heads, num_layers, _ = similarity.shape
    if blocks is not None and tuple(blocks.anchors.shape) != (num_layers, num_heads):
        raise ValueError(
            f"blocks are for [layers, KV heads] = {list(blocks.anchors.shape)}, the similarity for "
            f"{[num_layers, num_heads]}"
        )
    require("train", "matplotlib", what="a picture of the similarity")
    # Figure and canvas without pyplot: needs no display and leaves the caller's backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(6.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(similarity.detach().float().mean(0).cpu().numpy(), vmin=0.0, vmax=1.0, origin="lower")
    figure.colorbar(image, ax=axes, label="similarity (1 - JS divergence)")
    axes.set(xlabel="layer", ylabel="layer", title="Attention similarity, mean over KV heads")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    for first, size in _common_blocks(blocks.anchors) if blocks is not None else []:
        box = Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor="red", linewidth=1.5)
        axes.add_patch(box)
    with replacing(path) as aside:
        figure.savefig(aside, format=Path(path).suffix[1:], dpi=150)


def _common_blocks(anchors: Tensor) -> list[tuple[int, int]]:
    """(first layer, number of layers) of each block of anchors [L, H_kv]; none when the KV heads' blocks differ."""
    if not bool((anchors == anchors[:, :1]).all()):
        return []
    firsts, sizes = torch.unique_consecutive(anchors[:, 0], return_counts=True)
    return list(zip(firsts.tolist(), sizes.tolist(), strict=True))


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a supported model, lowest layer first; else a ValueError that names the model."""
    name = type(model).__name__
    layers = getattr(getattr(model, "model", None), "layers", None)
    modules = [getattr(layer, "self_attn", None) for layer in layers] if isinstance(layers, nn.ModuleList) else []
    is_fused = bool(modules) and hasattr(modules[0], "qkv_proj")
    needed = (*(("qkv_proj",) if is_fused else ("q_proj", "k_proj")), "head_dim", "scaling")
    if not modules or any(not hasattr(module, part) for module in modules for part in needed):
        raise ValueError(
            f"{name} is not supported: attention_similarity needs model.model.layers[i].self_attn with "
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


def _attention_rows(
    model: nn.Module, attentions: list[nn.Module], input_ids: Tensor, num_queries: int, first_key: int, offset: int
) -> Tensor:
    """One forward of one sample; the softmax rows of its last queries over keys first_key <= j <= i - offset.

    Args:
        input_ids: [T], no padding. num_queries: q, each with at least one allowed key.

    Returns:
        [L, H_kv, G * q, N] float32, N = T - offset - first_key; zero where a key is not allowed.
    """
    length = input_ids.numel()
    queries, keys = slice(length - num_queries, length), slice(first_key, length - offset)
    query_positions = torch.arange(length, device=input_ids.device)[queries, None]
    forbidden = torch.arange(length, device=input_ids.device)[keys] > query_positions - offset  # [q, N]
    rows: Tensor | None = None
    seen: set[int] = set()

    def record(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal rows
            hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]  # [1, T, C]
            cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]  # each [1, T, D]
            query = _project(module, "q", hidden_states[:, queries], cos[:, queries], sin[:, queries])[0]  # [H, q, D]
            key = _project(module, "k", hidden_states[:, keys], cos[:, keys], sin[:, keys])[0]  # [H_kv, N, D]
            # One matrix product per KV head serves its whole query group; keys are not repeated.
            grouped = query.float().reshape(key.shape[0], -1, key.shape[-1])  # [H_kv, G * q, D]
            logits = torch.matmul(grouped, key.float().transpose(1, 2)).mul_(module.scaling)  # [H_kv, G * q, N]
            by_query = logits.view(key.shape[0], -1, *forbidden.shape)
            by_query.masked_fill_(forbidden.to(logits.device), -math.inf)
            if rows is None:
                rows = logits.new_empty(len(attentions), *logits.shape)
            rows[layer].copy_(logits.softmax(-1))
            seen.add(layer)

        return hook

    handles = []
    try:
        for layer, module in enumerate(attentions):
            handles.append(module.register_forward_pre_hook(record(layer), with_kwargs=True))
        # No cache, and the logits of one token: neither is looked at.
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    if rows is None or len(seen) != len(attentions):
        raise RuntimeError(f"only layers {sorted(seen)} of {len(attentions)} called their self_attn module")
    return rows


def _project(module: nn.Module, name: str, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The module's queries (name "q") or keys ("k") after norm and RoPE: [1, n, C] -> [1, heads, n, D]."""
    if hasattr(module, "qkv_proj"):  # Phi-3's one matrix: queries, then keys, then values
        kv = module.num_key_value_heads * module.head_dim
        states = module.qkv_proj(hidden_states)
        states = states[..., : -2 * kv] if name == "q" else states[..., -2 * kv : -kv]
    else:
        states = getattr(module, f"{name}_proj")(hidden_states)
    states = states.view(*states.shape[:2], -1, module.head_dim)
    norm = getattr(module, f"{name}_norm", None)
    if norm is not None:
        states = norm(states)
    states = states.transpose(1, 2)
    # The function rotates a pair; queries and keys are of different lengths here, so its other half gets no heads.
    return apply_rotary_pos_emb(states, states[:, :0], cos, sin)[0]


def _divergence_sums(rows: Tensor) -> Tensor:
    """JS divergence (base 2) between every two layers, summed over rows, a chunk of the keys at a time.

    Args:
        rows: [L, H_kv, R, N] float32, distributions over the last dimension.

    Returns:
        [H_kv, L, L] float64 on the CPU: the *sum* over R of JS(rows[a], rows[b]), each within [0, 1]; symmetric, with
        a zero diagonal.
    """
    num_layers, num_heads, num_rows, num_keys = rows.shape
    sums = torch.zeros(num_heads, num_layers, num_layers, dtype=torch.float64, device="cpu")
    chunk = max(1, _SCRATCH_BYTES // (num_layers * num_heads * num_rows * rows.element_size()))
    for start in range(0, num_keys, chunk):
        part = rows[..., start : start + chunk]
        half_entropy = torch.special.entr(part).mul_(0.5)  # -p ln p / 2, and 0 at p = 0
        for layer in range(num_layers - 1):
            # JS = H(m) - (H(p) + H(r)) / 2 with m = (p + r) / 2, subtracted key by key: every term is >= 0, so that the
            # sum loses nothing to cancellation of two large entropies.
            terms = torch.special.entr((part[layer + 1 :] + part[layer]).mul_(0.5))
            terms.sub_(half_entropy[layer + 1 :]).sub_(half_entropy[layer])
            pairs = terms.sum((2, 3)).double().cpu().T / math.log(2)  # [H_kv, layers above]
            sums[:, layer, layer + 1 :] += pairs
            sums[:, layer + 1 :, layer] += pairs
    return sums
