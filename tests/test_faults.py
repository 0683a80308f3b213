"""What kills, full disks and damaged files do to the commands: nothing is lost, everything is named.

The kills themselves are `faults.py`'s, beside this file.
"""

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import ROOT, save, tiny_llama
from transformers import AutoModelForCausalLM

import pod
from pod import analyze, export, fit, generate, prepare
from pod.data import demo_corpus
from pod.data.prepared import PreparedData
from pod.data.sample_writer import SampleWriter
from pod.evaluation import needle, passkey, perplexity
from pod.files import check_sums, check_writable, locked, naming, publish, read_json, replacing
from pod.recipe.loading import load_recipe
from pod.training.checkpoints import is_whole, last_checkpoint

LENGTH = 64


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="sees through Linux' /proc that nothing has threads")
def test_commands_that_are_killed_and_run_again_end_as_if_undisturbed():
    command = [sys.executable, str(ROOT / "tests" / "faults.py"), "--kills", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "20 kills in" in done.stdout and " 0 of them inside" not in done.stdout


# What the commands are given


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Texts, prepared data, a base model, a run of two steps that shares, its export."""
    root = tmp_path_factory.mktemp("world")
    generator = np.random.default_rng(0)
    (root / "haystack.txt").write_text("".join(generator.choice(list("etaoin shr. "), 4000)))
    (root / "corpus").mkdir()
    for number in range(3):
        rows = [json.dumps({"text": "".join(generator.choice(list("etaoin "), 300))}) for _ in range(40)]
        (root / "corpus" / f"{number}.jsonl").write_text("\n".join(rows))
    with SampleWriter(root / "data", sequence_length=LENGTH, vocab_size=259, tokenizer="bytes") as writer:
        writer.add("train", generator.integers(3, 259, (40, LENGTH)))
        writer.add("validation", generator.integers(3, 259, (4, LENGTH)))
    sizes = {"intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 1024}
    save(tiny_llama(**sizes, initializer_range=0.2, tie_word_embeddings=True), root / "base")
    recipe = {
        "name": "faults",
        "description": "A run of a test",
        "model": {"base": str(root / "base"), "tokenizer": "bytes", "sink_size": 2, "recent_size": 6},
        "blocks": {"kv_saving": 0.25, "samples": 2},
        "data": {"path": str(root / "data"), "sequence_length": LENGTH, "micro_batch_size": 2},
        "trainer": {"max_steps": 2, "tokens_per_batch": 2 * LENGTH, "validate_every": 1, "validation_batches": 1}
        | {"checkpoint_every": 1, "keep_checkpoints": 3, "accelerator": "cpu"},
    }
    (root / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    assert fit.main([f"recipe={root / 'recipe.yaml'}", f"output={root / 'run'}"]) == 0
    assert export.main(["--ckpt", str(root / "run"), "--out", str(root / "export")]) == 0
    return root


def command(name, world, out, **given):
    """(main, arguments) of a command that reads from `world`, or from what is given instead, and writes to `out`."""
    place = {kind: given.get(kind, world / kind) for kind in ("base", "data", "run", "export")}
    recipe = [f"recipe={world / 'recipe.yaml'}", f"output={out}", f"data.path={place['data']}"]
    recipe += [f"model.base={place['base']}", "resume=auto"]
    ckpt = ["--ckpt", str(place["export"]), "--out", str(out)]
    text = ["--text", str(world / "haystack.txt")]
    return {
        "prepare": (
            prepare.main,
            ["--source", str(world / "corpus"), "--out", str(out), "--tokenizer", "bytes"]
            + ["--sequence-length", "32", "--num-proc", "1"],
        ),
        "demo_corpus": (
            demo_corpus.main,
            ["--out", str(out), "--length", "1024", "--samples", "30", "--validation-samples", "1"],
        ),
        "analyze": (analyze.main, recipe),
        "fit": (fit.main, recipe),
        "export": (export.main, ["--ckpt", str(place["run"]), "--out", str(out)]),
        "generate": (generate.main, ["--ckpt", str(place["export"]), "--prompt", "abc", "--max-new-tokens", "2"]),
        "needle": (
            needle.main,
            [*ckpt, "--haystack", str(world / "haystack.txt"), "--min-length", "400", "--max-length", "400"]
            + ["--steps", "1"],
        ),
        "passkey": (
            passkey.main,
            [*ckpt, *text, "--lengths", "128", "--depths", "2", "--samples", "1"],
        ),
        "perplexity": (
            perplexity.main,
            [*ckpt, *(["--data", str(given["data"])] if "data" in given else [*text, "--length", "64"])]
            + ["--limit", "2"],
        ),
    }[name]


WRITE = ("prepare", "demo_corpus", "analyze", "fit", "export", "needle", "passkey", "perplexity")


def refused(capsys, run, *words):
    """The command fails and says one thing, which holds the words."""
    main, arguments = run
    capsys.readouterr()
    assert main(arguments) not in (0, None)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (message,) = re.findall(r"(?:error|prepare|demo_corpus): [^\n]*", said)
    for word in words:
        assert str(word) in message
    return message


# Disks


class Disk:
    """A folder with a limit: a file system in memory of so many kB where it can be mounted, else a limit of files."""

    def __init__(self, path, size):
        self.path = path
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(path)]
        self.mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True).returncode == 0
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 256, self.limits[1]))

    def grow(self):
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.path)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)

    def protect(self):
        """Let nobody write there; False where that cannot be done."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)
        else:
            self.path.chmod(0o555)
        return self.mounted or os.geteuid() != 0

    def close(self):
        self.path.chmod(0o755) if not self.mounted else subprocess.run(["umount", "-l", str(self.path)], check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.fixture
def disk(tmp_path):
    """disk(kB) -> a `Disk`."""
    disks = []

    def make(size):
        disks.append(Disk(tmp_path / "disk", size))
        return disks[-1]

    yield make
    for one in disks:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
def test_a_full_disk_is_named_and_the_command_goes_on_when_there_is_room(name, world, disk, capsys):
    small = disk(8)
    out = small.path / "out"
    said = refused(capsys, command(name, world, out), small.path)
    assert "No space left on device" in said or "File too large" in said
    # Nothing is there under its own name that is not whole.
    assert not list(out.rglob("model*.safetensors")) and not (out / "index.json").exists()
    for path in out.rglob("*.json"):
        read_json(path)
    small.grow()
    main, arguments = command(name, world, out)
    assert main(arguments) == 0
    if name == "fit":
        assert last_checkpoint(out / "steps").name == "step=2.ckpt"


def test_a_disk_that_is_full_at_the_second_checkpoint_leaves_the_first(world, disk, capsys):
    size = (world / "run" / "steps" / "step=1.ckpt").stat().st_size
    small = disk(64)
    if not small.mounted:
        pytest.skip("a limit of files does not add them up: needs a file system of its own")
    kept = {path.name: path.stat().st_size for path in (world / "run").iterdir() if path.is_file()}
    subprocess.run(["mount", "-o", f"remount,size={sum(kept.values()) + 2 * size}", str(small.path)], check=True)
    out = small.path / "out"
    refused(capsys, command("fit", world, out), "No space left on device", out)
    whole = [path for path in out.rglob("*.ckpt")]
    assert whole and all(map(is_whole, whole))
    small.grow()
    main, arguments = command("fit", world, out)
    assert main(arguments) == 0
    assert "continuing from" in capsys.readouterr().out
    assert not list(out.rglob(".*.tmp"))
    ours, theirs = (torch.load(run / "steps/step=2.ckpt", weights_only=True) for run in (out, world / "run"))
    for key, weight in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], weight)


