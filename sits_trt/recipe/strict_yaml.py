"""YAML as its users read it: the 1.2 core schema, and no key twice.

PyYAML follows YAML 1.1, where `no` is false, `1:30` is 90, `0123` is 83, `1e-5` is text and the last
of two equal keys wins. Here those are text, text, text, a number and an error. Aliases are refused: a few
lines of them unfold to gigabytes, and blocks serve their purpose.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from sits_trt.errors import RecipeError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own protocol

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise RecipeError(f"line {line}: aliases such as '*{event.anchor}' are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                line = key_node.start_mark.line + 1
                raise RecipeError(f"line {line}: a key must be text, found {key!r}; put it in quotes")
            if key in seen:
                raise RecipeError(f"given twice, the second time in line {key_node.start_mark.line + 1}; keep one", key)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:null|~|)$"), ["n", "~", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$"),
    list("-+.0123456789"),
)
_CORE = ("null", "bool", "str", "seq", "map")
"""Tags with PyYAML's own construction; the others of its SafeLoader, such as !!binary, are not of the core schema."""

_Loader.yaml_constructors = {
    tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (None, *(f"tag:yaml.org,2002:{name}" for name in _CORE))
}
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document. `where` names it in messages. Raises RecipeError."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a SafeLoader with fewer implicit types
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise RecipeError(f"{where} is not YAML{place}: {problem}") from None
    except RecursionError:
        raise RecipeError(f"{where} is nested too deep to be a recipe") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{where} holds a tag or number that cannot be read ({error})") from None
