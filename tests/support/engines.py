"""Engine directories for tests: built for real, or a manifest beside a file that no library would accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.artifacts import Manifest, writing
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.engine import build_engine
from sits_trt.recipe import Sku
from sits_trt.recipe.schema import EngineSection
from sits_trt.spec import ModelSpec, TileSpec
from tests.support.tiny import tiny_spec

LIMITS = EngineLimits(max_batch_size=4, max_tokens_per_step=64, max_seq_tokens=64, num_tiles=16)


def sku_of(sm: int | None) -> Sku:
    return Sku(f"test-sm{sm}", sm, 24, 1000, 0)


def build(
    graph_dir: Path | None, model: ModelSpec, out_dir: Path, sm: int | None, kv_dtype: str = "float16", **section: Any
) -> dict[str, Any]:
    """Build a tiny model's engine in `out_dir` and return its details."""
    out_dir.mkdir(exist_ok=True)
    tile = TileSpec.of(model, 16, kv_dtype)
    return build_engine(
        graph_dir, out_dir / "checkpoint", EngineSection(**section), sku_of(sm), model, tile, LIMITS, out_dir,
        lambda done, total, what: None,
    )  # fmt: skip


def build_reporting(graph_dir: Path, out_dir: Path, progress: Callable[[int, int, str], None]) -> None:
    """Build the engine of a tiny Llama for SM 80, for what is reported meanwhile."""
    model = tiny_spec()
    tile = TileSpec.of(model, 16)
    build_engine(graph_dir, out_dir, EngineSection(), sku_of(80), model, tile, LIMITS, out_dir, progress)


def dummy_engine(directory: Path, model: ModelSpec, **changes: Any) -> Path:
    """Write an engine directory that fits this machine but for `changes` of its manifest, with a dummy engine file.

    `version` changes the TensorRT version that it was built with; other keys are fields of Manifest.
    """
    content = b"not an engine: any library that is given this fails"
    version = changes.pop("version", FLAVOURS["tensorrt-rtx"].version())
    details = EngineDetails("tensorrt-rtx", model, TileSpec.of(model, 16), LIMITS, "../checkpoint", "model.engine")
    built = {"version": version, "bytes": len(content), "plugin_layers": dict.fromkeys(plugin_digests(), 2)}
    values: dict[str, Any] = {"sm": 80, "plugins": plugin_digests(), "details": details.to_dict() | {"tensorrt": built}}
    with writing(directory, Manifest("engine", "fingerprint", **(values | changes))) as (partial, _):
        (partial / "model.engine").write_bytes(content)
    return directory
