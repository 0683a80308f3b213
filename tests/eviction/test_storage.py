"""What an evicting cache holds, frees and hands back; equality at large budgets; turns, rows and misuse."""

import copy
from dataclasses import dataclass, fields

import pytest
import torch
from calibrated import with_filters
from test_cache import ANCHORS, DENSE, assert_close, build, fed, greedy, left_padded, recomputed, tokens

import pod
from pod.cache.keep import kept, lowest
from pod.eviction import (
    CAKE,
    H2O,
    METHODS,
    TOVA,
    AdaKV,
    Cascade,
    ChunkKV,
    CriticalKV,
    Eviction,
    ExpectedAttention,
    KeyDiff,
    LagKV,
    LMInfinite,
    Observation,
    PyramidKV,
    Quest,
    SageKV,
    Sharing,
    SnapKV,
    StreamingLLM,
    ZigZagKV,
)
from pod.eviction.cake import apportion

ALL = [SnapKV(100, window=4), H2O(100), TOVA(100), CAKE(100, window=4)]
ALL += [PyramidKV(100, window=4), AdaKV(100, window=4), SageKV(100)]
TIGHT = [SnapKV(16, window=4, kernel_size=3), H2O(16), TOVA(16), CAKE(16, window=4, kernel_size=3)]
TIGHT += [PyramidKV(16, window=4, kernel_size=3), AdaKV(16, window=4, kernel_size=3), SageKV(16)]
TIGHT += [CriticalKV(16, window=4, kernel_size=3), ZigZagKV(16, window=4, kernel_size=3)]
TIGHT += [ChunkKV(16, window=4, kernel_size=3, chunk_size=3), KeyDiff(16, every=1), LagKV(16, lag=4)]
BOTH = [
    pytest.param(("llama", "scores", DENSE), id="dense", marks=pytest.mark.slow),
    pytest.param(("llama", "scores", ANCHORS), id="blocks"),
    pytest.param(("qwen3", "keys", ANCHORS), id="blocks-keys", marks=pytest.mark.slow),
]


def named(methods):
    return pytest.mark.parametrize("method", methods, ids=lambda method: type(method).__name__)


