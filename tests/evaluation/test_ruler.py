"""RULER: every answer is found again in the text by other means, lengths are as asked for, and a seed decides all."""

import argparse
import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import letters_tokenizer, script
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pod.evaluation import haystack, questions, ruler, ruler_tasks, runner
from pod.evaluation.haystack import Haystack
from pod.evaluation.ruler_tasks import TASKS

MADE_UP = [name for name, task in TASKS.items() if task.needs in (None, "haystack")]
STORY = "The old clock had stopped. Nobody knew why, or when! Was it the damp? They left it as it was. "


@pytest.fixture(scope="module")
def words():
    """One token for each word, number and run of punctuation: about as coarse as a real tokenizer, and fast."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def source_of(task: str):
    return Haystack(STORY * 40) if task in MADE_UP and TASKS[task].needs == "haystack" else None


def make(tokenizer, task, length, samples=1, **options):
    return ruler.make_requests(tokenizer, task, length, samples, **{"source": source_of(task)} | options)


def answers_in(task: str, text: str) -> set[str]:
    """What the text itself says the answer is."""
    if task.startswith("niah"):
        asked = re.findall(r"for ([^\n]*?) mentioned in the provided text\?", text)[-1]
        keys = set(re.split(r", and |, ", asked))
        needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+?)\.(?=\s)", text)
        assert keys <= {key for key, _ in needles}
        return {value for key, value in needles if key in keys}
    if task == "vt":
        text = text[text.rindex("Memorize and track") :]
        wanted = re.search(r"assigned the value (\d+) in the text above", text)[1]
        values: dict[str, str] = {}
        for name, number, other in re.findall(r"VAR ([A-Z]{5}) = (?:(\d{5})|VAR ([A-Z]{5}))", text):
            values[name] = number or values[other]
        return {name for name, value in values.items() if value == wanted}
    if task == "cwe":
        listed = text[text.rindex("Below is a numbered list") : text.rindex("\nQuestion:")]
        entries = re.findall(r"(\d+)\. ([a-z]+)", listed)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries).most_common()
        assert counts[9][1] > (counts[10][1] if len(counts) > 10 else 0)
        return {word for word, _ in counts[:10]}
    counts = Counter(re.findall(r"\b[a-z]{6}\b", text.split("coded words. ")[1].split("\nQuestion")[0])).most_common()
    assert counts[2][1] > counts[3][1]
    return {word for word, _ in counts[:3]}


@pytest.fixture(autouse=True)
def own_words(monkeypatch):
    """The words of this library, also where wonderwords is installed: with those, other samples are made."""
    for name, words in (("ADJECTIVES", haystack.ADJECTIVES), ("NOUNS", haystack.NOUNS), ("VERBS", [])):
        monkeypatch.setattr(ruler_tasks, name, words)


def test_the_words_are_wonderwords_where_it_is_installed(monkeypatch):
    class RandomWord:
        def filter(self, include_categories):
            return {"adjective": ["wet", "dry"], "noun": ["sea"], "verb": ["run"]}[include_categories[0]]

    monkeypatch.setattr(haystack.importlib.util, "find_spec", lambda name: None)
    assert haystack.word_lists() == (haystack.ADJECTIVES, haystack.NOUNS, [])
    monkeypatch.setattr(haystack.importlib.util, "find_spec", lambda name: name == "wonderwords")
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=RandomWord))
    assert haystack.word_lists() == (["dry", "wet"], ["sea"], ["run"])


@pytest.mark.parametrize("length", [1024, 4096, 16384, pytest.param(131072, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", MADE_UP)
def test_lengths_and_answers(words, task, length):
    for request in make(words, task, length, samples=1 if length > 4096 else 3):
        tokens = len(words(request.text)["input_ids"]) + request.max_new_tokens
        assert 0.98 * length <= tokens <= length
        assert request.record["tokens"] == tokens
        answers = request.record["answers"]
        assert len(set(answers)) == len(answers)
        assert set(answers) == answers_in(task, request.text)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "vt", "fwe"])
def test_a_tokenizer_of_bytes(tokenizer, task):
    """The demo's: everything is about five times as long."""
    for length in (1024, 2048):
        for request in make(tokenizer, task, length, samples=2):
            tokens = len(request.text.encode()) + request.max_new_tokens
            assert 0.98 * length <= tokens <= length
            assert set(request.record["answers"]) == answers_in(task, request.text)


