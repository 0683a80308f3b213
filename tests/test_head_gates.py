"""Learning of head scores: the gated forward against the formulas, and python -m pod.calibrate --learn."""

import signal

import pytest
import torch
from scripts import TEXT, save, tiny_llama
from transformers import ByT5Tokenizer, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import pod
from pod import calibration
from pod.calibrate import main
from pod.files import locked
from pod.heads import head_scores, streamed
from pod.terminal import Stopped
from pod.training.head_gates import ASKED, STATED, WORDS, HeadGates, Learning, Vaults, blocks_of, learn

SINKS, RECENT = 3, 9
SMALL = Learning(
    steps=12, shortest=240, longest=300, needles=2, words=1, sink_size=SINKS, recent_size=RECENT, lr=0.1, penalty=0.01
)
TOKENIZER = ByT5Tokenizer(extra_ids=0)
BLOCKS = pod.LayerBlocks([[0, 0], [0, 1], [2, 1], [3, 3]])


def llama(**changes):
    return tiny_llama(num_hidden_layers=4, max_position_embeddings=512, **changes)


def models():
    dense = llama()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": 259, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
    return {
        "dense": dense,
        "pod": pod.convert(dense, BLOCKS, SINKS, RECENT),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes)).eval(),
        "phi3": Phi3ForCausalLM(Phi3Config(eos_token_id=1, **sizes)).eval(),
    }


