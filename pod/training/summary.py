"""What a run did, told when it ends: a table and a picture in its folder, pictures to the logger that shows them.

The numbers are those of the run's `logs/version_*/metrics.csv`, which a run that was resumed has several of.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from pod.evaluation.report import figure, markdown_table, save_figure
from pod.files import write_text

Rows = list[dict[str, float]]
PICTURES = ("similarity", "damage", "blocks")  # what `pod.analyze` has drawn into the run's folder
# What the table shows, in its order: column of the log, name.
SHOWN = {
    "train_loss": "loss",
    "train_divergence": "divergence from the teacher",
    "train_answer_loss": "loss of answers",
    "val_loss": "validation loss",
    "val_bits_per_byte": "validation bits per byte",
    "val_passkey": "validation answers that are right",
    "grad_norm": "gradient norm",
}
ENDS = 5  # logged steps at the beginning and at the end of which means are shown
GATE = "gate/layer_"


def read_metrics(folder: Path) -> Rows:
    """What the logs of a run have of each step, as it came; of one that was repeated after a resume the last word.

    Args:
        folder: of the run.
    """
    rows: dict[tuple[int, bool], dict[str, float]] = {}
    logs = sorted(folder.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    for path in logs:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            # What follows the last newline was being written when the disk was full or the process was killed.
            for line in csv.DictReader(line for line in file if line.endswith("\n")):
                try:
                    row = {name: float(value) for name, value in line.items() if value}
                    key = int(row["step"]), "val_loss" in row
                except (KeyError, OverflowError, TypeError, ValueError) as error:
                    print(f"warning: {path}: a damaged line is left out ({error})", file=sys.stderr)
                    continue
                rows.pop(key, None)
                rows[key] = row
    return list(rows.values())


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps in order, and a metric's values there."""
    found = sorted((row["step"], row[name]) for row in rows if name in row)
    return [step for step, _ in found], [value for _, value in found]


def table(rows: Rows) -> str:
    """Of each metric the mean of its first and of its last logged steps, and its best one."""
    lines = []
    for name, says in SHOWN.items():
        _, values = series(rows, name)
        if values:
            first, last = (sum(some) / len(some) for some in (values[:ENDS], values[-ENDS:]))
            best = max(values) if name == "val_passkey" else min(values)
            lines.append([says, *(f"{value:.4g}" for value in (first, last, best)), str(len(values))])
    return markdown_table(["", f"first {ENDS}", f"last {ENDS}", "best", "logged"], lines)


def draw(rows: Rows, path: Path) -> None:
    """Losses, learning rate, tokens a second and gates by layer, over the steps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers = sorted({int(name.removeprefix(GATE)) for row in rows for name in row if name.startswith(GATE)})
    picture = figure(11, 6 if layers else 3.2)
    axes = picture.subplots(2 if layers else 1, 3, squeeze=False)
    panels: list[tuple[str, Sequence[str]]] = [
        ("loss, nats a token", ("train_loss", "val_loss", "train_divergence")),
        ("learning rate", ("lr",)),
        ("tokens a second", ("tokens_per_second",)),
    ]
    for panel, (title, names) in zip(axes[0], panels, strict=True):
        for name in names:
            steps, values = series(rows, name)
            if values:
                panel.plot(steps, values, marker="." if len(values) < 40 else None, label=SHOWN.get(name, name))
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("step", fontsize=8)
    axes[0][0].legend(fontsize=7)
    if layers:
        for panel in axes[1]:
            panel.remove()
        panel = picture.add_subplot(axes[1][0].get_gridspec()[1, :])
        steps, _ = series(rows, f"{GATE}{layers[0]}")
        gates = [series(rows, f"{GATE}{layer}")[1] for layer in layers]
        shown = panel.imshow(gates, aspect="auto", origin="lower", vmin=0, vmax=1)
        panel.set_xticks(range(len(steps)), [f"{step:.0f}" for step in steps], fontsize=7)
        panel.set_title("gate: the share of attention on sinks and recent tokens, by layer", fontsize=9)
        panel.set_ylabel("layer", fontsize=8)
        picture.colorbar(shown, ax=panel)
    save_figure(picture, path, dpi=110)


def show(loggers: Sequence[Logger], name: str, path: Path, step: int) -> None:
    """Give a picture to the loggers that show pictures.

    Args:
        loggers: the run's.
        name: under which it is shown.
        path: a PNG.
        step: optimiser steps done.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(key=name, images=[str(path)])
        elif isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(name, imread(path), step, dataformats="HWC")


class Summary(lightning.Callback):
    """Writes `summary.md` and `summary.png` into a run's folder when it ends, and prints the table.

    Args:
        out: the run's folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    @rank_zero_only
    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        for name in PICTURES:
            if (self.out / f"{name}.png").is_file():
                show(trainer.loggers, name, self.out / f"{name}.png", trainer.global_step)

    @rank_zero_only
    def on_fit_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.save()
        rows = read_metrics(self.out)
        if not any("train_loss" in row for row in rows):
            return  # a run that was resumed after its last step
        draw(rows, self.out / "summary.png")
        show(trainer.loggers, "summary", self.out / "summary.png", trainer.global_step)
        text = table(rows)
        write_text(
            self.out / "summary.md", f"# {self.out.name}: {trainer.global_step} steps\n\n{text}\n\n![](summary.png)\n"
        )
        print(f"\n{text}\n")
