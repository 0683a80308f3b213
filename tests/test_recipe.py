"""Recipes: every shipped one loads, every message says what was wrong, help is complete, files round-trip."""

import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pod.recipe import loading as recipe_loading
from pod.recipe.errors import RecipeError
from pod.recipe.loading import Setting, help_text, load_recipe, main_recipe, make_recipe, recipes, save, to_yaml
from pod.recipe.schema import (
    REQUIRED,
    Recipe,
    accumulate,
    data_parallel_size,
    output_folder,
    schema,
    sections,
    steps,
    warmup_steps,
)
from pod.recipe.sections import Model, Trainer

FOLDER = Path(__file__).resolve().parent.parent / "recipes"
SHIPPED = [
    "llama3-32k",
    "llama3-32k-cla-cpt",
    "llama3-32k-dense",
    "llama3-32k-wa-cpt",
    "llama31-128k",
    "smollm2",
    "tiny",
    "tiny-base",
]
SHARED = ["trainer.strategy=deepspeed", "trainer.sequence_parallel_size=3"]


@pytest.fixture(autouse=True)
def shipped_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_RECIPES", raising=False)


def tiny(*overrides: str):
    return load_recipe(["recipe=tiny", *overrides])


def refused(*overrides: str, recipe: str = "tiny") -> str:
    """The message of the RecipeError that these overrides give."""
    with pytest.raises(RecipeError) as caught:
        load_recipe([f"recipe={recipe}", *overrides])
    return str(caught.value)


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# The shipped recipes


def test_recipes_lists_all_with_descriptions():
    assert list(recipes()) == SHIPPED
    assert all(len(description) > 10 for description in recipes().values())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_loads(name):
    recipe = load_recipe([f"recipe={name}"])
    assert recipe.name == name
    assert output_folder(recipe) == Path("checkpoints") / name
    assert accumulate(recipe) >= 1
    assert 0 < warmup_steps(recipe.optimizer, recipe.trainer) < steps(recipe.trainer)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_key_is_there_and_commented(name):
    """Each line `key: value` carries a comment with the type and the default, or says that the key is required."""
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    given = {key for key in content if key not in sections()}
    given |= {f"{section}.{key}" for section in sections() for key in content[section]}
    assert given == set(schema())
    section = ""
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        assert len(line) <= 120
        if found := re.match(r"( {0,2})(\w+):(.*)$", line):
            section = section if found[1] else found[2]
            key = f"{section}.{found[2]}" if found[1] else found[2]
            if key in sections():
                continue
            comment = found[3].partition("  # ")[2]
            entry = schema()[key]
            if entry.default is REQUIRED:
                assert "required" in comment, line
                continue
            default = re.search(r"\bdefault ([^;:]*)", comment)[1]
            assert str(entry.default).lower().replace("none", "null") in (
                default.lower().replace("1e-5", "1e-05"),
                re.split(r"[ ,]", default)[0].lower(),
            ), line


def test_the_papers_numbers():
    dense, pod, long = (load_recipe([f"recipe={name}"]) for name in ("llama3-32k-dense", "llama3-32k", "llama31-128k"))
    assert dense.blocks.kv_saving == 0 and dense.model.rope_theta > 16e6
    assert [recipe.data.sequence_length for recipe in (dense, pod, long)] == [32768, 32768, 131072]
    for recipe in (dense, pod, long):
        assert recipe.trainer.max_tokens == 5_000_000_000 and recipe.trainer.tokens_per_batch == 4 * 2**20
        assert steps(recipe.trainer) == 1193 and recipe.optimizer.lr == 1e-5
    for recipe in (pod, long):
        assert (recipe.model.sink_size, recipe.model.recent_size, recipe.blocks.kv_saving) == (16, 4080, 0.35)
        assert (recipe.blocks.samples, recipe.blocks.last_q) == (1000, 16)


def test_tiny_window_is_an_eighth_of_the_context():
    recipe = tiny()
    assert 8 * (recipe.model.sink_size + recipe.model.recent_size) == recipe.data.sequence_length == 1024


