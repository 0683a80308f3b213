"""The demo: PoD from beginning to end on real text, without a download, in about ten minutes on two cores.

    make demo
    python eval/demo.py trainer.max_steps=20        # overrides of recipes/tiny.yaml

Writes the corpus (the standard library's source), analyses the shipped base model, post-trains it with shared distant
scores and, for a fair comparison, densely for as many steps, exports both, and evaluates five rows:

    dense                   the base as shipped
    dense, extra steps      the base after the same further training without sharing
    PoD, converted          shared scores without any training
    PoD, adapted            shared scores after the training
    StreamingLLM            sinks and recent tokens only, of the dense model with the extra steps

The report goes to checkpoints/tiny/report.md, report.png and report.json. A demo that was stopped goes on where it was;
one of other settings is not mixed with it.
"""

import statistics
import sys
import time
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import pod
from pod.analyze import analyze
from pod.data.demo_corpus import held_out_text, write_corpus
from pod.data.prepared import PreparedData
from pod.evaluation import models, report
from pod.evaluation.passkey import PassKey, generate_greedily, passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity
from pod.evaluation.texts import prepared
from pod.export import export
from pod.recipe.loading import load_recipe
from pod.recipe.schema import Recipe, output_folder, schema, steps
from pod.terminal import exit_status
from pod.training.run import fit

LENGTHS = (256, 512, 1016)  # tokens of the pass-key prompts; with the digits, the last fills the context
DEPTHS = tuple(index / 8 for index in range(9))
SAMPLES = 8  # prompts for each length and depth
TEXTS = 96  # held-out samples for the bits per byte
DECODED = 48  # tokens per decode timing
ROUNDS = 3  # timings of each row, interleaved
COLUMNS = {
    "": ("name", "{}"),
    "bits/byte": ("bits_per_byte", "{:.4f}"),
    "pass-key digits": ("passkey", "{:.1%}"),
    "beyond the window": ("passkey_beyond", "{:.1%}"),
    "cache bytes": ("cache_bytes", "{:,}"),
    "of dense": ("of_dense", "{:.1%}"),
    "decode speed": ("decode_speed", "{:.2f}x"),
}


def write_data(recipe: Recipe) -> Path:
    """The recipe's corpus, where it is missing, and held-out text without keys; returns the latter's directory."""
    length = recipe.data.sequence_length
    trained = recipe.trainer.tokens_per_batch // length * steps(recipe.trainer)
    if not (Path(recipe.data.path) / "index.json").exists():
        write_corpus(recipe.data.path, length, samples=max(trained, 64), validation_samples=64, seed=2)
    samples = PreparedData(recipe.data.path).splits["train"]["samples"]
    if samples < trained:
        print(
            f"warning: {recipe.data.path} has {samples:,} training samples and the run takes {trained:,}, so it sees "
            "them again and again. Remove the directory to have as many written as it takes",
            file=sys.stderr,
        )
    plain = Path(recipe.data.path).with_name(f"{length}-plain")
    if not (plain / "index.json").exists():
        write_corpus(plain, length, samples=1, validation_samples=TEXTS, seed=1, keys_min=0, keys_max=0)
    return plain


def refuse_other(recipe: Recipe) -> None:
    """See that what an earlier call trained, and would be gone on with, was asked for with the same recipe.

    Raises:
        ValueError: it was not; names what differs.
    """
    out = output_folder(recipe)
    if not (out / "recipe.yaml").is_file():
        return
    earlier = load_recipe([f"recipe={out / 'recipe.yaml'}"])
    changed = []
    for key in schema():
        was, wanted = attrgetter(key)(earlier), attrgetter(key)(recipe)
        if was != wanted and key != "resume":
            changed.append(f"{key}={was}, now {wanted}")
    if changed:
        raise ValueError(
            f"{out} holds what was trained with other settings ({'; '.join(changed)}): remove it, or choose another "
            "output=FOLDER"
        )


