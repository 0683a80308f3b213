"""From files and the command line to a recipe: `schema <- recipes/NAME.yaml <- key=value`, later ones winning.

    recipe = load_recipe(["recipe=tiny", "trainer.max_steps=20", "model.config.hidden_size=64"])

`recipe=` is the name of a file in the recipes folder (that of the library, or $POD_RECIPES) or a path. Values are
YAML; `1e3` and `1_000` are fine where an int is meant, and `${key}` takes another key's value. Whatever is wrong with
a recipe is a RecipeError, whose message names the key, the value, and what to write instead.
"""

import dataclasses
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pod.files import check_sum, with_sum, write_text
from pod.recipe.checks import check_json, closest, converted, validate
from pod.recipe.schema import CHOICES, FREE, INTERVALS, Recipe, RecipeError, schema, sections
from pod.recipe.yaml import dump, one_line, parse


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
    leaves = [leaf for key, value in read_recipe(path).items() for leaf in _leaves(key, value, f"{path}: ")]
    for key, text in overrides:
        leaves += _leaves(key, _override_value(key, text), "")
    return _build(leaves)


def save(recipe: Recipe, path: str | os.PathLike) -> None:
    """Write a recipe as YAML that `recipe=PATH` reads back to an equal one. Folders are made; a file is replaced.

    Its first line is a checksum: what was cut off may be keys that have defaults.
    """
    write_text(path, with_sum(to_yaml(recipe), "# sha256 of the other lines: {}; take this line out to change them\n"))


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, every key written out."""
    return dump(dataclasses.asdict(recipe))


def recipes() -> dict[str, str]:
    """The recipes of the recipes folder: name -> description (or what is wrong with the file), sorted by name."""
    listed = {}
    for name, path in _recipe_files().items():
        try:
            listed[name] = str(read_recipe(path).get("description", ""))
        except RecipeError as error:
            listed[name] = f"cannot be read: {error}"
    return listed


def _build(leaves: Sequence[tuple[str, Any]]) -> Recipe:
    """A checked recipe from (key, value) pairs, of which later ones win; mappings under `model.config` are merged."""
    values: dict[str, Any] = {}
    for key, value in leaves:
        for part in reversed(key.split(".")):
            value = {part: value}
        _merge(values, value)
    try:
        config = OmegaConf.merge(OmegaConf.structured(Recipe), values)
        missing = OmegaConf.missing_keys(config)
        if missing:
            named = [f"{key} ({entry.doc})" for key, entry in schema().items() if key in missing]
            raise RecipeError("required, but not given: " + ("; ".join(named) or ", ".join(sorted(missing))))
        recipe = OmegaConf.to_object(config)
    except RecipeError:
        raise
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise RecipeError(f"the recipe's values cannot be put together: {reason}") from error
    validate(recipe)
    return recipe


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(key: str, value: Any, source: str) -> Iterator[tuple[str, Any]]:
    """The schema's keys, and those inside the free mapping, that `key: value` sets, with values of the schema's types.

    Args:
        key: dotted, of a field, of a section (then the value is a mapping), or inside the free mapping.
        source: what messages start with, such as the file.
    """
    if key in sections():
        if not isinstance(value, dict):
            raise RecipeError(f"{source}{key} is a group of keys, not a value: write {key}.KEY=value; got {value!r}")
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner, source)
    elif key in schema():
        yield key, converted(schema()[key], value, source)
    elif key.startswith(FREE + ".") and all(key.split(".")):
        check_json(key, value, source)
        yield key, value
    else:
        hint = closest(key, [*schema(), *sections()])
        raise RecipeError(f"{source}unknown key {key!r}.{hint or ' --help lists the keys.'}")


def _override_value(key: str, text: str) -> Any:
    """The value of `key=text`. For a string field that is the text itself, so that it needs no YAML quotes."""
    entry = schema().get(key)
    if entry is None or entry.type is not str:
        return parse(text, f"{key}={text}")
    if text in ("", "~", "null"):
        return None
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return parse(text, f"{key}={text}") if quoted else text


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
            lines += ["", f"{section}: {sections()[section]}", ""] if section else ["keys:", ""]
        default = "required" if entry.default == MISSING else f"default {one_line(entry.default)}"
        valid = f", one of {', '.join(CHOICES[key])}" if key in CHOICES else ""
        valid = f", in {INTERVALS[key]}" if key in INTERVALS else valid
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
    if {"--help", "-h"} & set(argv):
        print(help_text(command_name))
        raise SystemExit(0)
    if not argv:
        print(_listing(command_name))
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
