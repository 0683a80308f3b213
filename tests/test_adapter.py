"""pod.load with an adapter in PEFT's format: what it computes, what peft reads, what is refused."""

import json
import shutil

import pytest
import torch
from scripts import save, tiny_llama
from transformers import GenerationConfig

import pod
from pod import generate
from pod.evaluation import models
from pod.export import export
from pod.model.weights import weights_hash
from pod.training.base_model import first_config
from pod.training.module import PodModule

peft = pytest.importorskip("peft")
SIZES = {"sink_size": 2, "recent_size": 4, "share": "scores"}
BLOCKS = pod.LayerBlocks([[0, 0], [0, 1], [0, 1]], SIZES)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 43)[None] * 5, use_cache=False).logits


@pytest.fixture
def base(tmp_path):
    return save(tiny_llama(num_hidden_layers=3), tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    """A folder as `pod.model.adapter` says, and the logits of the model that peft wrote it from."""
    model = pod.convert(base, BLOCKS, **SIZES).eval()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    BLOCKS.save(tmp_path / "adapter/blocks.json")
    return tmp_path / "adapter", logits_of(wrapped)


def test_load_is_the_adapted_model(base, adapter):
    folder, wanted = adapter
    model = pod.load(base, folder)
    assert type(model) is pod.PodLlamaForCausalLM and not model.training
    assert model.config.blocks == BLOCKS and {name: getattr(model.config, name) for name in SIZES} == SIZES
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)
    plain = pod.load(base)
    assert type(plain).__name__ == "LlamaForCausalLM" and not plain.training
    assert not torch.allclose(logits_of(pod.convert(plain, BLOCKS, **SIZES)), wanted, atol=1e-2)
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in plain.named_parameters()}  # merged: nothing of peft is left


def test_it_names_its_base(base, adapter, tmp_path, capsys):
    folder, wanted = adapter
    torch.testing.assert_close(logits_of(pod.load(folder)), wanted, rtol=1e-4, atol=1e-5)
    model, tokenizer = models.load(str(folder), "cpu")
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)
    assert tokenizer("a b")["input_ids"] == models.load(str(base), "cpu")[1]("a b")["input_ids"]
    assert weights_hash(folder) != weights_hash(base)
    assert generate.main(["--ckpt", str(folder), "--prompt", "a b", "--max-new-tokens", "2"]) == 0
    base.rename(tmp_path / "elsewhere")
    assert generate.main(["--ckpt", str(folder), "--prompt", "a b", "--max-new-tokens", "2"]) == 2
    assert f"can be loaded from there, an adapter of {base} ({base}: no such directory" in capsys.readouterr().err


def test_an_export_is_the_sum(base, adapter, tmp_path):
    folder, wanted = adapter
    with pytest.raises(ValueError, match=f"is an adapter already: without --adapter it is added to its base, {base}"):
        export(folder, tmp_path / "out", adapter=True)
    with pytest.raises(ValueError, match="so --force will not replace it"):
        export(folder, base, force=True)
    out = export(folder, tmp_path / "out")
    model, tokenizer = models.load(str(out), "cpu")
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)
    assert tokenizer("a b")["input_ids"] == models.load(str(base), "cpu")[1]("a b")["input_ids"]
    card = (out / "README.md").read_text()
    assert f"| base | {base} |" in card and "| data | that of the adapter, adapter |" in card
    assert export(folder, out, "bfloat16", force=True) == out and pod.load(out).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["adapter", "all weights"])
def test_an_export_generates_as_its_base_does(base, adapter, kind, tmp_path):
    source = adapter[0]
    if kind == "all weights":
        source = tmp_path / "run/steps/step=1.ckpt"
        source.parent.mkdir(parents=True)
        module = PodModule(
            {"base": str(base), **SIZES}, {"max_steps": 1, "tokens_per_batch": 20}, blocks=BLOCKS.anchors.tolist()
        )
        module.configure_model()
        content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 1}
        torch.save(content, source)
    own = models.load(str(base), "cpu")[1].eos_token_id
    settings = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.05, "pad_token_id": 0}
    for ends, kept in (([own, 7], True), (7, False)):
        GenerationConfig(eos_token_id=ends, **settings).save_pretrained(base)
        found = pod.load(export(source, tmp_path / "out", force=True)).generation_config
        assert found.eos_token_id == (ends if kept else own)
        assert [getattr(found, name) == value for name, value in settings.items()][:3] == [kept] * 3
    (base / "generation_config.json").unlink()
    assert pod.load(export(source, tmp_path / "out", force=True)).generation_config.eos_token_id == own


def test_peft_reads_the_folder_too(base, adapter):
    folder, wanted = adapter
    model = peft.PeftModel.from_pretrained(pod.convert(base, BLOCKS, **SIZES).eval(), folder)
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)


def test_refuses(base, adapter, tmp_path, monkeypatch):
    folder, _ = adapter
    with pytest.raises(FileNotFoundError, match="is no adapter of PoD: it lacks adapter_config.json, adapter_model"):
        pod.load(base, base)
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        pod.load(base, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is an adapter of PoD, which brings blocks for its base: pod.load\("):
        pod.convert(folder, BLOCKS, **SIZES)
    with pytest.raises(
        ValueError, match=f"is an adapter: to train on from it, model.base={base} lora.adapter={folder}"
    ):
        first_config(str(folder), None)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        pod.load(tmp_path / "no base")
    wider = save(tiny_llama(num_hidden_layers=3, hidden_size=64), tmp_path / "wider")
    deeper = save(tiny_llama(num_hidden_layers=4), tmp_path / "deeper")
    with pytest.raises(ValueError, match="an adapter of another model"):
        pod.load(wider, folder)
    with pytest.raises(ValueError, match="blocks for another model: they have 3 layers"):
        pod.load(deeper, folder)

    def changed(name, change):
        shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        change(tmp_path / "changed" / name)
        return tmp_path / "changed"

    def fewer(path):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"target_modules": ["q_proj"]}))

    with pytest.raises(ValueError, match="an adapter of another model, or damaged: base_model.*o_proj.*no counterpart"):
        pod.load(base, changed("adapter_config.json", fewer))
    cut = changed("adapter_model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-9]))
    with pytest.raises(ValueError, match="adapter_model.safetensors"):
        pod.load(base, cut)
    without = pod.LayerBlocks(BLOCKS.anchors, {"sink_size": 2, "share": "scores"})
    with pytest.raises(ValueError, match=r"metadata.recent_size must be of type int, got None"):
        pod.load(base, changed("blocks.json", without.save))
    monkeypatch.setattr("pod.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs peft: pip install 'pod-attention\[lora\]'"):
        pod.load(base, folder)
