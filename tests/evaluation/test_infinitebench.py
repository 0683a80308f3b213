"""InfiniteBench: prompts to the byte, truncation, ceilings, files that are wrong, the command."""

import argparse
import json

import pytest
from scripts import letters_tokenizer
from transformers import ByT5Tokenizer

from pod.evaluation import infinitebench, runner

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}<assistant>"
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
BOOK = {"id": 0, "context": "A {book}.", "input": "Who?", "answer": ["Ann"], "options": ["Eve", "Ann", "Bob", "Joe"]}
PROMPTS = {
    "passkey": "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will "
    "quiz you about the important information.\n\nA {book}.\n\nWho?\n\nThe pass key is",
    "number_string": "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you "
    "about the important information there.\n\nA {book}.\n\nWho?\n\nThe sequence of digits is",
    "longbook_qa_eng": "Read the book and answer the question. Be very concise in your answer.\n\nA {book}.\n\n"
    "Question: Who?\nAnswer:",
    "longbook_choice_eng": "Read the book and answer the question.\n\nA {book}.\n\nQuestion: Who?\nA. Eve\nB. Ann\n"
    "C. Bob\nD. Joe\n\nThe letter of the correct answer is",
    "longbook_sum_eng": "Summarize the book below.\n\nA {book}.\n\nSummary:",
}


def write(folder, task, *lines):
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / f"{task}.jsonl").write_text(text)
    return str(folder)


@pytest.mark.parametrize("task", PROMPTS)
def test_prompts_to_the_byte(tokenizer, tmp_path, task):
    samples = infinitebench.load_samples(write(tmp_path, task, BOOK), task)
    (request,) = infinitebench.make_requests(tokenizer, task, samples, 10_000)
    assert request.text == PROMPTS[task] and request.special_tokens
    assert request.max_new_tokens == dict(zip(infinitebench.PROMPTS, (40, 40, 1200, 6, 12), strict=True))[task]
    assert request.text[request.question_at :] == PROMPTS[task].split("A {book}.")[1]
    assert request.record["label"] == (["Ann", "B"] if task == "longbook_choice_eng" else ["Ann"])
    chat = ByT5Tokenizer(extra_ids=0, chat_template=CHAT)
    (request,) = infinitebench.make_requests(chat, task, samples, 10_000)
    assert request.text == f"<user>{PROMPTS[task]}</s><assistant>" and not request.special_tokens


def test_truncation_where_decoding_and_encoding_changes_the_length():
    """17 tokens; of 6 the halves are <s> c a and b b c. They are decoded together, and "a" meets "b": five tokens."""
    tokenizer = letters_tokenizer()
    text = "caa" + "c" * 10 + "bbc"
    cut = infinitebench.truncate(tokenizer, text, 6)
    assert cut == "ca" + "bbc" == infinitebench.truncate(tokenizer, text, 7)
    assert runner.encode(tokenizer, runner.Request("0", cut, 1)) == [0, 3, 4, 2, 3]
    assert infinitebench.truncate(tokenizer, text, 17) == text
    assert infinitebench.truncate(tokenizer, "ca<s>b", 17) == "cab"  # a text that fits is decoded too
    assert infinitebench.truncate(tokenizer, text, 16) == "caa" + "c" * 9 + "bbc"
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        infinitebench.truncate(tokenizer, text, 1)


def hidden(index, lines=20):
    key = str(10000 + index)
    said = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
    return {"context": GRASS * index + said + GRASS * (lines - index), "input": "What is the pass key?", "answer": key}


def test_ceilings_are_what_truncation_leaves(ckpt, tmp_path, capsys):
    """Twenty-one depths; a window of half of the prompt keeps the keys of the outer halves."""
    data = write(tmp_path / "data", "passkey", *(hidden(index) for index in range(21)))
    size = len(infinitebench.filled("passkey", hidden(0))[0]) // 2
    out = tmp_path / "out"
    arguments = ["--ckpt", str(ckpt), "--data", data, "--tasks", "passkey", "--out", str(out), "--batch-size", "20"]
    assert infinitebench.main([*arguments, "--windows", str(size)]) == 0
    scores = json.loads((out / "scores.json").read_text())["scores"][f"passkey-{size}"]
    rows = [json.loads(line) for line in (out / f"passkey-{size}.jsonl").read_text().splitlines()]
    kept = [row["kept"] for row in rows]
    assert kept[0] and kept[-1] and not kept[10] and 8 <= sum(kept) <= 11
    assert scores["ceiling"] == round(100 * sum(kept) / 21, 2)
    write(tmp_path / "data", "passkey", hidden(0) | {"input": "Which one?"}, *(hidden(index) for index in range(1, 21)))
    assert infinitebench.main([*arguments, "--windows", str(size)]) == 2
    captured = capsys.readouterr()
    assert f"the prediction 0 of passkey-{size} was made for other data (prompt differs)" in captured.err
    said = captured.out
    assert "ceiling by truncation" in said and "Published (arXiv 2412.02252" in said


def test_published_rows_stand_under_the_sets_they_are_of():
    table = infinitebench.published_table(["longbook_qa_eng-32768", "passkey-65536", "number_string-131072", "x-1"])
    assert "| PoD          |                 27.43 |         53.73 |                99.15 |" in table
    assert "| H2O          |                 25.42 |          7.12 |                    - |" in table
    for values in infinitebench.PUBLISHED.values():
        assert len(values) == 10 or round(sum(values[:15]) / 15, 2) == values[15]


