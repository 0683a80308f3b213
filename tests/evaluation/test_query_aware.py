"""`query_aware=False` in the benchmarks: the context is evicted from before the question is read, as done by hand."""

import pytest
import torch
from scripts import script

import pod
from pod import eviction, generate
from pod.evaluation import longbench, models, needle, passkey, ruler, runner
from pod.evaluation.haystack import Haystack
from pod.evaluation.ruler_tasks import TASKS

METHODS = ["snapkv:budget=64,window=8", "h2o:budget=64", "cake:budget=64,window=8,tau1=1.6,tau2=0.4"]
CONTEXTS = [f"def function_{n}(x):\n    return x * {n % 7}\n\n" * (6 + n) for n in range(3)]
QUESTIONS = ["#get ab=", "#get cd=", "what is function_2?"]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}<assistant>"
STORY = "The old clock had stopped. Nobody knew why or when. They left it as it was. "


def by_hand(model, tokenizer, method, context, question, count):
    """(kept positions of each layer after the context, the new tokens), one row and one token at a time."""
    cache = pod.PodCache(model.config, eviction=method)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, question)]
    with torch.no_grad():
        model(torch.tensor([ids[0]]), past_key_values=cache)
        kept = [cache.positions(layer) for layer in range(2)]
        logits = model(torch.tensor([ids[1]]), past_key_values=cache).logits
        new = []
        while len(new) < count and (not new or new[-1] != tokenizer.eos_token_id):
            new.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([[new[-1]]]), past_key_values=cache).logits
    return kept, new


def kept_of(cache, row, tokens):
    """Each layer's kept positions among the first `tokens` of a row."""
    found = []
    for layer in range(2):
        positions = cache.positions(layer)[row]
        found.append([sorted(p for p in head.tolist() if 0 <= p < tokens) for head in positions])
    return found


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_runner_reads_the_context_first(model, tokenizer, tmp_path, text, batch_size):
    prompts = list(zip(CONTEXTS, QUESTIONS, strict=True))
    requests = [
        runner.Request(str(n), context + question, 5, question_at=len(context))
        for n, (context, question) in enumerate(prompts)
    ]
    caches = {}
    for aware in (True, False):
        method = eviction.parse(text + ("" if aware else ",query_aware=false"))
        made = caches.setdefault(aware, [])

        def factory(model, method=method, made=made):
            made.append(pod.PodCache(model.config, eviction=method))
            return made[-1]

        out = runner.Predictions(tmp_path / str(aware), "set")
        options = {"cache_factory": factory, "apart": models.asks_apart(method)}
        rows = runner.predict(model, tokenizer, requests, out, batch_size=batch_size, **options)
    differs = False
    for number, (context, question) in enumerate(prompts):
        kept, new = by_hand(model, tokenizer, method, context, question, 5)
        assert rows[number]["pred"] == tokenizer.decode(new, skip_special_tokens=True)
        tokens = len(context.encode())
        wanted = [[sorted(p for p in head.tolist() if p >= 0) for head in layer[0]] for layer in kept]
        assert all(len(head) <= 128 for layer in wanted for head in layer)
        among = [
            kept_of(cache, row, tokens)
            for cache in caches[False]
            if cache.batch_size > 0
            for row in range(cache.batch_size)
        ]
        assert wanted in among
        aware = [
            kept_of(cache, row, tokens)
            for cache in caches[True]
            if cache.batch_size > 0
            for row in range(cache.batch_size)
        ]
        differs |= wanted not in aware
    assert differs, "with the question in the window other tokens are kept"


