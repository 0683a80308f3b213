"""LongBench end to end on a tiny model: prompts, truncation, stop rules, resuming, processes, data errors, scores."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import ROOT, letters_tokenizer, script

import pod
from pod.evaluation import longbench, runner
from pod.evaluation import models as evaluated
from pod.evaluation.runner import Predictions, Request, predict


def sample(task: str, index: int, words: int = 10) -> dict:
    """A line as the benchmark's files have it."""
    context = " ".join(f"word{(index * 7 + number) % 50}" for number in range(words))
    answers = ["Paragraph 3"] if task.startswith("passage_retrieval") else [f"word{index}", "other"]
    return {
        "input": f"Question {index}?",
        "context": context,
        "answers": answers,
        "length": (1000, 5000, 9000)[index % 3],
        "dataset": task,
        "language": "en",
        "all_classes": ["word1", "word2"] if task in ("trec", "lsht", "trec_e") else None,
        "_id": f"{task}-{index}",
    }


def write_data(folder: Path, tasks, count: int = 5, words=lambda index: 3 + 5 * index) -> Path:
    folder.mkdir(exist_ok=True)
    for task in tasks:
        lines = [json.dumps(sample(task, index, words(index)), ensure_ascii=False) for index in range(count)]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def requests(count: int = 7, new: int = 6, **options) -> list[Request]:
    return [
        Request(str(index), "x" * (1 + 9 * index % 40) + str(index), new, record={"answers": [str(index)]}, **options)
        for index in range(count)
    ]


def counted(model, monkeypatch) -> list[int]:
    """The batch sizes that reach `generate`, as they come."""
    sizes: list[int] = []
    generate = type(model).generate

    def counting(self, input_ids, **options):
        sizes.append(len(input_ids))
        return generate(self, input_ids, **options)

    monkeypatch.setattr(type(model), "generate", counting)
    return sizes


# ---------------------------------------------------------------------- prompts and truncation


def test_every_set_has_a_prompt_a_limit_and_a_metric():
    assert set(longbench.PROMPTS) == set(longbench.MAX_NEW_TOKENS) == set(longbench.metrics.METRIC_OF)
    assert [len(longbench.GROUPS[group]) for group in ("all", "pod", "cake", "e")] == [21, 14, 16, 13]
    assert longbench.MAX_NEW_TOKENS["samsum"] == 128 and longbench.MAX_NEW_TOKENS["gov_report"] == 512


def test_prompts_keep_their_oddities():
    """What an editor would put right: a missing blank, blanks at line ends and beginnings, a last newline."""
    assert longbench.PROMPTS["narrativeqa"].count("asconcisely") == 2
    assert "\n\n Answer the question based on the above article" in longbench.PROMPTS["qasper"]
    assert "summary of all news. \n\nNews:" in longbench.PROMPTS["multi_news"]
    assert longbench.PROMPTS["passage_count"].endswith("The final answer is: ")
    assert longbench.PROMPTS["lcc"] == "Please complete the code given below. \n{context}Next line of code:\n"
    assert longbench.PROMPTS["repobench-p"].endswith("{context}{input}Next line of code:\n")


def test_braces_in_a_context_are_text(tokenizer):
    line = sample("lcc", 0) | {"context": "{input} = {}"}
    (request,) = longbench.make_requests(tokenizer, "lcc", [line])
    assert request.text == "Please complete the code given below. \n{input} = {}Next line of code:\n"
    assert request.max_new_tokens == 64 and not request.stop_at_newline


def ids_of(tokenizer, text: str) -> list[int]:
    return runner.encode(tokenizer, Request("0", text, 1))


def test_truncation_where_decoding_and_encoding_changes_the_length():
    tokenizer = letters_tokenizer()
    text = "caa" + "c" * 10 + "bbc"
    ids = tokenizer(text)["input_ids"]
    assert ids == [0, 3, 1, 1, *[3] * 10, 2, 2, 3]
    # The first 3 of 17 tokens are <s> c a, the last 3 are b b c. <s> is skipped and "a" meets "b".
    cut = longbench.truncate(tokenizer, text, 6)
    assert cut == "ca" + "bbc"
    assert ids_of(tokenizer, cut) == [0, 3, 4, 2, 3]  # five tokens, not six
    assert longbench.truncate(tokenizer, text, 7) == cut  # int(7 / 2) is 3 too
    assert longbench.truncate(tokenizer, text, 17) == text
    # 16 of 17: one token of the middle goes.
    assert longbench.truncate(tokenizer, text, 16) == "caa" + "c" * 9 + "bbc"
    with pytest.raises(ValueError, match="at least 2"):
        longbench.truncate(tokenizer, text, 1)


