"""How results are written down: JSON, a Markdown table, heat maps and curves."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def default_folder(script: str) -> Path:
    """Where a script writes when not told: runs/eval/SCRIPT."""
    return Path("runs") / "eval" / script


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result beside its place and rename it, so that a stopped run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose columns line up; the first column is text, the others are numbers."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def figure(width: float, height: float) -> "Figure":
    """An empty figure in inches, without pyplot: needs no display and leaves the caller's backend alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def heat_map(
    axes: "Axes", values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str
) -> Any:
    """Draw shares in [0, 1] as a heat map with the numbers in its cells, red to green; returns the image."""
    image = axes.imshow(values, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    return image
