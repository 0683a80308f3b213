"""The pages: their examples run and print what they show, their commands and links exist, quoted code is the code."""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from scripts import ROOT, script
from transformers import AutoModelForCausalLM

import pod
import pod_kernels
from pod.recipe.loading import recipes

DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "first_steps.ipynb"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), NOTEBOOK]
STEPS = ["ANALYZE.md", "FIT.md", "EXPORT.md", "GENERATE.md", "EVALUATE.md"]  # each goes on from those before
ALONE = ["KVPRESS.md"]
COMMAND = re.compile(r"python3? (-m pod\.\w+|(?:eval|data|docs)/\w+\.py)(.*)")


def blocks_of(page):
    """The fenced blocks of a page: language, text, number of the first line."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield match[1], match[2], text[: match.start(2)].count("\n") + 1


# The examples of the steps


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder like the repository's root, to which the examples may write."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("eval", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("data", "checkpoints", "docs"):
        (folder / name).mkdir()
    (folder / "docs/prompt.txt").symlink_to(ROOT / "docs/prompt.txt")
    for file in (ROOT / "data").glob("*.py"):
        (folder / "data" / file.name).symlink_to(file)
    (folder / "checkpoints/tiny-base").symlink_to(ROOT / "checkpoints/tiny-base")
    return folder


@pytest.fixture(scope="module")
def ran(workplace):
    """A function that runs the examples of a page, those of the pages before it first, each page once."""
    done, failed = [], []

    def run(name):
        for page in STEPS[: STEPS.index(name) + 1] if name in STEPS else [name]:
            if page in done:
                continue
            if failed:
                pytest.fail(f"it goes on from {failed[0]}, which failed")
            failed.append(page)
            run_page(DOCS / page, workplace)
            failed.clear()
            done.append(page)

    return run


def loaded(target):
    """The module of a command's target, `-m pod.fit` or `eval/passkey.py`."""
    if target.startswith("-m "):
        return importlib.import_module(target[3:])
    return script(target)


def run_command(command):
    """Run `python ...` in this process, as starting one takes seconds; what it prints."""
    match = COMMAND.fullmatch(command)
    assert match, f"not a command of this library: {command}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = loaded(match[1]).main(shlex.split(match[2]))
        except SystemExit as exit:
            code = exit.code
    assert not code, f"{command}\nended with {code}\n{errors.getvalue()[-2000:]}"
    return printed.getvalue()


def shape_of(line):
    """A line with its numbers and the width of its columns taken out: these may differ where it is run."""
    return " ".join(re.sub(r"\d[\d,.]*|-{2,}", "0", line).split())


def check_output(expected, printed, where):
    """The expected lines are those that were printed, in order; a line `...` stands for any number of them."""
    lines = [shape_of(line) for line in printed.splitlines() if line.strip()]
    place, skips = 0, False
    for line in filter(str.strip, expected):
        if line.strip() == "...":
            skips = True
            continue
        wanted = shape_of(line)
        while skips and place < len(lines) and lines[place] != wanted:
            place += 1
        assert lines[place : place + 1] == [wanted], f"{where}: {line!r} is not what was printed:\n{printed[-3000:]}"
        place, skips = place + 1, False
    assert skips or place == len(lines), f"{where}: more was printed, mark it by `...`:\n{printed[-3000:]}"


def run_page(page, folder):
    namespace, printed = {}, ""
    before = os.getcwd()
    os.chdir(folder)
    try:
        for language, text, line in blocks_of(page):
            where = f"{page.name}:{line}"
            if language == "yaml":
                name = re.match(r"# (\S+)\n", text)[1]
                Path(name).write_text(text)
            elif language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
                    exec(compile("\n" * (line - 1) + text, page.name, "exec"), namespace)
                printed = out.getvalue()
            elif language == "text":
                check_output(text.splitlines(), printed, where)
            else:
                assert language == "console", f"{where}: no one runs {language or 'an unnamed'} block"
                for part in re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
                    command, *expected = part.splitlines()
                    check_output(expected, run_command(command), where)
    finally:
        os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS + ALONE)
def test_examples_run(name, ran):
    ran(name)


def test_no_example_is_left_out():
    with_blocks = {page.name for page in DOCS.glob("*.md") if any(True for _ in blocks_of(page))}
    assert with_blocks == {*STEPS, *ALONE, "NEW_FAMILY.md"}


