"""NeedleBench v1: how prompts are made, to the byte; files that are wrong; the command."""

import json
import random

import pytest
from scripts import script
from transformers import ByT5Tokenizer

from pod.evaluation import needlebench, runner
from pod.evaluation.needlebench import LANGUAGES, Tokens

OPENS = (
    "You are an intelligent AI assistant skilled in answering user questions.\nPlease keep your answers concise and "
    "clear. Do not talk about irrelevant topics or repeat your answers.\nThe document given to you by the user is "
)
THINK = "Before answering, please consider what in the document is most relevant to this question."
LINES = [f"Line {number} of an essay. " for number in range(40)]


def needle(number, language="English"):
    if language == "Chinese":
        asked = f"{number}号岛上有什么？请按照'{number}号岛上有____。'的格式回答。"
        return {"needle": f"{number}号岛上有星尘碎片。", "retrieval_question": asked, "arg1": f"{number}号岛",
                "arg2": f"碎片{number}", "language": language}  # fmt: skip
    asked = f"What lies on Isle {number}? Please answer in the format 'On Isle {number} lies ____.'"
    return {"needle": f"On Isle {number} lies the Shard{number}.", "retrieval_question": asked,
            "arg1": f"Isle {number}", "arg2": f"Shard{number}", "language": language}  # fmt: skip


