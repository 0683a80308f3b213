"""PG19's protocol: each token is foretold once, tokens weigh equally, a run goes on."""

import json
import math
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy

import pod
from pod.evaluation import pg19

BOOKS = {"a.txt": "def f(x):\n    return x + 1\n\n" * 8, "b.txt": "The old clock had stopped. " * 6, "c.txt": "short"}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "books"
    made.mkdir()
    for name, text in BOOKS.items():
        (made / name).write_text(text)
    return made


def by_hand(model, ids, size):
    """(nats, tokens) of a book: each token but the first once, seen from its chunk of inputs alone."""
    nats = 0.0
    for start in range(0, len(ids) - 1, size):
        seen = torch.tensor([ids[start : start + size]])
        wanted = torch.tensor(ids[start + 1 : start + size + 1])
        with torch.no_grad():
            logits = model(seen).logits[0, : len(wanted)]
        nats += float(cross_entropy(logits.double(), wanted, reduction="sum"))
    return nats, len(ids) - 1


def test_the_table_is_what_is_computed_by_hand(model, tokenizer, ckpt, folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = ["--ckpt", str(ckpt), "--books", str(folder), "--sizes", "64", "--stride", "16", "--out", str(out)]
    arguments += ["--methods", "cascade:sinks=4,num_cascades=2+streamingllm:sinks=4"]
    assert pg19.main(arguments) == 0
    said = capsys.readouterr().out
    ids = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in BOOKS.items()}
    nats, tokens = zip(*(by_hand(model, ids[name], 64) for name in ("a.txt", "b.txt")), strict=True)
    assert f"{math.exp(sum(nats) / sum(tokens)):.3f} (2 books, {sum(tokens):,} tokens)" in said  # tokens weigh equally
    written = json.loads((out / "tiny.json").read_text())["losses"]
    assert written[f"{ckpt} strided 64"]["a.txt"] == [pytest.approx(nats[0], rel=1e-5), tokens[0]]
    # A method's cell: the sinks come on top of the size, and it reads a stride at a time.
    name = next(key for key in written if "cascade" in key)
    assert "budget=68" in name and "stride=16" in name
    cache = pod.PodCache(model.config, eviction=pod.eviction.parse(name.split()[1]))
    losses = 0.0
    with torch.no_grad():
        for start in range(0, len(ids["b.txt"]) - 1, 16):
            part = torch.tensor([ids["b.txt"][start : start + 17]])
            seen = part[:, : min(16, part.shape[1] - 1)]
            logits = model(seen, past_key_values=cache).logits[0]
            losses += float(cross_entropy(logits.double(), part[0, 1 : len(logits) + 1], reduction="sum"))
    assert written[name]["b.txt"] == [pytest.approx(losses, rel=1e-4), len(ids["b.txt"]) - 1]
    # It goes on: what is there is not measured again, a book that is missing is.
    content = json.loads((out / "tiny.json").read_text())
    del content["losses"][f"{ckpt} strided 64"]["b.txt"]
    (out / "tiny.json").write_text(json.dumps(content))
    measured = []
    real = pg19.perplexity
    monkeypatch.setattr(pg19, "perplexity", lambda *args, **options: measured.append(options) or real(*args, **options))
    assert pg19.main(arguments) == 0
    assert [one["label"] for one in measured] == ["tiny, strided, 64: b.txt"]
    assert capsys.readouterr().out == said


def test_two_methods_of_a_kind_are_two_rows(ckpt, folder, tmp_path, capsys):
    arguments = ["--ckpt", str(ckpt), "--books", str(folder), "--sizes", "64", "--stride", "16", "--out", str(tmp_path)]
    one, other = "cascade:sinks=4,num_cascades=1", "cascade:sinks=4,num_cascades=2"
    assert pg19.main([*arguments, "--methods", f"{one}+streamingllm:sinks=4+{other}"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert rows == [f"tiny, {name}" for name in ("strided", one, "StreamingLLM", other)]


def test_chunks_have_each_target_once():
    ids = torch.arange(11)
    chunks = list(pg19.strided(ids, 4))
    assert [chunk.tolist() for chunk in chunks] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10]]
    assert torch.cat([chunk[1:] for chunk in chunks]).tolist() == list(range(1, 11))
    assert len(list(pg19.strided(torch.arange(9), 4))) == 2


def test_what_cannot_be_is_refused(ckpt, folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--ckpt", str(ckpt), "--books", str(folder), "--sizes", "64", "--stride", "16", "--out", str(out)]
    (tmp_path / "empty").mkdir()
    for more, message in [
        (["--books", str(tmp_path / "empty")], "no NAME.txt or NAME.txt.gz is there"),
        (["--sizes", "9999"], "--sizes 9999: no book has more tokens, the longest"),
        (["--stride", "0"], "--stride must be at least 1, got 0"),
        (["--sizes", "64", "0"], "--sizes must be at least 1, got 0"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--methods", "snapkv:query_aware=false"], "with query_aware=false the first chunk"),
        (["--methods", "snapkv:budget=9"], "budget"),
    ]:
        assert pg19.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err, more
    (folder / "a.txt").write_bytes(b"\xff")
    assert pg19.main(arguments) == 2
    assert "a.txt: not UTF-8" in capsys.readouterr().err
    (folder / "a.txt").write_text(BOOKS["a.txt"])
    assert pg19.main([*arguments, "--methods", "h2o"]) == 0
    assert pg19.main([*arguments, "--methods", "h2o", "--stride", "8"]) == 2
    assert "holds losses with stride 16, now it is 8" in capsys.readouterr().err
    shutil.copy(folder / "c.txt", folder / "d.txt")
    assert pg19.main([*arguments, "--methods", "h2o"]) == 2  # other books