# Overrides


def test_overrides_win_and_have_the_schemas_types():
    recipe = tiny(
        "trainer.max_steps=20",
        "optimizer.lr=1",
        "optimizer.betas=[0, 0.99]",
        "data.shuffle=false",
        "trainer.time_limit=12:00:00:00",
        "model.base='quoted'",
        "output=null",
        "trainer.max_steps=21",
    )
    assert recipe.trainer.max_steps == 21
    assert recipe.optimizer.lr == 1.0 and type(recipe.optimizer.lr) is float
    assert recipe.optimizer.betas == [0.0, 0.99]
    assert recipe.data.shuffle is False
    assert recipe.trainer.time_limit == "12:00:00:00"
    assert recipe.model.base == "quoted"
    assert recipe.output is None


def test_the_order_of_arguments_does_not_matter():
    assert load_recipe(["seed=3", "recipe=tiny"]) == load_recipe(["recipe=tiny", "seed=3"])


def test_overrides_reach_into_the_free_config():
    recipe = load_recipe(["recipe=tiny-base", "model.config.hidden_size=64", "model.config.rope.theta=1e4"])
    assert recipe.model.config["hidden_size"] == 64
    assert recipe.model.config["rope"] == {"theta": 10000.0}
    assert recipe.model.config["model_type"] == "llama"
    merged = load_recipe(["recipe=tiny-base", "model.config={hidden_size: 32}"])
    assert merged.model.config["hidden_size"] == 32 and merged.model.config["vocab_size"] == 259


def test_a_free_config_can_be_removed_and_added():
    recipe = load_recipe(
        ["recipe=tiny-base", "model.config=null", "model.base=somewhere", "model.initialization=transformers"]
    )
    assert recipe.model.config is None
    recipe = tiny("model.base=null", "model.tokenizer=bytes", "model.config.model_type=llama")
    assert recipe.model.config == {"model_type": "llama"}


@pytest.mark.parametrize("text", ["1e3", "1_000", "1000", "1000.0", "'1e3'", "+1E+3", "10e2"])
def test_ints_may_be_written_with_exponents(text):
    value = tiny(f"trainer.max_steps={text}").trainer.max_steps
    assert value == 1000 and type(value) is int


def test_exponents_in_a_file(tmp_path):
    text = (FOLDER / "tiny.yaml").read_text().replace("max_steps: 120", "max_steps: 1e3")
    assert tiny() != load_recipe([f"recipe={write(tmp_path, text)}"])
    assert load_recipe([f"recipe={write(tmp_path, text)}"]).trainer.max_steps == 1000


def test_sections_as_mappings_and_dotted_keys_in_files(tmp_path):
    assert tiny("trainer={max_steps: 3, log_every: 2}").trainer.log_every == 2
    path = write(tmp_path, (FOLDER / "tiny.yaml").read_text() + "trainer.log_every: 7\n")
    assert load_recipe([f"recipe={path}"]).trainer.log_every == 7


def test_only_required_keys(tmp_path):
    text = """
    name: short
    description: only what is required
    model:
      base: somewhere
    blocks:
    data: {path: data/x, sequence_length: 8192}
    trainer: {max_tokens: 1e6, tokens_per_batch: 16384}
    optimizer: {warmup_tokens: 20_000}
    """
    recipe = load_recipe([f"recipe={write(tmp_path, text)}"])
    assert recipe.model.recent_size == 4080 and recipe.optimizer.betas == [0.9, 0.95]
    assert steps(recipe.trainer) == 62 and accumulate(recipe) == 2
    assert warmup_steps(recipe.optimizer, recipe.trainer) == 2
    recipe.optimizer.warmup_tokens = None
    assert warmup_steps(recipe.optimizer, recipe.trainer) == 0
    recipe.output = "elsewhere"
    assert output_folder(recipe) == Path("elsewhere")


def test_defaults_are_not_shared_between_recipes():
    tiny().optimizer.betas.append(3)
    assert tiny().optimizer.betas == [0.9, 0.95]


