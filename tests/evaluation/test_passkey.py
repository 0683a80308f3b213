"""Pass-key prompts and their scoring, perplexity, and the two scripts."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, letters_tokenizer, save, tiny_llama
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, DynamicCache, Gemma2Config, Gemma2ForCausalLM

import pod
from pod.evaluation import models, passkey
from pod.evaluation.passkey import PHRASES, generate_greedily, passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity, token_losses
from pod.evaluation.report import markdown_table
from pod.evaluation.texts import read_text

TEXT = "".join(f"def function_{n}(x):\n    return x * {n % 7}\n\n" for n in range(200))


@pytest.fixture(scope="module")
def dense():
    return tiny_llama(intermediate_size=48, num_hidden_layers=3, head_dim=8, initializer_range=0.2)


@pytest.fixture(scope="module")
def shared(dense):
    return pod.convert(dense, pod.LayerBlocks([[0, 0], [0, 1], [0, 1]]), sink_size=2, recent_size=10).eval()


@pytest.fixture(scope="module")
def ckpt(shared, tmp_path_factory):
    return save(shared, tmp_path_factory.mktemp("ckpt") / "shared")


def test_a_text_of_which_the_tokenizer_makes_no_token_is_refused():
    with pytest.raises(ValueError, match="is empty, or the tokenizer makes no token of it"):
        passkey_prompts(letters_tokenizer(), "一二三\n四五\n", 40, [0.5], samples=1)


@pytest.mark.parametrize("phrase", list(PHRASES))
@pytest.mark.parametrize("length", [600, 999])
def test_prompts_have_the_length_the_key_and_the_distance_they_say(tokenizer, phrase, length):
    depths = [0.0, 0.3, 0.5, 1.0]
    prompts = passkey_prompts(tokenizer, TEXT, length, depths, samples=3, phrase=phrase, distractors=2, seed=5)
    assert [p.depth for p in prompts] == [d for d in depths for _ in range(3)]
    stated, asked = PHRASES[phrase]
    for prompt in prompts:
        assert len(prompt.input_ids) == length
        text = tokenizer.decode(prompt.input_ids)
        names = [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
        (name,) = [name for name in names if text.endswith(asked.format(name=name))]
        line = stated.format(name=name, value=prompt.value)
        assert text.count(line) == 1
        before, after = text.split(line)
        assert prompt.distance == len(after)
        assert before == "" or before.endswith("\n")
        # A line break is near: the longest line of the text bounds how far the key stands from its depth.
        longest = max(len(part) for part in text.splitlines(keepends=True))
        body = len(text) - len(asked.format(name=name)) - len(line)
        assert abs(len(before) - prompt.depth * body) <= longest + 2 * 100  # and two distractors may stand before it
        assert len(prompt.value) == 5
    assert prompts == passkey_prompts(tokenizer, TEXT, length, depths, 3, phrase, 2, seed=5)
    assert prompts != passkey_prompts(tokenizer, TEXT, length, depths, 3, phrase, 2, seed=6)


def test_keys_among_random_words_in_ranges_of_depth(tokenizer):
    """The Cascade paper's: the prompt is words and one sentence, and the keys of a range lie all over it."""
    words = ["lake", "river", "stone", "tree", "wind"]
    ranges = [(index / 5, (index + 1) / 5) for index in range(5)]
    text = " ".join(words * 3) + "\n7 x7 -"
    prompts = passkey_prompts(tokenizer, text, 700, ranges, samples=20, phrase="sentence", words=True)
    stated, asked = PHRASES["sentence"]
    orders = set()
    for number, prompt in enumerate(prompts):
        first, last = ranges[number // 20]
        assert first <= prompt.depth <= last and len(prompt.input_ids) == 700
        text = tokenizer.decode(prompt.input_ids)
        name = text.removesuffix(" is")[-2:]
        line, question = "\n" + stated.format(name=name, value=prompt.value), "\n" + asked.format(name=name)
        assert text.endswith(question) and text.count(line) == 1
        before, after = text.removesuffix(question).split(line)
        assert abs(len(before) - prompt.depth * len(before + after)) <= 6, "no further off than half a word"
        assert prompt.distance == len(after) + len(question)
        cut, *rest = (before + after).split(" ")
        assert set(rest) == set(words) and (cut == "" or any(word.endswith(cut) for word in words))
        orders.add(tuple(rest))
    assert len(orders) == 100
    depths = sorted(prompt.depth for prompt in prompts)
    assert max(b - a for a, b in zip(depths, depths[1:], strict=False)) < 0.1
    assert [p.depth for p in passkey_prompts(tokenizer, TEXT, 300, [(0.5, 0.5), 0.5], 1)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": [(0.6, 0.4)]}, "between 0"),
        ({"text": "1 2 -", "words": True}, "empty"),
        ({"phrase": "riddle"}, "'riddle' is not known"),
        ({"depths": [1.5]}, "between 0"),
        ({"text": " \n"}, "empty"),
        ({"length": 20}, "length 20"),
    ],
)
def test_prompts_that_cannot_be(tokenizer, change, message):
    arguments = {"tokenizer": tokenizer, "text": TEXT, "length": 500, "depths": [0.5], "samples": 1} | change
    with pytest.raises(ValueError, match=message):
        passkey_prompts(**arguments)


