"""One table of several LongBench runs, in the layout of the PoD paper's Tables 1 and 4, published rows beside ours.

    python eval/report.py runs/longbench/dense runs/longbench/llama3-32k
    python eval/report.py runs/longbench/* --baseline runs/longbench/dense --no-published

A run is the folder that `eval/longbench.py` wrote: `scores.json`, `settings.json` (its --ckpt) and `cache.json`, from
which the measured saving comes. Degradation is the loss of the average against the baseline, by default the first dense
run. Writes report.md, report.csv, report.json and report.png.
"""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from pod import eviction as methods
from pod.evaluation import command, report
from pod.evaluation.longbench import CATEGORIES
from pod.files import check_writable

SCORES = (*CATEGORIES, "PoD average")
HEADINGS = ("SQA", "MQA", "Summ", "Few-shot", "Code", "Avg.")
COLUMNS = ("method", "window", *HEADINGS, "KV saving, %", "degradation, %", "stage")
BOTH = "prefilling & decoding"
# arXiv 2412.02252, Tables 1 and 4: method, window, category scores, average, KV saving, degradation, stage.
PUBLISHED = (
    ("LLaMA3-8B-32K", "32K", 32.94, 32.23, 25.41, 69.30, 66.54, 45.28, None, None, ""),
    ("SnapKV", "4K", 31.76, 31.85, 21.92, 68.62, 66.72, 44.17, 87.5, 4.3, "prefilling"),
    ("PyramidKV", "4K", 33.34, 31.51, 23.76, 68.91, 66.36, 44.78, 93.6, 3.4, "prefilling"),
    ("Quest", "4K", 32.14, 32.19, 24.27, 69.05, 66.43, 44.82, 0.0, 1.4, BOTH),
    ("LM-Infinite", "16+4080", 28.83, 28.95, 21.74, 68.12, 66.54, 42.84, 87.5, 7.7, BOTH),
    ("StreamingLLM", "16+4080", 28.68, 28.95, 21.64, 68.14, 66.60, 42.80, 87.5, 8.0, BOTH),
    ("H2O", "96+4000", 29.36, 29.51, 22.73, 68.45, 66.17, 43.24, 87.5, 7.4, BOTH),
    ("window attention", "4K", 8.90, 3.63, 9.05, 11.13, 41.08, 14.76, 87.5, 65.9, BOTH),
    ("window attention, trained", "4K", 26.94, 27.95, 22.29, 66.60, 66.10, 41.97, 87.5, 12.6, BOTH),
    ("CLA", "32K", 24.02, 22.58, 22.50, 60.92, 59.35, 37.87, 50.0, 31.4, BOTH),
    ("PoD", "16+4080+28K", 30.97, 32.43, 24.82, 67.30, 68.26, 44.75, 35.0, 2.8, BOTH),
    ("PoD + SnapKV", "4K", 30.98, 32.68, 22.90, 66.90, 67.79, 44.25, 91.9, 3.1, BOTH),
)
CAVEATS = """\
- Published rows are copied from arXiv 2412.02252, Tables 1 and 4 (LLaMA3-8B-32K, sinks 16, recent 4080, delta 0.5).
  They were not run here, and other models' rows cannot be compared with them.
- Their KV saving is the paper's statement. Ours is measured on the cache's tensors after the longest prompt's prefill.
- Their degradation is printed as published, over LongBench and L-Eval. By the paper's own rule, the mean of both
  relative losses, it would be 1.1 % for PoD and 2.9 % for PoD + SnapKV. Ours is of the LongBench average alone.
- The paper's dense row saw its 5B tokens once and PoD twice. A fair dense run has the same extra training.
- In the paper's Table 4 one cell spans LM-Infinite to trained window attention, saving and stage; it is repeated here.
- Methods with an observation window see the question at the end of a prompt."""


def read_run(folder: Path) -> dict[str, Any]:
    """One run as a row: the columns' values, `is_dense`, `source`; what is not known is None.

    Raises:
        ValueError: no such run, or a file that is not what `eval/longbench.py` writes.
    """
    scores = _read(folder / "scores.json")
    averages = scores.get("averages") if isinstance(scores, dict) else None
    if not isinstance(averages, dict) or any(name not in averages for name in SCORES):
        raise ValueError(f"{folder}/scores.json: field 'averages' with {', '.join(SCORES)} is missing")
    for name in SCORES:
        if averages[name] is not None and not isinstance(averages[name], int | float):
            raise ValueError(f"{folder}/scores.json: {name!r} must be a number or null, got {averages[name]!r}")
    settings = _read(folder / "settings.json") if (folder / "settings.json").exists() else {}
    cache = _read(folder / "cache.json") if (folder / "cache.json").exists() else {}
    if cache and not isinstance(cache.get("saving"), int | float):
        raise ValueError(f"{folder}/cache.json: field 'saving' (a number) is missing")
    config_file = Path(settings.get("ckpt") or folder) / "config.json"
    config = _read(config_file) if config_file.exists() else {}
    anchors = config.get("anchors")
    shares = anchors is not None and any(anchor < row for row, heads in enumerate(anchors) for anchor in heads)
    eviction = settings.get("eviction")
    method = methods.parse(eviction) if eviction else None
    share = config.get("share")
    own = "window attention" if share == "window" else {"kv": "CLA"}.get(share, "PoD") if shares else None
    parts = [*([own] if own else []), *([type(method).__name__] if method else [])]
    return {
        "source": str(folder),
        "method": f"{' + '.join(parts) or 'dense'} ({folder.name})" if config or eviction else folder.name,
        "window": _window(config, method, shares),
        "scores": [averages[name] for name in SCORES],
        "kv_saving": 100 * cache["saving"] if cache else None,
        "degradation": None,
        "stage": _stage(method, own is not None),
        "is_dense": bool(config) and not parts,
    }


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not there; RUNS are folders that eval/longbench.py wrote scores into") from None
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON: {error}") from error


