"""The package as users get it: what a wheel holds, the `pod` command, what names the extras, a light import."""

import ast
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import pod
import pod.__main__ as command
from pod.analyze import analyze
from pod.data.sources import read_parquet
from pod.evaluation.report import figure
from pod.export import consolidated
from pod.extras import require
from pod.recipe.loading import load_recipe
from pod.training.adapters import add_adapters
from pod.training.run import check_logger

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMES = {"flash-attn": "flash_attn", "huggingface_hub": "huggingface_hub", "pyyaml": "yaml"}  # as they are imported


def packages(lines):
    """The imported names of requirements."""
    names = [re.match(r"[\w-]+", line)[0] for line in lines]
    return {NAMES.get(name, name) for name in names}


BASE = packages(PROJECT["dependencies"])
OPTIONAL = set().union(*map(packages, EXTRAS.values())) - BASE - {"pod-attention"}
# What the optional packages are beside: imported by transformers where it is there, so a block of it proves nothing.
BLOCKED = sorted(OPTIONAL - {"triton", "pytest", "hypothesis"} | {"pytorch_lightning", "tensorboard"})


def python(*arguments, cwd, path, blocked=()):
    """A Python with these folders on its path, in which some packages cannot be found; the finished process."""
    site = Path(cwd) / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import sys\nfor name in {list(blocked)}:\n    sys.modules[name] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [site, *path]))}
    environment.pop("POD_RECIPES", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the clone gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "pod", "kernels", "recipes", "data", "eval", "*.*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in {*listed.stdout.splitlines(), "LICENSE"}:
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "checkpoints/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, source], check=True, capture_output=True
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh folder into which the wheel alone was installed."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_the_recipes_alone(installed):
    info = f"pod_attention-{pod.__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"bin", "pod", "pod_kernels", info}
    shipped = {path.name: path.read_bytes() for path in installed.glob("pod/recipe/shipped/*")}
    assert shipped == {path.name: path.read_bytes() for path in ROOT.glob("recipes/*.yaml")}
    assert (installed / "pod" / "py.typed").exists()
    assert not list(installed.rglob("tests"))
    assert "License-Expression: Apache-2.0" in (installed / info / "METADATA").read_text()
    assert (installed / info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.slow
def test_the_wheel_works_outside_the_clone_without_the_extras(installed, tmp_path):
    def run(*arguments):
        done = python(*arguments, cwd=tmp_path, path=[installed], blocked=BLOCKED)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = (
        "import pod; from pod.recipe.loading import load_recipe;"
        " print(pod.__file__, pod.__version__, load_recipe(['recipe=tiny']).name)"
    )
    assert run("-c", code) == f"{installed}/pod/__init__.py {pod.__version__} tiny\n"
    pod_command = str(installed / "bin" / "pod")
    assert "plan of llama3-32k: 8.030B parameters" in run(pod_command, "fit", "recipe=llama3-32k", "plan=true")
    listed = run(pod_command, "fit")
    assert f"Recipes, in {installed}/pod/recipe/shipped:" in listed
    assert all(f"  {path.stem} " in listed for path in ROOT.glob("recipes/*.yaml"))
    if importlib.util.find_spec("pod.eval"):
        assert "--ckpt" in run(pod_command, "eval", "longbench", "--help")


@pytest.mark.slow
def test_inference_needs_no_extra(installed, tmp_path):
    code = (
        "import torch, pod; from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=2,"
        " num_attention_heads=4, num_key_value_heads=2)\n"
        "blocks = pod.LayerBlocks.uniform(2, 2, 2)\n"
        "model = pod.convert(LlamaForCausalLM(config), blocks, sink_size=1, recent_size=4).eval()\n"
        "model.save_pretrained('export'); from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('export')\n"
        "cache = pod.PodCache(model.config, eviction=pod.eviction.SnapKV(budget=40, window=4))\n"
        "ids = torch.arange(60)[None] % 31\n"
        "print(type(model).__name__, model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False,"
        " past_key_values=cache).shape[1])"
    )
    done = python("-c", code, cwd=tmp_path, path=[installed], blocked=BLOCKED)
    assert done.returncode == 0 and done.stdout == "PodLlamaForCausalLM 64\n", done.stderr


@pytest.mark.slow
def test_twine_finds_nothing_to_mend(wheel):
    pytest.importorskip("twine")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Without an extra


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ["-m", "pod", "fit", "recipe=tiny"],
            "pod.fit needs lightning, torchdata, torchmetrics, matplotlib: pip install '{train}'",
        ),
        (["-m", "pod.export", "--ckpt", "run", "--out", "out"], "pod.export needs lightning: pip install '{train}'"),
        (
            "-m pod.prepare --source text --out out --tokenizer bytes --sequence-length 8".split(),
            "pod.prepare needs matplotlib: pip install '{data}'",
        ),
    ],
    ids=["fit", "export", "prepare"],
)
def test_a_command_names_the_extra_that_it_lacks_on_one_line(tmp_path, arguments, line):
    done = python(*arguments, cwd=tmp_path, path=[ROOT, ROOT / "kernels"], blocked=BLOCKED)
    wanted = line.format(train="pod-attention[train]", data="pod-attention[data]")
    assert (done.returncode, done.stderr) == (2, f"error: {wanted}\n")