# Where recipes are found


def test_recipe_by_path_and_folder(tmp_path, monkeypatch):
    assert load_recipe([f"recipe={FOLDER / 'tiny.yaml'}"]) == tiny()
    write(tmp_path, (FOLDER / "tiny.yaml").read_text(), "other.yaml")
    write(tmp_path, "a: [", "broken.yaml")
    monkeypatch.setenv("POD_RECIPES", str(tmp_path))
    assert load_recipe(["recipe=other"]) == load_recipe([f"recipe={tmp_path}/other.yaml"])
    assert list(recipes()) == ["broken", "other"] and "cannot be read" in recipes()["broken"]


def test_folder_of_the_working_directory_when_there_is_no_repository(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", (FOLDER / "tiny.yaml").read_text(), "here.yaml")
    monkeypatch.setattr(recipe_loading, "__file__", str(tmp_path / "site" / "pod" / "recipe" / "loading.py"))
    monkeypatch.chdir(tmp_path)
    assert list(recipes()) == ["here"]
    assert load_recipe(["recipe=here"]).name == "tiny"


def test_torchs_initialization_is_for_untied_heads_on_whole_weights():
    assert load_recipe(["recipe=tiny-base"]).model.initialization == "torch"
    tied = refused("model.config.tie_word_embeddings=true", recipe="tiny-base")
    assert tied.endswith("set model.config.tie_word_embeddings=false")
    sharded = refused("trainer.strategy=deepspeed", recipe="tiny-base")
    assert sharded.endswith("set model.initialization=transformers")


# Saving


@pytest.mark.parametrize("name", SHIPPED)
def test_save_and_load(name, tmp_path):
    recipe = load_recipe([f"recipe={name}", "optimizer.lr=3.3e-7", "optimizer.min_lr=0"])
    save(recipe, tmp_path / "deep" / "recipe.yaml")
    assert load_recipe([f"recipe={tmp_path}/deep/recipe.yaml"]) == recipe
    assert os.listdir(tmp_path / "deep") == ["recipe.yaml"]


@pytest.mark.parametrize(
    "text", ["1e3", "no", "12:30:00", "2020-01-01", "1_0", "- a: b # c", "é 漢", "a\tb", "NULL", "<<"]
)
def test_save_keeps_text_text(text, tmp_path):
    recipe = tiny(f"description={text}", f"data.path={text}", "resume=gone/step.ckpt")
    save(recipe, tmp_path / "recipe.yaml")
    again = load_recipe([f"recipe={tmp_path}/recipe.yaml"])
    assert again == recipe and again.description == text


# Messages


@pytest.mark.parametrize(
    "key, meant",
    [
        ("trainer.max_step", "trainer.max_steps"),
        ("max_steps", "trainer.max_steps"),
        ("--max_steps", "trainer.max_steps"),
        ("optimizer.max_steps", "trainer.max_steps"),
        ("lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("modle.dtype", "model.dtype"),
        ("data.seqence_length", "data.sequence_length"),
        ("blocks.kv_savings", "blocks.kv_saving"),
        ("optimizer.betas.0", "optimizer.betas"),
        ("sed", "seed"),
        ("optimiser", "optimizer"),
    ],
)
def test_unknown_key_names_the_closest(key, meant):
    assert refused(f"{key}=1") == f"unknown key {key!r}. Did you mean {meant}?"


def test_unknown_key_like_no_other():
    assert refused("zzz=1") == "unknown key 'zzz'. --help lists the keys."


def test_unknown_key_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path, (FOLDER / "tiny.yaml").read_text().replace("  lr:", "  lrr:"))
    with pytest.raises(RecipeError, match=r"mine\.yaml: unknown key 'optimizer\.lrr'\. Did you mean optimizer\.lr\?"):
        load_recipe([f"recipe={path}"])


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.max_steps=abc", "trainer.max_steps: wanted int or null, got 'abc' (str)"),
        ("trainer.max_steps=1.5", "trainer.max_steps: wanted int or null, got 1.5 (float)"),
        ("trainer.max_steps=true", "trainer.max_steps: wanted int or null, got True (bool)"),
        ("trainer.devices=null", "trainer.devices: wanted int, got None (NoneType)"),
        ("trainer.devices=[1]", "trainer.devices: wanted int, got [1] (list)"),
        ("optimizer.lr=high", "optimizer.lr: wanted float, got 'high' (str)"),
        ("optimizer.lr=.nan", "optimizer.lr: wanted float, got nan (float)"),
        (
            "trainer.max_tokens=1e30",
            "trainer.max_tokens: wanted int or null, got 1e+30 (float); it must be below 2**63",
        ),
        ("output=\udc80", "output: wanted string or null, got '\\udc80' (str); it is no text in UTF-8"),
        ("optimizer.betas=0.9", "optimizer.betas: wanted list of floats, got 0.9 (float)"),
        ("optimizer.betas=[0.9, x]", "optimizer.betas: wanted list of floats, got [0.9, 'x'] (list)"),
        ("lora.targets=q", "lora.targets: wanted list of strings, got 'q' (str)"),
        ("lora.targets=[q, 1]", "lora.targets: wanted list of strings, got ['q', 1] (list)"),
        ("data.shuffle=yes", "data.shuffle: wanted true or false, got 'yes' (str)"),
        ("data.shuffle=1", "data.shuffle: wanted true or false, got 1 (int)"),
        ("name=null", "name: wanted string, got None (NoneType)"),
        ("model.config=3", "model.config: wanted mapping or null, got 3 (int)"),
        ("model.config={1: 2}", "model.config: the key 1 is not a string; put it in quotes"),
        ("model.config.a=.inf", "model.config.a: wanted a value of JSON, got inf (float)"),
        ("model=null", "model is a group of keys, not a value: write model.KEY=value; got None"),
    ],
)
def test_wrong_type_names_key_value_and_type(override, message):
    assert refused(override) == message


