"""What the version before wrote still opens, resumes and exports: `version_before/`, made by its `make.py`."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pod import export, fit, generate
from pod.training.checkpoints import hyper_parameters, last_checkpoint
from pod.training.module import Sections


@pytest.fixture
def before(tmp_path, monkeypatch):
    shutil.copytree(Path(__file__).parent / "version_before", tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


@pytest.mark.parametrize("recipe", ["run/recipe.yaml", "recipe.yaml"])
def test_a_run_of_the_version_before_resumes_and_exports(recipe, before, capsys):
    assert fit.main([f"recipe={recipe}", "resume=auto", "trainer.max_steps=4"]) == 0
    assert "continuing from run/steps/step=2.ckpt" in capsys.readouterr().out
    assert last_checkpoint(before / "run" / "steps").name == "step=4.ckpt"
    assert export.main(["--ckpt", "run", "--out", "new"]) == 0
    model = AutoModelForCausalLM.from_pretrained("new")
    prompt = torch.arange(3, 33)[None]
    assert model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4).shape[1] > 30
    older = AutoModelForCausalLM.from_pretrained("export")
    assert model.config.blocks == older.config.blocks and not model.config.blocks.is_dense
    assert not torch.equal(model.lm_head.weight, older.lm_head.weight)


def test_hyper_parameters_of_the_version_before_are_put_into_sections(before):
    file = before / "run" / "steps" / "step=2.ckpt"
    old = torch.load(file, weights_only=True)["hyper_parameters"]
    found = hyper_parameters(file)
    assert (old["lr"], old["lora_rank"], old["base"], old["model_config"]) == (0.01, 0, "base", None)
    assert found["optimizer"]["lr"] == 0.01 and found["lora"]["rank"] == 0
    assert (found["model"]["base"], found["model"]["config"], found["model"]["sink_size"]) == ("base", None, 2)
    assert found["trainer"] == {"max_steps": 2, "loss_chunk": 1024, "answer_weight": 0.0}
    assert found["blocks"] == old["blocks"] and found["bytes_per_token"] == old["bytes_per_token"]
    assert sum(map(len, (found[name] for name in Sections._fields))) + 2 == len(old), "nothing is left out"


def test_checkpoints_of_something_else_are_refused(before, capsys):
    file = before / "run" / "steps" / "step=2.ckpt"
    content = torch.load(file, weights_only=True)
    for wrong in ({}, {"lr": 1.0}, {"model": "gpt2"}):
        torch.save(content | {"hyper_parameters": wrong}, file)
        assert export.main(["--ckpt", str(file), "--out", "new"]) == 2
        assert f"{file} is no checkpoint of pod.fit: it holds no PoD hyper-parameters" in capsys.readouterr().err
        assert fit.main(["recipe=run/recipe.yaml", "resume=auto", "trainer.max_steps=4"]) == 2
        assert "step=2.ckpt is no checkpoint of pod.fit, it holds no PoD hyper-parameters" in capsys.readouterr().err


def test_an_export_of_the_version_before_opens_and_is_replaced_by_the_same(before, capsys):
    older = (before / "export" / "model.safetensors").read_bytes()
    assert generate.main(["--ckpt", "export", "--prompt", "abcdefghijklmnopqrst", "--max-new-tokens", "4"]) == 0
    assert "saved" in capsys.readouterr().out
    assert export.main(["--ckpt", "run", "--out", "export", "--force"]) == 0
    assert (before / "export" / "model.safetensors").read_bytes() == older
