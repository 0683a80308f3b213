"""A run's checkpoints, `steps/step=N.ckpt`: written whole, also when the process is told to end, and found again.

One process, or several under DDP, write a file; DeepSpeed writes a directory, to which each process adds its shard.
"""

import os
import signal
import sys
import threading
import zipfile
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from pod.blocks import LayerBlocks
from pod.files import replacing
from pod.recipe.errors import RecipeError
from pod.recipe.loading import load_recipe
from pod.recipe.schema import Recipe
from pod.recipe.yaml import one_line
from pod.terminal import Stopped
from pod.training.module import Sections
from pod.training.strategy import COMPLETE, world_size_of

# What a run keeps to its end. Of the schedule, what is left out here takes effect when a run is resumed: its length,
# its warm-up, the rate at its end.
MODEL = ("model.base", "model.share", "model.sink_size", "model.recent_size", "model.rope_theta")
KEPT = (*MODEL, "model.load_in_4bit", "lora.rank", "lora.alpha", "lora.targets")
KEPT += ("optimizer.lr", "optimizer.betas", "optimizer.weight_decay")  # the optimiser's state brings its own along
# How the blocks were found, of which the checkpoint knows the result alone.
FOUND_BY = ("kv_saving", "threshold", "method", "streaming", "head_scores", "samples", "last_q", "distant_only")


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
            checkpoint is missing or damaged, was written by another strategy, belongs to a run of another model, or is
            not the last one in the run's folder.
    """
    if recipe.resume == "never":
        if checkpoints(folder):
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run. Continue it with resume=auto, or choose another "
                "output=FOLDER"
            )
        return None
    path = last_checkpoint(folder) if recipe.resume == "auto" else _named(recipe.resume, folder)
    if path is not None:
        check_layout(path, recipe)
        check_same(path, recipe)
    return path


def _named(resume: str, folder: Path) -> Path:
    """The checkpoint at the path `resume`, if it is whole and the last one where it lies in the run's folder."""
    path = Path(resume)
    if not path.exists():
        raise ValueError(f"resume={resume}: there is no such checkpoint; resume=auto takes the last whole one")
    if not is_whole(path):
        raise ValueError(
            f"resume={resume}: no whole checkpoint of pod.fit: truncated, damaged, or something else, such as an "
            "export, which a new run begins from as model.base. resume=auto takes the run's last whole one"
        )
    own = path.resolve().is_relative_to(folder.parent.resolve())  # `best/` as well
    step = {each.name: step for step, each in checkpoints(path.parent).items()}.get(path.name)
    later = max(checkpoints(folder), default=0)
    if own and step is not None and step < later:
        raise ValueError(
            f"resume={resume}: {folder} holds step={later}.ckpt too, which an export and resume=auto would take for "
            f"the end of this run: go on from step {step} with another output=FOLDER, or move the later ones away"
        )
    return path


def check_layout(checkpoint: Path, recipe: Recipe) -> None:
    """See that this run's strategy can read a checkpoint.

    Raises:
        ValueError: it is sharded and the run is not, or the other way round.
    """
    sharded = recipe.trainer.strategy == "deepspeed"
    if sharded != checkpoint.is_dir():
        kind, wanted = ("a file", "auto or ddp") if sharded else ("sharded by DeepSpeed", "deepspeed")
        raise ValueError(
            f"{checkpoint} is {kind}: continue with trainer.strategy={wanted}, or export it and start anew"
        )


def hyper_parameters(checkpoint: Path) -> dict[str, Any]:
    """What the `PodModule` of a checkpoint was made with, as `by_section`. A directory's shard is unpickled."""
    sharded = checkpoint.is_dir()
    file = min(checkpoint.glob("checkpoint/*_model_states.pt")) if sharded else checkpoint
    content = torch.load(file, map_location="cpu", weights_only=not sharded, mmap=True)
    try:
        return by_section(content.get("hyper_parameters"))
    except ValueError as error:
        raise RecipeError(f"resume: {checkpoint} is no checkpoint of pod.fit, {error}") from error


