"""Which kernels are taken: what a trial refuses, what the command keeps of it, who reads that.

No GPU is needed: trials run on the CPU, and the command asks torch for no more than the GPU's name.
"""

import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pod import autotune
from pod.model import trial as trials
from pod.model.shape import Shape
from pod.model.trial import Trial, report
from pod.training.module import PodModule
from pod_kernels import attention, block_tables, composed, dispatch
from pod_kernels.dispatch import Choice, ShapeClass

GPU = "Pretended H100"
SHAPES = ShapeClass(GPU, "float32", 16, 0, "forward")
SHAPE = Shape(layers=2, hidden=64, intermediate=64, heads=4, kv_heads=2, head_dim=16, vocab=64)
TRIAL = Trial("training", "float32", 16, 4, 2, 61, "fused", device="cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A GPU by name, an empty cache of the user's, and choices that are read anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=GPU))
    monkeypatch.setattr(dispatch, "_fixed", None)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(trials, "RUNS", 3)
    monkeypatch.setattr(trials, "ROUNDS", 3)
    dispatch._of_machine.cache_clear()
    yield
    dispatch._of_machine.cache_clear()


# ---------------------------------------------------------------------------------------------------- a trial


def wrong(problem):
    out, lse, gate = composed.attend(problem)
    return out * 1.001, lse, gate


def wrong_backward(problem):
    out, lse, gate = composed.attend(problem)
    out.register_hook(lambda grad: grad * 1.001)
    return out, lse, gate


def unwritten(problem):
    """Leaves a part of its output as it found it."""
    out, lse, gate = composed.attend(problem)
    memory = torch.empty_like(out)
    memory[:, :, 1:] = out[:, :, 1:]
    return memory, lse, gate


def irregular(problem):
    out, lse, gate = composed.attend(problem)
    return out + 1e-7 * torch.randn_like(out), lse, gate


def slow(problem):
    time.sleep(0.3)
    return composed.attend(problem)


def broken(problem):
    raise RuntimeError("an illegal access\nand more")


def too_large(problem):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (wrong, r"^the output of 61 tokens, plain: the (mean|largest) error is .*, that of plain matmuls "),
        (wrong_backward, r"^the gradient of q of 61 tokens, plain: the (mean|largest) error is "),
        (unwritten, r"^the output of 61 tokens, plain has 64 numbers that are not finite"),
        (irregular, r"^the output of 61 tokens, plain, differs from run to run"),
        (broken, "^RuntimeError: an illegal access$"),
        (too_large, "^61 tokens do not fit$"),
    ],
)
def test_what_is_wrong_is_refused(kernel, reason, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "fused", kernel)
    found = report(TRIAL)
    assert found["ratio"] is None
    assert re.search(reason, found["reason"]), found
    assert not os.environ.get(dispatch.VARIABLE)
    torch.use_deterministic_algorithms(False)


def test_what_is_right_is_timed(monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "fused", composed.attend)
    monkeypatch.setitem(attention.BACKENDS, "composed", slow)
    forward = replace(TRIAL, work="forward")
    found = report(forward)
    assert found["reason"] is None and found["ratio"] < 0.9
    monkeypatch.setitem(attention.BACKENDS, "composed", composed.attend)
    monkeypatch.setitem(attention.BACKENDS, "fused", slow)
    assert report(forward)["ratio"] > 1.1
    monkeypatch.setitem(attention.BACKENDS, "fused", composed.attend)
    for dtype in ("float32", "float16", "bfloat16"):
        assert report(replace(TRIAL, dtype=dtype))["reason"] is None


def test_half_precision_has_its_own_yardstick(monkeypatch):
    def rounded(problem):
        out, lse, gate = composed.attend(problem)
        return out.bfloat16().to(out.dtype), lse, gate

    monkeypatch.setitem(attention.BACKENDS, "fused", rounded)
    assert report(replace(TRIAL, dtype="bfloat16"))["reason"] is None
    assert "the output" in report(TRIAL)["reason"]


@pytest.mark.slow
def test_decoding_by_the_kernels(monkeypatch):
    decode, started = pytest.importorskip("pod_kernels.triton.decode"), []
    run = decode.cached_decode
    monkeypatch.setattr(decode, "cached_decode", lambda asked: started.append(1) or run(asked))
    assert report(replace(TRIAL, work="decode"))["reason"] is None and started  # Triton's interpreter runs them


