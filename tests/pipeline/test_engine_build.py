"""Real engines of tiny models, built by TensorRT for RTX on this machine, and builds that fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.artifacts import Manifest, writing
from sits_trt.contract import GRAPH_DATA_FILE, GRAPH_FILE, EngineDetails, EngineLimits
from sits_trt.engine import build_engine, inspect_engine, open_engine
from sits_trt.errors import EngineBuildError
from sits_trt.graph import export_graph
from sits_trt.recipe.schema import EngineSection
from sits_trt.spec import TileSpec
from tests.support.engines import LIMITS, build, build_reporting, sku_of
from tests.support.graphs import MemoryCheckpoint, tiny_int4
from tests.support.tiny import tiny_spec, tiny_tensors


def export(checkpoint: MemoryCheckpoint, out_dir: Path, kv_dtype: str = "float16") -> Path:
    out_dir.mkdir(exist_ok=True)
    tile = TileSpec.of(checkpoint.spec, 16, kv_dtype)
    export_graph(checkpoint, tile, LIMITS, out_dir, lambda done, total, what: None)
    return out_dir


@pytest.fixture(scope="module")
def graph_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_int4(), tmp_path_factory.mktemp("graph"))


@pytest.mark.parametrize("sm", [80, 86, 89, 120])
def test_an_engine_for_each_sm_holds_both_plugins(sm: int, graph_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "engine"
    with writing(directory, Manifest("engine", "f", sm=sm, plugins=plugin_digests())) as (partial, details):
        details.update(build(graph_dir, tiny_spec(), partial, sm))
    found = inspect_engine(directory)
    assert {name: plugin["layers"] for name, plugin in found["plugins"].items()} == {
        "SitsTiledAttention": 2, "SitsW4A16Linear": 8
    }  # fmt: skip
    assert all(plugin["in_engine_file"] for plugin in found["plugins"].values())
    assert (found["sm"], found["loads_here"]) == (sm, None)
    assert [profile["name"] for profile in found["profiles"]] == ["decode", "mixed"]
    engine = open_engine(directory, sm)
    assert engine.engine_file is not None
    assert engine.engine_file.stat().st_size == found["engine_bytes"] > 100_000
    assert {path.name for path in directory.iterdir()} == {"manifest.json", "model.engine", "build.log"}
    assert "Engine generation completed" in (directory / "build.log").read_text()


@pytest.mark.parametrize(
    "overrides",
    [
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"family": "qwen3", "qk_norm": True, "head_dim": 32, "layer_windows": (0, 9)},
    ],
    ids=["biases", "norms-and-window"],
)
def test_engines_of_other_layouts(overrides: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tiny_int4(**overrides)
    built = build(export(checkpoint, tmp_path / "graph"), checkpoint.spec, tmp_path / "engine", 80)
    assert built["tensorrt"]["plugin_layers"] == {"SitsTiledAttention": 2, "SitsW4A16Linear": 8}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_engine_without_quantization_has_the_attention_plugin(dtype: torch.dtype, tmp_path: Path) -> None:
    spec = tiny_spec()
    checkpoint = MemoryCheckpoint(spec, {name: t.to(dtype) for name, t in tiny_tensors(spec).items()}, {})
    built = build(export(checkpoint, tmp_path / "graph"), spec, tmp_path / "engine", 89)
    assert built["tensorrt"]["plugin_layers"] == {"SitsTiledAttention": 2}


@pytest.mark.parametrize(("kv_dtype", "sm"), [("int8", 80), ("float8_e4m3", 89), ("int4", 120)])
def test_an_engine_takes_codes_and_scales_of_the_kv_cache(kv_dtype: str, sm: int, tmp_path: Path) -> None:
    graph_dir = export(tiny_int4(), tmp_path / "graph", kv_dtype)
    directory = tmp_path / "engine"
    with writing(directory, Manifest("engine", "f", sm=sm, plugins=plugin_digests())) as (partial, details):
        details.update(build(graph_dir, tiny_spec(), partial, sm, kv_dtype))
    found = inspect_engine(directory)
    assert found["plugins"]["SitsTiledAttention"]["layers"] == 2
    # Names, types and shapes are compared with the network's when the engine is built.
    by_name = {binding["name"]: binding for binding in found["bindings"]}
    row = 8 if kv_dtype == "int4" else 16
    assert (by_name["kv_pool"]["dtype"], by_name["kv_pool"]["shape"]) == ("int8", ("tiles", 2, 2, 2, 16, row))
    assert (by_name["kv_scales"]["dtype"], by_name["kv_scales"]["shape"]) == ("float16", ("tiles", 2, 2, 2, 16))
    assert (found["tile"]["kv_dtype"], found["loads_here"]) == (kv_dtype, None)


def test_pools_beyond_two_to_the_31_elements_are_accepted(graph_dir: Path, tmp_path: Path) -> None:
    """A pool of 60 GB of fp16 has 3e10 elements; TensorRT counts them in 64 bits."""
    tile = TileSpec.of(tiny_spec(), 16)
    limits = EngineLimits(4, 64, 64, num_tiles=30_000_000_000 // (tile.tile_bytes // 2))
    found = build_engine(
        graph_dir, tmp_path, EngineSection(), sku_of(80), tiny_spec(), tile, limits, tmp_path, lambda *report: None
    )
    assert EngineDetails.from_dict(found, tmp_path).limits == limits


def test_progress_never_goes_back_and_ends_complete(graph_dir: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    build_reporting(graph_dir, tmp_path, lambda done, total, what: reports.append((done, total, what)))
    parts = [done / total for done, total, _ in reports]
    assert parts == sorted(parts)
    assert reports[0][0] == 0
    assert parts[-1] == 1
    assert len(reports) > 4


def fail(graph_dir: Path, out_dir: Path, message: str) -> Path:
    """Build, expect the failure, and check what it leaves: a log, and a script that fails in the same way."""
    with pytest.raises(EngineBuildError, match=message) as caught:
        build(graph_dir, tiny_spec(), out_dir, 80)
    log = out_dir / "build.log"
    assert caught.value.log == log
    assert str(log) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (out_dir / "model.engine").exists()
    again = subprocess.run([out_dir / "build-again.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode != 0
    assert again.stderr.splitlines()[0] == log.read_text().splitlines()[0]
    return log


def test_a_damaged_graph_is_an_error_with_a_log(graph_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / GRAPH_FILE).write_bytes((graph_dir / GRAPH_FILE).read_bytes()[:1000])
    fail(tmp_path / "graph", tmp_path / "engine", "failed with status 1")


def test_missing_weights_are_an_error_that_names_the_file(graph_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / GRAPH_FILE).write_bytes((graph_dir / GRAPH_FILE).read_bytes())
    log = fail(tmp_path / "graph", tmp_path / "engine", "failed with status 1")
    assert GRAPH_DATA_FILE in log.read_text()


def change_nodes(graph_dir: Path, out_dir: Path, change: Callable[[onnx.NodeProto], None]) -> Path:
    model = onnx.load(graph_dir / GRAPH_FILE)
    for node in model.graph.node:
        change(node)
    out_dir.mkdir()
    onnx.save(model, out_dir / GRAPH_FILE)
    return out_dir


def test_a_node_without_its_field_names_the_field(graph_dir: Path, tmp_path: Path) -> None:
    def drop_layer(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != "layer"]
        del node.attribute[:]
        node.attribute.extend(kept)

    log = fail(change_nodes(graph_dir, tmp_path / "graph", drop_layer), tmp_path / "engine", "engine builder")
    assert "the node lacks layer" in log.read_text()


def test_a_plugin_of_another_version_is_not_found(graph_dir: Path, tmp_path: Path) -> None:
    def next_version(node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name == "plugin_version":
                attribute.s = b"99"

    log = fail(change_nodes(graph_dir, tmp_path / "graph", next_version), tmp_path / "engine", "failed with status 1")
    assert "99" in log.read_text()


def test_a_crash_of_the_native_library_is_an_error(
    graph_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the link to its core library the parser calls std::terminate."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    unlinked = replace(FLAVOURS["tensorrt-rtx"], library_package="")
    monkeypatch.setitem(FLAVOURS, "tensorrt-rtx", unlinked)
    fail(graph_dir, tmp_path / "engine", "was killed by SIGABRT: terminate called")


def test_the_installation_is_left_alone(graph_dir: Path, tmp_path: Path) -> None:
    spec = find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    before = sorted(path.name for path in folder.iterdir())
    build(graph_dir, tiny_spec(), tmp_path, 80)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_interrupt_leaves_no_child(graph_dir: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    def children() -> str:
        return (Path("/proc") / str(os.getpid()) / "task" / str(os.getpid()) / "children").read_text()

    before = children()
    with pytest.raises(KeyboardInterrupt):
        build_reporting(graph_dir, tmp_path, interrupt)
    assert children() == before


def test_a_killed_build_leaves_no_builder_behind(graph_dir: Path, tmp_path: Path) -> None:
    """The program that builds is killed at the first report of its child."""
    program = (
        "import os, signal, sys; from pathlib import Path; from tests.support.engines import build_reporting\n"
        "build_reporting(Path(sys.argv[1]), Path(sys.argv[2]), lambda *report: os.kill(os.getpid(), signal.SIGKILL))"
    )
    project = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, graph_dir, tmp_path], cwd=project, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not (tmp_path / "model.engine").exists()
    build(graph_dir, tiny_spec(), tmp_path, 80)
    assert (tmp_path / "model.engine").stat().st_size > 100_000


def processes_of(out_dir: Path) -> list[str]:
    """Return the command lines of living builders for `out_dir`."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = place.read_bytes().decode(errors="replace")
            if "tensorrt_child" in command and str(out_dir) in command:
                found.append(command)
    return found
