"""The pictures of docs/HOW_IT_WORKS.md: which score a pair takes, what a block stores, and one decode step.

python docs/pictures.py             # writes docs/masks.png, docs/stored.png, docs/decode.png
python docs/pictures.py --out DIR
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

NOTHING, OWN, SHARED = 0, 1, 2
COLOURS = {NOTHING: "#f4f4f4", OWN: "#4477aa", SHARED: "#ee9944"}
TOKENS, SINKS, RECENT = 24, 3, 6
LAYERS = ("anchor", "shares", "shares", "anchor", "shares")  # a block of three layers and one of two


def scores(tokens: int, sinks: int, recent: int, shares: bool) -> torch.Tensor:
    """[T, T] of NOTHING, OWN, SHARED: whose score query i (row) takes for key j (column)."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    proximal = (j < sinks) | (i - j < recent)
    table = torch.where(proximal | torch.tensor(not shares), OWN, SHARED)
    return table.masked_fill(j > i, NOTHING)


def stored(tokens: int, sinks: int, recent: int, shares: bool) -> torch.Tensor:
    """[T] of NOTHING and OWN: which tokens' keys a layer keeps."""
    place = torch.arange(tokens)
    kept = (place < sinks) | (place >= tokens - recent) | torch.tensor(not shares)
    return torch.where(kept, OWN, NOTHING)


def _show(axes: Axes, table: torch.Tensor) -> None:
    axes.imshow(table.numpy(), cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=2)
    rows, columns = table.shape
    axes.set_xticks([edge - 0.5 for edge in range(columns + 1)], minor=True)
    axes.set_yticks([edge - 0.5 for edge in range(rows + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def masks() -> Figure:
    """Two tables of queries and keys: an anchor layer, and a layer that shares."""
    figure = _figure(7.2, 4.3)
    for axes, shares in zip(figure.subplots(1, 2), (False, True), strict=True):
        _show(axes, scores(TOKENS, SINKS, RECENT, shares))
        axes.set(title="a layer that shares" if shares else "an anchor layer", xlabel="key j", ylabel="query i")
        axes.set_xticks([0, SINKS, TOKENS - 1])
        axes.set_yticks([0, SINKS + RECENT, TOKENS - 1])
    names = {OWN: "own score: proximal, or no sharing", SHARED: "the anchor's score: distant", NOTHING: "not seen"}
    handles = [Patch(color=COLOURS[kind], label=name) for kind, name in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def storage() -> Figure:
    """Keys and values that five layers keep of one KV head after `TOKENS` tokens."""
    figure = _figure(7.2, 2.5)
    keys = torch.stack([stored(TOKENS, SINKS, RECENT, kind == "shares") for kind in LAYERS])
    tables = {"keys": keys, "values": torch.full_like(keys, OWN)}
    for axes, (name, table) in zip(figure.subplots(1, 2, sharey=True), tables.items(), strict=True):
        _show(axes, table)
        axes.set(title=f"{name}: {int((table == OWN).sum())} of {table.numel()}", xlabel="token", aspect="auto")
        axes.set_xticks([0, SINKS, TOKENS - RECENT, TOKENS - 1])
        axes.set_yticks(range(len(LAYERS)), [f"layer {index}, {kind}" for index, kind in enumerate(LAYERS)])
    handles = [Patch(color=COLOURS[OWN], label="kept"), Patch(color=COLOURS[NOTHING], label="not stored")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.9, facecolor=colour, edgecolor="none", alpha=0.85))
    axes.text(x + width / 2, y + 0.45, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color="#444444", linewidth=1))


def decode() -> Figure:
    """One decode step of a block of two layers, as boxes; the layer that shares is above its anchor."""
    figure = _figure(7.2, 3.4)
    axes = figure.subplots()
    axes.set(xlim=(0, 14.4), ylim=(-0.3, 6.6))
    axes.axis("off")
    own, shared, plain = "#9bbbdd", COLOURS[SHARED], "#dddddd"
    for base, name in ((0.0, "anchor\nlayer"), (4.0, "layer\nthat\nshares")):
        axes.text(0.1, base + 1.0, name, fontsize=9, va="center", fontweight="bold")
        _box(axes, 10.4, base + 0.6, 1.7, "one\nsoftmax", plain)
        _box(axes, 12.7, base + 0.6, 1.6, "all its\nvalues", own)
        _arrow(axes, (12.1, base + 1.05), (12.7, base + 1.05))
    _box(axes, 1.9, 1.2, 7.5, "q . k on its sinks and recent keys", own)
    _box(axes, 1.9, 0.0, 7.5, "q . k on its distant keys, the only ones stored in the block", shared)
    _box(axes, 1.9, 5.2, 7.5, "q . k on its own sinks and recent keys", own)
    _box(axes, 1.9, 4.0, 7.5, "no product: reads the distant scores", shared)
    _box(axes, 3.4, 2.6, 4.5, "workspace: distant scores of this step", plain)
    for base in (0.0, 4.0):
        _arrow(axes, (9.4, base + 1.65), (10.4, base + 1.25))
        _arrow(axes, (9.4, base + 0.45), (10.4, base + 0.85))
    # Past the box of proximal scores, on its right.
    axes.plot([9.4, 9.9, 9.9], [0.3, 0.3, 3.05], color="#444444", linewidth=1)
    _arrow(axes, (9.9, 3.05), (7.9, 3.05))
    _arrow(axes, (5.65, 3.5), (5.65, 4.0))
    return figure


PICTURES = {"masks": masks, "stored": storage, "decode": decode}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="directory to write (docs)")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw().savefig(out / f"{name}.png", dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
