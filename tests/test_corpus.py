"""data/corpus.py: what is collected, what is held out, and that nothing is on both sides."""

import gzip
import json
import re
from pathlib import Path

import pytest
from scripts import script

from pod import prepare
from pod.data.prepared import PreparedDataset
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


def test_what_is_looked_up_stands_in_the_passage_before(tmp_path, system):
    plain = run(tmp_path, system, "--megabytes", "0.02")
    assert run(tmp_path, system, "--megabytes", "0.02", "--lookups", "30") == plain
    lines = gzip.decompress((tmp_path / "out/lookups.jsonl.gz").read_bytes()).decode().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) == 60 and all(chat[-1]["role"] == "assistant" for chat in chats)
    texts = [each["text"] for each in plain]
    for whole in chats[::2]:
        assert len(whole) == 1 and any(whole[0]["content"] in text for text in texts)
    answers = 0
    for chat in chats[1::2]:
        assert sum(len(message["content"]) for message in chat) > corpus.LOOKED_UP / 2
        for asked, answered in zip(chat[::2], chat[1::2], strict=True):
            assert (asked["role"], answered["role"]) == ("user", "assistant")
            value = re.fullmatch(r"(.* )?(\S+-\S+|\w+ \w+ \w+|\d+)\.(<\|im_end\|>)?\n+", answered["content"]).group(2)
            held = [line for line in asked["content"].splitlines() if value in line]
            stated = [
                found.group("name")
                for fact, _, _ in corpus.FACTS
                for line in held
                if (found := re.fullmatch(_pattern(fact, value), line))
            ]
            assert len(stated) == len(held) == 1  # once, and not in the question
            *_, question = asked["content"].removesuffix("<|im_end|>\n<|im_start|>assistant\n").split(held[0])
            assert stated[0] in question
            answers += 1
    assert answers > 60


def test_look_ups_are_drawn_from_the_kinds_that_are_weighted(tmp_path, system, capsys):
    texts = run(tmp_path, system, "--megabytes", "0.02", "--lookups", "40", "--weights", "0", "0", "0.1")
    manuals = [each["text"] for each in texts if each["source"] == "manual"]
    lines = gzip.decompress((tmp_path / "out/lookups.jsonl.gz").read_bytes()).decode().splitlines()
    wholes = [json.loads(line)["messages"][0]["content"] for line in lines[::2]]
    assert all(any(whole in text for text in manuals) for whole in wholes)
    assert corpus.main(["--lookups", "1", "--weights", "0", "0", "-1", "--out", str(tmp_path / "none")]) == 2
    assert "give three numbers of at least 0, not all of them 0" in capsys.readouterr().err


def _pattern(fact: str, value: str) -> str:
    return re.escape(fact).replace(r"\{name\}", "(?P<name>.+)").replace(r"\{value\}", re.escape(value))


def test_the_template_of_look_ups_writes_them_as_they_are_and_answers_are_learned(tmp_path, system):
    run(tmp_path, system, "--megabytes", "0.02", "--lookups", "10")
    out = tmp_path / "out"
    options = ["--source", str(out / "lookups.jsonl.gz"), "--chat", "--chat-template", str(out / "lookups.jinja")]
    options += ["--tokenizer", "bytes", "--sequence-length", "9000", "--one-document", "--held-out", "0"]
    assert prepare.main([*options, "--out", str(tmp_path / "prepared"), "--num-proc", "1"]) == 0
    lines = gzip.decompress((out / "lookups.jsonl.gz").read_bytes()).decode().splitlines()
    written = {}
    for messages in (json.loads(line)["messages"] for line in lines):
        text = "".join(message["content"] for message in messages)
        written[text] = "".join(message["content"] for message in messages if message["role"] == "assistant")
    samples = PreparedDataset(tmp_path / "prepared", "train")
    assert len(samples) == len(written)
    for sample in samples:
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        text = bytes(token - 3 for token in ids if token >= 3).decode()
        learned = bytes(label - 3 for label in labels if label >= 3).decode()
        assert learned == written[text][text == written[text] :]  # nothing foretells a sample's first token


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
    arguments[1] = str(tmp_path / "none.txt")
    assert corpus.main(arguments) == 2
    assert "--novels" in (said := capsys.readouterr().err) and "none.txt: there is no such file; give the path" in said
    assert corpus.main([*arguments, "--lookups", "-3"]) == 2
    assert "--lookups -3 must not be negative: 0 writes none" in capsys.readouterr().err


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
