"""PodCache.save and load: another process goes on from a file as this one does; damaged and foreign files are named."""

import copy
import json
import pickle
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cache import ANCHORS, DENSE, build, fed, left_padded, tokens
from transformers import LlamaConfig

import pod
from pod.eviction import CAKE, H2O, AdaKV, Cascade, Combined, CriticalKV, LMInfinite, Quest, SnapKV, StreamingLLM

CASES = {
    "plain": dict(),
    "allocated": dict(max_length=70, crop_slack=3),
    "tau": dict(tau=0.4),
    "snapkv": dict(eviction=SnapKV(16, window=4, query_aware=False), max_length=70),
    "adakv": dict(eviction=AdaKV(16, window=4)),
    "h2o": dict(eviction=H2O(16), max_length=70),
    "share": dict(eviction=H2O(0.4), max_length=70),
    "combined": dict(eviction=Combined(16, SnapKV(16, window=4, kernel_size=3), CAKE(16, window=4))),
    "cake": dict(eviction=CAKE(16, window=4)),
    "streaming": dict(eviction=StreamingLLM(12)),
    "lminfinite": dict(eviction=LMInfinite(12)),
    "cascade": dict(eviction=Cascade(20, sinks=4)),
    "cascade-share": dict(eviction=Cascade(0.5, sinks=4)),
    "quest": dict(eviction=Quest(8, page_size=4, dense_layers=1)),
}
MODELS = {
    "scores": ("llama", "scores", ANCHORS),
    "keys": ("qwen3", "keys", ANCHORS),
    "dense": ("llama", "scores", DENSE),
}
PAIRS = [(name, case) for name in MODELS for case in CASES if name == "scores" or case in ("plain", "snapkv", "quest")]
CHILD = """
import json, sys
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
import pod

torch.set_num_threads(1)
folder = Path(sys.argv[1])
inputs, found, facts = load_file(folder / "inputs"), {}, {}
for name in ("scores", "keys", "dense"):
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    for path in sorted(folder.glob(f"{name}-*.cache")):
        cache = pod.PodCache.load(path, model.config)
        held = cache.nbytes()
        out = model.generate(
            inputs["ids"], attention_mask=inputs["mask"], past_key_values=cache, max_new_tokens=8, do_sample=False,
            suppress_tokens=[0], output_logits=True, return_dict_in_generate=True,
        )
        found[path.stem + ".ids"], found[path.stem + ".logits"] = out.sequences, torch.stack(out.logits)
        facts[path.stem] = [held, cache.get_seq_length(), vars(cache.stats)]
save_file(found, folder / "found")
(folder / "facts").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Caches filled and saved here."""
    folder = tmp_path_factory.mktemp("caches")
    ids, mask = left_padded((41, 23))
    question = tokens(2, 4, seed=8)
    save_file(
        {"ids": torch.cat([ids, question], 1), "mask": torch.nn.functional.pad(mask, (0, 4), value=1)},
        folder / "inputs",
    )
    caches = {}
    for name, which in MODELS.items():
        model = build(*which)
        model.save_pretrained(folder / name)
        for case in (case for other, case in PAIRS if other == name):
            cache = caches[name, case] = pod.PodCache(model.config, **CASES[case])
            fed(model, cache, ids[:, :38], mask)
            fed(model, cache, ids[:, 38:], mask, (1, 1, 1))  # so that there are stats, holes and a ring
            cache.save(folder / f"{name}-{case}.cache")
    return folder, caches


