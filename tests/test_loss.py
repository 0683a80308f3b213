"""The chunked loss is the plain loss, with less memory."""

import pytest
import torch

from pod.loss import chunked_cross_entropy, shifted


def sample(batch=2, length=37, hidden=16, vocab=31, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(batch, length, hidden, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (batch, length), generator=generator)
    labels[0, :5] = -100
    labels[-1, 20:23] = -100
    head = torch.nn.Linear(hidden, vocab, bias=False, dtype=dtype)
    torch.nn.init.normal_(head.weight, generator=generator)
    return states, labels, head


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
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        total, count = chunked_cross_entropy(states, head, shifted(labels), chunk=16)
        total.backward()
    # The head's weight and its gradient are 16 x 1000; a chunk's logits are too. The whole would be 256 x 1000.
    assert largest <= 16 * 1000
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