def test_a_tokenizers_end_of_text_does_not_end_a_prompt(tokenizer):
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id
    assert ids_of(tokenizer, "ab") == [100, 101]


def test_the_chat_template_comes_after_truncation_and_not_for_continuations(tokenizer):
    chat = type(tokenizer)(extra_ids=0)
    chat.chat_template = "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}<assistant>"
    (request,) = longbench.make_requests(chat, "hotpotqa", [sample("hotpotqa", 0, 500)], max_length=20)
    assert request.text == "<user>" + "Answer the" + "0?\nAnswer:" + "</user><assistant>"
    assert not request.special_tokens
    for task in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p", "lcc_e"):
        (request,) = longbench.make_requests(chat, task, [sample(task, 0)])
        assert "<user>" not in request.text and request.special_tokens, task
        assert request.stop_at_newline == (task == "samsum")


@pytest.mark.parametrize("template", ["{{ raise_exception('only documents') }}", "{% if %}", "{{ 1 + 'x' }}"])
def test_a_chat_template_that_fails_is_refused(tokenizer, template):
    chat = type(tokenizer)(extra_ids=0)
    chat.chat_template = template
    for system in ("", "Be short."):
        with pytest.raises(ValueError, match="the tokenizer's chat template fails on a user's turn: "):
            runner.as_chat(chat, "hello", system)


# ---------------------------------------------------------------------- generation


