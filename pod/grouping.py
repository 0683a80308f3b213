"""The search for blocks: tables of anchors from a similarity of attention scores, or from what sharing costs.

`pod.blocks.LayerBlocks` is what calls it, and where arguments and errors are documented. Each way gives the anchors
[L, H_kv] int64 on the CPU, and what is to be said of them in a blocks file.

Shapes: L layers, H_kv KV heads, C candidate thresholds.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

STREAMS = -1  # in the place of an anchor
METHODS = ("greedy", "sum", "worst")  # of `LayerBlocks.for_saving`
# Similarities are averages of many float32 numbers: so much above 1, below 0 or off symmetry is rounding, not an error.
SIMILARITY_TOLERANCE = 1e-4

Found = tuple[Tensor, dict[str, Any]]


def by_threshold(similarity: Tensor, threshold: float, streaming: Tensor | None) -> Found:
    """As `LayerBlocks.from_similarity`."""
    similarity, streaming = _without(_validated_similarity(similarity), streaming)
    threshold = float(threshold)
    if not 0 <= threshold <= 1:
        raise ValueError(
            f"threshold must be in [0, 1], got {threshold:g}; for blocks of one layer use LayerBlocks.dense"
        )
    return _greedy(similarity, threshold, streaming)


def by_saving(similarity: Tensor, kv_saving: float, method: str, streaming: Tensor | None) -> Found:
    """As `LayerBlocks.for_saving`."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    similarity, streaming = _without(_validated_similarity(similarity), streaming)
    num_layers = len(streaming)
    wanted = layers_to_share(kv_saving, streaming)
    if wanted == 0:
        return _dense(streaming), {}
    lower = torch.ones(num_layers, num_layers, dtype=torch.bool, device="cpu").tril(-1)
    candidates = similarity[:, lower].unique()  # [C], ascending
    candidates = candidates[candidates.isfinite()]
    if method != "greedy":
        worst = _largest_worst(similarity, candidates, wanted) if method == "worst" else 0.0
        anchors = _best_anchors(_gains(similarity, worst), wanted)
        return anchors.masked_fill(streaming, STREAMS), {"method": method}
    shared = torch.zeros(len(candidates), dtype=torch.int64, device="cpu")
    for layer, anchors in enumerate(_greedy_anchors(similarity, candidates)):
        shared += (anchors != layer).sum(dim=-1)
    threshold = candidates[(shared >= wanted).nonzero()[-1, 0]].item()
    return _greedy(similarity, threshold, streaming)


def by_damage(costs: Tensor, kv_saving: float, streaming: Tensor | None) -> Found:
    """As `LayerBlocks.for_damage`."""
    costs = _tables_of("costs", costs)
    wrong = ~(costs >= 0) & torch.ones(costs.shape[1:], dtype=torch.bool, device="cpu").triu(1)
    if wrong.any():
        head, anchor, layer = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"costs must be at least 0, got {costs[head, anchor, layer].item():g} for KV head {head}, layer "
            f"{layer} with the scores of layer {anchor}"
        )
    gains, streaming = _without(-costs, streaming)
    gains, wanted = gains.triu(1), layers_to_share(kv_saving, streaming)
    if wanted == 0:
        return _dense(streaming), {}
    if (most := _most_shared(gains)) < wanted:
        raise ValueError(
            f"kv_saving={kv_saving:g} is more than these costs can give: where none is inf, the maximum is "
            f"{most / (2 * int((~streaming).sum())):.4f}"
        )
    return _best_anchors(gains, wanted).masked_fill(streaming, STREAMS), {"method": "damage"}


def _dense(streaming: Tensor) -> Tensor:
    """Anchors of blocks of one layer, none where a head streams."""
    return torch.arange(len(streaming), device="cpu")[:, None].where(~streaming, STREAMS)


def _greedy(similarity: Tensor, threshold: float, streaming: Tensor) -> Found:
    """Algorithm 1 for one threshold."""
    anchors = torch.cat(list(_greedy_anchors(similarity, similarity.new_tensor([threshold]))))
    return anchors.masked_fill(streaming, STREAMS), {"threshold": threshold}


