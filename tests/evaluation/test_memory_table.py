"""PoD's Table 2: the arithmetic against bytes measured on a CPU, and what the script writes."""

import argparse
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod import eviction
from pod.evaluation import command, memory
from pod.model.shape import KNOWN_CONFIGS, Shape

CONFIG = {
    "model_type": "llama", "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SINKS, RECENT = 2, 14


def model_of(blocks, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).to(dtype).eval()
    return pod.convert(dense, blocks, SINKS, RECENT)


def row_of(model, prompt, output, **options):
    return memory.Inference(
        Shape.from_config(model.config.to_dict()), model.config.blocks, prompt, output, SINKS, RECENT,
        itemsize=model.dtype.itemsize, fused=False, **options,
    )  # fmt: skip


def test_tensor_bytes_counts_what_lives():
    outside = torch.ones(1000)
    with memory.TensorBytes() as mode:
        first = torch.ones(100)  # 400
        view = first[10:]
        second = outside + 1  # 4400
        outside.add_(1)
        assert mode.live == mode.peak == 4400, "a view and what came from outside are not counted"
        del first
        assert mode.live == 4400, "the view keeps its storage"
        del view, second
        assert mode.live == 0
        third = torch.zeros(10, dtype=torch.bfloat16)
    assert (mode.live, mode.peak) == (20, 4400) and len(third) == 10


@pytest.mark.parametrize(
    ("layers", "heads", "saving"), [(32, 8, 0.35), (6, 2, 0.35), (5, 3, 0.0), (7, 1, 3 / 7), (4, 2, 0.13)]
)
def test_even_blocks_save_what_is_asked(layers, heads, saving):
    blocks = memory.even_blocks(layers, heads, saving)
    assert blocks.anchors.shape == (layers, heads)
    assert abs(blocks.kv_saving - saving) <= 0.25 / (layers * heads) + 1e-9
    assert blocks.is_dense == (saving == 0)


def test_even_blocks_refuse_what_cannot_be():
    with pytest.raises(ValueError, match=r"between 0 and 0\.375"):
        memory.even_blocks(4, 2, 0.45)


@pytest.mark.parametrize("share", ["kv", "window"])
def test_what_the_arithmetic_does_not_know_is_refused(tmp_path, capsys, share):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "pod_llama", "share": share}))
    assert memory.main(["--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"share='{share}', whose cache and activations this arithmetic does not count" in capsys.readouterr().err


METHODS = [
    None,
    eviction.SnapKV(budget=24, window=4),
    eviction.CAKE(budget=24, window=4),
    eviction.H2O(budget=24),
    eviction.TOVA(budget=24),
    eviction.StreamingLLM(budget=24, stride=16),
    eviction.LMInfinite(budget=24, stride=16),
    eviction.Cascade(budget=26, sinks=2, stride=16),
    eviction.SnapKV(budget=0.5, window=4),
    eviction.Cascade(budget=0.5, sinks=2),
    eviction.Quest(budget=16, page_size=4),
]


@pytest.mark.parametrize("saving", [0, 0.35])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_bytes_of_the_cache(method, saving):
    model = model_of(memory.even_blocks(4, 2, saving))
    row = row_of(model, 40, 5, eviction=method)
    found = memory.generate(model, 3, 40, 5, eviction=method).nbytes()
    if method is None:
        assert 3 * row.cache == found
    elif saving and isinstance(method, eviction.Eviction):
        # How many of the kept tokens are recent depends on the text: the arithmetic takes the most.
        assert found <= 3 * row.cache * 1.01 and found > 0.7 * 3 * row.cache
    else:
        assert 3 * row.cache == pytest.approx(found, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("saving", [0, 0.35])
def test_a_prompt_that_cake_leaves_whole_is_counted_whole(saving, tmp_path):
    model, method = model_of(memory.even_blocks(4, 2, saving)), eviction.CAKE(budget=24, window=4)
    for prompt, is_whole in ((24, False), (25, True), (28, True), (29, False)):
        row = row_of(model, prompt, 5, eviction=method)
        assert row.stays_whole == is_whole
        found = memory.generate(model, 3, prompt, 5, eviction=method).nbytes()
        assert 0.8 * 3 * row.cache < found <= 3 * row.cache * 1.01
    assert not row_of(model, 25, 5, eviction=eviction.SnapKV(budget=24, window=4)).stays_whole
    arguments = ["--model", "llama3-8b", "--lengths", "8192,16384", "--out", str(tmp_path), "--eviction"]
    for text, is_said in (("cake:budget=8180", True), ("cake:budget=0.999", True), ("cake:budget=4096", False)):
        assert memory.main([*arguments, text]) == 0
        assert ("CAKE keeps a prompt of up to budget" in (tmp_path / "memory.md").read_text()) == is_said


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saving", [0, 0.35])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_peak_is_within_a_tenth_of_what_is_measured(method, saving, dtype):
    model = model_of(memory.even_blocks(4, 2, saving), dtype)
    row = row_of(model, 64, 3, eviction=method)
    assert row.total(8) == pytest.approx(memory.measured_bytes(model, 8, 64, 3, eviction=method), rel=0.1)


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 16}, {"vocab_size": 1500}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("saving", [0, 0.35])
def test_peak_whichever_moment_is_the_largest(saving, whole, changes):
    model = model_of(memory.even_blocks(4, changes.get("num_key_value_heads", 2), saving), torch.bfloat16, **changes)
    row = row_of(model, 64, 3, whole_logits=whole)
    measured = memory.measured_bytes(model, 8, 64, 3, whole_logits=whole)
    assert row.total(8) == pytest.approx(measured, rel=0.1)
    if whole and "vocab_size" in changes:
        assert row.by_kind(8)["prefill logits"] == 8 * 64 * 1500 * 6 > 0.5 * measured


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("saving", [0, 0.35])
def test_largest_batch_agrees_with_a_search(saving, whole):
    """The acceptance: arithmetic and a measured search on a CPU within a tenth of each other."""
    model = model_of(memory.even_blocks(4, 2, saving), torch.bfloat16, vocab_size=400)
    for prompt, limit in ((24, 9e5),):
        row = row_of(model, prompt, 2, whole_logits=whole)
        found = memory.measured_batch(model, limit, prompt, 2, whole_logits=whole)
        assert found >= 10 and row.largest_batch(limit) == pytest.approx(found, rel=0.1)
    assert memory.measured_batch(model, row.weights, 24, 2) == row.largest_batch(row.weights) == 0


def test_whole_logits_alone_make_the_batch_halve_with_the_prompt():
    shape = Shape.from_config(KNOWN_CONFIGS["meta-llama/Meta-Llama-3-8B"])
    dense = pod.LayerBlocks.dense(32, 8)
    cells = [
        [memory.Inference(shape, dense, x, 8192, whole_logits=whole).largest_batch(76 * 2**30) for x in (2048, 16384)]
        for whole in (False, True)
    ]
    (lean_short, lean_long), (short, long) = cells
    assert lean_short / lean_long < 4 < short / long
    # By hand: (76 GiB - 16.06e9) / ((2048 + 8191) * 131072 + 2048 * 128256 * 6 + 2048 * 4096 * 2)
    assert short == int((76 * 2**30 - 2 * 8030261248) / (10239 * 131072 + 2048 * 128256 * 6 + 2048 * 4096 * 2)) == 22


def test_script(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(folder), "--memory", "400KB", "--lengths", "16", "--output", "1", "--sinks", "2"]
    arguments += ["--recent", "6", "--eviction", "snapkv:budget=12,window=4", "--dtype", "float32", "--measure"]
    assert memory.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert list(result["rows"]) == [
        "dense, last logits only", "PoD, last logits only", "PoD + snapkv:budget=12,window=4, last logits only",
        "dense, all logits", "PoD, all logits",
    ]  # fmt: skip
    assert result["reserved"] == 0 and result["device"] == "CPU" and "published" not in result
    assert result["parameters"]["snapkv:budget=12,window=4"]["kernel_size"] == 7
    for row in result["rows"].values():
        for cell in row["cells"]:
            assert cell["batch"] == pytest.approx(cell["measured"], rel=0.15) and cell["batch"] > 5
    text = (tmp_path / "out" / "memory.md").read_text()
    assert "| PoD + snapkv:budget=12,window=4, last logits only " in text and "in brackets measured" in text
    assert text.splitlines()[0] in capsys.readouterr().out
    assert (tmp_path / "out" / "memory.png").stat().st_size > 5000


def test_script_for_the_papers_model(tmp_path, capsys):
    assert memory.main(["--model", "llama3-8b", "--memory", "80GB", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "memory.json").read_text())
    assert result["published"]["2048"] == [25, 33] and result["reserved"] == 4 * 2**30
    batches = {name: [cell["batch"] for cell in row["cells"]] for name, row in result["rows"].items()}
    assert batches["dense, all logits"] == [22, 13, 7, 4]
    shared, dense = (batches[f"{name}, last logits only"] for name in ("PoD", "dense"))
    assert all(a > b for a, b in zip(shared, dense, strict=True))
    for row in result["rows"].values():
        for cell in row["cells"]:
            assert sum(cell["bytes"].values()) <= 76 * 2**30
    assert "dense, the paper's Table 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama9"], "llama3-8b"),
        (["--model", "llama3-8b", "--memory", "80XB"], "80XB"),
        (["--model", "llama3-8b", "--lengths", "0"], "at least 1"),
        (["--model", "llama3-8b", "--kv-saving", "0.6"], "0.484"),
        (["--model", "llama3-8b", "--eviction", "snapkv:budget=40"], "budget (40 tokens) is below the 48 that are"),
        (["--model", "llama3-8b", "--eviction", "streamingllm:budget=10"], "larger than the model's sink_size of 16"),
        (["--model", "llama3-8b", "--eviction", "h2o:budget=64+h2o:budget=64"], "h2o:budget=64 is named twice"),
        (["--model", "llama3-8b", "--sinks", "-5"], "sink_size must be >= 0 tokens, got -5"),
        (["--model", "llama3-8b", "--recent", "0"], "recent_size must be >= 1 token"),
    ],
)
def test_script_refuses_clearly(arguments, message, capsys, tmp_path):
    assert memory.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_one_method_and_budget_have_their_own_names(tmp_path, capsys):
    arguments = ["--model", "llama3-8b", "--lengths", "8192", "--out", str(tmp_path)]
    assert memory.main([*arguments, "--eviction", "snapkv:budget=4096+snapkv:budget=4096,window=16"]) == 0
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert [name for name in rows if "snapkv" in name] == [
        "PoD + snapkv:budget=4096, last logits only", "PoD + snapkv:budget=4096,window=16, last logits only",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "phi3", "qwen2", "qwen3"))]
)
def test_every_family_can_be_measured(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": family, "sliding_window": None}))
    arguments = ["--model", str(tmp_path), "--memory", "600KB", "--lengths", "16", "--output", "1", "--sinks", "2"]
    arguments += ["--recent", "6", "--dtype", "float32", "--measure", "--out", str(tmp_path / "out")]
    assert memory.main(arguments) == 0
    for row in json.loads((tmp_path / "out" / "memory.json").read_text())["rows"].values():
        (cell,) = row["cells"]
        # Phi-3's two merged projections of the MLP stand beside their product for a moment.
        assert cell["batch"] == pytest.approx(cell["measured"], rel=0.2) and cell["batch"] > 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", r"expected a JSON object, the config of a model, got [1, 2]"),
        ("{", "not JSON"),
        ("{}", "model_type None is none of llama, mistral"),
        (json.dumps(CONFIG | {"model_type": 3}), "model_type 3 is none of"),
        (json.dumps(CONFIG | {"hidden_size": "32"}), "hidden_size"),
        (json.dumps(CONFIG | {"num_attention_heads": 0}), "a field is missing or wrong"),
    ],
)
def test_a_config_that_is_none_is_named(content, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert memory.main(["--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/config.json" in error and message in error


def test_lengths_that_are_no_numbers(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--model", "llama3-8b", "--lengths", "a,b"])
    assert "'a,b' is not of whole numbers, comma-separated, such as 256,512" in capsys.readouterr().err
    assert command.numbers("512,256,512") == [512, 256]


def test_each_length_is_taken_once():
    parser = argparse.ArgumentParser()
    command.add_numbers(parser, "--lengths", None, "tokens")
    assert parser.parse_args(["--lengths", "512,256", "512"]).lengths == [512, 256]