def test_wrong_values_come_before_what_is_missing_and_what_does_not_go_together(tmp_path):
    path = write(tmp_path, "model: {base: a, config: {model_type: llama}}\ntrainer: {devices: 1.5}\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml: trainer\.devices: wanted int, got 1\.5 \(float\)$"):
        load_recipe([f"recipe={path}"])
    with pytest.raises(RecipeError, match=r"^required, but not given: name \(The run's name"):
        load_recipe([f"recipe={path}", "trainer.devices=1"])


def test_messages_name_the_file_of_what_is_wrong_and_no_other(tmp_path):
    path = write(tmp_path, (FOLDER / "tiny-base.yaml").read_text().replace("hidden_size: ", "hidden_size: .inf # "))
    assert refused(recipe=path).startswith(f"{path}: model.config.hidden_size: wanted a value of JSON, got inf")
    assert refused("model.config.x=.nan", "model.config.hidden_size=8", recipe=path).startswith(
        "model.config.x: wanted"
    )
    outside = write(tmp_path, (FOLDER / "tiny.yaml").read_text().replace("devices: 1", "devices: 0"))
    assert refused(recipe=outside) == f"{outside}: trainer.devices must be in [1, inf), got 0"
    assert refused("trainer.devices=-1", recipe=outside) == "trainer.devices must be in [1, inf), got -1"
    assert load_recipe([f"recipe={outside}", "trainer.devices=1"]) == tiny()


def test_a_number_where_text_is_meant_in_a_file(tmp_path):
    path = write(tmp_path, "name: 123\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml: name: wanted string, got 123 \(int\); put it in quotes"):
        load_recipe([f"recipe={path}"])


@pytest.mark.parametrize("key", [key for key, entry in schema().items() if entry.choices])
def test_invalid_choice_lists_the_valid_ones(key):
    choices = schema()[key].choices
    assert refused(f"{key}=zzz") == f"{key} must be one of {', '.join(choices)}; got 'zzz'."
    typo = choices[-1][:-1]
    assert refused(f"{key}={typo}").endswith(f"Did you mean {choices[-1]}?")


