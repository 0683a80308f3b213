"""Attention to a cache's segments: the batched form against the plain loops, and both against the whole sequence."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pod_kernels import LayerSlots, Segments, SkipStats, cached, cached_attention, reference
from pod_kernels.cached import reference_cached_attention

DIM = 16
KV_HEADS, GROUPS = 3, 2
HEADS = KV_HEADS * GROUPS
SINKS, RECENT, SLACK = 3, 5, 2
CAPACITY = 40
LENGTHS = (2, 33, 9, 17)  # the first row is shorter than the sinks

# Which KV heads are anchors: all, none, and two mixtures.
PATTERNS = [(True, True, True), (False, False, False), (True, False, True), (False, True, False)]
LAYOUTS = pytest.mark.parametrize("is_anchor", PATTERNS, ids=lambda pattern: "".join("as"[not a] for a in pattern))


def random_segments(heads: int, capacity: int, lengths: Tensor, dtype: torch.dtype) -> Segments:
    """Segments whose every slot, the unwritten ones too, holds random numbers."""
    segments = Segments.rectangular(heads, len(lengths), capacity, DIM, dtype=dtype, device=lengths.device)
    segments.data.copy_(torch.randn(segments.data.shape))
    return segments


def make_layer(
    is_anchor: tuple[bool, ...],
    lengths: Tensor,
    *,
    sinks: int = SINKS,
    recent: int = RECENT,
    slack: int = SLACK,
    capacity: int = CAPACITY,
    dtype: torch.dtype = torch.float32,
) -> LayerSlots:
    """A layer of a cache, anchors stored first."""
    order = tuple(sorted(range(len(is_anchor)), key=lambda head: not is_anchor[head]))
    anchors = sum(is_anchor)
    return LayerSlots(
        order=order,
        num_anchors=anchors,
        values=random_segments(len(order), capacity, lengths, dtype),
        keys=random_segments(anchors, capacity, lengths, dtype),
        near_keys=torch.randn(len(order) - anchors, len(lengths), min(capacity, sinks + recent + slack), DIM).to(dtype),
        sink_size=sinks,
        recent_size=recent,
        ring_size=recent + slack,
    )


def both(q: Tensor, layer: LayerSlots, scores: Tensor | None = None, **kwargs) -> tuple[tuple, tuple]:
    """(out, lse, gate, workspace) of `cached_attention` and of its reference."""
    results = []
    for function in (cached_attention, reference_cached_attention):
        workspace = None if scores is None else scores.clone()
        parts = function(q, layer, scores=workspace, return_lse=True, return_gate=True, **kwargs)
        results.append((*parts, workspace))
    return results[0], results[1]


def assert_equal(actual: tuple, expected: tuple, tolerance: float = 1e-5) -> None:
    for name, one, other in zip(("out", "lse", "gate"), actual, expected, strict=False):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def anchor_keys(layer: LayerSlots, lengths: Tensor, dtype: torch.dtype = torch.float32) -> tuple:
    """Another layer's key segments, of which the shared heads use the last heads in reverse."""
    shared = KV_HEADS - layer.num_anchors
    segments = random_segments(KV_HEADS, CAPACITY, lengths, dtype)
    return tuple((segments, KV_HEADS - 1 - place) for place in range(shared))


@LAYOUTS
@pytest.mark.parametrize("score_heads", ["all", "one", "none"])
def test_decode_with_scores_equals_reference(is_anchor, score_heads):
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    layer = make_layer(is_anchor, lengths)
    anchors = layer.order[: layer.num_anchors]
    heads = {"all": anchors, "one": anchors[:1], "none": ()}[score_heads]
    q = torch.randn(len(LENGTHS), HEADS, 1, DIM)
    # One slot more than tokens: the workspace, too, is allocated for what will come.
    scores = torch.randn(KV_HEADS, len(LENGTHS), GROUPS, 1, CAPACITY)
    length = int(lengths.max())
    options = dict(positions=lengths[:, None] - 1, unused=CAPACITY - length, score_heads=heads)
    actual, expected = both(q, layer, scores, **options)
    assert_equal(actual, expected)
    for row, seen in enumerate(LENGTHS):
        written, wanted = actual[3][:, row, ..., :seen], expected[3][:, row, ..., :seen]
        torch.testing.assert_close(written, wanted, atol=1e-5, rtol=1e-5)
    untouched = [head for head in range(KV_HEADS) if head not in heads]
    assert torch.equal(actual[3][untouched], scores[untouched])
    assert torch.equal(actual[3][..., length:], scores[..., length:])
    if heads:
        assert not torch.equal(actual[3], scores)


