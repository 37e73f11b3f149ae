"""What the engine stage refuses before it starts, and the backends that need no builder."""

from __future__ import annotations

from pathlib import Path

import pytest
from sits_plugins.tensorrt_flavours import FLAVOURS, Flavour

from sits_trt.contract import EngineDetails
from sits_trt.engine.gpu import gpu_sm
from sits_trt.engine.tensorrt import compute_capability
from sits_trt.errors import EngineBuildError
from tests.support.engines import LIMITS, build, sku_of
from tests.support.tiny import tiny_spec


@pytest.mark.parametrize(("backend", "sm"), [("eager", None), ("eager", 80), ("cuda", 90)])
def test_backends_that_run_the_checkpoint_need_only_a_manifest(backend: str, sm: int | None, tmp_path: Path) -> None:
    found = build(None, tiny_spec(), tmp_path, sm, backend=backend)
    details = EngineDetails.from_dict(found, tmp_path)
    assert (details.backend, details.model, details.limits) == (backend, tiny_spec(), LIMITS)
    assert (details.checkpoint, details.engine_file) == ("checkpoint", "")
    assert not any(tmp_path.iterdir())


def refused(out_dir: Path, message: str, sm: int | None, backend: str = "tensorrt-rtx") -> None:
    with pytest.raises(EngineBuildError, match=message):
        build(out_dir / "graph", tiny_spec(), out_dir / "engine", sm, backend=backend)
    assert not any((out_dir / "engine").iterdir())


def test_sm_90_is_refused_by_tensorrt_rtx_with_the_way_out(tmp_path: Path) -> None:
    refused(
        tmp_path,
        r"'tensorrt-rtx' does not run on SM 90 \(test-sm90\), only on 80, 86, 89, 120; set engine.backend=cuda",
        90,
    )


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt", "cuda"])
def test_a_target_without_a_gpu_is_refused_by_backends_that_need_one(backend: str, tmp_path: Path) -> None:
    refused(tmp_path, "SKU 'test-smNone' has none; set engine.backend=eager", None, backend)


def test_tensorrt_builds_only_on_the_gpu_that_it_builds_for(tmp_path: Path) -> None:
    other = 80 if gpu_sm() != 80 else 90
    refused(tmp_path, f"builds on the GPU that it builds for, SM {other} .*; build there, or set", other, "tensorrt")


def test_a_graph_is_needed(tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError, match="needs an exported graph; build the graph stage first"):
        build(None, tiny_spec(), tmp_path, 80)
    refused(tmp_path, "graph holds no model.onnx; build the graph stage first", 80)


def test_a_flavour_that_is_not_installed_says_how_to_get_it() -> None:
    absent = Flavour("tensorrt-rtx", ("no_such_module",), ("no-such-distribution",), (80,), "pip install it")
    assert absent.version() is None
    with pytest.raises(EngineBuildError, match="needs no_such_module, which is not installed; pip install it"):
        absent.module()


@pytest.mark.parametrize("sm", [80, 86, 89, 120])
def test_tensorrt_rtx_builds_for_every_other_sm(sm: int) -> None:
    assert compute_capability(FLAVOURS["tensorrt-rtx"], sku_of(sm)) == sm