@pytest.mark.parametrize("name", WRITE)
def test_a_read_only_folder_is_named_before_the_work(name, world, disk, capsys):
    small = disk(64)
    if not small.protect():
        pytest.skip("root without mounts writes anywhere")
    refused(capsys, command(name, world, small.path / "out"), small.path)
    assert not list(small.path.iterdir())


# Two processes, and what a command may replace


@pytest.mark.slow
@pytest.mark.parametrize("name,lock", [("fit", "run/.lock"), ("export", ".run.lock")])
def test_of_two_processes_that_write_one_output_the_second_is_refused(name, lock, world, tmp_path, capsys):
    first = """if True:
        import sys, time
        from pathlib import Path
        from pod.files import locked
        with locked(Path(sys.argv[1]), Path("out")):
            print("in there", flush=True)
            time.sleep(600)
    """
    child = subprocess.Popen([sys.executable, "-c", first, str(tmp_path / lock)], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"in there\n"
    main, arguments = command(name, world, tmp_path / "run")
    today = time.strftime("%Y-")
    refused(capsys, (main, arguments), tmp_path / "run", f"process {child.pid} on ", f"since {today}", tmp_path / lock)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(lock).name]
    child.kill()
    child.wait()
    assert (tmp_path / lock).exists()  # a killed process leaves its file, not its lock
    assert main(arguments) == 0
    assert not list(tmp_path.rglob(".*"))


