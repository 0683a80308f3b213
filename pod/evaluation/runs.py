"""The papers' tables of benchmark runs, published rows beside ours: PoD's Tables 1, 3 and 4, CAKE's and Cascade's.

    python eval/report.py runs/longbench/dense runs/longbench/llama3-32k
    python eval/report.py runs/longbench/* --baseline runs/longbench/dense --no-published

A run is a folder that `eval/longbench.py`, leval.py, infinitebench.py or needlebench.py wrote: `scores.json`,
`settings.json` (what the model is, and the eviction method) and, of LongBench, `cache.json`, from which the measured
saving comes. Runs of LongBench make one table, those of each other benchmark a table of their own. Degradation is the
loss of the average against the baseline, by default the first dense run; a run of other prompts (--max-length and the
like) or of other samples (--limit) has none, and a note says so. Where an L-Eval run of the same weights and method is
there too, LongBench's degradation is the mean of both losses, as in the paper's Table 4. Writes report.md, report.csv
(LongBench), report.json and report.png.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

from pod import eviction as methods
from pod.evaluation import command, report, tables
from pod.evaluation.longbench import BOTH, CATEGORIES, PUBLISHED
from pod.files import read_json
from pod.terminal import exit_status

SCORES = (*CATEGORIES, "PoD average")
HEADINGS = ("SQA", "MQA", "Summ", "Few-shot", "Code", "Avg.")
COLUMNS = ("method", "window", *HEADINGS, "KV saving, %", "degradation, %", "stage")
IDENTITY = ("weights", "eviction", "parameters")  # settings that say which model and method a run is of
# What `pod.evaluation.models.facts` says of a model.
FACTS = {"kind": str, "tokens": int | None, "sink_size": int, "recent_size": int}
CAVEATS = """\
- Published rows are copied from arXiv 2412.02252, Tables 1 and 4 (LLaMA3-8B-32K, sinks 16, recent 4080, delta 0.5).
  They were not run here, and other models' rows cannot be compared with them.
- Their KV saving is the paper's statement. Ours is measured on the cache's tensors after the longest prompt's prefill.
- Their degradation is printed as published, over LongBench and L-Eval. By the paper's own rule, the mean of both
  relative losses, it would be 1.1 % for PoD and 2.9 % for PoD + SnapKV. Ours is that rule where L-Eval was run with the
  same weights and method, baseline included (a note says so), else of the LongBench average alone.
