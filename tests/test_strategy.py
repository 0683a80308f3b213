"""Lightning, DeepSpeed ZeRO and Ulysses on 2 and 4 processes over gloo, against plain torch on one."""

import contextlib
import copy
import csv
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from strategy_worker import draw_adapters
from test_sequence_parallel import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pod
from pod.analyze import analyze
from pod.data.prepared import PreparedDataset, collate
from pod.data.sample_writer import SampleWriter
from pod.export import consolidated, rebuild
from pod.model.memory import Memory, Sharing
from pod.model.sequence_parallel import SequenceGroup
from pod.model.shape import Shape
from pod.recipe.loading import load_recipe
from pod.training.checkpoints import last_checkpoint, resume_from
from pod.training.module import PodModule
from pod.training.run import fit
from pod.training.strategy import world_size_of

ROOT = Path(__file__).parent.parent

STEPS, CLIP, LR, MIN_LR, DECAY, BETAS, MICRO = 4, 0.05, 5e-4, 1e-4, 0.1, (0.9, 0.95), 2
WINDOW = {"sink_size": 2, "recent_size": 5}
MODULE = {
    "model": WINDOW,
    "trainer": {"max_steps": STEPS, "tokens_per_batch": 1, "loss_chunk": 7},
    "optimizer": {"lr": LR, "min_lr": MIN_LR, "weight_decay": DECAY},
}
BLOCKS = [[0, 0], [0, 1], [2, 1], [2, 1]]  # the two KV heads share differently
LENGTH = 37  # odd, so no part of it is whole
# Wide enough that hidden states and anchors outweigh token ids and angles, as they do in a real model.
WIDE = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


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
    LlamaForCausalLM(LlamaConfig(**WIDE)).save_pretrained(folder / "wide")
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
            writer.add("validation", tokens[:2], None if documents is None else documents[10:12])
    return folder


def a_run(inputs, size=1, stage=3, kv_heads=2, data="packed", accumulate=2, **changes):
    blocks = BLOCKS if kv_heads == 2 else [row[1:] for row in BLOCKS]
    run = {"sequence_parallel_size": size, "stage": stage, "base": str(inputs / f"kv{kv_heads}"), "blocks": blocks}
    run |= {"data": str(inputs / data), "length": LENGTH, "accumulate": accumulate, "checkpointing": None}
    run |= {"module": {}, "offload": {}, "save": None, "resume": None}
    return run | {"backend": "reference", "precision": "32-true"} | changes


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(folder, world_size, runs):
    """Train the runs on `world_size` processes; for each run what every rank wrote."""
    spec = {"world_size": world_size, "steps": STEPS, "clip": CLIP, "module": MODULE, "micro_batch_size": MICRO}
    (folder / "spec.json").write_text(json.dumps(spec | {"runs": runs}))
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "strategy_worker.py"), str(folder / "spec.json")]
    ranks, outputs = [], []
    for rank in range(world_size):
        outputs.append(open(folder / f"rank{rank}.txt", "w+"))
        settings = environment | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        ranks.append(subprocess.Popen(command, env=settings, stdout=outputs[-1], stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output in outputs:
        output.seek(0)
    assert codes == [0] * world_size, "\n".join(output.read()[-3000:] for output in outputs)
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(world_size)] for name in runs}