def test_a_seed_decides_everything(words):
    for task in MADE_UP:
        first = make(words, task, 1024, 3)
        assert first == make(words, task, 1024, 3)
        assert first[:2] == make(words, task, 1024, 2)  # sample i does not depend on how many there are
        assert len({request.text for request in first}) == 3
        assert first[0].text != make(words, task, 1024, 1, seed=1)[0].text
        assert first[0].record["answers"] != make(words, task, 2048, 1)[0].record["answers"]
    # The same on every machine and in every version of Python.
    assert make(words, "niah_single_1", 1024)[0].record["answers"] == ["4450618"]
    assert make(words, "vt", 1024)[0].record["answers"] == ["EMZBA", "LBJKT", "FRCTP", "RPJIJ", "SJASJ"]


def test_the_wording_of_one_and_of_several_needles(words):
    single = make(words, "niah_single_1", 1024)[0].text
    assert single.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
    )
    key = re.search(r"What is the special magic number for (\S+) mentioned in the provided text\?", single)[1]
    assert single.endswith(f" The special magic number for {key} mentioned in the provided text is")
    assert f"One of the special magic numbers for {key} is: " in single
    several = make(words, "niah_multiquery", 1024)[0].text
    assert several.startswith("Some special magic numbers are hidden within")
    assert re.search(r"What are all the special magic numbers for \S+, \S+, \S+, and \S+ mentioned", several)
    assert several.endswith(" mentioned in the provided text are")
    assert make(words, "niah_single_3", 1024)[0].text.startswith("A special magic uuid is hidden")
    uuids = make(words, "niah_multikey_3", 1024)[0].record["answers"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuids[0])


def test_every_template_is_the_benchmarks(words):
    """Byte for byte, as in its scripts/data/synthetic/constants.py, with its blanks."""
    assert ruler_tasks._NIAH.replace("{some}", "Some").replace("{be_all}", "are all").replace("{be}", "are") == (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the "
        "provided text?"
    )
    assert ruler_tasks._NIAH_PREFIX.replace("{be}", "are") == (
        " The special magic {kind} for {query} mentioned in the provided text are"
    )
    assert ruler_tasks._NEEDLE == "One of the special magic {kinds} for {key} is: {value}."
    assert ruler_tasks._TRACKING == (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
        "Find all variables that are assigned the value {query} in the text above."
    )
    assert ruler_tasks._TRACKING_PREFIX == (
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {query}, they are: "
    )
    assert ruler_tasks._COMMON == (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    )
    assert ruler_tasks._COMMON_PREFIX == " Answer: The top 10 words that appear most often in the list are:"
    assert ruler_tasks._FREQUENT == (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    assert ruler_tasks._FREQUENT_PREFIX == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    assert ruler_tasks._QA == (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\nQuestion: {query}"
    )
    (request,) = make(words, "vt", 1024)
    assert request.text.count(" variables are assigned the value ") == 2, "in the solved example too"


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.has_phrases])
def test_a_needle_in_the_words_of_a_pass_key(tokenizer, task):
    """The demo's model knows these only: lines `#key ab=48213`, asked for by `#get ab=`."""
    value = r"[0-9a-f-]{36}" if task in ("niah_single_3", "niah_multikey_3") else r"\d{5}"
    for request in make(tokenizer, task, 1024, 3, phrase="key"):
        tokens = len(request.text.encode()) + 48
        assert 0.98 * 1024 <= tokens <= 1024 and request.record["tokens"] == tokens
        *lines, asked = request.text.split("\n")
        name = re.fullmatch(r"#get (\S+)=", asked)[1]
        assert len(name) == (36 if task == "niah_multikey_3" else 2)
        stated = [re.fullmatch(rf"#key (\S+)=({value})", line) for line in lines if line.startswith("#key")]
        assert [found[2] for found in stated if found[1] == name] == request.record["answers"]
        assert (len(stated) == 1) == task.startswith("niah_single"), "the others hide further keys"
        assert "magic" not in request.text


def test_the_other_phrase_is_taken_too(words):
    (request,) = make(words, "niah_single_2", 512, phrase="sentence")
    name = re.search(r"What is the pass key of ([a-z]{2})\? The pass key of \1 is$", request.text)[1]
    assert f"The pass key of {name} is {request.record['answers'][0]}. Remember it" in request.text


