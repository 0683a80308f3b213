"""Post-train a model with shared distant scores.

    python -m pod.fit                                   # lists the recipes
    python -m pod.fit --help                            # every key
    python -m pod.fit recipe=llama3-32k
    python -m pod.fit recipe=tiny trainer.max_steps=20 resume=auto
    python -m pod.fit recipe=mine trainer.strategy=deepspeed trainer.devices=2 trainer.sequence_parallel_size=2
    python -m pod.fit recipe=llama3-32k plan=true gpu=H100 utilisation=0.4    # memory, FLOPs, hours; trains nothing

Compares the prepared data with its checksums, and analyses first when the recipe wants a saving and names no blocks
file. Writes into the run's folder: `recipe.yaml`, `blocks.json`, `logs/` and `steps/step=N.ckpt`, `best/`. With several
processes the first one analyses and writes; a checkpoint of DeepSpeed is a directory, to which each process adds its
shard.
"""

import contextlib
import csv
import signal
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pod.analyze import analyze
from pod.blocks import LayerBlocks
from pod.data import PodDataModule
from pod.files import check_writable, naming, replacing
from pod.module import PodModule, first_config
from pod.plan import show_plan
from pod.recipe import Recipe, accumulate, output_folder, steps, warmup_steps
from pod.recipe_loading import main_recipe, save
from pod.strategy import COMPLETE, UlyssesDeepSpeedStrategy, world_size_of


class Checkpoints(ModelCheckpoint):
    """Lightning's, at the end of a step only: a resumed run would write the step it began at again, in its midst.

    A process that is killed between writing the newest and removing the oldest forgets the latter: who goes on from
    there removes it.
    """

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, module)
        self._remove_forgotten(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *batch) -> None:
        if not trainer.fit_loop._should_accumulate():
            super().on_train_batch_end(trainer, module, *batch)

    def on_fit_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._remove_forgotten(trainer)  # no step was left to train

    def _remove_forgotten(self, trainer: lightning.Trainer) -> None:
        known = {Path(path).name for path in self.best_k_models}
        steps = {step: path for step, path in checkpoints(Path(self.dirpath)).items() if path.name in known}
        for step, path in checkpoints(Path(self.dirpath)).items() if len(steps) == self.save_top_k else ():
            if step < min(steps) and trainer.is_global_zero:
                self._remove_checkpoint(trainer, str(path))


