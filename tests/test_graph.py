"""pod.graph without a GPU: a replay is a step with the host's numbers of the captured one, and must still be right."""

import pytest
import torch
from test_model import left_padded, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import pod
from pod import graph
from pod import model as models
from pod.eviction import SnapKV

splits = pytest.importorskip("pod_kernels.splits", reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class NoSynchronisation(TorchDispatchMode):
    """Refuses what would wait for the device, which a capture does not allow."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::lift_fresh"):
            raise AssertionError(f"{name} while a step is captured")
        return func(*args, **(kwargs or {}))


def tiny() -> torch.nn.Module:
    stock = tiny_model("qwen3", num_hidden_layers=2)
    return pod.convert(stock, pod.LayerBlocks([[0, 0], [0, 1]]), sink_size=2, recent_size=5)


def generated(model, steps, monkeypatch, capture=None, **options):
    """Logits of greedy decoding, the cache, and how often a graph was captured and replayed."""
    ids, mask, _ = (part.to(model.device) for part in left_padded((14, 6), 14))
    cache, counts = pod.PodCache(model.config, **options), {"captured": 0, "replayed": 0}

    def stale(step):
        counts["captured"] += 1
        captured = cache.host_state()
        cache.advance()
        out = torch.empty(2, 1, model.config.vocab_size)

        def replay():
            counts["replayed"] += 1
            now = cache.host_state()
            cache.set_host_state(captured)
            with NoSynchronisation():
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


@pytest.mark.slow
def test_a_cache_that_moves_has_no_graph(kernels, monkeypatch):
    model = tiny()
    # Without max_length storage grows by an eighth, here at every other step.
    for options in ({}, {"eviction": SnapKV(budget=9, window=4), "max_length": 24}):
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
@pytest.mark.parametrize("tau", [None, 0.4])
def test_generate_by_a_graph_equals_generate_without(tau, monkeypatch, recwarn):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "fused")  # plain torch's steps are in no graph
    model = tiny().cuda()
    options = {"max_length": 60, "tau": tau}
    captured = []

    def capture(step):
        captured.append(step)
        return graph.cuda_capture(step)

    logits, cache, _ = generated(model, 40, monkeypatch, capture, **options)
    assert captured
    assert not [warning for warning in recwarn if "CUDA graph" in str(warning.message)]
    monkeypatch.setenv("POD_CUDA_GRAPH", "0")
    expected, plain, _ = generated(model, 40, monkeypatch, **options)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert cache.stats == plain.stats and cache.host_state() == plain.host_state()
