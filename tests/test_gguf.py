"""GGUF files as Hugging Face folders: every family's logits, what is refused, the cache, every door that takes one."""

import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import pod
from pod.analyze import load_stock
from pod.data.chat import load_chat
from pod.data.sources import load_tokenizer as load_preparing
from pod.data.tokenizer import load_tokenizer
from pod.evaluation import models
from pod.model import gguf
from pod.model.weights import load_causal_lm, weights_hash
from pod.training.base_model import first_config

pytest.importorskip("gguf")
from gguf_files import MERGES, name_of, tokens, write_gguf  # noqa: E402

SIZES = {
    "vocab_size": len(tokens()),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 32}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": None, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def tiny_model(family="llama"):
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **extra)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/pod/gguf"


def logits_of(model):
    ids = torch.arange(40)[None] * 5
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_made_of(tmp_path, family):
    model = tiny_model(family)
    loaded = pod.load(write_gguf(tmp_path / "model.gguf", model))
    assert loaded.dtype == torch.float32 and not loaded.training
    assert loaded.config.model_type == ("llama" if family == "mistral" else family)
    assert not hasattr(loaded.config, "quantization_config")
    ends = (loaded.config.eos_token_id, loaded.generation_config.eos_token_id, loaded.config.pad_token_id)
    assert ends == (len(tokens()) - 1, len(tokens()) - 1, None)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-5)
    weights = {name: value for name, value in model.state_dict().items()}
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("kind,dtype,error", [("F16", torch.float16, 1e-3), ("Q8_0", torch.bfloat16, 0.01)])
def test_a_quantised_file_is_near_the_model(tmp_path, kind, dtype, error):
    model = tiny_model()
    loaded = pod.load(write_gguf(tmp_path / "model.gguf", model, kind))
    assert loaded.dtype == dtype
    for name, value in loaded.state_dict().items():
        wanted = model.state_dict()[name]
        assert (value.float() - wanted).norm() <= error * wanted.norm(), name


def test_digits_stand_alone_where_the_file_says_so(tmp_path):
    """SmolLM2's way, which transformers does not take over: a run of spaces before a digit is one piece then."""
    path = write_gguf(tmp_path / "model.gguf", tiny_model())
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.tokenize("the  12") == ["the", "ĠĠ", "1", "2"]
    plain = load_tokenizer(str(write_gguf(tmp_path / "plain.gguf", tiny_model(), pre="gpt-2")))
    assert plain.tokenize("the  12") == ["the", "Ġ", "Ġ", "12"]
    assert tokenizer.eos_token == "<|im_end|>" and len(MERGES) == 4
    with pytest.raises(ValueError, match=r"other\.gguf: transformers does not know how its tokenizer \(viking\)"):
        load_tokenizer(str(write_gguf(tmp_path / "other.gguf", tiny_model(), pre="viking")))


def test_every_door_takes_a_file(tmp_path, cache):
    path = str(write_gguf(tmp_path / "model.gguf", tiny_model()))
    wanted = logits_of(tiny_model())
    assert first_config(path, None, rope_theta=5e5).rope_parameters["rope_theta"] == 5e5
    dense = pod.LayerBlocks.dense(2, 2)
    stock = load_stock(path, None, torch.float32)
    found = [stock, load_causal_lm(path), pod.convert(path, dense), models.load(path)[0]]
    for model in found:
        torch.testing.assert_close(logits_of(model.eval()), wanted, rtol=1e-4, atol=1e-5)
    (folder,) = [each for each in cache.iterdir() if each.is_dir()]  # one for all of them
    assert weights_hash(path) == weights_hash(folder)
    encode, vocab_size, _ = load_preparing(path)
    end = len(tokens()) - 1
    assert vocab_size == len(tokens()) and encode("the").tolist() == [tokens().index("the"), end]
    chat = load_chat(path, None)([{"role": "assistant", "content": "the"}])
    assert chat[2] == "the" == models.load(path)[1].apply_chat_template([{"content": "the"}], tokenize=False)