def record(number, count):
    facts = [f"Fact {number}.{step}." for step in range(count)]
    return {"derivations": facts, "derivation_count": count, "question": f"Who is {number}?", "answer": "James Hill"}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data"
    made.mkdir()
    for name, texts in (("PaulGrahamEssays", LINES), ("zh_finance", ["第一行。", "第二行。"] * 30)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    both = [needle(number, language) for language in LANGUAGES for number in range(12)]
    (made / "needles.jsonl").write_text("".join(json.dumps(one) + "\n" for one in both))
    records = [record(number, count) for count in (2, 3, 4, 5) for number in range(2)]
    for name in ("en", "zh"):
        (made / f"multi_needle_reasoning_{name}.json").write_text(json.dumps(records))
    return made


def made(tokenizer, folder, task, language="English", lengths=(700,), depths=(0, 50, 100), repeats=2):
    files = needlebench.read_files(folder, language, list(needlebench.TASKS))
    tokens = Tokens.of_model(tokenizer)
    return needlebench.make_requests(tokenizer, tokens, files, language, task, lengths, depths, repeats, 100)


def test_lines_are_shuffled_again_and_again(tokenizer, folder):
    files = needlebench.read_files(folder, "English", ["single"])
    lines = list(LINES)
    for repeat in range(3):
        random.seed(repeat)
        random.shuffle(lines)
        assert files.order(repeat) == lines
    assert files.order(1) != lines and sorted(files.order(1)) == sorted(lines)


@pytest.mark.parametrize("language", LANGUAGES)
def test_one_needle_to_the_byte(tokenizer, folder, language):
    requests = made(tokenizer, folder, "single", language)
    files = needlebench.read_files(folder, language, ["single"])
    for request in requests:
        depth, repeat = request.record["depth"], request.record["repeat"]
        chosen = random.Random(repeat).choice([needle(number, language) for number in range(12)])
        said = f"\n{chosen['needle']}\n".encode()
        hay = "".join(files.order(repeat)).encode()[: 600 - len(said)]  # a byte is a token
        place = int(len(hay) * (depth / 100))
        context = (hay[:place] + said + hay[place:]).decode("utf-8", "ignore")
        if language == "English":
            number = chosen["arg1"].split()[1]
            asked = f"\n\nNow, the question is: What lies on Isle {number}? {THINK} Please answer in the format "
            assert request.text == f"{OPENS}{context}{asked}'On Isle {number} lies ____.'"
        else:
            number = chosen["arg1"].removesuffix("号岛")
            assert request.text.endswith(
                f"\n\n现在请问：{number}号岛上有什么？在回答之前，请思考文档中与此问题最相关的内容是什么。"
                f"请按照'{number}号岛上有____。'的格式回答。"
            )
            assert request.text.startswith(
                "你是一个善于回答用户问题的智能AI助手\n请保持你的回答简洁清楚。不要说和下面文档中的无关的话，"
                "或重复你的回答\n用户现在给你的文档是"
            )
        assert request.record["reference"] == [chosen["needle"], chosen["arg2"]]
        assert request.text[request.question_at :].startswith(("Now, the question", "现在请问"))
    assert len({request.key for request in requests}) == 6


def test_several_needles_to_the_byte(tokenizer, folder):
    first, second = made(tokenizer, folder, "multi_retrieval")
    keywords = first.record["reference"]
    assert len(keywords) == 3 and sorted(second.record["reference"]) == sorted(keywords)
    numbers = [keyword.removeprefix("Shard") for keyword in keywords]
    asked = "、".join(f"What lies on Isle {number}?" for number in numbers)
    forms = "、".join(f"On Isle {number} lies ____" for number in numbers)
    after = f"\n\nNow, the questions are: {asked}{THINK} Please answer in the format of '{forms}'\n"
    assert first.text.startswith(OPENS) and first.text.endswith(after)
    context = first.text.removeprefix(OPENS).removesuffix(after)
    said = [f"\nOn Isle {number} lies the Shard{number}.\n" for number in numbers]
    room = 600 - sum(map(len, said))
    assert context.startswith(said[0]) and context.endswith(said[2])
    assert context.index(said[1]) == len(said[0]) + room // 2
    with pytest.raises(ValueError, match="needs 13 needles of distinct arg1 and arg2, one a depth: 12"):
        made(tokenizer, folder, "multi_retrieval", depths=range(13))
    (chinese, _) = made(tokenizer, folder, "multi_retrieval", "Chinese")
    assert "或重复你的回答\n请先仔细阅读下面的文档再依次回答最后提出的问题\n用户现在给你的文档是" in chinese.text
    assert (
        chinese.text.endswith("'的格式回答。\n") and "请思考文档中与此问题最相关的内容是什么。请按照'" in chinese.text
    )


def test_a_chain_drifts():
    """Needles of 2 tokens in 100: at 10; 10+2+10, moved by 2; 22+2+10, moved by 2 twice."""
    hay = list(range(100))
    found = needlebench.hide_chain(hay, [[-1, -2]] * 3, 10)
    assert [place for place, one in enumerate(found) if one == -1] == [10, 24, 38]
    assert [one for one in found if one >= 0] == hay
    # At the end, points stop at the haystack and the needles before them, and drifting past it changes nothing.
    assert needlebench.hide_chain(hay, [[-1], [-2], [-3]], 100)[100:] == [-1, -2, -3]


def test_reasoning_to_the_byte(tokenizer, folder):
    (request,) = made(tokenizer, folder, "multi_reasoning_3", depths=[0], repeats=1)
    number = random.Random(0).choice(["0", "1"])
    assert request.text.startswith(f"{OPENS}\nFact {number}.0.\n")
    assert request.text.endswith(f"\n\nNow, the question is: Who is {number}?{THINK}")
    assert request.record["reference"] == "James Hill" and request.max_new_tokens == 2000
    chat = ByT5Tokenizer(extra_ids=0, chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}:")
    (request,) = made(chat, folder, "multi_reasoning_3", depths=[0], repeats=1)
    assert request.text.startswith(f"<{OPENS}") and request.text.endswith(f"{THINK}>:") and not request.special_tokens


def test_the_sizes():
    for lengths, depths, buffers in needlebench.SIZES.values():
        assert set(buffers) == set(needlebench.TASKS) and depths[0] == 0 and depths[-1] == 100
        assert len(lengths) * len(depths) in (88, 80)
    prompts = 88 * 10 + 8 * 25 + 4 * 88 * 10
    assert 2 * prompts == 9200
    for values in needlebench.PUBLISHED.values():
        parts = zip(needlebench.WEIGHTS.values(), values, strict=False)
        assert sum(weight * one for weight, one in parts) == pytest.approx(values[3], abs=0.011)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("needles.jsonl", {"arg2": 3}, r"needles\.jsonl:1: field 'arg2' must be a text"),
        ("needles.jsonl", {"language": "French"}, r"needles\.jsonl:1: field 'language' must be English or Chinese"),
        (
            "needles.jsonl",
            {"retrieval_question": "x"},
            r"needles\.jsonl:1: field 'retrieval_question' must say 'Please",
        ),
        ("multi_needle_reasoning_en.json", "{}", "expected a list of objects with the fields derivations"),
        ("multi_needle_reasoning_en.json", "[{}]", r"record 0: field 'derivations' \(a list of texts\) is missing"),
        ("multi_needle_reasoning_en.json", "[", "broken JSON"),
        ("multi_needle_reasoning_en.json", json.dumps([record(0, 2)]), "no record whose 'derivation_count' is 3"),
        ("PaulGrahamEssays.jsonl", "", "PaulGrahamEssays.jsonl has no samples"),
    ],
)
def test_wrong_files_are_named(folder, file, change, message):
    (folder / file).write_text(change if isinstance(change, str) else json.dumps(needle(0) | change))
    with pytest.raises(ValueError, match=message):
        needlebench.read_files(folder, "English", list(needlebench.TASKS))
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"{file} cannot be read \(No such file or directory\)"):
        needlebench.read_files(folder, "English", list(needlebench.TASKS))


