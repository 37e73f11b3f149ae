"""From a YAML file, its blocks and --set overrides to a validated recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sits_trt.artifacts import BuildDirectory
from sits_trt.errors import RecipeError, did_you_mean
from sits_trt.recipe.schema import Recipe
from sits_trt.recipe.skus import find_sku
from sits_trt.recipe.strict_yaml import parse_yaml


def catalogue_directory() -> Path:
    """Return the directory of the recipes that ship with the project."""
    spec = find_spec("sits_recipes")
    if spec is None or spec.origin is None:
        raise RecipeError("the shipped recipes are not installed; install sits-trt with pip")
    return Path(spec.origin).parent


def find_recipe(name: str) -> Path:
    """Return the file that `name` means: a path, or the name of a shipped recipe such as 'a100'."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = catalogue_directory() / f"{name}.yaml"
    if path.name == name and shipped.is_file():
        return shipped
    known = sorted(p.stem for p in catalogue_directory().glob("*.yaml"))
    raise RecipeError(f"there is no recipe '{name}'{did_you_mean(path.stem, known)}; shipped ones: {', '.join(known)}")


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by path or shipped name, apply `a.b=c` overrides and validate the result.

    Raises RecipeError naming the key for anything that is wrong.
    """
    path = find_recipe(name)
    data = _read(path)
    merged: dict[str, Any] = {}
    for block in _block_names(data.pop("blocks", [])):
        merged = _merge(merged, _read(_block_path(path, block)))
    merged = _merge(merged, data)
    merged.setdefault("name", path.stem)
    for override in overrides:
        merged = _merge(merged, _parse_override(override))
    recipe = _validate(merged)
    find_sku(recipe.target.sku)
    return recipe


def recipe_of_build(directory: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the resolved recipe that a build directory was made from, with overrides of the present call.

    Raises RecipeError when the directory holds none.
    """
    path = BuildDirectory(directory).recipe_file
    try:
        merged = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{directory} is no finished build; make it with 'sits-trt build'") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read ({error}); build again") from None
    if not isinstance(merged, dict):
        raise RecipeError(f"{path} holds no recipe; build again")
    for override in overrides:
        merged = _merge(merged, _parse_override(override))
    return _validate(merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path} must hold keys and values, found {type(data).__name__}")
    return data


def _block_names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RecipeError("must be a list of block names", "blocks")
    return value


def _block_path(recipe: Path, block: str) -> Path:
    for directory in (recipe.parent / "blocks", catalogue_directory() / "blocks"):
        if (path := directory / f"{block}.yaml").is_file():
            return path
    known = sorted(p.stem for p in (catalogue_directory() / "blocks").glob("*.yaml"))
    raise RecipeError(f"there is no block '{block}'{did_you_mean(block, known)}; known: {', '.join(known)}", "blocks")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid on it; mappings merge key by key, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        both_maps = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if both_maps else value
    return result


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"'--set {text}' is not of the form section.key=value")
    parsed: Any = parse_yaml(value, f"--set {key}")
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return dict(parsed)


def _validate(data: dict[str, Any]) -> Recipe:
    try:
        # Through JSON: strict types, yet lists for tuples.
        return Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise RecipeError(f"{_sentence(first)}{more}", key) from None


def _sentence(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return f"is unknown{did_you_mean(str(error['loc'][-1]), _known_keys(error['loc'][:-1]))}"
        case _:
            return f"{message[0].lower()}{message[1:]}, found {error['input']!r}"


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    model: Any = Recipe
    for part in location:
        model = model.model_fields[str(part)].annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)
