"""QLoRA: adapters on a base in 4 bits. Where bitsandbytes is, its own layers are trained on the CPU, behind the refusal
of all but GPUs; what is refused is tested everywhere."""

import json
import sys
from functools import partial

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from scripts import save, tiny_llama
from transformers import AutoModelForCausalLM

import pod
from pod.analyze import analyze
from pod.data.sample_writer import SampleWriter
from pod.export import export, load_checkpoint
from pod.model.weights import load_causal_lm
from pod.recipe.errors import RecipeError
from pod.recipe.loading import load_recipe
from pod.training import adapters
from pod.training import run as training_run
from pod.training.module import PodModule
from pod.training.plan import make_plan

fit = partial(training_run.fit, analyze=analyze)
BLOCKS = pod.LayerBlocks([[0, 0], [0, 1], [0, 1]])
NEAR = (2, 6)
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with data, blocks and a base whose matrices are 32 and 48 wide, less than a scale's 64; and a recipe."""
    folder = tmp_path_factory.mktemp("qlora")
    base = save(tiny_llama(num_hidden_layers=3, intermediate_size=48, tie_word_embeddings=True), folder / "base")
    tokens = np.random.default_rng(0).integers(3, 9, (40, 32))
    with SampleWriter(folder / "data", sequence_length=32, vocab_size=259, tokenizer="bytes") as writer:
        writer.add("train", tokens)
        writer.add("validation", tokens[:2])
    BLOCKS.save(folder / "blocks.json")
    recipe = {
        "name": "trial",
        "description": "A run of a test",
        "model": {"base": str(base), "sink_size": NEAR[0], "recent_size": NEAR[1], "load_in_4bit": True},
        "blocks": {"file": str(folder / "blocks.json")},
        "data": {"path": str(folder / "data"), "sequence_length": 32, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-2},
        "lora": {"rank": 3, "targets": ["q", "k", "v", "o", "gate"]},
        "trainer": {"max_steps": 8, "tokens_per_batch": 128, "checkpoint_every": 4, "accelerator": "cpu"},
    }
    (folder / "trial.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder, base, f"recipe={folder / 'trial.yaml'}"


@pytest.fixture
def bitsandbytes(monkeypatch):
    found = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes: its layers are what is tested here")
    monkeypatch.setattr(adapters, "HOLDS_4_BITS", ("cuda", "cpu"))
    return found


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits.float()


def losses(run):
    (log,) = run.glob("logs/version_0/metrics.csv")
    header, *rows = (line.split(",") for line in log.read_text().splitlines())
    found = (dict(zip(header, row, strict=True))["train_loss"] for row in rows)
    return [float(loss) for loss in found if loss]


def module_of(run):
    module = PodModule.load_from_checkpoint(run / "steps" / "step=8.ckpt")
    module.configure_model()
    module.load_state_dict(load_checkpoint(run)[0]["state_dict"], strict=False)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [[], ["model.gradient_checkpointing=true", "distill.weight=0.5", "model.mlp_tiles=2"]]
)
def test_a_run_trains_adapters_on_4_bits(given, tmp_path, bitsandbytes, changes):
    folder, base, recipe = given
    run = tmp_path / "run"
    line = [recipe, f"output={run}", *changes]
    fit(load_recipe(line))
    found = losses(run)
    assert len(found) == 8 and found[-1] < found[0] - 0.5
    content, file = load_checkpoint(run)
    state = {name: value.clone() for name, value in content["state_dict"].items()}
    assert len(state) == 3 * 5 * 2 and all(".lora_" in name for name in state)

    # What was trained on: nf4 in the layers, the rest as it was; nothing of it has moved.
    module = module_of(run)
    plain = pod.convert(base, BLOCKS, *NEAR)
    for name, layer in module.model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            weight = plain.get_submodule(name.replace(".base_layer", "")).weight
            assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == weight.numel() / 2
            assert layer.weight.quant_state.quant_type == "nf4" and layer.weight.quant_state.nested
            restored = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            error = (restored - weight).norm() / weight.norm()
            assert 0.02 < error < 0.15
            a, b = (state.get(f"model.{name.replace('base_layer', f'lora_{kind}.default.weight')}") for kind in "AB")
            with torch.no_grad():
                weight.copy_(restored if a is None else restored + 16 / 3 * b @ a)
    assert sum(isinstance(layer, bitsandbytes.nn.Linear4bit) for layer in module.model.modules()) == 3 * 7
    assert torch.equal(module.model.lm_head.weight, pod.load(base).lm_head.weight)
    trained = logits_of(module.model)
    torch.testing.assert_close(trained, logits_of(plain), rtol=1e-3, atol=1e-3)
    every = sum(parameter.numel() for parameter in plain.parameters())
    added = sum(value.numel() for value in state.values())
    assert module.flops_per_token() == 4 * every + 6 * added

    # A run that goes on from its middle ends as the one that was not interrupted did.
    file.unlink()
    fit(load_recipe([*line, "resume=auto"]))
    for name, value in load_checkpoint(run)[0]["state_dict"].items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(RecipeError, match="^model.load_in_4bit is false, .*continue with model.load_in_4bit=true"):
        fit(load_recipe([*line, "resume=auto", "model.load_in_4bit=false"]))