def test_accuracy_counts_right_digits_in_place(tokenizer, dense):
    prompts = passkey_prompts(tokenizer, TEXT, 400, [0.2, 0.8], samples=2)
    prompts += passkey_prompts(tokenizer, TEXT, 300, [0.5], samples=1)
    by_prompt = {tuple(p.input_ids): p.value for p in prompts}
    wrong = {0: 0, 1: 1, 2: 5, 3: 2, 4: 0}  # how many of each prompt's digits the model gets wrong
    order = {tuple(p.input_ids): index for index, p in enumerate(prompts)}

    def generate(model, input_ids, count, question):
        assert question == len("#get ab=")
        rows = []
        for row in input_ids.tolist():
            value, spoiled = by_prompt[tuple(row)], wrong[order[tuple(row)]]
            digits = [str((int(c) + 1) % 10) for c in value[:spoiled]] + list(value[spoiled:])
            rows.append([ord(c) + 3 for c in "".join(digits) + "\n777"][:count])
        return torch.tensor(rows)

    scores = passkey_accuracy(dense, tokenizer, prompts, batch_size=3, generate=generate)
    assert scores == pytest.approx([1.0, 0.8, 0.0, 0.6, 1.0])


def test_greedy_generation_is_the_models_own_argmax(dense, shared):
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(1))
    for model in (dense, shared):
        expected = ids
        with torch.no_grad():
            for _ in range(4):
                last = model(expected, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
                expected = torch.cat([expected, last], dim=1)
        assert torch.equal(generate_greedily(model, ids, 4), expected[:, 20:])


def test_perplexity_is_the_plain_loss(shared):
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 259, (2, 30), generator=generator), torch.randint(3, 259, (17,), generator=generator)]
    losses = []
    for ids in (texts[0], texts[1][None]):
        logits = shared(ids, use_cache=False).logits[:, :-1].detach().double()
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    mean = float(sum(losses)) / (2 * 29 + 16)
    for stream in (None, 1, 7, 100):
        result = perplexity(shared, texts, bytes_per_token=1.0, stream=stream)
        assert result.loss == pytest.approx(mean, rel=1e-5), stream
        assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
        assert result.bits_per_byte == pytest.approx(mean / math.log(2), rel=1e-5)
        assert result.count.tolist() == [0] + [3] * 16 + [2] * 13
    positions, means = result.curve(parts=5)
    assert len(positions) == len(means) == 5
    assert perplexity(shared, texts).bits_per_byte is None


