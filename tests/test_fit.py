"""Training on one process, end to end: fit, kill and resume, export, generate."""

import csv
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline

import pod
from pod.analyze import analyze
from pod.analyze import main as analyze_main
from pod.blocks import LayerBlocks
from pod.data.prepared import PreparedDataset
from pod.data.sample_writer import SampleWriter
from pod.export import export, load_checkpoint, rebuild
from pod.fit import main
from pod.model_card import card_metadata, measured
from pod.recipe.loading import load_recipe
from pod.recipe.schema import RecipeError
from pod.terminal import NOISE, Stopped
from pod.training import run as training_run
from pod.training.checkpoints import is_whole, last_checkpoint
from pod.training.data import PodDataModule
from pod.training.module import PodModule
from pod.training.run import StepsBar, has_wandb_key, loggers

fit = partial(training_run.fit, analyze=analyze)

ROOT = Path(__file__).parent.parent
CONFIG = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Of every model card.
METADATA = {"library_name": "pod-attention", "pipeline_tag": "text-generation"}
METADATA |= {"tags": ["pod", "kv-cache", "long-context"]}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "prepared"
    command = [sys.executable, str(ROOT / "data" / "demo_corpus.py"), "--out", str(out), "--length", "128"]
    command += ["--samples", "400", "--validation-samples", "16", "--seed", "0"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return out


def recipe_file(folder: Path, prepared: Path, base: Path | None = None) -> Path:
    """A run of 10 steps of 2 x 4 samples, checkpoints every 2 steps."""
    model = {"tokenizer": "bytes", "sink_size": 2, "recent_size": 14}
    model |= {"base": str(base)} if base else {"config": CONFIG}
    recipe = {
        "name": "trial",
        "description": "A run of a test",
        "output": str(folder / "run"),
        "model": model,
        "blocks": {"kv_saving": 0.25 if base else 0.0, "samples": 4},
        "data": {"path": str(prepared), "sequence_length": 128, "micro_batch_size": 4},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "trainer": {"max_steps": 10, "tokens_per_batch": 1024, "validate_every": 5, "validation_batches": 2}
        | {"checkpoint_every": 2, "keep_checkpoints": 3, "accelerator": "cpu"},
    }
    path = folder / "trial.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def losses(run: Path, name: str = "train_loss") -> dict[int, float]:
    """The loss of each step, later processes' over earlier ones'."""
    found = {}
    for file in sorted(run.glob("logs/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime):
        for row in csv.DictReader(file.open()):
            if row.get(name):
                found[int(row["step"])] = float(row[name])
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prepared):
    folder = tmp_path_factory.mktemp("trained")
    fit(load_recipe([f"recipe={recipe_file(folder, prepared)}"]))
    return folder / "run"


def test_fit_writes_what_it_says(trained):
    assert (trained / "recipe.yaml").exists()
    assert last_checkpoint(trained / "steps").name == "step=10.ckpt"
    assert len(list((trained / "best").glob("*.ckpt"))) == 1
    rows = list(csv.DictReader((trained / "logs" / "version_0" / "metrics.csv").open()))
    logged = ("train_loss", "lr", "grad_norm", "tokens_per_second", "val_loss", "val_bits_per_byte", "val_passkey")
    for column in (*logged, "gate/layer_0", "gate/layer_2"):
        assert any(row[column] for row in rows), column
    text = (trained / "summary.md").read_text()
    assert text.startswith("# ") and ": 10 steps" in text and "| validation loss" in text
    assert (trained / "summary.png").stat().st_size > 10_000


def test_the_device_is_asked_for_numbers_at_logged_steps_only(prepared, tmp_path, monkeypatch):
    """Numbers of the host stay on the host; the speed is that of all steps since the line before."""
    logged, shown, log, metrics = [], [], PodModule.log, StepsBar.get_metrics
    monkeypatch.setattr(
        PodModule, "log", lambda self, name, value, **rest: (logged.append(value), log(self, name, value, **rest))
    )
    monkeypatch.setattr(
        StepsBar,
        "get_metrics",
        lambda self, trainer, module: shown.append(trainer.global_step) or metrics(self, trainer, module),
    )
    ticks = itertools.count()
    monkeypatch.setattr("pod.training.module.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    changes = ["trainer.max_steps=5", "trainer.log_every=2", "trainer.validate_every=100"]
    fit(load_recipe([f"recipe={recipe_file(tmp_path, prepared)}", *changes]))
    assert logged and all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in logged)
    assert shown[:2] == [2, 4] and set(shown[2:]) <= {5}  # the rest is Lightning's, at the end of an epoch
    rows = csv.DictReader((tmp_path / "run" / "logs" / "version_0" / "metrics.csv").open())
    speeds = {int(row["step"]): float(row["tokens_per_second"]) for row in rows if row["tokens_per_second"]}
    assert speeds == {1: 2 * 1024, 3: 2 * 1024}  # the clock ticks once a line


def test_the_state_of_a_gpus_random_numbers_is_kept(monkeypatch):
    """Dropout on a GPU draws from the GPU's own generator. A run on the CPU asks for none."""
    module = PodModule({"config": CONFIG, "tokenizer": "bytes"}, {"max_steps": 1, "tokens_per_batch": 32})
    state, given = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *arguments: given.append(arguments))
    saved = {}
    for name in ("cpu", "cuda:1"):
        strategy = SimpleNamespace(root_device=torch.device(name), sequence_group=None)
        module._trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1)
        saved[name] = {}
        module.on_save_checkpoint(saved[name])
        rest = {key: value for key, value in saved[name].items() if key != "accumulate"}
        module.on_load_checkpoint(rest)
    assert "cuda_rng_state" not in saved["cpu"]
    assert [(*map(str, where), torch.equal(what, state)) for what, *where in given] == [("cuda:1", True)]
    # What a GPU wrote, a CPU goes on from; and the other way round.
    module.on_load_checkpoint({"rng_state": saved["cpu"]["rng_state"]})
    module._trainer.strategy.root_device = torch.device("cpu")
    module.on_load_checkpoint({name: saved["cuda:1"][name] for name in ("rng_state", "cuda_rng_state")})
    assert len(given) == 1


