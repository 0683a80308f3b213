"""Eviction methods in the evaluation scripts: the caches, where results go, streams in bounded memory."""

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
from scripts import TEXT, save, script, tiny_llama
from torch import nn

import pod
from pod import eviction
from pod.evaluation import models, passkey, runner
from pod.evaluation.perplexity import perplexity

STORY = "The old clock had stopped. Nobody knew why or when. They left it as it was. "
SNAPKV = "snapkv:budget=48,window=8"
H2O = "h2o:budget=48"


# ---------------------------------------------------------------------- names, models, command lines


@pytest.mark.parametrize(
    "text",
    [
        SNAPKV,
        "snapkv:budget=48,pooling=avg",
        "h2o:budget=9,recent=3",
        "tova:budget=7,query_aware=false",
        "cake:budget=64,gamma=5.5",
        "streamingllm:budget=9,positions=absolute",
        "cascade:budget=14,sinks=2,num_cascades=3,head_reduction=mean",
        "cascade:budget=96,stride=7",
        "snapkv:budget=0.25,window=8",
        "adakv:budget=64,normalize=true",
        "cake*snapkv:budget=48,query_aware=false,tau1=1.6",
        "adakv*cake:budget=0.5,window=8,alpha=0.5,gamma=5.5",
    ],
)
def test_a_methods_text_reads_back(text):
    method = eviction.parse(text)
    name, _, settings = eviction.unparse(method).partition(":")
    assert name == text.partition(":")[0]
    assert set(settings.split(",")) == set(text.partition(":")[2].split(","))
    assert eviction.parse(eviction.unparse(method)) == method


def test_defaults_are_left_out_and_a_nameless_method_is_refused():
    assert eviction.unparse(eviction.parse("snapkv:window=32,budget=256,kernel_size=7")) == "snapkv:budget=256"
    assert eviction.unparse(eviction.Combined(64, eviction.SnapKV(64), eviction.CAKE(64))) == "cake*snapkv:budget=64"
    apart = eviction.Combined(64, eviction.SnapKV(64, kernel_size=3), eviction.CAKE(64))
    with pytest.raises(ValueError, match="has no text: its parts have other values of kernel_size"):
        eviction.unparse(apart)


def test_every_hyper_parameter_is_described_and_read_back():
    for text in ["snapkv:budget=64", "cascade:budget=0.25", "cake*snapkv:budget=64", "h2o:budget=9", "quest:budget=64"]:
        method = eviction.parse(text)
        saved = eviction.hyper_parameters(method)
        assert json.loads(json.dumps(saved)) == saved and eviction.of_hyper_parameters(saved) == method
    assert eviction.hyper_parameters(eviction.StreamingLLM(64)) == {
        "method": "StreamingLLM", "budget": 64, "sinks": 4, "positions": "cache", "stride": None,
    }  # fmt: skip
    apart = eviction.Combined(64, eviction.SnapKV(64, kernel_size=3), eviction.CAKE(64))
    assert eviction.of_hyper_parameters(eviction.hyper_parameters(apart)) == apart
    saved = eviction.hyper_parameters(eviction.SnapKV(64))
    for wrong, message in [
        ({**saved, "method": "SnapKW"}, "unknown eviction method 'SnapKW'; did you mean 'SnapKV'"),
        ({name: value for name, value in saved.items() if name != "pooling"}, "hyper-parameter pooling is not saved"),
        ({**saved, "depth": 3}, "hyper-parameter depth is saved, and this library does not know it"),
    ]:
        with pytest.raises(ValueError, match=message):
            eviction.of_hyper_parameters(wrong)


def test_two_methods_are_combined_by_their_text():
    """The first allocates, the second scores; what is given goes to the parts that have it."""
    assert eviction.parse("cake*snapkv:budget=64,window=8,pooling=avg,gamma=3") == eviction.Combined(
        64, eviction.SnapKV(64, window=8, pooling="avg"), eviction.CAKE(64, window=8, gamma=3.0)
    )
    assert eviction.parse_all("CAKE * h2o:budget=0.5,recent=32+tova:budget=9") == [
        eviction.Combined(0.5, eviction.H2O(0.5, recent=32), eviction.CAKE(0.5)), eviction.TOVA(9),
    ]  # fmt: skip
    for text, message in [
        ("cake*snapvk:budget=64", "unknown eviction method 'snapvk'; did you mean 'snapkv'"),
        ("cake*snapkv:budget=64,beta=3", "no parameter 'beta'"),
        ("cake*snapkv", "budget is missing, e.g. cake.snapkv:budget=256"),
        ("cake*cascade:budget=96", "combines two methods, and none that organises storage"),
        ("cake*snapkv*tova:budget=64", "combines two methods"),
        ("pyramidkv*snapkv:budget=64", "SnapKV always keeps 32 last tokens and PyramidKV 8: give both the same window"),
        ("cake*:budget=64", "unknown eviction method ''"),
    ]:
        with pytest.raises(ValueError, match=message):
            eviction.parse(text)


