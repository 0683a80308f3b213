"""data/corpus.py: what is collected, what is held out, and that nothing is on both sides."""

import gzip
import json
import re
from pathlib import Path

import pytest
from scripts import script

from pod.evaluation.texts import read_text

corpus = script("data/corpus.py")
NOVEL = "\n\n".join(f"{n} said so, " + f"and word {n} was his answer to it, " * 8 for n in range(400))


@pytest.fixture
def system(tmp_path):
    """A small /usr/share."""
    root = tmp_path / "share"
    for number in range(60):
        folder = root / f"doc/package{number}"
        folder.mkdir(parents=True)
        (folder / "README.gz").write_bytes(gzip.compress(f"Package {number}.\n".encode() * 200))
        (folder / "copyright").write_text("No prose. " * 500)
        (folder / "changelog.txt").write_text("Changed. " * 500)
    (root / "doc/package0/short.md").write_text("too short")
    (root / "doc/package1/latin.txt").write_bytes(b"\xe9" * 3000)
    (root / "doc/package2/again.txt").write_text("Package 2.\n" * 200)  # what README.gz says
    (root / "man/man1").mkdir(parents=True)
    page = ".TH X 1\n.SH NAME\nx \\- a page\n.SH DESCRIPTION\n" + ".B bold\nwords of the page.\n" * 200
    (root / "man/man1/x.1.gz").write_bytes(gzip.compress(page.encode()))
    (root / "vim/vim90/doc").mkdir(parents=True)
    (root / "vim/vim90/doc/usr_01.txt").write_text("Vim's handbook.\n" * 300)
    return root


def run(tmp_path, system, *options):
    (tmp_path / "novel.txt").write_text(NOVEL)
    arguments = ["--novels", str(tmp_path / "novel.txt"), "--root", str(system), "--out", str(tmp_path / "out")]
    assert corpus.main([*arguments, *options]) == 0
    lines = gzip.decompress((tmp_path / "out/train.jsonl.gz").read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]


def test_three_kinds_and_nothing_on_both_sides(tmp_path, system):
    documents = run(tmp_path, system, "--megabytes", "0.3")
    kinds = {
        kind: [each["text"] for each in documents if each["source"] == kind] for kind in ("novel", "code", "manual")
    }
    assert sorted("".join(kinds["novel"]).split()) == sorted(NOVEL.split())
    held_out = {kind: (tmp_path / f"out/held-out/{kind}.txt").read_text() for kind in kinds}
    assert held_out["novel"] == read_text(corpus.NOVEL, "--text") and "Kellynch Hall" in held_out["novel"]
    assert not corpus.paragraphs("\n\n".join(kinds["novel"])) & corpus.paragraphs(held_out["novel"])
    for kind in ("code", "manual"):
        assert held_out[kind] and not any(text in held_out[kind] for text in kinds[kind])
    said = json.loads((tmp_path / "out/corpus.json").read_text())
    trained = {corpus.digest(each["text"]) for each in documents}
    assert not trained & {each for hashes in said["held_out"].values() for each in hashes}
    assert len(trained) == len(documents)  # nothing twice
    manuals = "".join(kinds["manual"]) + held_out["manual"]
    assert "Vim's handbook." in manuals and "Changed." not in manuals and "No prose." not in manuals
    assert all(f"Package {number}.\n" in manuals for number in range(60))
    if corpus.shutil.which("groff"):
        assert "bold words of the page." in " ".join(manuals.split()) and ".SH" not in manuals


def test_the_same_again_and_no_more_than_is_asked_for(tmp_path, system):
    first = run(tmp_path, system, "--megabytes", "0.02")
    assert run(tmp_path, system, "--megabytes", "0.02") == first
    for kind in ("code", "manual"):
        sizes = [len(each["text"].encode()) for each in first if each["source"] == kind]
        assert sum(sizes[:-1]) < 20_000  # the last one reaches it


def test_records_are_asked_for_behind_the_text_that_holds_them(tmp_path, system):
    documents = run(tmp_path, system, "--megabytes", "0.02", "--records", "30")
    assert documents[:-30] == run(tmp_path, system, "--megabytes", "0.02")
    texts = [each["text"] for each in documents[:-30]]
    for document in documents[-30:]:
        assert document["source"] == "records"
        lines = document["text"].splitlines()
        answers = {line.removeprefix("Question: ") for line in lines[-corpus.ENTRIES :]}
        held = [line for line in lines[: -corpus.ENTRIES] if line.startswith("Register: ")]
        found = [re.fullmatch(r"Register: (the \w+ \w+), (\w+) (.+)\.", line).groups() for line in held]
        assert {f"{kind} of {thing}? Answer: {value}" for thing, kind, value in found} == answers
        assert len({thing for thing, _, _ in found}) == len(answers) == corpus.ENTRIES
        passage = "\n".join(line for line in lines[: -corpus.ENTRIES] if line not in held)
        assert any(passage in text for text in texts)


def test_refuses_the_held_out_novel(tmp_path, capsys):
    text = corpus.held_out_novel()
    (tmp_path / "part.txt").write_text("My own preface.\n\n" + text[50_000:60_000].replace("\n", "\r\n"))
    arguments = ["--novels", str(tmp_path / "part.txt"), "--root", str(tmp_path), "--out", str(tmp_path / "out")]
    assert corpus.main(arguments) == 2
    assert "paragraphs of the held-out persuasion.txt.gz: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "part.txt").write_bytes(b"\xff\xfe")
    assert corpus.main(arguments) == 2
    assert "part.txt: not UTF-8" in capsys.readouterr().err


def test_a_packed_text_is_read(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("é".encode()))
    assert read_text(path, "--text") == "é"
    for content, message in ((path.read_bytes()[:-3], "truncated"), (b"plain", "Not a gzipped file")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"--text .*a\.txt\.gz: {message}"):
            read_text(path, "--text")
    with pytest.raises(ValueError, match="there is no such file"):
        read_text(Path("nowhere.txt"), "--text")