@pytest.mark.parametrize("text", METHODS)
def test_pass_keys(model, tokenizer, text):
    method = eviction.parse(f"{text},query_aware=false")
    prompts = passkey.passkey_prompts(tokenizer, STORY.replace(". ", ".\n") * 20, 200, [0.0, 1.0], 2)
    for prompt in prompts:
        context = tokenizer.decode(prompt.input_ids[: -prompt.question])
        asked = tokenizer.decode(prompt.input_ids[-prompt.question :])
        assert asked.startswith("#get ") and "#get" not in context
        kept, new = by_hand(model, tokenizer, method, context, asked, 7)
        cache = pod.PodCache(model.config, eviction=method)
        found = passkey.generate_greedily(model, torch.tensor([prompt.input_ids]), 7, prompt.question, cache)
        assert found[0].tolist()[: len(new)] == new
        assert kept_of(cache, 0, 200 - prompt.question) == [
            [sorted(p for p in head.tolist() if p >= 0) for head in layer[0]] for layer in kept
        ]
    with pytest.raises(ValueError, match="of which 0 are the question"):
        passkey.generate_greedily(
            model, torch.tensor([prompt.input_ids]), 7, 0, pod.PodCache(model.config, eviction=method)
        )


def test_padded_rows_of_unequal_contexts_are_alone_what_they_are_together(model, tokenizer, tmp_path):
    """The two questions are as long, so that both are in one batch, the shorter context padded."""
    method = eviction.parse("snapkv:budget=64,window=8,query_aware=false")
    ids = [
        tokenizer(c + q, add_special_tokens=False)["input_ids"] for c, q in zip(CONTEXTS, QUESTIONS[:2], strict=False)
    ]
    longest = max(map(len, ids))
    rows = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = (torch.arange(longest) >= longest - torch.tensor([len(row) for row in ids])[:, None]).long()
    together = pod.PodCache(model.config, eviction=method)
    models.read_context(model, together, rows, 8, mask)
    positions = mask.cumsum(1) - 1
    with torch.no_grad():
        logits = model(
            rows[:, -8:], attention_mask=mask, position_ids=positions[:, -8:], past_key_values=together
        ).logits
        for row, tokens in enumerate(ids):
            alone = pod.PodCache(model.config, eviction=method)
            models.read_context(model, alone, torch.tensor([tokens]), 8)
            expected = model(torch.tensor([tokens[-8:]]), past_key_values=alone).logits[0]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_a_request_without_a_question_is_refused(model, tokenizer, tmp_path):
    request = runner.Request("7", CONTEXTS[0], 2)
    (_, variant) = models.variants(model, eviction.parse_all("snapkv:budget=64,window=8,query_aware=false"))
    with pytest.raises(ValueError, match="request 7: query_aware=false .* set question_at"):
        runner.predict_each([variant], tokenizer, [request], tmp_path, "set", 1, {})
    assert not list(tmp_path.iterdir())


def test_an_id_across_the_border_belongs_to_the_question(tokenizer):
    class Pairs:
        """Two characters are one token."""

        bos_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": [hash(text[i : i + 2]) for i in range(0, len(text), 2)]}

    request = runner.Request("0", "abcdefgh", 1, question_at=3)
    assert runner.question_tokens(Pairs(), request, runner.encode(Pairs(), request)) == 3
    request = runner.Request("0", "abcdefgh", 1, question_at=4)
    assert runner.question_tokens(Pairs(), request, runner.encode(Pairs(), request)) == 2


# ---------------------------------------------------------------------- where questions begin


@pytest.fixture(params=[False, True], ids=["plain", "chat"])
def chatty(request, tokenizer):
    import copy

    made = copy.deepcopy(tokenizer)
    made.chat_template = CHAT if request.param else None
    return made


ASKED = {"niah": "\nWhat ", "vt": "\nQuestion: Find", "cwe": "\nQuestion: What are the 10", "fwe": "\nQuestion: Do not"}


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.needs in (None, "haystack")])
def test_rulers_question_is_the_asked_line(chatty, task):
    source = Haystack(STORY * 40) if TASKS[task].needs else None
    (request,) = ruler.make_requests(chatty, task, 8192, 1, source=source)
    asked = request.text[request.question_at :]
    assert asked.startswith(ASKED[task.split("_")[0]])
    assert "\n" not in asked[1:]
    if TASKS[task].has_phrases:
        (request,) = ruler.make_requests(chatty, task, 1024, 1, source=source, phrase="key")
        assert request.text[request.question_at :].startswith("#get ")


