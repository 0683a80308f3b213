"""Loading all of a model's weights or none, and telling them from others."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import ROOT, save, tiny_llama
from transformers import AutoModelForCausalLM

import pod
from pod.files import write_sums
from pod.fit import main as fit
from pod.model.weights import load_causal_lm, weights_hash

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tiny_llama(num_hidden_layers=3), tmp_path_factory.mktemp("whole") / "model")


def changed(source, target, change):
    """A copy of a model's directory with other weights."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def configured(source, target, **fields):
    """A copy with other fields of its config."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


BROKEN = {
    "a tensor is missing": (lambda weights: weights.pop(LAYER), f"the weights lack 1 tensor ({LAYER})"),
    "no head, and it is not tied": (lambda weights: weights.pop("lm_head.weight"), "lack 1 tensor (lm_head.w"),
    "a tensor is left over": (
        lambda weights: weights.update({"model.layers.7.up": torch.ones(2)}),
        "the model has no place for 1 tensor (model.layers.7.up)",
    ),
    "a tensor has another shape": (
        lambda weights: weights.update({LAYER: torch.ones(2, 3)}),
        f"do not have the shapes that config.json says: 1 tensor ({LAYER} [2, 3], not [32, 32])",
    ),
}


@pytest.mark.parametrize("options", [{}, {"device_map": "meta"}])
@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_are_not_the_configs_are_named(kind, options, whole, tmp_path):
    change, message = BROKEN[kind]
    folder = changed(whole, tmp_path / "model", change)
    with pytest.raises(ValueError) as caught:
        load_causal_lm(folder, **options)
    assert str(caught.value).startswith(f"{folder}: ") and message in str(caught.value)
    if not options:
        with pytest.raises(ValueError, match="A file is missing, is a copy of another one"):
            pod.convert(folder, pod.LayerBlocks.dense(3, 2))


@pytest.mark.parametrize(
    "layers,message", [(2, "no place for 9 tensors (model.layers.2."), (4, "lack 9 tensors (model.l")]
)
def test_other_numbers_of_layers_than_the_configs_are_refused(layers, message, whole, tmp_path):
    with pytest.raises(ValueError) as caught:
        load_causal_lm(configured(whole, tmp_path / "model", num_hidden_layers=layers))
    assert message in str(caught.value)


def test_a_shard_that_is_a_copy_of_another_is_refused(whole, tmp_path):
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "model", max_shard_size="40kB")
    first, second, *_ = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert load_causal_lm(tmp_path / "model").config.num_hidden_layers == 3
    shutil.copy(first, second)
    with pytest.raises(ValueError, match=r"the weights lack 3 tensors \(model.embed_tokens.weight, "):
        load_causal_lm(tmp_path / "model")
    second.unlink()
    with pytest.raises(OSError, match=second.name):
        load_causal_lm(tmp_path / "model")


def test_what_is_known_to_be_left_over_or_tied_is_no_fault(whole, tmp_path, capsys):
    def old(weights):
        weights |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}

    wanted = AutoModelForCausalLM.from_pretrained(whole)
    for folder in (whole, changed(whole, tmp_path / "old", old)):
        model = load_causal_lm(folder)
        assert all(map(torch.equal, model.state_dict().values(), wanted.state_dict().values()))
    tied = save(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert load_causal_lm(tied).lm_head.weight is not None
    blocks = pod.LayerBlocks([[0, 0], [0, 1], [2, 1]])
    for share in ("scores", "kv"):
        save(pod.convert(whole, blocks, 2, 6, share=share), tmp_path / share)
        assert load_causal_lm(tmp_path / share).config.share == share
    assert "warning" not in capsys.readouterr().err


def test_an_adapters_base_is_looked_at_too(whole, tmp_path):
    peft = pytest.importorskip("peft")
    base = changed(whole, tmp_path / "base", lambda weights: None)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    load_causal_lm(tmp_path / "adapter")
    before = weights_hash(tmp_path / "adapter")
    shutil.rmtree(base)
    changed(whole, base, BROKEN["a tensor is missing"][0])
    assert weights_hash(tmp_path / "adapter") != before
    with pytest.raises(ValueError, match="base: the weights lack 1 tensor"):
        load_causal_lm(tmp_path / "adapter")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_not_finite_are_found_in_each_dtype(dtype, whole, tmp_path, capsys):
    def poisoned(weights):
        weights["model.norm.weight"][5] = float("-inf")
        weights["lm_head.weight"][7, 3] = float("nan")

    folder = changed(whole, tmp_path / "model", poisoned)
    load_causal_lm(folder, dtype=dtype)
    named = f"{folder}: NaN or infinite numbers in 2 tensors (lm_head.weight, model.norm.weight)"
    assert f"warning: {named}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="NaN or infinite .* take others"):
        load_causal_lm(folder, dtype=dtype, finite=True)


# Shards of ZeRO-3

ZERO3 = """
import sys, torch
from transformers.integrations import HfDeepSpeedConfig
import deepspeed
from pod.model.weights import load_causal_lm
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # half a minute of compiling, minutes beside other tests
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
deepspeed.init_distributed("gloo", dist_init_required=False)
stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage})
for folder in sys.argv[1:]:
    try:
        model = load_causal_lm(folder, finite=True)
        print("loaded", sorted({tuple(parameter.shape) for parameter in model.parameters()}))
    except ValueError as error:
        print("refused", error)