def _greedy_anchors(similarity: Tensor, thresholds: Tensor) -> Iterator[Tensor]:
    """Run Algorithm 1 for many thresholds at once; yields the anchors [C, H_kv] of one layer after the other.

    similarity: [H_kv, L, L] float64; thresholds: [C] float64.
    """
    num_kv_heads, num_layers, _ = similarity.shape
    heads = torch.arange(num_kv_heads, device="cpu")
    anchors = torch.zeros(len(thresholds), num_kv_heads, dtype=torch.int64, device="cpu")
    yield anchors
    for layer in range(1, num_layers):
        # least[g, s]: the smallest similarity between this layer and the layers s .. layer-1, were s the block's start.
        least = similarity[:, layer, :layer].flip(-1).cummin(-1).values.flip(-1)
        joins = least[heads, anchors] >= thresholds[:, None]  # [C, H_kv]
        anchors = torch.where(joins, anchors, layer)
        yield anchors


def _without(tables: Tensor, streaming: Tensor | None) -> tuple[Tensor, Tensor]:
    """[H_kv, L, L] similarities or gains, -inf with a layer in which the head streams: no block takes it in.

    And which ones these are, [L, H_kv] bool on the CPU.
    """
    shape = [tables.shape[1], tables.shape[0]]
    if streaming is None:
        streaming = torch.zeros(shape, dtype=torch.bool)
    if list(streaming.shape) != shape or streaming.dtype != torch.bool:
        raise ValueError(
            f"streaming must be [layers, kv_heads] = {shape} truth values, got {list(streaming.shape)} of "
            f"{streaming.dtype}"
        )
    streaming = streaming.cpu()
    heads = streaming.t()
    return tables.masked_fill(heads[:, :, None] | heads[:, None], -torch.inf), streaming


def layers_to_share(kv_saving: float, streaming: Tensor) -> int:
    """The least number of layers, over all KV heads, that must share to save so much of what does not stream.

    Args:
        kv_saving: the share of the cache that is not to be stored.
        streaming: [L, H_kv] bool, the heads that stream.

    Raises:
        ValueError: that is more than one block per head saves; names the maximum.
    """
    kv_saving = float(kv_saving)
    if not 0 <= kv_saving <= 0.5:
        raise ValueError(f"kv_saving must be in [0, 0.5], got {kv_saving:g}: only keys are shared, half of the cache")
    stores = ~streaming
    pairs = max(1, 2 * int(stores.sum()))
    # One block per head is the most that there is; a layer that streams is between two.
    most = int((stores[1:] & stores[:-1]).sum())
    if kv_saving > (maximum := most / pairs):
        raise ValueError(
            f"kv_saving={kv_saving:g} is more than this model can give: with {len(stores)} layers the maximum is "
            f"{maximum:.4f} (one block per KV head{', none where heads stream' if streaming.any() else ''})"
        )
    return next(count for count in range(pairs + 1) if count / pairs >= kv_saving)


def _gains(similarity: Tensor, worst: float) -> Tensor:
    """[g, a, l]: what layer l gains by the scores of layer a < l; -inf where they are less alike than `worst`."""
    alike = similarity.mT  # of [higher, lower] entries
    return alike.masked_fill(alike < worst, -torch.inf).triu(1)


def _tables(gains: Tensor) -> tuple[Tensor, Tensor]:
    """The best partitions of each head's lowest layers, for every number of them and of shared ones.

    gains: [H_kv, L, L] float64, [g, a, l] of layer l with the scores of layer a; 0 on and below the diagonal.

    Returns:
        best: [H_kv, L + 1, L] float64: entry [g, e, m] is the largest summed gain over all partitions of head g's
            layers 0 .. e-1 that share m of them, -inf where there is none.
        starts: [H_kv, L + 1, L] int64, where the last block of that partition begins.
    """
    num_kv_heads, num_layers, _ = gains.shape
    sums = gains.cumsum(-1)  # [g, s, l]: of a block s .. l
    best = torch.full((num_kv_heads, num_layers + 1, num_layers), -torch.inf, dtype=torch.float64, device="cpu")
    starts = torch.zeros(num_kv_heads, num_layers + 1, num_layers, dtype=torch.int64, device="cpu")
    best[:, 0, 0] = 0.0
    for end in range(1, num_layers + 1):
        for start in range(end):
            shared = end - start - 1
            found = best[:, start, : num_layers - shared] + sums[:, start, end - 1, None]
            better = found > best[:, end, shared:]
            best[:, end, shared:] = torch.where(better, found, best[:, end, shared:])
            starts[:, end, shared:] = torch.where(better, start, starts[:, end, shared:])
    return best, starts


