"""The needle in a haystack: where it stands, how long the prompt is, how it is scored."""

import json

import pytest

from pod.evaluation import needle

STORY = "The old clock had stopped. Nobody knew why or when. They left it as it was. "
DEPTHS = [0.0, 2.9, 33.0, 50.0, 97.1, 100.0]


def test_the_needle_stands_after_a_sentence_at_its_depth(tokenizer):
    lengths = [500, 1000, 3000]
    requests = needle.make_requests(tokenizer, STORY, lengths, DEPTHS)
    assert [request.record for request in requests] == [
        {"length": length, "depth": depth} for length in lengths for depth in DEPTHS
    ]
    for request in requests:
        text, rest = request.text.split(needle.QUESTION)
        assert rest == needle.ANSWER_PREFIX
        before, after = text.split(needle.NEEDLE)
        length, depth = request.record["length"], request.record["depth"]
        # One byte is one token: text and needle together are the length less the buffer.
        assert len(text) == length - 200
        # Around the needle stands the story, as if it were not there.
        assert before + after == (STORY * 50)[: len(before + after)]
        wanted = int((len(text) - len(needle.NEEDLE)) * depth / 100)
        if depth == 100:
            assert after == ""
        else:
            assert before == "" or before.endswith(".")
            assert wanted - len("Nobody knew why or when. ") - 3 <= len(before) <= wanted


def test_a_text_without_full_stops_is_cut_anywhere(tokenizer):
    (request,) = needle.make_requests(tokenizer, "word " * 10, [1000], [50.0])
    before = request.text.split(needle.NEEDLE)[0]
    assert len(before) == (800 - len(needle.NEEDLE)) // 2


def test_the_chat_template_ends_before_the_answer(tokenizer):
    chat = type(tokenizer)(extra_ids=0)
    chat.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
    (request,) = needle.make_requests(chat, STORY, [600], [0.0])
    assert request.text.startswith("<user>" + needle.NEEDLE)
    assert request.text.endswith(needle.QUESTION + "<assistant>" + needle.ANSWER_PREFIX)
    assert not request.special_tokens


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("eat a sandwich and sit in Dolores Park on a sunny day.", 100.0),
        ("", 0.0),
        ("Eat a SANDWICH!", 100 * 2 / 7),
        ("seats, parking, sandwiches, holidays", 0.0),  # whole words
        ("day day day", 100 / 7),
    ],
)
def test_score(prediction, score):
    assert needle.score(prediction) == pytest.approx(score)


def test_the_papers_grid():
    lengths, depths = needle.grid(1000, 32000, 35), needle.grid(0, 100, 35)
    assert len(lengths) == len(depths) == 35
    assert (lengths[0], lengths[-1], depths[0], depths[-1]) == (1000, 32000, 0, 100)
    assert depths[1] == pytest.approx(100 / 34)
    assert needle.grid(1, 9, 1) == [9]


def test_the_script_end_to_end(ckpt, tmp_path, capsys):
    story = tmp_path / "story.txt"
    story.write_text(STORY * 3)
    arguments = ["--ckpt", str(ckpt), "--haystack", str(story), "--out", str(tmp_path / "out")]
    arguments += ["--min-length", "450", "--max-length", "600", "--steps", "2", "--batch-size", "3"]
    assert needle.main(arguments) == 0
    content = json.loads((tmp_path / "out" / "scores.json").read_text())
    cells = [(cell["length"], cell["depth"]) for cell in content["scores"]]
    assert cells == [(450, 0), (450, 100), (600, 0), (600, 100)]
    assert (tmp_path / "out" / "scores.png").stat().st_size > 1000
    assert "2 lengths x 2 depths" in capsys.readouterr().out
    story.write_text(STORY * 4)
    for more, message in [
        ([], "choose another --out"),
        (["--min-length", "300"], "at least 394"),
        (["--min-length", "700"], "above --max-length 600"),
        (["--steps", "0"], "at least 1, got 0"),
    ]:
        out = [] if not more else ["--out", str(tmp_path / "other")]
        assert needle.main([*arguments, *out, *more]) == 2
        assert message in capsys.readouterr().err
