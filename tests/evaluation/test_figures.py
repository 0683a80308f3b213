"""The papers' figures: what is measured, on a tiny model, and that the pictures are drawn."""

import json

import pytest
import torch
from scripts import save, tiny_llama

import pod
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


def shared(**sizes):
    """A random PoD model of four layers, three of which share scores."""
    dense = tiny_llama(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, **sizes)
    return pod.convert(dense, pod.LayerBlocks([[0], [0], [0], [3]]), sink_size=2, recent_size=9).eval()


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_decoded_loss_is_that_of_one_forward_where_nothing_is_skipped(tau):
    model = shared(initializer_range=0.1)
    ids = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = pod.PodCache(model.config, tau=tau)
    nats = figures.decoded_loss(model, ids, 25, cache)
    with torch.no_grad():
        logits = model(ids).logits[:, 25:-1].float()
    whole = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 26:].flatten(), reduction="sum"))
    assert (abs(nats - whole) < 1e-3) == (cache.stats.skipped == 0) == (tau == 1)
    assert cache.get_seq_length() == 39


def test_thresholds_are_drawn(tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("It is a truth universally acknowledged. " * 30)
    arguments = ["--text", str(text), "--only", "tau", "--length", "64", "--texts", "2", "--out", str(tmp_path / "out")]
    pod_model = ["--ckpt", str(save(shared(), tmp_path / "pod"))]
    assert figures.main([*pod_model, *arguments, "--taus", "1,0"]) == 0
    nothing, everything = json.loads((tmp_path / "out" / "figures.json").read_text())["tau"][::-1]
    assert nothing["skipped_share"] == nothing["unread_share"] == 0
    assert everything["skipped_share"] == everything["unread_share"] == 1 and everything["nats"] != nothing["nats"]
    assert nothing["tokens"] == 2 * 15 and nothing["decisions"] == 2 * 15 * 2 * 2, "rows, tokens, query heads, layers"
    assert "| 0   |                100.0% |                  100.0% |" in capsys.readouterr().out
    assert (tmp_path / "out" / "tau.png").stat().st_size > 5000
    for more, message in [
        (["--taus", "0.5", "1.5"], "--taus [0.5, 1.5]: each between 0 (skip all that is distant) and 1"),
        (["--length", "4"], "--length must be at least 5, got 4"),
        (["--ckpt", str(save(tiny_llama(), tmp_path / "dense"))], "dense shares no scores, so there are none to skip"),
    ]:
        assert figures.main([*pod_model, *arguments, *more]) == 2
        assert message in capsys.readouterr().err


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
        (["--ckpt", ckpt, str(tmp_path / "other" / "tiny")], "two models of one name; run them into two --out"),
        (["--layers", "7"], "--layers 7: tiny has layers 0 to 1"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--length", "9000"], "--length 9000 wants more"),
    ]:
        assert figures.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


def test_places_are_written_when_all_processes_are_done(tmp_path, capsys, monkeypatch):
    """What others have not predicted yet was counted as not found."""
    ckpt = str(save(tiny_llama(), tmp_path / "tiny"))
    options = ["--only", "places", "--length", "260", "--samples", "2", "--out", str(tmp_path / "out")]
    written = tmp_path / "out" / "figures.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert figures.main(["--ckpt", ckpt, *options]) == 0
        assert ("process 0 is done; the last one" in capsys.readouterr().err) == (rank == "0") != written.exists()