def test_searched_values_are_presets():
    assert eviction.CAKE(64).tau1 == eviction.CAKE(64).tau2 == 1.0
    assert eviction.parse("cake:budget=128,preset=llama-3.1-8b-128") == eviction.CAKE(128, tau1=1.6, tau2=0.6)
    assert eviction.CAKE(1024, **eviction.CAKE.PRESETS["llama-3.1-8b-1024"]) == eviction.CAKE(1024, tau1=1.6, tau2=0.4)
    # What is kept are the values, whatever the name means later.
    assert "tau1=1.6,tau2=0.6" in eviction.unparse(eviction.parse("cake*snapkv:preset=llama-3.1-8b-128,budget=128"))
    assert "preset=llama-3.1-8b-1024: tau1=1.6,tau2=0.4" in eviction.describe()
    for text, message in [
        ("cake:budget=128,preset=llama-3.1-8b", "cake has no preset 'llama-3.1-8b'; did you mean 'llama-3.1-8b-128'"),
        ("snapkv:budget=128,preset=llama-3.1-8b-128", "snapkv has no parameter 'preset'"),
        ("cake:budget=128,tau2=1,preset=llama-3.1-8b-128", "tau2 is given twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            eviction.parse(text)


def test_a_dense_model_stays_itself_and_is_converted_on_the_same_weights(dense, model):
    plain, evicting = models.variants(dense, eviction.parse_all(SNAPKV))
    assert plain.model is dense and plain.name == "none" and plain.cache_factory is None
    assert evicting.model.config.blocks.is_dense
    assert evicting.model.lm_head.weight.data_ptr() == dense.lm_head.weight.data_ptr()
    first, second = (evicting.cache_factory(evicting.model) for _ in range(2))
    assert first is not second and first.eviction == eviction.SnapKV(48, window=8)
    assert models.as_pod(model) is model
    assert plain.folder(Path("out")) == Path("out")
    assert evicting.folder(Path("out")) == Path("out/snapkv-budget=48,window=8")


def test_variants_that_cannot_be(model):
    with pytest.raises(ValueError, match="snapkv:budget=64 is named twice"):
        models.variants(model, eviction.parse_all("snapkv:budget=64+snapkv:window=32,budget=64"))
    with pytest.raises(ValueError, match="budget"):  # the model's 2 sinks come on top of the window
        models.variants(model, eviction.parse_all("snapkv:budget=8,window=8"))


@pytest.mark.parametrize("name", ["passkey", "perplexity", "longbench", "ruler", "needle", "memory", "trade_off"])
def test_every_script_lists_the_methods_and_names_the_closest(name, capsys):
    with pytest.raises(SystemExit) as ended:
        script(f"eval/{name}.py").main(["--methods" if name == "trade_off" else "--eviction", "list"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == eviction.describe() + "\n"
    if name == "trade_off":  # methods get their budgets later
        return
    model = "--model" if name == "memory" else "--ckpt"
    for methods, message in [
        (f"{SNAPKV}+snapvk:budget=4", "did you mean 'snapkv'"),
        (f"{SNAPKV}+", "no method stands before or after a +"),
    ]:
        with pytest.raises(SystemExit) as ended:
            script(f"eval/{name}.py").main([model, "x", "--eviction", methods])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- pass keys


def test_passkey_rows_by_checkpoint_and_method(ckpt, dense_ckpt, text, tmp_path, capsys, monkeypatch):
    used = []

    def generate(model, ids, count, question, cache, tokenizer):
        new = plain(model, ids, count, question, cache, tokenizer)
        used.append((hasattr(model.config, "share"), cache))
        return new

    plain = passkey.generate_greedily
    monkeypatch.setattr(passkey, "generate_greedily", generate)
    arguments = ["--ckpt", str(ckpt), str(dense_ckpt), "--lengths", "150", "--depths", "2", "--samples", "2"]
    arguments += ["--batch-size", "3", "--text", str(text), "--out", str(tmp_path), "--eviction", f"{SNAPKV}+{H2O}"]
    assert passkey.main(arguments) == 0
    # Two batches for each of none, SnapKV, H2O, and for each of two checkpoints; a cache is never used twice.
    assert [(is_pod, cache and type(cache.eviction).__name__) for is_pod, cache in used] == [
        (is_pod or bool(method), method)
        for is_pod in (True, False)
        for method in (None, "SnapKV", "H2O")
        for _ in range(2)
    ]
    caches = [cache for _, cache in used if cache is not None]
    assert len(set(map(id, caches))) == 8
    assert all(int((cache.positions(0) >= 0).sum(-1).max()) <= 48 + 7 for cache in caches)
    result = json.loads((tmp_path / "passkey.json").read_text())
    assert result["parameters"][H2O] == {"method": "H2O", "budget": 48, "query_aware": True, "recent": None}
    found = result["models"]
    assert {name: list(values) for name, values in found.items()} == {
        str(one): ["none", SNAPKV, H2O] for one in (ckpt, dense_ckpt)
    }
    assert (tmp_path / "passkey.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert f"| dense, {SNAPKV} " in printed and "| tiny  " in printed


# ---------------------------------------------------------------------- streams


METHODS = [
    SNAPKV,
    H2O,
    "tova:budget=48",
    "cake:budget=48,window=8",
    "streamingllm:budget=48,sinks=4",
    "cascade:budget=48,sinks=8",
    "cascade:budget=48,sinks=8,stride=5",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_dense", [True, False])
def test_a_stream_has_the_loss_of_a_plain_loop(method, is_dense, dense, model):
    chosen = models.as_pod(dense) if is_dense else model
    ids = torch.randint(3, 259, (2, 131), generator=torch.Generator().manual_seed(5))
    cache, nats = pod.PodCache(chosen.config, eviction=eviction.parse(method)), 0.0
    with torch.no_grad():
        for start in range(0, 130, 16):
            part = ids[:, start : min(start + 16, 130)]
            logits = chosen(part, past_key_values=cache).logits.double()
            for row in range(2):
                for place in range(part.shape[1]):
                    nats -= float(logits[row, place].log_softmax(-1)[ids[row, start + place + 1]])
    (variant,) = models.variants(chosen, [eviction.parse(method)])[1:]
    result = perplexity(chosen, [ids], stream=16, new_cache=lambda: variant.cache_factory(chosen))
    assert float(result.nats.sum()) == pytest.approx(nats, rel=1e-5)
    whole = perplexity(chosen, [ids])
    assert abs(whole.loss - result.loss) > 1e-4  # something was evicted


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_over_a_stream(method, model, monkeypatch):
    monkeypatch.setattr("pod.evaluation.perplexity.POSITIONS", 24)
    cache = pod.PodCache(model.config, eviction=eviction.parse(method))
    sizes, logits = [], []

    def counted(module, args, output):
        logits.append(output.shape[:-1].numel())

    def measured(module, args, kwargs, output):
        assert output.last_hidden_state.shape[1] <= 16
        if kwargs["use_cache"]:
            sizes.append((cache.nbytes(), sum(one.untyped_storage().nbytes() for one in cache.storages())))

    hooks = [
        model.lm_head.register_forward_hook(counted),
        model.base_model.register_forward_hook(measured, with_kwargs=True),
    ]
    ids = torch.randint(3, 259, (2, 641), generator=torch.Generator().manual_seed(6))
    try:
        perplexity(model, [ids], stream=16, new_cache=lambda: cache)
    finally:
        for hook in hooks:
            hook.remove()
    assert cache.get_seq_length() == 640 and len(sizes) == 40
    assert all(claimed == real for claimed, real in sizes)
    # Ragged heads hold now a few of their own recent keys more, now fewer; a trend there must not be.
    settled = [size for size, _ in sizes[5:]]
    if method.startswith(("streamingllm", "cascade", "h2o", "tova")):
        assert len(set(settled)) == 1
    assert max(settled) <= 1.1 * min(settled)
    assert max(settled[18:]) <= 1.02 * max(settled[:18])
    # Before the text, whether the model scales its logits is asked of eight tokens, in two ways.
    assert logits[:2] == [8, 8] and max(logits) <= 24 and sum(logits[2:]) == 2 * 640


@pytest.mark.slow
def test_perplexity_script_streams_whole_files(dense_ckpt, text, tmp_path, capsys):
    perplexity_script = script("eval/perplexity.py")
    other = tmp_path / "other.py"
    other.write_text(TEXT[:301])
    methods = "streamingllm:budget=32+cascade:budget=32,sinks=8"
    arguments = ["--ckpt", str(dense_ckpt), "--text", str(other), str(text), "--out", str(tmp_path / "out")]
    arguments += ["--length", "all", "--stream", "50", "--eviction", methods]
    assert perplexity_script.main([*arguments, "--evicting-only"]) == 0
    result = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    (found,) = result["models"].values()
    assert list(found) == list(result["parameters"]) == ["streamingllm:budget=32", "cascade:budget=32,sinks=8"]
    assert all(set(one) == {"method", *vars(eviction.parse(name))} for name, one in result["parameters"].items())
    assert all(one["tokens"] == 300 + len(TEXT) - 1 for one in found.values())
    assert perplexity_script.main([*arguments, "--limit", "1"]) == 0
    (found,) = json.loads((tmp_path / "out" / "perplexity.json").read_text())["models"].values()
    assert list(found) == ["none", "streamingllm:budget=32", "cascade:budget=32,sinks=8"]
    assert len({one["loss"] for one in found.values()}) == 3
    # Without eviction it is the stock model's own loss.
    ids = torch.tensor(list(TEXT[:301].encode()))[None] + 3
    logits = tiny_llama(seed=3)(ids).logits[0, :-1].detach().double()
    assert found["none"]["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, ids[0, 1:])), rel=1e-5)
    assert found["none"]["bits_per_byte"] == pytest.approx(found["none"]["loss"] / math.log(2))
    assert "| dense, cascade:budget=32,sinks=8 |" in capsys.readouterr().out
    assert perplexity_script.main([*arguments[:-1], "snapkv:budget=0.25"]) == 2
    assert "snapkv:budget=0.25: a streamed text has no prompt to keep a share of" in capsys.readouterr().err
    assert perplexity_script.main([*arguments[:5], "--eviction", methods]) == 2
    assert "--eviction needs --stream N" in capsys.readouterr().err
    assert perplexity_script.main([*arguments[:5], "--stream", "5", "--evicting-only"]) == 2
    assert "--evicting-only needs --eviction" in capsys.readouterr().err


# ---------------------------------------------------------------------- benchmarks of generated text


def benchmark(name, folder):
    """(main, arguments without --ckpt and --out, the set's name) of a benchmark of one prompt, its data in a folder."""
    story, data = folder / "story.txt", folder / "data"
    story.write_text(STORY * 20)
    data.mkdir()
    sample = {
        "context": STORY * 4,
        "input": "why?",
        "answers": ["clock"],
        "all_classes": None,
        "length": 60,
        "_id": "a",
    }
    (data / "hotpotqa.jsonl").write_text(json.dumps(sample) + "\n")
    runs = {
        "needle": (["--haystack", str(story), "--min-length", "420", "--max-length", "420", "--steps", "1"], "needle"),
        "ruler": (["--tasks", "niah_single_1", "--lengths", "480", "--samples", "1"], "niah_single_1-480"),
        "longbench": (["--tasks", "hotpotqa", "--data", str(data), "--max-length", "200"], "hotpotqa"),
    }
    return script(f"eval/{name}.py").main, *runs[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["needle", "ruler", "longbench"])
def test_a_folder_for_each_method(name, ckpt, model, tokenizer, tmp_path, capsys, monkeypatch):
    main, more, set_ = benchmark(name, tmp_path)
    out = tmp_path / name
    arguments = ["--ckpt", str(ckpt), "--out", str(out), *more]
    assert main(arguments) == 0
    plain = (out / f"{set_}.jsonl").read_bytes()
    made = []
    generate = runner._generate

    def counted(model, tokenizer, batch, cache_factory):
        texts = generate(model, tokenizer, batch, cache_factory)
        made.append((batch[0], cache_factory, texts))
        return texts

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_generate", counted)
        assert main([*arguments, "--eviction", f"{SNAPKV}+{H2O}"]) == 0
        # What had been predicted without eviction is not made again, nor is anything in a second run.
        assert len(made) == 2
        assert main([*arguments, "--eviction", f"{SNAPKV}+{H2O}"]) == 0
        assert len(made) == 2
    assert (out / f"{set_}.jsonl").read_bytes() == plain
    assert "eviction" not in json.loads((out / "settings.json").read_text())
    for method, (prompt, _, texts) in zip((SNAPKV, H2O), made, strict=True):
        ids, request = prompt.ids, prompt.request
        folder = out / method.replace(":", "-")
        assert json.loads((folder / "settings.json").read_text())["eviction"] == method
        assert (folder / "scores.json").exists()
        (row,) = [json.loads(line) for line in (folder / f"{set_}.jsonl").read_text().splitlines()]
        # The same tokens as a plain loop with that cache.
        cache, new, given = pod.PodCache(model.config, eviction=eviction.parse(method)), [], torch.tensor([ids])
        with torch.no_grad():
            while len(new) < request.max_new_tokens and 1 not in new:
                given = model(given, past_key_values=cache).logits[:, -1:].argmax(-1)
                new.append(int(given))
        assert row["pred"] == texts[0] == tokenizer.decode(new, skip_special_tokens=True)
    compared = (out / "comparison.md").read_text()
    assert SNAPKV in compared and H2O in compared and "none" in compared
    assert compared.strip() in capsys.readouterr().out


def changed(file, **fields):
    """The file's JSON with other fields; None takes one out."""
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize("name", ["needle", "ruler", "longbench"])
def test_predictions_of_other_weights_or_hyper_parameters_are_not_taken(name, tmp_path, capsys, monkeypatch):
    main, more, _ = benchmark(name, tmp_path)
    out, base = tmp_path / "out", tmp_path / "model"
    arguments = ["--ckpt", str(save(tiny_llama(), base)), "--out", str(out), *more, "--eviction", SNAPKV]
    plain, evicted = out / "settings.json", out / SNAPKV.replace(":", "-") / "settings.json"
    assert main(arguments) == 0
    wanted = {"method": "SnapKV", "budget": 48, "query_aware": True, "window": 8, "kernel_size": 7, "pooling": "max"}
    found = json.loads(evicted.read_text())
    assert found["parameters"] == wanted and found["weights"] == json.loads(plain.read_text())["weights"]
    files = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    def refused(*words):
        capsys.readouterr()
        assert main(arguments) == 2
        said = capsys.readouterr().err
        for word in (*words, "choose another --out, or remove the folder"):
            assert word in said
        for file, content in files.items():
            file.write_bytes(content)

    # Another default, as another version of the library may have; then what an earlier version wrote.
    changed(evicted, parameters=wanted | {"kernel_size": 5})
    refused(f"--out {evicted.parent} holds predictions with parameters", "'kernel_size': 5", "'kernel_size': 7")
    changed(evicted, parameters=None)
    refused(
        f"--out {evicted.parent} holds predictions with parameters None", "none is noted there, as by earlier versions"
    )
    changed(plain, weights=None)
    refused(f"--out {out} holds predictions with weights None", "none is noted there, as by earlier versions")
    monkeypatch.setattr(runner, "_generate", None)  # nothing is made again
    assert main(arguments) == 0
    save(tiny_llama(seed=1), base)
    refused(f"--out {out} holds predictions with weights '{found['weights']}', now it is '")


def test_score_only_takes_one_folder(tmp_path, capsys):
    assert script("eval/longbench.py").main(["--out", str(tmp_path), "--score-only", "--eviction", SNAPKV]) == 2
    assert "--score-only scores one folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["figures", "longbench", "passkey", "perplexity", "pg19", "ruler", "trade_off"])
def test_two_models_of_one_name_are_refused(name, capsys):
    # Rows of tables are told apart by it: the second's stood in the place of the first's.
    assert import_module(f"pod.evaluation.{name}").main(["--ckpt", "some/export", "other/export"]) == 2
    assert "--ckpt some/export other/export: two models of one name; run them into two --out" in capsys.readouterr().err
