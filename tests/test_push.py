"""Pushed to the hub and loaded from it: huggingface_hub's own client against a stand-in on the loopback."""

import os
import subprocess
import sys

import pytest
import torch
from hub_stand_in import stand_in
from huggingface_hub import ModelCard
from test_fit import CONFIG, prepared, recipe_file  # noqa: F401  (a fixture)
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.export import main
from pod.files import read_sums
from pod.model_card import data_of

LOADS = """
import sys, torch, pod
from peft import PeftModel
from transformers import AutoModelForCausalLM

folder, ids = sys.argv[1], torch.arange(3, 63)[None]
logits = {
    "auto": AutoModelForCausalLM.from_pretrained("someone/model"),
    "load": pod.load("someone/model"),
    "adapter": pod.load("someone/base", "someone/adapter"),
    "alone": pod.load("someone/adapter"),
    "peft": PeftModel.from_pretrained(
        pod.convert("someone/base", pod.LayerBlocks.load(f"{folder}/blocks.json"), 2, 14), "someone/adapter"
    ),
}
again = logits["load"]
again.push_to_hub("someone/again")
again.save_pretrained(f"{folder}/third", push_to_hub=True, repo_id="someone/third")
logits |= {name: pod.load(f"someone/{name}") for name in ("again", "third")}
with torch.no_grad():
    found = {name: model.eval()(ids, use_cache=False).logits for name, model in logits.items()}
torch.save(found, f"{folder}/logits.pt")
blocks = pod.LayerBlocks.load(f"{folder}/blocks.json")
for refused, names in ((pod.load, ["someone/base", "someone/nothing"]), (pod.convert, ["someone/adapter", blocks])):
    try:
        refused(*names)
    except (OSError, ValueError) as error:
        print(error)
"""


def environment(hub, home, **more):
    without = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    wanted = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return without | wanted | more


def python(*arguments, env, status=0):
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def license_of(hub, name):
    return ModelCard(hub.repositories[name]["README.md"].decode()).data


@pytest.mark.slow
def test_models_and_adapters_go_round(prepared, tmp_path):  # noqa: F811
    """A base of the hub is trained, model and adapter are pushed, and what anybody loads again has their logits."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    (prepared / "report.json").write_text('{"sources": ["hub:some/texts/en:train", "books/mine", "hub:some/texts"]}')
    pod.LayerBlocks([[0, 0], [0, 1], [0, 1]]).save(tmp_path / "blocks.json")
    recipe, run = recipe_file(tmp_path, prepared, base="someone/base"), tmp_path / "run"
    with stand_in() as hub:
        hub.repositories["someone/base"] = {file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}
        env = environment(hub, tmp_path / "home")
        keys = ["lora.rank=2", "trainer.max_steps=2", f"blocks.file={tmp_path}/blocks.json"]
        python("-m", "pod.fit", f"recipe={recipe}", *keys, env=env)
        export = ["-m", "pod.export", "--ckpt", run, "--out"]
        said = python(*export, tmp_path / "whole", "--push", "someone/model", "--private", env=env)
        assert f"written and verified: {tmp_path}/whole; on the hub: someone/model" in said
        python(*export, tmp_path / "part", "--adapter", "--push", "someone/adapter", env=env)
        assert hub.private == {"someone/model"}
        said = python("-c", LOADS, tmp_path, env=env)
        assert "someone/nothing" in said and "pod.load('someone/base', 'someone/adapter')" in said

        for name, folder in (("model", "whole"), ("adapter", "part")):
            pushed = hub.repositories[f"someone/{name}"]
            assert pushed == {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()}
            assert read_sums(tmp_path / folder).keys() == pushed.keys() - {"README.md", "SHA256SUMS"}
            said = license_of(hub, f"someone/{name}")
            assert (said.base_model, said.license, said.datasets) == ("someone/base", "apache-2.0", ["some/texts"])
            card = pushed["README.md"].decode()
            assert (
                f'"someone/{name}"' in card and str(tmp_path) not in card.partition("```python")[2].partition("```")[0]
            )
            assert "| data | some/texts/en:train, mine, some/texts |" in card
        assert license_of(hub, "someone/adapter").base_model_relation == "adapter"

        # What the hub refuses is one line, and the folder is whole.
        refused = [*export, tmp_path / "again", "--push", "someone/model"]
        error = python(*refused, env=environment(hub, tmp_path / "home", HF_TOKEN="hf_another"), status=2)
        assert f"{tmp_path}/again is written, and the hub did not take it as someone/model" in error
        assert f"hf upload someone/model {tmp_path}/again" in error and "Traceback" not in error
        pod.load(tmp_path / "again")
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert all(torch.equal(logits[name], logits["auto"]) for name in ("load", "again", "third"))
    assert torch.equal(logits["alone"], logits["adapter"])
    for name in ("adapter", "peft"):
        torch.testing.assert_close(logits[name], logits["auto"], rtol=1e-3, atol=1e-4)
    assert not torch.equal(pod.load(tmp_path / "base")(torch.arange(3, 63)[None]).logits, logits["auto"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("someone/model", "no token of the hub: `hf auth login`, or HF_TOKEN"),
        ("a/b/c", "a/b/c"),
        ("no good!", "no good!"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(name, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pod.export.get_token", lambda: None)
    assert main(["--ckpt", str(tmp_path), "--out", str(tmp_path / "out"), "--push", name]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_private_is_about_a_push(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--ckpt", str(tmp_path), "--out", str(tmp_path / "out"), "--private"])
    assert "--private is about --push" in capsys.readouterr().err


def test_a_run_without_its_recipe_has_no_data_to_name(tmp_path):
    assert data_of(tmp_path) == ("not known", [])
