"""Kept positions equal those of a plain-loop simulation; budgets add up; prompts and turns of every kind."""

from dataclasses import replace

import pytest
import torch
from calibrated import with_filters
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulation import Ambiguous, Simulation
from test_cache import ANCHORS, DENSE, build, fed, left_padded, tokens

import pod
from pod.eviction import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    Combined,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    PyramidKV,
    QFilters,
    SageKV,
    Sharing,
    SnapKV,
    Stage,
    ZigZagKV,
)
from pod.eviction.adakv import share_out as adakv_share_out

SMALL = ((0, 0), (0, 1), (2, 1))  # blocks of one and two layers
METHODS = {
    "snapkv": lambda budget, window: SnapKV(budget, window=window, kernel_size=3),
    "snapkv-avg": lambda budget, window: SnapKV(budget, window=window, kernel_size=5, pooling="avg"),
    "pyramidkv": lambda budget, window: PyramidKV(budget, window=window, kernel_size=3),
    "pyramidkv-avg": lambda budget, window: PyramidKV(budget, window=window, pooling="avg", beta=2),
    "adakv": lambda budget, window: AdaKV(budget, window=window, kernel_size=3),
    "adakv-avg": lambda budget, window: AdaKV(budget, window=window, pooling="avg", alpha=0.5),
    "adakv-normalize": lambda budget, window: AdaKV(budget, window=window, kernel_size=3, normalize=True),
    "sagekv": lambda budget, window: SageKV(budget),
    "h2o": lambda budget, window: H2O(budget),
    "h2o-recent": lambda budget, window: H2O(budget, recent=window),
    "tova": lambda budget, window: TOVA(budget),
    "cake": lambda budget, window: CAKE(budget, window=max(2, window), kernel_size=3),
    "cake-even": lambda budget, window: CAKE(budget, window=max(2, window), gamma=0.0, tau1=1.0, tau2=1.0),
}
METHODS |= {
    "chunkkv": lambda budget, window: ChunkKV(budget, window=window, kernel_size=3, chunk_size=4),
    "chunkkv-one": lambda budget, window: ChunkKV(budget, window=window, kernel_size=1, chunk_size=1),
    "expected": lambda budget, window: ExpectedAttention(budget, sinks=2, future=5),
    "expected-window": lambda budget, window: ExpectedAttention(budget, sinks=0, future=1, epsilon=0.0, window=window),
    "knorm": lambda budget, window: Knorm(budget),
    "knorm-every": lambda budget, window: Knorm(budget, every=window),
    "keydiff": lambda budget, window: KeyDiff(budget),
    "keydiff-every": lambda budget, window: KeyDiff(budget, every=window),
    "lagkv": lambda budget, window: LagKV(budget, sinks=2, lag=3),
    "lagkv-every": lambda budget, window: LagKV(budget, every=window, sinks=1, lag=4),
    "lagkv-cross": lambda budget, window: LagKV(budget, sinks=2, lag=3, cross_scoring=True),
    "qfilters": lambda budget, window: QFilters(budget, window=window, filters="measured"),
    "qfilters-every": lambda budget, window: QFilters(budget, window=0, every=window, filters="measured"),
    "zigzagkv": lambda budget, window: ZigZagKV(budget, window=window, kernel_size=3),
    "zigzagkv-even": lambda budget, window: ZigZagKV(budget, window=window, kernel_size=3, alpha=1.0),
    "zigzagkv-half": lambda budget, window: ZigZagKV(budget, window=window, alpha=0.0, held=0.5),
    "criticalkv": lambda budget, window: CriticalKV(budget, window=window, kernel_size=3),
    "criticalkv-values": lambda budget, window: CriticalKV(budget, window=window, kernel_size=1, epsilon=10.0),
}
METHODS |= {
    f"cake-{option}-{name}": lambda budget, window, one={option: name}: CAKE(
        budget, window=max(2, window), kernel_size=3, **one
    )
    for option, names in (
        ("indicator", ("mean", "variance", "product")),
        ("allocation", ("entropy", "variance", "uniform", "random")),
    )
    for name in names
}
COMBINED = {  # scorer, allocator
    "h2o-by-cake": lambda budget, window, **aware: (
        H2O(budget, recent=max(2, window), **aware),
        CAKE(budget, window=max(2, window), kernel_size=3, **aware),
    ),
    "snapkv-by-cake": lambda budget, window, **aware: (
        SnapKV(budget, window=max(2, window), kernel_size=3, **aware),
        CAKE(budget, window=max(2, window), **aware),
    ),
    "cake-by-pyramidkv": lambda budget, window, **aware: (
        CAKE(budget, window=max(2, window), kernel_size=3, **aware),
        PyramidKV(budget, window=max(2, window), beta=2, **aware),
    ),
    "expected-by-adakv": lambda budget, window, **aware: (
        ExpectedAttention(budget, window=window, future=3, **aware),
        AdaKV(budget, window=window, **aware),
    ),
    "criticalkv-by-adakv": lambda budget, window, **aware: (
        CriticalKV(budget, window=window, kernel_size=3, **aware),
        AdaKV(budget, window=window, alpha=0.0, **aware),
    ),
    "qfilters-by-zigzagkv": lambda budget, window, **aware: (
        QFilters(budget, window=window, filters="measured", **aware),
        ZigZagKV(budget, window=window, **aware),
    ),
    "h2o-by-adakv": lambda budget, window, **aware: (
        H2O(budget, recent=window, **aware),
        AdaKV(budget, window=window, alpha=0.5, **aware),
    ),
}