@LAYOUTS
def test_decode_without_scores_equals_reference(is_anchor):
    torch.manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    layer = make_layer(is_anchor, lengths)
    q, q_distant = torch.randn(2, len(LENGTHS), HEADS, 1, DIM)
    options = dict(
        positions=lengths[:, None] - 1,
        unused=CAPACITY - int(lengths.max()),
        q_distant=q_distant,
        distant_keys=anchor_keys(layer, lengths),
        scale=0.3,
    )
    assert_equal(*both(q, layer, **options))


def several_queries(is_anchor, dtype=torch.float32, **sizes) -> tuple[Tensor, LayerSlots, dict]:
    """Six queries; the last row held nothing before and begins with two padding tokens."""
    count = 6
    before = torch.tensor([2, 30, 9, 0])
    positions = before[:, None] + torch.arange(count)
    positions[3] -= 2
    positions[3, :2] = -1
    layer = make_layer(is_anchor, before, dtype=dtype, **sizes)
    q, q_distant = torch.randn(2, 4, HEADS, count, DIM).to(dtype)
    options = dict(
        positions=positions,
        unused=CAPACITY - int(positions.max()) - 1,
        q_distant=q_distant,
        distant_keys=anchor_keys(layer, before, dtype),
    )
    new_keys = torch.randn(KV_HEADS - layer.num_anchors, 4, count, DIM).to(dtype)
    return q, with_new_keys(layer, before, positions, new_keys), options


def with_new_keys(layer: LayerSlots, before: Tensor, positions: Tensor, new_keys: Tensor) -> LayerSlots:
    """The layer with own keys [S, B, T, D] of several queries at `positions` behind those of `before` [B] tokens."""
    known = torch.cat([layer.ring_positions(before), positions], dim=1)[None]
    near_keys = torch.cat([layer.near_keys, new_keys], dim=2)
    return replace(layer, near_keys=near_keys, near_positions=known, near_slots=known)


@LAYOUTS
@pytest.mark.parametrize("max_logits", [None, 1, 4 * HEADS * 36 * 4])
def test_several_queries_equal_reference(is_anchor, max_logits, monkeypatch):
    torch.manual_seed(2)
    if max_logits is not None:
        monkeypatch.setattr(cached, "MAX_LOGITS", max_logits)  # one query at a time, and four and two
    q, layer, options = several_queries(is_anchor)
    actual, expected = both(q, layer, **options)
    assert_equal(actual, expected)
    out, lse, gate, _ = actual
    assert not out[3, :, :2].any() and (lse[3, :, :2] == -torch.inf).all() and (gate[3, :, :2] == 1).all()
    assert out[3, :, 2:].any()


def test_chunks_of_queries_are_small(monkeypatch):
    monkeypatch.setattr(cached, "MAX_LOGITS", 4 * HEADS * 36 * 2)
    sizes = []
    logits_of = cached._Asked.logits

    def noted(*args):
        logits = logits_of(*args)
        sizes.append(logits.shape[3])
        return logits

    monkeypatch.setattr(cached._Asked, "logits", noted)
    torch.manual_seed(3)
    q, layer, options = several_queries((True, False, True))
    cached_attention(q, layer, **options)
    assert sizes == [2, 2, 2]


@pytest.mark.parametrize("sinks, recent, slack", [(0, 1, 0), (0, 5, 2), (4, 1, 0), (2, 60, 64), (50, 1, 0)])
def test_extreme_sizes_equal_reference(sinks, recent, slack):
    torch.manual_seed(4)
    q, layer, options = several_queries((True, False, False), sinks=sinks, recent=recent, slack=slack)
    assert_equal(*both(q, layer, **options))


def test_a_row_of_padding_only_decodes_to_zero():
    torch.manual_seed(5)
    lengths = torch.tensor([7, 0])
    layer = make_layer((True, False, False), lengths)
    scores = torch.randn(KV_HEADS, 2, GROUPS, 1, CAPACITY)
    options = dict(positions=lengths[:, None] - 1, unused=CAPACITY - 7, score_heads=(0,))
    actual, expected = both(torch.randn(2, HEADS, 1, DIM), layer, scores, **options)
    assert_equal(actual, expected)
    assert not actual[0][1].any() and torch.isfinite(actual[0]).all()


