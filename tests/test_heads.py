"""Head scores from files, which heads stream by them, and the grouping of the others."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pod
from pod.analyze import group
from pod.grouping import METHODS, STREAMS
from pod.heads import head_scores, streamed
from pod.recipe.loading import load_recipe
from pod.recipe.schema import RecipeError
from pod.training.run import choose_blocks

LAYERS, KV_HEADS = 5, 2
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, num_key_value_heads=KV_HEADS)
DENSE = pod.LayerBlocks.dense(LAYERS, KV_HEADS)


def some_scores(seed=0, layers=LAYERS, heads=KV_HEADS):
    return torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed))


def published(folder, scores, **config):
    """A folder as DuoAttention publishes them."""
    folder.mkdir(exist_ok=True)
    np.savetxt(folder / "full_attention_heads.tsv", scores.numpy(), delimiter="\t")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_scores_are_read_as_numpy_does(tmp_path):
    scores = some_scores() * 1.5 - 0.2
    folder = published(tmp_path / "duo", scores, sink_size=128, recent_size=256)
    for path in (folder, folder / "full_attention_heads.tsv", str(folder)):
        assert torch.equal(head_scores(path, CONFIG), scores.clamp(0, 1))


@pytest.mark.parametrize(
    "text, message",
    [
        ("1\t2\n3\t4\n", "2 lines of 2 numbers, and the model has 5 layers x 2 KV heads"),
        ("1\t2\n" * 4 + "1\n", "5 lines of 1 or 2 numbers"),
        ("1\t2\n1\tx\n", "line 2: wanted numbers with tabs between"),
        ("1\t2\nnan\t1\n", "line 2"),
        ("", "0 lines of no numbers"),
        ("\xff", r"scores.tsv: no table of head scores \('utf-8'"),
        ("1" * 200_000, r"scores.tsv: no table of head scores \(field larger"),
    ],
)
def test_other_tables_are_refused_by_line(tmp_path, text, message):
    (tmp_path / "scores.tsv").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        head_scores(tmp_path / "scores.tsv", CONFIG)


def test_no_scores_is_an_error_that_says_where_they_come_from(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"calibrate measures"):
        head_scores(tmp_path, CONFIG)


@pytest.mark.parametrize("name", ["razor", "kvzip"])
def test_a_calibration_file_is_read_by_its_own_reader(tmp_path, name):
    calibration = pytest.importorskip("pod.calibration")
    from test_model import tiny_config

    config = tiny_config()
    scores = {kind: some_scores(at) for at, kind in enumerate(("razor", "kvzip"))}
    calibration.save(tmp_path / "all.safetensors", scores, config, {})
    assert torch.equal(head_scores(f"{tmp_path}/all.safetensors:{name}", config), scores[name])
    assert torch.equal(head_scores(tmp_path / "all.safetensors", config), scores["razor"])


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.75, 0.99])
def test_as_many_heads_stream_as_fall_below_the_quantile(share):
    scores = some_scores(3)
    threshold = np.quantile(scores.double().numpy(), share)  # DuoAttention's sparsify_attention_heads
    blocks = DENSE.streaming(scores, share)
    assert torch.equal(blocks.is_streaming, torch.from_numpy(scores.double().numpy() < threshold))
    assert blocks.kv_saving == pytest.approx(int(blocks.is_streaming.sum()) / scores.numel())


def test_equal_scores_stream_by_layer_and_head():
    blocks = DENSE.streaming(torch.ones(LAYERS, KV_HEADS), 0.5)
    assert blocks.anchors.tolist() == [[-1, -1], [-1, -1], [-1, 2], [3, 3], [4, 4]]


def test_a_block_streams_whole_and_needs_what_its_neediest_layer_does():
    blocks = pod.LayerBlocks([[0, 0], [0, 1], [2, 1], [2, 1], [4, 4]])
    scores = torch.tensor([[0.1, 0.2], [0.9, 0.3], [0.2, 0.3], [0.4, 0.35], [0.5, 0.8]])
    # By need: (0, head 1) 0.2; (1, head 1) 0.35 of three layers; (2, head 0) 0.4 of two; ...
    assert blocks.streaming(scores, 0.5).anchors[:, 1].tolist() == [-1, -1, -1, -1, 4]
    assert blocks.streaming(scores, 0.5).anchors[:, 0].tolist() == [0, 0, 2, 2, 4]  # two more were seven of ten
    assert blocks.streaming(scores, 0.6).anchors[:, 0].tolist() == [0, 0, -1, -1, 4]


@pytest.mark.parametrize(
    "scores, share, message",
    [
        (torch.ones(2, 2), 0.5, r"\[layers, kv_heads\] = \[5, 2\], got \[2, 2\]"),
        (torch.full((5, 2), torch.nan), 0.5, "finite"),
        (torch.ones(5, 2), 1.0, r"in \[0, 1\), got 1; all of them are window attention"),
    ],
)
def test_scores_and_shares_that_mean_nothing_are_refused(scores, share, message):
    with pytest.raises(ValueError, match=message):
        DENSE.streaming(scores, share)
    with pytest.raises(ValueError, match="stream already"):
        DENSE.streaming(some_scores(), 0.5).streaming(some_scores(), 0.5)


def partitions(column):
    """All blocks of one head's layers, as anchors; where `column` is True the head streams."""
    for joins in itertools.product((False, True), repeat=len(column)):
        anchors = []
        for layer, (streams, joined) in enumerate(zip(column, joins, strict=True)):
            goes_on = joined and not streams and layer and anchors[-1] != STREAMS
            anchors.append(STREAMS if streams else anchors[-1] if goes_on else layer)
        yield tuple(anchors)