def test_batch_sizes_and_the_plain_loop_give_the_same_predictions(model, tokenizer, tmp_path):
    """The truth: `generate` on each prompt alone, without any padding."""
    expected = {}
    for request in requests():
        ids = torch.tensor([ids_of(tokenizer, request.text)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected[request.key] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(set(expected.values())) > 1
    for size in (1, 2, 3, 7, 50):
        rows = predict(model, tokenizer, requests(), Predictions(tmp_path, f"of{size}"), batch_size=size)
        assert {row["key"]: row["pred"] for row in rows} == expected, size
        assert [row["key"] for row in rows] == [str(index) for index in range(7)]
        assert rows[3]["answers"] == ["3"]


def test_a_cache_factory_makes_the_cache_of_every_batch(model, tokenizer, tmp_path):
    caches = []

    def factory(of):
        caches.append(pod.PodCache(of.config))
        return caches[-1]

    plain = predict(model, tokenizer, requests(), Predictions(tmp_path, "plain"), batch_size=3)
    given = predict(model, tokenizer, requests(), Predictions(tmp_path, "given"), batch_size=3, cache_factory=factory)
    assert given == plain
    assert len(caches) == 3 and all(cache.get_seq_length() > 0 for cache in caches)


@pytest.mark.parametrize(("first", "prediction"), [("newline", "a\n"), ("eos", "a")])
def test_samsum_stops_at_a_newline_that_is_not_the_first_token(
    model, tokenizer, tmp_path, monkeypatch, first, prediction
):
    newline, letter = tokenizer.encode("\na", add_special_tokens=False)
    logits = torch.zeros(259)
    logits[{"newline": newline, "eos": 1}[first]] = 9.0
    logits[letter] = 5.0
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: logits.expand(*hidden.shape[:-1], -1))
    rows = predict(model, tokenizer, requests(2, stop_at_newline=True), Predictions(tmp_path, "samsum"), batch_size=2)
    assert [row["pred"] for row in rows] == [prediction] * 2
    rows = predict(model, tokenizer, requests(2), Predictions(tmp_path, "other"))
    assert [row["pred"] for row in rows] == ["\n" * 6 if first == "newline" else ""] * 2


def test_a_tokenizer_may_make_nothing_of_a_newline(model, tmp_path):
    tokenizer = letters_tokenizer()
    assert tokenizer.encode("\n", add_special_tokens=False) == []
    asked = [Request("0", "abc", 3, stop_at_newline=True)]
    (row,) = predict(model, tokenizer, asked, Predictions(tmp_path, "samsum"))
    (plain,) = predict(model, tokenizer, [Request("0", "abc", 3)], Predictions(tmp_path, "other"))
    assert row == plain


def test_requests_with_different_limits_are_not_mixed_in_a_batch(model, tokenizer, tmp_path, monkeypatch):
    sizes = counted(model, monkeypatch)
    mixed = [Request(str(index), "abc", 1 + index % 2) for index in range(4)]
    rows = predict(model, tokenizer, mixed, Predictions(tmp_path, "mixed"), batch_size=4)
    assert sizes == [2, 2]
    assert all(len(row["pred"].encode()) <= 1 + int(row["key"]) % 2 for row in rows)


# ---------------------------------------------------------------------- resuming and processes


def test_a_whole_files_last_line_needs_no_newline(tmp_path):
    """Part of it that is missing is damage there, and no line that a kill cut short."""
    lines = [json.dumps({"key": str(index), "pred": "x"}) for index in range(3)]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    assert list(Predictions(tmp_path, "set").read()) == ["0", "1", "2"]
    (tmp_path / "set.jsonl").write_text("\n".join(lines)[:-3])
    with pytest.raises(ValueError, match=r"set\.jsonl:3: no prediction .*Remove the line to have it made again"):
        Predictions(tmp_path, "set").read()


def test_resuming_neither_repeats_nor_loses(model, tokenizer, tmp_path, monkeypatch):
    whole = predict(model, tokenizer, requests(), Predictions(tmp_path / "whole", "set"))
    lines = [json.dumps(row) + "\n" for row in whole]
    cut = tmp_path / "cut"
    cut.mkdir()
    # Killed with three processes: two lines of the first, the second of them cut short; two of the third.
    (cut / "set.part0.jsonl").write_text(lines[6] + lines[2][:20])
    (cut / "set.part2.jsonl").write_text(lines[4] + lines[1])
    sizes = counted(model, monkeypatch)
    assert predict(model, tokenizer, requests(), Predictions(cut, "set"), batch_size=2) == whole
    assert sum(sizes) == 4
    assert [path.name for path in cut.iterdir()] == ["set.jsonl"]
    assert (cut / "set.jsonl").read_text() == "".join(lines)
    predict(model, tokenizer, requests(), Predictions(cut, "set"))
    assert sum(sizes) == 4  # nothing is left to do
    more = predict(model, tokenizer, requests(9), Predictions(cut, "set"))
    assert sum(sizes) == 6 and more[:7] == whole and [row["key"] for row in more] == [str(i) for i in range(9)]
    assert predict(model, tokenizer, requests(3), Predictions(cut, "set")) == whole[:3]
    assert len((cut / "set.jsonl").read_text().splitlines()) == 9


def test_a_kill_in_the_middle_of_a_line_at_every_byte(tmp_path):
    first, second = b'{"key": "0", "pred": "a\\n"}\n', '{"key": "1", "pred": "é"}\n'.encode()
    for length in range(len(second)):
        predictions = Predictions(tmp_path, "set", rank=0)
        predictions.part.write_bytes(first + second[:length])
        assert list(predictions.read()) == ["0"]
        predictions.append([{"key": "1", "pred": "é"}])
        assert predictions.part.read_bytes() == first + second


@pytest.mark.parametrize("world", [2, 3, 9])
def test_processes_share_the_work(model, tokenizer, tmp_path, monkeypatch, world):
    alone = predict(model, tokenizer, requests(), Predictions(tmp_path / "alone", "set"))
    sizes = counted(model, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        before = sum(sizes)
        done = predict(model, tokenizer, requests(), Predictions(tmp_path, "set"))
        assert sum(sizes) - before == len(range(rank, 7, world))
        assert (done is None) == (sum(sizes) < 7)
    assert done == alone and sum(sizes) == 7
    monkeypatch.setenv("RANK", str(world))
    with pytest.raises(ValueError, match="below the number of processes"):
        runner.process()


def test_predictions_of_other_data_or_settings_are_not_continued(model, tokenizer, tmp_path):
    predict(model, tokenizer, requests(2), Predictions(tmp_path, "set"))
    other = [Request(request.key, request.text, 6, record={"answers": ["else"]}) for request in requests(2)]
    with pytest.raises(ValueError, match="answers differs"):
        predict(model, tokenizer, other, Predictions(tmp_path, "set"))
    runner.settle(tmp_path, {"ckpt": "a"})
    runner.settle(tmp_path, {"ckpt": "a"})
    with pytest.raises(ValueError, match="with ckpt 'a', now it is 'b'"):
        runner.settle(tmp_path, {"ckpt": "b"})
    with pytest.raises(ValueError, match="with limit None, now it is 3"):
        runner.check_settings(tmp_path, {"ckpt": "a", "limit": 3})
    runner.settle(tmp_path / "more", {"ckpt": "a", "limit": 3})
    runner.check_settings(tmp_path / "more", {"ckpt": "a"}, partly=True)
    with pytest.raises(ValueError, match="with limit 3, now it is None"):
        runner.check_settings(tmp_path / "more", {"ckpt": "a"})


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"apart": True}])
def test_settings_are_noted_when_nothing_can_be_refused_any_more(model, tokenizer, tmp_path, wrong):
    predictions, settings = Predictions(tmp_path / "out", "set"), {"ckpt": "a"}
    with pytest.raises(ValueError):
        predict(model, tokenizer, requests(2), predictions, settings=settings, **wrong)
    assert not (tmp_path / "out").exists()
    predict(model, tokenizer, requests(2), predictions, settings=settings)
    assert json.loads((tmp_path / "out" / "settings.json").read_text()) == settings


