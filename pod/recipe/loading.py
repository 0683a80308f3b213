"""From files and the command line to a recipe: `defaults <- recipes/NAME.yaml <- key=value`, later ones winning.

    recipe = load_recipe(["recipe=tiny", "trainer.max_steps=20", "model.config.hidden_size=64"])

`recipe=` is the name of a file in the recipes folder (that of the library, or $POD_RECIPES) or a path. Values are
YAML; `1e3` and `1_000` are fine where an int is meant. Whatever is wrong with a recipe is a RecipeError, whose message
names the key, the value, and what to write instead.
"""

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pod.files import check_sum, with_sum, write_text
from pod.recipe.errors import RecipeError, closest
from pod.recipe.schema import FREE, REQUIRED, Recipe, schema, sections
from pod.recipe.yaml import dump, one_line, parse


class Setting(NamedTuple):
    """A key of the schema, or one inside the free mapping; its value; what a message about it begins with, such as the
    file that says so."""

    key: str
    value: Any
    source: str = ""


def load_recipe(arguments: Sequence[str]) -> Recipe:
    """Build a recipe from command-line arguments: one `recipe=NAME|PATH` and any number of `key=value`, in any order.

    Raises:
        RecipeError: anything that is wrong with the arguments, the file, a value, or how they go together.
    """
    names, overrides = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            hint = f" Did you mean recipe={argument}?" if argument in _recipe_files() else ""
            raise RecipeError(f"expected key=value, got {argument!r}.{hint}")
        if key == "recipe":
            names.append(value)
        else:
            overrides.append((key, value))
    if len(names) != 1:
        given = f"{len(names)} recipes are given ({', '.join(names)})" if names else "no recipe is given"
        raise RecipeError(f"{given}; write recipe=NAME once. {_available()}")
    path = _find(names[0])
    settings = [each for key, value in read_recipe(path).items() for each in _settings(key, value, f"{path}: ")]
    for key, text in overrides:
        settings += _settings(key, _override_value(key, text), "")
    return make_recipe(settings)


def make_recipe(settings: Sequence[Setting]) -> Recipe:
    """A recipe of these settings, of which later ones win; mappings under `model.config` are merged.

    Raises:
        RecipeError: a value of the wrong type, outside its choices or its interval, one that is missing, or two that
            contradict each other.
    """
    values: dict[str, Any] = {section: {} for section in sections()}
    for key, value, _ in settings:
        for part in reversed(key.split(".")):
            value = {part: value}
        _merge(values, value)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_message(error, settings)) from error


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _message(error: ValidationError, settings: Sequence[Setting]) -> str:
    """The first that is wrong of what pydantic found: the key, its value, and what was wanted."""
    found = error.errors(include_url=False)
    missing = [".".join(each["loc"]) for each in found if each["type"] == "missing"]
    wrong_values = [each for each in found if each["type"] != "missing" and not isinstance(_reason(each), RecipeError)]
    if missing and not wrong_values:
        return "required, but not given: " + "; ".join(f"{key} ({schema()[key].doc})" for key in missing)
    if not wrong_values:  # but what does not go together
        return str(_reason(found[0]))
    first = wrong_values[0]
    kind, place, value = first["type"], [str(part) for part in first["loc"]], first["input"]
    path = key = next(".".join(place[:depth]) for depth in (1, 2) if ".".join(place[:depth]) in schema())
    if key == FREE:
        path = ".".join(place[:2] + place[2::2])  # between the names pydantic says what each of them is
        path = path if place[-1] != "[key]" else path.rpartition(".")[0]
    set_by = next(each for each in reversed(settings) if f"{path}.".startswith(f"{each.key}."))
    entry = schema()[key]
    if entry.choices:
        wrong = f" must be one of {', '.join(entry.choices)}; got {value!r}.{closest(str(value), entry.choices)}"
    elif kind.startswith(("greater_than", "less_than")):
        wrong = f" must be in {entry.interval}, got {value!r}"
    elif kind == "string_too_short":
        wrong = " is empty"
    elif place[-1] == "[key]":
        wrong = f": the key {value!r} is not a string; put it in quotes"
    else:
        value = set_by.value if set_by.key == path else value
        wanted = "a value of JSON" if len(place) > 2 and key == FREE else entry.wanted
        reason = "it is no text in UTF-8" if kind == "string_unicode" else _reason(first)
        if entry.wanted.startswith("string") and isinstance(value, int | float):
            reason = "put it in quotes"
        wrong = f": wanted {wanted}, got {value!r} ({type(value).__name__})" + (f"; {reason}" if reason else "")
    return f"{set_by.source}{path}{wrong}"


def _reason(finding: Mapping[str, Any]) -> Exception | None:
    """What a validator of ours raised."""
    return finding.get("ctx", {}).get("error")


def _settings(key: str, value: Any, source: str) -> Iterator[Setting]:
    """What `key: value` sets.

    Args:
        key: dotted, of a field, of a section (then the value is a mapping), or inside the free mapping.
        source: as in `Setting`.
    """
    if key in sections():
        if not isinstance(value, dict):
            raise RecipeError(f"{source}{key} is a group of keys, not a value: write {key}.KEY=value; got {value!r}")
        for name, inner in value.items():
            yield from _settings(f"{key}.{name}", inner, source)
    elif key in schema() or (key.startswith(FREE + ".") and all(key.split("."))):
        if "${" in str(value):
            raise RecipeError(f"{source}{key}: ${{key}} is not filled in, got {value!r}; write the value itself")
        yield Setting(key, value, source)
    else:
        hint = closest(key, [*schema(), *sections()])
        raise RecipeError(f"{source}unknown key {key!r}.{hint or ' --help lists the keys.'}")


