"""The structure of the house: who may import whom, how long a file may be, what loads at start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sits_trt.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sits_trt"

GROUND = ("errors", "progress", "spec", "layouts", "contract", "artifacts", "wire")
LIBRARY = (*GROUND, "checkpoint", "ops", "models")
EARLIER = {
    "errors": (),
    "progress": (),
    "spec": (),
    "layouts": ("errors", "spec"),
    "contract": ("errors", "spec"),
    "artifacts": ("errors", "spec"),
    "wire": (),
    "recipe": GROUND,
    "checkpoint": (*GROUND, "recipe"),
    "ops": (*GROUND, "checkpoint"),
    "models": (*GROUND, "checkpoint", "ops"),
    "quant": (*LIBRARY, "recipe"),
    "graph": (*LIBRARY, "recipe", "quant"),
    "engine": (*LIBRARY, "recipe", "quant", "graph"),
    "repository": (*LIBRARY, "recipe", "quant", "graph", "engine"),
    "kernels": (*LIBRARY, "recipe"),
    "runtime": (*LIBRARY, "recipe", "kernels"),
    "serving": (*LIBRARY, "recipe", "kernels", "runtime"),
    "sweep": (*LIBRARY, "recipe", "kernels", "runtime", "serving"),
}
"""For each room the rooms that it may import; the rooms at the top (pipeline, cli, ...) may import all."""

ONLY_IN = {
    "numpy": None,
    "torch": None,
    "pydantic": ("recipe",),
    "yaml": ("recipe",),
    "safetensors": ("checkpoint", "quant"),
    "transformers": ("checkpoint",),
    "gguf": ("checkpoint",),
    "onnx": ("graph",),
    "onnx_ir": ("graph",),
    "onnxscript": ("graph",),
    "tensorrt": ("engine", "runtime"),
    "tensorrt_rtx": ("engine", "runtime"),
    "tensorrt_rtx_bindings": ("engine", "runtime"),
    "triton": ("kernels", "plugins"),
    "cuda": ("kernels", "plugins", "runtime"),
    "tritonclient": ("repository", "serving", "sweep"),
    "typer": ("cli",),
}
"""Libraries that only some rooms may import; None is for those with a rule of their own below."""

NO_TORCH = (*GROUND, "recipe", "repository")
NO_NUMPY = ("errors", "spec", "contract", "artifacts", "recipe")
MAX_LINES = 500
MAX_LINES_OF = {"cli": 200}
"""Rooms whose files stay shorter than MAX_LINES: a command is thin."""

TOP = ("cli",)
"""Rooms above the staircase, which may import all."""


def sources(*folders: Path) -> list[Path]:
    return sorted(p for folder in folders for p in folder.rglob("*.py"))


def room_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "plugins"):
        return "plugins"
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", sources(PACKAGE, ROOT / "plugins"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_staircase(path: Path) -> None:
    room = room_of(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "sits_trt" and rest and room in EARLIER | {"plugins": ()}:
            wanted = rest.split(".")[0]
            allowed = (*GROUND, "plugins") if room == "plugins" else (*EARLIER[room], room)
            assert wanted in allowed, f"{path}: room '{room}' may not import sits_trt.{wanted}"
        if top in ONLY_IN:
            rooms = ONLY_IN[top]
            in_house = room in EARLIER or room == "plugins" or top == "typer"
            assert rooms is None or not in_house or room in rooms, f"{path}: room '{room}' may not import {top}"
        if top == "torch":
            assert room not in NO_TORCH, f"{path}: room '{room}' may not import torch"
        if top == "numpy":
            assert room not in NO_NUMPY, f"{path}: room '{room}' may not import numpy"


def test_every_room_is_known() -> None:
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found <= {*EARLIER, *TOP}, f"rooms without a place on the staircase: {found - {*EARLIER, *TOP}}"


@pytest.mark.parametrize(
    "path", sources(PACKAGE, ROOT / "plugins", ROOT / "scripts", ROOT / "tests"), ids=lambda p: p.name
)
def test_files_stay_small(path: Path) -> None:
    limit = MAX_LINES_OF.get(room_of(path), MAX_LINES) if path.is_relative_to(PACKAGE) else MAX_LINES
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{path} has {lines} lines; {limit} are allowed"


def test_every_package_is_in_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for init in sources(PACKAGE):
        if init.name == "__init__.py":
            package = ".".join(init.parent.relative_to(ROOT).parts)
            assert f'"{package}"' in text, f"{package} is missing from [tool.setuptools] packages"


@pytest.mark.parametrize("module", ["cli", "recipe", "artifacts", "repository", "pipeline"])
def test_import_loads_no_torch(module: str) -> None:
    code = f"import sys, sits_trt.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'tensorrt', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipe_loads_and_is_listed(path: Path) -> None:
    assert load_recipe(str(path)).name == path.stem
    assert f"`{path.name}`" in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")


def test_every_block_is_listed_and_used() -> None:
    listed = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    recipes = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "recipes").glob("*.yaml"))
    for block in (ROOT / "recipes" / "blocks").glob("*.yaml"):
        assert f"`{block.stem}`" in listed, f"block {block.stem} is not in recipes/README.md"
        assert block.stem in recipes, f"no recipe uses block {block.stem}"


def test_every_test_file_collects_a_test() -> None:
    for path in sources(ROOT / "tests"):
        if path.name.startswith("test_"):
            names = [n.name for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(n, "name")]
            assert any(str(name).startswith("test_") for name in names), f"{path} has no test"


def test_scripts_are_never_imported() -> None:
    for path in sources(PACKAGE, ROOT / "plugins", ROOT / "tests"):
        assert not any(module.split(".")[0] == "scripts" for module in imports(path)), path