def _most_shared(gains: Tensor) -> int:
    """How many layers the heads together can share."""
    best, _ = _tables(gains)
    # Whatever can be shared, one less can: the last layer of a block becomes a block.
    return int((best[:, -1].isfinite().sum(-1) - 1).sum())


def _largest_worst(similarity: Tensor, candidates: Tensor, wanted: int) -> float:
    """The largest of the candidates (ascending) at which the heads together can share so many layers."""
    low, high = 0, len(candidates)  # at the lowest, all layers can share
    while high - low > 1:
        middle = (low + high) // 2
        most = _most_shared(_gains(similarity, candidates[middle].item()))
        low, high = (middle, high) if most >= wanted else (low, middle)
    return candidates[low].item()


def _best_anchors(gains: Tensor, wanted: int) -> Tensor:
    """[L, H_kv] anchors of the partition that shares `wanted` layers, with the largest summed gain."""
    num_kv_heads, num_layers, _ = gains.shape
    best, starts = _tables(gains)
    # total[m]: the best of the heads so far that share m layers together; counts: how many of these the last one does.
    total = torch.full((wanted + 1,), -torch.inf, dtype=torch.float64, device="cpu")
    total[0] = 0.0
    counts = torch.zeros(num_kv_heads, wanted + 1, dtype=torch.int64, device="cpu")
    for head in range(num_kv_heads):
        before, total = total, torch.full_like(total, -torch.inf)
        for count in range(min(num_layers, wanted + 1)):
            found = before[: wanted + 1 - count] + best[head, -1, count]
            better = found > total[count:]
            total[count:] = torch.where(better, found, total[count:])
            counts[head, count:] = torch.where(better, count, counts[head, count:])
    anchors = torch.empty(num_layers, num_kv_heads, dtype=torch.int64, device="cpu")
    for head in reversed(range(num_kv_heads)):
        count, end = int(counts[head, wanted]), num_layers
        wanted -= count
        while end > 0:
            start = int(starts[head, end, count])
            anchors[start:end, head] = start
            count, end = count - (end - start - 1), start
    return anchors


def _tables_of(name: str, values: Tensor) -> Tensor:
    """Check that values are [H_kv, L, L] and return them in float64 on the CPU."""
    values = torch.as_tensor(values).detach().to("cpu", torch.float64)
    shape = tuple(values.shape)
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise ValueError(f"{name} must be [kv_heads, layers, layers], got {list(shape)}")
    return values


def _validated_similarity(similarity: Tensor) -> Tensor:
    """Check a similarity and return it as [H_kv, L, L] float64 on the CPU, within [0, 1]."""
    similarity = _tables_of("similarity", similarity)
    wrong = {
        "finite": ~similarity.isfinite(),
        "in [0, 1]": (similarity < -SIMILARITY_TOLERANCE) | (similarity > 1 + SIMILARITY_TOLERANCE),
        "symmetric": (similarity - similarity.mT).abs() > SIMILARITY_TOLERANCE,
    }
    for what, where in wrong.items():
        if where.any():
            head, row, column = where.nonzero()[0].tolist()
            one, other = similarity[head, row, column].item(), similarity[head, column, row].item()
            raise ValueError(
                f"similarity must be {what}, got {one:g} for KV head {head}, layers {row} and {column}"
                + f", but {other:g} the other way round" * (what == "symmetric")
            )
    return similarity.clamp(0, 1)
