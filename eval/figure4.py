"""PoD's Figure 4 on the demo's model: quality against the gate threshold, the proximal tokens and the cache saved.

    python eval/figure4.py
    python eval/figure4.py --recent 28,60,124,252 --kv-savings 0,0.2,0.35,0.45 trainer.max_steps=20

Every proximal size and every saving is a run of its own: the recipe (tiny, with key=value overrides) with another
`model.recent_size` or another `blocks.kv_saving`, post-trained, exported and evaluated as the demo does: digits of pass
keys, bits per byte of held-out text, bytes of the cache. The thresholds tau need no training: they are set on the
export of the recipe's own sizes, whose last tokens of each text are then decoded one by one, since distant tokens are
skipped at decode only; of a pass key, that is all digits but the first.

A sweep that was stopped goes on where it was: finished points are not run again, unfinished ones continue from their
last checkpoint. Writes figure4.json, figure4.md and three pictures: tau.png, proximal.png and kv_saving.png.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import demo

import pod
from pod.analyze import analyze
from pod.evaluation import command, figures, models, report
from pod.evaluation.passkey import generate_greedily, passkey_accuracy
from pod.evaluation.texts import prepared
from pod.export import export
from pod.files import read_json
from pod.recipe.loading import load_recipe
from pod.recipe.schema import Recipe, output_folder
from pod.terminal import exit_status
from pod.training.run import fit

Point = tuple[int, float]  # recent tokens, kv_saving
COLUMNS = {
    "recent tokens": ("recent", "{}"),
    "kv_saving": ("kv_saving", "{:.1%}"),
    "measured": ("measured_saving", "{:.1%}"),
    "cache bytes": ("cache_bytes", "{:,}"),
    "pass-key digits": ("passkey", "{:.1%}"),
    "beyond the window": ("passkey_beyond", "{:.1%}"),
    "bits/byte": ("bits_per_byte", "{:.4f}"),
}
TAU_COLUMNS = figures.TAU_COLUMNS | {
    "pass-key digits": ("passkey", "{:.1%}"),
    "bits/byte, decoded": ("bits_per_byte", "{:.4f}"),
}
TAU_TEXTS = 8  # held-out samples whose last quarter is decoded token by token


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is evaluated at each point; what is compared needs the same.

    Attributes:
        samples: pass-key prompts for each length and depth.
        texts: held-out samples for the bits per byte.
    """

    samples: int = demo.SAMPLES
    texts: int = demo.TEXTS


def points(recipe: Recipe, recent: list[int], savings: list[float]) -> tuple[list[Point], list[Point]]:
    """The two series: each proximal size at the recipe's saving, each saving at the recipe's proximal size.

    Raises:
        ValueError: no value, or the recipe chooses its blocks in another way than by saving.
    """
    if not recent or not savings:
        raise ValueError("--recent and --kv-savings want at least one value each")
    if recipe.blocks.file is not None or recipe.blocks.threshold is not None:
        raise ValueError("blocks.file and blocks.threshold must be null: the sweep sets blocks.kv_saving")
    own = recipe.model.recent_size, recipe.blocks.kv_saving
    return [(size, own[1]) for size in sorted(set(recent))], [(own[0], saving) for saving in sorted(set(savings))]


def point_recipe(point: Point, overrides: list[str], out: Path) -> Recipe:
    """The recipe of one point; its output is the point's folder."""
    recent, saving = point
    folder = out / f"recent{recent}-saving{saving:g}"
    own = [f"model.recent_size={recent}", f"blocks.kv_saving={saving}", f"output={folder}", "resume=auto"]
    return load_recipe([*overrides, *own])


def earlier(file: Path, settings: dict) -> dict | None:
    """What an earlier call wrote about a point, None without one.

    Raises:
        ValueError: it was found with other settings.
    """
    if not file.exists():
        return None
    found = read_json(file)
    if not isinstance(found, dict) or found.get("settings") != settings:
        raise ValueError(f"{file} is of another recipe: remove {file.parent}, or sweep into another --out")
    return found


def settings_of(recipe: Recipe, effort: Effort) -> dict:
    """All that a point's numbers depend on, as JSON gives it back."""
    return json.loads(json.dumps(recipe.model_dump() | dataclasses.asdict(effort)))


def measure(point: Point, overrides: list[str], out: Path, effort: Effort) -> dict:
    """Train, export and evaluate one point, or read what an earlier call found.

    Raises:
        ValueError, RecipeError: the point cannot be, or its folder holds one of another recipe.
    """
    recent, saving = point
    recipe = point_recipe(point, overrides, out)
    folder = output_folder(recipe)
    settings = settings_of(recipe, effort)
    file = folder / "point.json"
    found = earlier(file, settings)
    if found is not None:
        return found
    plain = demo.write_data(recipe)
    fit(recipe, analyze)
    export(folder, folder / "export", dtype="float32", force=True)
    model, tokenizer = models.load(str(folder / "export"), "cpu", "float32")
    prompts = demo.keys_in_text(tokenizer, effort.samples)
    label = f"recent {recent}, saving {saving:g}"
    quality, _ = demo.quality(model, tokenizer, prompts, prepared(plain, effort.texts, 8), recent, label)
    size = demo.measure_cache(model, recipe.data.sequence_length)
    found = {
        "settings": settings,
        "recent": recent,
        "wanted_saving": saving,
        "kv_saving": pod.LayerBlocks.load(folder / "blocks.json").kv_saving if saving else 0.0,
        **quality,
        "cache_bytes": size["bytes"],
        "measured_saving": size["saving"],
    }
    report.write_json(file, found)
    return found