@pytest.mark.parametrize("key", [key for key, entry in schema().items() if entry.interval])
def test_values_outside_their_interval(key):
    interval = schema()[key].interval
    low, high = interval[1:-1].split(", ")
    below = low if interval[0] == "(" else str(int(low) - 1)
    rest = {"optimizer.betas": ", 0.5]", "data.length_intervals": "]"}.get(key)
    text = f"[{below}{rest}" if rest else below
    assert re.fullmatch(
        rf"{re.escape(key)} must be in {re.escape(interval)}, got {below}(\.0)?", refused(f"{key}={text}")
    )
    if high != "inf":
        above = str(float(high) + 1).removesuffix(".0")
        text = f"[{above}, 0.5]" if key == "optimizer.betas" else above
        assert f"must be in {interval}" in refused(f"{key}={text}")


def test_every_number_has_an_interval():
    numbers = {key for key, entry in schema().items() if re.search(r"\b(int|float)s?\b", entry.wanted)}
    assert len(numbers) >= 40 and numbers == {key for key, entry in schema().items() if entry.interval}


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["trainer.max_tokens=8192"], "trainer.max_steps or trainer.max_tokens: both are given, wanted one"),
        (["trainer.max_steps=null"], "trainer.max_steps or trainer.max_tokens: neither is given, wanted one"),
        (["blocks.threshold=0.3", "blocks.method=sum"], "blocks.method=sum groups for blocks.kv_saving, not"),
        (["distill.weight=0.5", "blocks.kv_saving=0"], "distill.weight=0.5: a dense model is its own teacher"),
        (
            ["distill.weight=1", "model.base=null", "model.config.model_type=llama", "model.tokenizer=bytes"],
            "distill.weight=1 needs model.base",
        ),
        (["lora.targets=[q, head]"], "lora.targets must be some of q, k, v, o, gate, up, down, none twice; got ['q'"),
        (["lora.targets=[]"], "lora.targets must be some of"),
        (
            ["lora.rank=4", "model.base=null", "model.config.model_type=llama", "model.tokenizer=bytes"],
            "lora.rank=4 needs model.base",
        ),
        (
            ["lora.rank=4", "model.share=kv", "blocks.size=2"],
            "with model.share=kv upper layers make no keys and values",
        ),
        (
            ["distill.weight=1", "model.share=kv", "blocks.size=2", "trainer.strategy=deepspeed"],
            "a sharded checkpoint leaves out what is frozen",
        ),
        (["optimizer.warmup_tokens=1"], "optimizer.warmup_steps or optimizer.warmup_tokens: both are given"),
        (["model.base=null"], "model.config (start from scratch): neither is given, wanted one"),
        (["model.config.model_type=llama"], "model.config (start from scratch): both are given, wanted one"),
        (["model.base=null", "model.config.a=1", "model.tokenizer=bytes"], "model.config.model_type is required"),
        (["model.base=null", "model.config.model_type=llama"], "model.tokenizer is required with model.config"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must be two floats, got [0.9]"),
        (["optimizer.min_lr=1"], "optimizer.min_lr (1) is above optimizer.lr (0.0008)"),
        (["model.recent_size=1020"], "no token is distant: model.sink_size (4) + model.recent_size (1020) cover"),
        (
            ["trainer.sequence_parallel_size=2"],
            "sequence_parallel_size=2 needs trainer.strategy=deepspeed, got",
        ),
        ([*SHARED, "trainer.devices=4"], "trainer.sequence_parallel_size=3 does not divide the 4 processes"),
        ([*SHARED, "trainer.devices=1025", "trainer.sequence_parallel_size=1025"], "more than the tokens of a sample"),
        (["model.offload_checkpoints=true"], "model.offload_checkpoints needs model.gradient_checkpointing=true"),
        (
            ["model.compile=true", "trainer.strategy=deepspeed"],
            "model.compile=true does not go with trainer.strategy=deep",
        ),
        (
            ["model.compile=true", "model.gradient_checkpointing=true", "model.offload_checkpoints=true"],
            "model.compile=true does not go with model.offload_checkpoints=true",
        ),
        (["trainer.offload=optimizer"], "trainer.offload=optimizer needs trainer.strategy=deepspeed, got auto"),
        (
            ["trainer.offload=parameters", "trainer.zero_stage=2", "trainer.strategy=deepspeed"],
            "trainer.offload=parameters needs trainer.zero_stage=3, got 2",
        ),
        (["trainer.zero_stage=2"], "trainer.zero_stage=2 needs trainer.strategy=deepspeed; set trainer.zero_stage=3"),
        (["distill.temperature=2"], "distill.temperature=2.0 needs a distill.weight above 0; set distill.temperature"),
        (["model.initialization=torch"], "model.initialization=torch needs model.config: it draws the weights of a"),
        (["blocks.file=a.json", "blocks.threshold=0.3"], "blocks.threshold=0.3 needs blocks.file=null, which names"),
        (["lora.alpha=32"], "lora.alpha=32.0 needs a lora.rank above 0; set lora.alpha=16.0"),
        (["lora.dropout=0.1"], "lora.dropout=0.1 needs a lora.rank above 0; set lora.dropout=0.0"),
        (["lora.targets=[q]"], "lora.targets=[q] needs a lora.rank above 0; set lora.targets=[q, k, v, o]"),
        (["lora.adapter=a"], "lora.adapter=a needs a lora.rank above 0; set lora.adapter=null"),
        (["name=a/b"], "name must be letters, digits, dot, dash and underscore; got 'a/b'"),
        (["description=a\nb"], "description must be one line"),
        (
            ["resume=atuo"],
            "resume must be never, auto or a checkpoint's path; got 'atuo', which is no file. Did you mean auto?",
        ),
        (["trainer.time_limit=1h"], "trainer.time_limit must be DD:HH:MM:SS, got '1h'"),
        (["data.path=''"], "data.path is empty"),
        (["output=runs/${name}"], "output: ${key} is not filled in, got 'runs/${name}'; write the value itself"),
        (["output=${"], "output: ${key} is not filled in, got '${'"),
        (["trainer.max_steps=${name}"], "trainer.max_steps: ${key} is not filled in, got '${name}'"),
        (["model.config.x=${name}"], "model.config.x: ${key} is not filled in, got '${name}'"),
        (["output=\\${x}"], "output: ${key} is not filled in, got '\\\\${x}'"),
        (["trainer.max_steps=[1"], "trainer.max_steps=[1: not valid YAML"),
        (["max_steps"], "expected key=value, got 'max_steps'."),
        (["tiny"], "expected key=value, got 'tiny'. Did you mean recipe=tiny?"),
        (["recipe=tiny"], "2 recipes are given (tiny, tiny); write recipe=NAME once"),
    ],
)
def test_messages(overrides, message):
    assert message in refused(*overrides)