def method_of(name: str, budget: int | float, window: int, aware: bool = True):
    if name in COMBINED:
        return Combined(budget, *COMBINED[name](budget, window, query_aware=aware), query_aware=aware)
    return replace(METHODS[name](budget, window), query_aware=aware)


def assert_same(cache: pod.PodCache, simulation: Simulation) -> None:
    for layer, anchors in enumerate(simulation.anchors):
        positions = cache.positions(layer)
        for row in range(positions.shape[0]) if simulation.rows is None else simulation.rows:
            for head, anchor in enumerate(anchors):
                held = [p for p in positions[row, head].tolist() if p >= 0]
                wanted = sorted(simulation.held.get((row, anchor, head), {}))
                assert held == wanted, (layer, row, head)


def mask_for(mask, more: int):
    return None if mask is None else torch.nn.functional.pad(mask, (0, more), value=1)


@pytest.mark.parametrize(
    "anchors",
    [
        pytest.param(SMALL[:2], id="mixed", marks=pytest.mark.slow),
        pytest.param(SMALL, id="blocks"),
        pytest.param(((0, 0), (1, 1)), id="dense", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "-" in name else name for name in [*METHODS, *COMBINED]]
)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_positions_equal_the_simulation(name, anchors, data):
    budget = data.draw(st.integers(7, 12), label="budget")
    window = data.draw(st.integers(1, 4), label="window")
    lengths = data.draw(st.sampled_from([(19,), (21, 6), (8, 23, 2), (30, 29)]), label="lengths")
    chunks = data.draw(st.sampled_from([(), (5, 1, 9)]), label="chunks")
    turn = data.draw(st.integers(2, 7), label="turn")
    max_length = data.draw(st.sampled_from([None, 60]), label="max_length")
    aware = data.draw(st.sampled_from([True, True, False]), label="query_aware")
    model = build(anchors=anchors, sinks=3, recent=5)
    method = with_filters(method_of(name, budget, window, aware), model.config)
    cache = pod.PodCache(model.config, max_length=max_length, eviction=method)
    simulation = Simulation(cache, method, model.config)
    ids, mask = left_padded(lengths)
    mask = None if len(set(lengths)) == 1 else mask
    try:
        if chunks:
            chunks = (*chunks, ids.shape[1] - sum(chunks)) if ids.shape[1] > sum(chunks) else ()
        with cache.prefill() if chunks else torch.no_grad():
            fed(model, cache, ids, mask, chunks)
        simulation.prefill()
        assert_same(cache, simulation)
        for step in range(7):
            mask = mask_for(mask, 1)
            fed(model, cache, tokens(len(lengths), 1, seed=step), mask)
            simulation.step(evict=aware)
        assert_same(cache, simulation)
        mask = mask_for(mask, turn)
        fed(model, cache, tokens(len(lengths), turn, seed=99), mask)
        simulation.prefill(evict=aware)
        assert_same(cache, simulation)
        for step in range(3):
            mask = mask_for(mask, 1)
            fed(model, cache, tokens(len(lengths), 1, seed=step), mask)
            simulation.step(evict=aware)
            assert_same(cache, simulation)
    except Ambiguous:
        assume(False)
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())


