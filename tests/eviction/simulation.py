"""What eviction methods keep, as plain loops in float64 over the queries and keys that a model hands to its cache.

Written from the rules of the methods, one row, one KV head and one token at a time; it shares no code with
`pod.eviction`. Of two tokens with equal scores the more recent one is kept.
"""

import math
import random
from fractions import Fraction

import numpy as np
from safetensors.numpy import load_file

from pod.eviction import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    PyramidKV,
    QFilters,
    SageKV,
    SnapKV,
    ZigZagKV,
)


class Ambiguous(Exception):
    """Two scores are so close that float32 may order them otherwise."""


class Simulation:
    """Runs beside a cache: records what `attend` is given, and evicts by itself; of some rows, when told."""

    def __init__(self, cache, method, config, rows=None) -> None:
        self.method, self.config = getattr(method, "scorer", method), config  # of a Combined, its scores
        self.rows = rows
        self.allocator = getattr(method, "allocator", method)
        self.anchors = config.blocks.anchors.tolist()
        self.num_layers, self.num_heads = len(self.anchors), len(self.anchors[0])
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.held = {}  # (row, anchor layer, KV head) -> {position: key}
        self.values = {}  # the same -> {position: value}
        self.sums = {}  # the same -> {position: accumulated attention}
        self.counts = {}  # the same -> tokens kept while decoding
        self.chosen = {}  # the same -> what SAGE-KV chose, for good
        self.seen = {}
        self.records, self.steps = [], 0
        self.outputs = {}  # layer -> [hidden, query heads * D], the output projection
        attend, begin = cache.attend, cache.begin

        def beginning(*args, outputs):
            self.outputs = {layer: outputs(layer).detach().double().numpy() for layer in range(self.num_layers)}
            return begin(*args, outputs=outputs)

        def recording(layer, q, k, v, *rest):
            states = (part.double().numpy() for part in (q, k, v))
            self.records.append((layer, *states, cache._storage.step.positions.tolist()))
            return attend(layer, q, k, v, *rest)

        cache.attend, cache.begin = recording, beginning

    # ------------------------------------------------------------------ shared by the methods

    def size(self, anchor: int, head: int) -> int:
        return sum(row[head] == anchor for row in self.anchors)

    def sinks(self, anchor: int, head: int) -> int:
        heads = [head]
        if isinstance(self.method, TOVA | ChunkKV):
            heads = [g for g in range(self.num_heads) if self.anchors[anchor][g] == anchor]
        return self.config.sink_size if any(self.size(anchor, g) > 1 for g in heads) else 0

    def last(self) -> int:
        """The last tokens that are always kept."""
        if isinstance(self.method, SnapKV | CAKE | ExpectedAttention | QFilters):
            return self.method.window
        if isinstance(self.method, H2O):
            half = max(1, self.method.budget // 2)  # the newest token is recent in any case
            return half if self.method.recent is None else self.method.recent
        if isinstance(self.method, SageKV):
            return self.method.budget - self.method.budget // 4 - self.groups * self.best_of_each()
        return 0

    def weights(self, query: np.ndarray, position: int, tokens: dict) -> dict:
        """Softmax of one query over the tokens that it sees, all logits the anchor's own."""
        seen = [p for p in tokens if p <= position]
        logits = [float(query @ tokens[p]) / math.sqrt(len(query)) for p in seen]
        top = max(logits)
        exps = [math.exp(logit - top) for logit in logits]
        return {p: value / sum(exps) for p, value in zip(seen, exps, strict=True)}

    def is_always_kept(self, unit: tuple, position: int) -> bool:
        row, anchor, head = unit
        return position < self.sinks(anchor, head) or position >= self.seen[row] - self.last()

    def best(self, unit: tuple, scores: dict, count: int) -> set:
        """The positions that stay."""
        ranked = sorted(scores, key=lambda p: (self.is_always_kept(unit, p), scores[p], p), reverse=True)
        chosen, others = ranked[:count], ranked[count:]
        if chosen and others and not self.is_always_kept(unit, chosen[-1]):
            gap = abs(scores[chosen[-1]] - scores[others[0]])
            if 0 < gap < 1e-6 * max(1.0, abs(scores[chosen[-1]])):
                raise Ambiguous
        return set(chosen)

    def pooled(self, row: int, scores: dict, size: int, kind: str) -> dict:
        prefix = sorted(p for p in scores if p < self.seen[row] - self.last())
        out = {p: 0.0 for p in scores}
        for index, p in enumerate(prefix):
            around = [prefix[j] for j in range(index - size // 2, index + size // 2 + 1) if 0 <= j < len(prefix)]
            values = [scores[other] for other in around]
            out[p] = max(values) if kind == "max" else sum(values) / size
        return out

    # ------------------------------------------------------------------ forwards

    def take(self) -> dict:
        """New tokens into `held`; returns {(row, anchor, head): [(position, [query of each head of the group])]}."""
        queries = {}
        for layer, q, k, v, positions in self.records:
            for row, line in enumerate(positions):
                if self.rows is not None and row not in self.rows:
                    continue
                for column, position in enumerate(line):
                    if position < 0:
                        continue
                    self.seen[row] = max(self.seen.get(row, 0), position + 1)
                    for head in range(self.num_heads):
                        if self.anchors[layer][head] != layer:
                            continue
                        unit = (row, layer, head)
                        self.held.setdefault(unit, {})[position] = k[row, head, column]
                        self.values.setdefault(unit, {})[position] = v[row, head, column]
                        self.sums.setdefault(unit, {})[position] = 0.0
                        group = [q[row, head * self.groups + member, column] for member in range(self.groups)]
                        queries.setdefault(unit, []).append((position, group))
        self.records = []
        return queries

    def attention(self, unit: tuple, queries: list) -> list:
        """[query][head of the group] -> {position: weight}."""
        return [[self.weights(q, position, self.held[unit]) for q in group] for position, group in queries]

    def scores(self, unit: tuple, attention: list, decoding: bool, layer_attention: dict) -> dict:
        method, held = self.method, self.held[unit]
        if isinstance(method, Knorm | KeyDiff | LagKV | QFilters):
            return self.of_keys(unit)
        if isinstance(method, ExpectedAttention):
            return self.expected(unit)
        if isinstance(method, ChunkKV):
            return self.chunks(unit, layer_attention)
        if isinstance(method, CriticalKV):
            return self.critical(unit, attention)
        if isinstance(method, SnapKV):
            return self.snap(unit, attention)
        if isinstance(method, SageKV):
            return self.sage(unit, None if decoding else attention[-1])
        if isinstance(method, H2O):
            for heads in attention:
                for weights in heads:
                    for p, weight in weights.items():
                        self.sums[unit][p] += weight / self.groups
            return dict(self.sums[unit])
        if isinstance(method, TOVA):
            lines = [
                weights for other, theirs in layer_attention.items() if other[:2] == unit[:2] for weights in theirs[-1]
            ]
            return {p: sum(line.get(p, 0.0) for line in lines) / len(lines) for p in held}
        pooled = []
        for member in range(self.groups):
            lines = [heads[member] for heads in attention[-method.window :]]
            indicator = {}
            for p in held:
                values = [line.get(p, 0.0) for line in lines]
                mean = indicator[p] = sum(values) / len(values)
                variance = float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
                if not decoding and method.indicator == "mean+variance":
                    indicator[p] = mean + method.gamma * variance
                elif not decoding and method.indicator != "mean":
                    indicator[p] = variance if method.indicator == "variance" else mean * variance
            pooled.append(self.pooled(unit[0], indicator, method.kernel_size, "avg"))
        return {p: sum(one[p] for one in pooled) / self.groups for p in held}

    def snap(self, unit: tuple, attention: list) -> dict:
        method, summed = self.method, {p: 0.0 for p in self.held[unit]}
        for heads in attention[-method.window :]:
            for weights in heads:
                for p, weight in weights.items():
                    summed[p] += weight / self.groups
        return self.pooled(unit[0], summed, method.kernel_size, method.pooling)

    def critical(self, unit: tuple, attention: list) -> dict:
        """The best by attention, half of the budget with the window; then attention times the values' outputs."""
        method, (row, layer, head) = self.method, unit
        scores = {p: score / min(method.window, len(attention)) for p, score in self.snap(unit, attention).items()}
        prefix = [p for p in scores if p < self.seen[row] - method.window]
        ranked = sorted(prefix, key=lambda p: (scores[p], p), reverse=True)
        count = max(0, method.budget // 2 - method.window)
        if 0 < count < len(ranked) and 0 < scores[ranked[count - 1]] - scores[ranked[count]] < 1e-6:
            raise Ambiguous
        out = {}
        for p in scores:
            value, total = self.values[unit][p], 0.0
            for member in range(self.groups):
                first = (head * self.groups + member) * len(value)
                added = self.outputs[layer][:, first : first + len(value)] @ value
                total += sum(abs(number) for number in added) / self.groups
            out[p] = (scores[p] + method.epsilon) * total
        # Places above all others: the best one is highest.
        return out | {p: 1e6 - place for place, p in enumerate(ranked[:count])}

    def chunks(self, unit: tuple, layer_attention: dict) -> dict:
        """Chunks from the row's beginning by the mean of scores that all of the layer's heads add up."""
        size, units = self.method.chunk_size, [other for other in layer_attention if other[:2] == unit[:2]]
        total = {p: 0.0 for p in self.held[unit]}
        for other in units:
            for p, score in self.snap(other, layer_attention[other]).items():
                total[p] += score
        chunks = {}
        for p in total:
            if p < self.seen[unit[0]] - self.last():
                chunks.setdefault(p // size, []).append(p)
        means = {number: sum(total[p] for p in members) / len(members) for number, members in chunks.items()}
        ordered = sorted(means.values())
        if any(0 < b - a < 1e-6 * b for a, b in zip(ordered, ordered[1:], strict=False)):
            raise Ambiguous
        order = sorted(means, key=lambda number: (means[number], number))
        places, scores = {number: place for place, number in enumerate(order)}, {p: 0.0 for p in total}
        for number, members in chunks.items():
            for p in members:  # below 1: within the chunk
                scores[p] = places[number] + sum((total[q], q) < (total[p], p) for q in members) / (size + 1)
        return scores

    def turns(self, positions) -> np.ndarray:
        """exp(i angle) [.., D / 2] of positions, of RoPE without scaling."""
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        return np.exp(1j * np.multiply.outer(np.asarray(positions, float), theta ** (-np.arange(half) / half)))

    def expected(self, unit: tuple) -> dict:
        method, keys, values = self.method, self.held[unit], self.values[unit]
        given = [(position, group) for position, group in self.queries[unit] if position >= method.sinks]
        half = self.config.head_dim // 2
        ahead = self.turns(range(self.seen[unit[0]], self.seen[unit[0]] + method.future)).mean(axis=0)
        turn = np.block([[np.diag(ahead.real), -np.diag(ahead.imag)], [np.diag(ahead.imag), np.diag(ahead.real)]])
        others = [p for p in keys if p >= method.sinks]
        total = dict.fromkeys(keys, 0.0)
        for member in range(self.groups):
            states = []
            for position, group in given:
                back = (group[member][:half] + 1j * group[member][half:]) * self.turns(position).conj()
                states.append(np.concatenate([back.real, back.imag]))
            mean, spread = np.zeros(2 * half), np.zeros((2 * half, 2 * half))
            if states:
                mean, spread = np.mean(states, axis=0), np.cov(np.array(states).T, bias=True)
            mean, spread = turn @ mean, turn @ spread @ turn.T
            logits = {p: keys[p] @ mean / math.sqrt(2 * half) + keys[p] @ spread @ keys[p] / (4 * half) for p in others}
            top = max(logits.values(), default=0.0)
            mass = sum(math.exp(logit - top) for logit in logits.values())
            for p, logit in logits.items():
                total[p] += math.exp(logit - top) / mass / self.groups
        scores = {p: (total[p] + method.epsilon) * math.sqrt(values[p] @ values[p]) for p in keys}
        return {p: 1e9 if p < method.sinks else score for p, score in scores.items()}

    def of_keys(self, unit: tuple) -> dict:
        method, keys, values = self.method, self.held[unit], self.values[unit]
        if isinstance(method, Knorm):
            return {p: -math.sqrt(float(key @ key)) for p, key in keys.items()}
        if isinstance(method, QFilters):
            direction = load_file(method.filters)["filters"][unit[1], unit[2]].astype(float)
            return {p: float(direction @ key) for p, key in keys.items()}
        if isinstance(method, KeyDiff):
            lengths = {p: math.sqrt(float(key @ key)) for p, key in keys.items()}
            mean = sum(key / lengths[p] for p, key in keys.items()) / len(keys)
            return {p: -float(key @ mean) / lengths[p] / math.sqrt(float(mean @ mean)) for p, key in keys.items()}
        ordered, size, scores = sorted(keys), method.lag, {}
        parted = ordered[method.sinks :]
        whole = len(parted) // size
        for number in range(whole - 1):
            part = parted[number * size : (number + 1) * size]
            following = parted[(number + 1) * size : (number + 2) * size]
            found = dict.fromkeys(part, 0.0)
            for states in (keys, values):
                low = np.min([states[p] for p in following], axis=0)
                high = np.max([states[p] for p in following], axis=0)
                reach = np.maximum(high - low, np.finfo(np.float32).eps)
                spread = {p: float(np.std((states[p] - low) / reach, ddof=1)) for p in part}
                top = max(spread.values())
                total = sum(math.exp(value - top) for value in spread.values())
                for p in part:
                    found[p] += math.exp(spread[p] - top) / total / 2
            ranked = sorted(part, key=found.__getitem__)
            gaps = [found[b] - found[a] for a, b in zip(ranked, ranked[1:], strict=False)]
            if min(gaps) < 1e-7:
                raise Ambiguous
            scores |= found if method.cross_scoring else {p: place / size for place, p in enumerate(ranked)}
        rest = {p: 3.0 if p in ordered[: method.sinks] else 2.0 for p in ordered if p not in scores}
        return scores | rest

    def preference(self, row: int, layer: int, attention: dict) -> float:
        """Eq. 6 over the layer's anchor heads, tokens before the window only; ZigZagKV's number of tokens."""
        method = self.allocator
        if isinstance(method, ZigZagKV):
            return self.spread(row, layer, attention)
        if method.allocation in ("uniform", "random"):
            return 1.0 if method.allocation == "uniform" else random.Random(f"{method.seed} {layer}").random()
        entropy = shift = 0.0
        lines = [
            [heads[member] for heads in theirs[-method.window :]]
            for unit, theirs in attention.items()
            if unit[:2] == (row, layer)
            for member in range(self.groups)
        ]
        for line in lines:
            prefix = {p for weights in line for p in weights if p < self.seen[row] - method.window}
            for p in prefix:
                values = [weights.get(p, 0.0) for weights in line]
                entropy -= sum(value * math.log(value + 1e-10) for value in values) / len(lines)
                shift += float(np.var(values, ddof=1)) / len(lines) if len(values) > 1 else 0.0
        entropy, shift = max(entropy, 0.0) ** (1 / method.tau1), shift ** (1 / method.tau2)
        return {"preference": entropy * shift, "entropy": entropy, "variance": shift}[method.allocation]

    def spread(self, row: int, layer: int, attention: dict) -> float:
        """How many tokens it takes, in the mean over query heads, to hold so much of the window's attention."""
        counts = []
        for unit, theirs in attention.items():
            for member in range(self.groups) if unit[:2] == (row, layer) else ():
                sums = {p: 0.0 for p in self.held[unit]}
                for heads in theirs[-self.allocator.window :]:
                    for p, weight in heads[member].items():
                        sums[p] += weight
                wanted, got, count = self.allocator.held * sum(sums.values()), 0.0, 0
                for value in sorted(sums.values(), reverse=True):
                    if abs(got - wanted) < 1e-5:
                        raise Ambiguous
                    if got < wanted:
                        got, count = got + value, count + 1
                counts.append(count)
        return sum(counts) / len(counts)

    def prefill(self, evict: bool = True) -> None:
        """One prefill, in however many forwards, evicted from once."""
        self.steps = 0
        queries = self.take()
        if not evict:
            for unit in queries:
                self.attention(unit, queries[unit])
            return
        attention = {unit: self.attention(unit, queries[unit]) for unit in queries}
        self.queries = queries
        scores = {unit: self.scores(unit, attention[unit], False, attention) for unit in attention}
        counts = {unit: self.allocator.budget for unit in attention}
        threshold = self.method.budget + (self.method.window if isinstance(self.method, CAKE) else 0)
        if isinstance(self.method, LagKV):
            threshold = max(threshold, self.method.sinks + 2 * self.method.lag - 1)
        if isinstance(self.allocator, CAKE | ZigZagKV):
            for row in self.seen:
                if self.seen[row] > threshold:
                    for head in range(self.num_heads):
                        counts.update(self.shares(row, head, attention))
        for row in self.seen:
            if self.seen[row] > threshold and isinstance(self.allocator, PyramidKV):
                for head in range(self.num_heads):
                    counts.update(self.pyramid(row, head))
            if self.seen[row] > threshold and isinstance(self.allocator, AdaKV):
                for layer in range(self.num_layers):
                    counts.update(self.competition(row, layer, scores))
        self.counts.update(counts)
        for unit in attention:
            if self.seen[unit[0]] > threshold:
                self.keep(unit, self.best(unit, scores[unit], counts[unit]))

    def step(self, evict: bool = True) -> None:
        """One decoded token."""
        queries = self.take()
        attention = {unit: self.attention(unit, queries[unit]) for unit in queries}
        if isinstance(self.method, SnapKV | ExpectedAttention) or not evict:
            return
        self.steps += 1
        if isinstance(self.method, Knorm | KeyDiff | LagKV | QFilters) and (
            not self.method.every or self.steps % self.method.every
        ):
            return
        scores = {unit: self.scores(unit, attention[unit], True, attention) for unit in attention}
        for unit in attention:
            self.keep(unit, self.best(unit, scores[unit], self.counts[unit]))

    def keep(self, unit: tuple, positions: set) -> None:
        self.held[unit] = {p: key for p, key in self.held[unit].items() if p in positions}
        self.sums[unit] = {p: value for p, value in self.sums[unit].items() if p in positions}

    # ------------------------------------------------------------------ SAGE-KV

    def best_of_each(self) -> int:
        count = 1
        while 2 * count * 2 * self.groups <= self.method.budget:
            count *= 2
        return count if 2 * self.groups <= self.method.budget else 0

    def sage(self, unit: tuple, last: list | None) -> dict:
        """Places in a queue: sinks, what each head chose, the next best by maximum; recent tokens none."""
        sinks, held = self.method.budget // 4, self.held[unit]
        if last is not None:
            between = [p for p in held if sinks <= p < self.seen[unit[0]] - self.last()]
            union = set()
            for weights in last:
                ranked = sorted(between, key=lambda p: (weights[p], p), reverse=True)
                union |= set(ranked[: self.best_of_each()])
                if len(ranked) > self.best_of_each() > 0:
                    first, second = (weights[ranked[self.best_of_each() - i]] for i in (1, 0))
                    if 0 < abs(first - second) < 1e-6 * first:
                        raise Ambiguous
            others = sorted(between, key=lambda p: (max(weights[p] for weights in last), p))
            for p, q in zip(others, others[1:], strict=False):
                gap = abs(max(weights[p] for weights in last) - max(weights[q] for weights in last))
                if 0 < gap < 1e-7:
                    raise Ambiguous
            queue = [p for p in others if p not in union] + [p for p in others if p in union]
            self.chosen[unit] = {p: 1.0 + place for place, p in enumerate(queue)}
        return {p: 1e9 if p < sinks else self.chosen[unit].get(p, 0.0) for p in held}

    # ------------------------------------------------------------------ PyramidKV's and AdaKV's budgets

    def pyramid(self, row: int, head: int) -> dict:
        """A staircase down the layers; a block keeps its layers' mean."""
        method = self.allocator
        mean, prefix = method.budget - method.window, self.seen[row] - method.window
        blocks = sorted({line[head] for line in self.anchors})
        if self.seen[row] < 2 * mean:
            return {(row, anchor, head): method.budget for anchor in blocks}
        low = mean // method.beta
        high = 2 * mean - low
        if high >= prefix:
            high, low = prefix, 2 * mean - prefix
        step = (high - low) // (self.num_layers - 1)
        line = [high - layer * step for layer in range(self.num_layers)]
        given = {}
        for anchor in blocks:
            steps = [line[layer] for layer in range(self.num_layers) if self.anchors[layer][head] == anchor]
            given[anchor] = max(math.floor(sum(steps) / len(steps)), self.sinks(anchor, head))

        def total() -> int:
            return sum(given[self.anchors[layer][head]] for layer in range(self.num_layers))

        turn = 0
        while total() > mean * self.num_layers:
            anchor = blocks[-1 - turn % len(blocks)]
            given[anchor] -= given[anchor] > self.sinks(anchor, head)
            turn += 1
        return {(row, anchor, head): method.window + count for anchor, count in given.items()}

    def competition(self, row: int, layer: int, scores: dict) -> dict:
        """Heads anchored in a layer, those of equally large blocks against each other."""
        method, counts = self.allocator, {}
        heads = [head for head in range(self.num_heads) if self.anchors[layer][head] == layer]
        for size in {self.size(layer, head) for head in heads}:
            rivals = [head for head in heads if self.size(layer, head) == size]
            sinks = self.sinks(layer, rivals[0])
            each = method.budget - method.window - sinks
            tokens = []
            for head in rivals:
                own = [
                    (score, p)
                    for p, score in scores[row, layer, head].items()
                    if sinks <= p < self.seen[row] - method.window
                ]
                factor = 1.0
                if method.normalize and own:
                    ranked = sorted((score for score, _ in own), reverse=True)
                    factor = sum(ranked[:each]) / sum(ranked)
                tokens += [(factor * score, p, -head) for score, p in own]
            tokens.sort(reverse=True)
            best, rest = tokens[: each * len(rivals)], tokens[each * len(rivals) :]
            if best and rest and 0 < best[-1][0] - rest[0][0] < 1e-6 * best[-1][0]:
                raise Ambiguous
            room = {head: sum(token[2] == -head for token in tokens) for head in rivals}
            given = {}
            for head in rivals:
                won = sum(token[2] == -head for token in best)
                exact = won + (each - won) * Fraction(str(method.alpha))
                given[head] = min(round(exact), room[head])
            wanted, turn = min(each * len(rivals), len(tokens)), 0
            while sum(given.values()) != wanted:
                head = rivals[turn % len(rivals)]
                if sum(given.values()) < wanted:
                    given[head] += given[head] < room[head]
                else:
                    given[head] -= given[head] > 0
                turn += 1
            counts |= {(row, layer, head): method.window + sinks + given[head] for head in rivals}
        return counts

    # ------------------------------------------------------------------ CAKE's budgets

    def shares(self, row: int, head: int, attention: dict) -> dict:
        """Counts of one KV head's blocks: Eq. 7 over all layers, never more than an earlier stage left."""
        blocks = sorted({line[head] for line in self.anchors})
        always = [self.sinks(anchor, head) + self.allocator.window for anchor in blocks]
        is_counted = isinstance(self.allocator, ZigZagKV)  # preferences are whole numbers, without rounding
        if is_counted:
            always = [kept + round(self.allocator.alpha * (self.allocator.budget - kept)) for kept in always]
        sizes = [self.size(anchor, head) for anchor in blocks]
        total = sum(size * (self.allocator.budget - kept) for size, kept in zip(sizes, always, strict=True))
        preferences = [self.preference(row, anchor, attention) for anchor in blocks]
        room = [len(self.held[row, anchor, head]) - kept for anchor, kept in zip(blocks, always, strict=True)]
        for stage in range(1, len(blocks) + 1):
            given = shared(total, preferences[:stage], sizes[:stage], room[:stage], stage == len(blocks), is_counted)
            room[:stage] = given
        return {(row, anchor, head): always[i] + room[i] for i, anchor in enumerate(blocks)}


def shared(total: int, preferences: list, sizes: list, room: list, is_last: bool, is_counted: bool = False) -> list:
    """One stage of sharing: in proportion, whole numbers, what a block cannot take goes evenly to those that can."""
    if sum(preferences) == 0:
        preferences = [1.0] * len(preferences)
    weight = sum(p * size for p, size in zip(preferences, sizes, strict=True))
    given = []
    for preference, most in zip(preferences, room, strict=True):
        share = preference / weight * total
        is_close = abs(share - round(share)) < 1e-5 and not is_counted
        if is_close and len(preferences) > 1 and len(set(preferences)) > 1:
            raise Ambiguous
        given.append(min(int(share) if is_last else math.ceil(share), most))
    left = total - sum(count * size for count, size in zip(given, sizes, strict=True))
    while left > 0:
        open_blocks = [i for i in range(len(given)) if given[i] < room[i] and sizes[i] <= left]
        if not open_blocks:
            break
        even = max(1, left // sum(sizes[i] for i in open_blocks))
        for i in open_blocks:
            for _ in range(even):
                if given[i] < room[i] and left >= sizes[i]:
                    given[i] += 1
                    left -= sizes[i]
    return given
