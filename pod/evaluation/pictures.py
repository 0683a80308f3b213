"""Pictures of benchmarks: a heat map of scores."""

from collections.abc import Sequence
from pathlib import Path


def heat_map(
    path: str | Path,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw scores 0..100 as coloured cells, red to green; None stays white. Folders are made as needed.

    Args:
        path: the picture to write; its suffix (.png, .pdf, .svg) is the format.
        values: one list per row.
        rows, columns: their names; of many, some are printed.
    """
    # Figure and canvas without pyplot: needs no display and leaves the caller's backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (min(max(0.55 * len(columns) + 2.6, 5.0), 16.0), min(max(0.32 * len(rows) + 1.6, 3.0), 12.0))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    cells = [[float("nan") if value is None else value for value in row] for row in values]
    image = axes.imshow(cells, vmin=0.0, vmax=100.0, cmap="RdYlGn", aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="score")
    for names, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        step = max(1, round(len(names) / 12))
        set_ticks(range(0, len(names), step), names[::step])
    if len(columns) <= 12 and len(rows) <= 16:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                axes.text(x, y, "" if value is None else f"{value:.0f}", ha="center", va="center", fontsize=8)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