@pytest.mark.slow
def test_what_is_exported_needs_no_4_bits(given, tmp_path, bitsandbytes, monkeypatch):
    folder, base, recipe = given
    run = tmp_path / "run"
    fit(load_recipe([recipe, f"output={run}"]))
    trained = logits_of(module_of(run).model)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    adapter, merged = export(run, tmp_path / "adapter", adapter=True), export(run, tmp_path / "merged")
    loaded = logits_of(pod.load(base, adapter))
    torch.testing.assert_close(loaded, logits_of(pod.load(merged)), rtol=1e-4, atol=1e-4)
    # The base in full is another one than that in 4 bits, and nearer to it with the adapter than without.
    plain = logits_of(pod.convert(base, BLOCKS, *NEAR))
    away = [(logits - trained).norm() / trained.norm() for logits in (loaded, plain)]
    assert 1e-3 < away[0] < 0.75 * away[1], away
    for card in (adapter / "README.md", merged / "README.md"):
        assert "in 4 bits (nf4) while adapters were trained" in card.read_text()


@pytest.mark.slow
def test_peft_puts_the_adapter_on_4_bits_again(given, tmp_path, bitsandbytes):
    peft = pytest.importorskip("peft")
    folder, base, recipe = given
    run = tmp_path / "run"
    fit(load_recipe([recipe, f"output={run}"]))
    trained = logits_of(module_of(run).model)
    pod.convert(base, BLOCKS, *NEAR).save_pretrained(tmp_path / "converted")
    options = adapters.in_4_bits(torch.device("cpu"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", **options)
    found = logits_of(peft.PeftModel.from_pretrained(model, export(run, tmp_path / "adapter", adapter=True)))
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype, weight_bytes", [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_4_bits(tmp_path, bitsandbytes, given, dtype, weight_bytes):
    # Wide enough for whole groups of 256 scales: 128 * 128 = 256 * 64.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    base = save(tiny_llama(**sizes), tmp_path / "base")
    recipe = load_recipe([given[2], f"model.base={base}", f"model.dtype={dtype}"])
    recipe.blocks.file = None
    module = PodModule(recipe.model, recipe.trainer, lora=recipe.lora)
    module.configure_model()
    held = 0
    for parameter in module.parameters():
        held += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
    memory = make_plan(recipe).memory
    assert memory.parameters == held and memory.weight_bytes == weight_bytes


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_base_that_is_not_finite_is_refused(tmp_path, bitsandbytes, wrong):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = wrong
    model.save_pretrained(tmp_path)
    options = adapters.in_4_bits(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"NaN or infinite numbers in 1 tensor \(model.layers.1.mlp.up_proj.weight\)"):
        load_causal_lm(tmp_path, finite=True, **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["lora.rank=0", "lora.targets=[q,k,v,o]"], "load_in_4bit=true needs lora.rank above 0: .*lora.rank=16 or"),
        (["trainer.strategy=deepspeed"], "not go with trainer.strategy=deepspeed: set trainer.strategy=auto or ddp"),
        (["model.compile=true"], "load_in_4bit=true does not go with model.compile=true: set model.compile=false"),
    ],
)
def test_recipes_that_are_refused(given, changes, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe([given[2], *changes])


def test_what_a_machine_lacks_is_named(given, tmp_path, monkeypatch):
    line = [given[2], f"output={tmp_path / 'run'}"]
    recipe = load_recipe(line)
    module = PodModule(recipe.model, recipe.trainer, lora=recipe.lora)
    for run in (lambda: fit(recipe), module.configure_model):
        with pytest.raises(ValueError, match="needs a GPU of NVIDIA's, and this run is on cpu: set model.load"):
            run()
    monkeypatch.setattr(adapters, "HOLDS_4_BITS", ("cuda", "cpu"))
    for package in ("accelerate", "bitsandbytes"):
        monkeypatch.setattr("pod.extras.importlib.util.find_spec", lambda name, gone=package: name != gone or None)
        for run in (lambda: fit(recipe), module.configure_model):
            with pytest.raises(ImportError, match=rf"^model.load_in_4bit=true needs {package}: .*\[qlora\]"):
                run()
    assert not (tmp_path / "run" / "recipe.yaml").exists()
    with pytest.raises(ValueError, match="model.load_in_4bit needs lora.rank"):
        PodModule(recipe.model, recipe.trainer)
    module._trainer = lightning.Trainer(logger=False, accelerator="cpu")
    monkeypatch.setattr(type(module._trainer), "strategy", FSDPStrategy())
    with pytest.raises(ValueError, match="does not go with FSDPStrategy: .*take strategy='auto' or 'ddp'"):
        module.configure_model()


def test_a_quantised_base_is_refused(given, tmp_path):
    folder, base, recipe = given
    save(tiny_llama(num_hidden_layers=3), tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised/config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "quantised/config.json").write_text(json.dumps(config | quantised))
    keys = [f"model.base={tmp_path / 'quantised'}", "model.load_in_4bit=false", f"output={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match="quantised' are quantised: name the model that they were made from"):
        fit(load_recipe([recipe, *keys]))
