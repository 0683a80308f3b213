"""Next-token loss in chunks of the sequence, so that a long sample's [T, vocab] logits are never whole in memory."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def shifted(labels: Tensor) -> Tensor:
    """Move each label to the position that predicts it.

    Args:
        labels: [B, T] int64, the tokens themselves, -100 where nothing is to be learned.

    Returns:
        [B, T] int64: entry t is the label of token t + 1; the last is -100.
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def chunked_cross_entropy(
    hidden_states: Tensor, lm_head: nn.Module, targets: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Sum of next-token cross-entropies, in float32, `chunk` positions at a time.

    Each chunk's logits are computed, used and dropped, and computed once more in the backward: memory is
    B * chunk * vocab * (itemsize + 4) bytes instead of B * T * vocab of them, for one more product with the head.

    Args:
        hidden_states: [B, T, hidden], the decoder's output.
        lm_head: maps [.., hidden] to [.., vocab].
        targets: [B, T] int64, already shifted; -100 is ignored.
        chunk: positions per chunk, >= 1.

    Returns:
        the sum over all targets in nats, and how many targets there were (int64), both scalars.

    Raises:
        ValueError: chunk < 1, or shapes that do not fit.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    if hidden_states.shape[:2] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit hidden states {tuple(hidden_states.shape)}")

    def part(states: Tensor, wanted: Tensor) -> Tensor:
        logits = lm_head(states).float()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    # Every chunk runs, also one without targets: under ZeRO-3 all ranks must gather the head equally often.
    total = hidden_states.new_zeros((), dtype=torch.float32)
    for states, wanted in zip(hidden_states.split(chunk, dim=1), targets.split(chunk, dim=1), strict=True):
        total = total + checkpoint(part, states, wanted, use_reentrant=False)
    return total, (targets != IGNORED).sum()
