"""The engine stage: one call for every backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, assert_never

from sits_trt.contract import EngineDetails, EngineLimits, bindings
from sits_trt.engine.profiles import plan_profiles
from sits_trt.engine.tensorrt import ENGINE_FILE, EnginePlan, build_tensorrt
from sits_trt.errors import EngineBuildError
from sits_trt.progress import Progress
from sits_trt.recipe.schema import EngineSection
from sits_trt.recipe.skus import Sku
from sits_trt.spec import ModelSpec, TileSpec


def build_engine(
    graph_dir: Path | None,
    checkpoint_dir: Path,
    section: EngineSection,
    sku: Sku,
    model: ModelSpec,
    tile: TileSpec,
    limits: EngineLimits,
    out_dir: Path,
    progress: Progress,
    kernels_dir: Path | None = None,
) -> dict[str, Any]:
    """Make the engine of `section.backend` in `out_dir` and return the details of its manifest.

    The details are `contract.EngineDetails` and what the backend adds (profiles, layers, build figures).
    `graph_dir` is the exported graph; backends that run the checkpoint take none. `kernels_dir` is the kernel bundle
    of the SKU, None where it has no GPU. Raises EngineBuildError.
    """
    details = EngineDetails(
        backend=section.backend,
        model=model,
        tile=tile,
        limits=limits,
        checkpoint=os.path.relpath(checkpoint_dir.resolve(), out_dir.resolve()),
        kernels=os.path.relpath(kernels_dir.resolve(), out_dir.resolve()) if kernels_dir else "",
    ).to_dict()
    match section.backend:
        case "cuda" if sku.sm is None:
            raise EngineBuildError(
                f"backend 'cuda' runs on GPUs and SKU '{sku.name}' has none; set engine.backend=eager"
            )
        case "eager" | "cuda":
            progress(1, 1, f"the {section.backend} backend runs the checkpoint")
            return details
        case "tensorrt" | "tensorrt-rtx":
            if graph_dir is None:
                raise EngineBuildError(
                    f"backend '{section.backend}' needs an exported graph; build the graph stage first"
                )
            profiles = plan_profiles(model, tile, limits, section.prompt_tokens, section.max_output_tokens)
            plan = EnginePlan(bindings(model, tile), profiles, section.optimization_level)
            built = build_tensorrt(section.backend, graph_dir, sku, plan, out_dir, progress)
            return details | {
                "engine_file": ENGINE_FILE,
                "profiles": [profile.to_dict() for profile in profiles],
                "tensorrt": built,
            }
        case _:
            assert_never(section.backend)
