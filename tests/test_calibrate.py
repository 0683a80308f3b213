"""python -m pod.calibrate: what it measures, against loops over eager weights, and the file that it writes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scripts import save, tiny_llama
from transformers import AutoModelForCausalLM

import pod
from pod import calibration
from pod.calibrate import REPEATS, SINKS, calibrate, first_directions, main, razor_order
from pod.model.reconstruction import FIRST

TEXT = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(300))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A stock model of bytes whose `attentions` are eager, and its tokenizer."""
    folder = save(tiny_llama(max_position_embeddings=512), tmp_path_factory.mktemp("model") / "base")
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return eager.eval(), pod.evaluation.models.load(str(folder))[1], folder


@torch.no_grad()
def weights_of(model, ids):
    """[layer][query head][query][key]."""
    return [layer[0].double() for layer in model(ids, output_attentions=True).attentions]


def test_echo_and_induction_are_the_weights_on_earlier_repetitions(model):
    stock, size = model[0], 7
    found, made = calibrate(stock, None, None, ["razor"], repeated=size, progress=False)
    ids = torch.randint(stock.config.vocab_size, (size,), generator=torch.Generator().manual_seed(0)).repeat(REPEATS)
    echo, induction = torch.zeros(2, 2), torch.zeros(2, 2)
    for layer, weights in enumerate(weights_of(stock, ids[None])):
        for head in range(4):
            at = [[], []]
            for query in range(size, 4 * size):
                earlier = range(query - size, -1, -size)
                at[0].append(sum(weights[head, query, key].item() for key in earlier))
                at[1].append(sum(weights[head, query, key + 1].item() for key in earlier))
            for scores, values in zip((echo, induction), at, strict=True):
                mean = sum(values) / len(values)
                scores[layer, head // 2] = max(scores[layer, head // 2].item(), mean)
    torch.testing.assert_close(found["echo"], echo, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["induction"], induction, atol=1e-6, rtol=0)
    assert torch.equal(found["razor"], razor_order(found["echo"], found["induction"]))
    assert made["echo"]["repeated"] == size


def test_a_first_token_is_repeated_nowhere():
    """The beginning of a text stands before the repetitions, and a model's length bounds them."""
    stock = tiny_llama(bos_token_id=2, max_position_embeddings=33)
    assert calibrate(stock, None, None, ["razor"], progress=False)[1]["razor"]["repeated"] == 8


def test_heads_are_ordered_as_razor_attention_takes_them():
    """Of 200 heads the best 28 by induction and 2 by echo: together the first ones of the order."""
    draws = torch.Generator().manual_seed(0)
    echo, induction = torch.rand(2, 20, 10, generator=draws)
    order = razor_order(echo, induction)
    first = set(induction.flatten().topk(28).indices.tolist()) | set(echo.flatten().topk(2).indices.tolist())
    assert set(order.flatten().topk(len(first)).indices.tolist()) == first
    assert sorted((order.flatten() * 200).round().int().tolist()) == list(range(1, 201))
    ties = razor_order(torch.zeros(2, 2), torch.zeros(2, 2))
    assert ties.tolist() == [[1.0, 0.75], [0.5, 0.25]]


def test_the_kvzip_score_is_the_largest_weight_of_the_repetition(model):
    stock, tokenizer, _ = model
    found, _ = calibrate(stock, tokenizer, TEXT, ["kvzip"], length=50, progress=False)
    text, request = (tokenizer(part, add_special_tokens=False).input_ids for part in (TEXT, FIRST))
    ids = torch.tensor([text[:50] + request + text[:50]])
    for layer, weights in enumerate(weights_of(stock, ids)):
        for head in range(2):
            wanted = max(
                weights[member, query, key].item()
                for member in (2 * head, 2 * head + 1)
                for query in range(50, ids.shape[1])
                for key in range(SINKS, 50)
            )
            assert found["kvzip"][layer, head].item() == pytest.approx(wanted, abs=1e-6)


def test_filters_are_the_queries_first_direction(model):
    """Of all queries of the text: those that make up the eager weights with the keys, from the SVD."""
    stock, tokenizer, _ = model
    found, made = calibrate(stock, tokenizer, TEXT, ["filters"], length=64, samples=3, progress=False)
    assert made["filters"] == {"samples": 3, "tokens": 64, "queries": 192}
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)[:192].view(3, 64)
    queries = []
    with torch.no_grad():
        for row in ids:
            cos, sin = stock.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
            hidden = stock(row[None], output_hidden_states=True).hidden_states
            for layer, block in enumerate(stock.model.layers):
                q = block.self_attn.q_proj(block.input_layernorm(hidden[layer])).view(64, 4, 8)
                turned = torch.cat([-q[..., 4:], q[..., :4]], dim=-1)
                queries.append((layer, q * cos[0, :, None] + turned * sin[0, :, None]))
    for layer in range(2):
        q = torch.cat([part for number, part in queries if number == layer]).double()
        for head in range(2):
            total = torch.zeros(8, dtype=torch.double)
            for member in (2 * head, 2 * head + 1):
                direction = torch.linalg.svd(q[:, member])[2][0]
                positive = (q[:, member] @ direction > 0).double().mean()
                total += direction if positive > 0.5 else -direction
            torch.testing.assert_close(found["filters"][layer, head].double(), total / 2, atol=1e-4, rtol=0)