- The paper's dense row saw its 5B tokens once and PoD twice. A fair dense run has the same extra training.
- In the paper's Table 4 one cell spans LM-Infinite to trained window attention, saving and stage; it is repeated here.
- Methods with an observation window see the question at the end of a prompt."""


def read_run(folder: Path) -> dict[str, Any]:
    """One run as a row: the columns' values, `is_dense`, `source`; what is not known is None.

    Raises:
        ValueError: no such run, or a file that is not what `eval/longbench.py` writes.
    """
    scores = _read(folder / "scores.json")
    averages, sets = scores.get("averages"), _field(scores, folder / "scores.json", "scores", dict, {})
    kind_of_run = tables.benchmark_of(sets, averages) if isinstance(averages, dict) else None
    if kind_of_run is None:
        raise ValueError(
            f"{folder}/scores.json: field 'averages' with {', '.join(SCORES)} is missing, and it is no run of L-Eval, "
            "InfiniteBench or NeedleBench"
        )
    numbers = [(name, value) for one in (averages, *_parts(sets)) for name, value in one.items()]
    for name, value in numbers:
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(f"{folder}/scores.json: {name!r} must be a number or null, got {value!r}")
    settings_file, cache_file = folder / "settings.json", folder / "cache.json"
    settings = _read(settings_file) if settings_file.exists() else {}
    saving = _field(_read(cache_file), cache_file, "saving", int | float, None) if cache_file.exists() else None
    model = _field(settings, settings_file, "model", dict, {})
    for name, types in FACTS.items():
        if model and name in ("kind", "tokens") or name in model:
            _field(model, settings_file, name, types, None)
    text = _field(settings, settings_file, "eviction", str | None, None)
    method = _method(text, settings, settings_file) if text else None
    _field(settings, settings_file, "max_length", int | None, None)
    kind = model.get("kind", "dense")
    parts = [*([kind] if kind != "dense" else []), *([type(method).__name__] if method else [])]
    return {
        "source": str(folder),
        "method": f"{' + '.join(parts) or 'dense'} ({folder.name})" if model or method else folder.name,
        "window": _window(model, kind, method),
        "benchmark": kind_of_run,
        "scores": [averages[name] for name in SCORES] if kind_of_run == "longbench" else [],
        "values": {
            table.title: table.values(sets, averages) for table in tables.TABLES if table.benchmark == kind_of_run
        },
        "identity": [settings.get(name) for name in IDENTITY] if settings.get("weights") else None,
        "asked": {name: value for name, value in settings.items() if name not in (*IDENTITY, "ckpt", "model")},
        "kv_saving": None if saving is None else 100 * saving,
        "degradation": None,
        "stage": _stage(method, kind != "dense"),
        "is_dense": bool(model) and not parts,
        "samples": _field(scores, folder / "scores.json", "samples", dict, {}),
    }


def _parts(sets: dict) -> list[dict]:
    """The scores of sets that have one, and of each that has several."""
    return [{name: value for name, value in sets.items() if not isinstance(value, dict)}] + [
        value for value in sets.values() if isinstance(value, dict)
    ]


def _read(path: Path) -> dict:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: not there; RUNS are folders that a benchmark wrote scores into") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, as benchmarks write it, got {str(content)[:60]}")
    return content


def _field(content: dict, path: Path, name: str, types: Any, default: Any) -> Any:
    """A field of a file; the default where it is missing, unless that is None and None is not of the types."""
    value = content.get(name, default)
    if not isinstance(value, types) or isinstance(value, bool):
        wanted = str(getattr(types, "__name__", types))
        raise ValueError(f"{path}: field {name!r} must be {wanted}, got {value!r}")
    return value


def _method(text: str, settings: dict, path: Path) -> Any:
    """The eviction method that ran, with what its hyper-parameters were then.

    Raises:
        ValueError: they were not noted.
    """
    methods.parse(text)
    if settings.get("parameters") is None:
        raise ValueError(
            f"{path} notes no parameters of {text}, as by earlier versions, and defaults may have changed: run "
            "eval/longbench.py again into another --out"
        )
    try:
        return methods.of_hyper_parameters(_field(settings, path, "parameters", dict, None))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the parameters of {text} are none of this library's: {error}") from error


def _window(model: dict, kind: str, method: Any) -> str:
    """Tokens kept, `sinks+others` where a method or a model keeps sinks apart."""
    if method is not None:
        sinks = 0
        if isinstance(method, methods.Cascade | methods.StreamingLLM):
            # These keep as many first tokens as the model has sinks, at least.
            sinks = max(method.sinks, model.get("sink_size", 0))
        rest = f"{method.budget:.3g} of the prompt" if method.is_share else _short(method.budget - sinks)
        return f"{sinks}+{rest}" if sinks and not method.is_share else rest
    limit = model.get("tokens")
    if kind in ("dense", "CLA"):
        return "" if limit is None else _short(limit)
    sinks, recent = model["sink_size"], model["recent_size"]
    if kind == "window attention":
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


def compare(rows: list[dict[str, Any]], baseline: str | None) -> list[str]:
    """Enter each row's degradation, in percent of the baseline's average, where the two can be compared.

    Args:
        rows: of one benchmark, the last of their `scores` the average.
        baseline: the folder of a run, or of one of another benchmark with the same weights and method.

    Returns:
        A note for each run that cannot, and one when there is no baseline.
    """
    if baseline is not None:
        base = read_run(Path(baseline))
        found = [row for row in rows if Path(row["source"]).resolve() == Path(baseline).resolve()]
        found += [row for row in rows if base["identity"] is not None and row["identity"] == base["identity"]]
    else:
        found = [row for row in rows if row["is_dense"]]
    if not found:
        return ["No run is known to be dense, so there is no degradation: name one with --baseline."]
    base, notes = found[0], []
    for row in rows:
        average, reasons = row["scores"][-1], _differences(row, base)
        if reasons:
            notes.append(f"{row['method']} cannot be compared with {base['method']}: {', '.join(reasons)}.")
        elif base["scores"][-1] and average is not None and row is not base:
            row["degradation"] = 100 * (base["scores"][-1] - average) / base["scores"][-1]
    return notes


def both_losses(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Make the degradation of LongBench rows the mean of it and that of L-Eval's row of the same weights and method.

    Returns:
        A note that names them.
    """
    losses = {json.dumps(one["identity"]): one["degradation"] for one in others if one["identity"] is not None}
    found = []
    for row in rows:
        other = losses.get(json.dumps(row["identity"]))
        if row["degradation"] is not None and other is not None:
            row["degradation"] = (row["degradation"] + other) / 2
            found.append(row["method"])
    return [f"Degradation over LongBench and L-Eval, the mean of both losses: {', '.join(found)}."] if found else []