def test_a_step_of_more_micro_batches_is_resumed(prepared, tmp_path):
    """As when fewer processes go on: Lightning's counts of micro-batches must be those of the new run."""
    path = recipe_file(tmp_path, prepared)
    short = [f"recipe={path}", "trainer.max_steps=4", "trainer.checkpoint_every=3", "optimizer.warmup_steps=0"]
    fit(load_recipe([*short, "data.micro_batch_size=8"]))
    whole = load_checkpoint(tmp_path / "run")[0]["state_dict"]
    whole = {name: weight.clone() for name, weight in whole.items()}
    (tmp_path / "run" / "steps" / "step=4.ckpt").unlink()
    fit(load_recipe([*short, "data.micro_batch_size=1", "resume=auto"]))
    content, file = load_checkpoint(tmp_path / "run")
    assert file.name == "step=4.ckpt"
    for name, weight in content["state_dict"].items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """10 samples, of which an epoch takes two steps of 4."""
    path = tmp_path_factory.mktemp("few") / "prepared"
    tokens = np.random.default_rng(0).integers(3, 259, (10, 32))
    with SampleWriter(path, sequence_length=32, vocab_size=259, tokenizer="bytes") as writer:
        writer.add("train", tokens)
        writer.add("validation", tokens[:1])
    return path


def by_steps(folder: Path, few: Path, *changes: str) -> list[str]:
    """A run of 5 steps of 4 x 1 samples: it ends in the third epoch. Every step has a checkpoint."""
    line = [f"recipe={recipe_file(folder, few)}", "data.sequence_length=32", "data.micro_batch_size=1"]
    line += ["trainer.tokens_per_batch=128", "trainer.max_steps=5", "trainer.checkpoint_every=1"]
    line += ["trainer.keep_checkpoints=9", "trainer.validate_every=3", "optimizer.lr=1e-2", "optimizer.warmup_steps=0"]
    return [*line, *changes]


@pytest.fixture(scope="module")
def epochs(few, tmp_path_factory):
    """`by_steps`, uninterrupted, and how many micro-batches it trained on in each step."""
    folder = tmp_path_factory.mktemp("epochs")
    counts: Counter[int] = Counter()

    def counted(module, batch, index, step=PodModule.training_step):
        counts[module.trainer.global_step] += 1
        return step(module, batch, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PodModule, "training_step", counted)
        fit(load_recipe(by_steps(folder, few)))
    return folder / "run", counts


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    content = torch.load(run / "steps" / f"step={step}.ckpt", weights_only=True)
    return content["state_dict"]