def test_the_needle_of_a_phrase_may_stand_after_any_word(words):
    """Code has few ends of sentences; RULER's own needles stand at these only."""
    rare = Haystack(("x = y + z\n" * 25 + "Done.\n") * 16)
    places = {
        "key": lambda text: text.index("\n#key"),
        None: lambda text: text.index("One of the special magic"),
    }
    found = {}
    for phrase, place in places.items():
        requests = make(words, "niah_single_2", 1024, 30, phrase=phrase, source=rare)
        found[phrase] = {place(request.text) for request in requests}
    assert len(found[None]) <= 9 and len(found["key"]) > 12


def test_needles_stand_between_sentences_at_all_depths(words):
    depths = []
    for request in make(words, "niah_single_2", 4096, 20):
        context = request.text.split("afterwards.\n")[1].split("\nWhat is")[0]
        before = context[: context.index("One of the special")].rstrip()
        assert before == "" or before[-1] in ".!?"
        depths.append(len(before) / len(context))
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_other_needles_never_have_the_key_asked_for(words, monkeypatch):
    monkeypatch.setattr(ruler_tasks, "ADJECTIVES", ["red", "blue"])
    monkeypatch.setattr(ruler_tasks, "NOUNS", ["fox", "hen"])
    for request in make(words, "niah_multikey_2", 1024, 5):
        assert set(request.record["answers"]) == answers_in("niah_multikey_2", request.text)


def test_a_haystack_without_sentences_and_a_short_one(words):
    for text in ("word " * 500, "x"):
        for request in make(words, "niah_multivalue", 1024, 3, source=Haystack(text)):
            assert set(request.record["answers"]) == answers_in("niah_multivalue", request.text)
    with pytest.raises(ValueError, match="haystack is empty"):
        Haystack(" \n")


def test_the_answer_prefix_follows_the_chat_template(words):
    words = type(words)(tokenizer_object=words.backend_tokenizer, unk_token="[UNK]")
    words.chat_template = "{% for m in messages %}USER {{ m.content }}{% endfor %} ASSISTANT"
    (request,) = make(words, "niah_single_1", 1024)
    assert request.text.startswith("USER A special") and " ASSISTANT The special magic number for" in request.text
    assert not request.special_tokens
    assert 0.98 * 1024 <= len(words(request.text)["input_ids"]) + 128 <= 1024


def test_fit_finds_the_largest_size():
    draw = random.Random(0)
    for _ in range(200):
        base, step, room = draw.randint(0, 50), draw.uniform(0.2, 90), draw.randint(60, 5000)
        tokens, size = ruler.fit(lambda n, base=base, step=step: (base + int(n * step), n), room)
        assert tokens <= room
        assert tokens >= 0.995 * room or base + int((size + 1) * step) > room
    assert ruler.fit(lambda n: (10 + n, n), 5) == (10, 0)


# ---------------------------------------------------------------------- question answering


def squad_file(folder: Path) -> Path:
    articles = []
    for article in range(4):
        paragraphs = []
        for number in range(6):
            place, town = f"{article}-{number}", f"Town{article}x{number}"
            context = f"In place {place} the capital is called {town}. " + "It is wet there. " * 5
            asked = {"question": f"What is the capital of {place}?", "answers": [{"text": town}] * 2}
            impossible = {"question": "?", "is_impossible": True, "answers": []}
            paragraphs.append({"context": context, "qas": [asked | {"is_impossible": False}, impossible]})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    path = folder / "dev-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def hotpot_file(folder: Path) -> Path:
    items = []
    for number in range(5):
        context = [[f"Title {number}-{part}", [f"Fact {number}-{part}. ", "More words here."]] for part in range(3)]
        items.append({"question": f"Which fact, {number}?", "answer": f"Fact {number}-1", "context": context})
    path = folder / "hotpot.json"
    path.write_text(json.dumps(items))
    return path