def test_the_command(ckpt, folder, tmp_path, capsys, monkeypatch):
    out, method = tmp_path / "out", "h2o:budget=64,query_aware=false"
    arguments = ["--ckpt", str(ckpt), "--data", str(folder), "--lengths", "500", "--depths", "0,100", "--buffer", "100"]
    arguments += ["--repeats", "1", "--max-new-tokens", "3", "--out", str(out), "--limit", "1", "--batch-size", "2"]
    assert needlebench.main([*arguments, "--eviction", method]) == 0
    essays = folder / "PaulGrahamEssays.jsonl"
    lines = essays.read_text()
    essays.write_text(lines.replace("an essay", "one more"))
    assert needlebench.main(arguments) == 2
    captured = capsys.readouterr()
    assert "the prediction 500-0-0 of single-English was made for other data (prompt differs)" in captured.err
    essays.write_text(lines)
    said = captured.out
    assert "NeedleBench v1, English; lengths in tokens of the model's tokenizer." in said
    assert "| overall (0.4, 0.3, 0.3)" in said and "Llama3.1-8B, CAKE" in said

    # One of the keywords of each: single 100, retrieval 1 of 2, reasoning 1 of 2 words in each of the four.
    for path in out.glob("*.jsonl"):
        row = json.loads(path.read_text())
        wanted = row["reference"]
        answer = "the james" if isinstance(wanted, str) else wanted[1]
        path.write_text(json.dumps(row | {"pred": answer}) + "\n")
    monkeypatch.setattr(runner, "_generate", None)
    assert needlebench.main(["--score-only", "--tasks", "single", "--out", str(out)]) == 0  # no data, no model
    assert json.loads((out / "scores.json").read_text())["scores"] == {"single-English": 100.0}
    capsys.readouterr()
    assert needlebench.main(["--ckpt", str(ckpt)]) == 2
    assert "--data is missing: give the folder of opencompass/NeedleBench's files" in capsys.readouterr().err
    assert needlebench.main(arguments) == 0
    written = json.loads((out / "scores.json").read_text())
    assert written["scores"]["single-English"] == 100 and written["scores"]["multi_reasoning_4-English"] == 50
    assert written["averages"]["overall (0.4, 0.3, 0.3)"] == pytest.approx(0.4 * 100 + 0.3 * 50 + 0.3 * 50)
    assert needlebench.main([*arguments, "--buffer", "90"]) == 2
    capsys.readouterr()
    for more, message in [
        (["--depths", "101"], "--depths are per cent, got 101"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--lengths", "0"], "--lengths must be at least 1"),
        (["--data", str(tmp_path / "none")], "PaulGrahamEssays.jsonl cannot be read"),
    ]:
        assert needlebench.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


def test_needles_of_our_own_are_asked_for(ckpt, tmp_path, capsys):
    data, out = tmp_path / "needles", tmp_path / "out"
    assert script("eval/made_needles.py").main(["--out", str(data)]) == 0
    arguments = ["--ckpt", str(ckpt), "--data", str(data), "--lengths", "500", "--depths", "0,50,100", "--buffer", "50"]
    assert (
        needlebench.main([*arguments, "--repeats", "1", "--limit", "1", "--max-new-tokens", "2", "--out", str(out)])
        == 0
    )
    capsys.readouterr()
    wanted = {path.stem: json.loads(path.read_text())["reference"] for path in out.glob("*.jsonl")}
    needle, thing = wanted["single-English"]
    assert needle.endswith(f"lies the {thing}.") and len(set(wanted["multi_retrieval-English"])) == 3
    assert {wanted[f"multi_reasoning_{count}-English"] for count in (2, 3, 4, 5)} <= {
        "Carl",
        "Dora",
        "Emil",
        "Fay",
        "Ann",
    }
