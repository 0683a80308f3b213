"""Whatever is typed or lies in a file: a result, or the documented error with a message that names it; nothing else."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pod
from pod import eviction, prepare
from pod.data import sources
from pod.data.prepared import PreparedData, PreparedDataset
from pod.data.sample_writer import SampleWriter
from pod.recipe.loading import load_recipe, save
from pod.recipe.schema import RecipeError
from pod.training.plan import make_plan
from pod.training.run import check_devices, check_logger

ROOT = Path(__file__).parent.parent
QUICK = settings(max_examples=120, deadline=None)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from([2**63, -(2**63) - 1, 10**400, "\x00", "\ud800", "pod-layer-blocks", "uint16"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def changed(draw, content):
    """JSON content with one or two places, anywhere in it, taken out or replaced by anything."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 2))):
        place, parent = content, None
        while isinstance(place, dict | list) and place and (parent is None or draw(st.integers(0, 3))):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            parent, key = place, draw(st.sampled_from(keys))
            place = place[key]
        if parent is None:
            return draw(VALUES)
        if draw(st.booleans()):
            parent[key] = draw(VALUES)
        else:
            del parent[key]
    return content


# Blocks

BLOCKS = {
    "format": "pod-layer-blocks",
    "version": 1,
    "num_layers": 3,
    "num_kv_heads": 2,
    "kv_saving": 0.25,
    "metadata": {"threshold": 0.5},
    "anchors": [[0, 0], [0, 1], [0, 1]],
}


@QUICK
@given(changed(BLOCKS))
def test_blocks_files(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed-blocks.json"
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
    try:
        blocks = pod.LayerBlocks.load(path)
    except ValueError as error:
        assert str(path) in str(error)
        return
    blocks.save(path)
    assert pod.LayerBlocks.load(path) == blocks


@QUICK
@given(st.one_of(st.binary(max_size=50), st.text(alphabet='{}[]",:0123456789truefalsn\\u.eE-+ ', max_size=50)))
@example("[" * 100_000)
@example('{"format": ' * 5000)
@example("9" * 5000)
def test_blocks_files_that_are_anything(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed-blocks.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(str(path))):
        pod.LayerBlocks.load(path)


# Prepared data


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared") / "data"
    with SampleWriter(path, sequence_length=4, vocab_size=9, tokenizer="bytes", shard_samples=2) as writer:
        writer.add("train", [[1, 2, 3, 4]] * 5, [[0, 0, 1, -1]] * 5)
    return path, json.loads((path / "index.json").read_text())


@QUICK
@given(st.data())
def test_indexes_of_prepared_data(prepared, data):
    path, whole = prepared
    content = data.draw(changed({name: value for name, value in whole.items() if name != "sha256"}))
    (path / "index.json").write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
    try:
        opened = PreparedData(path)
        opened.verify()
        if "train" in opened.splits:
            list(PreparedDataset(opened, "train"))
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error)


# JSON lines

LINES = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda row: json.dumps(row).encode("utf-8", "surrogatepass"), VALUES),
    st.builds(lambda text: json.dumps({"text": text}).encode(), st.text(max_size=20)),
    st.builds(lambda value: json.dumps({"text": value}).encode("utf-8", "surrogatepass"), VALUES),
)


@QUICK
@given(LINES, st.text(max_size=4))
@example(b"[" * 100_000, "text")
@example(b"9" * 5000, "text")
@example(b'{"text": "\\ud800"}', "text")
@example(b'{"text": "\xed\xa0\x80"}', "text")
def test_json_lines(line, field):
    for name in ("text", field):
        text, problem = sources.parse_line(line, name)
        assert bool(text) != bool(problem)
        assert text.encode("utf-8").decode("utf-8") == text


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(LINES, max_size=6))
def test_files_of_json_lines(tmp_path_factory, lines):
    root = tmp_path_factory.mktemp("lines")
    (root / "in.jsonl").write_bytes(b"\n".join(lines))
    try:
        report = prepare.prepare([str(root / "in.jsonl")], root / "out", "bytes", 8, held_out=0)
    except ValueError as error:
        assert str(root / "in.jsonl") in str(error)
        assert [path.name for path in root.iterdir()] == ["in.jsonl"]
        return
    data = PreparedData(root / "out")
    data.verify()
    assert data.splits["train"]["tokens"] == report["splits"]["train"]["tokens"]
    rows = (root / "in.jsonl").read_bytes().split(b"\n")
    assert all(1 <= problem["line"] <= len(rows) for problem in report["skipped"])


