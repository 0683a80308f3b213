"""L-Eval: prompts to the byte, truncation by words, sets that are asked twice, files that are wrong, the command."""

import json

import pytest
from transformers import ByT5Tokenizer

from pod.evaluation import leval, runner
from pod.evaluation.texts import text_hash

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}<assistant>"
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
)
EXAM = {
    "input": "Ann has {the} key.",
    "instructions": ["Who?\nA. Ann\nB. Bob"],
    "outputs": ["A"],
    "source": "x",
    "evaluation": "exam",
}
WORLD = "True or False? Answer based on the world described in the document."
VERY = "Now you are given a very long document. Please follow the instruction "


def write(folder, task, *lines, kind="Closed-ended-tasks"):
    (folder / kind).mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / kind / f"{task}.jsonl").write_text(text)
    return str(folder)


def texts(tokenizer, task, sample, **options):
    return [request.text for request in leval.make_requests(tokenizer, task, [sample], **options)]


def test_the_sets():
    assert [len(names) for names in leval.GROUPS.values()] == [7, 6, 7] and len(leval.SYSTEM) == 20
    for values in leval.PUBLISHED.values():
        assert round(sum(values[:3]) / 3, 2) == pytest.approx(values[3], abs=0.011)


def test_a_choice_to_the_byte(tokenizer):
    system = VERY + (
        "based on this document. For multi-choice questions, there is only a sinlge correct option. Please only "
        "provide the letter corresponding to the answer (like A or B) when answering. For other questions, please "
        "directly give the concise and accurate answer. "
    )
    user = (
        "Document is as follows. Ann has {the} key. \nQuestion: Who?\nA. Ann\nB. Bob.  Please directly give the answer "
        "without any additional output or explanation "
    )
    for task in ("quality", "tpo"):
        (request,) = leval.make_requests(tokenizer, task, [EXAM])
        assert request.text == f"{system}{user}\nAnswer:" and request.special_tokens
        record = {"reference": "A", "prompt": text_hash(system + user)}  # without a chat template
        assert request.max_new_tokens == 512 and request.record == record
        assert request.text[request.question_at :].startswith("Question: Who?")
        chat = ByT5Tokenizer(extra_ids=0, chat_template=CHAT)
        (request,) = leval.make_requests(chat, task, [EXAM])
        assert request.record == record
        assert (
            request.text == f"<system>{system}</s><user>{user}</s><assistant>\nAnswer:" and not request.special_tokens
        )
    # A template that refuses a system message, and one that is silent about it.
    for template in (NO_SYSTEM, CHAT.replace("messages", "messages[-1:]")):
        (text,) = texts(ByT5Tokenizer(extra_ids=0, chat_template=template), "tpo", EXAM)
        assert text.startswith(f"<user>{system}{user}")


def test_the_other_system_messages():
    assert leval.SYSTEM["coursera"] == VERY + (
        "based on this document. For multi-choice questions, there could be a sinlge correct option or multiple "
        "correct options. Please only provide the letter corresponding to the answer (like A or AB) when answering. "
    )
    assert leval.SYSTEM["gsm100"] == (
        "Given several question answer pairs, you need to follow a similar format to answer the last question. Make "
        "sure the response is end with The answer is _ . "
    )
    assert leval.SYSTEM["codeU"].endswith("Please carefully read these codes and comments and answer the question.")
    assert 'answer should be "True" or "False". Notice that' in leval.SYSTEM["sci_fi"]
    assert leval.SYSTEM["topic_retrieval_longchat"].endswith("first/second/third topic names. Now the record start. ")
    assert (
        leval.SYSTEM["narrative_qa"]
        == leval.SYSTEM["tv_show_summ"]
        == VERY
        + (
            "after this document. These instructions may include summarizing a document, answering questions based on "
            "the document, or writing a required paragraph. "
        )
    )


@pytest.mark.parametrize("task", sorted(leval.BARE))
def test_an_instruction_alone(tokenizer, task):
    (text,) = texts(tokenizer, task, EXAM)
    assert text == f"{leval.SYSTEM[task]}Ann has {{the}} key.\n\nWho?\nA. Ann\nB. Bob"


@pytest.mark.parametrize("task", ["narrative_qa", "news_summ"])
def test_an_open_question_names_the_answers_words(tokenizer, task):
    sample = EXAM | {"instructions": ["Why?"], "outputs": [" for  the key "]}
    said = "Document is as follows. Ann has {the} key. Instruction: Why? \nAnswer this question with 3 words."
    assert texts(tokenizer, task, sample) == [f"{leval.SYSTEM[task]}{said}\nAnswer:"]
    chat = ByT5Tokenizer(extra_ids=0, chat_template=CHAT)
    assert texts(chat, task, sample)[0].endswith(f"<user>{said}</s><assistant>")


