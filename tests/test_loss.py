"""The chunked loss is the plain loss, with less memory."""

import pytest
import torch

from pod.training.loss import chunked_cross_entropy, chunked_distillation, shifted


def sample(batch=2, length=37, hidden=16, vocab=31, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(batch, length, hidden, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (batch, length), generator=generator)
    labels[0, :5] = -100
    labels[-1, 20:23] = -100
    head = torch.nn.Linear(hidden, vocab, bias=False, dtype=dtype)
    torch.nn.init.normal_(head.weight, generator=generator)
    return states, labels, head


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers how many elements the largest tensor has that is made inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("chunk", [1, 7, 37, 64])
def test_value_and_gradients_equal_the_plain_loss(chunk):
    states, labels, head = sample()
    states.requires_grad_()
    plain = torch.nn.functional.cross_entropy(head(states)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    wanted = torch.autograd.grad(plain, [states, head.weight])

    total, count = chunked_cross_entropy(states, head, shifted(labels), chunk)
    assert int(count) == int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(total / count, plain, rtol=1e-6, atol=0)
    for got, want in zip(torch.autograd.grad(total / count, [states, head.weight]), wanted, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


def test_no_tensor_of_all_logits_is_made():
    states, labels, head = sample(batch=1, length=256, vocab=1000)
    states.requires_grad_()
    with Largest() as largest:
        total, count = chunked_cross_entropy(states, head, shifted(labels), chunk=16)
        total.backward()
    # The head's weight and its gradient are 16 x 1000; a chunk's logits are too. The whole would be 256 x 1000.
    assert largest.numel <= 16 * 1000
    assert count > 0


def test_all_ignored_is_zero_and_differentiable():
    states, labels, head = sample()
    states.requires_grad_()
    total, count = chunked_cross_entropy(states, head, torch.full_like(labels, -100), 8)
    total.backward()
    assert total == 0 and count == 0 and not states.grad.any()


def test_bad_arguments_are_named():
    states, labels, head = sample()
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_cross_entropy(states, head, labels, 0)
    with pytest.raises(ValueError, match="do not fit"):
        chunked_cross_entropy(states, head, labels[:, :-1], 4)


def distilled(temperature=1.0, chunk=7):
    """(student's states and head, teacher's ones, targets), and the two sums by plain formulas on whole logits."""
    states, labels, head = sample()
    generator = torch.Generator().manual_seed(1)
    taught = torch.randn(*labels.shape, 5, generator=generator)
    teacher = torch.nn.Linear(5, head.out_features)
    torch.nn.init.normal_(teacher.weight, generator=generator)
    with torch.no_grad():  # no probability that is 0 in float32, which the plain formula could not take
        states, head.weight[:] = states / 2, head.weight / 2
    states.requires_grad_()
    targets = shifted(labels)
    p = (teacher(taught) / temperature).softmax(-1).detach()
    q = (head(states) / temperature).softmax(-1)
    entropy = divergence = 0.0
    for row, column in (targets != -100).nonzero().tolist():
        entropy = entropy - head(states[row, column]).softmax(-1)[targets[row, column]].log()
        divergence = divergence + (p[row, column] * (p[row, column] / q[row, column]).log()).sum()
    return (states, head, taught, teacher, targets, chunk, temperature), entropy, divergence * temperature**2


@pytest.mark.parametrize("temperature, chunk", [(1.0, 1), (1.0, 37), (2.5, 7), (0.5, 64)])
def test_distillation_equals_the_plain_formula(temperature, chunk):
    arguments, *wanted = distilled(temperature, chunk)
    states, head, taught, teacher, targets = arguments[:5]
    *found, count = chunked_distillation(*arguments)
    assert int(count) == int((targets != -100).sum())
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    weighed = [0.3 * entropy + 0.7 * divergence for entropy, divergence in (found, wanted)]
    gradients = [torch.autograd.grad(loss, [states, head.weight]) for loss in weighed]
    for got, want in zip(*gradients, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
    assert found[1].item() > 1 and not states.grad_fn and teacher.weight.grad is None


def test_a_students_own_head_teaches_it_nothing():
    """The same states and head: no divergence, and a gradient of zero."""
    (states, head, _, _, targets, chunk, _), *_ = distilled()
    _, divergence, _ = chunked_distillation(states, head, states.detach(), head, targets, chunk)
    assert abs(divergence.item()) < 1e-4
    assert torch.autograd.grad(divergence, states)[0].abs().max() < 1e-6


def test_distillation_makes_no_tensor_of_all_logits():
    states, labels, head = sample(batch=1, length=256, vocab=1000)
    states.requires_grad_()
    with Largest() as largest:
        entropy, divergence, _ = chunked_distillation(states, head, states.detach(), head, shifted(labels), chunk=16)
        (entropy + divergence).backward()
    assert largest.numel <= 16 * 1000


def test_bad_arguments_of_distillation_are_named():
    (states, head, taught, teacher, targets, *_), *_ = distilled()
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_distillation(states, head, taught, teacher, targets, 0)
    with pytest.raises(ValueError, match="do not fit the teacher's"):
        chunked_distillation(states, head, taught[:, 1:], teacher, targets)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        chunked_distillation(states, head, taught, teacher, targets, temperature=0)
