"""LoRA: what is trained and written, what a merged model computes; distillation with and without it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import pod
from pod.export import rebuild
from pod.training.adapters import add_adapters, merge, without_adapters
from pod.training.loss import shifted
from pod.training.module import PodModule

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}
BLOCKS = [[0, 0], [0, 1], [2, 1], [2, 1]]
WINDOW = {"sink_size": 2, "recent_size": 5}
TRAINER = {"max_steps": 1000, "tokens_per_batch": 38, "loss_chunk": 7}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama with a tied head, and a Qwen2 in bfloat16, whose projections have biases."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(folder / "llama")
    fields = {name: value for name, value in SIZES.items() if name != "head_dim"}
    Qwen2ForCausalLM(Qwen2Config(**fields)).bfloat16().save_pretrained(folder / "qwen2")
    return folder


def a_module(base, name="llama", model=None, **learning):
    torch.manual_seed(1)
    module = PodModule({"base": str(base / name), **WINDOW, **(model or {})}, TRAINER, blocks=BLOCKS, **learning)
    module.log = lambda *args, **kwargs: None
    module.configure_model()
    return module


def a_batch():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(60, (2, 19), generator=generator)
    labels = ids.clone()
    labels[0, :4] = labels[1, -6:] = -100
    return {"input_ids": ids, "labels": labels}


def dense_logits(base, ids, name="llama"):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(base / name)(ids, use_cache=False).logits


def steps(module, count=3, lr=0.05):
    """Some steps of training, with the module's own optimiser; the names of what has changed."""
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(count):
        optimizer.zero_grad()
        module.training_step(a_batch(), 0).backward()
        optimizer.step()
    return {name for name, parameter in module.named_parameters() if not torch.equal(parameter, before[name])}


def written(module):
    """The checkpoint that Lightning would write, as far as the module decides."""
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 3}
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module._trainer = SimpleNamespace(accumulate_grad_batches=1, strategy=strategy)
    module.on_save_checkpoint(checkpoint)
    module._trainer = None
    return checkpoint


@pytest.mark.parametrize("targets", [["q", "k", "v", "o"], ["q"], ["v", "gate", "down"]])
def test_adapters_alone_are_trained_and_written(base, targets):
    module = a_module(base, lora={"rank": 3, "targets": targets, "alpha": 6.0})
    batch = a_batch()
    whole = a_module(base)
    assert torch.equal(module.hidden_states(batch), whole.hidden_states(batch)), "B is 0 at first"
    changed = steps(module)
    assert len(changed) == 4 * len(targets) * 2 and all(".lora_A." in name or ".lora_B." in name for name in changed)
    assert {name.split(".")[5] for name in changed} == {f"{target}_proj" for target in targets}
    checkpoint = written(module)
    assert set(checkpoint["state_dict"]) == changed
    logits = module.model.eval()(batch["input_ids"], use_cache=False).logits
    plain = whole.model.eval()(batch["input_ids"], use_cache=False).logits
    assert (logits - plain).abs().max() > 0.1
    merged = rebuild(checkpoint)
    assert merged.state_dict().keys() == whole.model.state_dict().keys()
    torch.testing.assert_close(merged(batch["input_ids"], use_cache=False).logits, logits, rtol=1e-5, atol=1e-5)
    with without_adapters(module.model):
        assert torch.equal(module.model(batch["input_ids"], use_cache=False).logits, plain)


def test_gradients_are_those_of_the_merged_weights(base):
    """dL/dA and dL/dB from the gradient of the merged matrix W + s B A, by the chain rule."""
    module = a_module(base, lora={"rank": 3, "alpha": 6.0})
    steps(module)
    module.zero_grad()
    module.training_step(a_batch(), 0).backward()
    whole = a_module(base)
    state = written(module)["state_dict"]
    merge(whole.model, {name.removeprefix("model."): value for name, value in state.items()}, 3, 6.0)
    whole.training_step(a_batch(), 0).backward()
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters() if parameter.requires_grad}
    for name, parameter in whole.model.named_parameters():
        place = name.removesuffix(".weight")
        if f"{place}.lora_A.default.weight" not in gradients:
            continue
        a, b = (state[f"model.{place}.lora_{kind}.default.weight"] for kind in "AB")
        for kind, wanted in (("A", 2 * b.T @ parameter.grad), ("B", 2 * parameter.grad @ a.T)):
            found = gradients[f"{place}.lora_{kind}.default.weight"]
            assert (found - wanted).norm() <= 1e-4 * wanted.norm(), name


def test_bfloat16_weights_have_float32_adapters(base):
    module = a_module(base, "qwen2", {"dtype": "bfloat16", "gradient_checkpointing": True}, lora={"rank": 2})
    changed = steps(module)
    named = dict(module.named_parameters())
    assert len(changed) == 4 * 4 * 2 and {named[name].dtype for name in changed} == {torch.float32}
    ids = a_batch()["input_ids"]
    logits = module.model.eval()(ids, use_cache=False).logits
    merged = rebuild(written(module), torch.float32)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    found = merged(ids, use_cache=False).logits
    assert (found - logits.float()).norm() < 0.03 * logits.float().norm()
    assert rebuild(written(module)).dtype == torch.bfloat16


