"""`python -m pod.generate`: options of the cache and of sampling, and what is refused."""

import re
import shutil

import pytest
from scripts import save, tiny_llama
from transformers import AutoTokenizer

import pod
from pod import generate, serve
from pod.generate import main


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A PoD model whose recent window is short, so that a prompt of 80 bytes has distant tokens."""
    model = pod.convert(
        tiny_llama(num_hidden_layers=3), pod.LayerBlocks([[0, 0], [0, 0], [0, 2]]), sink_size=2, recent_size=6
    )
    return str(save(model, tmp_path_factory.mktemp("exported")))


def said(capsys, *arguments, times: int = 40) -> str:
    assert main([*arguments, "--prompt", "def main" * times, "--max-new-tokens", "3"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("more", [[], ["--eviction", "snapkv:budget=512,window=8"]])
def test_a_quantised_cache_takes_fewer_bytes(exported, capsys, bits, more):
    texts = [
        said(capsys, "--ckpt", exported, *more, *options, times=160)
        for options in ([], ["--quantization-bits", str(bits)])
    ]
    found = [int(re.search(r"cache ([\d,]+) bytes", text)[1].replace(",", "")) for text in texts]
    assert found[1] < found[0]
    if not more:
        config = pod.PodLlamaConfig.from_pretrained(exported)
        cache = pod.PodCache(config, quantization=pod.Quantization(bits=bits))
        assert found == [
            pod.PodCache(config).expected_nbytes(1283, itemsize=4),
            cache.expected_nbytes(1283, itemsize=4),
        ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--quantization-bits", "4", "--tau", "0.5"], "tau=0.5 cannot be combined with quantization"),
        (["--quantization-bits", "8", "--eviction", "h2o:budget=64"], "quantization cannot be combined with H2O"),
        (["--quantization-bits", "8", "--eviction", "quest:budget=64"], "quantization cannot be combined with Quest"),
        (["--temperature", "-1"], "--temperature -1: wanted a number from 0 (greedy) on"),
        (["--temperature", "nan"], "--temperature nan: wanted a number from 0 (greedy) on"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: wanted at least 1"),
        *(
            (["--max-new-tokens", number, *more], f"--max-new-tokens {number}: no memory for a prompt of 3 tokens and ")
            for number in ("99999999999999", str(2**62), "9" * 30)
            for more in ([], ["--quantization-bits", "4"], ["--eviction", "snapkv:budget=64,window=8"])
        ),
        (["--draft", "quest:budget=64", "--tau", "0.5"], "draft=Quest needs a cache of which plain decoding"),
        (["--draft", "quest:budget=64", "--num-assistant-tokens", "0"], "--num-assistant-tokens 0: wanted at least 1"),
        (["--seed", str(2**64)], "--seed 18446744073709551616: wanted a number of 64 bits"),
        (["--seed", str(-(2**63) - 1)], "--seed -9223372036854775809: wanted a number of 64 bits"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(exported, capsys, arguments, message):
    assert main(["--ckpt", exported, "--prompt", "abc", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after what transformers says of loading
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(("command", "wanted"), [(generate, ["eviction"]), (serve, [])])
def test_the_help_offers_several_methods_where_several_are_taken(command, wanted, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    options = " ".join(capsys.readouterr().out.split()).split(" --")
    assert [option.split()[0] for option in options if "separated by +" in option] == wanted


def test_drafts_leave_the_text_and_are_counted(exported, capsys):
    arguments = ["--ckpt", exported, "--prompt", "def main" * 20, "--max-new-tokens", "9"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--draft", "quest:budget=16,page_size=4", "--num-assistant-tokens", "3"]) == 0
    text = capsys.readouterr().out
    assert text.split("\nprompt ")[0] == plain.split("\nprompt ")[0]
    accepted, drafted = map(int, re.search(r"(\d+) of (\d+) draft tokens accepted", text).groups())
    assert 0 <= accepted <= drafted and drafted >= 6 and "draft" not in plain


# A chat template


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def chat(exported, tmp_path_factory):
    """The same model beside a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(exported, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def printed(capsys, *arguments) -> tuple[str, str]:
    assert main([*arguments, "--max-new-tokens", "5"]) == 0
    text, _, rest = capsys.readouterr().out.partition("\nprompt ")
    return text, rest


def test_a_chat_template_is_applied_unless_the_prompt_is_raw(exported, chat, capsys):
    text, rest = printed(capsys, "--ckpt", chat, "--prompt", "Who?")
    written = "<user>Who?</user><assistant>"
    assert rest.startswith(f"{len(written)} tokens in the chat template (--raw leaves it out), ")
    by_hand, plain = printed(capsys, "--ckpt", chat, "--prompt", written, "--raw")
    assert by_hand == text and plain.startswith(f"{len(written)} tokens, ")
    raw, _ = printed(capsys, "--ckpt", chat, "--prompt", "Who?", "--raw")
    without, plain = printed(capsys, "--ckpt", exported, "--prompt", "Who?")
    assert raw == without and plain.startswith("4 tokens, ")


def test_a_question_in_a_chat_template_is_read_apart(chat, capsys, monkeypatch):
    apart = []
    monkeypatch.setattr(
        generate, "read_context", lambda model, cache, ids, question, **_: apart.append((ids, question))
    )
    method = ["--eviction", "snapkv:budget=64,window=4,query_aware=false"]
    printed(capsys, "--ckpt", chat, "--prompt", "Once upon a time. " * 9, "--question", "Who?", *method)
    ((ids, question),) = apart
    assert question == len("Who?</user><assistant>")
    tokenizer = AutoTokenizer.from_pretrained(chat)
    assert tokenizer.decode(ids[0, :-question]) == "<user>" + "Once upon a time. " * 9


@pytest.mark.parametrize("template", [TEMPLATE.replace("| trim", "| upper"), TEMPLATE])
def test_a_question_that_the_template_changes_cannot_be_told_apart(chat, tmp_path, capsys, template):
    shutil.copytree(chat, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    asked = ["--prompt", "Once upon a time. " * 9, "--question", "Who?" if template != TEMPLATE else " ", "--eviction"]
    asked += ["snapkv:budget=64,window=4,query_aware=false"]
    assert main(["--ckpt", str(tmp_path / "model"), *asked]) == 2
    assert "error: query_aware=false: the chat template changes the question" in capsys.readouterr().err


def test_an_empty_prompt_is_no_turn(chat, capsys):
    assert main(["--ckpt", chat, "--prompt", ""]) == 2
    assert "error: the prompt is empty" in capsys.readouterr().err
