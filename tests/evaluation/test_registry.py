"""Evaluations by name, the scripts that name them, and what a further benchmark takes."""

import json
import sys

import pytest
from scripts import ROOT, script

from pod import eval as by_name
from pod.evaluation import runner
from pod.evaluation.benchmark import Benchmark, command
from pod.evaluation.registry import EVALUATIONS, command_of


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_name_and_its_script_are_one_command(name, capsys, monkeypatch):
    assert script(f"eval/{name}.py").main is command_of(name)
    said = []
    for called, run in (
        (f"eval/{name}.py", command_of(name)),
        ("pod/eval.py", lambda more: by_name.main([name, *more])),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit) as ended:
            run(["--help"])
        assert ended.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(f"usage: python eval/{name}.py ")
    assert said[1].startswith(f"usage: python -m pod.eval {name} ")
    assert f"\n    python eval/{name}.py --" in said[0] or name == "report"


def test_a_name_that_is_none_and_all_that_are(capsys):
    with pytest.raises(SystemExit) as ended:
        by_name.main(["longbank"])
    assert ended.value.code == 2 and "'longbank' (choose from 'longbench', 'ruler', " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        by_name.main(["--help"])
    said = capsys.readouterr().out
    assert all(what in said for _, what in EVALUATIONS.values())


@pytest.mark.parametrize("folder", ["eval", "data"])
def test_no_script_changes_where_modules_are_looked_for(folder):
    for path in (ROOT / folder).glob("*.py"):
        assert "sys.path" not in path.read_text(), path


class Echo(Benchmark):
    """A benchmark of two sets, one of which has parts."""

    name = "echo"

    @staticmethod
    def add_options(parser):
        parser.add_argument("--words", nargs="+", default=["ab", "cd"])

    def __init__(self, options):
        super().__init__(options)
        self.settings, self.lengths = {"words": options.words}, [3]

    def prompts(self, tokenizer):
        for name in ("plain", "parts"):
            yield name, [runner.Request(key=word, text=f"say {word}", max_new_tokens=2) for word in self.options.words]

    def score(self, name, rows):
        hits = {row["key"]: 100.0 * row["pred"].startswith(row["key"]) for row in rows}
        return hits if name == "parts" else sum(hits.values()) / len(hits)

    def aggregate(self, scores):
        return {"all": scores["plain"], "missing": None}

    def write(self, scores, counts, folder):
        (folder / "scores.json").write_text(json.dumps({"scores": scores, "counts": counts}))


def test_a_further_benchmark_is_what_it_says_of_itself(ckpt, tmp_path, capsys, monkeypatch):
    main, out = command(Echo, Echo.__doc__), tmp_path / "out"
    method = "h2o:budget=48"
    arguments = ["--ckpt", str(ckpt), "--out", str(out), "--batch-size", "2", "--eviction", method]
    assert main(arguments) == 0
    for folder in (out, out / method.replace(":", "-")):
        rows = [json.loads(line) for line in (folder / "plain.jsonl").read_text().splitlines()]
        assert [row["key"] for row in rows] == ["ab", "cd"]
        assert json.loads((folder / "settings.json").read_text())["words"] == ["ab", "cd"]
        written = json.loads((folder / "scores.json").read_text())
        assert written["counts"] == {"plain": 2, "parts": 2} and set(written["scores"]["parts"]) == {"ab", "cd"}
    table = (out / "comparison.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["plain", "parts ab", "parts cd", "all"]
    assert table in capsys.readouterr().out
    # Nothing is predicted twice, and what the predictions say is what is scored.
    (out / "plain.jsonl").write_text("".join(json.dumps({"key": k, "pred": k}) + "\n" for k in ("ab", "cd")))
    monkeypatch.setattr(runner, "_generate", None)
    assert main(arguments) == 0
    assert json.loads((out / "scores.json").read_text())["scores"]["plain"] == 100.0
    # Sample by sample against the first column, only of sets whose score is their samples' mean.
    (out / method.replace(":", "-") / "plain.jsonl").write_text(
        "".join(json.dumps({"key": k, "pred": "ab"}) + "\n" for k in ("ab", "cd"))
    )
    assert main(arguments) == 0
    last = (out / "comparison.md").read_text().splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == [
        "of none, 2 samples [95 %]", "1", "0.50 [0.00, 1.00]",
    ]  # fmt: skip
    assert main([*arguments, "--words", "ef"]) == 2
    assert "predictions with words ['ab', 'cd'], now it is ['ef']" in capsys.readouterr().err
    assert main(arguments[2:]) == 2 and "--ckpt is missing" in capsys.readouterr().err