def test_science_fiction_is_asked_again_without_the_document(tokenizer):
    sample = EXAM | {"instructions": [WORLD, "x"], "outputs": ["True [fact: False]", "False [fact: False]"]}
    first, fact, *_ = texts(tokenizer, "sci_fi", sample)
    assert first.endswith(f"Question: {WORLD}.  Please directly give the answer without any additional output or "
                          "explanation \nAnswer:")  # fmt: skip
    assert fact == (
        "True or False? Answer based on the real-world knowledge and facts up until your last trainingPlease directly "
        "answer without any additional output or explanation. \nAnswer:"
    )
    requests = leval.make_requests(tokenizer, "sci_fi", [sample])
    assert [request.key for request in requests] == ["0", "0 fact", "1", "1 fact"]
    assert len(leval.make_requests(tokenizer, "sci_fi", [sample], limit=1)) == 2


def test_documents_are_cut_by_words_until_they_fit(tokenizer):
    """Bytes are tokens: 600 words of two bytes and a blank are 1,799; 600, 350, 100 words are tried."""
    document = " ".join(f"{number % 90 + 10}" for number in range(900))
    words = document.split(" ")
    assert leval.truncate(tokenizer, "tpo", document, 2699) == document
    assert leval.truncate(tokenizer, "tpo", document, 600) == " ".join(words[:100])
    assert leval.truncate(tokenizer, "codeU", document, 600) == " ".join(words[-100:])
    assert leval.truncate(tokenizer, "tpo", "x" * 700, 600) == ""  # one word without end
    assert leval.truncate(tokenizer, "codeU", "x" * 700, 600) == ""
    # 240 pieces are all there are, then 250 fewer are ten fewer than none: ten go from the other end.
    long, short = " ".join(["x" * 50] * 10), " ".join(["y"] * 30)
    assert leval.truncate(tokenizer, "tpo", f"{short} {long}", 240) == short
    assert leval.truncate(tokenizer, "codeU", f"{long} {short}", 240) == short
    (text,) = texts(tokenizer, "gsm100", EXAM | {"input": document}, most=600)
    assert text == leval.SYSTEM["gsm100"] + " ".join(words[:100]) + "\n\nWho?\nA. Ann\nB. Bob"
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        leval.truncate(tokenizer, "tpo", document, 0)


def test_only_what_is_scored_by_rule_is_asked(tmp_path):
    judged = [EXAM | {"evaluation": one} for one in ("LLM", "f1", "human", "rouge")]
    data = write(tmp_path, "narrative_qa", *judged, kind="Open-ended-tasks")
    assert [line["evaluation"] for line in leval.load_samples(data, "narrative_qa")] == ["f1", "rouge"]
    write(tmp_path, "news_summ", judged[0], kind="Open-ended-tasks")
    with pytest.raises(ValueError, match=r"no line of news_summ.jsonl is scored by rule"):
        leval.load_samples(data, "news_summ")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "tpo.jsonl").write_text(json.dumps(EXAM))
    assert leval.load_samples(str(tmp_path / "flat"), "tpo") == [EXAM]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "broken JSON"),
        ({"input": None}, "field 'input' must be a text, got 'None'"),
        ({"outputs": ["a", 3]}, "field 'outputs' must be a list of texts"),
        ({"outputs": ["a", "b"]}, "field 'instructions' has 1 texts but field 'outputs' 2"),
        ({"outputs": [" "]}, "field 'outputs' has an empty text"),
        ({"outputs": ["True"]}, r"field 'outputs' of sci_fi must read 'True \[fact: False\]', got 'True'"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, change, message):
    good = EXAM | {"outputs": ["True [fact: False]"]}
    data = write(tmp_path, "sci_fi", good, change if isinstance(change, str) else good | change)
    with pytest.raises(ValueError, match=rf"sci_fi\.jsonl:2: {message}"):
        leval.load_samples(data, "sci_fi")