@pytest.fixture(scope="module")
def elsewhere(written):
    """The caches, the inputs, and what one other process made of both."""
    folder, caches = written
    run = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (
        caches,
        load_file(folder / "inputs"),
        load_file(folder / "found"),
        json.loads((folder / "facts").read_text()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, case", PAIRS)
def test_another_process_goes_on_as_this_one(name, case, elsewhere):
    caches, inputs, found, facts = elsewhere
    model, cache = build(*MODELS[name]), copy.deepcopy(caches[name, case])
    held = cache.nbytes()
    options = dict(attention_mask=inputs["mask"], max_new_tokens=8, do_sample=False, suppress_tokens=[0])
    options |= dict(output_logits=True, return_dict_in_generate=True)
    out = model.generate(inputs["ids"], past_key_values=cache, **options)
    assert torch.equal(found[f"{name}-{case}.ids"], out.sequences)
    torch.testing.assert_close(found[f"{name}-{case}.logits"], torch.stack(out.logits), atol=1e-5, rtol=0)
    length, stats = facts[f"{name}-{case}"][1:]
    assert length == cache.get_seq_length() and stats == vars(cache.stats)
    if "max_length" in CASES[case] or case in ("streaming", "lminfinite", "cascade", "cascade-share"):
        assert facts[f"{name}-{case}"][0] == held
    else:  # grown capacity that holds nothing is not loaded again
        assert facts[f"{name}-{case}"][0] <= held


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_is_cropped_reordered_and_saved_as_the_original(case, written, tmp_path):
    folder, caches = written
    model, one = build(*MODELS["scores"]), copy.deepcopy(caches["scores", case])
    other = pod.PodCache.load(folder / f"scores-{case}.cache", model.config)
    for layer in range(5):
        assert torch.equal(one.positions(layer), other.positions(layer))
    mask = left_padded((41, 23))[1]
    for cache in (one, other):
        if cache.is_croppable:
            cache.crop(-2)
        cache.batch_select_indices(torch.tensor([1, 0, 0]))
    mask = torch.nn.functional.pad(mask[[1, 0, 0], : one.get_seq_length()], (0, 6), value=1)
    new = tokens(3, 6, seed=2)
    expected = fed(model, one, new, mask, (4, 1, 1))
    other.save(tmp_path / "again")
    again = pod.PodCache.load(tmp_path / "again", model.config)
    for cache in (other, again):
        torch.testing.assert_close(fed(model, cache, new, mask, (4, 1, 1)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [*CASES, "critical"])
def test_a_pickle_goes_on_as_the_cache(case):
    """A view that was kept of a tensor became one of its own, and what was written to one was not in the other."""
    model, (ids, mask) = build(), left_padded((21, 9))
    cache = pod.PodCache(model.config, **(CASES | {"critical": {"eviction": CriticalKV(16, window=4)}})[case])
    fed(model, cache, ids, mask)
    fed(model, cache, tokens(2, 1))
    other = pickle.loads(pickle.dumps(cache))
    for count in (1, 3, 1):
        new = tokens(2, count, seed=count)
        assert torch.equal(fed(model, other, new), fed(model, cache, new))
    for layer in range(5):
        assert torch.equal(other.positions(layer), cache.positions(layer))


def test_half_precision_and_the_window_model(tmp_path):
    window = pod.convert(build(anchors=DENSE), pod.LayerBlocks.dense(5, 2), sink_size=2, recent_size=6, share="window")
    half = type(window)(copy.deepcopy(build().config)).to(torch.bfloat16).eval()
    for model in (window, half):
        cache = pod.PodCache(model.config)
        fed(model, cache, tokens(1, 20))
        cache.save(tmp_path / "deep" / "cache")
        loaded = pod.PodCache.load(tmp_path / "deep" / "cache", model.config)
        assert {s.dtype for s in loaded.storages() if s.is_floating_point()} == {model.dtype}
        assert torch.equal(fed(model, loaded, tokens(1, 1)), fed(model, cache, tokens(1, 1)))


def test_damaged_and_foreign_files_are_named(written, tmp_path):
    folder, config = written[0], build().config
    whole = (folder / "scores-snapkv.cache").read_bytes()
    path = tmp_path / "cache"
    for size in (0, 5, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cache: not a whole safetensors file"):
            pod.PodCache.load(path, config)
    with pytest.raises(FileNotFoundError, match="nowhere: no such cache file"):
        pod.PodCache.load(tmp_path / "nowhere", config)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not a cache that PodCache.save wrote"):
        pod.PodCache.load(path, config)
    # Whole, but of other tensors than the metadata says.
    for name, change in {"layers.1.values": lambda t: t[:-1], "tables.0.slots": None}.items():
        tensors = load_file(folder / "scores-snapkv.cache")
        with pod.cache.file.safe_open(folder / "scores-snapkv.cache", "pt") as file:
            metadata = file.metadata()
        changed = {key: t for key, t in tensors.items() if key != name} | (
            {name: change(tensors[name])} if change else {}
        )
        save_file(changed, path, metadata=metadata)
        with pytest.raises(ValueError, match="cache is damaged: its bytes do not give the checksum"):
            pod.PodCache.load(path, config)
        crc32 = pod.cache.file.checksum(changed, metadata["content"])
        save_file(changed, path, metadata=metadata | {"crc32": crc32})
        with pytest.raises(ValueError, match="cache: the tensors are not those that the metadata describes"):
            pod.PodCache.load(path, config)
    save_file(tensors, path, metadata=metadata | {"content": "{"})
    with pytest.raises(ValueError, match="cache: the metadata is damaged"):
        pod.PodCache.load(path, config)
    for version in (1, 2, 3, 9):
        content = json.loads(metadata["content"]) | {"version": version}
        save_file(tensors, path, metadata=metadata | {"content": json.dumps(content)})
        with pytest.raises(ValueError, match=f"version is {version}, this library reads version 4"):
            pod.PodCache.load(path, config)
    with pytest.raises(ValueError, match="a cache of a PoD model, and the given config is a LlamaConfig, of a dense"):
        pod.PodCache.load(folder / "scores-snapkv.cache", LlamaConfig())


@pytest.mark.parametrize("case", ["scores-plain", "scores-snapkv", "scores-quest"])
def test_no_flipped_bit_is_loaded(case, written, tmp_path):
    """Anywhere behind the header each is noticed; in it, noticed or of no consequence."""
    folder, config = written[0], build().config
    whole = bytearray((folder / f"{case}.cache").read_bytes())
    tensors = load_file(folder / f"{case}.cache")
    header, chance = 8 + int.from_bytes(whole[:8], "little"), random.Random(0)
    places = [chance.randrange(header, len(whole)) for _ in range(30)] + [chance.randrange(header) for _ in range(60)]
    for place in (*places, header, len(whole) - 1):
        bit = 1 << chance.randrange(8)
        whole[place] ^= bit
        (tmp_path / "cache").write_bytes(whole)
        whole[place] ^= bit
        try:
            pod.PodCache.load(tmp_path / "cache", config)
        except ValueError as error:
            assert str(tmp_path / "cache") in str(error)
            continue
        assert place < header
        found = load_file(tmp_path / "cache")
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    "other, message",
    [
        (dict(anchors=DENSE), "with anchors = .* the model's config has"),
        (dict(recent=9), "with recent_size = 8, the model's config has 9"),
        (dict(share="keys"), 'with share = "scores", the model\'s config has "keys"'),
        (dict(family="qwen3"), 'with model_type = "pod_llama", the model\'s config has "pod_qwen3"'),
    ],
    ids=str,
)
def test_another_config_is_named(other, message, written):
    with pytest.raises(ValueError, match=message):
        pod.PodCache.load(written[0] / "scores-plain.cache", build(**other).config)


def test_another_rope_is_named(written):
    config = copy.deepcopy(build().config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ValueError, match="rope_parameters = .*10000.*the model's config has .*500000"):
        pod.PodCache.load(written[0] / "scores-plain.cache", config)


def test_what_cannot_be_saved_and_a_failing_disk(tmp_path, monkeypatch):
    model = build()
    cache = pod.PodCache(model.config)
    with pytest.raises(ValueError, match="saved when it holds tokens"):
        cache.save(tmp_path / "cache")
    with cache.prefill():
        fed(model, cache, tokens(1, 9))
        with pytest.raises(ValueError, match="outside cache.prefill"):
            cache.save(tmp_path / "cache")
    cache.save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    fed(model, cache, tokens(1, 3))

    def full(tensors, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pod.cache.file, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        cache.save(tmp_path / "cache")
    assert (tmp_path / "cache").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["cache"]
    other = pod.PodCache(model.config, eviction=OwnMethod(16))
    fed(model, other, tokens(1, 30))
    with pytest.raises(ValueError, match="OwnMethod.* has no text; there are snapkv"):
        other.save(tmp_path / "other")


class OwnMethod(H2O):
    """A user's."""


def test_a_default_that_changes_changes_no_saved_cache(tmp_path, monkeypatch):
    model, method = build(), SnapKV(64)
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, tokens(1, 20))
    cache.save(tmp_path / "cache")
    monkeypatch.setattr(SnapKV.__init__, "__defaults__", (16, 3, "avg"))
    assert SnapKV(64) != method == SnapKV(64, window=32, kernel_size=7, pooling="max")
    loaded = pod.PodCache.load(tmp_path / "cache", model.config)
    assert loaded.eviction == method
    with pod.cache.file.safe_open(tmp_path / "cache", "pt") as file:
        metadata = file.metadata()
    content = json.loads(metadata["content"])
    del content["facts"]["eviction"]["pooling"]
    content, tensors = json.dumps(content), load_file(tmp_path / "cache")
    crc32 = pod.cache.file.checksum(tensors, content)
    save_file(tensors, tmp_path / "cache", metadata=metadata | {"content": content, "crc32": crc32})
    with pytest.raises(ValueError, match="cache: SnapKV: the hyper-parameter pooling is not saved"):
        pod.PodCache.load(tmp_path / "cache", model.config)


def broken_off(model, cache, ids):
    """A forward that fails in a middle layer."""

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fed(model, cache, ids)
    handle.remove()


@pytest.mark.parametrize("method", [None, SnapKV(16, window=4), H2O(16)])
@pytest.mark.parametrize("where", ["in a file", "in other rows"])
def test_what_a_failed_forward_left_goes_nowhere(tmp_path, method, where):
    model = build()
    cache = pod.PodCache(model.config, eviction=method)
    fed(model, cache, tokens(3, 30))
    expected = copy.deepcopy(cache)
    broken_off(model, cache, tokens(3, 1, seed=9))
    rows = torch.tensor([2, 0])
    if where == "in a file":
        cache.save(tmp_path / "cache")
        cache = pod.PodCache.load(tmp_path / "cache", model.config)
    else:
        cache.batch_select_indices(rows)
        expected.batch_select_indices(rows)
    ids = tokens(cache.batch_size, 6, seed=5)
    torch.testing.assert_close(fed(model, cache, ids), fed(model, expected, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [dict(quantization=pod.Quantization(8, group=4, residual=64)), dict(eviction=StreamingLLM(12))]
)
def test_a_cache_that_a_failed_forward_broke_is_not_saved(tmp_path, options):
    model = build()
    cache = pod.PodCache(model.config, **options)
    fed(model, cache, tokens(2, 30))
    broken_off(model, cache, tokens(2, 1))
    with pytest.raises(ValueError, match="broke off.*call cache.reset"):
        cache.save(tmp_path / "cache")


@pytest.mark.parametrize("method", [None, SnapKV(16, window=4), StreamingLLM(12), StreamingLLM(0.5), Quest(16)])
@pytest.mark.parametrize("how", ["broke off", "refused"])
def test_after_a_first_forward_that_was_not_the_cache_is_empty(tmp_path, method, how):
    model = build()
    cache = pod.PodCache(model.config, eviction=method)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    if how == "broke off":
        broken_off(model, cache, ids)
    else:
        mask[1, -1] = 0
        with pytest.raises(ValueError, match="padding after its first real token"):
            fed(model, cache, ids, mask)
    copied = copy.deepcopy(cache)
    copied.batch_select_indices(torch.tensor([1]))
    copied.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="a cache is saved when it holds tokens"):
        cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.positions(0)
    with pytest.raises(ValueError, match="for a cache that holds tokens"), cache.peek():
        pass
    assert cache.batch_size == copied.batch_size == -1 and not cache.is_initialized
    for each in (cache, copied):
        assert fed(model, each, tokens(3, 5)).shape[0] == each.batch_size == 3