def plain_loss(model, items):
    """The token mean over some samples."""
    ids = torch.stack([item["input_ids"] for item in items])
    labels = torch.stack([item["labels"] for item in items])
    documents = None
    if any("document_ids" in item for item in items):
        zeros = torch.zeros(LENGTH, dtype=torch.long)
        documents = torch.stack([item.get("document_ids", zeros) for item in items])
    logits = model(ids, document_ids=documents, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def one_process(run, seen, loaded=torch.float32, dtype=torch.float32):
    """The same training by plain torch, on whole samples: seen[step][micro][group] are sample numbers.

    In bfloat16 that is a model in it, with its gradients, beside float32 weights that AdamW steps. `loaded` is what the
    base's weights are rounded to first.
    """
    samples = PreparedDataset(run["data"])
    stock = AutoModelForCausalLM.from_pretrained(run["base"], dtype=loaded).float()
    share = run["module"].get("model", {}).get("share", "scores")
    model = pod.convert(stock, pod.LayerBlocks(run["blocks"]), sink_size=2, recent_size=5, share=share).train()
    for layer in model.model.layers:
        for unused in layer.self_attn.unused_parameters():
            unused.requires_grad_(False)
    named = trained(model)
    working = model
    if dtype != torch.float32:
        working = copy.deepcopy(model).to(dtype)
        working.model.rotary_emb = model.model.rotary_emb
    matrices = [p for name, p in named.items() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in named.items() if p.dim() == 1 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    found = {"losses": [], "norms": [], "gradients": None}
    for step, micros in enumerate(seen):
        for group in optimizer.param_groups:
            group["lr"] = MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        working.zero_grad()
        for parameter, weight in zip(working.parameters(), model.parameters(), strict=True):
            parameter.data.copy_(weight.data)
        for micro in micros:
            losses = []
            for numbers in micro:
                losses.append(plain_loss(working, [samples[number] for number in numbers]))
            loss = torch.stack(losses).mean()
            (loss / len(micros)).backward()
            found["losses"].append(loss.item())
        if working is not model:
            for weight, parameter in zip(named.values(), trained(working).values(), strict=True):
                weight.grad = parameter.grad.float()
        if found["gradients"] is None:
            found["gradients"] = {name: p.grad.clone() for name, p in named.items()}
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    found["weights"] = {name: p.detach() for name, p in named.items()}
    found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def micro_batches(run, ranks):
    """The sample numbers of each step, micro-batch and group; also checks that the groups share the samples out."""
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
    return [micros[step * count : (step + 1) * count] for step in range(STEPS)]


def losses_of(run, ranks):
    """[micro-batches] mean over the ranks, each of which knows its own tokens' part."""
    return torch.tensor([wrote["losses"] for wrote in ranks]).mean(dim=0) * run["accumulate"]


def check(run, ranks, relative=1e-5):
    """All that the ranks of a run wrote, against one process."""
    wanted = one_process(run, micro_batches(run, ranks))
    torch.testing.assert_close(losses_of(run, ranks), torch.tensor(wanted["losses"]), rtol=relative, atol=0)
    for wrote in ranks:
        torch.testing.assert_close(wrote["norms"], wanted["norms"], rtol=relative, atol=0)
        assert min(wanted["norms"]) > CLIP, "clipping acts"
        for kind in ("gradients", "weights"):
            assert wrote[kind].keys() == wanted[kind].keys()
            for name, value in wanted[kind].items():
                error = torch.linalg.norm(wrote[kind][name] - value) / torch.linalg.norm(value)
                assert error <= relative, f"{kind} of {name}: {error:.1e}"
        trained = sum(p.numel() for p in wanted["weights"].values())
        assert wrote["flops"] == 6 * trained
        assert wrote["loaded"] == (0 if run["stage"] == 3 else wanted["parameters"]), "ZeRO-3 loads sharded"


def check_noise(run, ranks):
    """In bfloat16 the ranks are no further from one process in float32 than one process in bfloat16 is.

    All begin with weights rounded to bfloat16, as DeepSpeed loads them.
    """
    seen = micro_batches(run, ranks)
    half = torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_ATTENTION_BACKEND", run["backend"])  # another one rounds elsewhere
        truth, alone = one_process(run, seen, loaded=half), one_process(run, seen, loaded=half, dtype=half)

    def apart(found, wanted):
        return float(torch.linalg.norm(torch.as_tensor(found) - torch.as_tensor(wanted)))

    def whole(weights):
        return torch.cat([weights[name].flatten() for name in sorted(truth["weights"])])

    # Of few numbers the noise itself is uncertain: losses and norms may be twice as far.
    assert apart(losses_of(run, ranks), truth["losses"]) <= 2 * apart(alone["losses"], truth["losses"])
    for wrote in ranks:
        assert wrote["rotary"].dtype == torch.float32, "bfloat16 would round RoPE's frequencies"
        assert apart(wrote["norms"], truth["norms"]) <= 2 * apart(alone["norms"], truth["norms"])
        assert wrote["gradients"].keys() == truth["gradients"].keys()
        for name, gradient in truth["gradients"].items():
            noise = apart(alone["gradients"][name], gradient)
            assert 1e-3 < noise / torch.linalg.norm(gradient) < 0.1, "bfloat16 rounds"
            assert apart(wrote["gradients"][name], gradient) <= 1.5 * noise, name
        trained = [whole(run["weights"]) for run in (wrote, alone, truth)]
        assert apart(trained[0], trained[2]) <= 1.5 * apart(trained[1], trained[2])


def one_module(run, seen):
    """The same training by `PodModule` in one process, on whole samples, as `one_process` does it by hand."""
    samples = PreparedDataset(run["data"])
    sections = MODULE | run["module"] | {"model": {"base": run["base"], **WINDOW}}
    module = PodModule(**sections, blocks=run["blocks"])
    module.log = lambda *args, **kwargs: None
    module.configure_model()
    if run["module"].get("lora"):
        draw_adapters(module.model)
    named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    chosen = module.configure_optimizers()
    optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    found = {"losses": [], "norms": [], "gradients": None}
    for micros in seen:
        optimizer.zero_grad()
        for micro in micros:
            batches = [collate([samples[number] for number in numbers]) for numbers in micro]
            loss = torch.stack([module.training_step(batch, 0) for batch in batches]).mean()
            (loss / len(micros)).backward()
            found["losses"].append(loss.item())
        if found["gradients"] is None:
            found["gradients"] = {name: p.grad.clone() for name, p in named.items()}
        found["norms"].append(float(nn.utils.clip_grad_norm_(named.values(), CLIP)))
        optimizer.step()
        schedule.step()
    return found | {"weights": {name: p.detach() for name, p in named.items()}}


@pytest.mark.slow
def test_a_teacher_and_adapters_are_sharded_too(inputs, tmp_path):
    """Distillation and LoRA, on two processes and on one; the teacher is frozen and, under ZeRO-3, in shards."""
    distill = {"distill": {"weight": 0.75, "temperature": 1.5}}
    lora = {"lora": {"rank": 2, "alpha": 4.0, "targets": ["q", "v", "down"]}}
    runs = {
        "sp2-distill": a_run(inputs, 2, checkpointing=False, module=distill),
        "dp2-distill": a_run(inputs, stage=2, module=distill),
        "sp2-lora": a_run(inputs, 2, checkpointing=False, module=lora),
        "sp2-lora-distill": a_run(inputs, 2, checkpointing=False, module=distill | lora),
        "dp2-lora-distill": a_run(inputs, module=distill | lora, accumulate=1),
        "dp2-ddp-lora": a_run(inputs, stage=0, module=distill | lora),
    }
    wrote = launch(tmp_path, 2, runs)
    for name, run in runs.items():
        leaders = [rank["seen"] for rank in wrote[name][:: run["sequence_parallel_size"]]]
        count = run["accumulate"]
        micros = [[leader[micro] for leader in leaders] for micro in range(STEPS * count)]
        wanted = one_module(run, [micros[step * count : (step + 1) * count] for step in range(STEPS)])
        adapters = sum(weight.numel() for weight in wanted["weights"].values()) if "lora" in name else 0
        for rank in wrote[name]:
            torch.testing.assert_close(rank["norms"], wanted["norms"], rtol=1e-5, atol=0)
            if run["stage"] == 3:
                assert rank["loaded"] == adapters, "everything else is loaded in shards"
            for kind in ("gradients", "weights"):
                assert rank[kind].keys() == wanted[kind].keys()
                for key, value in wanted[kind].items():
                    error = torch.linalg.norm(rank[kind][key] - value) / torch.linalg.norm(value)
                    assert error <= 2e-5, f"{name}: {kind} of {key}: {error:.1e}"
        losses = torch.tensor([rank["losses"] for rank in wrote[name]]).mean(dim=0) * count
        torch.testing.assert_close(losses, torch.tensor(wanted["losses"]), rtol=1e-5, atol=0)


def check_plan(run, ranks):
    """The bytes of each rank against the plan's."""
    plan = Memory(
        Shape.from_config(WIDE | {"model_type": "llama"}),
        Sharing.of(pod.LayerBlocks(BLOCKS)),
        length=LENGTH,
        micro_batch=MICRO,
        zero=True,
        processes=len(ranks),
        sequence_parallel=run["sequence_parallel_size"],
        loss_chunk=7,
    )
    kinds = ("parameters", "gradients", "optimizer", "checkpoints")
    for wrote in ranks:
        for kind, found in zip(kinds, wrote["bytes"], strict=True):
            assert getattr(plan, kind) == pytest.approx(found, rel=0.15), kind
        assert replace(plan, checkpointing=False).checkpoints != pytest.approx(found, rel=0.3), "this can fail"
        assert replace(plan, processes=1).optimizer != pytest.approx(wrote["bytes"][2], rel=0.3)


def check_resumed(run, ranks, resumed, processes):
    """A run that began with another one's checkpoint does what that did from there on."""
    first = run["save"][0]

    def by_step(run, ranks, skipped):
        """Each step's sample numbers, in any order, and its mean loss."""
        losses = losses_of(run, ranks).view(-1, run["accumulate"]).mean(dim=1)[skipped:]
        micros = [wrote["seen"] for wrote in ranks[:: run["sequence_parallel_size"]]]
        flat = [[number for micro in zip(*micros, strict=True) for part in micro for number in part]]
        samples = torch.tensor(flat[0]).view(len(losses) + skipped, -1)[skipped:].sort(dim=1).values
        return samples.tolist(), losses

    samples, losses = by_step(run, ranks, first)
    again = by_step(resumed, processes, 0)
    assert again[0] == samples
    torch.testing.assert_close(again[1], losses, rtol=2e-6, atol=0)
    for wrote in processes:
        torch.testing.assert_close(wrote["norms"], ranks[0]["norms"][first:], rtol=2e-6, atol=0)
        for name, value in ranks[0]["weights"].items():
            assert torch.linalg.norm(wrote["weights"][name] - value) <= 1e-5 * torch.linalg.norm(value), name


def check_consolidated(run, ranks):
    """A checkpoint's shards, of any stage, as one model: the weights that the ranks had, and the frozen ones."""
    model = rebuild(consolidated(Path(run["save"][1])))
    weights = dict(model.named_parameters())
    saved = ranks[0]["saved"]
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    base = dict(AutoModelForCausalLM.from_pretrained(run["base"]).named_parameters())
    frozen = weights.keys() - saved.keys()
    assert all(torch.equal(weights[name], base[name]) for name in frozen)
    assert bool(frozen) == (run["module"].get("model", {}).get("share") == "kv")


def check_exchange(run, ranks, heads=4, kv_heads=2, dimension=4, itemsize=4):
    """Calls and bytes by the formula of pod/model/sequence_parallel.py."""
    size, passes = run["sequence_parallel_size"], 2 + (run["checkpointing"] is not None)
    micros = STEPS * run["accumulate"]
    for wrote in ranks:
        if size == 1:
            assert wrote["calls"] == []
            continue
        assert len(wrote["calls"]) == 2 * passes * 4 * micros
        tokens = MICRO * math.ceil(LENGTH / size)
        shares_kv = run["module"].get("model", {}).get("share") == "kv"
        with_keys = 3 if shares_kv else 4  # layers: the last one of BLOCKS has no anchors
        moved = 4 * 2 * heads + with_keys * 2 * max(kv_heads, size)
        assert sum(wrote["calls"]) == tokens * dimension * itemsize * moved * passes * micros


@pytest.mark.slow
def test_two_processes_are_one(inputs, tmp_path):
    """ZeRO-3, 2 and 1 and DDP, the sequence or the samples shared by two ranks; what they wrote, read by one."""
    saved = {name: [2, str(tmp_path / f"{name}.ckpt")] for name in ("sp2-zero1", "dp2-zero2", "sp2-kv")}
    kv = {"model": {"share": "kv"}}
    runs = {
        "sp2": a_run(inputs, 2, checkpointing=False),
        "sp2-one-kv-head": a_run(inputs, 2, kv_heads=1, checkpointing=True),
        "sp2-offload": a_run(
            inputs,
            2,
            checkpointing=False,
            module={"model": {"gradient_checkpointing": True, "offload_checkpoints": True, "mlp_tiles": 3}},
            offload={"offload_optimizer": True, "offload_parameters": True},
        ),
        "sp2-composed": a_run(inputs, 2, data="plain", backend="composed", accumulate=1),
        "sp2-zero2": a_run(inputs, 2, stage=2, checkpointing=True),
        "dp2": a_run(inputs),
        "dp2-zero2": a_run(inputs, stage=2, kv_heads=1, save=saved["dp2-zero2"]),
        "sp2-zero1": a_run(inputs, 2, stage=1, save=saved["sp2-zero1"]),
        "sp2-kv": a_run(inputs, 2, module=kv, save=saved["sp2-kv"]),
        "dp2-ddp-kv": a_run(inputs, stage=0, module=kv),
        "sp2-bf16": a_run(inputs, 2, precision="bf16-mixed"),
        "dp2-bf16": a_run(inputs, 1, precision="bf16-mixed"),
    }
    wide = {"base": str(inputs / "wide"), "checkpointing": False, "bytes": True}
    runs["sp2-wide"] = a_run(inputs, 2, data="plain", **wide)
    wrote = launch(tmp_path, 2, runs)
    for name, run in runs.items():
        if name == "sp2-wide":
            check_plan(run, wrote[name])
        elif run["precision"] == "32-true":
            check(run, wrote[name])
            check_exchange(run, wrote[name], kv_heads=1 if "one-kv" in name or name == "dp2-zero2" else 2)
    check_exchange(runs["sp2-bf16"], wrote["sp2-bf16"], itemsize=2)
    for name in ("sp2-bf16", "dp2-bf16"):
        check_noise(runs[name], wrote[name])

    alone = {}
    for name in saved:
        check_consolidated(runs[name], wrote[name])
        groups = 2 // runs[name]["sequence_parallel_size"]
        alone[name] = runs[name] | {"sequence_parallel_size": 1, "accumulate": 2 * groups, "save": None}
        alone[name]["resume"] = saved[name][1]
    resumed = launch(tmp_path, 1, alone)
    for name in saved:
        check_resumed(runs[name], wrote[name], alone[name], resumed[name])


@pytest.mark.slow
def test_four_processes_are_one(inputs, tmp_path):
    """Two groups of two ranks, and one of four with fewer KV heads than ranks."""
    runs = {"dp2-sp2": a_run(inputs, 2), "sp4": a_run(inputs, 4, checkpointing=False)}
    wrote = launch(tmp_path, 4, runs)
    for name, run in runs.items():
        check(run, wrote[name])
        check_exchange(run, wrote[name])


# One process: the loss, and errors


def test_mean_of_the_ranks_losses_is_the_batchs(inputs):
    """`PodModule.loss` on threads as ranks: labels that cross the ranks' border, and a rank without any target."""
    sections = {"model": {"base": str(inputs / "kv2"), **WINDOW}, "trainer": MODULE["trainer"] | {"loss_chunk": 4}}
    module = PodModule(**sections, blocks=BLOCKS)
    module.configure_model()
    ids = torch.randint(80, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 20:] = -100  # the last rank of three has no target
    batch = {"input_ids": ids, "labels": labels, "document_ids": (torch.arange(LENGTH) >= 12).long().expand(2, -1)}
    batch["answers"] = torch.zeros_like(ids, dtype=torch.bool)
    batch["answers"][0, 9:12] = batch["answers"][1, 18:21] = True  # on both sides of the ranks' borders
    whole, count = module.loss(batch, module.hidden_states(batch))
    logits, answers, number = module.answers(batch, module.hidden_states(batch))
    assert number == 6 and answers.tolist() == ids[batch["answers"]].tolist()
    assert count == 2 * 19
    for size in (2, 4):

        def one_rank(group):
            mine = PodModule(**sections, blocks=BLOCKS)
            mine._trainer = SimpleNamespace(strategy=SimpleNamespace(sequence_group=group))
            mine.model = module.model
            states = mine.hidden_states(batch)
            return mine.loss(batch, states), mine.answers(batch, states)

        with torch.no_grad():
            results, _ = on_ranks(size, one_rank)
        assert all(counted == count for (_, counted), _ in results)
        total = sum(total for (total, _), _ in results)
        torch.testing.assert_close(total / size, whole.detach(), rtol=1e-6, atol=0)
        assert all(part[2] == number for _, part in results)
        assert sorted(torch.cat([part[1] for _, part in results]).tolist()) == sorted(answers.tolist())
        ours, theirs = torch.cat([part[0] for _, part in results]), logits.detach()
        assert all(torch.isclose(row, theirs, atol=1e-5).all(dim=1).any() for row in ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_rebuilt_model_takes_each_weight_once(inputs, dtype):
    """Of a sharded checkpoint, whose weights are put together when they are asked for."""
    module = PodModule({"base": str(inputs / "kv1"), **WINDOW}, MODULE["trainer"])
    module.configure_model()
    made, most = [], []

    class Lazy:
        def __init__(self, weight):
            self.weight = weight

        def contiguous(self):
            weight = self.weight.detach().clone()
            made.append(StorageWeakRef(weight.untyped_storage()))
            most.append(sum(not one.expired() for one in made))
            return weight

    weights = {name: Lazy(weight) for name, weight in module.state_dict().items() if name.startswith("model.")}
    model = rebuild({"state_dict": dict(weights), "hyper_parameters": dict(module.hparams)}, dtype)
    assert len(made) == len(weights)
    if dtype is None:  # nothing is copied: the model holds what was made
        held = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        assert not any(one.expired() for one in made) and len(held) == len(made)
    else:
        assert max(most) <= 2, "in another type, beside the model only the last weight and the one before"


def test_heads_are_checked_before_anything_is_loaded(inputs):
    module = PodModule({"base": str(inputs / "kv2")}, MODULE["trainer"])
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(sequence_group=SequenceGroup(3, 0, None)))
    with pytest.raises(ValueError, match="sequence_parallel_size=3 does not fit 4 query heads and 2 KV heads"):
        module.configure_model()


def test_processes_that_form_no_groups():
    with pytest.raises(ValueError, match="2 processes .* cannot form groups of sequence_parallel_size=3"):
        lightning.Trainer(accelerator="cpu", devices=2, strategy=pod.UlyssesDeepSpeedStrategy(3), logger=False)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        pod.UlyssesDeepSpeedStrategy(0)


def test_deepspeed_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ImportError, match=r"trainer.strategy=deepspeed needs deepspeed: pip install 'pod-attention\[train\]'"
    ):
        pod.UlyssesDeepSpeedStrategy(2)


@pytest.mark.slow
def test_deepspeed_is_imported_when_a_strategy_is_made():
    code = "import sys, pod.training.run, pod; pod.UlyssesDeepSpeedStrategy; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("code, requeued", [(143, True), (0, False), (1, False)])
def test_the_slurm_job_is_queued_again_only_when_it_was_told_to_end(tmp_path, code, requeued):
    for name, ends in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit {ends}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7", "PYTHON": "python"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = ["bash", str(ROOT / "docs" / "slurm.sh"), "llama31-128k", "seed=1"]
    assert subprocess.run(line, env=environment).returncode == code
    run, *after = (tmp_path / "calls").read_text().splitlines()
    arguments = run.removeprefix("srun python -m pod.fit ").split()
    recipe = load_recipe(arguments)
    assert (recipe.seed, recipe.resume, recipe.trainer.num_nodes, recipe.trainer.devices) == (1, "auto", 2, 8)
    assert after == (["scontrol requeue 7"] if requeued else [])


# The commands

CONFIG = {
    "model_type": "llama",
    "vocab_size": 80,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def recipe_file(folder, inputs, **trainer):
    """4 steps of 8 samples, a checkpoint every second one, from initial weights."""
    recipe = {
        "name": "trial",
        "description": "A run of a test",
        "output": str(folder / "run"),
        "model": {"config": CONFIG, "tokenizer": "bytes", "sink_size": 2, "recent_size": 5},
        "blocks": {"file": str(folder / "blocks.json")},
        "data": {"path": str(inputs / "packed"), "sequence_length": LENGTH, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 4, "tokens_per_batch": 8 * LENGTH, "validate_every": 4, "checkpoint_every": 2}
        | {"accelerator": "cpu", "validation_batches": 1, "keep_checkpoints": 3}
        | trainer,
    }
    pod.LayerBlocks([[0, 0], [0, 1], [2, 1]]).save(folder / "blocks.json")
    (folder / "trial.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "trial.yaml"


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
# pod.fit, all of whose processes are killed when half of a certain file of step 4 is written.
KILLED = """
import os, signal, sys, torch
from pathlib import Path
from pod.fit import main

save, write_text = torch.save, Path.write_text
moment = sys.argv[1]


def end(file):
    if file.name.endswith(moment) and "step=4.ckpt" in file.parts:
        if file.exists():
            os.truncate(file, file.stat().st_size // 2)
        os.killpg(0, signal.SIGKILL)


def killed_save(content, file, *arguments, **options):
    save(content, file, *arguments, **options)
    end(Path(str(file)))


def killed_write(path, *arguments, **options):
    end(path)
    return write_text(path, *arguments, **options)


torch.save, Path.write_text = killed_save, killed_write
sys.exit(main(sys.argv[2:]))
"""


def command(module, *arguments):
    line = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)


def logged(run, column, version="version_0"):
    rows = csv.DictReader((run / "logs" / version / "metrics.csv").open())
    return {int(row["step"]): float(row[column]) for row in rows if row.get(column)}


@pytest.mark.slow
def test_fit_resume_and_export_with_a_shared_sequence(inputs, tmp_path):
    path = recipe_file(tmp_path, inputs)
    sharded = ("trainer.strategy=deepspeed", "trainer.devices=2", "trainer.sequence_parallel_size=2")
    done = command("pod.fit", f"recipe={path}", *sharded)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sequence_parallel_size: 2") == 1, "the first process alone prints the recipe"
    run = tmp_path / "run"
    steps = run / "steps"
    assert sorted(path.name for path in steps.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    # The first loss is that of a model as transformers initialises it, near ln(80); as torch does, it would be far off.
    uninterrupted = logged(run, "train_loss")
    assert abs(uninterrupted[0] - math.log(80)) < 0.1 and sorted(uninterrupted) == [0, 1, 2, 3]
    assert len(logged(run, "grad_norm")) == 4 and len(logged(run, "val_loss")) == 1

    def resumed(*arguments):
        return resume_from(load_recipe([f"recipe={path}", *arguments, "resume=auto"]), steps)

    assert resumed("trainer.strategy=deepspeed") == steps / "step=4.ckpt"
    with pytest.raises(ValueError, match="sharded by DeepSpeed: continue with trainer.strategy=deepspeed"):
        resumed()
    shard = next((steps / "step=4.ckpt").glob("checkpoint/*_optim_states.pt"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert last_checkpoint(steps).name == "step=2.ckpt", "a truncated shard is noticed"
    shard.write_bytes(whole)

    # The exported model has the loss that was validated.
    done = command("pod.export", "--ckpt", run, "--out", tmp_path / "export")
    assert done.returncode == 0, done.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.config.blocks == pod.LayerBlocks.load(tmp_path / "blocks.json")
    wanted = plain_loss(model, [PreparedDataset(inputs / "packed", "validation")[number] for number in (0, 1)])
    assert abs(logged(run, "val_loss")[3] - wanted.item()) < 1e-5 * wanted.item()

    # Killed while step 4 is written, and continued by as many processes or by one.
    alone = ("trainer.strategy=deepspeed", "trainer.devices=1")
    for moment, processes in (("_optim_states.pt", sharded), ("complete.json", alone)):
        killed = tmp_path / moment
        (tmp_path / "killed.py").write_text(KILLED)
        line = [sys.executable, tmp_path / "killed.py", moment, f"recipe={path}", *sharded, f"output={killed}"]
        done = subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=900, start_new_session=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-3000:]
        assert len(list(killed.glob("steps/step=4.ckpt/checkpoint/*_optim_states.pt"))) > 0, "killed inside"
        assert last_checkpoint(killed / "steps").name == "step=2.ckpt", "half of a checkpoint is none"
        done = command("pod.fit", f"recipe={path}", *processes, f"output={killed}", "resume=auto")
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"continuing from {killed / 'steps' / 'step=2.ckpt'}" in done.stdout
        said = "was written by 2 processes and this run has 1: it is read by way of DeepSpeed's universal checkpoint"
        assert (said in done.stdout) == (processes is alone)
        for column in ("train_loss", "grad_norm", "val_loss"):
            wanted, again = logged(run, column), logged(killed, column, "version_1")
            assert sorted(again) == [step for step in sorted(wanted) if step >= 2]
            for step, value in again.items():
                assert abs(value - wanted[step]) <= 2e-6 * value, (moment, column, step)
        assert last_checkpoint(killed / "steps") == killed / "steps" / "step=4.ckpt", "none of the killed run's shards"
        assert [world_size_of(killed / "steps" / f"step={step}.ckpt") for step in (2, 4)] == [
            2,
            2 - (processes is alone),
        ]
        assert not list((killed / "steps" / "step=2.ckpt").glob("*universal*")), "removed when it is read"


@pytest.mark.slow
def test_lightning_and_deepspeed_agree_on_epochs_and_steps(inputs, tmp_path):
    """An epoch of 70 samples is two steps of 32: as one process without DeepSpeed, and resumed in the second epoch."""
    path = recipe_file(tmp_path, inputs, tokens_per_batch=32 * LENGTH, checkpoint_every=1, keep_checkpoints=9)
    pod.LayerBlocks(BLOCKS).save(tmp_path / "blocks.json")
    line = [f"recipe={path}", "model.config=null", f"model.base={inputs / 'kv2'}", "trainer.log_every=1"]
    fit(load_recipe([*line, f"output={tmp_path / 'plain'}"]), analyze)
    wanted = {column: logged(tmp_path / "plain", column) for column in ("train_loss", "grad_norm", "val_loss")}
    run = tmp_path / "run"
    for version, devices in enumerate((1, 1, 2)):
        if version:
            shutil.rmtree(run / "steps" / "step=4.ckpt")
        chosen = ("trainer.strategy=deepspeed", f"trainer.devices={devices}", "resume=auto")
        done = command("pod.fit", *line, *chosen)
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(path.name for path in (run / "steps").iterdir()) == [f"step={n}.ckpt" for n in range(1, 5)]
        for column in wanted:
            if column == "train_loss" and devices == 2:
                continue  # of the last micro-batch, which two processes share out otherwise
            found = logged(run, column, f"version_{version}")
            assert sorted(found) == [step for step in sorted(wanted[column]) if not version or step == 3]
            for step, value in found.items():
                assert abs(value - wanted[column][step]) <= 1e-5 * value, (version, column, step)


@pytest.mark.slow
def test_sharded_adapters_are_resumed_and_exported(inputs, tmp_path):
    """With a teacher, whose weights no checkpoint holds."""
    path = recipe_file(tmp_path, inputs)
    pod.LayerBlocks(BLOCKS).save(tmp_path / "blocks.json")
    sharded = ("trainer.strategy=deepspeed", "trainer.devices=2", "trainer.sequence_parallel_size=2")
    learned = ("model.config=null", f"model.base={inputs / 'kv2'}", "lora.rank=2", "distill.weight=0.5")
    done = command("pod.fit", f"recipe={path}", *sharded, *learned)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    shutil.rmtree(run / "steps" / "step=4.ckpt")
    done = command("pod.fit", f"recipe={path}", *sharded, *learned, "resume=auto")
    assert done.returncode == 0, done.stderr[-3000:]
    for column in ("train_loss", "train_divergence", "val_loss"):
        wanted, again = logged(run, column), logged(run, column, "version_1")
        assert sorted(again) == [step for step in sorted(wanted) if step >= 2]
        assert all(abs(value - wanted[step]) <= 2e-6 * value for step, value in again.items()), column
    done = command("pod.fit", f"recipe={path}", "trainer.strategy=deepspeed", *learned, "resume=auto")
    assert done.returncode != 0 and "is read by as many processes" in done.stderr
    done = command("pod.export", "--ckpt", run, "--out", tmp_path / "export")
    assert done.returncode == 0, done.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    wanted = plain_loss(model, [PreparedDataset(inputs / "packed", "validation")[number] for number in (0, 1)])
    assert abs(logged(run, "val_loss")[3] - wanted.item()) < 1e-5 * wanted.item()
    stock = pod.convert(str(inputs / "kv2"), model.config.blocks, sink_size=2, recent_size=5)
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, stock.get_parameter(name))]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.slow
def test_one_process_that_is_told_to_end_ends_all_with_a_checkpoint(inputs, tmp_path):
    """And of two processes the first one finds the blocks for both."""
    path = recipe_file(tmp_path, inputs, max_steps=10_000, checkpoint_every=10_000, validate_every=10_000)
    analysed = ("model.config=null", f"model.base={inputs / 'kv2'}", "blocks.file=null", "blocks.kv_saving=0.25")
    sharded = ("trainer.strategy=deepspeed", "trainer.devices=2", "trainer.sequence_parallel_size=2")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    few = ("blocks.samples=4", "blocks.last_q=4")
    line = [sys.executable, "-m", "pod.fit", f"recipe={path}", *sharded, *analysed, *few]
    with open(tmp_path / "output.txt", "w+") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        first = subprocess.Popen(line, cwd=ROOT, env=environment, **options)
        try:
            metrics, deadline = tmp_path / "run" / "logs" / "version_0" / "metrics.csv", time.time() + 600
            while first.poll() is None and time.time() < deadline and not metrics.exists():
                time.sleep(0.1)
            first.send_signal(signal.SIGTERM)
            code = first.wait(timeout=300)
            output.seek(0)
            assert code == 128 + signal.SIGTERM, output.read()[-3000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
    checkpoint = last_checkpoint(tmp_path / "run" / "steps")
    assert checkpoint is not None and world_size_of(checkpoint) == 2
    blocks = pod.LayerBlocks.load(tmp_path / "run" / "blocks.json")
    shards = sorted(checkpoint.glob("checkpoint/*_model_states.pt"))
    trained = [torch.load(shard, weights_only=False)["hyper_parameters"]["blocks"] for shard in shards]
    assert trained == [blocks.anchors.tolist()] * 2 and not blocks.is_dense