def test_an_example_that_prints_something_else_is_found():
    expected = ["written: a.json, 12 %", "...", "| b | 1.0 |"]
    for printed in ("written: a.json, 9 %\n\ny\n|  b | 10,5 |\n", "written: a.json, 9 %\n| b | 1 |"):
        check_output(expected, printed, "here")
    check_output(["...", *expected, "..."], "x\nwritten: a.json, 1 %\n| b | 1 |\nz\n", "here")
    wrong = "written: b.json, 9 %\n| b | 1 |", "| b | 1 |\nwritten: a.json, 9 %", "x\nwritten: a.json, 9 %\n| b | 1 |"
    for printed in (*wrong, "written: a.json, 9 %"):
        with pytest.raises(AssertionError, match="here: .* is not what was printed"):
            check_output(expected, printed, "here")
    with pytest.raises(AssertionError, match="here: more was printed"):
        check_output(expected, "written: a.json, 9 %\n| b | 1 |\nz", "here")


def test_the_example_of_the_readme_runs(workplace, monkeypatch):
    text = next(text for language, text, _ in blocks_of(ROOT / "README.md") if language == "python")
    for name, small in (
        ("meta-llama/Meta-Llama-3-8B", "checkpoints/tiny-base"),
        ("recent_size=4080", "recent_size=12"),
        ("8192", "128"),
        ("kv_saving=0.35", "kv_saving=0.3"),
    ):
        assert name in text
        text = text.replace(name, small)
    monkeypatch.chdir(workplace)
    Path("book.txt").write_text((ROOT / "docs/prompt.txt").read_text() * 3)
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "README.md", "exec"), names)
    (nbytes,) = (int(line) for line in printed.getvalue().splitlines() if line.isdecimal())
    config, length = names["model"].config, names["output"].past_key_values.get_seq_length()
    dense = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    assert nbytes < 0.95 * dense * names["model"].dtype.itemsize
    assert AutoModelForCausalLM.from_pretrained("exports/converted").config.recent_size == 12


# What the pages say exists


def commands_of(page):
    """The commands of this library on a page: target, arguments, number of the line; continued lines are one."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for number, line in enumerate(text.splitlines(), 1):
        for match in COMMAND.finditer(line.split("    #")[0]):
            yield match[1], match[2].split("`")[0], number


@pytest.fixture(scope="module")
def help_of():
    """A function: what a command's --help prints."""
    known = {}

    def text_of(target):
        if target not in known:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                loaded(target).main(["--help"])
            known[target] = printed.getvalue()
        return known[target]

    return text_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page, help_of):
    for target, arguments, number in commands_of(page):
        where = f"{page.name}:{number}: {target} {arguments}"
        assert target.startswith("-m") or (ROOT / target).is_file(), where
        options = help_of(target)
        assert "usage:" in options or "key" in options, where
        for word in arguments.split():
            if word.startswith("--") and word != "--help":
                assert re.search(rf"{word}\b", options), f"{where}: {word} is not in --help"
            elif re.fullmatch(r"recipe=[\w-]+", word) and word not in ("recipe=mine", "recipe=NAME"):
                assert word.removeprefix("recipe=") in recipes(), where
            elif re.fullmatch(r"(\w+\.)?\w+=\S*", word) and "recipe=" in arguments:
                key = word.split("=")[0]
                known = ("recipe", "plan", "gpu", "utilisation")
                assert key in known or re.search(rf"^ +{re.escape(key)} ", options, re.MULTILINE), f"{where}: {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{page.name}: {target}"