def test_what_is_read_is_not_refused():
    tiny("lora.rank=4", "lora.alpha=8", "lora.dropout=0.1", "lora.targets=[q]")
    tiny("distill.weight=0.5", "distill.temperature=2")
    tiny("trainer.strategy=deepspeed", "trainer.zero_stage=1")
    tiny("blocks.threshold=0.3")


def test_batch_that_does_not_divide_names_the_numbers():
    message = refused("trainer.tokens_per_batch=10000", "data.micro_batch_size=2")
    assert message == (
        "trainer.tokens_per_batch=10000 is not a multiple of 2048 = data.micro_batch_size (2) * data.sequence_length "
        "(1024) * processes (1); the closest is 8192 or 10240"
    )
    with pytest.raises(RecipeError, match=r"4096 is not a multiple of 8192 .* processes \(2\); the closest is 8192$"):
        tiny("trainer.devices=2")
    assert accumulate(tiny("trainer.devices=2", "data.micro_batch_size=1")) == 2


def test_processes_that_share_a_sample_count_as_one():
    recipe = tiny(*SHARED, "trainer.devices=6", "trainer.num_nodes=2", "data.micro_batch_size=1")
    assert data_parallel_size(recipe) == 4 and accumulate(recipe) == 1
    for name, groups in (("llama3-32k-dense", 4), ("llama3-32k", 4), ("llama31-128k", 1)):
        recipe = load_recipe([f"recipe={name}"])
        assert recipe.trainer.strategy == "deepspeed" and data_parallel_size(recipe) == groups
        assert recipe.data.sequence_length // recipe.trainer.sequence_parallel_size == 16384
        assert accumulate(recipe) * groups * recipe.data.sequence_length == recipe.trainer.tokens_per_batch