@pytest.mark.slow
@pytest.mark.parametrize("anchors", [SMALL, ((0, 0), (1, 1))], ids=["blocks", "dense"])
@pytest.mark.parametrize("name", [*METHODS, *COMBINED])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_share_is_of_each_rows_first_prefill(name, anchors, data):
    """Against a simulation for each row, with as many tokens as its own prompt makes, in later turns too."""
    share = data.draw(st.sampled_from([0.3, 0.5, 0.77]), label="share")
    window = data.draw(st.integers(1, 4), label="window")
    lengths = data.draw(st.sampled_from([(25,), (30, 12, 19, 2), (22, 22), (17, 17, 29)]), label="lengths")
    chunks = data.draw(st.sampled_from([(), (5, 1, 6)]), label="chunks")
    aware = data.draw(st.sampled_from([True, True, False]), label="query_aware")
    model = build(anchors=anchors, sinks=3, recent=5)
    cache = pod.PodCache(model.config, eviction=with_filters(method_of(name, share, window, aware), model.config))
    simulations = []
    for row, length in enumerate(lengths):
        method = method_with_at_least(int(share * length), name, window, aware, model.config)
        simulations.append(Simulation(cache, method, model.config, rows=[row]))
    ids, mask = left_padded(lengths)
    mask = None if len(set(lengths)) == 1 else mask
    try:
        with cache.prefill() if chunks else torch.no_grad():
            fed(model, cache, ids, mask, (*chunks, ids.shape[1] - sum(chunks)) if chunks else ())
        for turn in (1, 1, 1, 11, 1, 1):
            for simulation in simulations:
                if cache.get_seq_length() == ids.shape[1]:
                    simulation.prefill()
                    assert_same(cache, simulation)
            mask = mask_for(mask, turn)
            fed(model, cache, tokens(len(lengths), turn, seed=turn), mask)
            for simulation in simulations:
                (simulation.step if turn == 1 else simulation.prefill)(evict=aware)
                assert_same(cache, simulation)
    except Ambiguous:
        assume(False)


def method_with_at_least(tokens: int, name: str, window: int, aware: bool, config):
    """Of the budgets from so many tokens on the first that the method and the model take."""
    for budget in range(max(1, tokens), 100):
        try:
            method = with_filters(method_of(name, budget, window, aware), config)
            pod.PodCache(config, eviction=method)
        except ValueError:
            continue
        return method


@pytest.mark.parametrize("anchors", [DENSE, ANCHORS], ids=["dense", "blocks"])
@pytest.mark.parametrize("name", METHODS)
def test_budgets_add_up(name, anchors):
    model = build(anchors=anchors)
    method = with_filters(METHODS[name](14, 4), model.config)
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, tokens(2, 50))
    for _ in range(2):  # after the prefill, and when decoding has evicted
        held = torch.stack([(cache.positions(layer) >= 0).sum(dim=-1) for layer in range(5)])  # [L, B, H_kv]
        if name.startswith("adakv"):  # heads trade with heads that share as much
            assert (held.sum(dim=2) == 2 * 14).all() or anchors is not DENSE
            assert (held.sum(dim=(0, 2)) == 5 * 2 * 14).all()
            assert (held != 14).any() or anchors is not DENSE
        elif not name.startswith(("cake", "pyramidkv", "zigzagkv")):
            # Between two evictions there is room for what comes.
            assert (held == 14).all() or (method.when > 1 and (held < 14 + method.when).all())
        elif anchors is DENSE:
            assert (held.sum(dim=0) == 5 * 14).all()
        else:  # a remainder smaller than the smallest block may be left over
            assert (held.sum(dim=0) <= 5 * 14).all() and (held.sum(dim=0) >= 5 * 14 - 2).all()
        if method.when == 0:
            break
        fed(model, cache, tokens(2, 1))