def test_what_the_runner_refuses(model, tokenizer, tmp_path):
    predictions = Predictions(tmp_path, "set")
    for bad, message in [(requests(2) + requests(1), "same key"), ([Request("0", "", 1)], "prompt is empty")]:
        with pytest.raises(ValueError, match=message):
            predict(model, tokenizer, bad, predictions)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        predict(model, tokenizer, requests(1), predictions, batch_size=0)
    predictions.path.write_text('{"key": "0", "pred": "x"}\n{"key": "1"}\n')
    with pytest.raises(ValueError, match=r"set.jsonl:2: no prediction"):
        predictions.read()


# ---------------------------------------------------------------------- data


@pytest.mark.parametrize("layout", ["plain", "data", "data.zip", "zip file"])
def test_layouts_of_the_data(tmp_path, layout):
    source = write_data(tmp_path / "source", ["qasper"], 3)
    expected = [sample("qasper", index, 3 + 5 * index) for index in range(3)]
    expected[0]["context"] = "one\u2028line\u0085still"
    lines = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in expected) + "\n\n"
    (source / "qasper.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    place = source
    if layout == "data":
        place = tmp_path / "above"
        place.mkdir()
        source.rename(place / "data")
    elif layout != "plain":
        place = tmp_path if layout == "data.zip" else tmp_path / "data.zip"
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            archive.write(source / "qasper.jsonl", "data/qasper.jsonl")
    assert longbench.load_samples(str(place), "qasper") == expected


def broken(**changes) -> str:
    line = sample("trec", 1) | changes
    return json.dumps({name: value for name, value in line.items() if value != "drop"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "broken JSON"),
        ("[1]", "expected a JSON object"),
        (broken(answers="drop"), r"field 'answers' \(a list of texts\) is missing"),
        (broken(answers="word1"), "field 'answers' must be a list of texts, got 'word1'"),
        (broken(answers=[1]), "field 'answers' must be a list of texts"),
        (broken(context=None), "field 'context' must be a text, got 'None'"),
        (broken(length="7"), "field 'length' must be a whole number"),
        (broken(length=True), "field 'length' must be a whole number"),
        (broken(_id="drop"), "field '_id'"),
        (broken(all_classes=None), "field 'all_classes' must name the classes of trec"),
        ('{"input": "\xff"}'.encode("latin-1"), "wrong encoding"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, line, message):
    good = json.dumps(sample("trec", 0)).encode()
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "trec.jsonl").write_bytes(good + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"trec\.jsonl:3: .*{message}"):
        longbench.load_samples(str(tmp_path), "trec")


def test_missing_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="neither trec.jsonl, data/trec.jsonl nor data.zip"):
        longbench.load_samples(str(tmp_path), "trec")
    (tmp_path / "trec.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no samples"):
        longbench.load_samples(str(tmp_path), "trec")
    (tmp_path / "data.zip").write_bytes(b"PK no")
    with pytest.raises(ValueError, match="no zip file"):
        longbench.load_samples(str(tmp_path), "qasper")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", "")
    with pytest.raises(ValueError, match="no qasper.jsonl in the archive"):
        longbench.load_samples(str(tmp_path), "qasper")
    with pytest.raises(ValueError, match="give --data DIR"):  # the tests have no network
        longbench.load_samples("hub", "qasper")


