"""Layer blocks: grouping against a literal reading of the paper's Algorithm 1, savings, files, pictures."""

import copy
import itertools
import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pod.blocks import LayerBlocks


def algorithm_1(similarity: torch.Tensor, threshold: float) -> list[list[int]]:
    """PoD's Algorithm 1 read literally for one head, similarity [L, L]: the list of blocks, each a list of layers."""
    blocks = [[0]]
    for layer in range(1, len(similarity)):
        if all(similarity[layer, member].item() >= threshold for member in blocks[-1]):
            blocks[-1].append(layer)
        else:
            blocks.append([layer])
    return blocks


def brute_force_anchors(similarity: torch.Tensor, threshold: float) -> torch.Tensor:
    """similarity [H_kv, L, L] -> anchors [L, H_kv] by Algorithm 1."""
    anchors = torch.empty(similarity.shape[1], similarity.shape[0], dtype=torch.int64)
    for head, head_similarity in enumerate(similarity):
        for block in algorithm_1(head_similarity, threshold):
            anchors[block, head] = block[0]
    return anchors


def brute_force_saving(anchors: torch.Tensor) -> float:
    num_layers, num_kv_heads = anchors.shape
    shared = sum(anchors[layer, head] != layer for layer in range(num_layers) for head in range(num_kv_heads))
    return int(shared) / (2 * num_layers * num_kv_heads)