def test_decoding_by_what_is_wrong_is_refused(monkeypatch):
    pytest.importorskip("triton")
    decoding = replace(TRIAL, work="decode")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert report(decoding)["reason"].startswith("ValueError: POD_ATTENTION_BACKEND=fused cannot run here: ")
    for name in ("slots", "chain", "keep"):  # torch decodes in the kernels' place
        monkeypatch.setattr(sys.modules[f"pod.cache.{name}"], "runs_triton", lambda states: False)
    assert report(decoding)["reason"] is None
    attend = sys.modules["pod.cache.slots"].cached_attention
    for kind, options in {"that keeps all": {}, "that skips": {"tau": 0.7}}.items():

        def wrong(*args, options=options, **given):
            out = attend(*args, **given)
            is_meant = os.environ[dispatch.VARIABLE] == "fused" and options.items() <= given.items()
            return out * 1.001 if is_meant else out

        monkeypatch.setattr(sys.modules["pod.cache.slots"], "cached_attention", wrong)
        assert report(decoding)["reason"].startswith(f"attention of a cache {kind}: the ")


def test_serving_by_the_kernel(monkeypatch):
    tables, started = pytest.importorskip("pod_kernels.triton.block_tables"), []
    run = tables.tiles_attention
    monkeypatch.setattr(tables, "tiles_attention", lambda *asked: started.append(1) or run(*asked))
    found = report(replace(TRIAL, work="serving"))
    assert found["reason"] is None and found["ratio"] > 0 and started  # Triton's interpreter runs it


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_serving_by_what_is_wrong_is_refused(dtype, kv_heads, monkeypatch):
    tables = pytest.importorskip("pod_kernels.triton.block_tables")
    serving = replace(TRIAL, work="serving", dtype=dtype, kv_heads=kv_heads)
    monkeypatch.setattr(sys.modules["pod_kernels.dispatch"], "_obstacle", lambda states: "")
    by_torch = block_tables._of_tiles
    monkeypatch.setattr(tables, "tiles_attention", by_torch)  # torch in the kernel's place
    assert report(serving)["reason"] is None

    def wrong_chunk(q, *asked):
        out = by_torch(q, *asked)
        return out * (1.05 if len(q) > 4 else 1)

    def wrong_window(*asked):
        *first, recent_size, scale = asked
        return by_torch(*first, recent_size - 2, scale)

    def unfinished(q, *asked):
        out = by_torch(q, *asked)
        out[-1] = torch.nan
        return out

    for kernel, what in (
        (wrong_chunk, "attention of a chunk beside them: the "),
        (wrong_window, "attention of requests that decode: the "),
        (unfinished, "attention of requests that decode has "),
    ):
        monkeypatch.setattr(tables, "tiles_attention", kernel)
        assert report(serving)["reason"].startswith(what)


# ---------------------------------------------------------------------------------------------------- its process


def said(monkeypatch, code: str) -> None:
    monkeypatch.setattr(autotune, "COMMAND", [sys.executable, "-c", code])


def test_a_process_that_does_not_end_well(monkeypatch):
    said(monkeypatch, "import os; os.abort()")
    monkeypatch.setattr(autotune, "PACKAGES", {"FA3": "no_such_package"})
    found = autotune.tried(replace(TRIAL, backend="composed", flash="FA3"), 60)
    assert found == {"ratio": None, "reason": "not installed: there is no package no_such_package"}
    assert autotune.tried(TRIAL, 60)["reason"].startswith("the process ended with SIGABRT: ")
    said(monkeypatch, "import sys; sys.exit('CUDA error: no kernel image')")
    assert autotune.tried(TRIAL, 60)["reason"] == "the process ended with exit status 1: CUDA error: no kernel image"
    begun = time.perf_counter()
    # What the process has started holds the pipe open.
    said(monkeypatch, "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])")
    assert autotune.tried(TRIAL, 2) == {"ratio": None, "reason": "it did not end within 2 seconds"}
    assert time.perf_counter() - begun < 30


