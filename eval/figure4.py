"""PoD's Figure 4-(b) and (c) on the demo's model: quality against the proximal tokens and against the cache saved.

    python eval/figure4.py
    python eval/figure4.py --recent 28,60,124,252 --kv-savings 0,0.2,0.35,0.45 trainer.max_steps=20

Every point is a run of its own: the recipe (tiny, with key=value overrides) with another `model.recent_size` or
another `blocks.kv_saving`, post-trained, exported and evaluated as the demo does: digits of pass keys, bits per byte of
held-out text, bytes of the cache. A sweep that was stopped goes on where it was: finished points are not run again,
unfinished ones continue from their last checkpoint. Writes figure4.json, figure4.md and three pictures: proximal.png,
kv_saving.png and cache_bytes.png (all points).

Figure 4-(a), the gate threshold tau, is not drawn: decoding does not skip distant tokens yet.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import pod
from pod.evaluation import models, report
from pod.evaluation.passkey import passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity
from pod.export import export
from pod.files import read_json
from pod.fit import fit
from pod.recipe import Recipe, RecipeError, load_recipe, output_folder

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "data")]
import demo  # noqa: E402
from demo_corpus import standard_library  # noqa: E402
from perplexity import prepared  # noqa: E402

Point = tuple[int, float]  # recent tokens, kv_saving


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


def measure(point: Point, overrides: list[str], out: Path) -> dict:
    """Train, export and evaluate one point, or read what an earlier call found.

    Raises:
        ValueError, RecipeError: the point cannot be, or its folder holds one of another recipe.
    """
    recent, saving = point
    folder = out / f"recent{recent}-saving{saving:g}"
    own = [f"model.recent_size={recent}", f"blocks.kv_saving={saving}", f"output={folder}", "resume=auto"]
    recipe = load_recipe([*overrides, *own])
    settings = json.loads(json.dumps(dataclasses.asdict(recipe)))
    file = folder / "point.json"
    if file.exists():
        found = read_json(file)
        if not isinstance(found, dict) or found.get("settings") != settings:
            raise ValueError(f"{file} is of another recipe: remove {folder}, or sweep into another --out")
        return found
    plain = demo.write_data(recipe)
    fit(recipe)
    export(folder, folder / "export", dtype="float32", force=True)
    model, tokenizer = models.load(str(folder / "export"), "cpu", "float32")
    text = b"\n".join(standard_library()[1]).decode()
    prompts = [
        prompt
        for length in demo.LENGTHS
        for prompt in passkey_prompts(tokenizer, text, length, demo.DEPTHS, demo.SAMPLES)
    ]
    label = f"recent {recent}, saving {saving:g}"
    digits = passkey_accuracy(model, tokenizer, prompts, 12, label=f"{label}: pass keys")
    far = [score for score, prompt in zip(digits, prompts, strict=True) if prompt.distance > recent]
    bits = perplexity(model, prepared(plain, demo.TEXTS, 8), 1.0, label=f"{label}: held-out text")
    context = recipe.data.sequence_length
    size = demo.measure_cache(model, context)
    config = model.config
    dense = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * context
    found = {
        "settings": settings,
        "recent": recent,
        "wanted_saving": saving,
        "kv_saving": pod.LayerBlocks.load(folder / "blocks.json").kv_saving if saving else 0.0,
        "passkey": sum(digits) / len(digits),
        "passkey_beyond": sum(far) / len(far) if far else None,
        "bits_per_byte": bits.bits_per_byte,
        "cache_bytes": size,
        "measured_saving": 1 - size / dense,
    }
    report.write_json(file, found)
    return found


def draw(found: list[dict], key: str, xlabel: str, path: Path) -> None:
    """Pass-key digits (left) and bits per byte (right) against one number of the points."""
    figure = report.figure(6, 4)
    axes = figure.add_subplot()
    ordered = sorted(found, key=lambda point: point[key])
    x = [point[key] for point in ordered]
    lines = axes.plot(x, [100 * point["passkey"] for point in ordered], "o-", color="C0", label="pass-key digits")
    axes.set(xlabel=xlabel, ylabel="pass-key digits right, %", ylim=(0, 100))
    other = axes.twinx()
    lines += other.plot(x, [point["bits_per_byte"] for point in ordered], "s--", color="C1", label="bits per byte")
    other.set_ylabel("bits per byte, held-out text")
    axes.legend(handles=lines, fontsize=8)
    report.save_figure(figure, path, dpi=150)


def table(found: list[dict]) -> str:
    """A line for each point."""
    rows = [
        [
            str(point["recent"]),
            f"{point['kv_saving']:.1%}",
            f"{point['measured_saving']:.1%}",
            f"{point['cache_bytes']:,}",
            f"{point['passkey']:.1%}",
            "-" if point["passkey_beyond"] is None else f"{point['passkey_beyond']:.1%}",
            f"{point['bits_per_byte']:.4f}",
        ]
        for point in found
    ]
    header = ["recent tokens", "kv_saving", "measured", "cache bytes", "pass-key digits", "beyond the window"]
    return report.markdown_table([*header, "bits/byte"], rows)


def run(overrides: list[str], recent: list[int], savings: list[float], out: Path | None) -> Path:
    """The whole sweep; returns the folder of the table and the pictures.

    Raises:
        RecipeError, ValueError: an override or a point that cannot be.
    """
    overrides = overrides if any(one.startswith("recipe=") for one in overrides) else ["recipe=tiny", *overrides]
    recipe = load_recipe(overrides)
    out = output_folder(recipe) / "figure4" if out is None else out
    by_size, by_saving = points(recipe, recent, savings)
    found = {point: measure(point, overrides, out) for point in dict.fromkeys([*by_size, *by_saving])}
    report.write_json(out / "figure4.json", {"points": list(found.values())})
    text = table(list(found.values()))
    pictures = "\n".join(f"![{name}]({name}.png)" for name in ("proximal", "kv_saving", "cache_bytes"))
    report.write(out / "figure4.md", f"# PoD's Figure 4\n\n{text}\n\n{pictures}\n")
    draw([found[point] for point in by_size], "recent", "recent tokens of the proximal ones", out / "proximal.png")
    draw([found[point] for point in by_saving], "kv_saving", "share of the KV cache saved", out / "kv_saving.png")
    draw(list(found.values()), "cache_bytes", "bytes of the cache, all points", out / "cache_bytes.png")
    print(f"\n{text}\nwritten: {out}/figure4.json, figure4.md, proximal.png, kv_saving.png, cache_bytes.png")
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python eval/figure4.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe (recipe=tiny)")
    parser.add_argument("--recent", default="28,60,124,252", help="recent tokens, comma-separated (28,60,124,252)")
    parser.add_argument("--kv-savings", default="0,0.2,0.35,0.43", help="shares, comma-separated (0,0.2,0.35,0.43)")
    parser.add_argument("--out", type=Path, help="folder of the runs and the table (figure4 in the recipe's output)")
    options = parser.parse_args(arguments)
    try:
        recent = [int(part) for part in options.recent.split(",") if part]
        savings = [float(part) for part in options.kv_savings.split(",") if part]
        run(options.overrides, recent, savings, options.out)
    except (RecipeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