@LAYOUTS
def test_bfloat16_stays_near_the_reference(is_anchor):
    torch.manual_seed(6)
    q, layer, options = several_queries(is_anchor, dtype=torch.bfloat16)
    actual, expected = both(q, layer, **options)
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == actual[2].dtype == torch.float32
    assert_equal(actual, expected, 3e-2)


def test_results_on_request():
    torch.manual_seed(7)
    q, layer, options = several_queries((True, False, True))
    out, lse, gate = cached_attention(q, layer, return_lse=True, return_gate=True, **options)
    assert torch.equal(cached_attention(q, layer, **options), out)
    assert torch.equal(cached_attention(q, layer, return_lse=True, **options)[1], lse)
    assert torch.equal(cached_attention(q, layer, return_gate=True, **options)[1], gate)


def store(layer: LayerSlots, k: Tensor, v: Tensor, lengths: tuple[int, ...], until: Tensor) -> None:
    """Write right-aligned rows, k and v [B, H_kv, T, D], token by token; `near` up to `until` [B] tokens."""
    total = k.shape[2]
    for row, count in enumerate(lengths):
        for place, head in enumerate(layer.order):
            for position in range(count):
                column = total - count + position
                layer.values.rectangle[place, row, position] = v[row, head, column]
                if place < layer.num_anchors:
                    layer.keys.rectangle[place, row, position] = k[row, head, column]
                elif position < int(until[row]):
                    slot = int(layer.ring_places(torch.tensor(position)))
                    layer.near_keys[place - layer.num_anchors, row, slot] = k[row, head, column]


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("is_anchor", PATTERNS[1:])
def test_last_tokens_equal_the_whole_sequence(is_anchor, count, share):
    torch.manual_seed(8)
    total, lengths = 31, (31, 2, 13, 8)
    q, q_anchor = torch.randn(2, 4, HEADS, total, DIM)
    k, v, k_anchor = torch.randn(3, 4, KV_HEADS, total, DIM)
    anchors = torch.tensor(is_anchor)
    k_distant = torch.where(anchors[:, None, None], k, k_anchor)
    q_distant = torch.where(anchors.repeat_interleave(GROUPS)[:, None, None], q, q_anchor)
    q_distant = q if share == "keys" else q_distant
    options = dict(sink_size=SINKS, recent_size=RECENT, return_lse=True, return_gate=True)
    expected = reference.shared_score_attention(q, k, v, q_distant, k_distant, lengths=torch.tensor(lengths), **options)

    after = torch.tensor(lengths)
    before = after if count == 1 else (after - count).clamp(min=0)
    layer = make_layer(is_anchor, before)
    store(layer, k, v, lengths, before)
    anchor_layer = make_layer((True,) * KV_HEADS, after)
    store(anchor_layer, k_anchor, v, lengths, after)
    positions = after[:, None] - count + torch.arange(count)
    shared = layer.order[layer.num_anchors :]
    last = slice(total - count, total)
    positions = positions.clamp(min=-1)
    common = dict(positions=positions, unused=CAPACITY - total, return_lse=True, return_gate=True)
    if count > 1:
        layer = with_new_keys(layer, before, positions, k[:, shared][:, :, last].transpose(0, 1))
    actual = cached_attention(
        q[:, :, last],
        layer,
        q_distant=q_distant[:, :, last],
        distant_keys=tuple((anchor_layer.keys, head) for head in shared),
        **common,
    )
    assert_equal(actual, [part[:, :, last] for part in expected])

    if count == 1 and share == "scores":  # the same through the numbers that the anchor layer left
        scores = torch.full((KV_HEADS, 4, GROUPS, 1, CAPACITY), torch.nan)
        heads = tuple(range(KV_HEADS))
        workspace = dict(scores=scores, **common)
        cached_attention(q_anchor[:, :, last], anchor_layer, score_heads=heads, **workspace)
        actual = cached_attention(q[:, :, last], layer, **workspace)
        assert_equal(actual, [part[:, :, last] for part in expected])


# ---------------------------------------------------------------------- slots of any positions


