"""Quest, ShadowKV and ClusterKV as plain loops: every token is at hand; one row, one query, one page at a time."""

import math

import torch
from cascade_simulation import softmax
from torch import Tensor


class SimulatedQuest:
    """One row's attention in all layers.

    Args:
        anchors: [L][H_kv] anchor layers.
        groups: query heads per KV head.
        sink_size, recent_size, share: of PoD.
        budget, page_size, dense_layers: of the method.
    """

    def __init__(self, anchors, groups, sink_size, recent_size, share, budget, page_size, dense_layers) -> None:
        self.anchors, self.groups, self.share = anchors, groups, share
        self.sink_size, self.recent_size = sink_size, recent_size
        self.budget, self.page_size, self.dense_layers = budget, page_size, dense_layers
        self.q: list[Tensor] = []  # of each token [L, H, D]
        self.k: list[Tensor] = []  # [L, H_kv, D]
        self.v: list[Tensor] = []
        self.closest = math.inf  # how far the bounds of a page that is read and of one that is not lie apart

    def crop(self, removed: int) -> None:
        self.q, self.k, self.v = self.q[:-removed], self.k[:-removed], self.v[:-removed]

    def pages(self, layer: int, head: int) -> list[int]:
        """The pages that the newest query reads, by the rules; all of them up to `budget` tokens."""
        newest, size = len(self.q) - 1, self.page_size
        last = newest // size
        if newest + 1 <= self.budget:
            return list(range(last + 1))
        bounds = []
        for page in range(last):
            keys = [self.k[token][layer, head].tolist() for token in range(page * size, page * size + size)]
            best = -math.inf
            for member in range(self.groups):
                bound = 0.0
                for d, number in enumerate(self.q[newest][layer, head * self.groups + member].tolist()):
                    channel = [key[d] for key in keys]
                    bound += max(number * min(channel), number * max(channel))
                best = max(best, bound)
            bounds.append((best, page))
        bounds.sort(reverse=True)
        count = self.budget // size - 1
        if 0 < count < len(bounds):
            self.closest = min(self.closest, bounds[count - 1][0] - bounds[count][0])
        return [last, *(page for _, page in bounds[:count])]

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for t in range(q.shape[2]):
            self.q.append(q[:, :, t].double())
            self.k.append(k[:, :, t].double())
            self.v.append(v[:, :, t].double())

    def feed(self, q: Tensor, k: Tensor, v: Tensor, decodes: bool) -> tuple[Tensor, dict]:
        """Tokens of q [L, H, T, D], k and v [L, H_kv, T, D]; their outputs, and the pages read of (layer, head)."""
        first, count = len(self.q), q.shape[2]
        self.store(q, k, v)
        out, read = torch.zeros(q.shape, dtype=torch.float64), {}
        for layer, row in enumerate(self.anchors):
            for head, anchor in enumerate(row):
                pages = None
                if decodes and layer >= self.dense_layers:
                    pages = read[layer, head] = self.pages(anchor, head)
                for query in range(first, first + count):
                    keys = [t for t in range(query + 1) if pages is None or t // self.page_size in pages]
                    for asking in range(head * self.groups, (head + 1) * self.groups):
                        weights = softmax([self.logit(layer, anchor, head, asking, query, key) for key in keys])
                        for key, weight in zip(keys, weights, strict=True):
                            out[layer, asking, query - first] += weight * self.v[key][layer, head]
        return out, read

    def logit(self, layer: int, anchor: int, head: int, asking: int, query: int, key: int) -> float:
        proximal = key < self.sink_size or query - key < self.recent_size
        q = self.q[query][layer if proximal or self.share == "keys" else anchor, asking]
        k = self.k[key][layer if proximal else anchor, head]
        return float(q @ k) / math.sqrt(q.shape[0])


class SimulatedShadowKV(SimulatedQuest):
    """The same with ShadowKV's choice of pages; `outliers` and `recent` are the method's."""

    def __init__(self, *args, outliers: float, recent: int) -> None:
        super().__init__(*args)
        self.outliers, self.recent = outliers, recent

    def pages(self, layer: int, head: int) -> list[int]:
        newest, size = len(self.q) - 1, self.page_size
        last = newest // size
        if newest + 1 <= self.budget:
            return list(range(last + 1))
        read = [page for page in range(last + 1) if page > last - self.recent]
        old = [page for page in range(last + 1) if page not in read]
        keys = {page: [self.k[token][layer, head] for token in range(page * size, page * size + size)] for page in old}
        means = {page: sum(keys[page]) / size for page in old}
        chosen = self.budget // size - self.recent
        alike = [
            (min(float(key @ means[page] / key.norm() / means[page].norm()) for key in keys[page]), page)
            for page in old
        ]
        outliers = self.first(sorted(alike), int(chosen * self.outliers))
        others = [page for page in old if page not in outliers]
        best = dict.fromkeys(others, 0.0)
        for member in range(self.groups):
            q = self.q[newest][layer, head * self.groups + member]
            weights = softmax([float(q @ means[page]) / math.sqrt(q.shape[0]) for page in others])
            best |= {page: max(best[page], weight) for page, weight in zip(others, weights, strict=True)}
        ranked = sorted(((-weight, page) for page, weight in best.items()))
        return read + outliers + self.first(ranked, chosen - len(outliers))

    def first(self, ranked: list[tuple[float, int]], count: int) -> list[int]:
        if 0 < count < len(ranked):
            self.closest = min(self.closest, ranked[count][0] - ranked[count - 1][0])
        return [page for _, page in ranked[:count]]


class SimulatedClusterKV(SimulatedQuest):
    """The same with ClusterKV's choice: pages are tokens; the other arguments are the method's."""

    def __init__(self, *args, cluster_size: int, sinks: int, recent: int, rounds: int) -> None:
        super().__init__(*args)
        self.size, self.sinks, self.recent, self.rounds = cluster_size, sinks, recent, rounds
        self.centroids: dict[tuple[int, int], list[Tensor]] = {}
        self.clusters: dict[tuple[int, int], list[int]] = {}  # of each token

    def crop(self, removed: int) -> None:
        super().crop(removed)
        last = len(self.q) - 1  # joins anew
        for key in self.clusters:
            self.clusters[key] = self.clusters[key][:last]
            self.centroids[key] = self.centroids[key][: -(-last // self.size)]
        self.cluster(last)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        before = len(self.q)
        super().store(q, k, v)
        self.cluster(before)

    def cluster(self, before: int) -> None:
        """Clusters for the tokens from `before` on."""
        layers, heads, _ = self.k[0].shape
        for layer in range(layers):
            for head in range(heads):
                keys = [key[layer, head] for key in self.k]
                centroids = self.centroids.setdefault((layer, head), [])
                born = [token for token in range(before, len(keys)) if token % self.size == 0]
                centroids += [keys[token] for token in born]
                new = range(before, len(keys))
                for _ in range(self.rounds):
                    near = [self.nearest(keys[token], centroids) for token in new]
                    for cluster in (token // self.size for token in born):
                        mine = [keys[token] for token, one in zip(new, near, strict=True) if one == cluster]
                        if mine:
                            centroids[cluster] = sum(mine) / len(mine)
                clusters = self.clusters.setdefault((layer, head), [])
                clusters += [self.nearest(keys[token], centroids) for token in new]

    def nearest(self, key: Tensor, centroids: list[Tensor]) -> int:
        cosines = [float(key @ one / key.norm() / one.norm()) for one in centroids]
        ranked = sorted(range(len(cosines)), key=lambda index: -cosines[index])
        if len(ranked) > 1:
            self.closest = min(self.closest, cosines[ranked[0]] - cosines[ranked[1]])
        return ranked[0]

    def pages(self, layer: int, head: int) -> list[int]:
        newest = len(self.q) - 1
        if newest + 1 <= self.budget:
            return list(range(newest + 1))
        forced = [t for t in range(newest + 1) if t < self.sinks or t > newest - self.recent]
        centroids = self.centroids[layer, head]
        members: dict[int, list[int]] = {}
        for token, cluster in enumerate(self.clusters[layer, head]):
            if token not in forced:
                members.setdefault(min(cluster, len(centroids) - 1), []).append(token)
        asked = self.q[newest][layer, head * self.groups : (head + 1) * self.groups]
        products = {cluster: max(float(q @ centroids[cluster]) for q in asked) for cluster in members}
        ranked = sorted(members, key=lambda cluster: -products[cluster])
        for one, other in zip(ranked, ranked[1:], strict=False):
            self.closest = min(self.closest, products[one] - products[other])
        read = list(forced)
        for cluster in ranked:
            room = self.budget - len(read)
            read += members[cluster][::-1][:room]
        return read