@pytest.mark.parametrize("task", infinitebench.HIDDEN)
@pytest.mark.parametrize("length", [400, 1024])
def test_numbers_hidden_here(tokenizer, task, length):
    samples = infinitebench.made(tokenizer, task, length, 3)
    name = infinitebench.HIDDEN[task]
    for index, sample in enumerate(samples):
        (key,) = sample["label"]
        assert len(key) == (5 if task == "passkey" else 10) and sample["input"] == f"What is the {name}?"
        before, after = sample["context"].split(f"The {name} is {key}. Remember it. {key} is the {name}.\n")
        lines = (len(before) + len(after)) // len(GRASS)
        assert before + after == GRASS * lines and before == GRASS * round(lines * index / 2)
    requests = infinitebench.make_requests(tokenizer, task, samples, length)
    tokens = [len(runner.encode(tokenizer, one)) + one.max_new_tokens for one in requests]
    assert length - len(GRASS) < max(tokens) <= length and all(one.record["kept"] for one in requests)
    assert samples == infinitebench.made(tokenizer, task, length, 3)
    with pytest.raises(ValueError, match=f"--made 99: {task} needs at least"):
        infinitebench.made(tokenizer, task, 99, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "broken JSON"),
        ({"context": 3}, "field 'context' must be a text, got '3'"),
        ({"answer": []}, "field 'answer' is empty"),
        ({"answer": None}, "field 'answer' must be a text or a list of texts"),
        ({"options": ["a"]}, "field 'options' must be four texts, got 1"),
        ({"answer": "Zoe"}, r"field 'answer' must be one of the options, or its text and letter, got \['Zoe'\]"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, change, message):
    wrong = change if isinstance(change, str) else BOOK | change
    data = write(tmp_path, "longbook_choice_eng", BOOK, wrong)
    with pytest.raises(ValueError, match=rf"longbook_choice_eng\.jsonl:2: {message}"):
        infinitebench.load_samples(data, "longbook_choice_eng")


def test_the_command(ckpt, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    method = "snapkv:budget=64,query_aware=false,window=8"
    arguments = ["--ckpt", str(ckpt), "--made", "400", "600", "--samples", "2", "--out", str(out), "--eviction", method]
    assert infinitebench.main(arguments) == 0
    table = (out / "comparison.md").read_text()
    assert "InfiniteBench, hidden numbers made here." in table
    assert "passkey-400 ceiling" in table and "mean of 4" in table
    assert len((out / method.replace(":", "-") / "number_string-600.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(runner, "_generate", None)
    assert infinitebench.main(arguments) == 0  # nothing is predicted twice
    assert infinitebench.main([*arguments, "--limit", "1"]) == 0
    again = ["--made", "400", "600", "--score-only", "--out"]
    written = json.loads((out / "scores.json").read_text())
    (out / "scores.json").unlink()
    assert infinitebench.main([*again, str(out), "--tasks", "passkey"]) == 0
    scored = json.loads((out / "scores.json").read_text())["scores"]
    assert scored == {name: one for name, one in written["scores"].items() if name.startswith("passkey")}
    capsys.readouterr()
    assert infinitebench.main([*again, str(tmp_path)]) == 2
    assert f"--out {tmp_path}: no predictions of passkey-400, number_string-400" in capsys.readouterr().err
    (tmp_path / "passkey-400.jsonl").write_text('{"key": "0", "pred": "1", "label": ["1"]}\n')
    assert infinitebench.main([*again, str(tmp_path)]) == 2
    assert "passkey-400.jsonl: field 'kept' (true or false) of 0 is missing" in capsys.readouterr().err
    (tmp_path / "passkey-400.jsonl").write_text('{"key": "0", "pred": "1", "kept": true}\n')
    assert infinitebench.main([*again, str(tmp_path)]) == 2
    assert "passkey-400.jsonl:1: field 'label' (a list of texts) is missing" in capsys.readouterr().err
    for more, message in [
        (["--limit", "0"], "--limit must be at least 1"),
        (["--tasks", "pass"], "--tasks pass: no task of InfiniteBench here; did you mean passkey?"),
        (["--tasks", "longbook_qa_eng"], "--made has no words for longbook_qa_eng"),
        (["--samples", "0"], "--samples must be at least 1"),
    ]:
        assert infinitebench.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
    assert infinitebench.main(["--ckpt", str(ckpt), "--data", str(tmp_path)]) == 2
    assert "longbook_qa_eng.jsonl cannot be read" in capsys.readouterr().err
    assert infinitebench.main(["--ckpt", str(ckpt)]) == 2
    assert "fetch xinrongzhang2022/InfiniteBench from the Hugging Face hub" in capsys.readouterr().err


def test_windows_end_with_the_positions(tokenizer, tmp_path):
    parser = argparse.ArgumentParser()
    infinitebench.InfiniteBench.add_options(parser)
    options = parser.parse_args(["--data", write(tmp_path, "passkey", BOOK), "--tasks", "passkey"])
    bench = infinitebench.InfiniteBench(options)
    assert bench.window(tokenizer, "passkey", 32768) == 32768 and bench.beyond("m") == ""
    bench.room = 2048
    assert bench.window(tokenizer, "passkey", 32768) == 2042 and bench.window(tokenizer, "passkey", 1024) == 1024
    assert bench.beyond("a/m") == "m has 2048 positions: windows that end beyond them with the answer are lowered."
    chat = ByT5Tokenizer(extra_ids=0, chat_template=CHAT)
    assert bench.window(chat, "passkey", 32768) == 2042 - len("<user>") - 1 - len("<assistant>")
