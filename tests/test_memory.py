"""Tiled MLP and offloaded checkpoints: the same numbers from less memory."""

import pytest
import torch
from test_sequence_parallel import model_of

import pod.model.offload
from pod.blocks import LayerBlocks
from pod.model.families import convert
from pod.model.offload import kept_on_cpu


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(got, wanted):
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=0)
    for name, value in wanted[1].items():
        assert torch.linalg.norm(got[1][name] - value) <= 1e-5 * torch.linalg.norm(value), name


@pytest.fixture
def ids():
    return torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("tiles", [2, 5, 13, 20])
def test_tiled_mlp_is_exact(tiles, checkpointing, ids):
    """Also with more tiles than tokens; `checkpointing` is use_reentrant."""
    model = model_of(4, 2)
    wanted = gradients(model, ids)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    seen = []
    for layer in model.model.layers:
        layer.mlp_tiles = tiles
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    assert_same(gradients(model, ids), wanted)
    assert max(seen) == -(-13 // tiles) and sum(seen[:tiles]) == 13, "so many tiles, none larger than it must be"
    seen.clear()
    model.eval()(ids, use_cache=False)
    handle.remove()
    assert seen == [13], "whole when nothing is to be kept for a backward"


@pytest.mark.parametrize("reentrant", [False, True])
def test_offloaded_checkpoints_are_exact_and_copied_once(reentrant, ids, monkeypatch):
    model = convert(model_of(4, 2), LayerBlocks([[0, 0], [0, 1], [0, 1], [3, 1]]), sink_size=2, recent_size=4).train()
    wanted = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    copied = []

    class Counted(pod.model.offload.StorageWeakRef):
        def __init__(self, storage):
            copied.append(storage.nbytes())
            super().__init__(storage)

    monkeypatch.setattr(pod.model.offload, "StorageWeakRef", Counted)
    model.model.offload_checkpoints = True
    assert_same(gradients(model, ids), wanted)
    # Four layers' inputs [2, 13, 24], and of two blocks the anchors' queries [2, 2, 13, 6] and keys [2, 13, 6].
    state, query, key = 4 * 2 * 13 * 24, 4 * 2 * 2 * 13 * 6, 4 * 2 * 13 * 6
    anchors = sorted(size for size in copied if size in (query, key))
    assert anchors == sorted([query, key] * 2), "each running anchor once, though every layer of its block saves it"
    assert copied.count(state) == 4


def test_a_place_that_was_freed_is_not_mistaken_for_what_lay_there():
    leaves, squares = [], []
    with kept_on_cpu():
        for value in range(50):
            leaves.append(torch.full((64,), float(value), requires_grad=True))
            lives_one_round = leaves[-1] * 1.0
            squares.append((lives_one_round * lives_one_round).sum())
            del lives_one_round
    for value, (leaf, square) in enumerate(zip(leaves, squares, strict=True)):
        square.backward()
        assert torch.equal(leaf.grad, torch.full((64,), 2.0 * value))