def test_tasks_and_groups_are_resolved():
    assert longbench.resolve_tasks(["lcc", "pod", "lcc"]) == [
        "lcc",
        *(t for t in longbench.GROUPS["pod"] if t != "lcc"),
    ]
    assert longbench.resolve_tasks(["qasper_e"]) == ["qasper_e"]
    with pytest.raises(ValueError, match="did you mean hotpotqa"):
        longbench.resolve_tasks(["hotpot_qa"])
    with pytest.raises(ValueError, match="no group"):
        longbench.resolve_tasks(["narrativeqa_e_e", "zzz"])


# ---------------------------------------------------------------------- scores


def test_averages_are_those_of_the_papers():
    """PoD's Table 1, dense: the five category means and their mean."""
    means = dict(zip(longbench.CATEGORIES, [32.94, 32.23, 25.41, 69.30, 66.54], strict=True))
    scores = {name: means[category] for category, names in longbench.CATEGORIES.items() for name in names}
    found = longbench.averages(scores)
    assert found["PoD average"] == 45.28 and found["few-shot"] == 69.3 and found["CAKE average"] is None
    found = longbench.averages(scores | {"passage_count": 0.0, "passage_retrieval_en": 90.0})
    assert found["CAKE average"] == round((3 * (32.94 + 32.23 + 25.41 + 69.30) + 2 * 66.54 + 90) / 16, 2)
    del scores["lcc"]
    assert longbench.averages(scores)["PoD average"] is None
    assert longbench.averages(scores)["summarization"] == 25.41


def arguments(ckpt, data, out, *more) -> list[str]:
    return ["--ckpt", str(ckpt), "--data", str(data), "--out", str(out), "--max-length", "60", *more]


def test_the_script_end_to_end(ckpt, tmp_path, capsys):
    command = script("eval/longbench.py")
    tasks = ["hotpotqa", "trec", "samsum", "lcc", "qasper_e"]
    data = write_data(tmp_path / "data", tasks, 3)
    out = tmp_path / "out"
    assert command.main(arguments(ckpt, data, out, "--tasks", *tasks, "--limit", "2", "--batch-size", "2")) == 0
    result = json.loads((out / "scores.json").read_text())
    assert result["samples"] == dict.fromkeys(tasks, 2)
    assert set(result["scores"]["qasper_e"]) == {"0-4k", "4-8k", "8k+"}
    other = write_data(tmp_path / "other", tasks, 3, words=lambda index: 4)  # other contexts, the same answers
    assert command.main(arguments(ckpt, other, out, "--tasks", "hotpotqa", "--limit", "2")) == 2
    captured = capsys.readouterr()
    assert "the prediction 0 of hotpotqa was made for other data (prompt differs)" in captured.err
    printed = " ".join(captured.out.split())
    assert "| hotpotqa | 2 |" in printed and "| set | samples | 0-4k | 4-8k | 8k+ |" in printed
    # Scores come from the files: what the model "said" decides.
    rows = [json.loads(line) for line in (out / "hotpotqa.jsonl").read_text().splitlines()]
    assert [row["_id"] for row in rows] == ["hotpotqa-0", "hotpotqa-1"]
    rows[0]["pred"] = "word0"
    (out / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["--out", str(out), "--score-only", "--tasks", "hotpotqa"]) == 0
    assert json.loads((out / "scores.json").read_text())["scores"] == {"hotpotqa": 50.0}
    assert command.main(["--out", str(out), "--score-only"]) == 0  # all that is there
    assert list(json.loads((out / "scores.json").read_text())["scores"]) == [
        "hotpotqa",
        "trec",
        "samsum",
        "lcc",
        "qasper_e",
    ]
    # Files of the authors' own scripts have no key.
    for row in rows:
        del row["key"], row["_id"]
    (out / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["--out", str(out), "--score-only", "--tasks", "hotpotqa"]) == 0
    assert json.loads((out / "scores.json").read_text())["scores"] == {"hotpotqa": 50.0}


