"""`pod serve` on the loopback, asked by urllib and by the `openai` client, against the library's `generate`."""

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from engines import MIXED, VOCAB, saved
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import pod
from pod import eviction
from pod.serve import main

needs_server = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("accelerate", "fastapi", "openai", "uvicorn")),
    reason="transformers' server is not installed: pip install 'pod-attention[serve]', or make test-vllm",
)
WORDS = " ".join(f"w{number % 90 + 2}" for number in range(0, 7 * 120, 7))
COUNT = 12


def with_tokenizer(folder):
    """A PoD model that can chat: words are tokens."""
    words = {"<unk>": 0, "<pad>": 1} | {f"w{number}": number for number in range(2, VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return saved(folder)


@contextmanager
def serving(path, *options: str):
    """The address of a server of its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pod.serve", "--ckpt", str(path), "--host", "127.0.0.1", "--port", str(port)]
    said = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop the server when it is full
    process = subprocess.Popen([*command, *options], stdout=said, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    said.seek(0)
                    pytest.fail(said.read())
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(30)
        said.close()


def asked(path, **fields) -> dict:
    message = {"role": "user", "content": WORDS}
    return {"model": str(path), "messages": [message], "max_tokens": COUNT, "temperature": 0} | fields


def posted(address: str, body: dict) -> str:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def expected(path, **options) -> str:
    model, tokenizer = pod.load(path).eval(), AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer(WORDS).input_ids])
    cache = pod.PodCache(model.config, **options)
    new = model.generate(ids, max_new_tokens=COUNT, do_sample=False, past_key_values=cache)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def streamed(text: str) -> str:
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.mark.slow
@needs_server
def test_a_chat_is_answered_whole_and_streamed(tmp_path):
    path = with_tokenizer(tmp_path)
    wanted = expected(path)
    with serving(path) as address:
        answer = json.loads(posted(address, asked(path)))
        assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["usage"]["completion_tokens"] == COUNT
        assert streamed(posted(address, asked(path, stream=True))) == wanted
        with pytest.raises(urllib.error.HTTPError, match="400"):
            posted(address, asked("another"))

        from openai import OpenAI

        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == [str(path)]
        assert client.chat.completions.create(**asked(path)).choices[0].message.content == wanted
        parts = client.chat.completions.create(**asked(path, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted


@pytest.mark.slow
@needs_server
def test_requests_at_once_are_answered_one_after_the_other(tmp_path):
    """With eviction: each has a cache of its own."""
    path = with_tokenizer(tmp_path)
    method = eviction.parse("snapkv:budget=48,window=8")
    wanted = expected(path, eviction=method)
    assert wanted != expected(path)  # the method does something
    from concurrent.futures import ThreadPoolExecutor

    with serving(path, "--eviction", "snapkv:budget=48,window=8") as address, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: json.loads(posted(address, asked(path))), range(4)))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [wanted] * 4


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize(
    ("option", "cache"),
    [
        (("--quantization-bits", "4"), {"quantization": pod.Quantization(bits=4)}),
        (("--tau", "0.3"), {"tau": 0.3}),
    ],
    ids=["quantization", "tau"],
)
def test_the_cache_is_the_one_that_was_asked_for(option, cache, tmp_path):
    path = with_tokenizer(tmp_path)
    wanted = expected(path, **cache)
    with serving(path, *option) as address:
        assert json.loads(posted(address, asked(path)))["choices"][0]["message"]["content"] == wanted


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--eviction", "snapkv:budget=48,query_aware=false"), "query_aware=false evicts before the question is read"),
        (("--tau", "2"), "tau"),
        (("--eviction", "snapkv:budget=33,window=32"), "budget"),
    ],
    ids=["query_aware", "tau", "budget"],
)
def test_what_no_request_could_use_is_refused_at_the_start(options, says, tmp_path, capsys):
    path = saved(tmp_path)
    assert main(["--ckpt", str(path), *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@needs_server
def test_a_stock_model_is_left_to_transformers(tmp_path, capsys):
    from engines import tiny

    tiny().save_pretrained(tmp_path)
    assert main(["--ckpt", str(tmp_path)]) == 2
    assert f"`transformers serve {tmp_path}` serves it" in capsys.readouterr().err


@needs_server
def test_an_adapter_is_no_whole_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "blocks.json").touch()
    assert main(["--ckpt", str(tmp_path)]) == 2
    assert f"write one with `python -m pod.export --ckpt {tmp_path} --out DIR`" in capsys.readouterr().err


def test_what_is_missing_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert main(["--ckpt", str(saved(tmp_path, anchors=MIXED))]) == 2
    error = capsys.readouterr().err
    assert "uvicorn" in error and "pip install 'pod-attention[serve]'" in error


def test_another_version_of_vllm_is_refused_when_a_model_is_loaded(tmp_path):
    """In a process of its own, as transformers keeps what is registered."""
    path = saved(tmp_path)
    script = (
        "from pod.serving import plugin; plugin._vllm_version = lambda: '0.33.1'; plugin.register(); "
        f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: PoD models are served by vLLM 0.32, and this is vLLM 0.33.1: pip install" in done.stderr
