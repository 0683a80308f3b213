"""Chats: which tokens have labels, exactly; what is refused, by file and line."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pod import prepare
from pod.data import chat
from pod.data.prepared import PreparedData, PreparedDataset

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
# No prompt to answer to, no end: the text between roles is all there is.
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
FORGETS = (
    "{% for message in messages %}{% if loop.last %}[{{ message.content }}]{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('begin with system') }}{% endif %}" + CHATML


def conversation(*contents, system=None):
    """user, assistant, user, ..."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + messages


CHATS = [
    conversation("What is 2 + 2?", "It is 4."),
    conversation("Hello", "Good day! How can I help?", "Tell me a word.", "Ünïcödé 漢", system="Be kind.\n"),
    conversation("one", "", "two", " leading and trailing ", "three, not answered"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE with some merges, a beginning and an end of turn, and ChatML."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([message["content"] for messages in CHATS for message in messages] * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats))
    return path


def learned_text(template, name, messages):
    """What is learned of a chat, as text, one piece for each run of learned tokens; and all of it."""
    from transformers import AutoTokenizer

    ids, learned, _ = chat.load_chat(str(name), template)(messages)
    loaded = AutoTokenizer.from_pretrained(name)
    runs, last = [], -2
    for place in np.flatnonzero(learned).tolist():
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(ids[place]))
        last = place
    return [loaded.decode(run) for run in runs], loaded.decode(ids)


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
@pytest.mark.parametrize("messages", CHATS)
def test_turns_of_the_assistant_are_learned_with_their_end(tokenizer, messages, template):
    found, whole = learned_text(template, tokenizer, messages)
    assert found == [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_chat_that_the_assistant_begins(tokenizer, name):
    encode = chat.load_chat("bytes" if name == "bytes" else str(tokenizer), CHATML)
    ids, learned, text = encode([{"role": "assistant", "content": "Yo"}, *conversation("What?", "Yo<|im_end|>")])
    assert text.startswith("<|im_start|>assistant\nYo<|im_end|>")
    if name == "bytes":
        first = bytes((ids[: len("<|im_start|>assistant\nYo<|im_end|>\n")] - 3).tolist())
        assert first == b"<|im_start|>assistant\nYo<|im_end|>\n"
        assert learned[: len(first)].tolist() == [False] * 22 + [True] * (len(first) - 22)
    else:
        assert learned_text(CHATML, tokenizer, [{"role": "assistant", "content": "Yo"}])[0] == ["Yo<|im_end|>"]


def test_a_template_without_ends(tokenizer):
    found, whole = learned_text(PLAIN, tokenizer, CHATS[0])
    assert whole == "user: What is 2 + 2?\nassistant: It is 4.\n" and found == ["assistant: It is 4.\n"]


def test_bytes_have_the_same_turns():
    encode = chat.load_chat("bytes", CHATML)
    for messages in CHATS:
        ids, learned, text = encode(messages)
        assert bytes((ids - 3).tolist()).decode() == text and len(ids) == len(text.encode())
        wanted = b"".join(
            f"{message['content']}<|im_end|>\n".encode() for message in messages if message["role"] == "assistant"
        )
        assert bytes((ids[learned] - 3).tolist()) == wanted


@pytest.mark.parametrize("one_document", [False, True])
def test_labels_of_prepared_chats(tokenizer, tmp_path, monkeypatch, one_document):
    """Packed and cut into samples, over several shards and two processes: each label is where the chat's mark is."""
    monkeypatch.setattr("pod.data.sample_writer.SHARD_BYTES", 2 * 16 * 2)
    source = write(tmp_path / "chats.jsonl", CHATS)
    options = {"tokenizer": str(tokenizer), "sequence_length": 16, "held_out": 0.0, "chat": True, "num_proc": 2}
    report = prepare.prepare([str(source)], tmp_path / "out", **options, one_document=one_document)
    data = PreparedData(tmp_path / "out")
    data.verify()
    assert report["documents"] == 3 and len(data.splits["train"]["shards"]) > 1
    encoded = [chat.load_chat(str(tokenizer), None)(messages)[:2] for messages in CHATS]
    if one_document:
        for item in PreparedDataset(data):
            ids, learned = next(pair for pair in encoded if item["input_ids"].tolist()[:8] == pair[0][:8].tolist())
            wanted = [int(token) if mark else -100 for token, mark in zip(ids, learned, strict=True)][:16]
            assert item["labels"].tolist() == wanted + [-100] * (16 - len(wanted))
        return
    tokens, labels, documents = ([], [], [])
    for item in PreparedDataset(data):
        tokens += item["input_ids"].tolist()
        labels += item["labels"].tolist()
    # In the order that the seed gives; a label is there where the token is marked and not the first of its piece.
    order = [next(i for i, (ids, _) in enumerate(encoded) if ids[:9].tolist() == tokens[:9])]
    place = len(encoded[order[0]][0])
    while len(order) < 3:
        rest = (i for i in range(3) if i not in order)
        order.append(next(i for i in rest if encoded[i][0][:9].tolist() == tokens[place : place + 9]))
        place += len(encoded[order[-1]][0])
    wanted = []
    for number in order:
        ids, learned = encoded[number]
        for at, (token, mark) in enumerate(zip(ids.tolist(), learned.tolist(), strict=True)):
            wanted.append(token if mark and at > 0 and len(wanted) % 16 else -100)
            documents.append(token)
    assert tokens[: len(documents)] == documents
    assert labels == wanted + [-100] * (len(labels) - len(wanted))
    assert sum(label != -100 for label in labels) > 20


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"text": "hello"}', "no chat: no field 'messages'"),
        ("[1]", "no chat: no field 'messages'"),
        ('{"messages": []}', "no chat: 'messages' is no list of messages"),
        ('{"messages": ["hi"]}', "no chat: message 0 is no object with role and content"),
        ('{"messages": [{"role": "bot", "content": "hi"}]}', "message 0 has role 'bot': must be one of system, user"),
        ('{"messages": [{"role": ["user"], "content": "hi"}]}', "message 0 has role ['user']: must be one of"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 0 (user) has no content: it must be a string"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "no turn of the assistant: nothing to learn"),
        ('{"messages": ', "broken JSON"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "wrong encoding: not Unicode text"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tokenizer, tmp_path, capsys, line, problem):
    source = write(tmp_path / "chats.jsonl", CHATS[:1])
    source.write_text(source.read_text() + "\n" + line + "\n")
    command = ["--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--chat"]
    assert prepare.main([*command, "--sequence-length", "32", "--held-out", "0", "--num-proc", "1"]) == 0
    assert f"skipped {source}:3: {problem}" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "report.json").read_text())["documents"] == 1