def similarity_of(seed):
    found = torch.rand(KV_HEADS, LAYERS, LAYERS, generator=torch.Generator().manual_seed(seed)).double()
    found = (found + found.mT) / 2
    found.diagonal(dim1=1, dim2=2).fill_(1)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", [*METHODS, "damage"])
def test_the_grouping_runs_on_the_others(method, seed):
    """Against all partitions of the layers in which heads do not stream."""
    similarity = similarity_of(seed)
    streaming = DENSE.streaming(some_scores(seed + 10), 0.3).is_streaming
    storing = int((~streaming).sum())
    columns = [set(partitions(streaming[:, head].tolist())) for head in range(KV_HEADS)]
    shares = [
        (head, anchors, [layer for layer, anchor in enumerate(anchors) if STREAMS != anchor != layer])
        for head in range(KV_HEADS)
        for anchors in columns[head]
    ]
    most = sum(max(len(layers) for at, _, layers in shares if at == head) for head in range(KV_HEADS))
    saving = (most - 1) / (2 * storing)
    options = {"kv_saving": saving, "streaming": streaming}
    if method == "damage":
        blocks = pod.LayerBlocks.for_damage(similarity, **options)
    else:
        blocks = pod.LayerBlocks.for_saving(similarity, method=method, **options)
    assert torch.equal(blocks.is_streaming, streaming)
    shared = blocks.anchors.numel() - blocks.num_blocks - int(streaming.sum())
    assert shared >= most - 1 if method == "greedy" else shared == most - 1
    with pytest.raises(ValueError, match="more than this model can give"):
        pod.LayerBlocks.for_saving(similarity, (most + 0.5) / (2 * storing), "sum", streaming)
    if method in ("greedy", "worst"):
        return

    def worth(head, anchors, layers):
        return sum(float(similarity[head, layer, anchors[layer]]) for layer in layers)

    sign = -1 if method == "damage" else 1
    best = max(
        sign * sum(worth(*part) for part in parts)
        for parts in itertools.product(*([part for part in shares if part[0] == head] for head in range(KV_HEADS)))
        if sum(len(part[2]) for part in parts) == most - 1
    )
    anchors = blocks.anchors.t().tolist()
    ours = [
        (head, column, [at for at, one in enumerate(column) if STREAMS != one != at])
        for head, column in enumerate(anchors)
    ]
    assert sign * sum(worth(*part) for part in ours) == pytest.approx(best)