@pytest.mark.parametrize("key", [key for key, entry in schema().items() if entry.default is REQUIRED])
def test_missing_required_key(key, tmp_path):
    content = yaml.safe_load((FOLDER / "tiny.yaml").read_text())
    section, _, name = key.rpartition(".")
    del (content[section] if section else content)[name]
    path = write(tmp_path, yaml.safe_dump(content))
    with pytest.raises(RecipeError) as caught:
        load_recipe([f"recipe={path}"])
    assert str(caught.value) == f"required, but not given: {key} ({schema()[key].doc})"


def test_missing_recipe_names_the_closest_and_the_list():
    listed = f"Recipes: {', '.join(SHIPPED)}"
    assert refused(recipe="tiny-bse") == f"no recipe 'tiny-bse'. Did you mean tiny-base? {listed}"
    assert refused(recipe="runs/tiny.yaml") == f"no file 'runs/tiny.yaml'. Did you mean tiny? {listed}"
    for nonsense in ("", "/", "\0", "x" * 5000):
        assert "Recipes: " in refused(recipe=nonsense)
    with pytest.raises(RecipeError, match=r"no recipe is given; write recipe=NAME once\. Recipes: "):
        load_recipe(["seed=1"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("name: x\ndata: [1,\n", "line 3: not valid YAML"),
        ("name: x\nseed: 1\nseed: 2\n", "line 3: not valid YAML: seed is given twice"),
        ("name: &a x\ndescription: *a\n", "line 2: not valid YAML: aliases (*) are not supported"),
        ("name: x\nname: !!python/object:os.x {}\n", "line 2: not valid YAML"),
        ("- a\n- b\n", "wanted a mapping of keys, got list"),
        ("name: \0", "not valid YAML"),
    ],
)
def test_bad_yaml_names_file_and_line(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe([f"recipe={path}"])
    assert str(caught.value).startswith(path) and message in str(caught.value)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff")
    with pytest.raises(RecipeError, match="mine.yaml: not UTF-8 text"):
        load_recipe([f"recipe={tmp_path}/mine.yaml"])


def test_what_code_changed_can_be_checked_again():
    recipe = tiny()
    recipe.trainer.max_steps = 9
    assert make_recipe([Setting(key, attrgetter(key)(recipe)) for key in schema()]) == recipe
    recipe.trainer.max_steps = "many"
    with pytest.raises(RecipeError, match="trainer.max_steps: wanted int or null, got 'many'"):
        make_recipe([Setting(key, attrgetter(key)(recipe)) for key in schema()])
    with pytest.raises(ValueError, match="max_step\n  Extra inputs are not permitted"):
        Trainer(max_step=3, tokens_per_batch=8)
    with pytest.raises(ValueError, match="offload_checkpoints needs model.gradient_checkpointing=true"):
        Model(base="somewhere", offload_checkpoints=True)


# Help and the command line


def test_help_has_every_field_with_its_description():
    """The descriptions are read here once more, by another way: from pydantic's fields."""
    fields = {f"{name}.{key}": field for name, cls in sections().items() for key, field in cls.model_fields.items()}
    fields |= {key: field for key, field in Recipe.model_fields.items() if key not in sections()}
    assert set(fields) == set(schema())
    printed = " ".join(help_text("pod.fit").split())
    for key, entry in schema().items():
        description = " ".join(fields[key].description.split())
        assert len(description) > 10 and entry.doc == description
        assert re.search(rf" {re.escape(key)} \({re.escape(entry.wanted)}, .*?{re.escape(description)}", printed), key
        assert entry.default is REQUIRED or entry.default == fields[key].get_default()
    for name, cls in sections().items():
        assert f" {name}: {cls.__doc__} " in printed
    assert max(map(len, help_text().splitlines())) <= 120


def test_schema_covers_every_field():
    written = yaml.safe_load(to_yaml(tiny()))
    flat = {key for key in written if key not in sections()}
    flat |= {f"{section}.{key}" for section in sections() for key in written[section]}
    assert flat == set(schema())


def test_no_arguments_list_the_recipes(capsys):
    with pytest.raises(SystemExit) as ended:
        main_recipe([], "pod.fit")
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for name, description in recipes().items():
        assert re.search(rf"^  {name} +{re.escape(description)}$", out, flags=re.M)
    assert "python -m pod.fit recipe=NAME" in out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["recipe=tiny", "--help"]])