@dataclass(frozen=True)
class Ragged(Eviction):
    """Keeps the best and the last few; every row and KV head another number."""

    def protected(self, groups: int = 1) -> int:
        return 3

    def score(self, seen: Observation) -> torch.Tensor:
        return seen.weights[:, :, :, -1].mean(dim=2)

    def allocate(self, sharing: Sharing) -> list[list[list[int]]]:
        rows = range(len(sharing.seen))
        return [[[self.budget - 2 * head - row for row in rows] for head in stage.heads] for stage in sharing.stages]


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("which", BOTH)
@named(ALL)
def test_a_large_budget_changes_nothing(method, which):
    model = build(*which)
    ids, mask = left_padded((31, 2, 17))
    caches = [
        pod.PodCache(model.config, eviction=method),
        pod.PodCache(model.config, eviction=method, max_length=80),
        pod.PodCache(model.config),
    ]
    outputs = []
    for cache in caches:
        so_far, steps = mask, []
        steps.append(fed(model, cache, ids, so_far))
        for count in (1, 1, 6, 1, 1, 1):
            so_far = torch.nn.functional.pad(so_far, (0, count), value=1)
            steps.append(fed(model, cache, tokens(3, count, seed=count), so_far))
        outputs.append(torch.cat(steps, dim=1)[mask.new_ones(so_far.shape).bool() & so_far.bool()])
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs[1], outputs[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("which", BOTH)
@named(TIGHT + [Ragged(16)])
def test_logits_after_eviction_are_attention_to_what_is_kept(method, which, monkeypatch):
    # The fast attention against its plain loops, inside the model, with slots in any order and ragged heads.
    from pod.cache import slots as slot_storage
    from pod_kernels.cached import cached_attention, reference_cached_attention

    model, compared = build(*which), []

    def both(q, layer, **kwargs):
        result = cached_attention(q, layer, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if kwargs["scores"] is None:
            names = ("positions", "table", "q_distant", "distant_keys", "scale")
            expected = reference_cached_attention(q, layer, **{name: kwargs[name] for name in names})
            torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
            compared.append(layer)
        return result

    monkeypatch.setattr(slot_storage, "cached_attention", both)
    cache = pod.PodCache(model.config, eviction=method)
    ids, mask = left_padded((40, 26))
    fed(model, cache, ids, mask)
    if which[1] == "keys" or which[2] is DENSE:
        # As under share=keys, a step then leaves no scores, and the reference can be asked.
        storage, sharing = cache._storage, {**model.config.to_dict(), "share": "keys"}
        storage.config, config = type(model.config).from_dict(sharing), storage.config
        for _ in range(4):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            fed(model, cache, tokens(2, 1), mask)
        storage.config = config
    fed(model, cache, tokens(2, 5), torch.nn.functional.pad(mask, (0, 5), value=1))
    assert compared


@pytest.mark.parametrize("which", BOTH)
@named(TIGHT)
def test_left_padded_rows_equal_themselves_alone(method, which):
    model, lengths = build(*which), (33, 9, 21)
    ids, mask = left_padded(lengths)
    cache = pod.PodCache(model.config, eviction=method)
    first = fed(model, cache, ids, mask)
    new, logits, _ = greedy(model, cache, first, 6, mask)
    for row, length in enumerate(lengths):
        alone = pod.PodCache(model.config, eviction=method)
        own = fed(model, alone, ids[row : row + 1, 33 - length :])
        steps = [fed(model, alone, new[row : row + 1, step : step + 1]) for step in range(6)]
        assert_close(logits[row], torch.cat(steps, dim=1)[0])
        assert_close(first[row, -1], own[0, -1])


@pytest.mark.parametrize("which", BOTH)
@named(TIGHT)
def test_a_prefill_in_chunks_keeps_what_one_piece_keeps(method, which):
    model, ids = build(*which), tokens(2, 45)
    whole = pod.PodCache(model.config, eviction=method)
    parts = pod.PodCache(model.config, eviction=method, max_length=60)
    fed(model, whole, ids)
    with parts.prefill():
        fed(model, parts, ids, chunks=(1, 19, 1, 2, 22))
        assert parts.positions(0).shape[2] == 45  # nothing is evicted before the end
    for layer in range(5):
        assert torch.equal(whole.positions(layer), parts.positions(layer))
    assert_close(fed(model, whole, tokens(2, 1)), fed(model, parts, tokens(2, 1)))
    with pytest.raises(RuntimeError), parts.prefill():
        fed(model, parts, tokens(2, 9))
        raise RuntimeError("a forward that failed")
    fed(model, parts, tokens(2, 1))


# ---------------------------------------------------------------------- generate


@pytest.mark.slow
@pytest.mark.parametrize("which", BOTH)
@named(TIGHT)
def test_generate(method, which):
    model = build(*which)
    ids, mask = left_padded((30, 19))
    common = dict(attention_mask=mask, suppress_tokens=[0], max_new_tokens=8)
    for options in (dict(num_beams=3), dict(do_sample=True), dict(prefill_chunk_size=7), dict(do_sample=False)):
        cache = pod.PodCache(model.config, eviction=method)
        out = model.generate(ids, past_key_values=cache, **common, **options)
        assert out.shape == (2, 38)
        limit = 16 + (0 if method.when else 8)
        sizes = [(cache.positions(layer) >= 0).sum(dim=-1) for layer in range(5)]
        assert isinstance(method, CAKE) or torch.stack(sizes).float().mean() <= limit
        if not isinstance(method, CAKE | PyramidKV | AdaKV | ZigZagKV):  # these give layers or heads different numbers
            assert max(int(size.max()) for size in sizes) <= limit
        assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
    # A second turn on the last cache.
    turn = torch.cat([out, tokens(2, 5, seed=3)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 13), value=1)
    again = model.generate(turn, past_key_values=cache, **{**common, "attention_mask": mask})
    assert again.shape == (2, 51) and cache.get_seq_length() == 50


@pytest.mark.parametrize("which", BOTH)
@named(TIGHT)
def test_beams_reorder_what_is_kept(method, which):
    model = build(*which)
    ids, mask = left_padded((30, 12))
    one, other = (pod.PodCache(model.config, eviction=method) for _ in range(2))
    fed(model, one, ids, mask)
    one.reorder_cache(torch.tensor([1, 1, 0]))
    mask = mask[[1, 1, 0]]
    fed(model, other, ids[[1, 1, 0]], mask)
    for step in range(3):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = tokens(3, 1, seed=step)
        assert_close(fed(model, one, new, mask), fed(model, other, new, mask))


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if issubclass(method, Eviction) and not method.waits]
)
def test_one_context_serves_many_questions(name, which):
    model, context = build(*which), tokens(1, 40)
    more = [",window=4", ",filters=measured"]
    more = [text for text in more if text[1:].split("=")[0] in {one.name for one in fields(METHODS[name])}]
    text = f"{name}:budget=16,query_aware=false" + "".join(more)
    method = with_filters(pod.eviction.parse(text), model.config)
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, context)
    held = [cache.positions(layer).clone() for layer in range(5)]
    answers = []
    for question in (1, 2):
        served = copy.deepcopy(cache)
        out = fed(model, served, tokens(1, 7, seed=question))
        answers.append(torch.cat([out, fed(model, served, tokens(1, 1))], dim=1))
        for layer in range(5):  # nothing more is evicted: kept tokens, then the question
            new = torch.arange(40, 48).expand(1, 2, -1)
            kept_and_new = [set(row) - {-1} for row in torch.cat([held[layer], new], dim=-1)[0].tolist()]
            assert [set(row) - {-1} for row in served.positions(layer)[0].tolist()] == kept_and_new
        assert torch.equal(cache.positions(0), held[0])
    # The same by taking the question back.
    for question, answer in ((1, answers[0]), (2, answers[1])):
        out = fed(model, cache, tokens(1, 7, seed=question))
        assert_close(torch.cat([out, fed(model, cache, tokens(1, 1))], dim=1), answer)
        cache.crop(-8)
    assert torch.equal(cache.positions(0), held[0])