# Eviction

METHODS = st.sampled_from(sorted(eviction.METHODS))
NAMES = st.sampled_from(
    ["budget", "window", "sinks", "positions", "gamma", "kernel_size", "recent", "x", "", "__class__"]
)
NUMBERS = st.one_of(st.integers().map(str), st.floats().map(str), st.text(max_size=6), st.just("9" * 5000))


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=30),
        st.text(alphabet="snapkvh2o+*:,=budget0123456789.e- \n", max_size=40),
        st.builds(
            lambda methods, pairs: f"{'*'.join(methods)}:" + ",".join(f"{name}={value}" for name, value in pairs),
            st.lists(METHODS, min_size=1, max_size=2),
            st.lists(st.tuples(NAMES, NUMBERS), max_size=3),
        ),
    )
)
@example("")
@example("+")
@example("snapkv:budget=1e400")
@example("snapkv:budget=nan")
@example("cascade:budget=64,sinks=64")
@example(",+0")
@example("0*")
@example("=*")
@example("cake*snapkv:budget=0.5,tau1=1e-5")
def test_eviction_methods(text):
    try:
        methods = eviction.parse_all(text)
    except ValueError as error:
        # The message may quote and escape what it names.
        said = re.sub(r"[\\'\"]", "", str(error))
        parts = re.split(r"[+*:,=]", text) + [method.partition(":")[0] for method in text.split("+")]
        words = [re.sub(r"[\\'\"]", "", repr(part.strip()[:20])) for part in parts if part.strip()]
        assert said and (not words or "''" in str(error) or any(word in said for word in words))
        return
    assert [eviction.parse(eviction.unparse(method)) for method in methods] == methods


# Recipes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_recipes_with_changed_lines(tmp_path_factory, data):
    """A shipped recipe of which some lines were edited: it is refused by what was edited, or it can be planned."""
    edited: list[str] = []
    lines = (ROOT / "recipes" / "tiny.yaml").read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(lines) - 1))
        key = lines[number].partition(":")[0]
        value = data.draw(st.one_of(SCALARS.map(lambda value: json.dumps(value)), st.text(max_size=12)))
        indent = data.draw(st.sampled_from(["", "", "", "  ", "\t"]))
        edited += [key.strip(), str(value).strip('"')]
        lines[number] = data.draw(
            st.sampled_from([f"{indent}{key}: {value}", f"{indent}{value}", f"{key} {value}", ""])
        )
    path = tmp_path_factory.getbasetemp() / "edited.yaml"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    try:
        recipe = load_recipe([f"recipe={path}"])
    except RecipeError as error:
        # By file and line where it is no YAML, or by a key or value of an edited line.
        said = str(error)
        assert str(path) in said or any(part and part in said for part in edited), (said, edited)
        return
    save(recipe, path.with_name("again.yaml"))
    assert load_recipe([f"recipe={path.with_name('again.yaml')}"]) == recipe
    try:  # what fit asks of the recipe before it loads anything
        check_devices(recipe)
        check_logger(recipe)
        plan = make_plan(recipe)
    except (ValueError, OSError) as error:
        assert any(part and part in str(error) for part in edited), (error, edited)
        return
    assert plan.tokens_per_step == recipe.trainer.tokens_per_batch and "hours" in "".join(plan.lines())