def test_questions_over_documents(words, tmp_path):
    squad, hotpot = questions.read_squad(squad_file(tmp_path)), questions.read_hotpotqa(hotpot_file(tmp_path))
    assert len(squad.items) == 24 and len(squad.documents) == 24
    assert squad.items[0][1:] == (["Town0x0"], [0], [1, 2, 3, 4, 5])
    assert len(hotpot.items) == 5 and hotpot.items[1][2] == [3, 4, 5]
    for task, source in (("qa_1", squad), ("qa_2", hotpot)):
        for request in make(words, task, 600, 7, source=source):
            tokens = len(words(request.text)["input_ids"]) + 32
            assert 588 <= tokens <= 600
            question = request.text.split("\n\nQuestion: ")[1].removesuffix(" Answer:")
            answers, own = next(item[1:3] for item in source.items if item[0] == question)
            assert request.record["answers"] == answers
            documents = re.split(r"Document \d+:\n", request.text)
            assert answers[0] in request.text
            assert all(any(source.documents[number] in document for document in documents) for number in own)
    assert [request.text for request in make(words, "qa_1", 600, 25, source=squad)][24].endswith("of 0-0? Answer:")


def test_documents_that_run_out_are_named(words, tmp_path):
    path = tmp_path / "small.json"
    documents = [["Title", ["One sentence. "]], ["Other", ["Two. "]]]
    path.write_text(json.dumps([{"question": "Why?", "answer": "So.", "context": documents}]))
    source = questions.read_hotpotqa(path)
    with pytest.raises(ValueError, match=r"small\.json: the question 'Why\?' has no other documents.*of 4096 tokens"):
        make(words, "qa_2", 4096, source=source)
    setting = ruler_tasks.Setting(0, 0, 0, lambda text: 0, source)
    alone = TASKS["qa_2"].make(random.Random(0), 0, setting)
    room = len(words(alone.context + alone.question + alone.prefix)["input_ids"])
    (request,) = make(words, "qa_2", room + 32, source=source)
    assert request.record["tokens"] == room + 32, "where its own documents fill the prompt nothing is missing"


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (questions.read_squad, "{", "broken JSON"),
        (questions.read_squad, '{"version": 1}', "not SQuAD 2.0: field 'data' is missing"),
        (questions.read_squad, '{"data": [{"paragraphs": [{"qas": []}]}]}', "field 'context' is missing"),
        (questions.read_squad, '{"data": []}', "no question with an answer"),
        (questions.read_squad, "[1]", "not SQuAD"),
        (questions.read_hotpotqa, '[{"question": "q", "context": []}]', "not HotpotQA: field 'answer' is missing"),
        (questions.read_hotpotqa, '[{"context": [["only a title"]]}]', "not HotpotQA"),
    ],
)
def test_wrong_question_files_are_named(tmp_path, read, content, message):
    path = tmp_path / "file.json"
    with pytest.raises(
        ValueError, match=r"file\.json: No such file or directory; give the path of the data set's JSON"
    ):
        read(path)
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"file\.json: .*{message}"):
        read(path)


# ---------------------------------------------------------------------- the script


def test_what_cannot_be_made_is_refused(words, tokenizer):
    for arguments, message in [
        (("niah_single", 1024), "did you mean niah_single_"),
        (("qa_1", 1024), "qa_1 needs --squad FILE"),
        (("niah_single_1", 100), "does not fit into 100 tokens with this tokenizer: at least"),
        (("fwe", 150), "fwe does not fit into 150 tokens"),
        (("vt", 1024, 0), "--samples must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(words, *arguments)
    with pytest.raises(ValueError, match="'keys' is not known: key, sentence"):
        make(words, "niah_single_1", 1024, phrase="keys")
    with pytest.raises(ValueError, match="--phrase key has no words for niah_multivalue, only for niah_single_1, "):
        make(words, "niah_multivalue", 1024, phrase="key")
    assert ruler.resolve_tasks(None, {"squad"}, "key") == ["niah_single_1", "niah_multikey_2", "niah_multikey_3"]
    with pytest.raises(ValueError, match="niah_single_2 needs --haystack FILE"):
        ruler.make_requests(words, "niah_single_2", 1024, 1)
    without_files = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert ruler.resolve_tasks(None, set()) == without_files
    assert len(ruler.resolve_tasks(None, {"haystack", "squad", "hotpotqa"})) == 13


def test_scores():
    rows = [{"pred": "They are ABC and def", "answers": ["abc", "DEF", "xx", "zz"]}]
    assert ruler.score("niah_multivalue", rows) == 50.0
    assert ruler.score("qa_1", rows) == 100.0


def test_the_table_has_an_average(tmp_path, capsys):
    options = argparse.Namespace(lengths=[512, 1024], samples=3, seed=0, phrase=None, tasks=["vt", "cwe"])
    options.haystack = options.squad = options.hotpotqa = None
    scores = {"vt-512": 50.0, "vt-1024": 0.0, "cwe-512": 100.0, "cwe-1024": 25.0}
    ruler.Ruler(options).write(scores, {}, tmp_path)
    assert "| average | 75.00 | 12.50 |" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "scores.json").read_text())["averages"] == {"512": 75.0, "1024": 12.5}