def measure_tau(tau: float, recipe: Recipe, effort: Effort) -> dict:
    """Quality and distant work saved of a trained point at one threshold, or what an earlier call found.

    Raises:
        ValueError: tau is not between 0 and 1, or the file is of other settings.
    """
    folder = output_folder(recipe)
    file, settings = folder / f"tau{tau:g}.json", settings_of(recipe, effort)
    found = earlier(file, settings)
    if found is not None:
        return found
    model, tokenizer = models.load(str(folder / "export"), "cpu", "float32")
    digits = passkey_accuracy(
        model,
        tokenizer,
        demo.keys_in_text(tokenizer, effort.samples),
        12,
        lambda model, *asked: generate_greedily(model, *asked, pod.PodCache(model.config, tau=tau)),
        f"tau {tau:g}: pass keys",
    )
    batches = list(prepared(demo.write_data(recipe), min(effort.texts, TAU_TEXTS), 8))
    decoded = figures.skipping(model, batches, tau)
    found = {
        "settings": settings,
        "tau": tau,
        "passkey": sum(digits) / len(digits),
        "bits_per_byte": decoded.pop("nats") / math.log(2),
        **decoded,
    }
    report.write_json(file, found)
    return found


def draw(found: list[dict], key: str, xlabel: str, path: Path) -> None:
    """Pass-key digits and what is skipped (left), bits per byte (right) against one number of the points."""
    figure = report.figure(6, 4)
    axes = figure.add_subplot()
    ordered = sorted(found, key=lambda point: point[key])
    x = [point[key] for point in ordered]
    lines = axes.plot(x, [100 * point["passkey"] for point in ordered], "o-", color="C0", label="pass-key digits")
    if key == "tau":
        skipped = [100 * point["unread_share"] for point in ordered]
        lines += axes.plot(x, skipped, "^:", color="C2", label="distant values not read")
    axes.set(xlabel=xlabel, ylabel="%" if key == "tau" else "pass-key digits right, %", ylim=(0, 103))
    other = axes.twinx()
    lines += other.plot(x, [point["bits_per_byte"] for point in ordered], "s--", color="C1", label="bits per byte")
    other.set_ylabel("bits per byte, held-out text")
    figure.legend(handles=lines, fontsize=8, loc="outside upper center", ncols=len(lines))
    report.save_figure(figure, path, dpi=150)


def run(
    overrides: list[str],
    recent: list[int],
    savings: list[float],
    taus: list[float],
    out: Path | None,
    effort: Effort = Effort(),
) -> Path:
    """The whole sweep; returns the folder of the tables and the pictures.

    Raises:
        RecipeError, ValueError: an override or a point that cannot be.
    """
    overrides = overrides if any(one.startswith("recipe=") for one in overrides) else ["recipe=tiny", *overrides]
    recipe = load_recipe(overrides)
    out = output_folder(recipe) / "figure4" if out is None else out
    by_size, by_saving = points(recipe, recent, savings)
    if not taus or not all(0 <= tau <= 1 for tau in taus):
        raise ValueError(f"--taus {taus}: at least one, each between 0 (skip all that is distant) and 1")
    command.check_least(effort, samples=1, texts=1)
    own = recipe.model.recent_size, recipe.blocks.kv_saving
    order = dict.fromkeys([own, *by_size, *by_saving])
    found = {point: measure(point, overrides, out, effort) for point in order}
    own_recipe = point_recipe(own, overrides, out)
    by_tau = [measure_tau(tau, own_recipe, effort) for tau in sorted(set(taus))]
    report.write_json(out / "figure4.json", {"points": list(found.values()), "taus": by_tau})
    ordered = sorted(found.values(), key=lambda point: (point["recent"], point["wanted_saving"]))
    text = f"{report.table_of(by_tau, TAU_COLUMNS)}\n\n{report.table_of(ordered, COLUMNS)}"
    pictures = "\n".join(f"![{name}]({name}.png)" for name in ("tau", "proximal", "kv_saving"))
    report.write(out / "figure4.md", f"# PoD's Figure 4\n\n{text}\n\n{pictures}\n")
    draw(by_tau, "tau", "tau: query heads with at least this gate skip distant tokens", out / "tau.png")
    draw([found[point] for point in by_size], "recent", "recent tokens of the proximal ones", out / "proximal.png")
    draw([found[point] for point in by_saving], "kv_saving", "share of the KV cache saved", out / "kv_saving.png")
    print(f"\n{text}\nwritten: {out}/figure4.json, figure4.md, tau.png, proximal.png, kv_saving.png")
    return out


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("figure4", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe (recipe=tiny)")
    parser.add_argument("--recent", default="28,60,124,252", help="recent tokens, comma-separated (28,60,124,252)")
    parser.add_argument("--kv-savings", default="0,0.2,0.35,0.43", help="shares, comma-separated (0,0.2,0.35,0.43)")
    parser.add_argument("--taus", default="0,0.3,0.5,0.7,0.9,1", help="gates, comma-separated (0,0.3,0.5,0.7,0.9,1)")
    parser.add_argument("--samples", type=int, default=demo.SAMPLES, help="pass keys for each length and depth (8)")
    parser.add_argument("--texts", type=int, default=demo.TEXTS, help="held-out texts for the bits per byte (96)")
    parser.add_argument("--out", type=Path, help="folder of the runs and the table (figure4 in the recipe's output)")
    options = parser.parse_args(arguments)
    recent = [int(part) for part in options.recent.split(",") if part]
    savings = [float(part) for part in options.kv_savings.split(",") if part]
    taus = [float(part) for part in options.taus.split(",") if part]
    run(options.overrides, recent, savings, taus, options.out, Effort(options.samples, options.texts))


if __name__ == "__main__":
    sys.exit(main())