def with_table(layer: LayerSlots, options: dict) -> tuple[LayerSlots, dict]:
    """The same content where a table says that slot = position, and own keys lie with their positions and slots."""
    positions, known = options["positions"], layer.near_positions
    known = layer.ring_positions(positions[:, 0] + 1)[None] if known is None else known
    known = known.int().expand(layer.near_keys.shape[:3])
    table = Segments.rectangular(KV_HEADS, len(positions), CAPACITY, 1, dtype=torch.int32, device=known.device)
    column = torch.arange(CAPACITY, dtype=torch.int32)
    table.rectangle[..., 0] = torch.where(column <= positions[:, -1:], column, -1)
    options = options | {"table": tuple((table, place) for place in range(KV_HEADS))}
    return replace(layer, ring_size=0, near_positions=known, near_slots=known.clamp(min=0)), options


@LAYOUTS
@pytest.mark.parametrize("case", ["scores", "keys", "several"])
def test_a_table_of_slots_in_order_changes_nothing(is_anchor, case):
    torch.manual_seed(9)
    lengths = torch.tensor([*LENGTHS, 0])  # a row of which only padding was seen
    if case == "several":
        q, layer, options = several_queries(is_anchor)
    else:
        layer = make_layer(is_anchor, lengths)
        q, q_distant = torch.randn(2, len(lengths), HEADS, 1, DIM)
        options = dict(positions=lengths[:, None] - 1, unused=CAPACITY - int(lengths.max()))
        if case == "keys":
            options |= dict(q_distant=q_distant, distant_keys=anchor_keys(layer, lengths))
    scores = torch.randn(KV_HEADS, len(lengths), GROUPS, 1, CAPACITY) if case == "scores" else None
    heads = layer.order[: layer.num_anchors]
    expected, _ = both(q, layer, scores, score_heads=heads, **options)
    layer, options = with_table(layer, options)
    actual, loops = both(q, layer, scores, score_heads=heads, **options)
    assert_equal(actual, loops)
    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(one, other)
    if scores is not None:
        for row, seen in enumerate(lengths.tolist()):
            assert torch.equal(actual[3][:, row, ..., :seen], expected[3][:, row, ..., :seen])


# ---------------------------------------------------------------------- segments


def test_rectangle_is_a_view_of_the_packed_storage():
    segments = Segments.rectangular(3, 2, 5, 4, dtype=torch.float32, device=torch.device("cpu"))
    assert segments.data.shape == (30, 4) and segments.rectangle.shape == (3, 2, 5, 4)
    assert segments.rectangle.data_ptr() == segments.data.data_ptr()
    segments.rectangle[2, 1, 3] = 7.0
    assert (segments.data[int(segments.offsets[1, 2]) + 3] == 7).all()
    assert sorted(segments.offsets.flatten().tolist()) == list(range(0, 30, 5))
    assert (segments.capacities == 5).all() and segments.nbytes() == 30 * 4 * 4
    part = segments.part(1, 2)
    assert part.rectangle.shape == (2, 2, 5, 4) and torch.equal(part.rectangle, segments.rectangle[1:])
    assert part.data.data_ptr() == segments.rectangle[1].data_ptr()
    assert int(part.offsets[1, 1]) == int(segments.offsets[1, 2]) - 10


def test_no_heads_take_no_bytes():
    segments = Segments.rectangular(0, 2, 5, 4, dtype=torch.float32, device=torch.device("cpu"))
    assert segments.nbytes() == 0 and segments.rectangle.shape[0] == 0


def test_ragged_segments_have_no_rectangle():
    segments = Segments.packed([[5], [4]], 1, 4, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="different capacities"):
        segments.rectangle  # noqa: B018


@settings(deadline=None, max_examples=60)
@given(
    sinks=st.integers(0, 5),
    recent=st.integers(1, 6),
    slack=st.integers(0, 4),
    capacity=st.integers(1, 30),
    data=st.data(),
)
def test_ring_slots_and_positions_against_a_plain_ring(sinks, recent, slack, capacity, data):
    counts = data.draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4))
    lengths = torch.tensor(counts)
    layer = make_layer((False,), lengths, sinks=sinks, recent=recent, slack=slack, capacity=capacity)
    slots = layer.near_keys.shape[2]
    expected = []
    for count in counts:
        held, turn = [-1] * slots, 0
        for position in range(count):
            if position < sinks:
                slot = position
            else:
                slot = sinks + turn
                turn = (turn + 1) % (recent + slack)
            held[slot] = position
            assert int(layer.ring_places(torch.tensor(position))) == slot
        expected.append(held)
    positions = layer.ring_positions(lengths)
    assert positions.tolist() == expected
    # Inverse of each other: each held position stands in the slot that ring_places names.
    rows, columns = (positions >= 0).nonzero(as_tuple=True)
    assert torch.equal(layer.ring_places(positions[rows, columns]), columns)


