"""Plain Python simulations of the Cascading KV cache and of StreamingLLM: lists, loops, one row and one head."""

import math


class SimulatedCascade:
    """METHODS.md's rules, token by token. A token is its position; sub-caches are lists, oldest first."""

    def __init__(self, budget: int, sinks: int, num_cascades: int) -> None:
        self.budget, self.sinks, self.size = budget, sinks, budget // num_cascades
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
            if t <= self.budget + self.sinks or (t - self.sinks) % 2**i == 0:
                cache.append(token)
                if len(cache) <= self.size:
                    return
                token = cache.pop(0)
            else:
                if self.scores[token] >= self.scores[cache[-1]]:
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
