"""What the version before wrote still opens, resumes and exports: `version_before/`, made by its `make.py`."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pod import export, fit, generate
from pod.training.checkpoints import last_checkpoint


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


def test_an_export_of_the_version_before_opens_and_is_replaced_by_the_same(before, capsys):
    older = (before / "export" / "model.safetensors").read_bytes()
    assert generate.main(["--ckpt", "export", "--prompt", "abcdefghijklmnopqrst", "--max-new-tokens", "4"]) == 0
    assert "saved" in capsys.readouterr().out
    assert export.main(["--ckpt", "run", "--out", "export", "--force"]) == 0
    assert (before / "export" / "model.safetensors").read_bytes() == older