def _window(config: dict, method: Any, shares: bool) -> str:
    if method is not None:
        return _short(method.budget)
    limit = config.get("max_position_embeddings")
    share = config.get("share")
    if share != "window" and (not shares or share == "kv"):
        return "" if limit is None else _short(limit)
    sinks, recent = config["sink_size"], config["recent_size"]
    if share == "window":
        return f"{sinks}+{recent}" if sinks else _short(recent)
    rest = "" if limit is None else f"+{_short(max(0, limit - sinks - recent))}"
    return f"{sinks}+{recent}{rest}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _stage(method: Any, shares: bool) -> str:
    """When a row's cache is smaller than the dense one."""
    if method is not None and not shares and isinstance(method, methods.Eviction) and not method.when:
        return "prefilling"
    return BOTH if shares or method is not None else ""


def compare(rows: list[dict[str, Any]], baseline: str | None) -> None:
    """Enter each row's degradation, in percent of the baseline's average.

    Raises:
        ValueError: the baseline is no run of the table.
    """
    if baseline is not None:
        found = [row for row in rows if Path(row["source"]).resolve() == Path(baseline).resolve()]
        if not found:
            raise ValueError(f"--baseline {baseline} is none of the runs {', '.join(row['source'] for row in rows)}")
    else:
        found = [row for row in rows if row["is_dense"]]
    base = found[0]["scores"][-1] if found else None
    for row in rows:
        average = row["scores"][-1]
        if base and average is not None and row is not found[0]:
            row["degradation"] = 100 * (base - average) / base


def published_rows() -> list[dict[str, Any]]:
    """The paper's rows as those of `read_run`."""
    return [
        {
            "source": "arXiv 2412.02252", "method": f"{name}, published", "window": window, "scores": list(scores),
            "kv_saving": saving, "degradation": loss, "stage": stage, "is_dense": False,
        }
        for name, window, *scores, saving, loss, stage in PUBLISHED
    ]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""

    def text(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    scores = [text(value, 2) for value in row["scores"]]
    return [row["method"], row["window"], *scores, text(row["kv_saving"], 1), text(row["degradation"], 1), row["stage"]]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Average score against KV saving; runs filled, published rows hollow. Rows that lack one of both are left out."""
    figure = report.figure(7, 4.5)
    axes = figure.add_subplot()
    for row in rows:
        average, saving = row["scores"][-1], row["kv_saving"]
        if saving is None and row["method"].startswith("LLaMA3-8B-32K"):
            saving = 0.0  # the dense row
        if average is None or saving is None:
            continue
        is_ours = not row["method"].endswith("published")
        axes.scatter(
            [saving], [average], s=36, color="C0" if is_ours else "none", edgecolors="C0" if is_ours else "grey"
        )
        axes.annotate(row["method"], (saving, average), fontsize=6, xytext=(4, 3), textcoords="offset points")
    axes.set(xlabel="KV cache saved, % (measured; published: as stated)", ylabel="LongBench, mean of five categories")
    report.save_figure(figure, path, dpi=150)


@command.exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python eval/report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that eval/longbench.py wrote")
    parser.add_argument("--baseline", help="the run that degradation is measured against (the first dense one)")
    parser.add_argument("--no-published", action="store_true", help="leave the paper's rows out")
    parser.add_argument("--out", type=Path, default=command.default_folder("report"), help="folder of what is written")
    options = parser.parse_args(arguments)
    check_writable(options.out)
    rows = [read_run(folder) for folder in options.runs]
    compare(rows, options.baseline)
    rows += [] if options.no_published else published_rows()
    lines = [cells(row) for row in rows]
    text = report.markdown_table(COLUMNS, lines) + ("" if options.no_published else f"\n\n{CAVEATS}")
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *lines])
    report.write(options.out / "report.md", f"# LongBench\n\n{text}\n\n![The same as a picture](report.png)\n")
    report.write(options.out / "report.csv", table.getvalue())
    report.write_json(options.out / "report.json", {"rows": rows})
    draw(rows, options.out / "report.png")
    print(text)
    print("\nwritten: " + ", ".join(f"{options.out}/report.{kind}" for kind in ("md", "csv", "json", "png")))


if __name__ == "__main__":
    sys.exit(main())