def by_section(saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """A checkpoint's hyper-parameters: the recipe's sections as plain dicts, `blocks`, `bytes_per_token`.

    Those of version 0.1.0 lie side by side, as `lr`, `lora_rank` or `model_config`, and are put into their sections.

    Raises:
        ValueError: they are not a `PodModule`'s.
    """
    saved = dict(saved or {})
    if "sink_size" in saved:
        old, saved = saved, {name: saved.get(name) for name in ("blocks", "bytes_per_token")}
        for section, cls in Sections.__annotations__.items():
            names = {name: each for name in cls.model_fields for each in (name, f"{section}_{name}") if each in old}
            saved[section] = {name: old[each] for name, each in names.items()}
    if not isinstance(saved.get("model"), dict) or "sink_size" not in saved["model"]:
        raise ValueError("it holds no PoD hyper-parameters")
    return saved


def check_same(checkpoint: Path, recipe: Recipe) -> None:
    """See that the recipe goes on with the model that a checkpoint holds.

    Raises:
        RecipeError: the recipe asks for something else that a run keeps; names the key and both values. A setting that
            only a new run can have would fail in the midst of loading, or be ignored.
    """
    saved = hyper_parameters(checkpoint)
    kept = {}
    for key in KEPT:
        section, _, name = key.partition(".")
        if name in saved[section]:
            kept[key] = saved[section][name], attrgetter(key)(recipe)
    if not saved["lora"].get("rank") and not recipe.lora.rank:
        kept = {key: values for key, values in kept.items() if not key.startswith("lora.")}
    theirs, ours = saved["model"]["config"] or {}, recipe.model.config or {}
    if theirs and ours:
        kept |= {f"model.config.{name}": (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    if recipe.blocks.file is None and recipe.blocks.size is None:
        kept |= _found_by(_left_recipe(checkpoint.parent.parent), recipe)
    for key, (was, wanted) in kept.items():
        if _comparable(key, was) != _comparable(key, wanted):
            raise RecipeError(
                f"{key} is {one_line(wanted)}, and {checkpoint} was trained with {one_line(was)}: continue with "
                f"{key}={one_line(was)}, or begin a new run with another output=FOLDER"
            )


def _comparable(key: str, value: Any) -> Any:
    if key == "model.base" and value is not None and Path(value).exists():
        return Path(value).resolve()
    if key == "lora.targets":
        return set(value)
    return list(value) if isinstance(value, tuple) else value


def found_alike(out: Path, recipe: Recipe) -> bool:
    """Whether this recipe would find the blocks that a run without checkpoints left in its folder; said where not."""
    if not (out / "recipe.yaml").is_file():  # `pod analyze` left them
        return True
    before = _left_recipe(out)
    if before is None:
        return False
    keys = (*MODEL, "data.path", "blocks.file", "blocks.size")
    values = {key: (attrgetter(key)(before), attrgetter(key)(recipe)) for key in keys} | _found_by(before, recipe)
    others = [key for key, (was, wanted) in values.items() if _comparable(key, was) != _comparable(key, wanted)]
    if others:
        print(f"{out}/blocks.json was found with another {', '.join(others)}: analysing again", file=sys.stderr)
    return not others


def _left_recipe(out: Path) -> Recipe | None:
    """The recipe that a run left in its folder; None where there is none and, with a warning, where it is not read."""
    file = out / "recipe.yaml"
    try:
        return load_recipe([f"recipe={file}"]) if file.is_file() else None
    except RecipeError as error:  # of another version of the library, or damaged
        print(f"warning: {error}. Only the blocks themselves are compared, not how they were found", file=sys.stderr)
        return None


def _found_by(run: Recipe | None, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys by which blocks are found -> what they were in the recipe of a run, if there is one; and now."""
    if run is None:
        return {}
    before = run.blocks
    if before.file is not None or before.size is not None:
        return {}
    if before.kv_saving == recipe.blocks.kv_saving == 0 and before.threshold is recipe.blocks.threshold is None:
        return {}
    return {f"blocks.{name}": (getattr(before, name), getattr(recipe.blocks, name)) for name in FOUND_BY}


def check_blocks(checkpoint: Path, blocks: LayerBlocks | None, recipe: Recipe) -> None:
    """Refuse to go on with other blocks than those of a checkpoint.

    Raises:
        RecipeError: names the key that gave them.
    """
    saved = hyper_parameters(checkpoint)["blocks"]
    before = None if saved is None or LayerBlocks(saved).is_dense else LayerBlocks(saved)
    wanted = None if blocks is None or blocks.is_dense else blocks
    if before == wanted:
        return
    given = [name for name in ("file", "size", "threshold") if getattr(recipe.blocks, name) is not None]
    key = f"blocks.{given[0] if given else 'kv_saving'}"
    raise RecipeError(
        f"{key}={one_line(attrgetter(key)(recipe))} gives {wanted or 'a dense model'}, and {checkpoint} was trained "
        f"with {before or 'a dense model'}: continue with the blocks of its run (its blocks.json), or begin a new run "
        "with another output=FOLDER"
    )


class AtStepEnds(Callback):
    """Before one of Lightning's callbacks: it hears of batches only where an optimiser step ends with them."""

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *batch) -> None:
        if not trainer.fit_loop._should_accumulate():
            super().on_train_batch_end(trainer, module, *batch)


class Checkpoints(AtStepEnds, ModelCheckpoint):
    """Lightning's, at the end of a step only: a resumed run would write the step it began at again, in its midst.

    A process that is killed between writing the newest and removing the oldest forgets the latter: who goes on from
    there removes it.

    Args:
        folder: where they lie.
        keep: the last so many.
        every: steps between two of them.
    """

    def __init__(self, folder: Path, keep: int, every: int) -> None:
        super().__init__(
            folder,
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=keep,
            every_n_train_steps=every,
            save_on_train_epoch_end=True,  # else Lightning puts off that of an epoch's last step
            enable_version_counter=False,  # a damaged one is written again, under its own name
        )

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, module)
        self._remove_forgotten(trainer)

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


class TimeLimit(AtStepEnds, Timer):
    """Lightning's, which asks at the end of a step only: in its midst, the gradients accumulated so far would be lost.

    The limit is that of one process, not of a run and all that went on with it: a resumed one has it anew.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}


class SaveAtEnd(Callback):
    """Writes the last checkpoint: where training ends, or when the process is told to end (SIGTERM, Ctrl-C).

    Lightning's own handler of SIGTERM ends between two micro-batches, which would lose the gradients accumulated so
    far, and Ctrl-C is an exception in their midst. They are in place when training starts, and are replaced then. All
    processes write a checkpoint together, so they agree first: one that was told to end ends all. A second Ctrl-C does
    not wait for the step, and writes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received = 0  # the signal's number
        self._interrupt: Any = None  # what Ctrl-C did before

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
                self._interrupt = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            if self.received == number:
                raise KeyboardInterrupt
            if rank_zero_only.rank == 0:  # not by print: the interrupted line may be printing
                os.write(2, b"\ninterrupt: the step at hand ends and a checkpoint is written; again: stop at once\n")
        self.received = number

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *batch) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        if trainer.strategy.reduce_boolean_decision(bool(self.received), all=False):
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")
            raise Stopped(self.received or signal.SIGTERM, trainer.global_step)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        path = self.folder / f"step={trainer.global_step}.ckpt"
        if not trainer.strategy.broadcast(trainer.is_global_zero and path.exists() and is_whole(path)):
            trainer.save_checkpoint(path)

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt):  # of which Lightning takes no further one
            self._forget()

    def teardown(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        self._forget()

    def _forget(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._interrupt is not None:
                signal.signal(signal.SIGINT, self._interrupt)
                self._interrupt = None
