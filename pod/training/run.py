"""One training run: the recipe's devices, data and blocks are checked, then Lightning's Trainer is made and run.

Compares the prepared data with its checksums, and has the base model analysed first when the recipe wants a saving and
names no blocks file. With several processes the first one analyses and writes; a checkpoint of DeepSpeed is a
directory, to which each process adds its shard.
"""

import contextlib
import csv
import importlib.util
import netrc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import lightning
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

from pod.blocks import LayerBlocks
from pod.data.tokenizer import check_tokenizer, check_vocabulary, load_tokenizer
from pod.extras import require
from pod.files import check_writable, locked, naming, opening, replacing
from pod.heads import streamed
from pod.model.weights import load_causal_lm
from pod.recipe.loading import save
from pod.recipe.schema import Recipe, accumulate, output_folder, steps
from pod.training.adapters import check_4_bits, read_adapter
from pod.training.base_model import first_config
from pod.training.checkpoints import (
    Checkpoints,
    SaveAtEnd,
    TimeLimit,
    WholeFiles,
    check_blocks,
    found_alike,
    resume_from,
)
from pod.training.data import PodDataModule
from pod.training.module import PodModule
from pod.training.strategy import UlyssesDeepSpeedStrategy
from pod.training.summary import Summary
from pod_kernels.segments import has_half_products


class MetricsWriter(ExperimentWriter):
    """Lightning's, whose log is rewritten as a whole when a metric comes that was not logged before."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with open(self.metrics_file_path, newline="") as file:
            rows = list(csv.DictReader(file))
        with replacing(self.metrics_file_path) as aside, open(aside, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)

    def save(self) -> None:
        with naming(self.metrics_file_path):
            super().save()


class MetricsLog(CSVLogger):
    """Lightning's log of metrics as CSV, with each row on disk at once: a kill takes none along."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="logs", flush_logs_every_n_steps=1)

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None:
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment


class StepsBar(TQDMProgressBar):
    """Lightning's, of the run's optimiser steps: its own compares an epoch's micro-batches with the steps that are
    left, and has no total in a run that goes on."""

    def init_train_tqdm(self) -> Tqdm:
        return Tqdm(
            desc=f"Epoch {self.trainer.current_epoch}",
            total=self.trainer.max_steps,
            initial=self.trainer.global_step,
            unit="step",
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    def on_train_epoch_start(self, trainer: lightning.Trainer, *_) -> None:
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *batch) -> None:
        if not trainer.fit_loop._should_accumulate():
            bar = self.train_progress_bar
            bar.update(trainer.global_step - bar.n)
            if trainer._logger_connector.should_update_logs:  # reading them waits for the device
                bar.set_postfix(self.get_metrics(trainer, module))

    def on_exception(self, *_) -> None:
        for bar in filter(None, (self._val_progress_bar, self._train_progress_bar)):
            bar.close()  # what is printed next begins a line


Analysis = Callable[[Recipe], LayerBlocks]  # `pod.analyze.analyze`

