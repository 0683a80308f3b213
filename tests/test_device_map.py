"""Device maps of PoD models: borders between devices lie only where all blocks end."""

import copy

import accelerate
import pytest
import torch
from test_model import converted, tiny_model, tokens
from transformers import AutoModelForCausalLM
from transformers.integrations.accelerate import _get_device_map

import pod
from pod.model.placement import GivenMap, check_spread_cache, place

ENDING = pod.LayerBlocks([[0, 0], [0, 0], [0, 2], [3, 3], [3, 3], [5, 5]])  # borders behind 2 and 4
ONE = pod.LayerBlocks([[0, 0]] * 6)
SHARES = ("scores", "keys", "kv")


def model_of(blocks=ENDING, share="scores", family="llama"):
    return converted(tiny_model(family, num_hidden_layers=6), blocks, share=share)


def computed(model, cut: int, layers: str = "model.layers") -> dict:
    """A map as transformers computes it, with its border behind the layer `cut`."""
    device_map = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1}
    return device_map | {f"{layers}.{layer}": int(layer > cut) for layer in range(6)}


def borders_of(device_map: dict) -> list[int]:
    placed = [device_map[f"model.layers.{layer}"] for layer in range(6)]
    return [layer for layer in range(5) if placed[layer] != placed[layer + 1]]


def test_borders():
    assert ENDING.layout().borders == [2, 4]
    assert ONE.layout().borders == []
    assert pod.LayerBlocks.dense(4, 2).layout().borders == [0, 1, 2]
    streaming = pod.LayerBlocks([[0, -1], [0, -1], [2, -1]])
    assert streaming.layout().borders == [1]


@pytest.mark.parametrize(("cut", "moved"), [(0, 2), (1, 2), (2, 2), (3, 2), (4, 4)])
def test_a_computed_border_moves_to_the_nearest_place(cut, moved):
    device_map = computed(model_of(), cut)
    place(model_of(), device_map)
    assert borders_of(device_map) == [moved]
    assert device_map["model.embed_tokens"] == 0 and device_map["lm_head"] == 1


def test_three_devices_and_parts_of_layers():
    device_map = {f"model.layers.{layer}": device for layer, device in enumerate((0, 0, 1, 2, 2, 2))}
    place(model_of(), device_map)
    assert [device_map[f"model.layers.{layer}"] for layer in range(6)] == [0, 0, 0, 2, 2, 2]
    device_map = {f"model.layers.{layer}": device for layer, device in enumerate((0, 1, 1, 1, "cpu", "disk"))}
    place(model_of(), device_map)  # what is offloaded runs on 0
    assert [device_map[f"model.layers.{layer}"] for layer in range(6)] == [0, 0, 0, "cpu", "cpu", "disk"]


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_given_map_that_cuts_a_block_is_refused(cut, tmp_path):
    model = model_of()
    message = rf"layer {cut} on 0 and layer {cut + 1} on 1, .*ends the blocks of all KV heads, here \[2, 4\]\..*'auto'"
    with pytest.raises(ValueError, match=message):
        place(model, GivenMap(computed(model, cut)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):  # before anything is loaded
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=computed(model, cut))
    for legal in (2, 4):
        given = GivenMap(computed(model, legal))
        place(model, given)
        assert given == computed(model, legal)


def test_one_block_of_all_layers_has_no_place_for_a_border():
    for given in (dict, GivenMap):
        with pytest.raises(ValueError, match=r"in no layer but the last .*device_map=\{'': 0\}"):
            place(model_of(ONE), given(computed(None, 2)))
    place(model_of(ONE), {"": 0})
    place(model_of(ONE), {"model": 0, "lm_head": "cpu"})  # which runs on 0


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("kind", ["auto", "balanced", "sequential"])
def test_transformers_computes_maps_of_whole_layers(family, kind):
    model = model_of(family=family)
    size = sum(parameter.nbytes for parameter in model.parameters())
    device_map = _get_device_map(model, kind, {0: size * 2 // 3, 1: size * 2, "cpu": size * 4}, None)
    assert set(device_map.values()) == {0, 1}
    assert not any("self_attn" in name or "mlp" in name for name in device_map)
    place(model, device_map)
    assert set(borders_of(device_map)) <= {2, 4} and borders_of(device_map)
    # accelerate's own, which a caller hands over by himself
    names = list(model._no_split_modules)
    theirs = accelerate.infer_auto_device_map(model, {0: size * 2 // 3, 1: size * 2}, no_split_module_classes=names)
    assert not any("self_attn" in name for name in theirs)


def test_loading_dispatches_by_the_map_that_was_changed(tmp_path, monkeypatch):
    """accelerate is given the moved borders, and the weights are read by them."""
    import transformers.modeling_utils as loading

    model, seen = model_of(), {}
    model.save_pretrained(tmp_path)
    two = {name: torch.device("meta" if device else "cpu") for name, device in computed(model, 1).items()}
    monkeypatch.setattr(loading, "_get_device_map", lambda *args: two)
    monkeypatch.setattr(
        loading, "accelerate_dispatch", lambda model, quantizer, device_map, *rest: seen.update(device_map)
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert borders_of(seen) == [2]
    assert [next(layer.parameters()).device.type for layer in loaded.model.layers] == ["cpu"] * 3 + ["meta"] * 3


def test_dispatched_models_are_checked_when_they_run():
    model = model_of()
    hook = accelerate.hooks.AlignDevicesHook
    for number, layer in enumerate(model.model.layers):
        accelerate.hooks.add_hook_to_module(layer, hook(execution_device="meta" if number > 1 else "cpu"))
    with pytest.raises(ValueError, match=r"layer 1 on cpu and layer 2 on meta.*here \[2, 4\]"):
        model(tokens(1, 9))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"eviction": pod.eviction.SnapKV(budget=48)}, "SnapKV"),
        ({"quantization": pod.Quantization(bits=8)}, "quantization"),
        ({"tau": 0.5}, "tau=0.5"),
    ],
)
def test_caches_of_one_device_are_refused(options, name):
    cache = pod.PodCache(model_of().config, **options)
    with pytest.raises(ValueError, match=rf"{name}.* works on one device, .*device_map=\{{'': 0\}}.* without it"):
        check_spread_cache(cache)
    check_spread_cache(pod.PodCache(model_of().config))


@pytest.mark.parametrize("share", SHARES)
def test_weights_on_two_places_of_one_device_answer_as_ever(share, tmp_path):
    model = model_of(share=share)
    model.save_pretrained(tmp_path)
    device_map = {name: "disk" if device else "cpu" for name, device in computed(model, 1).items()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "off")
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(
        loaded.generate(tokens(2, 29), **options), copy.deepcopy(model).generate(tokens(2, 29), **options)
    )


def test_load_takes_a_device_map(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layer 1 on 0 and layer 2 on 1"):
        pod.load(tmp_path, device_map=computed(model, 1))
    assert pod.load(tmp_path, device_map={"": "cpu"}).device.type == "cpu"