def test_the_script_says_what_is_wrong(ckpt, tmp_path, capsys, monkeypatch):
    command = script("eval/longbench.py")
    data = write_data(tmp_path / "data", ["hotpotqa", "dureader"], 1)
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "jieba", None)
    cases = [
        ([], "--ckpt is missing"),
        (["--score-only"], "--score-only needs --out"),
        (["--score-only", "--out", str(out)], "no predictions of narrativeqa"),
        (arguments(ckpt, data, out, "--tasks", "hotpot"), "did you mean hotpotqa"),
        (arguments(ckpt, data, out, "--tasks", "trec"), "neither trec.jsonl"),
        (arguments(tmp_path, data, out, "--tasks", "hotpotqa"), "no model and tokenizer can be loaded"),
        (arguments(ckpt, data, tmp_path / "zh", "--tasks", "dureader"), "pip install 'pod-attention[eval]'"),
        (arguments(ckpt, data, tmp_path / "none", "--tasks", "hotpotqa", "--limit", "0"), "at least 1 sample"),
    ]
    for given, message in cases:
        assert command.main(given) == 2
        assert message in capsys.readouterr().err, given


def run_script(arguments: list[str], **environment: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, "eval/longbench.py", *arguments],
        env=env,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def demo_ckpt(tmp_path_factory):
    """The demo's base model as a PoD model whose layers share in pairs, in float32: batches round alike."""
    model, tokenizer = evaluated.load(str(ROOT / "checkpoints" / "tiny-base"), "cpu", "float32")
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    blocks = pod.LayerBlocks([[layer - layer % 2] * heads for layer in range(layers)])
    folder = tmp_path_factory.mktemp("demo") / "demo"
    pod.convert(model, blocks, sink_size=4, recent_size=20).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ckpt", "demo_ckpt"])
def test_killed_and_resumed_by_two_processes_equals_one_process(name, request, tmp_path):
    """SIGKILL in the middle of a run, then two processes at once in batches: every sample once, and the predictions
    and scores of one whole run of single prompts."""
    ckpt = request.getfixturevalue(name)
    tasks = ["hotpotqa"]
    data = write_data(tmp_path / "data", tasks, 12)
    options = ["--tasks", *tasks]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    reference = run_script(arguments(ckpt, data, whole, *options))
    process = run_script(arguments(ckpt, data, cut, *options))
    part = cut / "hotpotqa.part0.jsonl"
    deadline = time.monotonic() + 600  # only so that it ends
    while not (part.exists() and part.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = part.read_bytes()
    assert 3 <= before.count(b"\n") < 12
    options += ["--batch-size", "3"]
    both = [run_script(arguments(ckpt, data, cut, *options), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
    assert [process.wait() for process in (*both, reference)] == [0, 0, 0]
    for task in tasks:
        assert (cut / f"{task}.jsonl").read_bytes() == (whole / f"{task}.jsonl").read_bytes()
        keys = [json.loads(line)["key"] for line in (cut / f"{task}.jsonl").read_text().splitlines()]
        assert keys == [str(index) for index in range(12)]
    assert (cut / "scores.json").read_text() == (whole / "scores.json").read_text()
    assert not list(cut.glob("*.part*"))


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("hotpotqa", {"answers": "Paris"}, "field 'answers' must be a list of texts, got 'Paris'"),
        ("hotpotqa", {"answers": ["a", 3]}, "field 'answers' must be a list of texts"),
        ("hotpotqa", {"answers": None}, "field 'answers' must be a list of texts"),
        ("trec", {"all_classes": None}, "field 'all_classes' must name the classes of trec"),
        ("trec", {"all_classes": "word1"}, "field 'all_classes' must be a list of texts or null"),
        ("hotpotqa_e", {"length": "long"}, "field 'length' must be a whole number"),
        ("passage_retrieval_en", {"answers": ["3"]}, "field 'answers' of passage_retrieval_en must read 'Paragraph 7'"),
    ],
)
def test_wrong_fields_are_found_when_loading_and_in_predictions(task, change, message, tmp_path, capsys):
    good = sample(task, 0)
    path = tmp_path / f"{task}.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(sample(task, 1) | change) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: {message}")):
        longbench.load_samples(str(tmp_path), task)
    rows = [{name: row[name] for name in ("answers", "all_classes", "length")} for row in (good, good | change)]
    path.write_text("".join(json.dumps({"pred": "3"} | row) + "\n" for row in rows))
    command = script("eval/longbench.py")
    assert command.main(["--out", str(tmp_path), "--score-only", "--tasks", task]) == 2
    assert f"{path}:2: {message}" in capsys.readouterr().err
    path.write_text(json.dumps({"pred": "3"} | rows[0]) + "\n")
    assert command.main(["--out", str(tmp_path), "--score-only", "--tasks", task]) == 0
