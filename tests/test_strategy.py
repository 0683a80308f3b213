"""Lightning, DeepSpeed ZeRO and Ulysses together, on 2 and 4 processes over gloo, against one process and plain torch."""

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pod
from pod.data import SampleWriter

ROOT = Path(__file__).parent.parent
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

STEPS, CLIP, LR, MIN_LR, DECAY, BETAS, MICRO = 4, 0.05, 3e-2, 1e-2, 0.1, (0.9, 0.95), 2
MODULE = {"sink_size": 2, "recent_size": 5, "lr": LR, "min_lr": MIN_LR, "weight_decay": DECAY, "max_steps": STEPS}
BLOCKS = [[0, 0], [0, 1], [2, 1], [2, 1]]  # the two KV heads share differently
LENGTH = 37  # odd, so no part of it is whole


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two small models and two data sets: sample i begins with token i; packed documents, and one document each."""
    folder = tmp_path_factory.mktemp("inputs")
    for kv_heads in (1, 2):
        torch.manual_seed(kv_heads)
        config = LlamaConfig(
            vocab_size=80,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=4,
            initializer_range=0.25,
            tie_word_embeddings=kv_heads == 2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / f"kv{kv_heads}")
    generator = np.random.default_rng(0)
    for name in ("packed", "plain"):
        tokens = generator.integers(0, 80, (70, LENGTH))
        tokens[:, 0] = np.arange(70)
        documents = None
        if name == "packed":
            # Boundaries anywhere, in some rows one that parts two ranks, and padding of another length in each row.
            opens = generator.random((70, LENGTH)) < 0.1
            opens[:, 0] = False
            opens[::5, 19] = True
            documents = opens.cumsum(axis=1)
            documents[np.arange(LENGTH) >= LENGTH - generator.integers(0, 25, 70)[:, None]] = -1
        with SampleWriter(folder / name, sequence_length=LENGTH, vocab_size=80, tokenizer="x") as writer:
            writer.add("train", tokens, documents)
    return folder


def a_run(inputs, size=1, stage=3, kv_heads=2, data="packed", accumulate=2, **changes):
    blocks = BLOCKS if kv_heads == 2 else [row[1:] for row in BLOCKS]
    run = {"sequence_parallel_size": size, "stage": stage, "base": str(inputs / f"kv{kv_heads}"), "blocks": blocks}
    run |= {"data": str(inputs / data), "length": LENGTH, "accumulate": accumulate, "checkpointing": None}
    return run | {"backend": "reference", "precision": "32-true", "loss_chunk": 7} | changes


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(folder, world_size, runs):
    """Train the runs on `world_size` processes; for each run what every rank wrote."""
    spec = {"world_size": world_size, "steps": STEPS, "clip": CLIP, "module": MODULE, "micro_batch_size": MICRO}
    (folder / "spec.json").write_text(json.dumps(spec | {"runs": runs}))
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "strategy_worker.py"), str(folder / "spec.json")]
    ranks, outputs = [], []
    for rank in range(world_size):
        outputs.append(open(folder / f"rank{rank}.txt", "w+"))
        settings = environment | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        ranks.append(subprocess.Popen(command, env=settings, stdout=outputs[-1], stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output in outputs:
        output.seek(0)
    assert codes == [0] * world_size, "\n".join(output.read()[-3000:] for output in outputs)
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(world_size)] for name in runs}


def one_process(run, seen):
    """The same training by plain torch, on whole samples: seen[step][micro][group] are sample numbers."""
    from pod.data import PreparedDataset

    samples = PreparedDataset(run["data"])
    stock = AutoModelForCausalLM.from_pretrained(run["base"], dtype=torch.float32)
    model = pod.convert(stock, pod.LayerBlocks(run["blocks"]), sink_size=2, recent_size=5).train()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in named.items() if p.dim() == 1 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = {"losses": [], "norms": [], "gradients": None}
    for step, micros in enumerate(seen):
        for group in optimizer.param_groups:
            group["lr"] = MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.zero_grad()
        for micro in micros:
            losses = []
            for numbers in micro:
                items = [samples[number] for number in numbers]
                ids = torch.stack([item["input_ids"] for item in items])
                labels = torch.stack([item["labels"] for item in items])
                documents = None
                if any("document_ids" in item for item in items):
                    zeros = torch.zeros(LENGTH, dtype=torch.long)
                    documents = torch.stack([item.get("document_ids", zeros) for item in items])
                logits = model(ids, document_ids=documents, use_cache=False).logits
                wanted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                losses.append(wanted)
            loss = torch.stack(losses).mean()
            (loss / len(micros)).backward()
            found["losses"].append(loss.item())
        if found["gradients"] is None:
            found["gradients"] = {name: p.grad.clone() for name, p in named.items()}
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    found["weights"] = {name: p.detach() for name, p in named.items()}
    return found


def check(run, ranks, relative=1e-5):
    """All that the ranks of a run wrote, against one process."""
    size, world_size = run["sequence_parallel_size"], len(ranks)
    groups = world_size // size
    for rank, wrote in enumerate(ranks):
        assert wrote["seen"] == ranks[rank // size * size]["seen"], "ranks of a group see the same samples"
        assert wrote["groups"] == {"num_replicas": groups, "rank": rank // size}
    leaders = [wrote["seen"] for wrote in ranks[::size]]
    flat = [number for leader in leaders for micro in leader for number in micro]
    assert len(flat) == len(set(flat)), "no sample twice, in no two groups"
    count = run["accumulate"]
    micros = [[leader[micro] for leader in leaders] for micro in range(STEPS * count)]
    assert all(len(leader) == STEPS * count for leader in leaders)
    wanted = one_process(run, [micros[step * count : (step + 1) * count] for step in range(STEPS)])

    losses = torch.tensor([wrote["losses"] for wrote in ranks]).mean(dim=0) * count
    torch.testing.assert_close(losses, torch.tensor(wanted["losses"]), rtol=relative, atol=0)
    for wrote in ranks:
        torch.testing.assert_close(wrote["norms"], wanted["norms"], rtol=relative, atol=0)
        assert min(wanted["norms"]) > CLIP, "clipping acts"
        for kind in ("gradients", "weights"):
            assert wrote[kind].keys() == wanted[kind].keys()
            for name, value in wanted[kind].items():
                error = torch.linalg.norm(wrote[kind][name] - value) / torch.linalg.norm(value)
                assert error <= relative, f"{kind} of {name}: {error:.1e}"
        parameters = sum(p.numel() for p in wanted["weights"].values())
        assert wrote["flops"] == 6 * parameters
        assert wrote["loaded"] == (0 if run["stage"] == 3 else parameters), "ZeRO-3 loads sharded"


def check_exchange(run, ranks, heads=4, kv_heads=2, dimension=4, itemsize=4):
    """Calls and bytes by the formula of pod/sequence_parallel.py."""
    size, passes = run["sequence_parallel_size"], 2 + (run["checkpointing"] is not None)
    micros = STEPS * run["accumulate"]
    for wrote in ranks:
        if size == 1:
            assert wrote["calls"] == []
            continue
        assert len(wrote["calls"]) == 2 * passes * 4 * micros
        tokens = MICRO * math.ceil(LENGTH / size)
        one_pass = tokens * dimension * itemsize * (2 * heads + 2 * max(kv_heads, size))
        assert sum(wrote["calls"]) == one_pass * passes * 4 * micros


@needs_deepspeed
@pytest.mark.slow
def test_two_processes_are_one(inputs, tmp_path):
    """ZeRO-3 and ZeRO-2, the sequence or the samples shared by two ranks."""
    runs = {
        "sp2": a_run(inputs, 2, checkpointing=False),
        "sp2-one-kv-head": a_run(inputs, 2, kv_heads=1, checkpointing=True),
        "sp2-composed": a_run(inputs, 2, data="plain", backend="composed", accumulate=1),
        "sp2-zero2": a_run(inputs, 2, stage=2, checkpointing=True),
        "dp2": a_run(inputs),
        "dp2-zero2": a_run(inputs, stage=2, kv_heads=1),
        "sp2-bf16": a_run(inputs, 2, precision="bf16-mixed"),
        "dp2-bf16": a_run(inputs, 1, precision="bf16-mixed"),
    }
    wrote = launch(tmp_path, 2, runs)
    for name, run in runs.items():
        if run["precision"] == "32-true":
            check(run, wrote[name])
            check_exchange(run, wrote[name], kv_heads=1 if "one-kv" in name or name == "dp2-zero2" else 2)
    check_exchange(runs["sp2-bf16"], wrote["sp2-bf16"], itemsize=2)
    for name in ("sp2-bf16", "dp2-bf16"):
        assert wrote[name][0]["rotary"].dtype == torch.float32, "bfloat16 would round RoPE's frequencies"
        check(runs[name], wrote[name], relative=0.1)


@needs_deepspeed
@pytest.mark.slow
def test_four_processes_are_one(inputs, tmp_path):
    """Two groups of two ranks, and one of four with fewer KV heads than ranks."""
    runs = {"dp2-sp2": a_run(inputs, 2), "sp4": a_run(inputs, 4, checkpointing=False)}
    wrote = launch(tmp_path, 4, runs)
    for name, run in runs.items():
        check(run, wrote[name])
        check_exchange(run, wrote[name])