# Early skip


@LAYOUTS
@pytest.mark.parametrize("uses_scores", [True, False])
@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_skipping_equals_reference_and_its_counts(is_anchor, uses_scores, tau):
    torch.manual_seed(5)
    lengths = torch.tensor([*LENGTHS, 0])  # a row of which only padding was seen
    layer = make_layer(is_anchor, lengths)
    q, q_distant = torch.randn(2, len(lengths), HEADS, 1, DIM)
    scores = torch.randn(KV_HEADS, len(lengths), GROUPS, 1, CAPACITY)
    options = dict(positions=lengths[:, None] - 1, unused=CAPACITY - int(lengths.max()))
    if uses_scores:
        options["score_heads"] = ()
    else:
        options |= dict(q_distant=q_distant, distant_keys=anchor_keys(layer, lengths))
    results, stats = [], []
    for function in (cached_attention, reference_cached_attention):
        stats.append(SkipStats())
        workspace = scores.clone() if uses_scores else None
        results.append(
            function(q, layer, scores=workspace, tau=tau, stats=stats[-1], return_lse=True, return_gate=True, **options)
        )
    assert_equal(*results)
    assert stats[0] == stats[1]
    shared = KV_HEADS - layer.num_anchors
    distant = [max(0, seen - SINKS - RECENT) for seen in LENGTHS]
    assert stats[0].decisions == shared * GROUPS * sum(count > 0 for count in distant)
    assert stats[0].distant_values == shared * sum(distant)
    if tau == 0:
        assert stats[0].skipped == stats[0].decisions and stats[0].unread_values == stats[0].distant_values
    plain = cached_attention(
        q, layer, scores=scores.clone() if uses_scores else None, return_lse=True, return_gate=True, **options
    )
    for one, other in zip(results[0][1:], plain[1:], strict=True):  # lse and gate are those of all tokens
        assert torch.equal(one, other)
    anchors = [head for kv in layer.order[: layer.num_anchors] for head in range(kv * GROUPS, (kv + 1) * GROUPS)]
    torch.testing.assert_close(results[0][0][:, anchors], plain[0][:, anchors])
    skipped = (plain[2] >= tau)[..., 0]
    skipped[:, anchors] = False
    torch.testing.assert_close(results[0][0][~skipped], plain[0][~skipped])


def test_a_skipping_group_does_not_read_distant_values():
    torch.manual_seed(6)
    lengths = torch.tensor(LENGTHS)
    layer = make_layer((False, False, False), lengths)
    q = torch.randn(len(LENGTHS), HEADS, 1, DIM)
    scores = torch.full((KV_HEADS, len(LENGTHS), GROUPS, 1, CAPACITY), -9.0)  # hardly any mass is distant
    scores[1, 1, 0] = 30.0  # but for one query head of one row
    for row, seen in enumerate(LENGTHS):  # NaN times a weight of zero is NaN: reading shows
        for head in range(KV_HEADS):
            start = int(layer.values.offsets[row, head])
            if (row, layer.order[head]) != (1, 1):
                layer.values.data[start + SINKS : start + max(SINKS, seen - RECENT)] = torch.nan
    stats = SkipStats()
    options = dict(positions=lengths[:, None] - 1, unused=CAPACITY - int(lengths.max()), scores=scores)
    out = cached_attention(q, layer, tau=0.7, stats=stats, **options)
    assert out.isfinite().all()
    distant = [max(0, seen - SINKS - RECENT) for seen in LENGTHS]
    assert stats.decisions - stats.skipped == 1
    assert stats.distant_values - stats.unread_values == distant[1]


def test_several_queries_never_skip():
    torch.manual_seed(7)
    q, layer, options = several_queries((True, False, True))
    stats = SkipStats()
    skipping = cached_attention(q, layer, tau=0.0, stats=stats, **options)
    assert torch.equal(skipping, cached_attention(q, layer, **options)) and stats == SkipStats()
    expected = reference_cached_attention(q, layer, tau=0.0, stats=stats, **options)
    assert stats == SkipStats()
    assert_equal((skipping,), (expected,))