def test_crop_after_eviction():
    model = build()
    cache = pod.PodCache(model.config, eviction=SnapKV(16, window=4), crop_slack=8)
    fed(model, cache, tokens(2, 40))
    expected = fed(model, copy.deepcopy(cache), tokens(2, 1))
    fed(model, cache, tokens(2, 1, seed=1))
    with pytest.raises(ValueError, match="evicted after the prefill, 1 tokens ago"):
        cache.crop(-2)
    cache.crop(-1)
    assert_close(fed(model, cache, tokens(2, 1)), expected)
    stepping = pod.PodCache(model.config, eviction=H2O(16))
    assert cache.is_croppable and not stepping.is_croppable
    fed(model, stepping, tokens(2, 40))
    with pytest.raises(ValueError, match="H2O evicts while decoding"):
        stepping.crop(-1)


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("anchors", [DENSE, ANCHORS], ids=["dense", "blocks"])
def test_ragged_heads_are_stored_as_such(anchors):
    model = build(anchors=anchors)
    cache = pod.PodCache(model.config, eviction=Ragged(16))
    fed(model, cache, tokens(3, 50))
    for layer in range(5):
        counts = (cache.positions(layer) >= 0).sum(dim=-1)
        assert counts.tolist() == [[16 - 2 * head - row for head in range(2)] for row in range(3)]
    # Values and anchor keys of exactly what is kept, a position and a score or two beside each unit.
    is_dense = anchors is DENSE
    pairs = sum(16 - 2 * head - row for row in range(3) for head in range(2)) * 5
    assert sum(layer.values.data.shape[0] for layer in cache._storage.layers) == pairs
    assert is_dense == (sum(layer.keys.data.shape[0] for layer in cache._storage.layers) == pairs)
    fed(model, cache, tokens(3, 1))


@named(TIGHT + [Ragged(16)])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 12)], ids=["even", "padded"])
@pytest.mark.parametrize("which", BOTH)
def test_decoding_allocates_nothing(which, method, lengths):
    model = build(*which)
    ids, mask = left_padded(lengths)
    cache = pod.PodCache(model.config, eviction=method, max_length=70)
    fed(model, cache, ids, mask)
    held = [storage.data_ptr() for storage in cache.storages()]
    nbytes = cache.nbytes()
    for step in range(30):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        fed(model, cache, tokens(2, 1, seed=step), mask)
        assert [storage.data_ptr() for storage in cache.storages()] == held
    assert cache.nbytes() == nbytes


def test_a_per_step_method_without_max_length_allocates_once():
    model = build()
    for method in [method for method in TIGHT if method.when > 0]:
        cache = pod.PodCache(model.config, eviction=method)
        fed(model, cache, tokens(2, 40))
        held = [storage.data_ptr() for storage in cache.storages()]
        for step in range(25):
            fed(model, cache, tokens(2, 1, seed=step))
            assert [storage.data_ptr() for storage in cache.storages()] == held


@pytest.mark.parametrize("method", [PyramidKV(40, window=4), AdaKV(40, window=4), Ragged(40)], ids=repr)
def test_storage_grows_in_all_layers_at_once(method):
    model, moved, held = build(anchors=ANCHORS), [], []
    cache = pod.PodCache(model.config, eviction=method)
    ids, mask = left_padded((80, 70))
    fed(model, cache, ids, mask)
    most_near = model.config.sink_size + model.config.recent_size + cache.crop_slack
    for step in range(15):
        units = cache._storage
        before = [storage.data_ptr() for storage in cache.storages() if storage.numel()]
        counts = [count for table in units.tables.values() for head in table.live().tolist() for count in head]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        fed(model, cache, tokens(2, 1, seed=step), mask)
        slots = [size for table in units.tables.values() for head in table.slots.sizes for size in head]
        if before != [storage.data_ptr() for storage in cache.storages() if storage.numel()]:
            moved.append(step)
            # Not a part of each: where heads or layers hold different numbers, small ones would soon be full again.
            more = sum(counts) // len(counts) // 8 + 1
            assert slots == [count + more for count in counts]
            held.append(more)
        for layer in filter(None, units.layers):
            assert layer.near_keys.shape[2] <= min(most_near, max(map(max, layer.values.sizes)))
    assert moved == [sum(held[:index]) for index in range(len(moved))] and 3 <= len(moved) <= 4