def test_analysis_names_its_extra_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^pod.analyze needs matplotlib: pip install 'pod-attention\[train\]'$"):
        analyze(load_recipe(["recipe=tiny", f"output={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_pictures_name_their_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^a picture of the blocks needs matplotlib: .*\[train\]'$"):
        pod.LayerBlocks.dense(2, 2).plot(tmp_path / "blocks.png")
    with pytest.raises(ImportError, match=r"^a picture of the similarity needs matplotlib: .*\[train\]'$"):
        pod.similarity.plot_similarity(torch.ones(1, 2, 2), tmp_path / "similarity.png")
    with pytest.raises(ImportError, match=r"^a picture needs matplotlib: .*\[eval\]'$"):
        figure(1, 1)


def test_readers_name_their_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"^a.parquet needs pyarrow: pip install 'pod-attention\[data\]'$"):
        next(read_parquet("a.parquet", "text"))


def test_adapters_name_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"^lora.rank needs peft: pip install 'pod-attention\[lora\]'$"):
        add_adapters(torch.nn.Linear(2, 2), 2, 4.0, 0.0, ["q"])


def test_shards_of_deepspeed_name_their_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"which DeepSpeed sharded, needs deepspeed: .*\[train\]'$"):
        consolidated(tmp_path)


def test_wandb_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"^logger=wandb needs wandb: pip install 'pod-attention\[train\]'$"):
        check_logger(load_recipe(["recipe=tiny", "logger=wandb"]))


@pytest.mark.parametrize("name", ["PodModule", "PodDataModule", "UlyssesDeepSpeedStrategy"])
def test_training_from_python_names_its_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=rf"^pod.{name} needs lightning: pip install 'pod-attention\[train\]'$"):
        getattr(pod, name)


def requirements():
    """Every `require(extra, *packages, ...)` of the library: file, extra, packages."""
    for path in sorted((ROOT / "pod").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                extra, *names = [argument.value for argument in node.args]
                yield path.relative_to(ROOT), extra, set(names)


def test_what_is_named_is_in_the_extra():
    found = list(requirements())
    assert {extra for _, extra, _ in found} >= {"train", "data", "eval", "lora"}
    for path, extra, names in found:
        assert names and names <= packages(EXTRAS[extra]), path
    wanted = {"train", "data", "eval", "gguf", "lora", "qlora", "flash", "all", "serve", "vllm", "lm-eval", "dev"}
    assert set(EXTRAS) == wanted


def test_what_is_imported_is_listed():
    """Whatever the library imports is of the standard library, needed by all, or an extra's."""
    known = sys.stdlib_module_names | BASE | OPTIONAL | {"pod", "pod_kernels"}
    known |= {"jinja2", "tokenizers"}  # the first comes with torch, the second with transformers
    for path in [*(ROOT / "pod").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= known, path


def test_require(monkeypatch):
    require("train", "torch", "numpy", what="nothing")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError) as error:
        require("train", "torch", "numpy", "no_such_package", what="a test")
    assert str(error.value) == "a test needs numpy, no_such_package: pip install 'pod-attention[train]'"


# What the project says of itself


def test_what_the_project_says_of_itself():
    versions = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {NAMES.get(name.lower(), name) for name in versions}
    # vLLM has an environment of its own, the Makefile's.
    assert BASE | OPTIONAL - {"flash_attn", "lm-eval", "pod-attention", "vllm"} <= pinned
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {pod.__version__}\n" in citation and "license: Apache-2.0" in citation
    assert "2412.02252" in citation
    (transformers,) = [line for line in PROJECT["dependencies"] if line.startswith("transformers")]
    assert transformers == "transformers>=5.19,<5.25"  # the tests ran with the first and the last


# The command


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["pod", *arguments])
    return command.main()