def _override_value(key: str, text: str) -> Any:
    """The value of `key=text`. For a string field that is the text itself, so that it needs no YAML quotes."""
    entry = schema().get(key)
    if entry is None or not entry.wanted.startswith("string"):
        return parse(text, f"{key}={text}")
    if text in ("", "~", "null"):
        return None
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return parse(text, f"{key}={text}") if quoted else text


def save(recipe: Recipe, path: str | os.PathLike) -> None:
    """Write a recipe as YAML that `recipe=PATH` reads back to an equal one. Folders are made; a file is replaced.

    Its first line is a checksum: what was cut off may be keys that have defaults.
    """
    write_text(path, with_sum(to_yaml(recipe), "# sha256 of the other lines: {}; take this line out to change them\n"))


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, every key written out."""
    return dump(recipe.model_dump())


def recipes() -> dict[str, str]:
    """The recipes of the recipes folder: name -> description (or what is wrong with the file), sorted by name."""
    listed = {}
    for name, path in _recipe_files().items():
        try:
            listed[name] = str(read_recipe(path).get("description", ""))
        except RecipeError as error:
            listed[name] = f"cannot be read: {error}"
    return listed


# Files


def read_recipe(path: Path) -> dict[str, Any]:
    """A file's keys and values; a section with nothing in it counts as not given.

    Raises:
        RecipeError: it cannot be read, is not what its checksum says, where it has one, or is no mapping in YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    try:
        check_sum(path, text)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    content = parse(text, str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: wanted a mapping of keys, got {type(content).__name__}")
    return {str(key): value for key, value in content.items() if value is not None or key not in sections()}


def _folder() -> Path:
    """$POD_RECIPES, else what the wheel brings, else a clone's recipes/, else recipes/ where the command runs."""
    if os.environ.get("POD_RECIPES"):
        return Path(os.environ["POD_RECIPES"])
    here = Path(__file__).resolve()
    shipped = here.parent / "shipped"  # put there by setup.py
    return next((folder for folder in (shipped, here.parents[2] / "recipes") if folder.is_dir()), Path("recipes"))


def _recipe_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"), key=lambda path: path.stem)}


def _available() -> str:
    names = ", ".join(_recipe_files())
    return f"Recipes: {names}" if names else f"There are no recipes in {_folder()}; set POD_RECIPES to their folder"


def _find(name: str) -> Path:
    """The file of a recipe's name or path."""
    if name in _recipe_files():
        return _recipe_files()[name]
    if os.path.isfile(name):
        return Path(name)
    hint = closest(Path(name).name.removesuffix(".yaml"), list(_recipe_files()))
    kind = "file" if re.search(r"[/\\]|\.ya?ml$", name) else "recipe"
    raise RecipeError(f"no {kind} {name!r}.{hint} {_available()}")


# The command line


def help_text(command: str = "pod.fit") -> str:
    """The schema as text: every key with its type, default, valid values and help."""
    lines = [f"usage: python -m {command} recipe=NAME|PATH [key=value ...]"]
    if command == "pod.fit":
        lines.append("       with plan=true [gpu=H100] [utilisation=0.4]: print memory, FLOPs and hours, train nothing")
    lines += ["", _available(), ""]
    section = None
    for key, entry in schema().items():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines += ["", f"{section}: {inspect.getdoc(sections()[section])}", ""] if section else ["keys:", ""]
        default = "required" if entry.default is REQUIRED else f"default {one_line(entry.default)}"
        valid = f", one of {', '.join(entry.choices)}" if entry.choices else ""
        valid = f", in {entry.interval}" if entry.interval else valid
        lines.append(f"  {key}  ({entry.wanted}, {default}{valid})")
        lines += textwrap.wrap(entry.doc, 112, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def main_recipe(argv: Sequence[str], command_name: str) -> Recipe:
    """What every command that takes a recipe does first: load it and print it, as YAML, to stdout.

    Args:
        argv: the arguments without the program's name. None: print the recipes; with --help: print the schema.
        command_name: as in `python -m NAME`, such as pod.fit.

    Raises:
        SystemExit: 0 after the list or the help, 2 after a RecipeError, whose message went to stderr.
    """
    if not argv or {"--help", "-h"} & set(argv):
        print(help_text(command_name) if argv else _listing(command_name))
        raise SystemExit(0)
    try:
        recipe = load_recipe(argv)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(to_yaml(recipe), end="", flush=True)
    return recipe


def _listing(command: str) -> str:
    listed = recipes()
    width = max(map(len, listed), default=0)
    lines = [f"  {name:<{width}}  {description}" for name, description in listed.items()]
    lines = [f"Recipes, in {_folder()}:", *lines] if lines else [_available()]
    lines += ["", f"Run one:       python -m {command} recipe=NAME [key=value ...]"]
    return "\n".join([*lines, f"All the keys:  python -m {command} --help"])