def test_a_file_that_changed_is_read_anew_and_one_that_has_not_is_not(tmp_path, cache, monkeypatch):
    path, model = tmp_path / "model.gguf", tiny_model()
    first = gguf.local(write_gguf(path, model))
    monkeypatch.setattr(gguf, "write_folder", lambda *_: pytest.fail("written twice"))
    assert gguf.local(path) == gguf.local(str(path)) == first and first.parent == cache
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    with torch.no_grad():
        model.model.norm.weight += 1
    write_gguf(path, model)
    os.utime(path, (time.time() + 5, time.time() + 5))
    second = gguf.local(path)
    assert second != first
    assert torch.equal(AutoModelForCausalLM.from_pretrained(second).model.norm.weight, model.model.norm.weight)
    assert gguf.local(tmp_path) == tmp_path and gguf.local("org/name") == "org/name"


@pytest.mark.slow
def test_what_a_killed_process_left_is_no_model(tmp_path, cache):
    path = write_gguf(tmp_path / "model.gguf", tiny_model())
    kill = (
        "import os, sys; from pod.model import gguf\n"
        "gguf.write_sums = lambda folder: os._exit(9)\n"  # the last step before the folder gets its name
        "gguf.local(sys.argv[1])"
    )
    assert subprocess.run([sys.executable, "-c", kill, str(path)], capture_output=True).returncode == 9
    assert [each for each in cache.iterdir() if each.is_dir()]  # half of it lies there, under another name
    torch.testing.assert_close(logits_of(pod.load(path)), logits_of(tiny_model()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_make_one_folder(tmp_path, cache):
    path = write_gguf(tmp_path / "model.gguf", tiny_model())
    code = "import sys; from pod.model import gguf; print(gguf.local(sys.argv[1]))"
    both = [subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = {process.communicate()[0].splitlines()[-1] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(said) == 1
    assert [str(each) for each in cache.iterdir() if each.is_dir()] == list(said)


def test_refuses(tmp_path, monkeypatch):
    def refused(match, **options):
        path = write_gguf(tmp_path / "model.gguf", tiny_model(), **options)
        with pytest.raises(ValueError, match=rf"model\.gguf: {match}"):
            gguf.write_folder(path, tmp_path / "out")
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    refused("a GGUF with RoPE scaling is not supported", extra=["rope_freqs.weight"])
    refused("a GGUF with RoPE scaling is not", fields=[("llama.rope.scaling.type", "yarn")])
    refused("a GGUF with a mixture of experts is not", fields=[("llama.expert_count", 8)])
    refused("a GGUF with sliding-window attention is not", fields=[("llama.attention.sliding_window", 16)])
    refused("its 21 tensors are not those of LlamaForCausalLM with 20", extra=["blk.0.attn_v.bias"])
    other = tiny_model("llama")
    other.config.model_type = "gemma2"
    path = write_gguf(tmp_path / "gemma.gguf", other)
    with pytest.raises(ValueError, match="family 'gemma2' is not supported; supported are llama, phi3, qwen2, qwen3"):
        pod.load(path)
    assert Gemma2Config.model_type == "gemma2" and name_of("lm_head.weight") == "output.weight"
    whole = write_gguf(tmp_path / "cut.gguf", tiny_model()).read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf: truncated, damaged, or no GGUF file"):
            pod.load(tmp_path / "cut.gguf")
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf"):
        pod.load(tmp_path / "gone.gguf")
    monkeypatch.setattr("pod.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs gguf: pip install 'pod-attention\[gguf\]'"):
        pod.load(write_gguf(tmp_path / "model.gguf", tiny_model()))


def test_an_untied_head_has_its_own_weights(tmp_path):
    model = tiny_model("qwen2")
    folder = gguf.local(write_gguf(tmp_path / "model.gguf", model))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not loaded.config.tie_word_embeddings and torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages[0]['content'] }}"
