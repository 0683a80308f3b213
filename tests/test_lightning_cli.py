"""Lightning's own command line on our module and data, as docs/FIT.md shows it."""

import json

import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from scripts import save, tiny_llama

import pod
from pod.data.sample_writer import SampleWriter
from pod.export import export


@pytest.mark.slow
def test_the_command_line_trains_what_export_takes(tmp_path):
    pytest.importorskip("jsonargparse", reason="pip install 'jsonargparse[signatures]': LightningCLI is made of it")
    tokens = np.random.default_rng(0).integers(3, 9, (24, 32))
    with SampleWriter(tmp_path / "data", sequence_length=32, vocab_size=259, tokenizer="bytes") as writer:
        writer.add("train", tokens)
        writer.add("validation", tokens[:2])
    base = save(tiny_llama(), tmp_path / "base")
    config = {
        "model": {
            "model": {"base": str(base), "sink_size": 2, "recent_size": 6},
            "trainer": {"max_steps": 4, "tokens_per_batch": 128},
            "optimizer": {"lr": 0.01},
            "blocks": [[0, 0], [0, 1]],
        },
        "data": {"path": str(tmp_path / "data"), "sequence_length": 32, "micro_batch_size": 2},
        "trainer": {"max_steps": 4, "accumulate_grad_batches": 2, "accelerator": "cpu"}
        | {"default_root_dir": str(tmp_path / "run"), "logger": False, "enable_progress_bar": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    line = ["fit", "--config", str(tmp_path / "run.yaml"), "--model.optimizer.weight_decay", "0.0"]
    cli = LightningCLI(pod.PodModule, pod.PodDataModule, args=line)
    assert cli.trainer.global_step == 4 and cli.model.sections.optimizer.weight_decay == 0.0
    assert cli.trainer.callback_metrics["train_loss"] < 5  # random logits have 5.6 and more
    (file,) = tmp_path.glob("run/**/*.ckpt")
    exported = pod.load(export(file, tmp_path / "export"))
    assert exported.config.blocks == pod.LayerBlocks([[0, 0], [0, 1]])
    for name, weight in cli.model.model.state_dict().items():
        assert torch.equal(exported.get_parameter(name), weight), name

    for wrong in ("--model.model.sink_sise", "--data.no_such"):
        with pytest.raises((SystemExit, ValueError)):
            LightningCLI(pod.PodModule, pod.PodDataModule, args=[*line, wrong, "1"])
