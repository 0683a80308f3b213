"""How well a model foretells held-out text: nats per token, perplexity, bits per byte; whole or streamed."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from pod.evaluation.models import asks_apart
from pod.eviction import Method, unparse

# Logits of so many tokens, of all rows together, are in memory at once.
POSITIONS = 1024


@dataclass
class Perplexity:
    """Losses of many texts, added up.

    Attributes:
        nats: [T] float64, the sum of the losses by position in the text; position 0 is foretold by nothing and is 0.
        count: [T] int64, how many texts reached each position.
        num_bytes: bytes of the tokens that were foretold; None where a token's bytes are not known.
    """

    nats: Tensor
    count: Tensor
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return float(self.nats.sum() / self.count.sum().clamp(min=1))

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, None where the bytes are not known."""
        return None if not self.num_bytes else float(self.nats.sum()) / math.log(2) / self.num_bytes

    def summary(self) -> dict[str, float | int | None]:
        """What goes into a JSON file."""
        return {
            "tokens": int(self.count.sum()),
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }

    def curve(self, parts: int = 32) -> tuple[list[float], list[float]]:
        """(position, mean nats) of `parts` stretches of positions, for a picture."""
        positions, means = [], []
        for nats, count, index in zip(
            self.nats.chunk(parts), self.count.chunk(parts), torch.arange(len(self.nats)).chunk(parts), strict=True
        ):
            if count.sum() > 0:
                positions.append(float(index.double().mean()))
                means.append(float(nats.sum() / count.sum()))
        return positions, means


def check_streamed(methods: Iterable[Method]) -> None:
    """Refuse methods that would evict from a streamed text's first chunk only, or keep a share of that for ever.

    Raises:
        ValueError: a method with `query_aware=False`, or whose budget is a share of the prompt.
    """
    for method in methods:
        if asks_apart(method):
            raise ValueError(
                f"{unparse(method)}: with query_aware=false the first chunk of a streamed text would be evicted from "
                "and all others kept, without bound: leave query_aware out"
            )
        if method.is_share:
            raise ValueError(
                f"{unparse(method)}: a streamed text has no prompt to keep a share of, only its first chunk: give a "
                "budget in tokens"
            )


def decoder_states(model: PreTrainedModel, input_ids: Tensor, **kwargs) -> Tensor:
    """[B, T] -> the last hidden states [B, T, hidden]; `kwargs` go to the model without its head."""
    return model.base_model(input_ids, **kwargs).last_hidden_state


def token_losses(head: nn.Module, hidden_states: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every position in nats, float32, with the logits of `POSITIONS` tokens in memory at once.

    Args:
        head: hidden -> vocab.
        hidden_states: [B, T, hidden].
        targets: [B, T] int64, the token that each position foretells.

    Returns:
        [B, T].
    """
    size = max(1, POSITIONS // len(targets))
    return torch.cat(
        [
            nn.functional.cross_entropy(head(states).float().transpose(1, 2), wanted, reduction="none")
            for states, wanted in zip(hidden_states.split(size, 1), targets.split(size, 1), strict=True)
        ],
        dim=1,
    )


def perplexity(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    bytes_per_token: float | None = None,
    stream: int | None = None,
    new_cache: Callable[[], object] | None = None,
    states: Callable[..., Tensor] = decoder_states,
    label: str = "perplexity",
) -> Perplexity:
    """Losses of texts, each from its beginning.

    Args:
        model: a causal LM in evaluation mode.
        texts: token ids [T] or [B, T] each, T >= 2.
        bytes_per_token: bytes that a token stands for, where that is one number (1.0 for byte tokenizers).
        stream: feed a text through the cache in chunks of so many tokens instead of whole, so that memory is the
            cache's and one chunk's (beside 8 bytes for each token's loss); None takes each text in one forward
            without a cache. Each chunk is a prefill: a method that evicts after a prefill does so after every chunk.
        new_cache: makes the cache of a streamed text; the model's own default otherwise.
        states: (model, input_ids, **kwargs) -> hidden states.
        label: of the progress bar.

    Raises:
        ValueError: a text of fewer than 2 tokens; `stream` below 1; `new_cache` without `stream`.
    """
    if stream is not None and stream < 1:
        raise ValueError(f"stream is {stream}: at least 1 token a chunk")
    if stream is None and new_cache is not None:
        raise ValueError("a text that is taken whole passes no cache: set stream, tokens of a chunk")
    head = model.get_output_embeddings()
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with torch.no_grad(), tqdm(desc=label, unit=" tokens", unit_scale=True) as bar:
        for text in texts:
            ids = torch.atleast_2d(text).to(model.device)
            if ids.shape[1] < 2:
                raise ValueError(f"a text has {ids.shape[1]} tokens: at least 2 are needed")
            losses = torch.zeros(ids.shape, dtype=torch.float64)
            cache = new_cache() if new_cache is not None else None
            for start, stop in _chunks(ids.shape[1] - 1, stream):
                if stream is None:
                    hidden = states(model, ids[:, :-1], use_cache=False)
                else:
                    output = model.base_model(ids[:, start:stop], past_key_values=cache, use_cache=True)
                    hidden, cache = output.last_hidden_state, output.past_key_values
                losses[:, start + 1 : stop + 1] = token_losses(head, hidden, ids[:, start + 1 : stop + 1]).cpu()
                bar.update(ids.shape[0] * (stop - start))
            sums.append(losses.sum(dim=0))
            counts.append(torch.full((ids.shape[1],), ids.shape[0]))
            counts[-1][0] = 0
    longest = max((len(part) for part in sums), default=0)
    nats = sum((nn.functional.pad(part, (0, longest - len(part))) for part in sums), torch.zeros(longest).double())
    count = sum((nn.functional.pad(part, (0, longest - len(part))) for part in counts), torch.zeros(longest).long())
    known = None if bytes_per_token is None else round(int(count.sum()) * bytes_per_token)
    return Perplexity(nats, count, known)


def _chunks(length: int, size: int | None) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size or length):
        yield start, min(start + (size or length), length)