def test_pod_lists_its_commands(monkeypatch, capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert not run_command(monkeypatch, *arguments)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "usage: pod COMMAND ..."
        listed = dict(re.fullmatch(r"  (\w+) +(.+)", line).groups() for line in lines if line.startswith("  "))
        assert listed == command.commands()
        assert set(listed) >= {"analyze", "export", "fit", "generate", "prepare"}
        assert listed["fit"] == "Post-train a model with shared distant scores."
        assert not {"blocks", "similarity", "terminal", "files", "extras"} & set(listed)


def test_pod_version(monkeypatch, capsys):
    assert not run_command(monkeypatch, "--version")
    assert capsys.readouterr().out == f"{pod.__version__}\n"
    assert metadata.version("pod-attention") == pod.__version__


def test_an_unknown_command(monkeypatch, capsys):
    assert run_command(monkeypatch, "exprt", "--ckpt", "x") == 2
    assert capsys.readouterr().err.startswith("error: pod exprt: no such command; did you mean export? there are ")


def test_a_command_gets_its_arguments_and_ends_with_its_status(monkeypatch, capsys):
    ran = []

    def run_module(name, run_name, alter_sys):
        ran.append((name, run_name, alter_sys, sys.argv[1:]))
        raise SystemExit(3)

    monkeypatch.setattr(runpy, "run_module", run_module)
    with pytest.raises(SystemExit) as ended:
        run_command(monkeypatch, "fit", "recipe=tiny", "seed=1")
    assert ended.value.code == 3
    assert ran == [("pod.fit", "__main__", True, ["recipe=tiny", "seed=1"])]


# The import

IMPORT = """
import sys, time, torch, transformers
before = set(sys.modules)
from transformers import AutoConfig, PreTrainedConfig  # what takes transformers' time
began = time.process_time()
import pod
print(time.process_time() - began)
print(len(set(sys.modules) - before))
print(*sorted(set(sys.modules)))
print(*sorted(pod.__all__)); print(*dir(pod))
"""
HEAVY = {"triton", "lightning", "pytorch_lightning", "wandb", "matplotlib", "deepspeed", "datasets", "torchmetrics"}
HEAVY |= {"torchdata", "accelerate", "peft", "torch._dynamo", "transformers.modeling_utils", "transformers.cache_utils"}


@pytest.mark.slow
def test_import_pod_brings_little_beyond_torch_and_transformers(tmp_path):
    done = python("-c", IMPORT, cwd=tmp_path, path=[ROOT, ROOT / "kernels"])
    assert done.returncode == 0, done.stderr
    seconds, count, loaded, public, listed = done.stdout.splitlines()
    assert float(seconds) < 1  # of the processor; it took 7
    assert int(count) < 150  # they were above 1,000 when it brought the models
    assert not HEAVY & set(loaded.split())
    assert set(public.split()) <= set(listed.split())


def test_public_names_are_there():
    for name in pod.__all__:
        assert getattr(pod, name) is not None
    with pytest.raises(AttributeError, match="module 'pod' has no attribute 'PodCash'"):
        _ = pod.PodCash


def test_what_is_loaded_later_is_what_editors_see():
    """The imports below `TYPE_CHECKING` bring the public names that `pod.__getattr__` loads, from where it does."""
    tree = ast.parse((ROOT / "pod/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    shown = {alias.name: node.module for node in block.body for alias in node.names}
    assert shown == pod._LATER | {"similarity": "pod"}


REGISTERED = """
import pod
from transformers import AutoConfig, AutoModelForCausalLM
made = AutoConfig.for_model("pod_qwen2", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=31,
                            num_key_value_heads=2, intermediate_size=32)
print(type(made).__name__, type(made) is pod.PodQwen2Config, type(AutoModelForCausalLM.from_config(made)).__name__)
"""
# A config that came by its own module, or out of a pickle, is known to the Auto classes too.
ALONE = """
import pickle, sys
from pod.model.families import PodLlamaConfig
made = PodLlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=31, intermediate_size=32)
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_config(pickle.loads(pickle.dumps(made)))).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, printed",
    [(REGISTERED, "PodQwen2Config True PodQwen2ForCausalLM\n"), (ALONE, "PodLlamaForCausalLM\n")],
    ids=["for_model", "own-module"],
)
def test_the_auto_classes_know_the_models_though_these_are_imported_later(tmp_path, code, printed):
    done = python("-c", code, cwd=tmp_path, path=[ROOT, ROOT / "kernels"])
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