def test_wrong_adapters_are_named(base):
    module = a_module(base, lora={"rank": 3})
    state = {name.removeprefix("model."): value for name, value in written(module)["state_dict"].items()}
    plain = a_module(base).model
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    with pytest.raises(ValueError, match=rf"{name} \(3, 16\) does not fit .*q_proj \(16, 16\) at rank 2"):
        merge(plain, state, 2, 1.0)
    with pytest.raises(ValueError, match="lm_head.weight is no adapter"):
        merge(plain, state | {"lm_head.weight": torch.zeros(1)}, 3, 1.0)
    with pytest.raises(ValueError, match="the model has no model.layers.9.self_attn.q_proj"):
        merge(plain, {name.replace("0", "9"): state[name]}, 3, 1.0)
    for arguments, message in (
        ((0, 1.0, 0.0, ["q"]), "rank >= 1"),
        ((1, 1.0, 1.0, ["q"]), "dropout in"),
        ((1, 1.0, 0.0, ["q", "head"]), "some of q, k, v, o, gate, up, down; got q, head"),
    ):
        with pytest.raises(ValueError, match=message):
            add_adapters(plain, *arguments)
    other = a_module(base, lora={"rank": 3, "targets": ["q", "up"]})
    with pytest.raises(ValueError, match="the checkpoint lacks 8 of the tensors .* lora.targets of its run"):
        other.on_load_checkpoint({"state_dict": {f"model.{name}": value for name, value in state.items()}})
    with pytest.raises(ValueError, match="need model.base"):
        PodModule({"config": {"model_type": "llama"}, "tokenizer": "bytes"}, TRAINER, lora={"rank": 2})


# Distillation


@pytest.mark.parametrize("lora_rank", [0, 3])
@pytest.mark.parametrize("share", ["scores", "keys"])
def test_the_loss_is_the_plain_formula(base, lora_rank, share):
    model = {"share": share, "mlp_tiles": 2, "gradient_checkpointing": True}
    module = a_module(base, model=model, distill={"weight": 0.75, "temperature": 2.0}, lora={"rank": lora_rank})
    assert (module.teacher is None) == (lora_rank > 0)
    batch = a_batch()
    for _ in range(2):  # and once more, with another student
        teacher = (dense_logits(base, batch["input_ids"])[:, :-1] / 2).log_softmax(-1)
        logits = module.model(batch["input_ids"], use_cache=False).logits[:, :-1]
        wanted = shifted(batch["labels"])[:, :-1]
        entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        divergence = (teacher.exp() * (teacher - (logits / 2).log_softmax(-1))).sum(-1)[wanted != -100].mean() * 4
        expected = 0.25 * entropy + 0.75 * divergence
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(expected, trained)
        loss = module.training_step(batch, 0)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for found, want in zip(torch.autograd.grad(loss, trained), gradients, strict=True):
            assert (found - want).norm() <= 1e-4 * want.norm() + 1e-9
        changed = steps(module)
        assert changed and not any(name.startswith("teacher") for name in changed)
    assert divergence > 0.01
    names = set(written(module)["state_dict"])
    assert not any(name.startswith("teacher") for name in names) and len(names) >= len(changed)


def test_the_teacher_of_a_window_model_sees_everything(base):
    model = {"base": str(base / "llama"), **WINDOW, "share": "window"}
    module = PodModule(model, TRAINER, lora={"rank": 2}, distill={"weight": 1.0})
    module.log = lambda *args, **kwargs: None
    module.configure_model()
    batch = a_batch()
    taught = module.model.lm_head(module.teacher_states(batch))
    torch.testing.assert_close(taught, dense_logits(base, batch["input_ids"]), rtol=1e-5, atol=1e-5)
    assert module.model.config.share == "window"
    assert (module.model(batch["input_ids"], use_cache=False).logits - taught).abs().max() > 0.01


def test_the_forward_of_the_teacher_is_counted_with_adapters_too(base):
    alone, taught = (a_module(base, lora={"rank": 2}, distill={"weight": weight}) for weight in (0.0, 0.5))
    frozen = sum(p.numel() for p in taught.model.parameters() if not p.requires_grad)
    assert taught.flops_per_token() - alone.flops_per_token() == 2 * frozen > 0


def test_a_resumed_run_distills_on(base):
    module = a_module(base, distill={"weight": 0.5})
    steps(module)
    checkpoint = written(module)
    again = a_module(base, distill={"weight": 0.5})
    again.on_load_checkpoint(checkpoint)
    again.load_state_dict(checkpoint["state_dict"], strict=again.strict_loading)
    assert torch.equal(again.training_step(a_batch(), 0), module.training_step(a_batch(), 0))
    assert pod.LayerBlocks(BLOCKS) == rebuild(checkpoint).config.blocks
    flops = module.flops_per_token() / sum(parameter.numel() for parameter in module.model.parameters())
    assert flops == 8


def test_a_projection_that_a_family_joins_with_others_is_refused():
    """peft would leave it out silently, and train the output projections alone."""
    model = pod.PodPhi3ForCausalLM(pod.PodPhi3Config(**SIZES, pad_token_id=0))
    with pytest.raises(ValueError, match="targets q, k, v: PodPhi3ForCausalLM has no such matrices.* of o, down$"):
        add_adapters(model, 2, 4.0, 0.0, ["q", "k", "v", "o"])
    add_adapters(model, 2, 4.0, 0.0, ["o", "down"])
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * SIZES["num_hidden_layers"]