"""


@pytest.mark.slow  # deepspeed's imports
def test_sharded_loading_raises_no_false_alarm_and_misses_none(whole, tmp_path):
    def poisoned(weights):
        weights[LAYER][3, 4] = float("nan")

    tied = save(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    lacking = changed(whole, tmp_path / "lacking", BROKEN["a tensor is missing"][0])
    folders = [whole, tied, lacking, changed(whole, tmp_path / "poisoned", poisoned)]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [sys.executable, "-c", ZERO3, *map(str, folders)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("loaded", "refused"))]
    assert lines[:2] == ["loaded [(0,)]"] * 2  # in parts
    assert f"refused {lacking}: the weights lack 1 tensor ({LAYER})" in lines[2]
    assert f"refused {folders[3]}: NaN or infinite numbers in 1 tensor ({LAYER})" in lines[3]


def test_training_in_shards_refuses_what_is_left_over_too(whole, tmp_path, capsys):
    from test_tokenizer import write

    data = write(tmp_path / "data")
    base = configured(whole, tmp_path / "base", num_hidden_layers=2)
    lines = ["recipe=tiny", f"output={tmp_path / 'run'}", f"data.path={data}", f"model.base={base}"]
    lines += ["data.sequence_length=128", "blocks.kv_saving=0", "trainer.strategy=deepspeed", "trainer.accelerator=cpu"]
    assert fit(lines) == 2
    assert "the model has no place for 9 tensors (model.layers.2." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# What tells weights from others


def test_the_hash_is_of_weights_config_and_tokenizer_and_of_nothing_else(whole, tmp_path):
    def other(weights):
        weights[LAYER][0, 0] += 1

    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    found = weights_hash(folder)
    assert found == weights_hash(whole) == weights_hash(str(folder))
    for name in ("scores.json", "README.md", "training-log.csv"):
        (folder / name).write_text("{}")
    assert weights_hash(folder) == found
    write_sums(folder)
    assert weights_hash(folder) == found, "the same, and read from there"
    (folder / "model.safetensors").write_bytes(b"")
    assert weights_hash(folder) == found, "not read; what loads it compares it with SHA256SUMS"
    others = [changed(whole, tmp_path / "weights", other), configured(whole, tmp_path / "config", rope_theta=7.0)]
    shutil.copytree(whole, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    others.append(tmp_path / "tokenizer")
    assert len({found, *map(weights_hash, others)}) == 4


def test_weights_that_were_taken_out_of_the_checksums_are_read(whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    write_sums(folder)
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if "model.safetensors" not in line))
    assert weights_hash(folder) == weights_hash(whole)
    shutil.copy(save(tiny_llama(seed=1, num_hidden_layers=3), tmp_path / "other") / "model.safetensors", folder)
    assert weights_hash(folder) != weights_hash(whole)


def test_of_a_model_of_the_hub_it_is_the_commit(whole, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "models--some--model"
    shutil.copytree(whole, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_causal_lm("some/model").config.num_hidden_layers == 3
    assert weights_hash("some/model") == commit
    (place / "snapshots" / commit / "model.safetensors").unlink()
    (place / "snapshots" / commit / "pytorch_model.bin").write_bytes(b"garbage" * 99)
    with pytest.raises(ValueError, match=f"{commit}/pytorch_model.bin: truncated or damaged"):
        load_causal_lm("some/model")
    with pytest.raises(OSError):
        load_causal_lm("some/other")