@pytest.mark.parametrize("max_length", [None, 16384 + 8])
def test_bytes_of_pod_with_snapkv(max_length):
    # 14 of 20 pairs of layer and KV head share their keys.
    first, second = (0, 0, 0, 0, 4, 4, 4, 4, 8, 8), (0, 1, 1, 1, 1, 5, 5, 5, 5, 5)
    length, dim = 16384, 16
    model = build(anchors=tuple(zip(first, second, strict=True)), sinks=4, recent=60, hidden=64)
    assert model.config.blocks.kv_saving == pytest.approx(0.35)
    cache = pod.PodCache(model.config, eviction=SnapKV(length // 8), max_length=max_length)
    # The cache alone: attention of 16K tokens in ten layers would take the test's time.
    random = torch.Generator().manual_seed(0)
    cache.begin(model.config, torch.empty(1, length, 64), None, model.model.rotary_emb)
    keys = torch.randn(1, 2, length, dim, generator=random)
    queries = torch.randn(1, 4, length, dim, generator=random)
    import pod.cache.slots as slots

    attention, slots.shared_score_attention = slots.shared_score_attention, lambda q, *args, **kwargs: q
    try:
        for layer in range(10):
            cache.attend(layer, queries, keys, keys, queries, keys, dim**-0.5)
    finally:
        slots.shared_score_attention = attention
    cache.finish()
    assert all((cache.positions(layer) >= 0).sum(dim=-1).eq(length // 8).all() for layer in range(10))
    dense = 10 * 2 * 2 * length * dim * 4
    assert cache.nbytes() == sum(storage.untyped_storage().nbytes() for storage in cache.storages())
    assert 0.0812 <= cache.nbytes() / dense <= 0.085


@pytest.mark.parametrize("anchors", [DENSE, ANCHORS], ids=["dense", "blocks"])
@pytest.mark.parametrize("method", TIGHT, ids=lambda method: type(method).__name__)
def test_peak_of_a_prefill(anchors, method, monkeypatch):
    model, length, batch = build(anchors=anchors), 100, 2
    cache = pod.PodCache(model.config, eviction=method)
    attend, held = cache.attend, []

    def watching(*args):
        out = attend(*args)
        held.append(cache.nbytes())
        return out

    cache.attend = watching
    fed(model, cache, tokens(batch, length))
    final = max(held[-1], cache.nbytes())
    # The layer at hand, keys and values of the whole prompt, is beside the cache while it attends.
    slack = 4 * batch * 2 * 5 * 64 // 10
    assert max(held) <= final + slack
    assert max(held) < 5 * 2 * 2 * batch * length * 16 * 4 / 3


# ---------------------------------------------------------------------- CAKE's sharing


def test_cascading_equals_evicting_once():
    """Theorem 1, on sizes and on the tokens themselves: stage by stage against one eviction by METHODS' plain rule."""
    random = torch.Generator().manual_seed(0)
    plain_rule = 0
    for _ in range(2000):
        layers = int(torch.randint(1, 9, (), generator=random))
        length = int(torch.randint(4, 60, (), generator=random))
        each = int(torch.randint(0, 40, (), generator=random))
        preferences = (torch.rand(layers, generator=random).double() ** 4 + 1e-9).tolist()
        scores = torch.rand(layers, length, generator=random)
        total = each * layers
        held = [list(range(length)) for _ in range(layers)]
        room, peak = [], 0
        for stage in range(1, layers + 1):
            room.append(length)
            room = apportion(total, preferences[:stage], [1] * stage, room, stage == layers)
            for layer in range(stage):
                held[layer] = sorted(held[layer], key=lambda t, s=scores[layer]: float(s[t]), reverse=True)
                held[layer] = held[layer][: room[layer]]
            assert [len(tokens) for tokens in held[:stage]] == room
            peak = max(peak, sum(room))
        assert sum(room) == min(total, layers * length)
        assert peak <= total + layers
        for layer in range(layers):
            once = sorted(range(length), key=lambda t, s=scores[layer]: float(s[t]), reverse=True)[: room[layer]]
            assert held[layer] == once
        shares = [p / sum(preferences) * total for p in preferences]
        if max(shares) <= length:  # nothing above the prompt's length: whole numbers, and one each of what is left
            counts = [int(share) for share in shares]
            counts = [count + (layer < total - sum(counts)) for layer, count in enumerate(counts)]
            if all(count <= length for count in counts):
                assert room == counts
                plain_rule += 1
    assert plain_rule > 300


def test_the_embeddings_of_a_prompt_do_not_stay():
    """Whose first token gives Expected Attention's rotary embedding its dtype and device."""
    model = build("llama", "scores", ANCHORS)
    cache = pod.PodCache(model.config, eviction=ExpectedAttention(16, future=8))
    fed(model, cache, tokens(2, 40))
    held = [value for value in vars(cache._storage).values() if hasattr(value, "func")]
    assert held[0].args[0].untyped_storage().nbytes() == 2 * model.config.hidden_size * 4


# ---------------------------------------------------------------------- ties and misuse


def test_ties_go_to_the_more_recent_token():
    scores = torch.tensor([[[1.0, 1.0, 0.0, 1.0, 2.0, 9.0]]])
    positions = torch.tensor([[[7, 3, 9, 5, 1, -1]]])
    forced = positions == 9
    keep = kept(scores, positions, forced, torch.tensor([[4]]))
    assert sorted(positions[keep].tolist()) == [1, 5, 7, 9]
    assert positions[0, 0, lowest(scores, positions, forced)[0, 0]] == 3


def test_bad_methods_are_refused():
    with pytest.raises(ValueError, match="budget .8 tokens. is below the 32 last tokens"):
        SnapKV(8)
    for wrong in ({"budget": 0}, {"budget": 64.0}, {"budget": True}, {"budget": 64, "window": "4"}):
        with pytest.raises(ValueError, match="budget|window"):
            SnapKV(**wrong)
    for method, wrong, message in [
        (Cascade, {"budget": "64"}, "Cascade: budget must be int or float, got '64'"),
        (Cascade, {"budget": 80.0}, "Cascade: budget must be a whole number of tokens, or a share.*got 80.0"),
        (Cascade, {"budget": 80, "gamma": "x"}, "Cascade: gamma must be float, got 'x'"),
        (Cascade, {"budget": 80, "head_reduction": 3}, "Cascade: head_reduction must be str, got 3"),
        (StreamingLLM, {"budget": 16.5}, "StreamingLLM: budget must be a whole number of tokens, or a share.*got 16.5"),
        (StreamingLLM, {"budget": 16, "sinks": None}, "StreamingLLM: sinks must be int, got None"),
        (StreamingLLM, {"budget": 16, "stride": True}, "StreamingLLM: stride must be int or None, got True"),
        (LMInfinite, {"budget": 16, "sinks": "4"}, "LMInfinite: sinks must be int, got '4'"),
        (LMInfinite, {"budget": 16, "stride": None}, "LMInfinite: stride must be int, got None"),
        (Quest, {"budget": "64"}, "Quest: budget must be int or float, got '64'"),
        (Quest, {"budget": 64, "page_size": 2.0}, "Quest: page_size must be int, got 2.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            method(**wrong)
    with pytest.raises(ValueError, match="pooling must be one of max, avg; got 'sum'"):
        SnapKV(64, pooling="sum")
    with pytest.raises(ValueError, match="kernel_size must be an odd number"):
        SnapKV(64, kernel_size=4)
    with pytest.raises(ValueError, match="window must be at least 2"):
        CAKE(64, window=1)
    with pytest.raises(ValueError, match="tau1 must be > 0"):
        CAKE(64, tau1=0)
    with pytest.raises(ValueError, match="recent must be at least 1"):
        H2O(8, recent=0)
    with pytest.raises(ValueError, match="below the 9 last tokens"):
        H2O(8, recent=9)
    config = build().config
    with pytest.raises(ValueError, match="below the 7 that are always kept: 4 last ones and 3 sinks"):
        pod.PodCache(config, eviction=SnapKV(6, window=4))
    pod.PodCache(build(anchors=DENSE).config, eviction=SnapKV(6, window=4))  # a dense model has no sinks to keep
    with pytest.raises(ValueError, match="pod.eviction.parse"):
        pod.PodCache(config, eviction="snapkv:budget=256")
    with pytest.raises(ValueError, match="got <class"):
        pod.PodCache(config, eviction=SnapKV)


def test_parse():
    assert pod.eviction.parse("snapkv:budget=256,window=16") == SnapKV(256, window=16)
    assert pod.eviction.parse("H2O:budget=8,recent=none,query_aware=false") == H2O(8, query_aware=False)
    assert pod.eviction.parse_all("tova:budget=9 + cake:budget=64,tau1=1") == [TOVA(9), CAKE(64, tau1=1.0)]
    for text, message in (
        ("snapkw:budget=4", "unknown eviction method 'snapkw'; did you mean 'snapkv'"),
        ("snapkv:budget=64,widow=4", "no parameter 'widow'; did you mean 'window'"),
        ("snapkv:budget=many", "budget must be int or float, got 'many'"),
        ("snapkv:budget=1.5", "budget must be a whole number of tokens, or a share of the prompt.*got 1.5"),
        ("snapkv", "budget is missing, e.g. snapkv:budget=256"),
        ("snapkv:256", "not of the form parameter=value"),
        ("snapkv:budget=64,budget=65", "given twice"),
        ("h2o:budget=8,recent=x", "recent must be int or none"),
        ("", "no method stands before or after a"),
        ("qfilters:budget=64", "filters is missing, e.g. qfilters:filters=FILE"),
        ("qfilters:budget=64,window=-1,filters=a", "window must not be negative, got -1"),
        ("criticalkv:budget=64,epsilon=-1", "epsilon must not be negative, got -1"),
        ("zigzagkv:budget=64,held=0", "held above 0 and at most 1; got 0.2 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            pod.eviction.parse_all(text)
    for name in METHODS:
        assert f"{name}:budget" in pod.eviction.describe()


def test_a_file_of_measurements_is_a_parameter(tmp_path):
    """Its name is kept as it is, and what is not there or of another model is refused before a token is read."""
    method = pod.eviction.parse("qfilters:budget=16,window=4,filters=Runs/A.safetensors")
    assert pod.eviction.unparse(method) == "qfilters:budget=16,window=4,filters=Runs/A.safetensors"
    assert pod.eviction.of_hyper_parameters(pod.eviction.hyper_parameters(method)) == method
    config = build().config
    with pytest.raises(FileNotFoundError, match="Runs/A.safetensors: no such calibration file"):
        pod.PodCache(config, eviction=method)
    method = with_filters(method, config)
    with pytest.raises(ValueError, match="was measured has num_hidden_layers = 5, this one has 3"):
        pod.PodCache(build(anchors=ANCHORS[:3]).config, eviction=method)
    model, path = build(), tmp_path / "cache.safetensors"
    cache = pod.PodCache(config, eviction=method)
    fed(model, cache, tokens(1, 40))
    cache.save(path)
    again = pod.PodCache.load(path, config)
    assert again.eviction == method and torch.equal(again.positions(4), cache.positions(4))
    assert_close(fed(model, again, tokens(1, 9)), fed(model, cache, tokens(1, 9)))


def test_outputs_that_are_no_numbers_are_named():
    model = copy.deepcopy(build())
    for weight in (torch.zeros(8, 8), torch.zeros(64, 64, dtype=torch.uint8)):  # split, or quantised
        model.model.layers[2].self_attn.o_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        cache = pod.PodCache(model.config, eviction=CriticalKV(16, window=4))
        with pytest.raises(ValueError, match="CriticalKV needs .* those of layer 2 are quantised, split or not there"):
            fed(model, cache, tokens(1, 40))


@named(TIGHT)
def test_a_prompt_shorter_than_the_window_loses_nothing(method):
    model = build()
    cache = pod.PodCache(model.config, eviction=method)
    ids = tokens(1, 3)
    assert_close(fed(model, cache, ids), recomputed(model, ids))
    assert cache.positions(2).tolist() == [[[0, 1, 2]] * 2]


@pytest.mark.parametrize("which", BOTH)
@named(TIGHT)
def test_only_the_windows_queries_are_looked_at(method, which, monkeypatch):
    from pod.cache import keep

    model, seen = build(*which), []
    weights = keep.attention_weights

    def counting(q, *args):
        seen.append(q.shape[3])
        return weights(q, *args)

    monkeypatch.setattr(keep, "attention_weights", counting)
    monkeypatch.setattr(keep, "MAX_LOGITS", 2 * 4 * 60 * 7)  # seven queries of H2O at once, at most fourteen
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, tokens(2, 60))
    fed(model, cache, tokens(2, 5))
    fed(model, cache, tokens(2, 1))
    if isinstance(method, KeyDiff | LagKV):
        assert not seen  # keys and values are enough
    else:
        assert seen and max(seen) <= (14 if isinstance(method, H2O) else method.observed)


@named(TIGHT)
def test_half_precision(method):
    model = copy.deepcopy(build()).bfloat16()
    cache = pod.PodCache(model.config, eviction=method)
    out = fed(model, cache, tokens(2, 40))
    _, logits, _ = greedy(model, cache, out, 5)
    fed(model, cache, tokens(2, 4))
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert cache._storage.layers[1].values.data.dtype == torch.bfloat16


def test_eviction_on_the_command_line(capsys):
    from pod.generate import main

    def ended(*arguments):
        with pytest.raises(SystemExit) as ending:
            main(list(arguments))
        return ending.value.code

    assert ended("--eviction", "list") == 0
    assert "snapkv:budget" in capsys.readouterr().out
    assert ended("--ckpt", "nowhere", "--prompt", "x", "--eviction", "h2p:budget=3") == 2
    assert "did you mean 'h2o'" in capsys.readouterr().err
    assert ended("--eviction", "h2o:budget=3") == 2


def broken_off(model, cache: pod.PodCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """A forward that ends with an error before layer 3."""

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fed(model, cache, ids, mask)
    handle.remove()


# No eviction without slack for a ring, and with pages; methods that evict, once only too, or organise storage.
EVERY = [None, Quest(16, page_size=4, dense_layers=0), *TIGHT]
EVERY += [SnapKV(16, window=4, query_aware=False), H2O(16, query_aware=False)]
EVERY += [StreamingLLM(16), LMInfinite(16), Cascade(16, sinks=4), Cascade(16, sinks=4, stride=4)]


@pytest.mark.parametrize("which", BOTH)
@named(EVERY)
@pytest.mark.parametrize("count", [1, 6, 30])
def test_a_failed_forward_can_be_repeated_or_is_named(method, which, count):
    model = build(*which)
    cache = pod.PodCache(model.config, eviction=method, crop_slack=8)
    fed(model, cache, tokens(2, 40))
    fed(model, cache, tokens(2, 1))
    evicts = isinstance(method, Eviction) and method.query_aware
    is_store = isinstance(method, StreamingLLM | LMInfinite | Cascade)
    expected = copy.deepcopy(cache)
    broken_off(model, cache, tokens(2, count))
    # What pushes others out: a prefill that evicts, and more tokens than rings of own keys have to spare.
    if is_store or (evicts and count > 1) or (which[2] is ANCHORS and count > 9):
        for _ in range(2):
            with pytest.raises(ValueError, match="the last forward broke off.*call cache.reset"):
                fed(model, cache, tokens(2, count, seed=9))
        cache.reset()
        expected = pod.PodCache(model.config, eviction=method, crop_slack=8)
    for new in (tokens(2, count, seed=9), tokens(2, 1, seed=5), tokens(2, 3, seed=6), tokens(2, 1, seed=7)):
        torch.testing.assert_close(fed(model, cache, new), fed(model, expected, new), atol=1e-5, rtol=0)
    for layer in range(5):
        assert torch.equal(cache.positions(layer), expected.positions(layer))


def test_a_failed_step_adds_nothing_to_carried_scores():
    model = build(anchors=DENSE)
    cache = pod.PodCache(model.config, eviction=H2O(16))
    fed(model, cache, tokens(2, 40))
    expected = copy.deepcopy(cache)
    for one in (cache, expected):
        if one is cache:
            broken_off(model, one, tokens(2, 1))
        fed(model, one, tokens(2, 1))
    for layer in range(5):
        scores = [one._storage.tables[layer].scores.data for one in (cache, expected)]
        torch.testing.assert_close(*scores, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [None, (7, 20)], ids=["one piece", "in chunks"])
@named(EVERY)
def test_a_first_prefill_that_broke_off_is_begun_anew(method, chunks):
    model = build()
    cache, expected = (pod.PodCache(model.config, eviction=method) for _ in range(2))
    ids, mask = left_padded((27, 12))
    with pytest.raises(RuntimeError), cache.prefill():
        broken_off(model, cache, ids[:, :7] if chunks else ids, mask[:, :7] if chunks else mask)
        raise RuntimeError("out of memory")
    if chunks is None:
        broken_off(model, cache, tokens(3, 9))
    for one in (cache, expected):
        with one.prefill():
            fed(model, one, ids, mask, chunks or ())
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    for new in (tokens(2, 1), tokens(2, 1, seed=3)):
        assert_close(fed(model, cache, new, mask), fed(model, expected, new, mask))
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    for layer in range(5):
        assert torch.equal(cache.positions(layer), expected.positions(layer))


@named(TIGHT)
def test_a_chunk_that_broke_off_inside_a_prefill_is_named(method):
    model = build()
    cache = pod.PodCache(model.config, eviction=method)
    with pytest.raises(ValueError, match="broke off.*call cache.reset"), cache.prefill():
        fed(model, cache, tokens(2, 20))
        broken_off(model, cache, tokens(2, 9))  # caught, and the prefill is closed as if it were whole
    with pytest.raises(ValueError, match="broke off.*call cache.reset"):
        fed(model, cache, tokens(2, 9))


def test_a_forward_that_broke_off_between_its_strides_is_named(monkeypatch):
    model = build()
    cache = pod.PodCache(model.config, eviction=Cascade(16, sinks=4, stride=4))
    fed(model, cache, tokens(1, 9))
    finish, finished = cache.finish, []

    def stopped():
        finish()
        finished.append(1)
        if len(finished) == 2:
            raise KeyboardInterrupt

    cache.finish = stopped
    with pytest.raises(KeyboardInterrupt):
        fed(model, cache, tokens(1, 11))
    cache.finish = finish
    with pytest.raises(ValueError, match="broke off.*call cache.reset"):
        fed(model, cache, tokens(1, 11))
    with pytest.raises(ValueError, match="broke off.*call cache.reset"):
        cache.batch_repeat_interleave(2)


@pytest.mark.slow
@pytest.mark.parametrize("which", BOTH)
@named(EVERY)
def test_a_cache_filled_under_inference_mode_goes_on_outside(method, which):
    model = build(*which)
    ids, mask = left_padded((31, 17))
    cache, expected = (pod.PodCache(model.config, eviction=method) for _ in range(2))
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    for one in (cache, expected):
        with torch.inference_mode(one is cache):
            with one.prefill():
                fed(model, one, ids, mask, (20, 11))
            fed(model, one, tokens(2, 1), longer)
            one.reorder_cache(torch.tensor([1, 0]))
    with torch.inference_mode():
        cache = copy.deepcopy(cache)
    now = longer[[1, 0]]
    for count in (1, 5, 1):
        now = torch.nn.functional.pad(now, (0, count), value=1)
        new = tokens(2, count, seed=count)
        with torch.enable_grad():  # as a user who thinks of neither
            position_ids = (now.cumsum(dim=1) - 1)[:, -count:]
            out = model(new, attention_mask=now, position_ids=position_ids, past_key_values=cache).logits
        assert_close(out.detach(), fed(model, expected, new, now))
    cache.reorder_cache(torch.tensor([0, 0]))
    if cache.is_croppable:
        cache.crop(-1)
    with torch.inference_mode():  # and back again
        fed(model, cache, tokens(2, 1))


# ---------------------------------------------------------------------- masks of what is stored


@named(EVERY)
def test_a_mask_that_is_not_that_of_what_is_stored_is_refused(method, tmp_path):
    model = build()
    cache = pod.PodCache(model.config, eviction=method, crop_slack=8)
    ids, mask = left_padded((20, 12))
    fed(model, cache, ids, mask)
    turn = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])  # rows of different lengths, padded on the left
    mask = torch.cat([mask, turn], dim=1)
    fed(model, cache, tokens(2, 5), mask)
    fed(model, cache, tokens(2, 1))
    if cache.is_croppable and not getattr(method, "query_aware", False):
        fed(model, cache, tokens(2, 2))
        cache.crop(-2)
    cache.save(tmp_path / "cache")
    cache.reorder_cache(torch.tensor([1, 0]))
    mask = torch.nn.functional.pad(mask, (0, 2), value=1)
    loaded = pod.PodCache.load(tmp_path / "cache", model.config)
    for one, right in ((loaded, mask), (cache, mask[[1, 0]])):
        for row, token in ((0, 0), (1, 0), (0, 13), (1, 21), (1, 25)):
            wrong = right.clone()
            wrong[row, token] = 1 - wrong[row, token]
            was, said = ("real", "padding") if right[row, token] else ("padding", "real")
            message = f"row {row} of attention_mask says that token {token} is {said}, and the cache holds it as {was}"
            with pytest.raises(ValueError, match=message):
                fed(model, one, tokens(2, 1), wrong)
        wrong = torch.ones_like(right)
        with pytest.raises(ValueError, match="attention_mask says that token 0 is real"):
            fed(model, one, tokens(2, 1), wrong)
    # A refused mask leaves the cache as it was, and the mask of the new token alone is enough.
    expected = fed(model, copy.deepcopy(cache), tokens(2, 1), mask[[1, 0]])
    at = (mask[[1, 0]].cumsum(dim=1) - 1)[:, -1:]
    with torch.no_grad():
        out = model(tokens(2, 1), attention_mask=mask[:, -1:], position_ids=at, past_key_values=cache).logits
    assert_close(out, expected)


def test_generate_on_rows_with_padding_wants_their_mask():
    model = build()
    cache = pod.PodCache(model.config)
    ids, mask = left_padded((20, 12))
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, suppress_tokens=[0])
    turn = torch.cat([out, tokens(2, 4)], dim=1)
    for options in ({"attention_mask": torch.ones_like(turn)}, {"pad_token_id": 500}):
        with pytest.raises(ValueError, match="the cache holds rows with padding, and attention_mask has none"):
            model.generate(turn, past_key_values=cache, max_new_tokens=3, **options)
    # transformers makes a mask of pad tokens: one that was generated, or asked, is none.
    turn[0, 21] = 0
    with pytest.raises(ValueError, match="row 0 of attention_mask says that token 21 is padding.*every pad token"):
        model.generate(turn, past_key_values=cache, max_new_tokens=3)


def test_tokens_next_to_padding_of_a_turn_are_not_cropped():
    model = build()
    cache = pod.PodCache(model.config)
    fed(model, cache, tokens(2, 20))
    mask = torch.cat([torch.ones(2, 20), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])], dim=1)
    fed(model, cache, tokens(2, 5), mask)
    with pytest.raises(ValueError, match="cannot take back 4 tokens: some of them are padding of a turn"):
        cache.crop(-4)
    cache.crop(-3)
    assert [(row >= 0).sum() for row in cache.positions(0)[:, 0]] == [22, 20]


class EveryThird(H2O):
    """Heavy hitters, evicted after every third token."""

    when = 3


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize("max_length", [None, 80])
def test_evicting_every_third_step(which, max_length):
    model = build(*which)
    cache = pod.PodCache(model.config, eviction=EveryThird(16), max_length=max_length)
    fed(model, cache, tokens(2, 40))
    held = [storage.data_ptr() for storage in cache.storages()]
    for step in range(1, 10):
        fed(model, cache, tokens(2, 1, seed=step))
        for layer in range(5):
            assert ((cache.positions(layer) >= 0).sum(dim=-1) == 16 + step % 3).all()
        assert [storage.data_ptr() for storage in cache.storages()] == held


@named(TIGHT)
def test_a_row_of_padding_only(method):
    model = build()
    cache = pod.PodCache(model.config, eviction=method)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1] = 0
    fed(model, cache, tokens(2, 30), mask)
    alone = pod.PodCache(model.config, eviction=method)
    for step in range(4):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = tokens(2, 1, seed=step)
        assert_close(fed(model, cache, new, mask)[1], fed(model, alone, new[1:])[0])
    assert cache.positions(0)[1, 0, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_moments_want_angles_that_stay(kind):
    config = copy.deepcopy(build().config)  # one model serves all tests
    config.rope_parameters = config.rope_parameters | {"rope_type": kind}
    with pytest.raises(ValueError, match=f"ExpectedAttention turns queries .* RoPE of the type {kind}"):
        pod.PodCache(config, eviction=ExpectedAttention(16))
    pod.PodCache(config, eviction=SnapKV(16, window=4))


@pytest.mark.parametrize("method", [SnapKV, H2O], ids=lambda method: method.__name__)
def test_a_budget_beyond_all_memory_keeps_everything(method):
    model, ids = build(), torch.randint(1, 61, (2, 40))
    cache = pod.PodCache(model.config, eviction=method(2**63 - 1), max_length=42)
    plain = pod.PodCache(model.config, max_length=42)
    for part in (ids, ids[:, :1], ids[:, 1:2]):
        with torch.no_grad():
            found, wanted = (model(part, past_key_values=one).logits for one in (cache, plain))
        torch.testing.assert_close(found, wanted)
    assert torch.equal(cache.positions(0), plain.positions(0))


@pytest.mark.parametrize("cross_scoring", [False, True])
def test_one_token_again_and_again_leaves_lagkv_its_sinks_and_its_last_part(cross_scoring):
    """In the first layer its values are all alike, and a part of no extent gave no numbers, above all others."""
    model, ids = build(anchors=DENSE), tokens(1, 60)
    ids[:, 10:30] = 7
    cache = pod.PodCache(model.config, eviction=LagKV(24, sinks=2, lag=4, cross_scoring=cross_scoring))
    fed(model, cache, ids)
    for held in cache.positions(0)[0].tolist():
        assert {0, 1, *range(54, 60)} < set(held)
        # Keys still tell the tokens apart, and each part has its best ones, not its last ones.
        assert {number % 4 for number in held if 10 <= number < 26} != {1}
