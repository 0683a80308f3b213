"""Losses in chunks of the sequence, so that a long sample's [T, vocab] logits are never whole in memory."""

from collections.abc import Callable

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
    _check(hidden_states, targets, chunk)

    def part(states: Tensor, wanted: Tensor) -> tuple[Tensor]:
        return (_cross_entropy(lm_head(states).float(), wanted),)

    (total,) = _sums(part, chunk, hidden_states, targets)
    return total, (targets != IGNORED).sum()


def chunked_distillation(
    hidden_states: Tensor,
    lm_head: nn.Module,
    teacher_states: Tensor,
    teacher_head: nn.Module,
    targets: Tensor,
    chunk: int = 1024,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of next-token cross-entropies and of divergences from a teacher, `chunk` positions at a time.

    The divergence of a position is that of Hinton et al. (arXiv 1503.02531): with logits divided by the temperature t,
    t^2 * KL(teacher || student), whose gradient is of the same size at every t. Positions without a target have
    neither. The student's logits are computed once for both sums, and once more in the backward; the teacher's twice
    too, instead of being kept.

    Args:
        hidden_states: [B, T, hidden], the student's.
        lm_head: maps them to [.., vocab].
        teacher_states: [B, T, teacher's hidden], the teacher's; no gradient goes there.
        teacher_head: maps them to [.., vocab].
        targets: [B, T] int64, already shifted; -100 is ignored.
        chunk: positions per chunk, >= 1.
        temperature: t > 0.

    Returns:
        the sum of the cross-entropies and that of the divergences in nats, float32, and how many targets there were
        (int64), all scalars.

    Raises:
        ValueError: chunk < 1, a temperature that is not above 0, or shapes that do not fit.
    """
    _check(hidden_states, targets, chunk)
    if teacher_states.shape[:2] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit the teacher's {tuple(teacher_states.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")

    def part(states: Tensor, taught: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = nn.functional.log_softmax(teacher_head(taught).float() / temperature, dim=-1)
        logits = lm_head(states).float()
        entropy = _cross_entropy(logits, wanted)
        student = nn.functional.log_softmax(logits / temperature, dim=-1)
        divergence = nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
        return entropy, divergence.masked_fill(wanted == IGNORED, 0.0).sum() * temperature**2

    entropies, divergences = _sums(part, chunk, hidden_states, teacher_states, targets)
    return entropies, divergences, (targets != IGNORED).sum()


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")


def _sums(part: Callable[..., tuple[Tensor, ...]], chunk: int, *whole: Tensor) -> list[Tensor]:
    """What `part` gives of each chunk of [B, T, ...] tensors, added up; it is computed again in the backward."""
    # Every chunk runs, also one without targets: under ZeRO-3 all ranks must gather the head equally often.
    chunks = zip(*(each.split(chunk, dim=1) for each in whole), strict=True)
    parts = [checkpoint(part, *each, use_reentrant=False) for each in chunks]
    return [sum(values) for values in zip(*parts, strict=True)]


def _check(hidden_states: Tensor, targets: Tensor, chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    if hidden_states.shape[:2] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit hidden states {tuple(hidden_states.shape)}")