@st.composite
def similarities(draw: st.DrawFn) -> torch.Tensor:
    """A random symmetric [H_kv, L, L] with ones on the diagonal; a coarse grid of values makes ties common."""
    num_kv_heads = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    levels = draw(st.sampled_from([2, 5, 10**6]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    values = torch.rand(num_kv_heads, num_layers, num_layers, generator=torch.Generator().manual_seed(seed))
    values = ((values * levels).round() / levels).to(dtype).tril(-1)
    return values + values.mT + torch.eye(num_layers, dtype=dtype)


def near_diagonal(num_layers: int = 10, num_kv_heads: int = 2) -> torch.Tensor:
    """Similarities that fall with the distance of two layers, as those of real models do."""
    layers = torch.arange(num_layers)
    distance = (layers[:, None] - layers).abs()
    return torch.stack([(-distance / (4.0 + head)).exp() for head in range(num_kv_heads)])


@given(similarities(), st.floats(0, 1))
@settings(deadline=None, max_examples=200)
def test_greedy_is_algorithm_1(similarity, threshold):
    blocks = LayerBlocks.from_similarity(similarity, threshold)
    assert torch.equal(blocks.anchors, brute_force_anchors(similarity, threshold))
    assert blocks.kv_saving == brute_force_saving(blocks.anchors)
    assert blocks.sizes == [[len(block) for block in algorithm_1(head, threshold)] for head in similarity]
    assert blocks.num_blocks == sum(len(sizes) for sizes in blocks.sizes)
    assert blocks.metadata["threshold"] == threshold


@given(similarities(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_similarity_equal_to_the_threshold_joins(similarity, data):
    threshold = data.draw(st.sampled_from(similarity.flatten().tolist()))
    blocks = LayerBlocks.from_similarity(similarity, threshold)
    assert torch.equal(blocks.anchors, brute_force_anchors(similarity, threshold))


@given(similarities(), st.floats(0, 0.5))
@settings(deadline=None, max_examples=200)
def test_for_saving_takes_the_largest_threshold(similarity, wanted):
    num_layers = similarity.shape[1]
    if wanted > (num_layers - 1) / (2 * num_layers):
        with pytest.raises(ValueError, match=f"maximum is {(num_layers - 1) / (2 * num_layers):.4f}"):
            LayerBlocks.for_saving(similarity, wanted)
        return
    blocks = LayerBlocks.for_saving(similarity, wanted)
    if wanted == 0:
        assert blocks.is_dense
        return
    # All thresholds: the values, and points between and around them, where nothing else may happen.
    values = similarity.unique().double()
    between = (values[1:] + values[:-1]) / 2
    thresholds = torch.cat([values, between, torch.tensor([0.0, 1.0], dtype=torch.float64)]).tolist()
    enough = [
        (threshold, anchors)
        for threshold in thresholds
        if brute_force_saving(anchors := brute_force_anchors(similarity, threshold)) >= wanted
    ]
    largest, anchors = max(enough, key=lambda pair: pair[0])
    assert torch.equal(blocks.anchors, anchors)
    assert blocks.metadata["threshold"] == largest
    assert blocks.kv_saving >= wanted
    assert LayerBlocks.from_similarity(similarity, blocks.metadata["threshold"]) == blocks


@given(similarities(), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=100)
def test_a_lower_threshold_never_saves_less(similarity, one, other):
    low, high = sorted((one, other))
    saving = LayerBlocks.from_similarity(similarity, low).kv_saving
    assert saving >= LayerBlocks.from_similarity(similarity, high).kv_saving


def test_for_saving_at_its_default_and_limits():
    similarity = near_diagonal()
    assert LayerBlocks.for_saving(similarity) == LayerBlocks.for_saving(similarity, 0.35)
    assert LayerBlocks.for_saving(similarity).kv_saving >= 0.35
    assert LayerBlocks.for_saving(similarity, 0) == LayerBlocks.dense(10, 2)
    assert LayerBlocks.for_saving(similarity, 0.45).sizes == [[10], [10]]
    with pytest.raises(ValueError, match=r"kv_saving=0.46 .* 10 layers the maximum is 0.4500"):
        LayerBlocks.for_saving(similarity, 0.46)
    for bad in (-0.1, 0.51, float("nan")):
        with pytest.raises(ValueError, match=r"kv_saving must be in \[0, 0.5\]"):
            LayerBlocks.for_saving(similarity, bad)


def test_for_saving_is_quick_for_a_large_model():
    torch.manual_seed(0)
    values = torch.rand(8, 80, 80).tril(-1)
    blocks = LayerBlocks.for_saving(values + values.mT + torch.eye(80), 0.35)
    assert 0.35 <= blocks.kv_saving < 0.4


def partitions(num_layers: int) -> list[list[int]]:
    """The anchors of every partition of layers into consecutive blocks."""
    found = []
    for cuts in itertools.product([False, True], repeat=num_layers - 1):
        anchors = [0]
        for layer, cut in enumerate(cuts, start=1):
            anchors.append(layer if cut else anchors[-1])
        found.append(anchors)
    return found


def to_anchors(similarity: torch.Tensor, partition: tuple[list[int], ...]) -> list[float]:
    """The similarity of every layer that shares to its anchor, the higher layer's entry, over all heads."""
    shares = [(g, layer, a) for g, row in enumerate(partition) for layer, a in enumerate(row) if a != layer]
    return [float(similarity[g, layer, a]) for g, layer, a in shares]


@given(similarities(), st.floats(0.01, 0.5), st.sampled_from(["sum", "worst"]))
@settings(deadline=None, max_examples=150)
def test_the_best_partition_is_that_of_all(similarity, wanted, method):
    similarity = similarity[:2, :6, :6]
    num_kv_heads, num_layers, _ = similarity.shape
    if wanted > (num_layers - 1) / (2 * num_layers):
        with pytest.raises(ValueError, match="more than this model can give"):
            LayerBlocks.for_saving(similarity, wanted, method)
        return
    blocks = LayerBlocks.for_saving(similarity, wanted, method)
    shared = math.ceil(wanted * 2 * num_layers * num_kv_heads - 1e-12)
    assert brute_force_saving(blocks.anchors) * 2 * num_layers * num_kv_heads == pytest.approx(shared)
    best = (-1.0, -1.0)
    for partition in itertools.product(partitions(num_layers), repeat=num_kv_heads):
        values = to_anchors(similarity, partition)
        if len(values) == shared:
            best = max(best, (0.0 if method == "sum" else min(values), sum(values)))
    values = to_anchors(similarity, tuple(blocks.anchors.T.tolist()))
    assert sum(values) == pytest.approx(best[1], abs=1e-9)
    assert method == "sum" or min(values) == best[0]
    assert blocks.metadata == {"method": method}


def test_the_best_partition_is_quick_for_a_large_model_and_beats_greedy():
    similarity = near_diagonal(40, 4)
    similarity = similarity * (0.9 + 0.1 * torch.rand(similarity.shape, generator=torch.Generator().manual_seed(0)))
    similarity = similarity.tril(-1) + similarity.tril(-1).mT + torch.eye(40)
    greedy = LayerBlocks.for_saving(similarity, 0.35)
    found = {}
    for method in ("sum", "worst"):
        blocks = LayerBlocks.for_saving(similarity, greedy.kv_saving, method)
        assert blocks.kv_saving == greedy.kv_saving
        found[method] = to_anchors(similarity, tuple(blocks.anchors.T.tolist()))
    plain = to_anchors(similarity, tuple(greedy.anchors.T.tolist()))
    assert sum(found["sum"]) > sum(found["worst"]) and sum(found["sum"]) > sum(plain)
    assert min(found["worst"]) > min(found["sum"]) and min(found["worst"]) >= min(plain)


def test_an_unknown_method_and_no_saving():
    with pytest.raises(ValueError, match="method must be one of greedy, sum, worst, got 'best'"):
        LayerBlocks.for_saving(near_diagonal(), 0.3, "best")
    assert LayerBlocks.for_saving(near_diagonal(), 0, "sum").is_dense


def test_saving_counts_shared_keys():
    anchors = [[0]] * 8 + [[8], [9]]  # 7 of 10 keys shared
    assert LayerBlocks(anchors).kv_saving == 0.35
    assert LayerBlocks.dense(4, 2).kv_saving == 0
    assert LayerBlocks([[0, 0], [0, 1], [2, 1]]).sizes == [[2, 1], [1, 2]]
    assert LayerBlocks([[0, 0], [0, 1], [2, 1]]).is_anchor.tolist() == [[True, True], [False, True], [True, False]]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_threshold_outside_its_range(threshold):
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\]"):
        LayerBlocks.from_similarity(near_diagonal(), threshold)


def _with(similarity: torch.Tensor, index: tuple[int, int, int], value: float) -> torch.Tensor:
    head, row, column = index
    similarity[head, row, column] = similarity[head, column, row] = value
    return similarity


@pytest.mark.parametrize("make", [LayerBlocks.from_similarity, LayerBlocks.for_saving])
def test_similarity_is_validated(make):
    for shape in [(4, 4), (2, 4, 3), (0, 4, 4), (2, 0, 0)]:
        with pytest.raises(ValueError, match=r"\[kv_heads, layers, layers\], got \["):
            make(torch.ones(shape))
    with pytest.raises(ValueError, match="finite, got nan for KV head 1, layers 2 and 3"):
        make(_with(near_diagonal(), (1, 2, 3), float("nan")))
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.01 for KV head 0, layers 4 and 5"):
        make(_with(near_diagonal(), (0, 4, 5), 1.01))
    with pytest.raises(ValueError, match=r"\[0, 1\], got -0.5 for KV head 0, layers 4 and 5"):
        make(_with(near_diagonal(), (0, 4, 5), -0.5))
    lopsided = near_diagonal()
    lopsided[1, 6, 2] = 0.75
    with pytest.raises(ValueError, match="symmetric, got .* KV head 1, layers 2 and 6, but 0.75"):
        make(lopsided)
    # Rounding is no error.
    noisy = near_diagonal() + 5e-5
    assert make(noisy).num_layers == 10


@pytest.mark.parametrize(
    "anchors, message",
    [
        ([[0, 0], [0, 2]], "layer 1, KV head 1: anchor 2 is above its layer"),
        ([[1, 0], [1, 0]], "layer 0, KV head 0: anchor 1 is above its layer"),
        ([[0], [1], [0]], "layer 2, KV head 0: anchor 0 leaves a gap"),
        ([[0], [0], [1]], "layer 2, KV head 0: anchor 1 leaves a gap"),
        ([[0], [-2]], "layer 1, KV head 0: negative anchor -2"),
        ([[0], [0.0]], "layer 1, KV head 0: the anchor must be an integer, got 0.0"),
        ([[0], [True]], "layer 1, KV head 0: the anchor must be an integer, got True"),
        ([[0], ["0"]], "layer 1, KV head 0: the anchor must be an integer, got '0'"),
        ([[0], [None]], "layer 1, KV head 0: the anchor must be an integer, got None"),
        ([[0, 0], [0]], "layer 1 has 1 KV heads, layer 0 has 2"),
        ([0, 0], "layer 0 must be a list, got 0"),
        (["00", "00"], "layer 0 must be a list, got '00'"),
        ({"0": [0]}, "anchors must be a list"),
        (3, "anchors must be a list, got 3"),
        ([], "empty table"),
        ([[], []], "empty table"),
    ],
)
def test_bad_anchors_are_refused_by_name(anchors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LayerBlocks(anchors)
    # The same in a file, which the message names too.
    path = tmp_path / "blocks.json"
    LayerBlocks.dense(2, 2).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"anchors": anchors}))
    with pytest.raises(ValueError, match=message) as raised:
        LayerBlocks.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "anchors, message",
    [
        (torch.zeros(3, 2), "integers, got a tensor of torch.float32"),
        (torch.zeros(3, 2, dtype=torch.bool), "integers, got a tensor of torch.bool"),
        (torch.zeros(3, dtype=torch.int64), r"\[layers, kv_heads\], got a tensor of shape \[3\]"),
        (torch.zeros(0, 2, dtype=torch.int64), r"shape \[0, 2\]"),
    ],
)
def test_bad_anchor_tensors_are_refused_by_name(anchors, message):
    with pytest.raises(ValueError, match=message):
        LayerBlocks(anchors)


