"""pod.model.graph without a GPU: a replay is a step with the host's numbers of the captured one, and still right."""

import pytest
import torch
from test_model import left_padded, tiny_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pod
from pod.cache import slots as slot_storage
from pod.eviction import H2O, AdaKV, PyramidKV, SageKV, SnapKV
from pod.model import decoder as models
from pod.model import graph

splits = pytest.importorskip("pod_kernels.triton.splits", reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class NoSynchronisation(TorchDispatchMode):
    """Refuses what would wait for the device, which a capture does not allow."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        by_mask = name.startswith("aten::index") and any(
            index is not None and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if by_mask or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::lift_fresh"):
            raise AssertionError(f"{name} while a step is captured")
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Refuses what reads a whole tensor, which the other mode does not see."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            raise AssertionError(f"{func} while a step is captured")
        return func(*args, **(kwargs or {}))


def tiny(anchors=((0, 0), (0, 1))) -> torch.nn.Module:
    stock = tiny_model("qwen3", num_hidden_layers=len(anchors))
    return pod.convert(stock, pod.LayerBlocks(anchors), sink_size=2, recent_size=5)


def generated(model, steps, monkeypatch, capture=None, lengths=(14, 6), **options):
    """Logits of greedy decoding, the cache, and how often a graph was captured and replayed."""
    ids, mask, _ = (part.to(model.device) for part in left_padded(lengths, max(lengths)))
    cache, counts = pod.PodCache(model.config, **options), {"captured": 0, "replayed": 0}

    def stale(step):
        counts["captured"] += 1
        captured = cache.host_state()
        cache.advance()
        out = torch.empty(len(ids), 1, model.config.vocab_size)

        def replay():
            counts["replayed"] += 1
            now = cache.host_state()
            cache.set_host_state(captured)
            with NoSynchronisation(), NoReading():
                out.copy_(step())
            cache.set_host_state(now)

        return replay, out

    capture = stale if capture == "stale" else capture
    with monkeypatch.context() as context:
        if capture is not None:
            context.setattr(models, "step_graphs", lambda step, cache, device: graph.StepGraphs(step, cache, capture))
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            past_key_values=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return torch.stack(out.logits), cache, counts


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "fused")
    monkeypatch.setattr(splits, "BLOCK", 16)
    monkeypatch.setattr(splits, "SPLITS", 2)


def as_where_kernels_run(monkeypatch) -> None:
    """The storage counts as with kernels, and attention is torch's."""
    monkeypatch.setattr(slot_storage, "runs_triton", lambda tensor: True)
    plain = slot_storage.cached_attention
    monkeypatch.setattr(slot_storage, "cached_attention", lambda *args, by_kernels, **kwargs: plain(*args, **kwargs))


@pytest.mark.slow
def test_a_replay_with_stale_numbers_is_a_step(kernels, monkeypatch):
    model = tiny()
    options = {"max_length": 24, "tau": 0.4}
    expected, plain, _ = generated(model, 6, monkeypatch, **options)
    logits, cache, counts = generated(model, 6, monkeypatch, "stale", **options)
    # The prefill, a step that allocates the workspace, one that finds it there, and three by one graph.
    assert counts == {"captured": 1, "replayed": 3}
    assert torch.equal(logits, expected)
    assert cache.host_state() == plain.host_state() and cache.stats == plain.stats
    assert all(torch.equal(one, other) for one, other in zip(cache.storages(), plain.storages(), strict=True))


# Several anchors in each head, two blocks that compete under AdaKV, a layer without anchors, and one that stores its
# heads in another order than theirs.
ANCHORS = ((0, 0), (0, 0), (2, 2), (2, 3))
AFTER_THE_PROMPT = [
    SnapKV(10, window=4, kernel_size=3),
    PyramidKV(10, window=4, kernel_size=3),
    AdaKV(10, window=4, kernel_size=3),
    SageKV(10, query_aware=False),
    H2O(10, query_aware=False),
]


def replays_equal_steps(model, steps, replays, monkeypatch, method, **options):
    expected, plain, _ = generated(model, steps, monkeypatch, eviction=method, **options)
    logits, cache, counts = generated(model, steps, monkeypatch, "stale", eviction=method, **options)
    assert counts == replays
    assert torch.equal(logits, expected)
    assert cache.host_state() == plain.host_state() and cache.nbytes() == plain.nbytes()
    assert all(torch.equal(one, other) for one, other in zip(cache.storages(), plain.storages(), strict=True))
    if isinstance(method, AdaKV):
        first, second = cache._storage.tables[0].slots.sizes
        assert (first != second).any()  # ragged heads
    # What the host has counted is right for what comes after the replays, too.
    for layer in range(len(model.config.blocks.anchors)):
        assert torch.equal(cache.positions(layer), plain.positions(layer))
    for one in (cache, plain):
        one.may_grow = True
    tokens = torch.randint(1, 90, (logits.shape[1], 5), generator=torch.Generator().manual_seed(0))
    further = [model(tokens, past_key_values=one).logits for one in (cache, plain)]
    assert torch.equal(*further)


@pytest.mark.slow
@pytest.mark.parametrize("anchors", [ANCHORS, ((0, 0), (1, 1))], ids=["blocks", "dense"])
@pytest.mark.parametrize("method", AFTER_THE_PROMPT, ids=lambda method: type(method).__name__)
def test_a_replay_after_eviction_is_a_step(method, anchors, monkeypatch):
    """Torch's own attention after eviction follows from the device as the kernels' does, so it can show the same."""
    as_where_kernels_run(monkeypatch)
    # Where layers share scores, one step more allocates the workspace.
    replays = {"captured": 1, "replayed": 16 if anchors is ANCHORS else 17}
    replays_equal_steps(tiny(anchors), 19, replays, monkeypatch, method, max_length=60, lengths=(23, 3, 16))


@pytest.mark.slow
@pytest.mark.parametrize("method", AFTER_THE_PROMPT, ids=lambda method: type(method).__name__)
def test_between_two_growths_steps_are_replayed(method, monkeypatch):
    as_where_kernels_run(monkeypatch)
    monkeypatch.setattr(pod.PodCache, "expect", lambda cache, length: None)  # as where drafts go beyond the length
    method = type(method)(budget=40, **{"window": 4} if method.window else {"query_aware": False})
    # An eighth of 40 beside the token that comes: of six steps one grows, one finds the storage there, one is captured.
    replays = {"captured": 3, "replayed": 12}
    replays_equal_steps(tiny(ANCHORS), 19, replays, monkeypatch, method, lengths=(90, 70))


@pytest.mark.slow
@pytest.mark.parametrize("method", AFTER_THE_PROMPT, ids=lambda method: type(method).__name__)
def test_a_cache_that_generate_tells_the_length_has_one_graph(method, monkeypatch):
    as_where_kernels_run(monkeypatch)
    method = type(method)(budget=40, **{"window": 4} if method.window else {"query_aware": False})
    replays = {"captured": 1, "replayed": 16}
    replays_equal_steps(tiny(ANCHORS), 19, replays, monkeypatch, method, lengths=(90, 70))


@pytest.mark.slow
@pytest.mark.parametrize("method", [AFTER_THE_PROMPT[0], AFTER_THE_PROMPT[2]], ids=["snapkv", "adakv"])
def test_a_replay_after_eviction_is_a_step_of_the_kernels(method, kernels, monkeypatch):
    replays_equal_steps(tiny(((0, 0), (0, 0))), 6, {"captured": 1, "replayed": 3}, monkeypatch, method, max_length=24)


def test_decoding_after_eviction_waits_for_nothing(monkeypatch):
    """Nor does a step that evicts, but for budgets that go to the device once, and a step that grows reads once."""
    model = tiny(ANCHORS)
    for method in (*AFTER_THE_PROMPT, H2O(10), SageKV(10)):
        cache, ids = pod.PodCache(model.config, eviction=method, max_length=40), torch.arange(1, 25).view(2, 12)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        with NoSynchronisation(), NoReading():
            model(ids[:, 1:2], past_key_values=cache)


# A head that streams beside one that shares, in all layers, and one that stores its heads in another order.
STREAMING = ((0, -1), (0, 1), (-1, 1), (3, -1))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tau": 0.4}, {"eviction": AFTER_THE_PROMPT[0]}], ids=["tau", "snapkv"])
def test_a_replay_where_heads_stream_is_a_step_of_the_kernels(options, kernels, monkeypatch):
    options = {"max_length": 24, **options}
    expected, plain, _ = generated(tiny(STREAMING), 6, monkeypatch, **options)
    logits, cache, counts = generated(tiny(STREAMING), 6, monkeypatch, "stale", **options)
    assert counts == {"captured": 1, "replayed": 3} and torch.equal(logits, expected)
    assert all(torch.equal(one, other) for one, other in zip(cache.storages(), plain.storages(), strict=True))
    monkeypatch.delenv("POD_ATTENTION_BACKEND")
    by_torch, _, _ = generated(tiny(STREAMING), 6, monkeypatch, **options)
    torch.testing.assert_close(logits, by_torch, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [None, AFTER_THE_PROMPT[0]], ids=["all", "snapkv"])
def test_where_heads_stream_a_step_waits_for_nothing_and_its_addresses_stand_still(method, monkeypatch):
    model, ids = tiny(STREAMING), torch.arange(1, 25).view(2, 12)
    cache = pod.PodCache(model.config, eviction=method, max_length=40)
    if method is not None:  # appending where nothing is evicted is a kernel's part, and seen above
        as_where_kernels_run(monkeypatch)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    stands = [tensor.data_ptr() for tensor in cache.storages()]
    with NoSynchronisation(), NoReading():
        for at in range(1, 9):
            model(ids[:, at : at + 1], past_key_values=cache)
    assert [tensor.data_ptr() for tensor in cache.storages()] == stands
    if method is not None:
        assert cache.place_of_a_step() is not None


@pytest.mark.slow
def test_a_cache_that_moves_has_no_graph(kernels, monkeypatch):
    model = tiny()
    # Where no length is known storage grows, here at every other step; H2O evicts at every one.
    monkeypatch.setattr(pod.PodCache, "expect", lambda cache, length: None)
    for options in ({}, {"eviction": SnapKV(budget=9, window=4)}, {"eviction": H2O(9), "max_length": 24}):
        _, _, counts = generated(model, 4, monkeypatch, "stale", **options)
        assert counts == {"captured": 0, "replayed": 0}


def test_a_capture_that_fails_leaves_the_step_to_run_as_it_is(monkeypatch):
    model = tiny()
    expected, plain, _ = generated(model, 4, monkeypatch)
    tried = []

    def failing(step):
        tried.append(step)
        raise RuntimeError("operation not permitted")

    # The place alone asks for kernels; the steps themselves run by torch here.
    monkeypatch.setattr(models.PodCache, "place_of_a_step", lambda cache: ("here",) if cache.batch_size > 0 else None)
    with pytest.warns(UserWarning, match="without a CUDA graph, capturing a step failed: operation not permitted"):
        logits, cache, _ = generated(model, 4, monkeypatch, failing)
    assert len(tried) == 1 and torch.equal(logits, expected) and cache.host_state() == plain.host_state()


def test_where_there_is_no_graph(monkeypatch):
    model = tiny()
    cache = pod.PodCache(model.config)
    assert graph.step_graphs(lambda *_: None, cache, torch.device("cpu")) is None
    assert isinstance(graph.step_graphs(lambda *_: None, cache, torch.device("cuda")), graph.StepGraphs)
    monkeypatch.setenv("POD_CUDA_GRAPH", "0")
    assert graph.step_graphs(lambda *_: None, cache, torch.device("cuda")) is None
    assert cache.place_of_a_step() is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [{}, {"tau": 0.4}, *({"eviction": method} for method in AFTER_THE_PROMPT)], ids=str)
def test_generate_by_a_graph_equals_generate_without(options, monkeypatch, recwarn):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "fused")  # "auto" takes no kernels, and so no graph
    model, captured = tiny().cuda(), []
    options = {"max_length": 60, **options}

    def counting(step):
        captured.append(graph.cuda_capture(step))
        return captured[-1]

    logits, cache, _ = generated(model, 40, monkeypatch, counting, **options)
    assert len(captured) == 1
    assert not [warning for warning in recwarn if "CUDA graph" in str(warning.message)]
    monkeypatch.setenv("POD_CUDA_GRAPH", "0")
    expected, plain, _ = generated(model, 40, monkeypatch, **options)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert cache.stats == plain.stats and cache.host_state() == plain.host_state()
