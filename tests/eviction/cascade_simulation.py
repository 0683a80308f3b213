"""Plain Python simulations of the Cascading KV cache and of StreamingLLM: lists, loops, one row and one head."""

import math

import torch
from torch import Tensor


class SimulatedCascade:
    """METHODS.md's rules, token by token. A token is its position; sub-caches are lists, oldest first.

    The budget counts the sinks; the sub-caches get equal parts of the rest, in whole tokens.
    """

    def __init__(self, budget: int, sinks: int, num_cascades: int, select: bool = True) -> None:
        self.select = select
        self.sinks, self.size = sinks, (budget - sinks) // num_cascades
        self.full = sinks + num_cascades * self.size
        self.sink_tokens: list[int] = []
        self.caches: list[list[int]] = [[] for _ in range(num_cascades)]
        self.scores: dict[int, float] = {}
        self.seen = 0

    def kept(self) -> list[int]:
        """Positions in the order of their slots: sinks, then oldest to newest."""
        return self.sink_tokens + [token for cache in reversed(self.caches) for token in cache]

    def insert(self, score: float) -> None:
        t = self.seen
        self.seen += 1
        if t < self.sinks:
            self.sink_tokens.append(t)
            return
        self.scores[t] = score
        token = t
        for i, cache in enumerate(self.caches):
            if t <= self.full or (t - self.sinks) % 2**i == 0:
                cache.append(token)
                if len(cache) <= self.size:
                    return
                token = cache.pop(0)
            else:
                if self.select and self.scores[token] >= self.scores[cache[-1]]:
                    token, cache[-1] = cache[-1], token
                break
        del self.scores[token]


def simulated_stream(budget: int, sinks: int, length: int) -> list[int]:
    """The positions that StreamingLLM keeps of `length` tokens."""
    return [t for t in range(length) if t < sinks or t >= length - (budget - sinks)]


def softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def turned(vector: Tensor, place: int, base: float = 10000.0) -> Tensor:
    """RoPE of one vector [D]: the pair (i, i + D/2) turns by place * base^(-2i/D)."""
    numbers, half = vector.tolist(), vector.shape[0] // 2
    out = list(numbers)
    for i in range(half):
        angle = place * base ** (-i / half)
        out[i] = numbers[i] * math.cos(angle) - numbers[i + half] * math.sin(angle)
        out[i + half] = numbers[i + half] * math.cos(angle) + numbers[i] * math.sin(angle)
    return torch.tensor(out, dtype=vector.dtype)


class SimulatedLayers:
    """One row's attention in all layers, query by query; every token is at hand, only kept ones are used.

    Args:
        anchors: [L][H_kv] anchor layers.
        groups: query heads per KV head.
        sink_size, recent_size, share: of PoD.
        cascade: budget with the sinks, sinks, num_cascades.
        gamma, reduction: of the scores.
        homogeneous: scores are reduced over the query heads of all KV heads that decide in a layer.
        select: tokens contest.
        rotates: q and k come before RoPE and are turned to their place among the kept tokens.
    """

    def __init__(
        self,
        anchors,
        groups,
        sink_size,
        recent_size,
        share,
        cascade,
        gamma,
        reduction,
        rotates,
        homogeneous=False,
        select=True,
    ) -> None:
        self.anchors, self.groups, self.share = anchors, groups, share
        self.sink_size, self.recent_size = sink_size, recent_size
        self.gamma, self.reduction, self.rotates = gamma, reduction, rotates
        self.homogeneous, self.select = homogeneous, select
        self.cascades = {
            (layer, head): SimulatedCascade(*cascade, select)
            for layer, row in enumerate(anchors)
            for head, anchor in enumerate(row)
            if anchor == layer
        }
        self.q: list[Tensor] = []  # of each token [L, H, D]
        self.k: list[Tensor] = []  # [L, H_kv, D]
        self.v: list[Tensor] = []

    def feed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A chunk of q [L, H, T, D], k and v [L, H_kv, T, D]; its outputs [L, H, T, D]."""
        first, count = len(self.q), q.shape[2]
        for t in range(count):
            self.q.append(q[:, :, t].double())
            self.k.append(k[:, :, t].double())
            self.v.append(v[:, :, t].double())
        out = torch.zeros(q.shape, dtype=torch.float64)
        new_scores: dict[tuple[int, int], dict[int, float]] = {}
        given: dict[tuple[int, int], list[dict[int, float]]] = {}
        for layer, row in enumerate(self.anchors):
            for head, anchor in enumerate(row):
                kept = self.cascades[anchor, head].kept()
                sums = [dict.fromkeys([*kept, *range(first, first + count)], 0.0) for _ in range(self.groups)]
                for group in range(self.groups):
                    asking = head * self.groups + group
                    for t in range(count):
                        keys = [*kept, *range(first, first + t + 1)]
                        weights = self.weights(layer, anchor, head, asking, first + t, keys)
                        for key, weight in zip(keys, weights, strict=True):
                            out[layer, asking, t] += weight * self.v[key][layer, head]
                            sums[group][key] += (1 - self.gamma) * self.gamma ** (count - 1 - t) * weight
                if anchor == layer:
                    given[layer, head] = sums
        reduce = {
            "max": max,
            "mean": lambda numbers: sum(numbers) / len(numbers),
            "median": lambda numbers: sorted(numbers)[(len(numbers) - 1) // 2],
        }[self.reduction]
        for (layer, head), sums in given.items():
            asked = sums
            if self.homogeneous:
                asked = [one for (other, _), theirs in given.items() if other == layer for one in theirs]
            new_scores[layer, head] = {key: reduce([one[key] for one in asked]) for key in sums[0]}
        for place, scores in new_scores.items():
            cascade = self.cascades[place]
            for token in cascade.scores:
                cascade.scores[token] = self.gamma**count * cascade.scores[token] + scores[token]
            for token in range(first, first + count):
                cascade.insert(scores[token])
        return out

    def weights(self, layer: int, anchor: int, head: int, asking: int, query: int, keys: list[int]) -> list[float]:
        logits = []
        for place, key in enumerate(keys):
            proximal = key < self.sink_size or query - key < self.recent_size
            q = self.q[query][layer if proximal or self.share == "keys" else anchor, asking]
            k = self.k[key][layer if proximal else anchor, head]
            if self.rotates:
                q, k = turned(q, len(keys) - 1), turned(k, place)
            logits.append(float(q @ k) / math.sqrt(q.shape[0]))
        return softmax(logits)