def test_the_command(ckpt, tmp_path, capsys, monkeypatch):
    """Made-up predictions in the run's own folder are scored, as a run that goes on does."""
    data = write(tmp_path / "data", "tpo", EXAM, EXAM | {"outputs": ["B"]})
    write(tmp_path / "data", "sci_fi", EXAM | {"instructions": [WORLD], "outputs": ["True [fact: False]"]})
    write(tmp_path / "data", "news_summ", EXAM | {"evaluation": "rouge"}, kind="Open-ended-tasks")
    monkeypatch.setattr(leval, "MAX_NEW_TOKENS", 4)
    out = tmp_path / "out"
    method = "h2o:budget=64,query_aware=false"
    arguments = ["--ckpt", str(ckpt), "--data", data, "--tasks", "tpo", "sci_fi", "news_summ", "--out", str(out)]
    assert leval.main([*arguments, "--eviction", method]) == 0
    write(tmp_path / "data", "tpo", EXAM | {"input": "Ann has no key."}, EXAM | {"outputs": ["B"]})
    assert leval.main(arguments) == 2
    captured = capsys.readouterr()
    assert "the prediction 0 of tpo was made for other data (prompt differs)" in captured.err
    write(tmp_path / "data", "tpo", EXAM, EXAM | {"outputs": ["B"]})
    said = captured.out
    assert "| news_summ rougeL " in said and "Published (arXiv 2412.02252" in said
    assert (out / "comparison.md").exists()

    def predict(name, *pairs):
        lines = [{"key": key, "pred": said, "reference": wanted} for key, said, wanted in pairs]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    predict("tpo", ("0", "A", "A"), ("1", "A", "B"))
    predict("sci_fi", ("0", "True", "True [fact: False]"), ("0 fact", "true.", "True [fact: False]"))
    predict("news_summ", ("0", "a b", "A"))
    monkeypatch.setattr(runner, "_generate", None)
    assert leval.main(["--score-only", "--tasks", "tpo", "sci_fi", "--out", str(out)]) == 0  # no data, no model
    assert json.loads((out / "scores.json").read_text())["scores"] == {"tpo": 50.0, "sci_fi": 50.0}
    capsys.readouterr()
    assert leval.main(["--score-only", "--tasks", "coursera", "--out", str(out)]) == 2
    assert f"--out {out}: no predictions of coursera" in capsys.readouterr().err
    assert leval.main(arguments) == 0
    written = json.loads((out / "scores.json").read_text())
    assert written["scores"] == {"tpo": 50.0, "sci_fi": 50.0, "news_summ": {"geometric mean": 0.0, "rougeL": 66.6667}}
    assert written["averages"]["QA"] is None  # its sets were not run
    capsys.readouterr()
    for more, message in [
        (["--tasks", "courser"], "--tasks courser: no set of L-Eval and no group; did you mean coursera?"),
        (["--max-length", "0"], "--max-length is in thousands of tokens"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--data", "hub"], "get LEval-data of OpenLMLab/LEval"),
        (["--tasks", "codeU"], "codeU.jsonl cannot be read (No such file or directory)"),
    ]:
        assert leval.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


def test_a_run_that_did_not_end_is_scored_in_the_order_of_its_questions(tmp_path, capsys):
    """Its longest prompts were written first: those with the document, then those without."""
    wanted = "True [fact: False]"
    keys = {"1": "True", "0": "True", "0 fact": "False", "1 fact": "False"}
    lines = [json.dumps({"key": key, "pred": said, "reference": wanted}) + "\n" for key, said in keys.items()]
    part = tmp_path / "sci_fi.part0.jsonl"
    part.write_text("".join(lines))
    arguments = ["--score-only", "--tasks", "sci_fi", "--out", str(tmp_path)]
    assert leval.main(arguments) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == {"sci_fi": 100.0}
    for few in (lines[:2], lines[:3]):  # an even number need not be pairs
        part.write_text("".join(few))
        assert leval.main(arguments) == 2
        assert "each question of sci_fi is asked twice" in capsys.readouterr().err


def test_averages():
    """Closed of seven sets and of six, and the mean of the three columns with either ROUGE."""
    options = ["--data", "x"]
    bench = leval.LEval.__new__(leval.LEval)
    scores = dict.fromkeys(leval.GROUPS["Closed"], 40.0) | {"topic_retrieval_longchat": 75.0}
    scores |= dict.fromkeys(leval.GROUPS["QA"], 20.0)
    scores |= {name: {"geometric mean": 9.0, "rougeL": 12.0} for name in leval.GROUPS["Summ"]}
    assert options and bench.aggregate(scores) == {
        "Closed, 7 sets": 45.0,
        "Closed, 6 sets (no topic)": 40.0,
        "QA": 20.0,
        "Summ, geometric mean": 9.0,
        "Summ, rougeL": 12.0,
        "Avg. of Closed (7), QA, Summ (geometric mean)": 24.67,
        "Avg. of Closed (7), QA, Summ (rougeL)": 25.67,
    }