def test_help_ends_with_0(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main_recipe(argv, "pod.analyze")
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == help_text("pod.analyze")


def test_an_error_goes_to_stderr_and_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main_recipe(["recipe=tiny", "seed=x"], "pod.fit")
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err == "error: seed: wanted int, got 'x' (str)\n"


def test_the_resolved_recipe_is_printed(capsys, tmp_path):
    recipe = main_recipe(["recipe=tiny", "output=runs/1"], "pod.fit")
    path = write(tmp_path, capsys.readouterr().out)
    assert load_recipe([f"recipe={path}"]) == recipe and recipe.output == "runs/1"


def test_the_schema_needs_no_torch():
    """The schema's own modules, below a package `pod` that imports nothing: the real one brings torch."""
    code = (
        "import sys, types; pod = sys.modules['pod'] = types.ModuleType('pod'); pod.__path__ = [sys.argv[1]]\n"
        "import pod.recipe.schema as loaded; assert loaded.schema()\n"
        "print({'torch', 'lightning'} & set(sys.modules))"
    )
    folder = str(Path(recipe_loading.__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended.stderr


# Fuzzing

KEYS = st.sampled_from([*schema(), *sections(), "model.config.x", "model.config.x.y", "model.config.", "recipe", ""])
VALUES = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="[]{}:,'\"!&*%@`|>-?#~ \n\t0123456789.eE_+xtrue${}", max_size=20),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(
        ["${name}", "${model}", "???", "!!set {a}", "!!binary aGk=", "!!int x", "[" * 300 + "]" * 300, "[" * 5000]
    ),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.tuples(KEYS, VALUES), st.tuples(st.text(max_size=12), VALUES)), min_size=1, max_size=3))
@example([("model.config.x", "${model}")])
@example([("model.config", "${data}")])
@example([("model.config", "3"), ("model.config.x", "{2: 3}")])
@example([("model.config.x", "[" * 300 + "]" * 300)])
@example([("trainer.max_steps", "9" * 5000)])
@example([("trainer.max_steps", "9" * 400)])
@example([("optimizer.lr", "1e999")])
@example([("model.config.x", "{[a]: 1}")])
@example([("model.config.x", "!!int {}")])
@example([("name", "\udc80")])
@example([("description", "\udc80")])
def test_fuzzed_overrides_raise_recipe_errors_only(tmp_path_factory, overrides):
    """Whatever is typed, the answer is a RecipeError or a recipe that can be saved and read back."""
    try:
        recipe = load_recipe(["recipe=tiny", *(f"{key}={value}" for key, value in overrides)])
    except RecipeError as error:
        assert str(error)
        return
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    save(recipe, path)
    assert load_recipe([f"recipe={path}"]) == recipe


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.binary(max_size=60), st.text(alphabet="name:data \n-[]{}&*!|>'\"#?,1.e", max_size=60).map(str.encode))
)
def test_fuzzed_files_raise_recipe_errors_only(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed-file.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError):
        load_recipe([f"recipe={path}"])