def _file_with(**changes):
    """The text of a good blocks file of 3 layers and 2 KV heads with some fields changed; None takes a field away."""
    good = {"format": "pod-layer-blocks", "version": 1, "num_layers": 3, "num_kv_heads": 2}
    content = good | {"anchors": [[0, 0], [0, 1], [0, 1]]} | changes
    return json.dumps({name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize(
    "text, message",
    [
        ("{not json", "not JSON"),
        ("", "not JSON"),
        ("[[0, 0]]", "JSON object, this is a list"),
        (_file_with(anchors=None), "field 'anchors' is missing"),
        (_file_with(format=None), "field 'format' is missing"),
        (_file_with(version=None), "field 'version' is missing"),
        (_file_with(num_layers=None), "field 'num_layers' is missing"),
        (_file_with(num_kv_heads=None), "field 'num_kv_heads' is missing"),
        (_file_with(format="other"), "format is 'other', expected 'pod-layer-blocks'"),
        (_file_with(version=3), "version is 3, this library reads versions 1 and 2"),
        (_file_with(metadata=3), "metadata must be a JSON object, got 3"),
        (_file_with(num_layers=4), "3 layers x 2 KV heads, but the file says num_layers=4, num_kv_heads=2"),
        (_file_with(num_kv_heads=1), "3 layers x 2 KV heads, but the file says num_layers=3, num_kv_heads=1"),
    ],
)
def test_bad_files_are_refused_by_name(text, message, tmp_path):
    path = tmp_path / "blocks.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        LayerBlocks.load(path)
    assert str(path) in str(raised.value)


def test_files_that_are_no_text_or_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json: no such blocks file"):
        LayerBlocks.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary.json: not JSON"):
        LayerBlocks.load(tmp_path / "binary.json")


@given(similarity=similarities(), threshold=st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_save_and_load(similarity, threshold, tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "runs" / "blocks.json"
    blocks = LayerBlocks.from_similarity(similarity, threshold)
    blocks.save(path)
    loaded = LayerBlocks.load(str(path))
    assert loaded == blocks
    assert loaded.metadata == blocks.metadata
    assert [entry.name for entry in path.parent.iterdir()] == ["blocks.json"], "nothing is left aside"
    assert len(path.read_text().splitlines()) == 11 + blocks.num_layers, "one line per layer"


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "blocks.json"
    LayerBlocks.dense(3, 2).save(path)
    with pytest.raises(TypeError):
        LayerBlocks([[0], [0]], {"model": object()}).save(path)
    assert LayerBlocks.load(path) == LayerBlocks.dense(3, 2)


def test_check_names_both_shapes():
    blocks = LayerBlocks.dense(3, 2)
    blocks.check(3, 2)
    for shape in [(4, 2), (3, 1), (2, 3)]:
        with pytest.raises(ValueError, match=f"3 layers x 2 KV heads, the model has {shape[0]} layers x {shape[1]}"):
            blocks.check(*shape)


def test_dense_wants_layers_and_heads():
    for shape in [(0, 2), (3, 0), (-1, 2)]:
        with pytest.raises(ValueError, match="at least 1"):
            LayerBlocks.dense(*shape)


@pytest.mark.parametrize(
    "layers, size, sizes", [(4, 2, [2, 2]), (5, 2, [2, 2, 1]), (5, 3, [3, 2]), (3, 1, [1] * 3), (2, 2, [2])]
)
def test_uniform(layers, size, sizes):
    blocks = LayerBlocks.uniform(layers, 3, size)
    assert blocks.sizes == [sizes] * 3 and blocks.metadata == {"size": size}
    assert blocks.is_dense == (size == 1)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"at least 1 and at most all of the 4 layers, got size {wrong}"):
            LayerBlocks.uniform(4, 2, wrong)


def test_equality_copies_and_repr():
    blocks = LayerBlocks([[0, 0], [0, 1], [2, 1]], {"threshold": 0.5})
    same = LayerBlocks(torch.tensor([[0, 0], [0, 1], [2, 1]], dtype=torch.int32))
    assert blocks == same and hash(blocks) == hash(same)
    assert blocks.anchors.dtype == torch.int64
    assert blocks != LayerBlocks.dense(3, 2)
    assert blocks != LayerBlocks.dense(3, 1)
    assert blocks != "blocks"
    assert copy.deepcopy(blocks) == blocks and pickle.loads(pickle.dumps(blocks)) == blocks
    assert repr(blocks) == "LayerBlocks(layers=3, kv_heads=2, blocks=4, kv_saving=0.167)"
    with pytest.raises(AttributeError):
        blocks.anchors = same.anchors


def test_anchors_are_a_copy():
    anchors = torch.tensor([[0], [0]])
    blocks = LayerBlocks(anchors)
    anchors[1] = 1
    assert blocks.anchors.tolist() == [[0], [0]]


def test_made_on_the_cpu_inside_a_device_context(tmp_path):
    # from_pretrained builds models, and so their blocks, with "meta" as the default device.
    with torch.device("meta"):
        blocks = LayerBlocks([[0], [0], [2]])
        assert (blocks.num_blocks, blocks.sizes, blocks.is_dense) == (2, [[2, 1]], False)
        assert LayerBlocks.dense(3, 1).is_dense
        blocks.plot(tmp_path / "inside.png")
    assert LayerBlocks(blocks.anchors) == blocks
    blocks.plot(tmp_path / "outside.png")
    assert (tmp_path / "inside.png").read_bytes() == (tmp_path / "outside.png").read_bytes()


@pytest.mark.parametrize(
    "blocks",
    [
        LayerBlocks.dense(1, 1),
        LayerBlocks.dense(14, 2),
        LayerBlocks.for_saving(near_diagonal(32, 8), 0.35),
        LayerBlocks.for_saving(near_diagonal(80, 32), 0.45),
    ],
    ids=repr,
)
def test_plot_writes_a_png(blocks, tmp_path):
    path = tmp_path / "runs" / "blocks.png"
    blocks.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 2000


# Blocks by damage


def cost_of(costs, anchors):
    """Summed cost of anchors [L][H_kv]."""
    return sum(
        costs[head, anchor, layer].item()
        for layer, row in enumerate(anchors)
        for head, anchor in enumerate(row)
        if anchor != layer
    )


@given(st.integers(1, 2), st.integers(1, 6), st.integers(0, 2**31), st.floats(0, 0.5), st.floats(0, 0.6))
@settings(deadline=None, max_examples=100)
def test_for_damage_is_the_cheapest_of_all_partitions(num_kv_heads, num_layers, seed, wanted, forbidden):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_kv_heads, num_layers, num_layers)
    costs = torch.rand(shape, generator=generator, dtype=torch.float64)
    costs[torch.rand(shape, generator=generator) < forbidden] = math.inf
    by_count = {}  # shared layers -> the least cost
    for ways in itertools.product(list(partitions(num_layers)), repeat=num_kv_heads):
        anchors = list(zip(*ways, strict=True))
        count = sum(anchor != layer for layer, row in enumerate(anchors) for anchor in row)
        by_count[count] = min(by_count.get(count, math.inf), cost_of(costs, anchors))
    pairs = 2 * num_layers * num_kv_heads
    possible = [count for count, cost in by_count.items() if cost < math.inf]
    enough = [count for count in sorted(by_count) if count / pairs >= wanted]
    if not enough or enough[0] not in possible:
        with pytest.raises(ValueError, match="the maximum is "):
            LayerBlocks.for_damage(costs, wanted)
        return
    blocks = LayerBlocks.for_damage(costs, wanted)
    assert blocks.kv_saving >= wanted and round(blocks.kv_saving * pairs) == enough[0]
    assert cost_of(costs, blocks.anchors.tolist()) == pytest.approx(by_count[enough[0]])


def test_for_damage_reads_the_upper_triangle_alone():
    costs = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0))
    changed = costs.triu(1) + torch.full((6, 6), math.nan).tril()
    blocks = LayerBlocks.for_damage(costs, 0.3)
    assert LayerBlocks.for_damage(changed, 0.3) == blocks and blocks.metadata == {"method": "damage"}
    assert LayerBlocks.for_damage(costs, 0).is_dense


def test_for_damage_refuses():
    costs = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"\[kv_heads, layers, layers\], got \[6, 6\]"):
        LayerBlocks.for_damage(costs[0])
    with pytest.raises(ValueError, match=r"kv_saving must be in \[0, 0.5\], got 0.6"):
        LayerBlocks.for_damage(costs, 0.6)
    with pytest.raises(ValueError, match="with 6 layers the maximum is 0.4167"):
        LayerBlocks.for_damage(costs, 0.45)
    for wrong in (-1.0, math.nan):
        costs[1, 2, 4] = wrong
        with pytest.raises(ValueError, match=f"got {wrong:g} for KV head 1, layer 4 with the scores of layer 2"):
            LayerBlocks.for_damage(costs)
    costs[:] = math.inf
    costs[:, 0, 1] = 0.5
    assert LayerBlocks.for_damage(costs, 0.05).kv_saving == 1 / 12
    with pytest.raises(ValueError, match="than these costs can give: where none is inf, the maximum is 0.0833"):
        LayerBlocks.for_damage(costs, 0.1)