def keys_in_text(tokenizer: PreTrainedTokenizerBase, samples: int) -> list[PassKey]:
    """Pass-key prompts of every length and depth, in held-out modules; `samples` for each."""
    text = held_out_text()
    return [prompt for length in LENGTHS for prompt in passkey_prompts(tokenizer, text, length, DEPTHS, samples)]


def measure_cache(model: PreTrainedModel, length: int) -> dict[str, float]:
    """`measured_saving` of the cache that holds one row of `length` tokens, transformers' own or PoD's."""
    return models.measured_saving(model, torch.full((1, length), 100))


def decode_seconds(model: PreTrainedModel, length: int, batch: int = 4) -> float:
    """Seconds to decode `DECODED` tokens up to `length`, the prefill taken off."""

    def run(count: int) -> float:
        ids = torch.randint(40, 120, (batch, length - DECODED), generator=torch.Generator().manual_seed(0))
        start = time.perf_counter()
        generate_greedily(model, ids, count)
        return time.perf_counter() - start

    return run(DECODED) - run(1)


def quality(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[PassKey],
    texts: Iterable[Tensor],
    recent: int,
    label: str,
) -> tuple[dict, list[float]]:
    """(bits_per_byte, passkey and passkey_beyond the recent tokens, None where no key is), and each prompt's score."""
    bits = perplexity(model, texts, 1.0, label=f"{label}: held-out text")
    scores = passkey_accuracy(model, tokenizer, prompts, 12, label=f"{label}: pass keys")
    far = [score for score, prompt in zip(scores, prompts, strict=True) if prompt.distance > recent]
    found = {
        "bits_per_byte": bits.bits_per_byte,
        "passkey": sum(scores) / len(scores),
        "passkey_beyond": sum(far) / len(far) if far else None,
    }
    return found, scores


