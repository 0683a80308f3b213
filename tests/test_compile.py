"""torch.compile of training: one graph of the whole decoder, and exactly the eager gradients."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.training.module import PodModule
from pod_kernels import composed, shared_score_attention
from pod_kernels.attention import Problem

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}
BLOCKS = [[0, 0], [0, 1], [0, 1]]
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 10 + [-1] * 2, [0] * 19])


@pytest.fixture
def graphs(monkeypatch):
    """`compile` as a module's method, without breaks and without generated code; the number of graphs it made."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self: setattr(self, "forward", torch.compile(self.forward, fullgraph=True, backend=backend)),
    )
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def the_same(tmp_path, model=None, **settings):
    """Two steps of a module, compiled and not: losses and gradients are equal to the last bit."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(60, (2, 19), generator=generator) for _ in range(2)]
    found = []
    for compiled in (False, True):
        torch.manual_seed(2)
        wanted = {
            "base": str(tmp_path / "base"),
            "sink_size": 2,
            "recent_size": 5,
            "compile": compiled,
            **(model or {}),
        }
        module = PodModule(wanted, {"max_steps": 2, "tokens_per_batch": 38, "loss_chunk": 7}, **settings)
        module.log = lambda *args, **kwargs: None
        module.configure_model()
        names = set(module.state_dict())
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if not parameter.any():  # an adapter's B, behind which A would have no gradient
                nn.init.normal_(parameter, std=0.2)
        run = []
        for ids in batches:
            loss = module.training_step({"input_ids": ids, "document_ids": DOCUMENTS}, 0)
            run += [loss.detach(), *torch.autograd.grad(loss, trained)]
        found.append((names, run))
    assert found[0][0] == found[1][0], "checkpoints have the same names"
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(found[0][1], found[1][1], strict=True))
    assert all(tensor.any() for tensor in found[0][1])


@pytest.mark.slow
def test_one_graph_has_the_eager_gradients(tmp_path, graphs):
    the_same(tmp_path, blocks=BLOCKS, model={"gradient_checkpointing": True})
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, count",
    [
        ({"blocks": BLOCKS, "model": {"share": "keys", "mlp_tiles": 2}}, 1),
        ({"blocks": [[0, 0], [0, -1], [2, 2]]}, 1),
        ({"model": {"share": "window"}}, 1),
        ({"blocks": BLOCKS, "distill": {"weight": 0.5}}, 2),
        ({"blocks": BLOCKS, "distill": {"weight": 0.5}, "lora": {"rank": 2}}, 2),
    ],
)
def test_further_models_have_the_eager_gradients(tmp_path, graphs, settings, count):
    the_same(tmp_path, **settings)
    assert len(graphs) == count


@pytest.mark.parametrize("placement", ["plain", "lengths", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operation_is_what_it_tells_the_compiler(placement, dtype):
    """Shapes, strides and dtypes without data; and what it returns, for all outputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return torch.randn(2, 19, heads, 4, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_()

    q, k, v, q_distant, k_distant = (draw(heads) for heads in (4, 2, 2, 4, 2))
    placed = {"lengths": torch.tensor([13, 19])} if placement == "lengths" else {}
    placed |= {"document_ids": DOCUMENTS} if placement == "documents" else {}
    tensors = (q, k, v, q_distant, k_distant, placed.get("lengths"), placed.get("document_ids"))
    torch.library.opcheck(
        composed._attention, (*tensors, 2, 5, 0.5, False, True), test_utils=("test_schema", "test_faketensor")
    )
    options = {"sink_size": 2, "recent_size": 5, "return_lse": True, "return_gate": True, **placed}
    eager = shared_score_attention(q, k, v, q_distant, k_distant, backend="composed", **options)
    whole = composed.attend_in_graph(Problem(q, k, v, q_distant, k_distant, **options))
    for found, wanted in zip(whole, eager, strict=True):
        assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad
    for inputs in ((q, k, v, q_distant, k_distant), (v,)):
        gradients = [torch.autograd.grad(out[0].square().sum(), inputs, retain_graph=True) for out in (whole, eager)]
        assert all(torch.equal(found, wanted) for found, wanted in zip(*gradients, strict=True))


def test_plain_attention_and_a_window_are_operations_too():
    q, k, v = (torch.randn(1, heads, 19, 4) for heads in (4, 2, 2))
    for options in ({}, {"window_only": True}):
        sizes = {"sink_size": 2, "recent_size": 5, **options}
        assert torch.equal(
            composed.attend_in_graph(Problem(q, k, v, **sizes))[0], shared_score_attention(q, k, v, **sizes)
        )
    with pytest.raises(ValueError, match="does not fit|lengths must lie in 0..19"):
        composed.attend_in_graph(Problem(q, k, v, sink_size=2, recent_size=5, lengths=torch.tensor([20])))


def test_a_compiled_model_is_still_a_pod_model(graphs):
    model = pod.convert(LlamaForCausalLM(LlamaConfig(**SIZES)), pod.LayerBlocks(BLOCKS), 2, 5)
    wanted = model(torch.arange(19)[None], use_cache=False).logits
    model.model.compile()
    with torch.no_grad():
        assert torch.equal(model(torch.arange(19)[None], use_cache=False).logits, wanted)
    assert len(graphs) == 1