def norm(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def gated_forward(model, ids, full, gates):
    """A Llama's last hidden states [T, C] in which gates [L][H_kv] mix `full` [L][T, H * D] in; all in float64."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config, length = model.config, len(ids)
    dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (key <= query) & ((key < SINKS) | (key > query - RECENT))
    turns = 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    angles = (torch.arange(length).double()[:, None] * turns).repeat(1, 2)

    def rotated(x):
        return x * angles.cos() + torch.cat([-x[:, dim // 2 :], x[:, : dim // 2]], dim=-1) * angles.sin()

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        at = {name.removeprefix(f"model.layers.{layer}."): value for name, value in weights.items()}
        normed = norm(x, at["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (normed @ at[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = []
        for head in range(config.num_attention_heads):
            own, theirs = (slice(n * dim, (n + 1) * dim) for n in (head, head // group))
            scores = rotated(q[:, own]) @ rotated(k[:, theirs]).T / dim**0.5
            window = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, theirs]
            gate = gates[layer][head // group]
            mixed.append(gate * full[layer][:, own] + (1 - gate) * window)
        x = x + torch.cat(mixed, dim=-1) @ at["self_attn.o_proj.weight"].T
        normed = norm(x, at["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (normed @ at[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ at["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], config.rms_norm_eps)


@pytest.mark.parametrize("kind", ["dense", "pod"])
def test_the_gated_forward_and_its_gradient_are_the_formulas(kind):
    model = models()[kind]
    module = HeadGates(model, SMALL, Vaults(TOKENIZER, TEXT, SMALL))
    with torch.no_grad():
        module.alpha.uniform_(0, 1, generator=torch.Generator().manual_seed(1))
    ids, asked = module.samples[0]
    full, handles = [], []
    for layer in model.model.layers:
        hook = lambda _, args: full.append(args[0][0].double())  # noqa: E731
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    with torch.no_grad():
        wanted = model.model(ids[None], use_cache=False).last_hidden_state[0].double()
    for handle in handles:
        handle.remove()
    anchors = blocks_of(model).anchors.tolist()
    assert anchors == (BLOCKS.anchors.tolist() if kind == "pod" else [[n, n] for n in range(4)])
    alpha = module.alpha.detach().double().requires_grad_()
    gates = [[alpha[anchor, head] for head, anchor in enumerate(row)] for row in anchors]
    found = gated_forward(model, ids, full, gates)
    for ours, theirs in zip(module.states(ids[None]), (wanted, found), strict=True):
        torch.testing.assert_close(ours[0].double(), theirs, atol=1e-4, rtol=1e-4)
    share = sum(gate for row in gates for gate in row) / 8
    loss = (found - wanted)[-asked:].square().mean() + SMALL.penalty * share
    loss.backward()
    module.log_dict = lambda *args, **kwargs: None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    step = module.training_step((ids, asked), 0)
    torch.testing.assert_close(step.double(), loss.detach(), atol=1e-6, rtol=1e-4)
    step.backward()
    torch.testing.assert_close(module.alpha.grad.double(), alpha.grad, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "pod", "qwen3", "phi3"])
def test_open_gates_are_the_model_and_shut_ones_window_attention(kind):
    model = models()[kind]
    module = HeadGates(model, SMALL, Vaults(TOKENIZER, TEXT, SMALL))
    ids = module.samples[0][0][None]
    window = pod.convert(model, pod.LayerBlocks.dense(4, 2), SINKS, RECENT, share="window")
    with torch.no_grad():
        wanted, found = module.states(ids)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        module.alpha.zero_()
        torch.testing.assert_close(module.states(ids)[1], window.model(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, window.model(ids).last_hidden_state, atol=1e-2)


def test_gates_fall_where_nothing_is_lost(tmp_path):
    """Of heads whose output goes nowhere, and of no others; the model stays as it was."""
    model = llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(3.0)[:, 16:] = 0.0  # what KV head 1 serves
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learning = Learning(**{**vars(SMALL), "steps": 30})
    scores, made = learn(model, TOKENIZER, TEXT, tmp_path, learning, progress=False)
    assert scores.shape == (4, 2) and scores.dtype == torch.float32
    assert scores[:, 1].max() == 0 and scores[:, 0].max() > 0.3
    assert made["steps"] == 30 and made["recent_size"] == RECENT
    assert not model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["model.embed_tokens.weight"]
    rows = next(tmp_path.glob("logs/*/metrics.csv")).read_text().splitlines()
    assert len(rows) == 31 and {"distance", "gates", "step"} <= set(rows[0].split(","))


def test_a_block_has_one_gate(tmp_path):
    scores, made = learn(models()["pod"], TOKENIZER, TEXT, tmp_path, SMALL, progress=False)
    assert scores[0, 0] == scores[1, 0] and scores[1, 1] == scores[2, 1]
    assert len(set(scores.flatten().tolist())) == len(BLOCKS.anchors.unique()) + 2  # 3 + 3 blocks
    # A PoD model's own sizes, where none are given.
    assert (made["sink_size"], made["recent_size"]) == (SINKS, RECENT)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, capsys):
    model = llama()
    wanted, _ = learn(model, TOKENIZER, TEXT, tmp_path / "whole", SMALL, progress=False)
    read = Vaults.__getitem__

    def reading(self, number):
        if number == 5:
            signal.raise_signal(signal.SIGTERM)
        return read(self, number)

    monkeypatch.setattr(Vaults, "__getitem__", reading)
    with pytest.raises(Stopped, match="stopped at step 6"):
        learn(model, TOKENIZER, TEXT, tmp_path / "parts", SMALL, progress=False)
    monkeypatch.setattr(Vaults, "__getitem__", read)
    with locked(tmp_path / "parts/.lock", tmp_path), pytest.raises(ValueError, match=r"parts is being written by proc"):
        learn(model, TOKENIZER, TEXT, tmp_path / "parts", SMALL, progress=False)
    assert all(one.requires_grad for one in model.parameters())
    with pytest.raises(ValueError, match=r"other settings: lr 0.1 -> 0.2\. Give them again, or another --out"):
        learn(model, TOKENIZER, TEXT, tmp_path / "parts", Learning(**{**vars(SMALL), "lr": 0.2}), progress=False)
    with pytest.raises(ValueError, match=r"other settings: text .* weights  -> other"):
        learn(model, TOKENIZER, TEXT + "#", tmp_path / "parts", SMALL, weights="other", progress=False)
    found, _ = learn(model, TOKENIZER, TEXT, tmp_path / "parts", SMALL, progress=False)
    assert torch.equal(found, wanted) and "continuing from" in capsys.readouterr().out
    again, _ = learn(model, TOKENIZER, TEXT, tmp_path / "parts", SMALL, progress=False)  # all steps are done
    assert torch.equal(again, wanted)


def test_samples_hide_what_they_ask_for():
    learning = Learning(**{**vars(SMALL), "shortest": 600, "longest": 900, "needles": 3, "words": 2})
    samples, lengths, places = Vaults(TOKENIZER, TEXT, learning), set(), []
    for number in range(60):
        ids, asked = samples[number]
        assert torch.equal(ids, samples[number][0])
        lengths.add(len(ids))
        text, questions = (TOKENIZER.decode(part) for part in (ids[:-asked], ids[-asked:]))
        start, end, left = text, "", text
        for vault in range(1, 4):
            words = questions.split(ASKED.format(number=vault, words="").rstrip("."))[1].split(".")[0]
            assert len(words.split()) == 2 and set(words.split()) <= set(WORDS)
            needle = STATED.format(number=vault, words=words.strip())
            assert left.count(needle) == 1
            places.append(start.index(needle) / len(start))
            left = left.replace(needle, end)
        assert left in TEXT
    assert 600 <= min(lengths) < 620 and 880 < max(lengths) <= 900 and len(lengths) > 25
    assert min(places) < 0.1 and max(places) > 0.75


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"shortest": 500}, "shortest is 500 and longest 300"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"words": 40}, "a sample of 240 tokens has no room for a text: 2 needles of 40 words"),
        ({"recent_size": 237}, "240 tokens has none that is distant at 3 sinks and 237 recent"),
        ({"longest": 20_000}, None),
    ],
)
def test_settings_that_mean_nothing_are_named(tmp_path, changes, message):
    def run(text=TEXT):
        return learn(llama(), TOKENIZER, text, tmp_path, Learning(**{**vars(SMALL), **changes}), progress=False)

    if message is None:  # no longer than the model takes
        assert run()[1]["longest"] == 512
        with pytest.raises(ValueError, match="the text has 300 tokens, fewer than the longest sample, 512"):
            run(TEXT[:300])
        return
    with pytest.raises(ValueError, match=message):
        run()


def test_models_whose_heads_cannot_stream_are_refused():
    streaming = pod.LayerBlocks.dense(4, 2).streaming(torch.rand(4, 2), 0.5)
    for blocks, share in ((streaming, "scores"), (BLOCKS, "kv"), (pod.LayerBlocks.dense(4, 2), "window")):
        with pytest.raises(ValueError, match=f"heads of this model .share='{share}'. stream already, or have no"):
            blocks_of(pod.convert(llama(), blocks, SINKS, RECENT, share=share))


def test_the_command_writes_scores_by_which_heads_stream(tmp_path, capsys):
    folder, text, out = save(llama(), tmp_path / "base"), tmp_path / "text.txt", tmp_path / "heads.safetensors"
    text.write_text(TEXT)
    line = f"--ckpt {folder} --text-file {text} --out {out} --learn --steps 8 --shortest 130 --longest 200".split()
    line += "--needles 1 --words 1 --sink-size 3 --recent-size 9 --lr 0.05".split()
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "duo: 4 x 2, steps 8" in printed and f"written: {out}" in printed
    config = pod.convert(llama(), BLOCKS, SINKS, RECENT).config
    scores = head_scores(f"{out}:duo", config)
    assert torch.equal(scores, calibration.load(out).tensors["duo"]) and 0 <= scores.min() < scores.max() <= 1
    assert calibration.load(out).made["duo"]["recent_size"] == 9
    assert not (tmp_path / "heads-learning/steps").exists() and any(tmp_path.glob("heads-learning/logs/*/metrics.csv"))
    dense = pod.LayerBlocks.dense(4, 2)
    assert streamed(dense, f"{out}:duo", 0.5, config, (3, 9)) == dense.streaming(scores, 0.5)
    assert capsys.readouterr().err == ""
    streamed(dense, f"{out}:duo", 0.5, config, (3, 8))
    assert "found with 3 sinks and 9 recent tokens" in capsys.readouterr().err
    assert main(line) == 2 and "exists: choose another --out" in capsys.readouterr().err
    # Measuring into the same file leaves alone what a stopped run would go on from.
    (tmp_path / "heads-learning/steps").mkdir()
    assert main(f"--ckpt {folder} --out {out} --measure razor --repeated 5 --force".split()) == 0
    assert (tmp_path / "heads-learning/steps").is_dir()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--learn", "--measure", "razor", "--length", "3"], "--measure, --length: not with --learn"),
        (["--steps", "3", "--recent-size", "9"], "--steps, --recent-size: only with --learn"),
        (["--learn"], "--learn hides words in a text: give one with --text-file"),
    ],
)
def test_options_that_do_nothing_are_refused(tmp_path, capsys, arguments, message):
    assert main(["--ckpt", str(tmp_path), "--out", str(tmp_path / "a.safetensors"), *arguments]) == 2
    assert message in capsys.readouterr().err
