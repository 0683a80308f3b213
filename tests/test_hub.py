"""Data sets by `--source hub:...`: local folders stand for the hub, out of any test's reach; limits; refusals."""

import json

import datasets
import pytest
from test_sources import OPTIONS, texts

from pod import prepare
from pod.data import hub
from pod.data.prepared import PreparedData


@pytest.fixture
def folder(tmp_path):
    """Three files of four documents each, and a split of their own for two."""
    (tmp_path / "set").mkdir()
    for number in range(3):
        rows = [{"body": f"file {number} row {row}", "id": row} for row in range(4)]
        (tmp_path / f"set/train-{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "set/test-0.jsonl").write_text('{"body": "of the test", "id": 0}\n{"body": null, "id": 1}\n')
    return tmp_path / "set"


ALL = sorted(f"file {number} row {row}" for number in range(3) for row in range(4))


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_data_set_gives_what_its_files_give(folder, tmp_path, num_proc):
    options = OPTIONS | {"text_field": "body", "num_proc": num_proc}
    report = prepare.prepare([f"hub:{folder}"], tmp_path / "out", **options)
    assert texts(tmp_path / "out") == ALL and report["files"] == 3 and not report["skipped"]
    prepare.prepare([str(folder / f"train-{number}.jsonl") for number in range(3)], tmp_path / "files", **options)
    one, two = (tmp_path / name / "tokens-train-00000.bin" for name in ("out", "files"))
    assert one.read_bytes() == two.read_bytes()


def test_splits_formats_and_bad_rows(folder, tmp_path):
    report = prepare.prepare([f"hub:{folder}:test"], tmp_path / "out", **OPTIONS, text_field="body")
    assert texts(tmp_path / "out") == ["of the test"]
    assert report["skipped"] == [
        {"file": f"hub:{folder}:test#0", "line": 2, "problem": "no text: column 'body' is NoneType"}
    ]
    rows = [{"text": "a table's row"}, {"text": "another"}]
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "csv/rows.csv")
    prepare.prepare([f"hub:{tmp_path / 'csv'}"], tmp_path / "of csv", **OPTIONS)
    assert texts(tmp_path / "of csv") == ["a table's row", "another"]


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("limit", "count"), [({"max_documents": 5}, 5), ({"max_tokens": 33.0}, 3), ({"max_tokens": 1e9}, 12)]
)
def test_limits_read_so_much_and_no_more(folder, tmp_path, monkeypatch, limit, count, num_proc):
    found = {}
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        options = OPTIONS | limit | {"text_field": "body", "num_proc": num_proc, "seed": seed}
        report = prepare.prepare([f"hub:{folder}"], tmp_path / name, **options)
        found[name] = texts(tmp_path / name)
        assert len(found[name]) == report["documents"] == count and set(found[name]) <= set(ALL)
    assert found["a"] == found["again"] and (count == 12 or found["a"] != found["other"])
    if "max_tokens" in limit and count == 3:  # 15 tokens each: the third reaches 33
        tokens = PreparedData(tmp_path / "a").splits["train"]["tokens"]
        assert 33 <= tokens < 33 + 15


def test_what_was_read_is_not_read_again(folder, tmp_path, monkeypatch):
    opened = []
    real = hub.read_part

    def read_part(part, column):
        opened.append(part.number)
        if len(opened) == 3:
            raise KeyboardInterrupt
        return real(part, column)

    monkeypatch.setattr(hub, "read_part", read_part)
    options = OPTIONS | {"text_field": "body"}
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare([f"hub:{folder}"], tmp_path / "out", **options)
    prepare.prepare([f"hub:{folder}"], tmp_path / "out", **options)
    assert opened == [0, 1, 2, 2] and texts(tmp_path / "out") == ALL


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("hub:{folder}:dev", {}, "Bad split: dev. Available splits"),
        ("hub:no-such/set", {}, "--source hub:no-such/set: .*no-such/set"),
        ("hub:a/b/c/d", {}, r"wanted hub:NAMESPACE/NAME\[/CONFIG\]\[:SPLIT\]"),
        ("hub:", {}, r"wanted hub:NAMESPACE/NAME"),
        ("hub:{folder}", {}, "cannot be read from here on: no column 'text', only body, id: name it with --text-field"),
        ("hub:{folder}", {"max_tokens": 0}, "--max-tokens 0: at least 1"),
        ("hub:{folder}", {"max_documents": -1}, "--max-documents -1: at least 1"),
    ],
)
def test_refuses(folder, tmp_path, source, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepare.prepare([source.format(folder=folder)], tmp_path / "out", **OPTIONS | changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_nothing_is_written_into_a_data_set(folder):
    with pytest.raises(ValueError, match="lies inside --source"):
        prepare.prepare([f"hub:{folder}"], folder / "out", **OPTIONS, text_field="body")


def test_chats_are_read_from_files(folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(ValueError, match="--chat reads .*and hub:.* is among the sources"):
        prepare.prepare(
            [f"hub:{folder}"], tmp_path / "out", **OPTIONS, chat=True, chat_template=tmp_path / "chat.jinja"
        )