class WholeFiles(TorchCheckpointIO):
    """Checkpoints of one file, written beside their place and renamed.

    Lightning's own goes by way of memory and of the system's folder for temporary files, which may be small, and from
    there is copied into its place, where a kill leaves half of it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with replacing(path) as aside, open(aside, "wb") as file:
            torch.save(checkpoint, file)


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


class SaveAtEnd(Callback):
    """Writes the last checkpoint: where training ends, or when the process is told to end (a preempted job).

    Lightning's own handler of SIGTERM ends between two micro-batches, which would lose the gradients accumulated so
    far. It is in place when training starts, and is replaced then. All processes write a checkpoint together, so they
    agree first: one that was told to end ends all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received = False

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = True

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *batch) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        if trainer.strategy.reduce_boolean_decision(self.received, all=False):
            path = self.folder / f"step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                print(f"SIGTERM: wrote {path}; continue with resume=auto", flush=True)
            raise SIGTERMException

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        path = self.folder / f"step={trainer.global_step}.ckpt"
        if not trainer.strategy.broadcast(trainer.is_global_zero and path.exists() and is_whole(path)):
            trainer.save_checkpoint(path)

    def teardown(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete.

    A file can be read from beginning to end (torch's files are zip archives with checksums); of a directory, which may
    be very large, all processes have written their shards and each shard has its end.
    """
    if checkpoint.is_dir():
        if not (checkpoint / COMPLETE).is_file():
            return False
        shards = list(checkpoint.glob("checkpoint/*.pt"))
        states = [path for path in shards if path.name.endswith("_optim_states.pt")]
        try:
            return len(states) == world_size_of(checkpoint) and all(map(zipfile.is_zipfile, shards))
        except (KeyError, TypeError, ValueError):  # the note of how many there are is damaged
            return False
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            # torch reads nothing of an entry whose attributes say that it is a folder.
            if archive.testzip() is not None or any(entry.external_attr & 0x10 for entry in archive.infolist()):
                return False
        # The archive's own tables have no checksums, and torch goes by other parts of them than zipfile.
        torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return True
    except Exception:  # there is no end to what zipfile and torch raise for damaged tables
        return False


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run, step -> path, whole or not."""
    steps = {path: path.stem.removeprefix("step=") for path in folder.glob("step=*.ckpt")}
    return {int(step): path for path, step in steps.items() if step.isdecimal()}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; a broken one is named and passed over."""
    by_step = checkpoints(folder)
    for step in sorted(by_step, reverse=True):
        if is_whole(by_step[step]):
            return by_step[step]
        print(f"warning: {by_step[step]} is truncated or damaged; looking for an older one", file=sys.stderr)
    return None


def resume_from(recipe: Recipe, folder: Path) -> Path | None:
    """The checkpoint that the recipe's `resume` means, None to begin anew.

    Raises:
        ValueError: the run's folder holds checkpoints and the recipe does not say whether to continue; or the named
            checkpoint is missing or damaged, or was written by another strategy.
    """
    if recipe.resume == "auto":
        return check_layout(last_checkpoint(folder), recipe)
    if recipe.resume == "never":
        if checkpoints(folder):
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run. Continue it with resume=auto, or choose another "
                "output=FOLDER"
            )
        return None
    path = Path(recipe.resume)
    if not path.exists():
        raise ValueError(f"resume={recipe.resume}: there is no such checkpoint")
    if not is_whole(path):
        raise ValueError(f"resume={recipe.resume}: the checkpoint is truncated or damaged; try resume=auto")
    return check_layout(path, recipe)


def check_layout(checkpoint: Path | None, recipe: Recipe) -> Path | None:
    """The checkpoint, if this run's strategy can read it.

    Raises:
        ValueError: it is sharded and the run is not, or the other way round.
    """
    if checkpoint is None:
        return None
    sharded = recipe.trainer.strategy == "deepspeed"
    if sharded != checkpoint.is_dir():
        kind, wanted = ("a file", "auto or ddp") if sharded else ("sharded by DeepSpeed", "deepspeed")
        raise ValueError(
            f"{checkpoint} is {kind}: continue with trainer.strategy={wanted}, or export it and start anew"
        )
    return checkpoint


def choose_blocks(recipe: Recipe, out: Path) -> LayerBlocks | None:
    """The blocks to train with: the recipe's file or size, those of the run that is continued, or newly analysed ones.

    Of several processes the first one analyses, and tells the others when they are connected (`PodModule.setup`).
    """
    if recipe.blocks.file is not None:
        return LayerBlocks.load(recipe.blocks.file)
    if recipe.blocks.size is not None:
        config = first_config(recipe.model.base, recipe.model.config)
        return LayerBlocks.uniform(config.num_hidden_layers, config.num_key_value_heads, recipe.blocks.size)
    if recipe.blocks.kv_saving == 0 and recipe.blocks.threshold is None:
        return None
    if recipe.resume != "never" and (out / "blocks.json").exists():
        return LayerBlocks.load(out / "blocks.json")
    return analyze(recipe) if rank_zero_only.rank == 0 else None


def loggers(recipe: Recipe, out: Path) -> list[Logger]:
    """CSV always, and the one that the recipe names beside it."""
    chosen: list[Logger] = [MetricsLog(out)]
    if recipe.logger == "wandb":
        import wandb

        chosen.append(WandbLogger(project="pod", name=recipe.name, save_dir=out, offline=wandb.api.api_key is None))
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


def fit(recipe: Recipe) -> lightning.Trainer:
    """Run a recipe.

    Raises:
        ValueError: something that the recipe names does not exist or does not fit; says what.
    """
    out = output_folder(recipe)
    folder = out / "steps"
    checkpoint = resume_from(recipe, folder)
    data = PodDataModule(
        recipe.data.path,
        sequence_length=recipe.data.sequence_length,
        length_intervals=recipe.data.length_intervals,
        micro_batch_size=recipe.data.micro_batch_size,
        seed=recipe.seed,
        num_workers=recipe.data.num_workers,
        shuffle=recipe.data.shuffle,
        validation_path=recipe.data.validation_path,
    )
    if rank_zero_only.rank == 0:  # a flipped bit would be trained on; reading all takes a second per gigabyte
        for prepared in filter(None, (data.prepared, data.validation)):
            prepared.verify()
    check_writable(out)
    lightning.seed_everything(recipe.seed, verbose=False)
    blocks = choose_blocks(recipe, out)
    if rank_zero_only.rank == 0:
        for left in out.glob("*/.*.tmp"):  # what a killed process was writing
            left.unlink()
        if blocks is not None:
            blocks.save(out / "blocks.json")
        save(recipe, out / "recipe.yaml")
    accumulation = accumulate(recipe)
    total = steps(recipe)
    module = PodModule(
        base=recipe.model.base,
        model_config=None if recipe.model.base is not None else dict(recipe.model.config),
        initialization=recipe.model.initialization,
        blocks=None if blocks is None else blocks.anchors.tolist(),
        sink_size=recipe.model.sink_size,
        recent_size=recipe.model.recent_size,
        share=recipe.model.share,
        rope_theta=recipe.model.rope_theta,
        dtype=recipe.model.dtype,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        offload_checkpoints=recipe.model.offload_checkpoints,
        mlp_tiles=recipe.model.mlp_tiles,
        compile=recipe.model.compile,
        lr=recipe.optimizer.lr,
        min_lr=recipe.optimizer.min_lr,
        betas=list(recipe.optimizer.betas),
        weight_decay=recipe.optimizer.weight_decay,
        warmup_steps=warmup_steps(recipe),
        max_steps=total,
        loss_chunk=recipe.trainer.loss_chunk,
        answer_weight=recipe.trainer.answer_weight,
        distill_weight=recipe.distill.weight,
        distill_temperature=recipe.distill.temperature,
        lora_rank=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        lora_targets=list(recipe.lora.targets),
        bytes_per_token=1.0 if data.prepared.tokenizer == "bytes" else None,
    )
    trainer = lightning.Trainer(
        accelerator=recipe.trainer.accelerator,
        devices=recipe.trainer.devices,
        num_nodes=recipe.trainer.num_nodes,
        strategy=strategy(recipe),
        precision=recipe.trainer.precision,
        max_steps=total,
        max_epochs=-1,
        max_time=recipe.trainer.time_limit,
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
            Checkpoints(
                folder,
                filename="{step}",
                monitor="step",
                mode="max",
                save_top_k=recipe.trainer.keep_checkpoints,
                every_n_train_steps=recipe.trainer.checkpoint_every,
                enable_version_counter=False,  # a damaged one is written again, under its own name
            ),
            ModelCheckpoint(
                out / "best", filename="{step}", monitor="val_loss", save_top_k=1, enable_version_counter=False
            ),
            SaveAtEnd(folder),
            TQDMProgressBar(),
        ],
        default_root_dir=out,
    )
    if checkpoint is not None and trainer.is_global_zero:
        print(f"continuing from {checkpoint}")
    # Only our own run's files are read, and they hold tensors and plain values alone.
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return trainer


def main(arguments: list[str]) -> int:
    if any(argument.startswith("plan=") for argument in arguments):
        return show_plan(arguments)
    # Of several processes only the first one speaks.
    with contextlib.redirect_stdout(sys.stdout if rank_zero_only.rank == 0 else None):
        recipe = main_recipe(arguments, "pod.fit")
    torch.set_float32_matmul_precision("high")
    try:
        fit(recipe)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SIGTERMException:
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