def test_a_threshold_groups_the_others_too():
    streaming = torch.zeros(LAYERS, KV_HEADS, dtype=torch.bool)
    streaming[2, 0] = True
    blocks = pod.LayerBlocks.from_similarity(torch.ones(KV_HEADS, LAYERS, LAYERS), 0.5, streaming)
    assert blocks.anchors.t().tolist() == [[0, 0, -1, 3, 3], [0] * 5]
    assert blocks.sizes == [[2, 2], [5]]
    with pytest.raises(ValueError, match=r"streaming must be \[layers, kv_heads\] = \[5, 2\] truth values"):
        pod.LayerBlocks.from_similarity(torch.ones(KV_HEADS, LAYERS, LAYERS), 0.5, streaming.t())


def test_damage_of_heads_of_another_shape_is_refused():
    streaming = torch.zeros(KV_HEADS, LAYERS, dtype=torch.bool)
    for wrong in (streaming, streaming.t().float()):
        with pytest.raises(ValueError, match=r"streaming must be \[layers, kv_heads\] = \[5, 2\] truth values"):
            pod.LayerBlocks.for_damage(torch.ones(KV_HEADS, LAYERS, LAYERS), 0.1, wrong)


def test_a_file_says_which_heads_stream_and_old_code_refuses_it(tmp_path):
    blocks = pod.LayerBlocks([[0, -1], [0, 1], [-1, 1]], {"streaming": 0.3})
    blocks.save(tmp_path / "blocks.json")
    content = json.loads((tmp_path / "blocks.json").read_text())
    assert content["version"] == 2 and content["kv_saving"] == blocks.kv_saving == (2 + 2 * 2) / 12
    again = pod.LayerBlocks.load(tmp_path / "blocks.json")
    assert again == blocks and again.metadata == blocks.metadata
    DENSE.save(tmp_path / "dense.json")
    assert json.loads((tmp_path / "dense.json").read_text())["version"] == 1
    blocks.plot(tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").stat().st_size > 0


def recipe(*overrides):
    return load_recipe(["recipe=tiny", *overrides])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["blocks.streaming=0.5"], "blocks.streaming=0.5 and blocks.head_scores=null"),
        (["blocks.head_scores=x.tsv"], "blocks.streaming=0 and blocks.head_scores=x.tsv"),
        (["blocks.streaming=1", "blocks.head_scores=x.tsv"], "blocks.streaming"),
        (
            ["blocks.streaming=0.5", "blocks.head_scores=x.tsv", "model.share=window", "blocks.kv_saving=0"],
            "with model.share=window no head has keys and values of its own",
        ),
        (
            ["blocks.streaming=0.5", "blocks.head_scores=x.tsv", "model.share=kv", "blocks.size=2"],
            "with model.share=kv no head has keys and values of its own",
        ),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)


def test_a_recipe_lets_heads_stream_without_an_analysis_and_in_blocks_of_a_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pod.training.run.first_config", lambda *args: CONFIG)
    scores = some_scores(3)
    folder = published(tmp_path / "duo", scores, sink_size=128, recent_size=256)
    keys = ["blocks.streaming=0.4", f"blocks.head_scores={folder}"]

    def chosen(*more):
        return choose_blocks(recipe(*keys, *more), tmp_path, lambda recipe: pytest.fail("no analysis is needed"), False)

    assert chosen("blocks.kv_saving=0") == DENSE.streaming(scores, 0.4)
    assert "found with 128 sinks and 256 recent tokens" in capsys.readouterr().err
    uniform = pod.LayerBlocks.uniform(LAYERS, KV_HEADS, 2)
    assert chosen("blocks.size=2") == uniform.streaming(scores, 0.4)
    uniform.save(tmp_path / "blocks.json")
    assert chosen(f"blocks.file={tmp_path}/blocks.json") == uniform.streaming(scores, 0.4)


def test_the_analysis_groups_what_does_not_stream():
    streaming = DENSE.streaming(some_scores(1), 0.3).is_streaming
    blocks = group(recipe("blocks.kv_saving=0.2", "blocks.method=sum"), similarity_of(0), streaming=streaming)
    assert torch.equal(blocks.is_streaming, streaming) and blocks.kv_saving > streaming.float().mean()


def test_scores_and_blocks_of_other_models_do_not_go_together(tmp_path):
    folder = published(tmp_path / "duo", some_scores())
    with pytest.raises(ValueError, match="layers, kv_heads"):
        streamed(pod.LayerBlocks.dense(2, 2), str(folder), 0.5, CONFIG, (16, 64))