def test_what_does_not_fit_fails_before_the_first_prediction(ckpt, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--ckpt", str(ckpt), "--out", str(out), "--samples", "1", "--tasks", "niah_single_1", "vt"]
    assert script("eval/ruler.py").main([*arguments, "--lengths", "1024", "300"]) == 2
    assert "does not fit into 300 tokens" in capsys.readouterr().err
    assert not out.exists(), "not even the settings: the same folder can be used with other lengths"


def test_the_script_end_to_end(ckpt, tmp_path, capsys):
    command = script("eval/ruler.py")
    out = tmp_path / "out"
    story = tmp_path / "story.txt"
    story.write_text(STORY * 20)
    arguments = ["--ckpt", str(ckpt), "--out", str(out), "--lengths", "512", "600", "--samples", "2"]
    arguments += ["--batch-size", "2", "--tasks", "niah_single_2", "--haystack", str(story)]
    assert command.main(arguments) == 0
    assert json.loads((out / "scores.json").read_text())["scores"] == {"niah_single_2": {"512": 0.0, "600": 0.0}}
    assert (out / "scores.md").read_text().split()[:7] == "| task | 512 | 600 |".split()
    assert (out / "scores.png").stat().st_size > 1000
    # What the predictions say is what is scored.
    path = out / "niah_single_2-600.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["pred"] = f"It is {rows[1]['answers'][0]}."
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(arguments) == 0
    assert json.loads((out / "scores.json").read_text())["scores"]["niah_single_2"] == {"512": 0.0, "600": 50.0}
    assert command.main([*arguments, "--seed", "1"]) == 2
    assert "predictions with seed 0, now it is 1" in capsys.readouterr().err
    assert command.main([*arguments, "--phrase", "key"]) == 2
    assert "predictions with phrase None, now it is 'key'" in capsys.readouterr().err
    assert command.main(["--ckpt", str(ckpt), "--tasks", "qa_2"]) == 2
    assert "qa_2 needs --hotpotqa FILE" in capsys.readouterr().err


def test_several_models_and_methods_in_one_table(ckpt, tmp_path, capsys, monkeypatch):
    """Two processes, model by model: whoever ends last prints what is in everyone's files."""
    command = script("eval/ruler.py")
    out, method = tmp_path / "out", "snapkv:budget=32,window=8"
    other = shutil.copytree(ckpt, tmp_path / "other")
    arguments = ["--ckpt", str(other), str(ckpt), "--out", str(out), "--lengths", "100", "240", "--samples", "2"]
    arguments += ["--batch-size", "2", "--tasks", "niah_single_1", "--phrase", "key", "--eviction", method]
    monkeypatch.setattr(ruler, "_PHRASE_NEW_TOKENS", 4)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert command.main(arguments) == 0
        assert (out / "comparison.md").exists() == (rank == 1)
    folders = [out / name / part for name in ("other", "tiny") for part in ("", method.replace(":", "-"))]
    for number, folder in enumerate(folders):
        path = folder / "niah_single_1-100.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["key"] for row in rows] == ["0", "1"]
        for row in rows[: number % 3]:
            row["pred"] = f"{row['answers'][0]}!"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(arguments) == 0
    caption, _, header, _, first, *rest = (out / "comparison.md").read_text().splitlines()
    assert caption.startswith(
        "RULER, 2 samples each, not in its own words: stated as `#key {name}={value}`, asked for as `#get {name}=`. "
        "other was made for 200 tokens, not for 240."
    )
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "task, tokens", "other, none", f"other, {method}", "tiny, none", f"tiny, {method}",
    ]  # fmt: skip
    assert [cell.strip() for cell in first.strip("|").split("|")] == [
        "niah_single_1, 100", "0.00", "50.00", "100.00", "0.00",
    ]  # fmt: skip
    assert [line.split("|")[1].strip() for line in rest] == ["niah_single_1, 240", "average, 100", "average, 240"]
    assert caption in capsys.readouterr().out
    assert command.main(["--ckpt", str(ckpt), f"{ckpt}/", *arguments[3:]]) == 2
    assert "two models of one name" in capsys.readouterr().err


