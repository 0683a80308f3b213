"""Attention to packed slots: the batched form against the plain loops, ragged segments, slots in any order."""

import pytest
import torch
from torch import Tensor

from pod_kernels import LayerSlots, Segments, attention_weights, cached_attention
from pod_kernels.cached import reference_cached_attention

DIM, GROUPS, SINKS, RECENT = 8, 2, 2, 5
BATCH = 3
LAST = (23, 1, 11)  # the newest position of each row
SIZES = {"even": [[9, 9, 9]] * 3, "heads": [[9, 9, 9], [9, 9, 9], [6, 6, 6]], "rows": [[9, 3, 7], [8, 8, 8], [5, 3, 9]]}


def packed(sizes: list[list[int]], dim: int = DIM) -> Segments:
    segments = Segments.packed(sizes, BATCH, dim, dtype=torch.float32, device=torch.device("cpu"))
    segments.data.copy_(torch.randn(segments.data.shape))
    return segments


def make(sizes: list[list[int]], anchors: int) -> tuple[LayerSlots, Segments]:
    """A layer with random content, and its table of positions: each row's newest ones, some earlier ones, and holes."""
    table = Segments.packed(sizes, BATCH, 1, dtype=torch.int32, device=torch.device("cpu"), fill=-1)
    others, places = len(sizes) - anchors, 1 + max(max(head) for head in sizes)
    near_positions = torch.full((others, BATCH, places), -1, dtype=torch.int32)
    near_slots = torch.zeros(others, BATCH, places, dtype=torch.int32)
    for head, rows in enumerate(sizes):
        for row, size in enumerate(rows):
            known = torch.randperm(LAST[row])[: max(0, size - 2)].tolist()
            held = torch.tensor([LAST[row], *known] + [-1] * (size - 1 - len(known)))[:size]
            held = held[torch.randperm(size)]
            table.run(head, row).copy_(held[:, None])
            if head >= anchors:
                for place, slot in enumerate(torch.randperm(size).tolist()):
                    near_positions[head - anchors, row, place] = held[slot]
                    near_slots[head - anchors, row, place] = slot
    layer = LayerSlots(
        order=(2, 0, 1),
        num_anchors=anchors,
        values=packed(sizes),
        keys=packed(sizes[:anchors]),
        near_keys=torch.randn(others, BATCH, places, DIM),
        near_positions=near_positions,
        near_slots=near_slots,
        sink_size=SINKS,
        recent_size=RECENT,
    )
    return layer, table


def queries(count: int) -> tuple[Tensor, Tensor]:
    positions = torch.tensor(LAST)[:, None] + 1 - count + torch.arange(count)
    return torch.randn(BATCH, 3 * GROUPS, count, DIM), positions.clamp(min=-1)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("anchors", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_reference(name, anchors, count):
    torch.manual_seed(0)
    layer, table = make(SIZES[name], anchors)
    q, positions = queries(count)
    distant = packed(SIZES[name])
    options = dict(
        positions=positions,
        table=tuple((table, head) for head in range(3)),
        q_distant=torch.randn(q.shape),
        distant_keys=tuple((distant, head) for head in range(anchors, 3)),
        scale=0.4,
    )
    out, weights = cached_attention(q, layer, **options, return_weights=True)
    torch.testing.assert_close(out, reference_cached_attention(q, layer, **options), atol=1e-5, rtol=1e-5)
    assert weights.shape[:4] == (anchors, BATCH, GROUPS, count)
    assert (out[1, :, 0] == 0).all() == (count == 4)  # the second row has two tokens: the first queries are padding
    if anchors:
        held = table.padded(-1)[:anchors, ..., 0]
        own = q.view(BATCH, 3, GROUPS, count, DIM).transpose(0, 1)[list(layer.order[:anchors])]
        keys = layer.keys.padded(0)
        width = keys.shape[2]
        again = attention_weights(own, keys, held[..., :width], positions, 0.4)
        real = (positions >= 0)[None, :, None, :, None]
        torch.testing.assert_close(weights * real, again * real)


@pytest.mark.parametrize("name", SIZES)
def test_scores_left_by_an_anchor_equal_those_computed_again(name):
    torch.manual_seed(1)
    anchor, table = make(SIZES[name], 3)
    layer, _ = make(SIZES[name], 0)
    layer.near_positions.fill_(-1)
    q, positions = queries(1)
    q_own = torch.randn(q.shape)
    common = dict(positions=positions, table=tuple((table, head) for head in range(3)), scale=0.4)
    left = torch.full((3, BATCH, GROUPS, 1, 11), torch.nan)
    cached_attention(q, anchor, **common, scores=left, score_heads=(0, 1, 2))
    read = cached_attention(q_own, layer, **common, scores=left)
    keys = tuple((anchor.keys, head) for head in range(3))
    assert torch.allclose(read, cached_attention(q_own, layer, **common, q_distant=q, distant_keys=keys), atol=1e-6)


def test_packed_segments():
    segments = packed([[4, 4, 4], [4, 4, 4], [2, 3, 0], [5, 5, 5]], dim=1)
    assert [tuple(piece) for piece in segments.pieces] == [
        (0, 2, 0, 3, 4),
        (2, 1, 0, 1, 2),
        (2, 1, 1, 1, 3),
        (2, 1, 2, 1, 0),
        (3, 1, 0, 3, 5),
    ]
    assert segments.nbytes() == 4 * (24 + 5 + 15)
    padded = segments.padded(-7.0)
    assert padded.shape == (4, 3, 5, 1)
    assert torch.equal(padded[2, 1, :3], segments.run(2, 1)) and (padded[2, 1, 3:] == -7).all()
    assert torch.equal(segments.view(segments.pieces[0])[1], padded[1, :, :4])
    with pytest.raises(ValueError, match="different capacities"):
        _ = segments.rectangle


@pytest.mark.parametrize("sizes", [((3, 1, 2), (5, 4, 4)), ((2, 2, 2), (2, 2, 2)), ()], ids=["ragged", "even", "none"])
def test_wider_segments_hold_the_same_in_the_same_slots(sizes):
    old = Segments.packed(sizes, 3, 2, dtype=torch.float32, device="cpu")
    old.data.copy_(torch.arange(old.data.numel()).view_as(old.data))
    wider = tuple(tuple(size + head + row for row, size in enumerate(rows)) for head, rows in enumerate(sizes))
    new = old.resized(wider, fill=-1)
    assert tuple(map(tuple, new.sizes)) == wider and len(new.data) == sum(map(sum, wider))
    for head, rows in enumerate(sizes):
        for row, size in enumerate(rows):
            assert torch.equal(new.run(head, row)[:size], old.run(head, row))
            assert (new.run(head, row)[size:] == -1).all()