@pytest.mark.parametrize("stream", [None, 7])
@pytest.mark.parametrize("family", ["Cohere", "Gemma2"])
def test_perplexity_is_of_the_models_own_logits(family, stream):
    """These families scale, or cap, what their heads give."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 259, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "eos_token_id": 1}
    torch.manual_seed(0)
    if family == "Cohere":
        model = CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.5)).eval()
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=3.0)).eval()
    ids = torch.randint(3, 259, (2, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1].double()
    wanted = float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    assert perplexity(model, [ids], stream=stream).loss == pytest.approx(wanted, rel=1e-5)


def test_token_losses_do_not_depend_on_the_chunk(shared, monkeypatch):
    hidden, targets = torch.randn(2, 11, 32), torch.randint(259, (2, 11))
    whole = token_losses(shared.lm_head, hidden, targets)
    monkeypatch.setattr("pod.evaluation.perplexity.POSITIONS", 3)
    assert torch.allclose(token_losses(shared.lm_head, hidden, targets), whole)


@pytest.mark.parametrize(
    ("texts", "stream", "message"), [([torch.tensor([5])], None, "1 tokens"), ([], 0, "stream is 0")]
)
def test_perplexity_refuses(shared, texts, stream, message):
    with pytest.raises(ValueError, match=message):
        perplexity(shared, texts, stream=stream)


def test_streaming_has_the_memory_of_the_cache_it_is_given(shared):
    made = []

    def new_cache():
        made.append(pod.PodCache(shared.config, max_length=64))
        return made[-1]

    perplexity(shared, [torch.randint(3, 259, (40,)), torch.randint(3, 259, (30,))], stream=8, new_cache=new_cache)
    assert [cache.get_seq_length() for cache in made] == [39, 29]


def test_cache_bytes_are_those_of_the_tensors(dense, shared):
    ids = torch.randint(3, 259, (2, 40))
    cache = DynamicCache(config=dense.config)
    dense(ids, past_key_values=cache)
    assert models.cache_bytes(cache) == 2 * 3 * 2 * 2 * 40 * 8 * 4
    cache = pod.PodCache(shared.config, max_length=40)
    shared(ids, past_key_values=cache)
    assert models.cache_bytes(cache) == cache.nbytes() == cache.expected_nbytes(40, batch=2, itemsize=4)


def test_a_training_run_is_not_a_model(tmp_path):
    (tmp_path / "steps").mkdir()
    with pytest.raises(ValueError, match="export it first"):
        models.load(str(tmp_path))
    with pytest.raises(ValueError, match="no model"):
        models.load(str(tmp_path / "absent"))


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, message in (
        ("nowhere", "there is no such file; give the path of a UTF-8 text file"),
        (".", "Is a directory; give"),
        ("latin", r"not UTF-8 \(unexpected end of data at byte 3\); convert it"),
    ):
        with pytest.raises(ValueError, match=f"--text {re.escape(str(tmp_path / name))}: {message}"):
            read_text(tmp_path / name, "--text")


def test_table_lines_up():
    assert markdown_table(["a", "bb"], [["xyz", "1"]]) == "| a   | bb |\n|-----|---:|\n| xyz |  1 |"


def run_script(name, *arguments):
    command = [sys.executable, str(ROOT / "eval" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_passkey_script(ckpt, tmp_path):
    text = tmp_path / "text.py"
    text.write_text(TEXT)
    options = ["--lengths", "200,300", "--depths", 3, "--samples", 2, "--text", text, "--out", tmp_path / "out"]
    done = run_script("passkey.py", "--ckpt", ckpt, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "passkey.json").read_text())
    values = result["models"][str(ckpt)]["none"]
    assert [len(row) for row in values["accuracy"]] == [3, 3]
    assert len(values["prompts"]) == 2 * 3 * 2
    assert values["mean"] == pytest.approx(sum(p["score"] for p in values["prompts"]) / 12)
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 1000
    assert "| shared |" in done.stdout
    failed = run_script("passkey.py", "--ckpt", tmp_path / "nothing", *options)
    assert failed.returncode == 2 and "no model" in failed.stderr and "Traceback" not in failed.stderr


def test_the_cascade_papers_protocol(ckpt, tmp_path, capsys):
    protocol = passkey.PROTOCOLS["cascade"]
    assert protocol["lengths"] == [32768, 65536, 131072, 262144, 524288, 1048576]
    assert len(protocol["lengths"]) * protocol["depths"] * protocol["samples"] == 600, "the paper's retrievals"
    method = "cascade:budget=72,sinks=8,num_cascades=8,stride=32"
    arguments = ["--ckpt", str(ckpt), "--protocol", "cascade", "--eviction", method, "--out", str(tmp_path)]
    assert passkey.main([*arguments, "--lengths", "200,400", "--samples", "2", "--batch-size", "10"]) == 0
    result = json.loads((tmp_path / "passkey.json").read_text())
    assert result["phrase"] == "sentence" and result["samples"] == 2
    assert result["depths"] == [[0, 0.2], [0.2, 0.4], [0.4, 0.6], [0.6, 0.8], [0.8, 1]]
    for name in ("none", method):
        found = result["models"][str(ckpt)][name]
        assert [len(row) for row in found["accuracy"]] == [5, 5]
        prompts = found["prompts"]
        assert [p["length"] for p in prompts] == [200] * 10 + [400] * 10
        assert found["mean"] == pytest.approx(sum(p["score"] for p in prompts) / 20)
        for p, (low, high) in zip(prompts, [bounds for bounds in result["depths"] for _ in range(2)] * 2, strict=True):
            assert low <= p["depth"] <= high
    assert "200 tokens | 400 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_perplexity_script(ckpt, tmp_path):
    text = tmp_path / "text.py"
    text.write_text(TEXT)
    options = ["--length", 64, "--limit", 5, "--text", text]
    whole = run_script("perplexity.py", "--ckpt", ckpt, *options, "--out", tmp_path / "whole")
    streamed = run_script("perplexity.py", "--ckpt", ckpt, *options, "--stream", 10, "--out", tmp_path / "streamed")
    assert whole.returncode == streamed.returncode == 0, whole.stderr + streamed.stderr
    first, second = (
        json.loads((tmp_path / name / "perplexity.json").read_text())["models"][str(ckpt)]["none"]
        for name in ("whole", "streamed")
    )
    assert first["tokens"] == 5 * 63
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert (tmp_path / "whole" / "perplexity.png").stat().st_size > 1000
    failed = run_script("perplexity.py", "--ckpt", ckpt, "--text", text, "--length", 10**6)
    assert failed.returncode == 2 and "--length 1000000" in failed.stderr