@pytest.mark.parametrize(
    "budget, window, beta, layers", [(2048, 8, 20, 32), (128, 8, 20, 32), (64, 8, 14, 7), (9, 8, 1, 5)]
)
def test_pyramid_is_exact_and_falls(budget, window, beta, layers):
    method, mean = PyramidKV(budget, window=window, beta=beta), budget - window
    blocks = pod.LayerBlocks.dense(layers, 1)
    always = {(layer, 0): window for layer in range(layers)}
    counts = {}
    for seen in (budget, 2 * mean - 1, 2 * mean, 3 * budget, 10**6):
        stages = [Stage(layer, (0,), [[seen]], None, None, None) for layer in range(layers)]
        sharing = Sharing(blocks, always, [seen], [seen <= method.threshold], stages)
        counts[seen] = [line[0][0] - window for line in method.allocate(sharing)]
        assert sum(counts[seen]) == mean * layers and min(counts[seen]) >= 0
        assert counts[seen] == sorted(counts[seen], reverse=True) and counts[seen][0] <= max(mean, seen - window)
    least, most = mean // beta, 2 * mean - mean // beta
    long = counts[10**6]
    assert long[-1] >= least and most - layers / 2 * ((most - least) % (layers - 1)) <= long[0] <= most
    assert counts[budget] == [mean] * layers
    if beta > 1:
        assert len(set(long)) == layers


def test_ada_shares_are_exact():
    assert adakv_share_out(10, [20, 0, 10], [30, 30, 30], 0.2) == [18, 2, 10]
    assert adakv_share_out(10, [21, 0, 9], [30, 30, 30], 0.5) == [15, 5, 10]  # 15.5, 5, 9.5: rounded 16, 5, 10
    assert adakv_share_out(10, [15, 5], [11, 30], 0.0) == [11, 9]
    assert adakv_share_out(10, [3, 2], [3, 4], 0.2) == [3, 4]  # there are no more


def test_sage_takes_the_paper_sizes():
    method = SageKV(8192)
    assert (method.sinks, method.chosen_per_head(4), method.protected(4)) == (2048, 1024, 2048)
    assert (method.sinks, method.chosen_per_head(7), method.protected(7)) == (2048, 512, 2560)
    assert SageKV(16).chosen_per_head(16) == 0 and SageKV(16).protected(16) == 12
    with pytest.raises(ValueError, match="SageKV: budget must be at least 4 tokens"):
        SageKV(3)


@pytest.mark.parametrize("wrong", range(3))
def test_parts_must_agree_on_query_aware(wrong):
    aware = [part != wrong for part in range(3)]
    with pytest.raises(ValueError, match="query_aware is .* but .* has .*: give all three"):
        scorer, allocator = SnapKV(16, window=4, query_aware=aware[0]), CAKE(16, window=4, query_aware=aware[1])
        Combined(16, scorer, allocator, query_aware=aware[2])


@pytest.mark.parametrize("scorer", [H2O(16, recent=4), SnapKV(16, window=4)], ids=["h2o", "snapkv"])
def test_scores_and_allocations_combine(scorer):
    model = build(anchors=DENSE)
    allocator = CAKE(16, window=4)
    held = {}
    for method in (scorer, allocator, Combined(16, scorer, allocator)):
        cache = pod.PodCache(model.config, eviction=method)
        fed(model, cache, tokens(2, 60))
        held[type(method).__name__] = [cache.positions(layer) for layer in range(5)]
    counts = {name: [(p >= 0).sum(dim=-1).tolist() for p in layers] for name, layers in held.items()}
    assert counts["Combined"] == counts["CAKE"] != counts[type(scorer).__name__]
    # Nested: by the same scores, the layer that got fewer tokens holds a part of what the other holds.
    for layer in range(5):
        for row in range(2):
            for head in range(2):
                own = set(held[type(scorer).__name__][layer][row, head].tolist()) - {-1}
                got = set(held["Combined"][layer][row, head].tolist()) - {-1}
                assert got <= own or own <= got
