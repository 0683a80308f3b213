"""What the commands have in common on a terminal."""

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import warnings

import pytest
from scripts import ROOT, script

from pod import generate, prepare
from pod.__main__ import commands
from pod.data import demo_corpus
from pod.data.tokenizer import load_tokenizer
from pod.evaluation import command
from pod.evaluation.models import load
from pod.evaluation.registry import EVALUATIONS, command_of
from pod.terminal import Stopped, exit_status
from pod.training.base_model import first_config


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


def lightnings_exit(*arguments):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemExit(1)  # noqa: B904


@pytest.mark.parametrize("main", [interrupted, lightnings_exit])
def test_an_interrupt_is_one_line(main, capsys):
    assert exit_status(main)([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


SCRIPTS = [f"eval/{path.name}" for path in ROOT.glob("eval/*.py") if "def main(" in path.read_text()]
SCRIPTS += ["data/corpus.py", "data/demo_corpus.py", "data/smollm2.py"]


@pytest.mark.parametrize("name", sorted([*(commands().keys() - {"eval"}), *EVALUATIONS, *SCRIPTS]))
def test_every_command_ends_alike(name, monkeypatch, capsys):
    """Ctrl-C is one line and status 130; what cannot be done is one line and status 2."""
    if name in EVALUATIONS:
        module, main = sys, command_of(name)
    else:
        module = script(name) if "/" in name else importlib.import_module(f"pod.{name}")
        main = module.main
    for error, status, said in (
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("a value\n  and why"), 2, "error: a value and why\n"),
        (OSError("a file"), 2, "error: a file\n"),
        (ImportError("a package"), 2, "error: a package\n"),
    ):

        def end(*_, error=error, **options):
            raise error

        # The first thing that each of them does, with options or with a recipe.
        monkeypatch.setattr(argparse.ArgumentParser, "add_argument", end)
        monkeypatch.setattr("pod.recipe.loading.load_recipe", end)
        if hasattr(module, "load_recipe"):
            monkeypatch.setattr(module, "load_recipe", end)
        assert main(["recipe=tiny"]) == status
        assert capsys.readouterr().err == said


def test_another_exit_is_left_alone():
    def leave(arguments):
        raise SystemExit(3)

    with pytest.raises(SystemExit) as ended:
        exit_status(leave)([])
    assert ended.value.code == 3
    assert exit_status(lambda arguments: 4)([]) == 4


def test_a_script_whose_training_was_stopped_says_how_to_go_on(capsys):
    def stop(arguments):
        raise Stopped(signal.SIGTERM, 9)

    assert exit_status(stop)([]) == 128 + signal.SIGTERM
    assert capsys.readouterr().out.startswith("stopped at step 9; go on with: python ")


def test_noise_is_left_out_of_commands_alone(capsys, recwarn):
    log = logging.getLogger("DeepSpeed")
    lines = []
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    noise = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."

    def main(arguments):
        log.warning(noise)
        log.warning("the optimizer was changed")
        warnings.warn("Checkpoint directory /x/steps exists and is not empty.", stacklevel=1)
        warnings.warn("the loss is not finite", stacklevel=1)
        return 0

    exit_status(main)([])
    assert lines == ["the optimizer was changed"]
    assert [str(one.message) for one in recwarn] == ["the loss is not finite"]
    lines.clear()
    main([])
    log.removeHandler(handler)
    assert len(lines) == 2 and len(recwarn) == 3


def test_what_is_no_directory_is_said_to_be_looked_for_on_the_hub(capsys):
    for _ in range(2):  # said once
        with pytest.raises(ValueError, match="exports/not-there.* from the hub, and it is no directory here"):
            load("exports/not-there")
    assert capsys.readouterr().err == "exports/not-there: no such directory here; looking on the hub\n"
    with pytest.raises(ValueError, match="no tokenizer can be loaded from 'words/not-there'"):
        load_tokenizer("words/not-there")
    assert capsys.readouterr().err == "words/not-there: no such directory here; looking on the hub\n"
    with pytest.raises(ValueError, match="no model at 'models/not-there': it is no directory or hub model"):
        first_config("models/not-there", None)
    assert "models/not-there: no such directory here; looking on the hub" in capsys.readouterr().err
    with pytest.raises(ValueError, match="/not/there/at/all: no such directory"):
        load("/not/there/at/all")
    assert capsys.readouterr().err == ""


def test_a_prompt_file_that_is_not_there_is_said_in_words(tmp_path, capsys):
    assert generate.main(["--ckpt", "x", "--prompt-file", str(tmp_path / "nowhere.txt")]) == 2
    assert f"--prompt-file {tmp_path / 'nowhere.txt'}: there is no such file" in capsys.readouterr().err


def test_a_training_run_is_named_before_other_options_are_judged(tmp_path, capsys):
    (tmp_path / "run" / "steps").mkdir(parents=True)
    line = ["--ckpt", str(tmp_path / "run"), "--depths", "1", "--out", str(tmp_path / "out")]
    assert script("eval/passkey.py").main(line) == 2
    assert "is a training run: export it first" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["256,512"], ["256", "512"], ["256,512", "1024"]])
def test_numbers_are_taken_with_commas_and_with_spaces(given):
    parser = argparse.ArgumentParser()
    command.add_numbers(parser, "--lengths", [1], "tokens")
    assert parser.parse_args([]).lengths == [1]
    found = parser.parse_args(["--lengths", *given]).lengths
    assert found == [int(part) for part in ",".join(given).split(",")]
    with pytest.raises(SystemExit):
        parser.parse_args(["--lengths", "256,x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, begun",
    [
        ("while modules are read", f"runpy.run_path({str(ROOT / 'data/prepare.py')!r}, run_name='__main__')"),
        ("after a fork", f"runpy.run_path({str(ROOT / 'data/prepare.py')!r}, run_name='__main__')"),
        ("after a fork", "runpy.run_module('pod.prepare', run_name='__main__', alter_sys=True)"),
    ],
    ids=["while modules are read", "after a fork", "after a fork, as a module"],
)
def test_preparing_is_interrupted_at_once(moment, begun, tmp_path):
    """A traceback of imports; and an exception in what Python runs after a fork is dropped, so preparing went on."""
    (tmp_path / "modules").mkdir()
    if moment == "while modules are read":
        (tmp_path / "modules" / "numpy.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    # Modules are read before: a library that forks to look at the machine is not what is interrupted here.
    first = "import pod.prepare, pod.data.sample_writer; sys.modules.pop('pod.prepare')" if "module" in begun else ""
    begin = f"""if True:
        import os, runpy, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
        {first}
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 2))
        {begun}
    """
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.jsonl").write_text('{"text": "a text"}\n' * 9)
    options = ["--tokenizer", "bytes", "--sequence-length", "8", "--num-proc", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", begin, "--source", str(tmp_path / "in"), *options]
    paths = os.pathsep.join([str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.endswith("\ninterrupted\n") and done.stderr.count("interrupted") == 1
    assert not (tmp_path / "out").exists()


def test_preparing_is_interrupted_in_one_line(tmp_path, capsys, monkeypatch):
    corpus = demo_corpus
    monkeypatch.setattr(prepare, "prepare", interrupted)
    monkeypatch.setattr(corpus, "write_corpus", interrupted)
    out = ["--out", str(tmp_path / "out")]
    source = ["--source", str(tmp_path), "--tokenizer", "bytes", "--sequence-length", "8"]
    assert prepare.main([*out, *source]) == 130
    assert corpus.main([*out, "--samples", "1", "--validation-samples", "1"]) == 130
    assert capsys.readouterr().err == "interrupted\n" * 2
