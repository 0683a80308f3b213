"""The papers' figures: what is measured, on a tiny model, and that the pictures are drawn."""

import json

import pytest
import torch
from scripts import save, tiny_llama

from pod.evaluation import figures
from pod.eviction import CAKE, Observation
from pod.model.probe import watch


def test_maps_and_dynamics_are_those_of_the_models_own_attention():
    model = tiny_llama(attn_implementation="eager")
    ids = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(0))
    meter = figures.Attention([1], window=6)
    watch(model, [ids], [meter], "attention", progress=False)
    cake = CAKE(12, window=6)
    for row in range(2):
        attentions = model(ids[row : row + 1], output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            grouped = weights.detach().view(1, 2, 2, 40, 40)
            seen = Observation(
                grouped[:, :, :, -6:], torch.arange(40).expand(1, 2, -1), torch.tensor([39]), True, False
            )
            entropy, shift = meter.dynamics[row][layer]
            assert entropy * shift == pytest.approx(float(cake.preference(seen)), rel=1e-3)
    torch.testing.assert_close(meter.maps[1], model(ids[:1], output_attentions=True).attentions[1][0].mean(0).detach())


def test_all_tokens_foretell_what_full_attention_does():
    model = tiny_llama()
    samples = [torch.randint(3, 259, (1, 60), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    few, all_of_them = figures.agreement(model, samples, [4, 60], last=20)
    assert all_of_them == 1.0 and few < 1.0
    assert [figures.sinks_of(size) for size in (8, 64, 4096)] == [2, 16, 16]


def test_the_answer_lies_where_it_is_said_to(tokenizer):
    found = figures.place_prompts(tokenizer, 900, 2)
    assert list(found) == ["a", "b", "c", "d"]
    for place, requests in found.items():
        for request in requests:
            (key,) = request.record["label"]
            at = request.text.index(f"The pass key is {key}") / len(request.text)
            assert {"a": at > 0.85, "b": at == 0, "c": 0.3 < at < 0.6, "d": 0.3 < at < 0.6}[place]
            assert len(runner_ids(tokenizer, request.text)) <= 900 - figures.MAX_NEW_TOKENS
            assert ("Somewhere above" in request.text) == (place == "c")
    with pytest.raises(ValueError, match="--length 60: places needs at least"):
        figures.place_prompts(tokenizer, 60, 2)


def runner_ids(tokenizer, text):
    return figures.runner.tokenise(tokenizer, text)


def test_the_command(tmp_path, capsys):
    ckpt = str(save(tiny_llama(), tmp_path / "tiny"))
    text = tmp_path / "book.txt"
    text.write_text("It is a truth universally acknowledged. " * 60)
    arguments = [
        "--ckpt",
        ckpt,
        "--text",
        str(text),
        "--length",
        "260",
        "--texts",
        "2",
        "--samples",
        "1",
        "--window",
        "8",
    ]
    arguments += ["--proximal", "16,260", "--eviction", "h2o:budget=32", "--out", str(tmp_path / "out")]
    assert figures.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| 260             |               100.0% |" in printed and "| h2o:budget=32      |" in printed
    for name in figures.PICTURES:
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    found = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert len(found["dispersion and shift"]) == 2 and set(found["places"]) == {"none", "h2o:budget=32"}
    for more, message in [
        (["--layers", "7"], "--layers 7: tiny has layers 0 to 1"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--length", "9000"], "--length 9000 wants more"),
    ]:
        assert figures.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