def test_who_waits_for_a_lock_that_is_free_again_has_it_alone(tmp_path):
    with locked(tmp_path / "a" / "b" / "lock", tmp_path):
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()} on .* since"):
            with locked(tmp_path / "a" / "b" / "lock", tmp_path):
                pass
        assert (tmp_path / "a" / "b" / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())  # nor the folders that were made for it
    with locked(tmp_path / "a" / "lock", tmp_path):
        (tmp_path / "a" / "written").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "written"]


@pytest.fixture
def place(world, tmp_path, monkeypatch):
    """A folder with a copy of the run and of an export, to run in."""
    for name in ("run", "export"):
        shutil.copytree(world / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_export_replaces_an_export(place):
    (place / "export" / "model.safetensors").write_bytes(b"damaged")
    assert export.main(["--ckpt", "run", "--out", "export", "--force"]) == 0
    (place / "empty").mkdir()
    assert export.main(["--ckpt", "run", "--out", "empty", "--force"]) == 0
    for name in ("export", "empty"):
        check_sums(place / name)


@pytest.mark.parametrize(
    "out,words",
    [
        ("run", "run is or holds the checkpoint"),
        ("run/steps", "run/steps holds step=1.ckpt, step=2.ckpt, not named by a SHA256SUMS"),
        ("run/steps/step=1.ckpt", "no directory"),
        (".", "is or holds the folder this runs in"),
        ("..", "is or holds the folder this runs in"),
        ("/", "is or holds the folder this runs in"),
        ("", "is or holds the folder this runs in"),
        ("papers", "papers holds thesis.md, not named by a SHA256SUMS"),
        ("export", "export holds thesis.md, not named by a SHA256SUMS"),
        ("link", "link is no directory"),
        ("inside", "inside holds config.json, not named by a SHA256SUMS"),
        ("model", "model holds README.md, config.json, generation_config.json and more, not named by a SHA256SUMS"),
    ],
)
@pytest.mark.parametrize("force", [["--force"], []])
def test_an_export_replaces_nothing_else(out, words, force, place, capsys):
    for folder in ("papers", "export"):
        (place / folder).mkdir(exist_ok=True)
        (place / folder / "thesis.md").write_text("five years")
    (place / "link").symlink_to(place / "papers")
    shutil.copytree(place / "export", place / "model")
    (place / "model" / "SHA256SUMS").unlink()
    (place / "inside" / "config.json").mkdir(parents=True)
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    message = refused(capsys, (export.main, ["--ckpt", "run", "--out", out, *force]), "choose another --out")
    assert words in message or not force and "exists: choose another --out" in message
    assert before == {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}


def test_the_model_that_was_trained_is_not_replaced_by_its_export(world, tmp_path, capsys):
    shutil.copytree(world / "export", tmp_path / "base")
    changes = [f"recipe={world / 'recipe.yaml'}", f"output={tmp_path / 'run'}", f"model.base={tmp_path / 'base'}"]
    assert fit.main([*changes, "trainer.max_steps=1"]) == 0
    for out in (tmp_path / "base", tmp_path):
        command = ["--ckpt", str(tmp_path / "run"), "--out", str(out), "--force"]
        refused(capsys, (export.main, command), f"{out} is or holds the ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "base").config.share == "scores"


# Damaged files


def cut(raw):
    return raw[: len(raw) // 2]


def empty(raw):
    return b""


def flipped(raw):
    """One bit is another: in the middle of the numbers, or in what a text file needs to be read."""
    found = re.search(rb"anchors|model:|hidden_size|chat|pad_token", raw)
    place = found.start() if found else len(raw) * 6 // 10
    return raw[:place] + bytes([raw[place] ^ 16]) + raw[place + 1 :]


@pytest.mark.parametrize("how", [cut, empty, flipped])
@pytest.mark.parametrize(
    "name,kind,file",
    [
        ("generate", "export", "config.json"),
        ("generate", "export", "model.safetensors"),
        ("passkey", "export", "tokenizer_config.json"),
        ("needle", "export", "SHA256SUMS"),
        ("perplexity", "export", "model.safetensors"),
        ("analyze", "data", "tokens-train-00000.bin"),
        ("fit", "data", "tokens-train-00000.bin"),
        ("fit", "data", "index.json"),
        ("fit", "data", "tokens-validation-00000.bin"),
        ("perplexity", "data", "tokens-validation-00000.bin"),
        ("fit", "base", "config.json"),
        ("fit", "run", "blocks.json"),
        ("export", "run", "recipe.yaml"),
    ],
)
def test_a_damaged_file_is_named(name, kind, file, how, world, tmp_path, capsys):
    shutil.copytree(world / kind, tmp_path / kind)
    victim = tmp_path / kind / file
    victim.write_bytes(how(victim.read_bytes() or b"nothing is held out"))
    broken = victim.read_bytes()
    out = tmp_path / kind if (name, kind) == ("fit", "run") else tmp_path / "out"
    refused(capsys, command(name, world, out, **{kind: tmp_path / kind}), tmp_path / kind)
    assert victim.read_bytes() == broken
    assert out == tmp_path / kind or not list(out.rglob("*.*"))


def read_recipe(file):
    return load_recipe([f"recipe={file}"])


@pytest.mark.parametrize("name,read", [("recipe.yaml", read_recipe), ("blocks.json", pod.LayerBlocks.load)])
def test_a_runs_recipe_and_blocks_that_were_cut_or_changed_are_not_read(name, read, world, tmp_path):
    whole, unharmed = (world / "run" / name).read_bytes(), read(world / "run" / name)
    file = tmp_path / name
    ends = [match.end() for match in re.finditer(b"\n", whole)]
    assert ends[-1] == len(whole) and len(ends) > 8
    for end in sorted({0, *ends[:-1], *(end - 1 for end in ends)}):
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=re.escape(str(file)) if end > ends[0] else None):
            read(file)
        if name == "recipe.yaml":  # half of one may be a recipe, as long as the paths in it are
            with pytest.raises(ValueError, match=re.escape(str(file))):
                export.tokenizer_of(tmp_path, None)
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        try:
            assert read(file) == unharmed, place
        except ValueError as error:
            assert str(file) in str(error)
    # Who changes it on purpose takes the line out; the version before wrote none.
    file.write_bytes(b"".join(line for line in whole.splitlines(keepends=True) if b"sha256" not in line))
    assert read(file) == unharmed


def test_a_run_goes_on_whose_recipe_is_damaged_and_says_what_is_not_compared(world, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(world / "run", run)
    whole = (run / "recipe.yaml").read_bytes()
    (run / "recipe.yaml").write_bytes(whole[:-30])
    main, arguments = command("fit", world, run)
    assert main([*arguments, "trainer.max_steps=3"]) == 0
    assert f"warning: {run / 'recipe.yaml'} is truncated" in capsys.readouterr().err
    assert read_recipe(run / "recipe.yaml").trainer.max_steps == 3


@pytest.mark.parametrize("how", [cut, empty])
def test_damaged_weights_without_checksums_are_named(how, world, tmp_path, capsys):
    shutil.copytree(world / "base", tmp_path / "base")
    victim = tmp_path / "base" / "model.safetensors"
    victim.write_bytes(how(victim.read_bytes()))
    refused(capsys, command("analyze", world, tmp_path / "out", base=tmp_path / "base"), victim)
    with pytest.raises(ValueError, match=r"model.safetensors: truncated or damaged \(.*Download or export it again"):
        pod.convert(tmp_path / "base", pod.LayerBlocks.dense(3, 2))


def with_weights(source, target, change):
    """A copy of a model's directory with other weights, and without the checksums of the old ones."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("SHA256SUMS"))
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return target


LOADING = [("generate", "export"), ("needle", "export"), ("perplexity", "export"), ("analyze", "base"), ("fit", "base")]


@pytest.mark.parametrize("name,kind", [*LOADING, ("fit without an analysis", "base")])
def test_weights_that_are_not_all_there_are_refused(name, kind, world, tmp_path, capsys):
    def lacking(weights):
        return {name: weight for name, weight in weights.items() if "layers.1." not in name}

    folder = with_weights(world / kind, tmp_path / kind, lacking)
    main, arguments = command(name.partition(" ")[0], world, tmp_path / "out", **{kind: folder})
    more = ["blocks.kv_saving=0"] if "without" in name else []
    refused(capsys, (main, [*arguments, *more]), folder, "lack 9 tensors (model.layers.1.", "and 6 more")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name,kind", [*LOADING, ("fit without an analysis", "base")])
def test_weights_that_are_not_finite_are_said_and_not_trained_on(name, kind, number, world, tmp_path, capsys):
    def poisoned(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = number
        return weights

    folder = with_weights(world / kind, tmp_path / kind, poisoned)
    main, arguments = command(name.partition(" ")[0], world, tmp_path / "out", **{kind: folder})
    said = f"{folder}: NaN or infinite numbers in 1 tensor (model.layers.1.mlp.up_proj.weight)"
    if kind == "base":
        refused(capsys, (main, [*arguments, *(["blocks.kv_saving=0"] if "without" in name else [])]), said)
    else:
        assert main(arguments) == 0
        assert f"warning: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["garbage", "empty", "cut", "malicious", "numbers"])
def test_pickled_weights_that_are_none_are_named_and_nothing_in_them_is_run(kind, world, tmp_path, capsys):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    shutil.copytree(world / "export", tmp_path / "export", ignore=shutil.ignore_patterns("*.safetensors", "SHA256SUMS"))
    file = tmp_path / "export" / "pytorch_model.bin"
    weights = load_file(world / "export" / "model.safetensors")
    torch.save({"malicious": weights | {"model.norm.weight": Payload()}, "numbers": [1, 2]}.get(kind, weights), file)
    whole = file.read_bytes()
    file.write_bytes({"garbage": b"garbage" * 99, "empty": b"", "cut": whole[: len(whole) // 2]}.get(kind, whole))
    for name in ("generate", "perplexity"):
        message = refused(
            capsys, command(name, world, tmp_path / "out", export=file.parent), file, "nothing of which was run"
        )
        assert "weights_only" not in message, "torch's advice to run it"
    assert not (tmp_path / "was run").exists()
    torch.save(weights, file)
    main, arguments = command("generate", world, None, export=file.parent)
    assert main(arguments) == 0


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("sink_size", "2", ["config.json", "sink_size", "int", "'2'"]),
        ("share", 3, ["config.json", "share", "3"]),
        ("share", "some", ["share", "scores", "'some'"]),
        ("anchors", [7, [0, 0], [0, 0]], ["config.json", "anchors", "7"]),
        ("anchors", [[0, 0], [1, 2], [0, 0]], ["layer 1", "anchor 2"]),
        ("recent_size", -1, ["recent_size", "-1"]),
        ("tau", 7, ["tau", "7"]),
        ("hidden_size", 64, ["the weights do not have the shapes"]),
        ("hidden_size", None, ["config.json", "hidden_size"]),
        ("num_hidden_layers", 5, ["3 layers", "5 layers"]),
        ("num_attention_heads", 0, ["config.json"]),
        ("rope_parameters", "x", ["rope_parameters"]),
        ("model_type", "pud", ["pud"]),
    ],
)
def test_a_wrong_field_of_a_config_is_named(field, value, words, world, tmp_path, capsys):
    shutil.copytree(world / "export", tmp_path / "export")
    file = tmp_path / "export" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    (file.parent / "SHA256SUMS").unlink()  # it was changed on purpose
    main, arguments = command("generate", world, None, export=tmp_path / "export")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    said = said[said.index("error: ") :]
    assert "Traceback" not in said and str(tmp_path / "export") in said
    for word in words:
        assert word in said


def test_a_damaged_checkpoint_is_named_and_made_again(world, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(world / "run", run)
    newest = run / "steps" / "step=2.ckpt"
    newest.write_bytes(flipped(newest.read_bytes()))
    assert not is_whole(newest)
    refused(capsys, (export.main, ["--ckpt", str(newest), "--out", str(tmp_path / "out")]), newest)
    # The run's folder still exports, from the checkpoint before, and says so.
    assert export.main(["--ckpt", str(run), "--out", str(tmp_path / "earlier")]) == 0
    assert f"{newest} is truncated or damaged" in capsys.readouterr().err
    assert "| training step | 1 |" in (tmp_path / "earlier" / "README.md").read_text()
    main, arguments = command("fit", world, run)
    assert main(arguments) == 0
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
    ours, theirs = (torch.load(file, weights_only=True) for file in (newest, world / "run" / "steps" / newest.name))
    for key, weight in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], weight)


def test_a_flipped_bit_of_a_checkpoint_is_found_or_does_no_harm(world, tmp_path):
    whole = (world / "run" / "steps" / "step=2.ckpt").read_bytes()
    wanted = torch.load(world / "run" / "steps" / "step=2.ckpt", weights_only=True)["state_dict"]
    draw = random.Random(0)
    found = 0
    # Anywhere; in the archive's own tables, which have no checksums; and where one of them calls an entry a folder.
    tables = whole.index(b"PK\x01\x02")
    places = [(draw.randrange(len(whole)), draw.randrange(8)) for _ in range(30)]
    places += [(draw.randrange(tables, len(whole)), draw.randrange(8)) for _ in range(60)]
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", whole)]
    places += [(entry + 38, 4) for entry in entries[:: max(1, len(entries) // 10)]]
    for place, bit in places:
        damaged = whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
        (tmp_path / "step=2.ckpt").write_bytes(damaged)
        if not is_whole(tmp_path / "step=2.ckpt"):
            found += 1
            continue
        content = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(content[key], weight) for key, weight in wanted.items()), (place, bit)
    assert found > 40


def test_a_damaged_similarity_file_is_named(world, tmp_path):
    whole = (world / "run" / "similarity.safetensors").read_bytes()
    similarity = analyze.load_similarity(world / "run" / "similarity.safetensors")
    assert similarity.shape == (2, 3, 3)
    file = tmp_path / "similarity.safetensors"
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        try:
            assert torch.equal(analyze.load_similarity(file), similarity), place
        except ValueError as error:
            assert str(file) in str(error)
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="similarity.safetensors"):
            analyze.load_similarity(file)
    with pytest.raises(FileNotFoundError, match="pod.analyze"):
        analyze.load_similarity(tmp_path / "none")


def test_an_anchor_that_was_changed_is_noticed(tmp_path):
    blocks = pod.LayerBlocks([[0, 0], [0, 1], [0, 1]])
    blocks.save(tmp_path / "blocks.json")
    text = (tmp_path / "blocks.json").read_text()
    (tmp_path / "blocks.json").write_text(text.replace("[0, 1]\n", "[2, 1]\n"))
    with pytest.raises(ValueError, match="blocks.json: the anchors save 0.16.*kv_saving=0.25.*leave that line out"):
        pod.LayerBlocks.load(tmp_path / "blocks.json")


def test_a_damaged_log_does_not_stop_an_export(world, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(world / "run", run)
    (log,) = run.glob("logs/*/metrics.csv")
    log.write_bytes(log.read_bytes().replace(b".", b".x", 40)[:-3])
    assert export.main(["--ckpt", str(run), "--out", str(tmp_path / "out")]) == 0
    assert f"{log}: a damaged line is left out" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"x"'])
def test_damaged_settings_of_predictions_are_named(content, world, tmp_path, capsys):
    (tmp_path / "settings.json").write_bytes(content)
    refused(capsys, command("needle", world, tmp_path), tmp_path / "settings.json")


def test_the_demos_data_is_made_by_the_demos_script():
    with pytest.raises(FileNotFoundError, match=r"python data/demo_corpus.py --out data/demo/none --length L"):
        PreparedData("data/demo/none")
    # Which model the data are for is not known here: bytes would be of few.
    with pytest.raises(
        FileNotFoundError, match="pod.prepare .*--tokenizer TOKENIZER .*, with the tokenizer of the model"
    ):
        PreparedData("data/none")


def test_an_export_is_checked_by_sha256sum_too(world):
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=world / "export", capture_output=True, text=True)
    assert done.returncode == 0 and "model.safetensors: OK" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(world / "export").config.share == "scores"


# pod/files.py


def test_replacing_removes_what_a_killed_process_had_begun_and_nothing_else(tmp_path):
    half = """if True:
        import os, signal, sys
        from pod.files import replacing
        with replacing(sys.argv[1]) as aside:
            aside.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", half, str(tmp_path / "a.png")], cwd=ROOT)
    begun = [path.name for path in tmp_path.iterdir()]
    assert len(begun) == 1 and begun[0].startswith(".a.png.")
    machine, dead = begun[0].removeprefix(".a.png.").removesuffix(".tmp").rsplit(".", 1)
    others = (
        f".a.png.{machine}.{os.getppid()}.tmp",  # alive
        f".a.png.elsewhere.{dead}.tmp",  # of another machine that shares the disk
        f".aXpng.{machine}.{dead}.tmp",  # another file's
    )
    for name in others:
        (tmp_path / name).write_text("somebody's")
    with replacing(tmp_path / "a.png") as aside:
        aside.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*others, "a.png"))


def test_replacing_leaves_the_old_file_when_it_fails(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError, match="no OSError"):
        with replacing(tmp_path / "a") as aside:
            aside.write_text("half")
            raise RuntimeError("no OSError")
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with replacing(tmp_path / "deep" / "b") as aside:
        aside.write_text("new")
        assert not (tmp_path / "deep" / "b").exists()
    assert (tmp_path / "deep" / "b").read_text() == "new" and len(list((tmp_path / "deep").iterdir())) == 1


@pytest.mark.parametrize(
    "error,text",
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device: 'here'"),
        (OSError(13, "Permission denied", "there"), "[Errno 13] Permission denied: 'there'"),
        (OSError("disk on fire"), "here: disk on fire"),
    ],
)
def test_naming(error, text):
    with pytest.raises(OSError) as caught:
        with naming("here"):
            raise error
    assert str(caught.value) == text


def test_publish_replaces_a_directory(tmp_path):
    for name in ("aside", "out", ".out.old"):  # the last one is what a kill left
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    publish(tmp_path / "aside", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "content").read_text() == "aside"


def test_check_writable(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(NotADirectoryError, match="file"):
            check_writable(path)