def test_the_sign_is_the_majoritys_not_the_means():
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, -0.01], [-9.0, 0.0]])[None]
    assert first_directions(queries)[0] > 0.99


def test_the_command_writes_what_methods_read(model, tmp_path, capsys):
    stock, tokenizer, folder = model
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "runs/calibration.safetensors"
    line = f"--ckpt {folder} --text-file {tmp_path}/text.txt --out {out} --length 60 --repeated 9".split()
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "filters: 2 x 2 x 8, samples 5, tokens 60, queries 300" in printed and f"written: {out}" in printed
    wanted, made = calibrate(stock, tokenizer, TEXT, length=60, repeated=9, progress=False)
    found = calibration.load(out)
    assert found.made == made and found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found.tensors[name], tensor, atol=1e-5, rtol=0)
    # A PoD model of the same weights, with other blocks, reads it.
    blocks = pod.LayerBlocks([[0, 0], [0, 1]])
    config = pod.convert(stock, blocks, sink_size=2, recent_size=6).config
    for name in set(calibration.HEAD_SCORES) - {"duo"}:  # which is learned
        scores = calibration.head_scores(out, name, config)
        assert torch.equal(scores, found.tensors[name]) and scores.shape == (2, 2)
        assert scores.min() >= 0 and scores.max() <= 1
        scores.zero_()
    assert calibration.head_scores(out, "razor", config).max() == 1
    line = ["--ckpt", str(folder), "--out", str(out), "--measure", "razor", "--repeated", "5"]
    assert main(line) == 2 and calibration.load(out).tensors.keys() > {"kvzip"}
    assert f"{out} exists: choose another --out, or replace it with --force" in capsys.readouterr().err
    assert main([*line, "--force"]) == 0
    assert calibration.load(out).tensors.keys() == {"echo", "induction", "razor"}  # not what was read before
    with pytest.raises(ValueError, match="has no kvzip, only echo, induction, razor"):
        calibration.head_scores(out, "kvzip", config)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--measure", "razor,filter"], "measurements are razor, kvzip, filters; got filter"),
        (["--measure", "kvzip"], "measured on a text: give one"),
        (["--repeated", "0"], "repeated must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_named(model, tmp_path, capsys, arguments, message):
    assert main(["--ckpt", str(model[2]), "--out", str(tmp_path / "a.safetensors"), *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a.safetensors").exists()
    main(["--ckpt", str(tmp_path / "absent"), "--out", str(tmp_path / "a.safetensors"), *arguments])
    assert message in capsys.readouterr().err  # before a model is loaded


def test_other_models_and_damaged_files_are_refused(model, tmp_path):
    config, path = model[0].config, tmp_path / "calibration.safetensors"
    calibration.save(path, {"echo": torch.rand(2, 2)}, config, {"echo": {}})
    with pytest.raises(ValueError, match="that was measured has num_key_value_heads = 2, this one has 4"):
        calibration.head_scores(path, "echo", tiny_llama(num_key_value_heads=4).config)
    other = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).config
    with pytest.raises(ValueError, match="rope_parameters = .*this one has .*7.0"):
        calibration.head_scores(path, "echo", other)
    with pytest.raises(ValueError, match="head scores are echo, induction, razor, kvzip, duo; got 'filters'"):
        calibration.head_scores(path, "filters", config)
    with pytest.raises(FileNotFoundError, match=r"no such calibration file; python -m pod.calibrate writes one"):
        calibration.head_scores(tmp_path / "none", "echo", config)
    with pytest.raises(ValueError, match=r"echo of shape \[3, 2\], wanted \[2, 2\]"):
        calibration.save(path, {"echo": torch.rand(3, 2)}, config, {})
    with pytest.raises(ValueError, match="wanted no such name"):
        calibration.save(path, {"echos": torch.rand(2, 2)}, config, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: its sha256"):
        calibration.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated, damaged or no calibration file .*Calibrate again"):
        calibration.load(path)
    save_file({"echo": torch.rand(2, 2)}, path)
    with pytest.raises(ValueError, match="not a calibration file"):
        calibration.load(path)


def test_the_file_says_how_it_was_made(model, tmp_path):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path, {"echo": torch.ones(2, 2)}, model[0].config, {"echo": {"repeated": 3}})
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["content"])
    assert content["made"] == {"echo": {"repeated": 3}} and content["config"]["model_type"] == "llama"