def test_the_needles_question(chatty):
    (request,) = needle.make_requests(chatty, STORY * 40, [600], [50.0])
    asked = request.text[request.question_at :]
    assert asked.startswith(needle.QUESTION.rstrip()) and asked.endswith(needle.ANSWER_PREFIX)
    assert needle.NEEDLE.strip() in request.text[: request.question_at]


@pytest.mark.parametrize("task", longbench.GROUPS["all"])
def test_longbenchs_question_is_what_follows_the_context(chatty, task):
    line = {
        "input": "Who {x} asked?",
        "context": "abc " * 300,
        "answers": ["x"],
        "all_classes": ["x"],
        "length": 9,
        "_id": "1",
    }
    after = longbench.PROMPTS[task].split("{context}")[1].replace("{input}", line["input"])
    for most in (31500, 900):
        (request,) = longbench.make_requests(chatty, task, [line], most)
        asked = request.text[request.question_at :]
        assert asked.startswith(after.rstrip()) and "abc" not in asked
    # More of the question than half of the prompt is cut away: the half that is left is the question.
    (request,) = longbench.make_requests(chatty, task, [line | {"input": "y" * 300}], 40)
    whole = longbench.truncate(chatty, longbench.PROMPTS[task].format(context=line["context"], input="y" * 300), 40)
    if "{input}" in longbench.PROMPTS[task]:
        assert request.text[request.question_at :].startswith(whole[20:].rstrip())


# ---------------------------------------------------------------------- commands


def test_streams_refuse_it(ckpt, tmp_path, capsys):
    frozen = "snapkv:budget=64,query_aware=false"
    text = tmp_path / "text"
    text.write_text(STORY * 20)
    arguments = ["--ckpt", str(ckpt), "--text", str(text), "--out", str(tmp_path / "out")]
    assert script("eval/perplexity.py").main([*arguments, "--stream", "64", "--eviction", frozen]) == 2
    assert f"{frozen}: with query_aware=false the first chunk" in capsys.readouterr().err
    methods = ["--methods", "snapkv:query_aware=false", "--budgets", "64", "--length", "200"]
    assert script("eval/trade_off.py").main([*arguments, *methods]) == 2
    said = capsys.readouterr().err
    assert f"{frozen}: with query_aware=false the first chunk" in said
    assert "leave query_aware out; or ask for pass keys alone, --texts 0" in said
    methods[1] = "kvzip"
    assert script("eval/trade_off.py").main([*arguments, *methods]) == 2
    assert "without bound: choose another method; or ask for pass keys alone, --texts 0" in capsys.readouterr().err


def test_generate_needs_the_question(ckpt, model, tokenizer, capsys):
    frozen = "snapkv:budget=64,window=8,query_aware=false"
    arguments = ["--ckpt", str(ckpt), "--prompt", CONTEXTS[2], "--max-new-tokens", "6", "--eviction", frozen]
    assert generate.main(arguments) == 2
    assert "say with --question what comes after the prompt" in capsys.readouterr().err
    text = generate.generate(str(ckpt), CONTEXTS[2], 6, eviction=eviction.parse(frozen), question="#get ab=")
    _, new = by_hand(model, tokenizer, eviction.parse(frozen), CONTEXTS[2], "#get ab=", 6)
    assert text == tokenizer.decode(new, skip_special_tokens=True)
    assert generate.main([*arguments, "--question", "#get ab="]) == 0


def test_the_measured_saving_is_of_the_evicted_context(model):
    method = eviction.parse("snapkv:budget=64,window=8,query_aware=false")
    ids = torch.randint(3, 259, (1, 300), generator=torch.Generator().manual_seed(0))
    cache = pod.PodCache(model.config, eviction=method)
    measured = models.measured_saving(model, ids, cache, question=10)
    assert measured["tokens"] == 300
    kept = cache.positions(0)
    assert ((kept >= 0) & (kept < 290)).sum(-1).max() == 64 and ((kept >= 290).sum(-1) == 10).all()