# Of each kind of device that the recipe may name, those that may be meant, in Lightning's order.
_DEVICES = {"auto": ("tpu", "cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}


def check_devices(recipe: Recipe) -> None:
    """Refuse devices that this machine does not have: before the data is read, and before processes are started.

    Raises:
        ImportError, ValueError: `trainer.accelerator` is unknown or not here, `trainer.devices` are more than there
            are, or it cannot hold what `model.load_in_4bit` wants.
    """
    kind, wanted = recipe.trainer.accelerator, recipe.trainer.devices
    known = [name for name in AcceleratorRegistry if name != "_mps"]
    names = _DEVICES.get(kind, (kind,))
    if not set(names) & set(known):
        raise ValueError(f"trainer.accelerator={kind}: must be one of {', '.join(sorted({*_DEVICES, *known}))}")
    kinds = {name: AcceleratorRegistry[name]["accelerator"] for name in names if name in known}
    here = next((name for name, accelerator in kinds.items() if accelerator.is_available()), None)
    if here is None:
        raise ValueError(
            f"trainer.accelerator={kind}: torch finds no such device on this machine. Set trainer.accelerator=cpu, or "
            "auto for what is there"
        )
    # Processes on a CPU are for tests and share its cores.
    most = 4 * (os.cpu_count() or 1) if here == "cpu" else kinds[here].auto_device_count()
    if wanted > most:
        there = f"the CPU's {os.cpu_count()} cores take {most} processes" if here == "cpu" else f"there are {most}"
        raise ValueError(
            f"trainer.devices={wanted}: {there} on this machine ({here}); set trainer.devices={most} or less"
        )
    if recipe.model.load_in_4bit:
        check_4_bits(here)


def check_logger(recipe: Recipe) -> None:
    """Refuse a logger whose package is missing.

    Raises:
        ImportError, ValueError: names the package.
    """
    if recipe.logger == "wandb":
        require("train", "wandb", what="logger=wandb")
    if recipe.logger == "tensorboard" and not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        raise ValueError("logger=tensorboard needs the package tensorboard: pip install tensorboard, or set logger=csv")


def has_wandb_key() -> bool:
    """Whether wandb would find a key: in WANDB_API_KEY, or where `wandb login` puts it.

    `wandb.api` is not asked: it begins a session, which then does not hear of being offline.
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def choose_blocks(recipe: Recipe, out: Path, analyze: Analysis, is_resumed: bool) -> LayerBlocks | None:
    """The blocks to train with: the recipe's file or size, those of the run that is continued, or newly analysed ones.

    A run that ended before its first checkpoint has left blocks, too: they serve where they were found alike. Of
    several processes the first one analyses, and tells the others when they are connected (`PodModule.setup`).
    """
    wanted, blocks = recipe.blocks, None
    if wanted.file is not None:
        blocks = LayerBlocks.load(wanted.file)
    if wanted.size is not None or (wanted.streaming and wanted.kv_saving == 0 and wanted.threshold is None):
        config = first_config(recipe.model.base, recipe.model.config)
        shape = config.num_hidden_layers, config.num_key_value_heads
        blocks = blocks or LayerBlocks.uniform(*shape, wanted.size or 1)
    if blocks is not None and wanted.streaming:
        model = recipe.model
        sizes = model.sink_size, model.recent_size
        return streamed(blocks, wanted.head_scores, wanted.streaming, first_config(model.base, model.config), sizes)
    if blocks is not None or (wanted.kv_saving == 0 and wanted.threshold is None):
        return blocks
    found = recipe.resume != "never" and (out / "blocks.json").exists()
    if found and (is_resumed or found_alike(out, recipe)):
        return LayerBlocks.load(out / "blocks.json")
    return analyze(recipe) if rank_zero_only.rank == 0 else None


def loggers(recipe: Recipe, out: Path) -> list[Logger]:
    """CSV always, and the one that the recipe names beside it."""
    chosen: list[Logger] = [MetricsLog(out)]
    if recipe.logger == "wandb":
        chosen.append(WandbLogger(project="pod", name=recipe.name, save_dir=out, offline=not has_wandb_key()))
    elif recipe.logger == "tensorboard":
        chosen.append(TensorBoardLogger(out, name="tensorboard"))
    return chosen


def strategy(recipe: Recipe) -> Strategy | str:
    """What `trainer.strategy` means to Lightning."""
    trainer = recipe.trainer
    if trainer.strategy != "deepspeed":
        return trainer.strategy
    return UlyssesDeepSpeedStrategy(
        sequence_parallel_size=trainer.sequence_parallel_size,
        stage=trainer.zero_stage,
        logging_batch_size_per_gpu=recipe.data.micro_batch_size,
        offload_optimizer=trainer.offload != "nothing",
        offload_parameters=trainer.offload == "parameters",
        exclude_frozen_parameters=recipe.lora.rank > 0 or recipe.distill.weight > 0,
    )


def check_data(recipe: Recipe, data: PodDataModule) -> None:
    """Whether the model can learn from the data, and the tokenizer that the recipe names is there.

    Raises:
        ValueError: there is no such model or tokenizer, or the data has ids that the model has not.
    """
    name = recipe.model.tokenizer
    if name is not None:
        try:
            load_tokenizer(name)
        except ValueError as error:
            raise ValueError(f"model.tokenizer={name}: {error}") from error
    vocab_size = first_config(recipe.model.base, recipe.model.config).vocab_size
    named = {}
    for prepared in filter(None, (data.prepared, data.validation)):
        check_vocabulary(prepared, vocab_size)
        named.setdefault(prepared.tokenizer, prepared)
    for prepared in named.values() if rank_zero_only.rank == 0 else ():
        check_tokenizer(prepared, name or recipe.model.base)


def fit(recipe: Recipe, analyze: Analysis) -> lightning.Trainer:
    """Run a recipe.

    Args:
        recipe: what to train, on what and how.
        analyze: finds the blocks where the recipe wants a saving and no file names them: `pod.analyze.analyze`.

    Raises:
        ValueError: something that the recipe names does not exist or does not fit, or another process is at work in
            the run's folder; says what.
        Stopped: a signal told the process to end, and a checkpoint was written.
    """
    check_devices(recipe)
    check_logger(recipe)
    if recipe.model.base is None:
        first_config(None, recipe.model.config)
    data = PodDataModule(**recipe.data.model_dump(), seed=recipe.seed)
    out = output_folder(recipe)
    # The first of several processes has the folder for all of them.
    with locked(out / ".lock", out) if rank_zero_only.rank == 0 else contextlib.nullcontext():
        return _fit(recipe, data, out, analyze)


def _fit(recipe: Recipe, data: PodDataModule, out: Path, analyze: Analysis) -> lightning.Trainer:
    checkpoint = resume_from(recipe, out / "steps")
    check_data(recipe, data)
    if rank_zero_only.rank == 0:
        _check_content(recipe, data)
        if checkpoint is None and recipe.lora.adapter is not None:  # before the analysis, which takes long
            read_adapter(Path(recipe.lora.adapter), recipe.lora.alpha)
    check_writable(out)
    lightning.seed_everything(recipe.seed, verbose=False)
    blocks = choose_blocks(recipe, out, analyze, checkpoint is not None)
    if rank_zero_only.rank == 0:
        if checkpoint is not None:
            check_blocks(checkpoint, blocks, recipe)
        for left in out.glob("*/.*.tmp"):  # what a killed process was writing
            left.unlink()
        if blocks is not None:
            blocks.save(out / "blocks.json")
        save(recipe, out / "recipe.yaml")
    module = PodModule(
        model=recipe.model,
        trainer=recipe.trainer,
        optimizer=recipe.optimizer,
        distill=recipe.distill,
        # Of a run that goes on, the adapter's weights are the checkpoint's.
        lora=recipe.lora if checkpoint is None else recipe.lora.model_copy(update={"adapter": None}),
        blocks=None if blocks is None else blocks.anchors.tolist(),
        bytes_per_token=1.0 if data.prepared.tokenizer == "bytes" else None,
    )
    save_at_end = SaveAtEnd(out / "steps")
    trainer = make_trainer(recipe, out, save_at_end)
    if checkpoint is not None and trainer.is_global_zero:
        print(f"continuing from {checkpoint}")
    _warn_of_slow_halves(trainer)
    # Only our own run's files are read, and they hold tensors and plain values alone.
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    except RuntimeError as error:
        if checkpoint is None or "loading state_dict" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{checkpoint} does not fit the model: what is at model.base={recipe.model.base} has changed since, or the "
            f"library has. Put it back, or begin a new run with another output=FOLDER ({reason[:300]})"
        ) from error
    if save_at_end.received == signal.SIGINT:  # after the last step: the run is done, but not what was to follow it
        raise KeyboardInterrupt
    return trainer


def _warn_of_slow_halves(trainer: lightning.Trainer) -> None:
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if trainer.is_global_zero and trainer.precision != "32-true" and is_on_cpu and not has_half_products():
        print(
            f"warning: trainer.precision={trainer.precision} on a processor without bfloat16 arithmetic can take "
            "several times as long as trainer.precision=32-true",
            file=sys.stderr,
        )


def _check_content(recipe: Recipe, data: PodDataModule) -> None:
    """Read all that training would take without a look at it."""
    for prepared in filter(None, (data.prepared, data.validation)):  # a flipped bit would be trained on
        prepared.verify()  # a second per gigabyte
    if recipe.trainer.strategy == "deepspeed" and recipe.trainer.zero_stage == 3 and recipe.model.base is not None:
        with opening(recipe.model.base):  # loading in parts would not tell of weights that are left over
            load_causal_lm(recipe.model.base, device_map="meta")


def make_trainer(recipe: Recipe, out: Path, save_at_end: SaveAtEnd) -> lightning.Trainer:
    """Lightning's trainer of a recipe, which writes into `out`."""
    accumulation = accumulate(recipe)
    return lightning.Trainer(
        accelerator=recipe.trainer.accelerator,
        devices=recipe.trainer.devices,
        num_nodes=recipe.trainer.num_nodes,
        strategy=strategy(recipe),
        precision=recipe.trainer.precision,
        max_steps=steps(recipe.trainer),
        max_epochs=-1,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=recipe.optimizer.gradient_clip,
        val_check_interval=recipe.trainer.validate_every * accumulation,
        check_val_every_n_epoch=None,
        limit_val_batches=recipe.trainer.validation_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=recipe.trainer.log_every,
        logger=loggers(recipe, out),
        # DeepSpeed's processes write their shards themselves.
        plugins=None if recipe.trainer.strategy == "deepspeed" else [WholeFiles()],
        callbacks=[
            Checkpoints(out / "steps", recipe.trainer.keep_checkpoints, recipe.trainer.checkpoint_every),
            ModelCheckpoint(
                out / "best", filename="{step}", monitor="val_loss", save_top_k=1, enable_version_counter=False
            ),
            save_at_end,
            TimeLimit(recipe.trainer.time_limit),
            Summary(out),
            StepsBar(),
        ],
        default_root_dir=out,
    )