@pytest.mark.slow
def test_the_process_is_given_the_trial(monkeypatch):
    said(monkeypatch, "import sys; print('noise'); print(sys.argv[1])")
    assert Trial(**autotune.tried(TRIAL, 60)) == TRIAL
    monkeypatch.undo()
    found = autotune.tried(replace(TRIAL, backend="composed", flash="eager"), 600)
    assert found["reason"] is None and found["ratio"] > 0


# ---------------------------------------------------------------------------------------------------- what is kept

RATIOS = {"cuDNN": 0.8, "FA3": None, "FA4": 1.2, None: 0.7}


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({"model_type": "pod_llama", **sizes}))
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Trials that were asked for; none is run."""
    seen = []

    def tried(trial, time_limit):
        seen.append((trial.work, trial.tokens, trial.flash or trial.backend))
        ratio = RATIOS[trial.flash] if trial.work not in ("decode", "serving") else 1.1
        return {"ratio": ratio, "reason": None if ratio else "not installed"}

    monkeypatch.setattr(autotune, "tried", tried)
    return seen


def test_the_command(export, asked, capsys, monkeypatch):
    assert autotune.main(["--ckpt", str(export), "--lengths", "700,5000"]) == 0
    candidates = ["cuDNN", "FA3", "FA4", "fused"]
    assert asked == [("forward", tokens + 37, name) for tokens in (512, 4096) for name in candidates] + [
        (work, 8192 + 37, "fused") for work in ("decode", "serving")
    ]
    table = capsys.readouterr().out
    assert "not installed" in table and "0.70" in table and str(dispatch.choices_path(GPU)) in table
    wanted = {
        ShapeClass(GPU, "bfloat16", 16, 0, "forward"): Choice("fused"),
        ShapeClass(GPU, "bfloat16", 16, 4096, "forward"): Choice("fused"),
        ShapeClass(GPU, "bfloat16", 16, 0, "decode"): dispatch.TORCH,
        ShapeClass(GPU, "bfloat16", 16, 0, "serving"): dispatch.TORCH,
    }
    assert dispatch._of_machine(GPU) == wanted
    assert dispatch.known() == [[*shapes, *choice] for shapes, choice in sorted(wanted.items())]
    assert {shapes: dispatch.chosen(shapes) for shapes in wanted} == wanted
    # What was tried is not tried again; other lengths are, beside it.
    asked.clear()
    autotune.main(["--ckpt", str(export), "--lengths", "700,20000"])
    assert {tokens for _, tokens, _ in asked} == {16_384 + 37}
    assert len(autotune.entries(dispatch.choices_path(GPU))) == 5
    asked.clear()
    autotune.main(["--ckpt", str(export), "--lengths", "700", "--force"])
    assert len(asked) == 6
    monkeypatch.setitem(RATIOS, None, 0.9)
    monkeypatch.setitem(RATIOS, "cuDNN", 0.5)
    autotune.main(["--ckpt", str(export), "--lengths", "700", "--force"])
    dispatch._of_machine.cache_clear()
    assert dispatch.chosen(ShapeClass(GPU, "bfloat16", 16, 0, "forward")) == Choice("composed", "cuDNN")
    capsys.readouterr()
    autotune.main(["--show"])
    assert "cuDNN" in (shown := capsys.readouterr().out) and torch.__version__ in shown


def test_a_recipe_says_what_it_trains(asked):
    assert autotune.main(["recipe=llama3-32k"]) == 0
    assert [(work, tokens) for work, tokens, _ in asked] == [
        (work, 16_384 + 37) for work in ("forward", "training") for _ in range(4)
    ]
    assert {(shapes[1], shapes[2]) for shapes in dispatch.known()} == {("bfloat16", 128)}


def test_other_versions_know_nothing(asked, export, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert dispatch.chosen(SHAPES) == dispatch.TORCH
        assert dispatch.chosen(SHAPES) == dispatch.TORCH
    assert len(caplog.records) == 1 and "`python -m pod.autotune` checks and times them" in caplog.text  # once
    autotune.main(["--ckpt", str(export), "--lengths", "700", "--dtype", "float32"])
    dispatch._of_machine.cache_clear()
    assert dispatch.chosen(SHAPES) == Choice("fused")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    dispatch._of_machine.cache_clear()
    dispatch.machine.cache_clear()
    assert dispatch.chosen(SHAPES) == dispatch.TORCH
    assert autotune.show().startswith("nothing was tried with ") and "9.9.9" in autotune.show()
    dispatch.machine.cache_clear()


@pytest.mark.parametrize("damage", ["", "{}", '{"format": 1, "classes": [{}]}', '{"format": 99, "classes": []}', "[]"])
def test_a_damaged_file(damage, asked, export, caplog, capsys):
    autotune.main(["--ckpt", str(export), "--lengths", "700"])
    path = dispatch.choices_path(GPU)
    path.write_text(damage)
    dispatch._of_machine.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert dispatch.chosen(SHAPES) == dispatch.TORCH
    assert f"{path} is damaged" in caplog.text and "python -m pod.autotune writes it anew" in caplog.text
    assert autotune.main(["--show"]) == 2 and f"{path} is damaged" in capsys.readouterr().err
    assert autotune.main(["--ckpt", str(export), "--lengths", "700"]) == 0
    assert "is damaged" in capsys.readouterr().err and len(autotune.entries(path)) == 3


def test_an_interrupted_run_goes_on(asked, export, monkeypatch):
    tried = autotune.tried

    def interrupted(trial, time_limit):
        if len(asked) == 5:
            raise KeyboardInterrupt
        return tried(trial, time_limit)

    monkeypatch.setattr(autotune, "tried", interrupted)
    assert autotune.main(["--ckpt", str(export), "--lengths", "700,5000"]) == 130
    monkeypatch.setattr(autotune, "tried", tried)
    asked.clear()
    assert autotune.main(["--ckpt", str(export), "--lengths", "700,5000"]) == 0
    assert asked[0] == ("forward", 4096 + 37, "cuDNN") and len(asked) == 6


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    code = (
        "import sys; from types import SimpleNamespace; import torch\n"
        f"torch.cuda.get_device_properties = lambda device: SimpleNamespace(name={GPU!r})\n"
        "from pod import autotune; from pod_kernels.dispatch import ShapeClass\n"
        "for dim in range(20):\n"
        f"    autotune.keep({GPU!r}, autotune.entry_of(ShapeClass({GPU!r}, sys.argv[1], dim, 0, 'decode'), []))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, dtype]) for dtype in ("float16", "bfloat16")]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(autotune.entries(dispatch.choices_path(GPU))) == 40


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name either --ckpt EXPORT or recipe=NAME"),
        (["recipe=tiny", "--ckpt", "x"], "name either --ckpt EXPORT or recipe=NAME"),
        (["--ckpt", "nowhere"], "--ckpt nowhere: there is no nowhere/config.json, and it is none of llama3-8b"),
        (["recipe=llama3-32k", "--lengths", "0"], "--lengths [0]: wanted numbers of tokens, 1 or more"),
        (["recipe=llama3-32k", "--time-limit", "0"], "--time-limit 0: wanted seconds, more than 0"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert autotune.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in (["--show"], ["recipe=llama3-32k"]):
        assert autotune.main(arguments) == 0
        assert "there is no GPU here, and nothing to choose" in capsys.readouterr().out
    assert dispatch.known() == [] and not dispatch.choices_path(GPU).exists()


# ---------------------------------------------------------------------------------------------------- who reads it


def test_ranks_take_the_first_ones_choices():
    others = [[*SHAPES, "fused", None]]
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(broadcast=lambda value: others))
    module = SimpleNamespace(trainer=trainer, hparams=SimpleNamespace(blocks=None))
    PodModule.setup(module, "fit")
    assert dispatch.chosen(SHAPES) == Choice("fused") and dispatch.known() == others


def test_a_checkpoint_keeps_them(tmp_path):
    dispatch.fix([[*SHAPES, "composed", "cuDNN"]])
    torch.save({"kernels": dispatch.known()}, tmp_path / "checkpoint")
    dispatch.fix([])
    PodModule.on_load_checkpoint(
        SimpleNamespace(strict_loading=True, _trainer=None), torch.load(tmp_path / "checkpoint", weights_only=True)
    )
    assert dispatch.chosen(SHAPES) == Choice("composed", "cuDNN")