@pytest.mark.parametrize(
    "template, messages, problem",
    [
        (STRICT, CHATS[0], "the chat template refuses these messages: begin with system"),
        (FORGETS, CHATS[1], "message 2: the chat template writes this turn otherwise when more follows"),
    ],
)
def test_a_chat_that_the_template_cannot_write(tokenizer, tmp_path, template, messages, problem):
    (tmp_path / "template.jinja").write_text(template)
    source = write(tmp_path / "chats.jsonl", [messages])
    options = {"tokenizer": str(tokenizer), "sequence_length": 32, "chat": True}
    with pytest.raises(ValueError, match="nothing readable in 1 files, 1 problems; the first: ") as error:
        prepare.prepare([str(source)], tmp_path / "out", **options, chat_template=tmp_path / "template.jinja")
    assert f"{source}:1: {problem}" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_asked_for(tokenizer, tmp_path):
    source = write(tmp_path / "chats.jsonl", CHATS)
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "marked.jinja").write_text(MARKED)
    options = {"sequence_length": 32}
    with pytest.raises(ValueError, match="bytes has no chat template; give one with --chat-template FILE"):
        prepare.prepare([str(source)], tmp_path / "out", tokenizer="bytes", chat=True, **options)
    with pytest.raises(ValueError, match="needs a tokenizer with a tokenizer.json, not bytes"):
        marked = tmp_path / "marked.jinja"
        prepare.prepare([str(source)], tmp_path / "out", tokenizer="bytes", chat=True, chat_template=marked, **options)
    with pytest.raises(ValueError, match="only --chat writes chats"):
        prepare.prepare([str(source)], tmp_path / "out", tokenizer="bytes", chat_template="x.jinja", **options)
    with pytest.raises(ValueError, match=r"--chat reads .jsonl, .jsonl.gz, and .*notes.md is among the sources"):
        prepare.prepare([str(tmp_path)], tmp_path / "out", tokenizer=str(tokenizer), chat=True, **options)
    assert not Path(tmp_path / "out").exists()
