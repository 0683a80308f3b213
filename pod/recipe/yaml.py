"""The YAML of recipes: scalars as in YAML 1.2, no aliases, no key twice; errors that name the file and the line."""

import re
import typing
from typing import Any

import yaml

from pod.recipe.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML whose scalars mean what they look like, as in YAML 1.2: PyYAML's 1.1 reads `12:30:00` as an int, `no` as
    false, `1e3` as text and a date as an object. A key given twice is an error, and there are no aliases."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*) are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or `_Loader` would not read as text."""


_DIGITS = "[0-9]+(?:_[0-9]+)*"
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", f"[-+]?{_DIGITS}", "-+0123456789"),
    ("float", rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
)


def parse(text: str, source: str) -> Any:
    """What a YAML text holds. If it is not valid, a RecipeError names `source`, such as the file, and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark and "\n" in text else ""
        raise RecipeError(f"{source}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{source}: not valid YAML: {error}") from error


def dump(values: dict[str, Any]) -> str:
    """A mapping as YAML that `parse` reads back to an equal one, in its order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
