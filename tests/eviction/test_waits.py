"""For what a decode step of a store of fixed slots makes the host wait: nothing, but for numbers of many steps at once.

On a CPU nothing waits, so what would is told by its form. `HostWaits` sees values and indices that are read from a
device, masks and lists as indices, and tensors made of lists or arrays. It cannot see a tensor of the CPU that meets
one of a device, as all are on the CPU here; only what makes such a tensor is counted.
"""

import functools
import sys

import numpy as np
import pytest
import torch
from tiny_models import ANCHORS, DENSE, build, fed, tokens
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pod
from pod.cache import chain_step as slot_step
from pod.eviction import Cascade, LMInfinite, StreamingLLM
from pod_kernels import segments as transfer

METHODS = [
    StreamingLLM(12),
    StreamingLLM(12, positions="absolute"),
    LMInfinite(12),
    Cascade(14, sinks=2, num_cascades=3),
    Cascade(66, sinks=2),
    StreamingLLM(0.5),
]
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, torch.from_numpy)
GIVERS = (Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.pin_memory)


class HostWaits:
    """Notes what would make the host wait for a device, between `with` and its end; Triton's interpreter aside."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> "HostWaits":
        waits, from_numpy = self, torch.from_numpy

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func in MAKERS or func in GIVERS:
                    waits.note(func.__name__)
                if func in (Tensor.__getitem__, Tensor.__setitem__):
                    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
                    if any(isinstance(index, list | range | np.ndarray) for index in indices):
                        waits.note("an index by a list")
                return func(*args, **(kwargs or {}))

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.name()
                if name in READS:
                    waits.note(name)
                if name in ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"):
                    if any(index is not None and index.dtype == torch.bool for index in args[1]):
                        waits.note(f"{name} by a mask")
                return func(*args, **(kwargs or {}))

        def watched(array):  # no mode sees it
            waits.note("from_numpy")
            return from_numpy(array)

        self._modes, self._from_numpy, torch.from_numpy = (Operations(), Functions()), from_numpy, watched
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        torch.from_numpy = self._from_numpy

    def note(self, what: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and "triton" not in frame.f_globals.get("__name__", "").split(".")[0]:
            frame = frame.f_back
        if frame is None:
            self.found.append(what)


@pytest.fixture(params=["composed", pytest.param("fused", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    if request.param == "fused":
        splits = pytest.importorskip("pod_kernels.triton.splits", reason="triton is not installed")
        monkeypatch.setattr(splits, "BLOCK", 16)
        monkeypatch.setattr(splits, "SPLITS", 2)
    return lambda: monkeypatch.setenv("POD_ATTENTION_BACKEND", request.param)


def test_what_waits_is_found():
    x, place = torch.arange(6), torch.tensor([1, 0])
    with HostWaits() as waits:
        x[place], x[1:3], x.gather(0, place), x.clamp(min=2)
    assert waits.found == []
    for wait in (
        lambda: x[[1, 0]],
        lambda: x[x > 2],
        lambda: x.__setitem__(x > 7, place[:0]),
        lambda: (x > 2).nonzero(),
        lambda: bool((x > 2).all()),
        lambda: int(x.max()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: torch.tensor([1, 2]),
        lambda: torch.from_numpy(np.arange(3)),
        lambda: transfer.on_device([np.arange(3)], x.device),
    ):
        with HostWaits() as waits:
            wait()
        assert waits.found, "not found"


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("anchors", [ANCHORS, DENSE], ids=["blocks", "dense"])
def test_a_step_waits_for_nothing(method, anchors, backend):
    model, ids = build(anchors=anchors), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, ids, mask)
    backend()
    for storage in (cache._storage, *(chain for _, chain in getattr(cache._storage, "_runs", ()))):
        storage.by_kernels = None  # it asks once
    found = []
    for step in range(4):
        new, at = tokens(2, 1, seed=step), torch.tensor([[20 + step], [13 + step]])
        with torch.no_grad(), HostWaits() as waits:
            model(new, position_ids=at, past_key_values=cache)
        found.append(waits.found)
    # The first brings numbers for many steps: counts, and without kernels the plan of insertions; under a share for the
    # rows of each budget.
    most = 2 * len(getattr(cache._storage, "_runs", [None]))
    assert set(found[0]) <= {"from_numpy"} and 1 <= len(found[0]) <= most
    assert found[1:] == [[], [], []]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_prompt_waits_as_often_in_many_layers_as_in_few(method):
    found = []
    for layers in (2, 5):
        model = build(anchors=tuple((min(layer, 1), layer) for layer in range(layers)))
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, :7] = 0
        cache = pod.PodCache(model.config, eviction=method)
        with HostWaits() as waits:
            fed(model, cache, tokens(2, 20), mask)
            fed(model, cache, tokens(2, 3), torch.nn.functional.pad(mask, (0, 3), value=1))
        found.append(waits.found)
    assert found[0] == found[1]


@pytest.mark.parametrize("eviction", [StreamingLLM(12), None], ids=["StreamingLLM", "none"])
def test_generate_does_not_ask_for_masks_of_its_steps(eviction, monkeypatch):
    model, ids, found = build(), tokens(2, 20), []
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    forward = type(model).forward

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        with HostWaits() as waits:
            out = forward(*args, **kwargs)
        found.append(waits.found)
        return out

    def generated(ids, mask, cache):
        options = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, suppress_tokens=[0], **options)

    cache = pod.PodCache(model.config, eviction=eviction, max_length=40)
    with monkeypatch.context() as context:
        context.setattr(type(model), "forward", watched)
        out = generated(ids, mask, cache)
    assert found[0] and len(found) == 5
    assert all(not waits for waits in found[2:])
    # As they are when the steps are fed with their masks.
    plain = pod.PodCache(model.config, eviction=eviction, max_length=40)
    new = out.sequences[:, 20:]
    logits = fed(model, plain, ids, mask)[:, -1:]
    for step in range(4):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = torch.cat([logits, fed(model, plain, new[:, step : step + 1], mask)], dim=1)
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits, atol=1e-5, rtol=0)


def test_generate_still_reads_the_mask_of_a_prompt_of_one_token():
    # A further turn of one token, which one row does not have.
    model, ids = build(), tokens(2, 20)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, -1] = 0
    cache, alone = (pod.PodCache(model.config, eviction=StreamingLLM(12)) for _ in range(2))
    fed(model, cache, ids)
    fed(model, alone, ids[1:])
    turn = torch.cat([ids, tokens(2, 1, seed=4)], dim=1)
    model.generate(turn, attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert torch.equal(cache.positions(0)[1], alone.positions(0)[0])
    assert cache.positions(0)[0].max() == 20


def test_numbers_of_steps_ahead_are_those_of_each_step():
    cascades = pod.cache.chain.Cascades(2, 12, 3)
    steps = slot_step.Steps(cascades, rotates=True, gamma=0.9, has_window=False)
    device = torch.device("cpu")
    made = []
    for seen in ([5, 9], [6, 10], [8, 12], [7, 11], [5 + 64, 9 + 64], [6, 10], [6, 11], [6], [6 + 63], [4]):
        seen = np.array(seen)
        numbers, (first, last) = steps._one_token(seen, device)
        single = slot_step.Numbers.of(cascades, True, seen, np.ones_like(seen), 1, device)
        assert torch.equal(numbers.seen[first:last], single.seen) and torch.equal(single.counts, torch.ones(len(seen)))
        for ahead, alone in zip(numbers.oldest, single.oldest, strict=True):
            assert torch.equal(ahead[first:last], alone)
        assert numbers.plan.rows(first, last).depths == single.plan.depths
        made.append(numbers)
    assert [made[place] is made[place - 1] for place in range(1, 10)] == [True] * 3 + [False] * 4 + [True, False]
