"""`vllm serve` on the loopback under load: 200 requests, aborts among them, a pool that is too small for them."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engines import needs_vllm, prompts
from test_server import with_tokenizer

pytestmark = needs_vllm
REQUESTS, DIFFERENT, AT_ONCE = 200, 40, 24


@contextmanager
def vllm_serve(path: Path, *options: str):
    """The address of a server of its own process, whose requests see chunks of 64 tokens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).parent / "vllm"
    command = [program, "serve", str(path), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "16"]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = path / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(400):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def asked(address: str, path: Path, prompt: list[int], count: int, leaves: bool = False) -> str | None:
    """The greedy answer to a prompt of tokens; one who leaves hangs up at its first tokens."""
    body = {
        "model": str(path),
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": leaves,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        if leaves:
            answer.readline()
            return None
        answered = json.loads(answer.read())
    assert answered["usage"]["completion_tokens"] == count
    return answered["choices"][0]["text"]


def metric(address: str, name: str) -> float:
    """vLLM's own counter."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        found = re.findall(rf"^vllm:{name}(?:{{.*}})? ([\d.e+-]+)$", page.read().decode(), re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def test_under_load_all_answers_are_those_without_load_and_no_block_is_lost(tmp_path):
    path, random_ = with_tokenizer(tmp_path), random.Random(0)
    different = list(
        zip(
            prompts([random_.randint(1, 300) for _ in range(DIFFERENT)]),
            [random_.randint(8, 64) for _ in range(DIFFERENT)],
            strict=True,
        )
    )
    with vllm_serve(path, "--num-gpu-blocks-override", "80") as address:
        alone = [asked(address, path, *one) for one in different]
        assert metric(address, "num_preemptions_total") == 0
        assert len(set(alone)) == DIFFERENT
        order = [(random_.randrange(DIFFERENT), random_.random() < 0.2) for _ in range(REQUESTS)]
        assert sum(leaves for _, leaves in order) > 20
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda one: asked(address, path, *different[one[0]], leaves=one[1]), order))
        for answer, (number, leaves) in zip(answers, order, strict=True):
            assert leaves or answer == alone[number]
        for _ in range(60):  # who left is noticed a little later
            if metric(address, "num_requests_running") + metric(address, "num_requests_waiting") == 0:
                break
            time.sleep(0.5)
        assert metric(address, "num_preemptions_total") > 0
        assert metric(address, "kv_cache_usage_perc") == 0
        # Every block can be had again: a request that takes nearly half of them is answered.
        longest = prompts((440,), seed=3)[0]
        asked(address, path, longest, 60)
