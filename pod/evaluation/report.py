"""How results are written down: JSON, a Markdown table, heat maps and curves."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.extras import require
from pod.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; several processes may write the same one. Folders are made."""
    write_text(path, text)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON."""
    write(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose columns line up; the first column is text, the others are numbers."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def table_of(records: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """`markdown_table` of records: a column's header -> (field, how it is written, as `{:.1%}`); None is a dash."""

    def cells(record: Mapping[str, Any]) -> list[str]:
        return ["-" if record[field] is None else form.format(record[field]) for field, form in columns.values()]

    return markdown_table(list(columns), [cells(record) for record in records])


def figure(width: float, height: float) -> "Figure":
    """An empty figure in inches, without pyplot: needs no display and leaves the caller's backend alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("eval", "matplotlib", what="a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save_figure(made: "Figure", path: Path, **options: Any) -> None:
    """Write a picture whole or not at all, in the format of `path`'s suffix. The options are savefig's."""
    with replacing(path) as aside:
        made.savefig(aside, format=path.suffix[1:], **options)


def heat_map(
    axes: "Axes", values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], title: str
) -> Any:
    """Draw scores 0..100 as coloured cells, red to green; returns the image.

    Args:
        axes: where.
        values: one list per row; None stays white.
        rows, columns: their names; of many, some are printed. The numbers are printed where there is room.
        title: above it.
    """
    cells = [[float("nan") if value is None else value for value in row] for row in values]
    image = axes.imshow(cells, vmin=0.0, vmax=100.0, cmap="RdYlGn", aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9)
    for names, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        step = max(1, round(len(names) / 12))
        set_ticks(range(0, len(names), step), names[::step], fontsize=7)
    if len(columns) <= 12 and len(rows) <= 16:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                axes.text(x, y, "" if value is None else f"{value:.0f}", ha="center", va="center", fontsize=7)
    return image


def save_heat_map(
    path: Path,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
) -> None:
    """A picture that is one heat map; `path`'s suffix (.png, .pdf, .svg) is the format. Folders are made."""
    made = figure(min(max(0.55 * len(columns) + 2.6, 5.0), 16.0), min(max(0.32 * len(rows) + 1.6, 3.0), 12.0))
    axes = made.add_subplot()
    made.colorbar(heat_map(axes, values, rows, columns, title), ax=axes, label="score")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    save_figure(made, path, dpi=120)