def _differences(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """What two runs were not asked alike."""
    found = []
    for name in sorted(row["asked"].keys() | base["asked"].keys()):
        mine, theirs = row["asked"].get(name), base["asked"].get(name)
        if mine != theirs and name == "max_length":
            found.append(f"prompts of {mine} tokens and not of {theirs}")
        elif mine != theirs:
            found.append(f"{name} is {mine} and not {theirs}")
    both = sorted(set(row["samples"]) & set(base["samples"]))
    other = [name for name in both if row["samples"][name] != base["samples"][name]]
    if other:
        more = f" (and other numbers of {len(other) - 1} more sets)" if len(other) > 1 else ""
        found.append(f"{row['samples'][other[0]]} samples of {other[0]} and not {base['samples'][other[0]]}{more}")
    return found


def paper_table(
    table: tables.Table, rows: list[dict[str, Any]], baseline: str | None, with_published: bool
) -> tuple[str, list[dict[str, Any]]] | None:
    """A paper's table as Markdown, and its rows with their degradation; None where no run has what it shows."""
    mine = [row["values"][table.title] for row in rows]
    headings = table.headings(mine)
    rows = [row | {"scores": table.row(one, headings)} for row, one in zip(rows, mine, strict=True)]
    if not any(value is not None for row in rows for value in row["scores"]):
        return None
    notes = compare(rows, baseline)
    lines = [(row["method"], row["scores"], row["degradation"]) for row in rows]
    if with_published:
        known = {name: table.row(values, headings) for name, values in table.published.items()}
        lines += [(f"{name}, published", row, None) for name, row in known.items() if any(v is not None for v in row)]
        notes += table.notes if len(lines) > len(rows) else ()
    made = report.markdown_table(
        ["method", *headings, "degradation, %"],
        [[name, *(_text(one, 2) for one in row), _text(loss, 1)] for name, row, loss in lines],
    )
    return "\n\n".join(
        [f"## {table.title}", made, *(["\n".join(f"- {note}" for note in notes)] if notes else [])]
    ), rows


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def published_rows() -> list[dict[str, Any]]:
    """The paper's rows as those of `read_run`."""
    return [
        {
            "source": "arXiv 2412.02252", "method": f"{name}, published", "window": window, "scores": list(scores),
            "kv_saving": saving, "degradation": loss, "stage": stage, "is_dense": False, "samples": {},
        }
        for name, window, *scores, saving, loss, stage in PUBLISHED
    ]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    scores = [_text(value, 2) for value in row["scores"]]
    rest = [_text(row["kv_saving"], 1), _text(row["degradation"], 1), row["stage"]]
    return [row["method"], row["window"], *scores, *rest]


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


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that a benchmark wrote")
    parser.add_argument("--baseline", help="the run that degradation is measured against (the first dense one)")
    parser.add_argument("--no-published", action="store_true", help="leave the paper's rows out")
    options = command.parse(parser, "report", arguments)
    every = [read_run(folder) for folder in options.runs]
    if options.baseline and Path(options.baseline).resolve() not in [folder.resolve() for folder in options.runs]:
        known = ", ".join(map(str, options.runs))
        raise ValueError(f"--baseline {options.baseline} is none of the runs {known}")
    sections, found = [], {}
    for table in tables.TABLES:
        mine = [row for row in every if row["benchmark"] == table.benchmark]
        made = paper_table(table, mine, options.baseline, not options.no_published)
        if made is not None:
            sections.append(made[0])
            found[table.title] = made[1]
    rows, notes, lines = [row for row in every if row["benchmark"] == "longbench"], [], []
    if rows:
        notes = compare(rows, options.baseline)
        notes += both_losses(rows, found.get(tables.TABLES[0].title, []))
        rows += [] if options.no_published else published_rows()
        lines = [cells(row) for row in rows]
        text = report.markdown_table(COLUMNS, lines)
        if notes or not options.no_published:
            text += "\n\n" + "\n".join([f"- {note}" for note in notes] + ([] if options.no_published else [CAVEATS]))
        draw(rows, options.out / "report.png")
        picture = "\n\n![The same as a picture](report.png)"
        sections.insert(0, f"## LongBench (PoD's Tables 1 and 4)\n\n{text}{picture}")
    report.write(options.out / "report.md", "\n\n".join(["# The papers' tables", *sections]) + "\n")
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *lines])
    report.write(options.out / "report.csv", table.getvalue())
    report.write_json(options.out / "report.json", {"rows": rows, "notes": notes, "tables": found})
    print("\n\n".join(sections))
    kinds = ("md", "csv", "json", "png") if rows else ("md", "csv", "json")
    print("\nwritten: " + ", ".join(f"{options.out}/report.{kind}" for kind in kinds))