def evaluate(
    rows: dict[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    plain: Path,
    context: int,
    sinks: int,
    recent: int,
) -> dict:
    """Every number of the report, by row; "dense, extra steps" is also evaluated with sinks and recent tokens alone."""
    prompts, dense = keys_in_text(tokenizer, SAMPLES), rows["dense, extra steps"]
    measured = {}
    for name, model in {**rows, "StreamingLLM": models.windowed(dense, sinks, recent)}.items():
        found, scores = quality(model, tokenizer, prompts, prepared(plain, TEXTS, 8), recent, name)
        cells = torch.tensor(scores).view(len(LENGTHS), len(DEPTHS), SAMPLES).mean(dim=2)
        size = None if name == "StreamingLLM" else measure_cache(model, context)["bytes"]
        measured[name] = found | {"passkey_cells": cells.tolist(), "cache_bytes": size}
    rounds = [{name: decode_seconds(model, context) for name, model in rows.items()} for _ in range(ROUNDS)]
    seconds = {name: statistics.median(each[name] for each in rounds) for name in rows}
    for name in measured:
        measured[name]["decode_speed"] = seconds["dense"] / seconds[name] if name in seconds else None
    beyond = sum(prompt.distance > recent for prompt in prompts) / len(prompts)
    return {"asked_beyond_window": beyond, "rows": measured}


def table(result: dict) -> str:
    """The report's table."""
    dense = result["rows"]["dense"]["cache_bytes"]
    rows = [
        row | {"name": name, "of_dense": row["cache_bytes"] and row["cache_bytes"] / dense}
        for name, row in result["rows"].items()
    ]
    return report.table_of(rows, COLUMNS)


def write_report(result: dict, out: Path, facts: str) -> str:
    """report.json, report.md and report.png into `out`; returns the Markdown."""
    report.write_json(out / "report.json", result)
    text = f"""# PoD on the standard library

{table(result)}

{facts}

![The same as a picture](report.png)
"""
    report.write(out / "report.md", text)
    rows = result["rows"]
    figure = report.figure(11, 2 + 1.35 * len(rows))
    grid = figure.add_gridspec(len(rows), 2, width_ratios=[1.9, 1])
    for index, (name, row) in enumerate(rows.items()):
        axes = figure.add_subplot(grid[index, 0])
        report.heat_map(
            axes,
            [[100 * value for value in cells] for cells in row["passkey_cells"]],
            [str(n) for n in LENGTHS],
            [f"{d:.0%}" for d in DEPTHS],
            f"{name}: pass-key digits right, % (context length, depth of the key)",
        )
    half = len(rows) // 2
    for part, key, title in (
        (grid[:half, 1], "bits_per_byte", "bits per byte, held-out modules"),
        (grid[half:, 1], "cache_bytes", f"cache bytes at {result['context']:,} tokens"),
    ):
        axes = figure.add_subplot(part)
        shown = {name: row[key] for name, row in rows.items() if row[key] is not None}
        bars = axes.barh(list(shown), list(shown.values()))
        axes.bar_label(bars, fmt="%.3f" if key == "bits_per_byte" else "{:,.0f}", fontsize=8, label_type="center")
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    report.save_figure(figure, out / "report.png", dpi=150)
    return text


def run(overrides: list[str]) -> Path:
    """The whole demo; returns the report's path.

    Raises:
        RecipeError, ValueError: an override that cannot be.
    """
    began = time.perf_counter()
    recipe = load_recipe(["recipe=tiny", "resume=auto", *overrides])
    out = output_folder(recipe)
    dense = load_recipe(["recipe=tiny", "resume=auto", *overrides, "blocks.kv_saving=0", f"output={out / 'dense'}"])
    for one in (recipe, dense):
        refuse_other(one)
    plain = write_data(recipe)
    for one in (recipe, dense):
        fit(one, analyze)
        export(output_folder(one), output_folder(one) / "export", dtype="float32", force=True)
    base = recipe.model.base
    context = recipe.data.sequence_length
    sinks, recent = recipe.model.sink_size, recipe.model.recent_size
    stock, tokenizer = models.load(base, "cpu", "float32")
    blocks = pod.LayerBlocks.load(out / "blocks.json")
    rows = {
        "dense": stock,
        "dense, extra steps": models.load(str(out / "dense" / "export"), "cpu", "float32")[0],
        "PoD, converted": pod.convert(base, blocks, sinks, recent, recipe.model.share).float().eval(),
        "PoD, adapted": models.load(str(out / "export"), "cpu", "float32")[0],
    }
    result = evaluate(rows, tokenizer, plain, context, sinks, recent)
    expected = pod.PodCache(rows["PoD, adapted"].config).expected_nbytes(context, itemsize=4)
    fitted, compared = result["rows"]["PoD, adapted"], result["rows"]["dense, extra steps"]
    saved = 1 - fitted["cache_bytes"] / result["rows"]["dense"]["cache_bytes"]
    result |= {
        "context": context,
        "kv_saving": blocks.kv_saving,
        "expected_cache_bytes": expected,
        "seconds": time.perf_counter() - began,
    }
    facts = "\n".join(
        [
            f"- kv_saving {blocks.kv_saving:.1%} as length grows; {saved:.1%} of the dense cache's bytes saved at "
            f"{context:,} tokens, where the formula says {expected:,} bytes.",
            f"- Window: {sinks} sinks + {recent} recent tokens; "
            f"{result['asked_beyond_window']:.0%} of the asked keys lie beyond it.",
            f"- PoD after {steps(recipe.trainer)} steps, against dense with the same steps: "
            f"{fitted['passkey'] / max(compared['passkey'], 1e-9):.3f} of the pass-key accuracy, bits per byte "
            f"{fitted['bits_per_byte'] / compared['bits_per_byte'] - 1:+.2%}.",
            f"- Decode speed: tokens/s relative to the dense base with transformers' cache, 4 rows, {DECODED} tokens "
            f"up to {context:,}, median of {ROUNDS} interleaved runs on CPU; steps so small are all overhead.",
            f"- Corpus, analysis, training, export and evaluation took {result['seconds'] / 60:.1f} minutes.",
        ]
    )
    print("\n" + write_report(result, out, facts))
    print(f"written: {out}/report.md, {out}/report.png, {out}/report.json; the model: {out}/export")
    return out / "report.md"


@exit_status
def main(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return
    run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
