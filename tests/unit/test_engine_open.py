"""Verification before trust: an engine that does not fit is refused from its manifest, before any library is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.engine import inspect_engine, open_engine
from sits_trt.errors import ArtifactMismatch, SitsError
from tests.support.engines import dummy_engine
from tests.support.tiny import tiny_spec


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_fitting_engine_opens(tmp_path: Path) -> None:
    engine = open_engine(dummy_engine(tmp_path / "engine", tiny_spec()), sm=80)
    assert engine.details.model == tiny_spec()
    assert engine.engine_file == tmp_path / "engine" / "model.engine"
    assert open_engine(tmp_path / "engine", sm=None).manifest.sm == 80


def test_only_plugins_that_the_engine_calls_are_compared(tmp_path: Path) -> None:
    directory = dummy_engine(tmp_path / "engine", tiny_spec())

    def without_linear(data: dict[str, Any]) -> None:
        del data["details"]["tensorrt"]["plugin_layers"]["SitsW4A16Linear"]
        data["plugins"]["SitsW4A16Linear"] = "1:of another program"

    edit(directory, without_linear)
    assert open_engine(directory, sm=80).manifest.sm == 80


def test_eager_engines_open_anywhere_and_cuda_ones_on_their_gpu(tmp_path: Path) -> None:
    for backend in ("eager", "cuda"):
        edit(
            dummy_engine(tmp_path / backend, tiny_spec()),
            lambda data, backend=backend: data["details"].update(backend=backend, engine_file=""),
        )
    assert open_engine(tmp_path / "eager", sm=90).engine_file is None
    assert open_engine(tmp_path / "cuda", sm=80).engine_file is None
    with pytest.raises(ArtifactMismatch, match="needs SM 90, the artifact has SM 80"):
        open_engine(tmp_path / "cuda", sm=90)


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "version": (
        lambda data: data["details"]["tensorrt"].update(version="0.9.1"),
        f"needs {FLAVOURS['tensorrt-rtx'].version()}, the artifact has 0.9.1; build it again",
    ),
    "capability": (lambda data: data.update(sm=89), "needs SM 80, the artifact has SM 89; build it again"),
    "plugin": (
        lambda data: data["plugins"].update(SitsTiledAttention="1:0123"),
        f"plugin SitsTiledAttention of the engine: .* needs {plugin_digests()['SitsTiledAttention']}, "
        "the artifact has 1:0123; build it again",
    ),
    "no plugin": (lambda data: data["plugins"].pop("SitsW4A16Linear"), "SitsW4A16Linear.* has none; build it again"),
    "unknown plugin": (
        lambda data: data["details"]["tensorrt"]["plugin_layers"].update(SitsNew=1),
        "plugin SitsNew of the engine: .* needs none, the artifact has none; build it again",
    ),
    "schema": (lambda data: data.update(schema_version=0), "needs 1, the artifact has 0; build it again"),
    "kind": (lambda data: data.update(kind="graph"), "needs engine, the artifact has graph"),
    "no version": (lambda data: data["details"].pop("tensorrt"), "the artifact has unknown; build it again"),
    "truncated": (
        lambda data: data["details"]["tensorrt"].update(bytes=10**6),
        "needs 1000000 bytes, the artifact has 51 bytes; copy or build it again",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_b23_an_edited_manifest_is_refused_and_nothing_is_changed(what: str, tmp_path: Path) -> None:
    directory = dummy_engine(tmp_path / "engine", tiny_spec())
    change, message = REFUSALS[what]
    edit(directory, change)
    before = snapshot(directory)
    with pytest.raises(ArtifactMismatch, match=message):
        open_engine(directory, sm=80)
    assert snapshot(directory) == before


def test_b23_the_runtime_is_not_touched(tmp_path: Path) -> None:
    """In a process of its own, since this one may have loaded TensorRT for another test."""
    directory = dummy_engine(tmp_path / "engine", tiny_spec(), sm=120)
    program = (
        "import sys; from pathlib import Path; from sits_trt.engine import open_engine, inspect_engine\n"
        "from sits_trt.errors import ArtifactMismatch\n"
        "inspect_engine(Path(sys.argv[1]))\n"
        "try:\n    open_engine(Path(sys.argv[1]), 80)\n"
        "except ArtifactMismatch as error:\n    print(error)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0].startswith(('tensorrt', 'torch', 'onnx'))))\n"
        "print([line.split()[-1] for line in open('/proc/self/maps') if 'tensorrt' in line])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True, timeout=60
    )
    message, modules, libraries = done.stdout.splitlines()
    assert "needs SM 80, the artifact has SM 120" in message
    assert (modules, libraries) == ("[]", "[]")


def test_a_missing_or_damaged_manifest_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SitsError, match=r"holds no manifest.json; build it first"):
        open_engine(tmp_path, sm=80)
    directory = dummy_engine(tmp_path / "engine", tiny_spec())
    edit(directory, lambda data: data["details"].pop("limits"))
    with pytest.raises(SitsError, match="lacks or misnames 'limits'; delete the directory and build again"):
        open_engine(directory, sm=80)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((key, value) for key in ("tools", "plugins", "inputs", "details") for value in (None, 5, [])),
        *(("sm", value) for value in ("80", [80])),
        *(
            (f"details.{key}", value)
            for key in ("backend", "engine_file", "model", "tile", "limits")
            for value in (5, [])
        ),
        *(("details.model.rope", "x"), ("details.tile.head_dim", None), ("details.tile.kv_dtype", "x")),
        ("details.tensorrt", {}),
    ],
)
def test_a_manifest_of_wrong_types_is_one_sentence(tmp_path: Path, path: str, value: Any) -> None:
    directory = dummy_engine(tmp_path / "engine", tiny_spec())
    *outer, last = path.split(".")

    def damage(data: dict[str, Any]) -> None:
        for key in outer:
            data = data[key]
        data[last] = value

    edit(directory, damage)
    with pytest.raises(SitsError, match=r"build (it )?again"):
        open_engine(directory, sm=80)


def test_inspect_says_what_is_in_it_and_why_it_would_not_load(tmp_path: Path) -> None:
    directory = dummy_engine(tmp_path / "engine", tiny_spec(), version="0.9.1")
    found = inspect_engine(directory)
    assert json.loads(json.dumps(found))["limits"] == found["limits"]
    assert (found["backend"], found["sm"]) == ("tensorrt-rtx", 80)
    assert [b["name"] for b in found["bindings"]] == [
        "input_ids", "kv_pool", "tile_table", "context_lens", "query_starts", "logit_indices", "logits"
    ]  # fmt: skip
    assert "0.9.1" in found["loads_here"]
    assert found["plugins"]["SitsTiledAttention"]["layers"] == 2
    assert found["plugins"]["SitsTiledAttention"]["in_engine_file"] is False