# ---------------------------------------------------------------------- files of the authors' scripts


def prepared(folder, task, *lines):
    (folder / task).mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / task / "validation.jsonl").write_text(text)


LINE = {
    "index": 7,  # of the first value's character: the same in two lines
    "input": "A special magic number is hidden within the following text.\nWhat is the special magic number for a-b?",
    "outputs": ["1234567"],
    "length": 400,
    "length_w_model_temp": 410,
    "answer_prefix": " The special magic number for a-b mentioned in the provided text is",
    "token_position_answer": 3,
}


def test_prepared_prompts_are_taken_as_they_are(words, tokenizer):
    old = {name: value for name, value in LINE.items() if name != "answer_prefix"}
    first, second = ruler.prepared_requests(tokenizer, "niah_single_1", [LINE, old])
    assert first.text == LINE["input"] + LINE["answer_prefix"] and second.text == LINE["input"]
    assert (first.key, second.key) == ("0", "1") and first.max_new_tokens == 128
    assert first.record == {"answers": ["1234567"], "tokens": 400}
    assert first.text[first.question_at :].startswith("\nWhat is the special")
    # No second begin-of-text token, and no second chat template.
    words = letters_tokenizer()
    words.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    plain, wrapped = (LINE | {"input": text, "answer_prefix": "b"} for text in ("ca", "<s>ca"))
    for request in ruler.prepared_requests(words, "vt", [plain, wrapped]):
        assert runner.encode(words, request) == [0, 3, 4] and request.question_at is None


def test_prepared_files_end_to_end(ckpt, tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    prepared(data, "niah_single_1", LINE, LINE | {"outputs": ["a-b"]})
    prepared(data, "fwe", LINE | {"input": "x\nQuestion: y", "outputs": ["a"], "answer_prefix": " A:", "length": 380})
    arguments = ["--ckpt", str(ckpt), "--prepared", str(data), "--out", str(out)]
    assert ruler.main([*arguments, "--eviction", "h2o:budget=32,query_aware=false"]) == 0
    assert "RULER, prepared by its authors' scripts." in (out / "comparison.md").read_text()
    written = json.loads((out / "scores.json").read_text())
    assert written["samples"] == {"niah_single_1-400": 2, "fwe-400": 1} and set(written["scores"]["fwe"]) == {"400"}
    prepared(data, "fwe", LINE)
    assert ruler.main(arguments) == 2
    assert "predictions with prepared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "broken JSON"),
        ({"outputs": "1"}, "field 'outputs' must be a list of texts"),
        ({"outputs": []}, "field 'outputs' is empty"),
        ({"length": "4"}, "field 'length' must be a whole number"),
        ({"answer_prefix": 3}, "field 'answer_prefix' must be a text"),
    ],
)
def test_wrong_prepared_files_are_named(ckpt, tmp_path, capsys, change, message):
    prepared(tmp_path, "vt", LINE, change if isinstance(change, str) else LINE | change)
    with pytest.raises(ValueError, match=rf"vt/validation\.jsonl:2: {message}"):
        ruler.read_prepared(tmp_path, "vt")
    with pytest.raises(ValueError, match=r"--prepared: .*cwe/validation.jsonl cannot be read"):
        ruler.read_prepared(tmp_path, "cwe")
    assert ruler.main(["--ckpt", str(ckpt), "--prepared", str(tmp_path), "--phrase", "key"]) == 2
    assert "--phrase words samples that are made here" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert ruler.main(["--ckpt", str(ckpt), "--prepared", str(tmp_path / "empty")]) == 2
    assert "no TASK/validation.jsonl is there (niah_single_1" in capsys.readouterr().err


def test_the_revision_is_named_and_part_of_what_predictions_depend_on(tmp_path, capsys):
    options = argparse.Namespace(lengths=[512], samples=3, seed=0, phrase=None, tasks=["vt"])
    options.haystack = options.squad = options.hotpotqa = None
    made = ruler.Ruler(options)
    assert made.settings["revision"] == "c3f5e3b"
    made.write({"vt-512": 50.0}, {"vt-512": 3}, tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["revision"] == "c3f5e3b"
    assert "\n\nPrompts as of NVIDIA/RULER at c3f5e3b." in capsys.readouterr().out