def exists(name):
    """Whether a dotted name such as `pod.eviction.SnapKV` leads to something."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for place, part in enumerate(parts[count:], count):
            if not hasattr(found, part):  # a dataclass's field without a default is an annotation only
                return part in getattr(found, "__dataclass_fields__", {}) and place == len(parts) - 1
            found = getattr(found, part)
        return True
    return False


def broken(text):
    """The names of the library in backticks or code of a text that lead nowhere."""
    quoted = re.findall(r"`[^`]+`", text)
    names = {name for part in quoted for name in re.findall(r"\b(?:pod|pod_kernels)(?:\.[A-Za-z_]\w*)+", part)}
    # `pod.fit` and the like may begin a file's name.
    return sorted(name for name in names if not name.endswith((".py", ".md")) and not exists(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_library_exist(page):
    assert broken(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("package", ["pod", "kernels/pod_kernels"])
def test_names_in_docstrings_exist(package):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        found[str(path)] = [name for node in nodes for name in broken(ast.get_docstring(node) or "")]
    assert found and not {path: names for path, names in found.items() if names}


def test_a_broken_name_is_found():
    assert broken("`pod.PodCash(config)`, `pod.PodCache`, pod.nothing, `pod/fit.py`") == ["pod.PodCash"]
    assert broken("`pod.eviction.SnapKV.budget` and `pod.eviction.SnapKV.bugdet`") == ["pod.eviction.SnapKV.bugdet"]


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert any(cell["cell_type"] == "code" for cell in cells)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_code_that_is_quoted_is_the_code():
    source = (ROOT / "pod/model/families.py").read_text(encoding="utf-8")
    quoted = [text for language, text, _ in blocks_of(DOCS / "NEW_FAMILY.md") if language == "python"]
    assert quoted and all(text in source for text in quoted)


def test_the_tree_names_what_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("## The tree") :]
    folders, named = [], set()
    for indent, names in re.findall(r"^    ( *)([^\s,]+(?:, [^\s,]+)*)", tree, re.MULTILINE):
        depth = len(indent) // 4
        for name in names.split(", "):
            path = "/".join([*folders[:depth], name.rstrip("/")])
            assert (ROOT / path).exists(), path
            named.add(path)
        folders[depth:] = [names.rstrip("/")]
    for folder in ("data", "eval"):
        inside = {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert inside <= named, f"not in the README's tree: {sorted(inside - named)}"
    pages = {f"docs/{page.name}" for page in DOCS.iterdir() if page.is_file()}
    assert pages <= named, f"not in the README's tree: {sorted(pages - named)}"


PACKAGES = sorted(
    str(file.parent.relative_to(ROOT)) for top in ("pod", "kernels") for file in (ROOT / top).rglob("__init__.py")
)


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_package_says_what_its_files_are(folder):
    said = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))
    named = {name for line in said.splitlines() for name in re.match(r"(?:[\w/]+\.py(?:, )?)*", line)[0].split(", ")}
    inside = {path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"}
    assert named - {""} == inside


def test_pictures(tmp_path):
    assert loaded("docs/pictures.py").main(["--out", str(tmp_path)]) == 0
    page = (DOCS / "HOW_IT_WORKS.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\((\w+\.png)\)", page)
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    for name in shown:
        assert (tmp_path / name).stat().st_size < 60_000 and (DOCS / name).stat().st_size < 60_000


def test_pictures_show_what_the_code_does():
    """Whose score each pair takes, and which keys are stored, against the kernel and the cache."""
    pictures = loaded("docs/pictures.py")
    count, sinks, recent = pictures.TOKENS, pictures.SINKS, pictures.RECENT
    table = pictures.scores(count, sinks, recent, shares=True)
    # With one-hot values the output is the attention weights; scores that are far below the others leave no weight.
    q, low, high = torch.ones(1, 1, count, 4), torch.full((1, 1, count, 4), -40.0), torch.zeros(1, 1, count, 4)
    values = torch.eye(count)[None, None]
    options = {"sink_size": sinks, "recent_size": recent, "scale": 1.0}
    own = pod_kernels.reference.shared_score_attention(q, high, values, q, low, **options)[0, 0]
    assert torch.equal(own > 0, table == pictures.OWN)
    everything = pod_kernels.reference.shared_score_attention(q, high, values, q, high, **options)[0, 0]
    assert torch.equal(everything > 0, table != pictures.NOTHING)
    anchors, anchor = [], 0
    for layer, kind in enumerate(pictures.LAYERS):
        anchor = layer if kind == "anchor" else anchor
        anchors.append([anchor])
    kept = sum(int(pictures.stored(count, sinks, recent, kind == "shares").sum()) for kind in pictures.LAYERS)
    config = pod.PodLlamaConfig(
        num_hidden_layers=len(anchors),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        anchors=anchors,
        sink_size=sinks,
        recent_size=recent,
    )
    cache = pod.PodCache(config, crop_slack=0)
    assert cache.expected_nbytes(count, batch=1, itemsize=1) == 4 * (kept + count * len(anchors))