def test_every_epoch_ends_with_a_whole_step(few, epochs):
    """The weights are those of plain torch, which knows no epochs: 4 samples a step, of a permutation for two steps."""
    run, counts = epochs
    assert counts == dict.fromkeys(range(5), 4)
    assert sorted(path.name for path in (run / "steps").iterdir()) == [f"step={n}.ckpt" for n in range(1, 6)]
    lightning.seed_everything(0, verbose=False)
    recipe = load_recipe([f"recipe={run / 'recipe.yaml'}"])
    module = PodModule(recipe.model, recipe.trainer, recipe.optimizer)
    module.configure_model()
    samples = PreparedDataset(few)
    chosen = module.configure_optimizers()
    optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    for step in range(5):
        order = np.random.default_rng((0, step // 2)).permutation(10)[step % 2 * 4 :][:4]
        optimizer.zero_grad()
        for index in order.tolist():
            item = {name: value[None] for name, value in samples[index].items()}
            total, count = module.loss(item, module.hidden_states(item))
            (total / count / 4).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for name, weight in weights_of(run, step + 1).items():
            torch.testing.assert_close(weight, module.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_run_resumes_in_and_between_epochs(few, epochs, tmp_path, step):
    run, _ = epochs
    (tmp_path / "run" / "steps").mkdir(parents=True)
    shutil.copy(run / "steps" / f"step={step}.ckpt", tmp_path / "run" / "steps")
    fit(load_recipe(by_steps(tmp_path, few, "resume=auto")))
    wanted = losses(run)
    assert losses(tmp_path / "run") == {at: pytest.approx(wanted[at], rel=1e-6) for at in range(step, 5)}
    for name, weight in weights_of(run, 5).items():
        torch.testing.assert_close(weights_of(tmp_path / "run", 5)[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "step,size,expected",
    [
        (1, 3, [(0, 6, 9), (1, 0, 3), (1, 3, 6), (1, 6, 9)]),
        (1, 5, [(0, 5, 10), (1, 0, 5), (1, 5, 10), (2, 0, 5)]),
        (2, 1, [(0, 8, 9), (0, 9, 10), (1, 0, 1)]),
        (2, 9, [(1, 0, 9), (2, 0, 9), (3, 0, 9)]),
    ],
)
def test_a_run_goes_on_with_steps_of_another_size(few, epochs, tmp_path, monkeypatch, step, size, expected):
    """A new step begins at the next multiple of its size; none is of fewer. Expected: epoch, first and last sample."""
    run, _ = epochs
    (tmp_path / "run" / "steps").mkdir(parents=True)
    shutil.copy(run / "steps" / f"step={step}.ckpt", tmp_path / "run" / "steps")
    seen: dict[int, list[list[int]]] = {}

    def noted(module, batch, index, training_step=PodModule.training_step):
        seen.setdefault(module.trainer.global_step, []).append(batch["input_ids"][0].tolist())
        return training_step(module, batch, index)

    monkeypatch.setattr(PodModule, "training_step", noted)
    fit(load_recipe(by_steps(tmp_path, few, "resume=auto", f"trainer.tokens_per_batch={32 * size}")))
    samples = [sample["input_ids"].tolist() for sample in PreparedDataset(few)]
    orders = [np.random.default_rng((0, epoch)).permutation(10).tolist() for epoch in range(4)]
    wanted = [[samples[index] for index in orders[epoch][first:end]] for epoch, first, end in expected]
    assert seen == dict(enumerate(wanted, start=step))


def test_a_time_limit_ends_a_run_between_two_steps(few, epochs, tmp_path, monkeypatch):
    """The time is up inside the third step; the limit is each process's own, so that the run then goes on."""
    run, _ = epochs
    late = []

    def counted(module, batch, index, step=PodModule.training_step):
        if module.trainer.fit_loop.epoch_loop.total_batch_idx == 9:
            late.append(index)
        return step(module, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(PodModule, "training_step", counted)
        patch.setattr(Timer, "time_elapsed", lambda timer, *stage: 3600.0 if late else 0.0)
        fit(load_recipe(by_steps(tmp_path, few, "trainer.time_limit=00:00:30:00", "trainer.checkpoint_every=9")))
    assert [path.name for path in (tmp_path / "run" / "steps").iterdir()] == ["step=3.ckpt"]
    fit(load_recipe(by_steps(tmp_path, few, "trainer.time_limit=00:00:30:00", "resume=auto")))
    wanted = losses(run)
    assert losses(tmp_path / "run") == {step: pytest.approx(loss, rel=1e-6) for step, loss in wanted.items()}
    for name, weight in weights_of(run, 5).items():
        torch.testing.assert_close(weights_of(tmp_path / "run", 5)[name], weight, rtol=1e-5, atol=1e-7)


def test_data_for_no_whole_step_is_refused(few, tmp_path):
    with pytest.raises(ValueError, match="prepared: 10 training samples, but one optimiser step takes 11 "):
        fit(load_recipe(by_steps(tmp_path, few, "trainer.tokens_per_batch=352")))
    assert not [name for name in vars(DataLoader) if "__old" in name]  # as Lightning leaves it after an error inside


def test_answers_are_weighed_and_scored(prepared, tmp_path):
    path = recipe_file(tmp_path, prepared)
    weighed = ["trainer.answer_weight=2.0", "trainer.max_steps=1", "trainer.validate_every=1"]
    fit(load_recipe([f"recipe={path}", *weighed]))
    (log,) = (tmp_path / "run" / "logs").glob("version_*/metrics.csv")
    rows = list(csv.DictReader(log.open()))
    module = PodModule.load_from_checkpoint(tmp_path / "run" / "steps" / "step=1.ckpt")
    saved = torch.load(tmp_path / "run" / "steps" / "step=1.ckpt", weights_only=True)["hyper_parameters"]
    assert json.loads(json.dumps(saved)) == saved and saved["trainer"]["answer_weight"] == 2.0
    assert module.sections.trainer.answer_weight == 2.0 and module.sections.model.config == CONFIG
    module.configure_model()
    module.model.load_state_dict(rebuild(load_checkpoint(tmp_path / "run")[0]).state_dict())
    right = count = 0
    validation = PreparedDataset(prepared, "validation")
    with torch.no_grad():
        for item in (validation[index] for index in range(8)):  # 2 batches of 4
            logits = module.model(item["input_ids"][None], use_cache=False).logits[0]
            for position in item["answers"].nonzero()[:, 0].tolist():
                right += int(logits[position - 1].argmax() == item["input_ids"][position])
                count += 1
    (scored,) = [float(row["val_passkey"]) for row in rows if row["val_passkey"]]
    assert count > 0 and scored == pytest.approx(right / count, abs=1e-6)

    item = PreparedDataset(prepared, "train")[0]
    batch = {key: value[None] for key, value in item.items()}
    module.log = lambda *args, **kwargs: None
    total = module.training_step(batch, 0)
    logits = module.model(batch["input_ids"], use_cache=False).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, item["input_ids"][1:], reduction="none")
    expected = losses.mean() + 2 * losses[item["answers"][1:]].mean()
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


def test_a_run_that_exists_is_not_trained_over(trained, prepared, tmp_path):
    path = recipe_file(tmp_path, prepared)
    with pytest.raises(ValueError, match="resume=auto"):
        fit(load_recipe([f"recipe={path}", f"output={trained}"]))


def started(prepared, folder, *overrides):
    """The recipe of `trained`, to be started in another folder."""
    return load_recipe([f"recipe={recipe_file(folder, prepared)}", *overrides])


@pytest.mark.parametrize(
    "override",
    [
        "model.config.hidden_size=64",
        "model.config.rms_norm_eps=1e-5",
        "model.sink_size=3",
        "model.recent_size=13",
        "model.share=window",
        "model.rope_theta=5e5",
        "optimizer.lr=2e-3",
        "optimizer.betas=[0.9, 0.99]",
        "optimizer.weight_decay=0",
        "blocks.size=3",
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_another_model_does_not_go_on_from_a_checkpoint(trained, prepared, tmp_path, override, named):
    (tmp_path / "run").symlink_to(trained)
    before = (trained / "recipe.yaml").read_bytes()
    resume = trained / "steps" / "step=10.ckpt" if named else "auto"
    with pytest.raises(RecipeError, match=rf"^{override.partition('=')[0]}[ =].* was trained with .*output=FOLDER"):
        fit(started(prepared, tmp_path, f"resume={resume}", override))
    assert (trained / "recipe.yaml").read_bytes() == before


def test_what_may_change_when_a_run_goes_on(trained, prepared, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    changed = ["trainer.max_steps=12", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=1", "data.micro_batch_size=2"]
    changed += ["data.num_workers=1", "trainer.validation_batches=1", "trainer.loss_chunk=64", "distill.weight=0"]
    changed += ["model.gradient_checkpointing=true", "optimizer.gradient_clip=0.5", "trainer.answer_weight=0.1"]
    fit(started(prepared, tmp_path, "resume=auto", *changed))
    assert last_checkpoint(tmp_path / "run" / "steps").name == "step=12.ckpt"
    rows = csv.DictReader((tmp_path / "run" / "logs" / "version_1" / "metrics.csv").open())
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    # The new cosine, from 1e-3 to 1e-4, from the first step on.
    expected = [1e-4 + 0.9e-3 * (1 + math.cos(math.pi * step / 11)) / 2 for step in (9, 10)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_blocks_that_a_run_without_checkpoints_left(trained, prepared, tmp_path, monkeypatch, capsys):
    """They serve the same recipe, and no other."""
    base = export(trained, tmp_path / "base")
    line = [f"recipe={recipe_file(tmp_path, prepared, base=base)}", "trainer.max_steps=1", "resume=auto"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lightning.Trainer.fit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        fit(load_recipe(line))
    left = LayerBlocks.load(tmp_path / "run" / "blocks.json")
    training_run.fit(load_recipe(line), analyze=lambda recipe: pytest.fail("the blocks are there"))
    shutil.rmtree(tmp_path / "run" / "steps")
    assert "analysing again" not in capsys.readouterr().err
    fit(load_recipe([*line, "blocks.kv_saving=0.33"]))
    assert "was found with another blocks.kv_saving: analysing again" in capsys.readouterr().err
    assert LayerBlocks.load(tmp_path / "run" / "blocks.json").kv_saving > left.kv_saving
    shutil.rmtree(tmp_path / "run" / "steps")
    fit(load_recipe([*line, "blocks.size=3"]))
    shutil.rmtree(tmp_path / "run" / "steps")
    fit(load_recipe(line))
    assert "was found with another blocks.size: analysing again" in capsys.readouterr().err
    assert LayerBlocks.load(tmp_path / "run" / "blocks.json") == left


def test_going_back_needs_another_folder(trained, prepared, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    earlier = f"resume={tmp_path}/run/steps/step=8.ckpt"
    with pytest.raises(ValueError, match="run/steps holds step=10.ckpt too, .* with another output=FOLDER"):
        fit(started(prepared, tmp_path, earlier, "trainer.max_steps=9"))
    best = next((tmp_path / "run" / "best").glob("*.ckpt")).rename(tmp_path / "run" / "best" / "step=6.ckpt")
    with pytest.raises(ValueError, match="run/steps holds step=10.ckpt too, .* go on from step 6 with another output"):
        fit(started(prepared, tmp_path, f"resume={best}", "trainer.max_steps=9"))
    renamed = (tmp_path / "run" / "steps" / "step=8.ckpt").rename(tmp_path / "kept.ckpt")
    earlier = f"resume={renamed}"
    fit(started(prepared, tmp_path, earlier, "trainer.max_steps=9", f"output={tmp_path}/other"))
    assert last_checkpoint(tmp_path / "other" / "steps").name == "step=9.ckpt"


def test_bfloat16_throughout_rounds_neither_rope_nor_means(prepared, tmp_path):
    recipe = started(
        prepared, tmp_path, "trainer.precision=bf16-true", "trainer.max_steps=1", "trainer.validate_every=1"
    )
    module = fit(recipe).lightning_module
    assert module.model.lm_head.weight.dtype == torch.bfloat16
    frequencies = module.model.model.rotary_emb.inv_freq
    assert torch.equal(frequencies, 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    for metric in (module.validation_loss, *module.validation_gates):
        metric.update(torch.tensor(2.4))
        assert metric.compute().dtype == torch.float32 and metric.compute() == torch.tensor(2.4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("is_able", [False, True])
def test_half_precision_that_the_processor_has_not_is_warned_of(
    prepared, tmp_path, monkeypatch, capsys, precision, is_able
):
    monkeypatch.setattr(training_run, "has_half_products", lambda: is_able)
    fit(started(prepared, tmp_path, f"trainer.precision={precision}", "trainer.max_steps=1"))
    warned = "bf16-mixed on a processor without bfloat16 arithmetic" in capsys.readouterr().err
    assert warned == (precision == "bf16-mixed" and not is_able)


def test_blocks_are_not_found_anew_by_other_rules(trained, prepared, tmp_path):
    """blocks.json of the run would be taken, whatever the recipe says."""
    base = export(trained, tmp_path / "base")
    line = [f"recipe={recipe_file(tmp_path, prepared, base=base)}", "trainer.max_steps=1", "trainer.validate_every=1"]
    fit(load_recipe(line))
    for override in ("blocks.kv_saving=0.1", "blocks.threshold=0.5", "blocks.method=sum", "blocks.samples=3"):
        with pytest.raises(RecipeError, match=rf"^{override.partition('=')[0]} is "):
            fit(load_recipe([*line, "resume=auto", override]))
    with pytest.raises(RecipeError, match="^blocks.kv_saving is 0.0"):
        fit(load_recipe([*line, "resume=auto", "blocks.kv_saving=0"]))
    shutil.copytree(base, tmp_path / "other")
    with pytest.raises(RecipeError, match="^model.base is .*other, and "):
        fit(load_recipe([*line, "resume=auto", f"model.base={tmp_path}/other"]))
    changed = LlamaConfig.from_pretrained(base, intermediate_size=56)
    LlamaForCausalLM(changed).save_pretrained(base)
    (base / "SHA256SUMS").unlink()
    with pytest.raises(
        ValueError, match="step=1.ckpt does not fit the model: what is at model.base=.*base has changed"
    ):
        fit(load_recipe([*line, "resume=auto"]))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["trainer.accelerator=mps"], "trainer.accelerator=mps: torch finds no such device on this machine"),
        (["trainer.accelerator=fpga"], "trainer.accelerator=fpga: must be one of auto, cpu, cuda, gpu, mps, tpu"),
        (["trainer.devices=1000", "trainer.tokens_per_batch=512000"], "trainer.devices=1000: the CPU's "),
        (["logger=tensorboard"], "logger=tensorboard needs the package tensorboard: pip install tensorboard"),
        (["model.config.hidden_act=foo"], "model.config.hidden_act=foo: transformers has no such activation"),
        (["model.config.hidden_size=33"], "model.config: hidden_size=33"),
        (["model.config.hidden_size=abc"], "model.config: hidden_size='abc'"),
        (["model.config.hidden_size=0"], "model.config.hidden_size=0: wanted at least 1"),
        (["model.config.hiden_size=32"], "model.config.hiden_size: a config of llama has no such field. Did you mean"),
        (["model.config.zzz=32"], "model.config.zzz: a config of llama has no such field. Its fields are "),
        (["model.config.rope_parameters={rope_type: foo}"], "model.config.rope_parameters.rope_type=foo: must be one"),
        (["model.config.rope_parameters={rope_type: yarn}"], "model.config: no llama can be made of it"),
        (["model.config.rope_theta=x"], "model.config.rope_parameters.rope_theta='x': wanted a positive number"),
        (["model.config.model_type=foo"], "model.config.model_type=foo: the supported families are llama, mistral, "),
    ],
)
def test_ordinary_mistakes_end_with_one_line(prepared, tmp_path, overrides, message, capsys, monkeypatch):
    for name in ("tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([f"recipe={recipe_file(tmp_path, prepared)}", *overrides]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert line.startswith(f"error: {message}") and len(line) < 900
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there(prepared, tmp_path, capsys, monkeypatch):
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", lambda: False)
    assert main([f"recipe={recipe_file(tmp_path, prepared)}", "trainer.accelerator=gpu"]) == 2
    assert "error: trainer.accelerator=gpu: torch finds no such device" in capsys.readouterr().err


def test_wandb_is_offline_without_a_key(prepared, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine example.org login user password p\n")
    assert not has_wandb_key()
    if find_spec("wandb"):
        _, logger = loggers(started(prepared, tmp_path, "logger=wandb"), tmp_path)
        logger.log_metrics({"loss": 1.0})  # begins a session, which would ask for a key
        assert logger.experiment.settings.mode in ("offline", "dryrun")
        logger.experiment.finish()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password p\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "p")
    assert has_wandb_key()


def test_a_run_whose_checkpoints_are_all_damaged_says_what_to_do(tmp_path, capsys):
    steps = tmp_path / "steps"
    steps.mkdir()
    for step in (2, 4):
        (steps / f"step={step}.ckpt").write_bytes(b"PK")
    with pytest.raises(ValueError, match="all 2 of .*steps are truncated or damaged. Train again .* resume=auto"):
        load_checkpoint(tmp_path)
    assert "step=4.ckpt" in capsys.readouterr().err
    shutil.rmtree(steps)
    with pytest.raises(ValueError, match="is it the folder of a pod.fit run"):
        load_checkpoint(tmp_path)


def test_truncated_checkpoint_is_named_and_the_one_before_taken(trained, tmp_path, capsys):
    for step in (8, 10):
        (tmp_path / f"step={step}.ckpt").write_bytes((trained / "steps" / f"step={step}.ckpt").read_bytes())
    whole = (tmp_path / "step=10.ckpt").read_bytes()
    (tmp_path / "step=10.ckpt").write_bytes(whole[: len(whole) // 2])
    assert last_checkpoint(tmp_path).name == "step=8.ckpt"
    assert "step=10.ckpt is truncated" in capsys.readouterr().err
    with zipfile.ZipFile(trained / "steps" / "step=10.ckpt") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        record = archive.read(largest)
    flipped = bytearray(whole)
    flipped[whole.index(record) + len(record) // 2] ^= 1  # not one of the bytes that only pad
    (tmp_path / "step=10.ckpt").write_bytes(flipped)
    assert not is_whole(tmp_path / "step=10.ckpt")


def test_analysing_refuses_a_runs_folder_and_data_of_another_length(trained, prepared, tmp_path, capsys):
    line = [f"recipe={recipe_file(tmp_path, prepared, base=export(trained, tmp_path / 'base'))}"]
    assert analyze_main([*line, f"output={trained}"]) == 2
    assert f"{trained} holds a run" in capsys.readouterr().err and not (trained / "blocks.json").exists()
    assert analyze_main([*line, "data.sequence_length=64", "trainer.tokens_per_batch=512"]) == 2
    assert "was prepared with 128: set sequence_length=128" in capsys.readouterr().err
    assert analyze_main(line) == 0
    assert "attention similarity: 100%" in capsys.readouterr().err
    assert (tmp_path / "run" / "blocks.json").exists()


def test_a_missing_data_path_is_said_before_an_earlier_run(trained, prepared, tmp_path, capsys):
    line = [f"recipe={recipe_file(tmp_path, prepared)}", f"output={trained}", "data.path=nowhere"]
    assert main(line) == 2
    assert "no prepared data at nowhere" in capsys.readouterr().err


def test_fit_ends_with_what_is_next(prepared, tmp_path, capsys, caplog, recwarn):
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / "note.txt").write_text("not empty")
    keys = ["trainer.max_steps=1", "trainer.validate_every=1", "trainer.validation_batches=1"]
    assert main([f"recipe={recipe_file(tmp_path, prepared)}", *keys]) == 0
    run = tmp_path / "run"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"written: {run}; next: python -m pod.export --ckpt {run} --out exports/run"
    assert not [one for one in recwarn for noise in NOISE if re.match(noise, str(one.message))]
    assert not re.search("litlogger|limit_val_batches|weights_only", caplog.text) and "max_steps=1" in caplog.text


def test_torchs_initialization_has_embeddings_of_unit_variance():
    torch.manual_seed(0)
    model = {"config": CONFIG | {"tie_word_embeddings": False}, "tokenizer": "bytes", "initialization": "torch"}
    module = PodModule(model, {"max_steps": 1, "tokens_per_batch": 32})
    module.configure_model()
    weights = dict(module.model.named_parameters())
    assert 0.9 < float(weights["model.embed_tokens.weight"].std()) < 1.1
    bound = 32**-0.5
    for name in ("lm_head.weight", "model.layers.2.self_attn.q_proj.weight"):
        assert bound * 0.9 < float(weights[name].abs().max()) <= bound
    assert bool((weights["model.norm.weight"] == 1).all())


@pytest.mark.parametrize("how", ["killed", pytest.param("terminated", marks=pytest.mark.slow)])
def test_a_validation_that_a_run_was_stopped_before_comes_first(few, tmp_path, monkeypatch, how):
    """A step's checkpoint is written before its validation: without it `best/` would be another."""
    often = ["trainer.validate_every=1", "trainer.checkpoint_every=1", "resume=auto"]
    runs = [tmp_path / name / "run" for name in ("whole", "stopped")]
    for run in runs:
        run.parent.mkdir()
    lines = [by_steps(run.parent, few, *often) for run in runs]
    fit(load_recipe(lines[0]))

    def killed(module, *arguments, whole=PodModule.validation_step):
        if module.trainer.global_step == 2:
            raise OSError("the machine is gone")
        whole(module, *arguments)

    def terminated(module, *arguments):
        if module.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        if how == "killed":
            patch.setattr(PodModule, "validation_step", killed)
        else:
            patch.setattr(PodModule, "on_before_zero_grad", terminated)
        with pytest.raises(OSError if how == "killed" else Stopped):
            fit(load_recipe(lines[1]))
    stopped_at = int(last_checkpoint(runs[1] / "steps").stem.removeprefix("step="))
    assert stopped_at - 1 not in losses(runs[1], "val_loss")
    fit(load_recipe(lines[1]))
    whole = losses(runs[0], "val_loss")
    assert losses(runs[1], "val_loss") == whole and len(whole) == 5
    assert losses(runs[1]).items() <= losses(runs[0]).items()  # that of the last step may be gone
    states = []
    for run in runs:
        callbacks = torch.load(run / "steps" / "step=5.ckpt", weights_only=True)["callbacks"]
        (state,) = (state for name, state in callbacks.items() if "val_loss" in name)
        states.append((state["best_model_score"], Path(state["best_model_path"]).name))
        states[-1] += tuple(path.name for path in (run / "best").iterdir())
    assert states[0] == states[1]


@pytest.mark.slow
def test_killed_and_resumed_run_has_the_losses_of_an_uninterrupted_one(trained, prepared, tmp_path):
    path = recipe_file(tmp_path, prepared)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "pod.fit", f"recipe={path}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 240
    while not list(run.glob("steps/step=[4-9].ckpt")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert not (run / "steps" / "step=10.ckpt").exists()
    done = subprocess.run([*command, "resume=auto"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "continuing from" in done.stdout
    wanted, got = losses(trained), losses(run)
    assert max(got) == max(wanted) == 9
    resumed = {step: got[step] for step in range(8, 10)}
    assert resumed == {step: pytest.approx(wanted[step], rel=1e-6) for step in resumed}
    ours, theirs = (load_checkpoint(folder)[0]["state_dict"] for folder in (run, trained))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_from_which_the_run_continues(trained, prepared, tmp_path):
    path = recipe_file(tmp_path, prepared)
    run = tmp_path / "run"
    # No checkpoint of its own: what is there afterwards is what SIGTERM wrote.
    command = [sys.executable, "-m", "pod.fit", f"recipe={path}", "trainer.checkpoint_every=1000"]
    command += ["trainer.log_every=1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.time() + 240
    # The best checkpoint is written at the first validation, after step 5: training is under way then.
    while not list(run.glob("best/*.ckpt")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    written = last_checkpoint(run / "steps")
    assert written is not None and written.stem != "step=10"
    step = written.stem.removeprefix("step=")
    assert out.splitlines()[-1].startswith(f"stopped at step {step}; go on with: python -m pod.fit recipe=")
    done = subprocess.run([*command, "resume=auto"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (load_checkpoint(folder)[0]["state_dict"] for folder in (run, trained))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


@pytest.fixture
def ctrl_c(monkeypatch):
    """A function after which the named calls of a training step, counted from 1, are each interrupted by Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored

    def at(*numbers):
        calls, step = [], PodModule.training_step

        def training_step(module, *batch):
            calls.append(None)
            if len(calls) in numbers:
                signal.raise_signal(signal.SIGINT)
            return step(module, *batch)

        monkeypatch.setattr(PodModule, "training_step", training_step)

    yield at
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_step_and_writes_a_checkpoint(trained, prepared, tmp_path, capfd, ctrl_c):
    line = [f"recipe={recipe_file(tmp_path, prepared)}", "trainer.checkpoint_every=1000"]
    ctrl_c(5)  # in the midst of the third step of 2 micro-batches
    assert main([*line, "resume=never"]) == 130
    printed = capfd.readouterr()
    again = shlex.join(line)
    assert printed.out.splitlines()[-1] == f"stopped at step 3; go on with: python -m pod.fit {again} resume=auto"
    assert "a checkpoint is written" in printed.err and "Traceback" not in printed.err
    assert [path.name for path in (tmp_path / "run" / "steps").iterdir()] == ["step=3.ckpt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main([*line, "resume=auto"]) == 0
    bar = re.split("[\r\n]", capfd.readouterr().out)
    assert [shown for shown in bar if "Epoch 0" in shown][0].startswith("Epoch 0:  30%")
    assert any(re.match(r"Epoch 0: 100%.* 10/10 ", shown) for shown in bar)
    assert not any("Epoch 0" in shown and "/?" in shown for shown in bar)
    ours, theirs = (load_checkpoint(folder)[0]["state_dict"] for folder in (tmp_path / "run", trained))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


def test_readers_outlive_the_terminals_ctrl_c(prepared, ctrl_c):
    """It reaches every process of the terminal, and the step at hand wants more samples."""
    data = PodDataModule(prepared, sequence_length=128, micro_batch_size=4, num_workers=1)
    for loader, count in ((data.train_dataloader(), 100), (data.val_dataloader(), 4)):
        others = set(multiprocessing.active_children())  # of other tests' loaders
        batches = iter(loader)
        read = [next(batches)]
        (reader,) = set(multiprocessing.active_children()) - others
        os.kill(reader.pid, signal.SIGINT)
        assert len(read + list(batches)) == count


def test_a_second_ctrl_c_stops_at_once(prepared, tmp_path, capfd, ctrl_c):
    ctrl_c(5, 6)
    line = [f"recipe={recipe_file(tmp_path, prepared)}", "trainer.checkpoint_every=1000"]
    assert main(line) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "interrupted"
    assert not list((tmp_path / "run").glob("steps/*"))


def test_ctrl_c_after_the_last_step_ends_what_follows_a_run(prepared, tmp_path, ctrl_c, monkeypatch):
    ctrl_c()
    validation = PodModule.on_validation_epoch_end

    def interrupted(module):
        signal.raise_signal(signal.SIGINT)
        validation(module)

    monkeypatch.setattr(PodModule, "on_validation_epoch_end", interrupted)
    keys = ["trainer.max_steps=1", "trainer.validate_every=1"]
    with pytest.raises(KeyboardInterrupt):
        fit(load_recipe([f"recipe={recipe_file(tmp_path, prepared)}", *keys]))
    assert last_checkpoint(tmp_path / "run" / "steps").name == "step=1.ckpt"


@pytest.mark.slow
def test_export_gives_the_trained_logits_and_fit_adapts_from_it(trained, prepared, tmp_path):
    out = export(trained, tmp_path / "base")
    model = rebuild(load_checkpoint(trained)[0])
    ids = torch.arange(3, 63)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(loaded).__name__ == "LlamaForCausalLM"  # shares nothing: a plain model
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    with pytest.raises(ValueError, match="--force"):
        export(trained, tmp_path / "base")

    card = ModelCard.load(out / "README.md")
    assert card.data.to_dict() == METADATA  # from scratch: nobody's license
    assert f'from_pretrained("{out}")' in card.text and "import pod" not in card.text
    card.data.license, card.data.base_model = "apache-2.0", "someone/original"
    card.save(out / "README.md")

    fit(load_recipe([f"recipe={recipe_file(tmp_path, prepared, base=out)}", "trainer.max_steps=2"]))
    run = tmp_path / "run"
    for name in ("blocks.json", "similarity.safetensors", "similarity.png", "blocks.png"):
        assert (run / name).stat().st_size > 0
    shared = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "pod")).eval()
    assert isinstance(shared, pod.PodLlamaForCausalLM)
    assert shared.config.blocks == pod.LayerBlocks.load(run / "blocks.json")
    assert shared.config.blocks.kv_saving >= 0.25
    text = pipeline("text-generation", model=str(tmp_path / "pod"))("def main" * 8, max_new_tokens=4)
    assert text[0]["generated_text"].startswith("def main")
    card = (tmp_path / "pod" / "README.md").read_text()
    assert "import pod" in card and "layer   2:" in card
    assert ModelCard(card).data.to_dict() == METADATA | {"license": "apache-2.0", "base_model": "someone/original"}
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    command = [sys.executable, "-m", "pod.generate", "--ckpt", str(tmp_path / "pod"), "--prompt", "def main" * 8]
    done = subprocess.run([*command, "--max-new-tokens", "4"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens/s" in done.stdout and "saved" in done.stdout and "tau" not in done.stdout
    done = subprocess.run([*command, "--max-new-tokens", "4", "--tau", "0"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    skipped, decisions = re.search(r"tau 0.0: (\d+) of (\d+) decisions skipped", done.stdout).groups()
    assert skipped == decisions


def test_the_card_of_a_hub_model_names_it_and_its_license(monkeypatch):
    asked = []

    def load(name, **_):
        asked.append(name)
        if name == "gated/model":
            raise OSError("no network")
        return ModelCard("---\nlicense: other\nlicense_name: house\nlicense_link: LICENSE\ntags: [x]\n---\n# x\n")

    monkeypatch.setattr(ModelCard, "load", load)
    license = {"license": "other", "license_name": "house", "license_link": "LICENSE"}
    assert card_metadata("some/model").to_dict() == METADATA | license | {"base_model": "some/model"}
    assert card_metadata("gated/model").to_dict() == METADATA | {"base_model": "gated/model"}
    assert card_metadata(None).to_dict() == METADATA
    assert asked == ["some/model", "gated/model"]


def test_a_base_whose_card_is_broken_has_no_license(tmp_path):
    for text in ("no metadata", "---\nlicense: [\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert card_metadata(str(tmp_path)).to_dict() == METADATA


def test_cross_layer_attention_from_recipe_to_export(prepared, tmp_path):
    """Nothing is analysed: a model from scratch, whose three layers make a pair and one alone."""
    keys = ["model.share=kv", "blocks.size=2", "trainer.max_steps=2", "trainer.validate_every=2"]
    fit(load_recipe([f"recipe={recipe_file(tmp_path, prepared)}", *keys]))
    blocks = pod.LayerBlocks.load(tmp_path / "run" / "blocks.json")
    assert blocks.anchors.tolist() == [[0, 0], [0, 0], [2, 2]]
    weights = load_checkpoint(tmp_path / "run")[0]["state_dict"]
    assert weights["model.model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    out = export(tmp_path / "run", tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.share, model.config.blocks) == ("kv", blocks)
    assert model.config.kv_saving == pytest.approx(1 / 3)
    card = (out / "README.md").read_text()
    assert "kv_saving | 33.3%" in card and "cross-layer attention" in card


def test_adapters_are_resumed_and_exported(trained, prepared, tmp_path, capsys):
    """LoRA with a teacher, end to end: checkpoints hold adapters alone, a resumed run goes on as if never stopped."""
    base = export(trained, tmp_path / "base")
    path = recipe_file(tmp_path, prepared, base=base)
    LayerBlocks([[0, 0], [0, 1], [0, 1]]).save(tmp_path / "blocks.json")
    learned = [
        "lora.rank=2",
        "lora.dropout=0.3",
        "distill.weight=0.5",
        "trainer.max_steps=4",
        "trainer.validate_every=4",
    ]
    line = [f"recipe={path}", f"blocks.file={tmp_path}/blocks.json", *learned]
    fit(load_recipe(line))
    run = tmp_path / "run"
    content, file = load_checkpoint(run)
    whole = {name: weight.clone() for name, weight in content["state_dict"].items()}
    assert len(whole) == 3 * 4 * 2 and all("lora_" in name for name in whole)
    assert file.stat().st_size < (base / "model.safetensors").stat().st_size
    wanted = losses(run)
    file.unlink()
    fit(load_recipe([*line, "resume=auto"]))
    assert "continuing from" in capsys.readouterr().out
    for name, weight in load_checkpoint(run)[0]["state_dict"].items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-9)
    assert losses(run) == {step: pytest.approx(loss, rel=1e-6) for step, loss in wanted.items()}
    for key, other in (("lora.targets", "[q, k, gate, up]"), ("lora.rank", "4"), ("lora.rank", "0")):
        with pytest.raises(RecipeError, match=rf"^{key} is .*was trained with .*: continue with {key}="):
            fit(load_recipe([*line, "resume=auto", "trainer.max_steps=5", "lora.dropout=0", f"{key}={other}"]))
    LayerBlocks([[0, 0], [0, 0], [0, 0]]).save(tmp_path / "other.json")
    with pytest.raises(RecipeError, match="^blocks.file=.*other.json gives .*continue with the blocks of its run"):
        fit(load_recipe([*line, "resume=auto", f"blocks.file={tmp_path}/other.json"]))
    assert LayerBlocks.load(run / "blocks.json") == LayerBlocks.load(tmp_path / "blocks.json")

    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged")).eval()
    assert merged.config.blocks == LayerBlocks.load(tmp_path / "blocks.json")
    module = PodModule.load_from_checkpoint(run / "steps" / "step=4.ckpt")
    module.configure_model()
    assert not module.load_state_dict(whole, strict=False).unexpected_keys
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        found = merged(ids, use_cache=False).logits
        torch.testing.assert_close(found, module.model.eval()(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
        assert not torch.equal(found, pod.convert(base, merged.config.blocks, 2, 14)(ids, use_cache=False).logits)

        # The adapter alone, in half precision: added to its base again it is the same model, as far as that reaches.
        folder = export(run, tmp_path / "adapter", "float16", adapter=True)
        again = pod.load(base, folder)
        assert again.config.blocks == merged.config.blocks and again.config.sink_size == 2
        torch.testing.assert_close(again(ids, use_cache=False).logits, found, rtol=1e-3, atol=1e-4)
    card = (folder / "README.md").read_text()
    assert f'pod.load("{base}", adapter="{folder}")' in card and "| training step | 4 |" in card
    assert (folder / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size / 4
    with pytest.raises(ValueError, match="exists: choose another --out"):
        export(run, folder, adapter=True)
    export(run, folder, adapter=True, force=True)

    # Training goes on from it: a first step at a rate of 0 leaves the adapter as it was.
    further = [*line, f"lora.adapter={folder}", f"output={tmp_path / 'further'}", "optimizer.warmup_steps=1"]
    fit(load_recipe([*further, "trainer.max_steps=1"]))
    for name, weight in load_checkpoint(tmp_path / "further")[0]["state_dict"].items():
        torch.testing.assert_close(weight, whole[name])
    narrow = [*further, f"output={tmp_path / 'narrow'}", "model.recent_size=9"]
    fit(load_recipe([*narrow, "trainer.max_steps=1"]))
    assert f"lora.adapter={folder} was trained with recent_size=14, this run has 9" in capsys.readouterr().err
    folder.rename(tmp_path / "away")  # a checkpoint has the weights
    fit(load_recipe([*narrow, "trainer.max_steps=2", "resume=auto"]))
    (tmp_path / "away").rename(folder)
    with pytest.raises(ValueError, match=r"lora.alpha=8, and lora.adapter=.*was trained with 16.0: set lora.alpha"):
        fit(load_recipe([*further, "trainer.max_steps=1", "lora.alpha=8", f"output={tmp_path / 'other'}"]))
    with pytest.raises(ValueError, match=r"does not fit lora.rank and lora.targets.*has no counterpart. Set both"):
        fit(load_recipe([*further, "trainer.max_steps=1", "lora.rank=4", f"output={tmp_path / 'other'}"]))
    with pytest.raises(FileNotFoundError, match=r"lora.adapter=.*nowhere is no adapter, .*pod.export --adapter"):
        fit(load_recipe([*further, f"lora.adapter={tmp_path}/nowhere", f"output={tmp_path / 'other'}"]))
    with pytest.raises(FileNotFoundError, match=r"lora.adapter=.*nowhere is no adapter, .*pod.export --adapter"):
        keys = [f"lora.adapter={tmp_path}/nowhere", f"output={tmp_path / 'third'}", "blocks.file=null"]
        fit(
            load_recipe([*further, *keys]), analyze=lambda *_: pytest.fail("analysed before the adapter was looked for")
        )
    with pytest.raises(ValueError, match=r"trained all weights \(lora.rank is 0\): there is no adapter"):
        export(trained, tmp_path / "none", adapter=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("step", "at"), [(10, 10), (8, 5)])
def test_the_card_says_when_its_numbers_were_measured(trained, tmp_path, step, at):
    card = (export(trained / "steps" / f"step={step}.ckpt", tmp_path / "out") / "README.md").read_text()
    assert f"| training step | {step} |" in card
    (log,) = trained.glob("logs/version_*/metrics.csv")
    (loss,) = (
        float(row["val_loss"]) for row in csv.DictReader(log.open()) if row["val_loss"] and row["step"] == str(at - 1)
    )
    assert f"| val_loss, on held-out samples at step {at} | {loss:.4f} |" in card


def test_nothing_is_measured_before_the_first_validation(trained):
    assert measured(trained, 4) == ({}, 0) and measured(trained, 5)[1] == 5


def test_the_rope_base_of_a_model_from_scratch(few, tmp_path):
    """`model.rope_theta` wins over the config's, in training and in the export; a config's own is not forgotten."""
    keys = ["model.config.rope_parameters={rope_type: default, rope_theta: 5000.0}", "trainer.max_steps=1"]
    for name, rope, wanted in (("own", "null", 5000.0), ("raised", "70000", 70000.0)):
        fit(load_recipe(by_steps(tmp_path, few, *keys, f"model.rope_theta={rope}", f"output={tmp_path / name}")))
        module = PodModule.load_from_checkpoint(tmp_path / name / "steps" / "step=1.ckpt")
        module.configure_model()
        frequencies = module.model.model.rotary_emb.inv_freq
        torch.testing.assert_close(frequencies, wanted ** -(torch.arange(0, 8, 2) / 8))
        model = AutoModelForCausalLM.from_pretrained(export(tmp_path / name, tmp_path / name / "export"))
        assert model.config.rope_parameters["rope_theta"] == wanted
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    def fail(wanted, *written):
        raise OSError("no space left on device")

    monkeypatch.setattr("pod.export._verify", fail)
    with pytest.raises(OSError, match="no space"):
        export(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="does not exist"):
        export(tmp_path / "nowhere", tmp_path / "out")


def test_an_export_without_a_tokenizer_says_so(trained, tmp_path, capsys):
    export(trained, tmp_path / "whole")
    assert "warning" not in capsys.readouterr().err
    alone = tmp_path / "alone.ckpt"  # away from the run's recipe, which names the tokenizer
    shutil.copy(last_checkpoint(trained / "steps"), alone)
    out = export(alone, tmp_path / "out")
    assert "warning: no tokenizer is known" in capsys.readouterr().err
    assert not (out / "tokenizer_config.json").exists()


def test_public_names_are_loaded_when_used():
    assert pod.PodDataModule is PodDataModule
    assert pod.PodModule.__module__ == "pod.training.module"
    with pytest.raises(AttributeError, match="no attribute 'PodModul'"):
        pod.PodModul  # noqa: B018


def test_data_of_another_length_is_refused(prepared):
    with pytest.raises(ValueError, match="128"):
        data = PodDataModule(prepared, sequence_length=64, micro_batch_size=1)
        data.setup("fit")
