"""The build line: each stage's settings and inputs make its fingerprint; a stage runs when that has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sits_plugins.tensorrt_flavours import FLAVOURS
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt import __version__
from sits_trt.artifacts import (
    QUANTIZATION_REPORT,
    BuildDirectory,
    Manifest,
    fingerprint,
    is_current,
    only_writer,
    read_manifest,
    tool_versions,
    writing,
)
from sits_trt.budget import check_budget
from sits_trt.contract import PLUGIN_VERSION, EngineLimits
from sits_trt.errors import RecipeError
from sits_trt.planning import check_kv_cache, plan_limits
from sits_trt.progress import Progress
from sits_trt.recipe.schema import Recipe
from sits_trt.recipe.schemes import possible_formats
from sits_trt.recipe.skus import Sku, find_sku
from sits_trt.spec import PER_CHANNEL, ModelSpec, TileSpec, WeightFormat

Reporter = Callable[[str], AbstractContextManager[Progress]]
"""Opens the display of the stage of that name and yields its progress callback."""

_INT4 = frozenset(WeightFormat(4, group_size, symmetric) for group_size in (32, 64, 128) for symmetric in (True, False))
"""The formats that kernels compute."""


@dataclass(frozen=True)
class Stage:
    """One artifact of the line: what decides it, and how it is made.

    `make(out_dir, progress)` fills the directory and returns what to add to the manifest's details. `judge(directory)`
    raises SitsError where settings that decide nothing in the artifact do not accept it; it is asked before a new
    artifact is put in place, and each time one is kept.
    """

    name: str
    directory: Path
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    make: Callable[[Path, Progress], Mapping[str, Any]]
    tools: tuple[str, ...] = ()
    sm: int | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[Path], None] | None = None

    def manifest(self) -> Manifest:
        tools = {"sits-trt": __version__} | tool_versions(*self.tools)
        identity = {
            "kind": self.name,
            "settings": dict(self.settings),
            "inputs": dict(self.inputs),
            "tools": tools,
            "sm": self.sm,
            "plugins": dict(self.plugins),
        }
        return Manifest(self.name, fingerprint(identity), self.inputs, tools, self.sm, self.plugins)


@dataclass(frozen=True)
class StageResult:
    """What became of one stage. `seconds` is the time it took, checks included."""

    name: str
    directory: Path
    rebuilt: bool
    seconds: float


class BuildLine:
    """The stages of one recipe in one directory, in order."""

    def __init__(self, recipe: Recipe, directory: Path, report: Reporter) -> None:
        self.recipe, self.report = recipe, report
        self.layout = BuildDirectory(directory)
        self.sku: Sku = find_sku(recipe.target.sku)
        check_kv_cache(recipe.kv_cache, self.sku)
        self.made: dict[str, str] = {}

    def run(self) -> Iterator[StageResult]:
        """Run what is not current, yielding each stage's outcome as it ends.

        Raises SitsError, also when another process builds in this directory; stages finished before stay and are
        found again by the next run.
        """
        self.layout.root.mkdir(parents=True, exist_ok=True)
        with only_writer(self.layout.root):
            yield from self._run()

    def _run(self) -> Iterator[StageResult]:
        for make_stage in self._stage_makers():
            began = time.monotonic()
            stage = make_stage()
            manifest = stage.manifest()
            rebuilt = not is_current(stage.directory, stage.name, manifest.fingerprint)
            if rebuilt:
                with self.report(stage.name) as progress, writing(stage.directory, manifest) as (partial, details):
                    details.update(stage.make(partial, progress))
                    if stage.judge:
                        stage.judge(partial)
            elif stage.judge:
                stage.judge(stage.directory)
            self.made[stage.name] = manifest.fingerprint
            yield StageResult(stage.name, stage.directory, rebuilt, time.monotonic() - began)
        self.layout.recipe_file.write_text(self.recipe.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def _stage_makers(self) -> tuple[Callable[[], Stage], ...]:
        quantize = (self._scales, self._quantized) if self.recipe.quantization.scheme != "none" else ()
        kernels = (self._kernels,) if self.sku.sm is not None else ()
        graph = (self._graph,) if self._has_graph else ()
        return (self._checkpoint, *quantize, *kernels, *graph, self._engine, self._repository)

    @property
    def _has_graph(self) -> bool:
        return self.recipe.engine.backend.startswith("tensorrt")

    @property
    def _weights(self) -> tuple[str, Path]:
        """The stage whose directory holds the weights that are served, and that directory."""
        if self.recipe.quantization.scheme == "none":
            return "checkpoint", self.layout.checkpoint
        return "quantized", self.layout.quantized

    def _inputs(self, *stages: str) -> dict[str, str]:
        return {name: self.made[name] for name in stages}

    def _model(self) -> ModelSpec:
        return ModelSpec.from_dict(read_manifest(self.layout.checkpoint, "checkpoint").details["model"])

    def _tile(self) -> TileSpec:
        return TileSpec.of(self._model(), self.recipe.kv_cache.tile_tokens, self.recipe.kv_cache.pool_dtype)

    def _formats(self) -> list[WeightFormat]:
        """Return the formats of quantized weights in this build: the recipe's, or those that the source came with.

        Raises RecipeError when the source's have no kernels for the backend, or the recipe bounds what they lose; a
        recipe that asks for such is refused.
        """
        if self.recipe.quantization.scheme != "none":
            return possible_formats(self.recipe.quantization)
        details = read_manifest(self.layout.checkpoint, "checkpoint").details
        found = [WeightFormat(**form) for form in details.get("formats", [])]
        backend = self.recipe.engine.backend
        if found and self.recipe.quantization.has_bound:
            raise RecipeError(
                "the source is quantized already, and there is no float model to hold max_kl or "
                "max_perplexity_increase against; take them out",
                "quantization",
            )
        for form in found:
            if backend != "eager" and form not in _INT4:
                groups = "per channel" if form.group_size == PER_CHANNEL else f"in groups of {form.group_size}"
                raise RecipeError(
                    f"the source has {form.bits}-bit weights {groups}, engine.backend {backend} "
                    "computes INT4 in groups of 32, 64 and 128; set engine.backend=eager",
                    "model.source",
                )
        return found

    def _limits(self) -> EngineLimits:
        model = self._model()
        formats = self._formats()
        largest = max((form.bits_per_weight(model.hidden_size) for form in formats), default=16.0)
        bits = self.recipe.quantization.bits_per_weight or largest
        return plan_limits(
            model, self._tile(), self.sku, self.recipe.engine, self.recipe.kv_cache, self.recipe.serving, bits
        )

    def _checkpoint(self) -> Stage:
        from sits_trt.checkpoint.source import source_digest

        section, scheme = self.recipe.model, self.recipe.quantization.scheme

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.checkpoint import materialize, open_checkpoint, refuse_quantized

            if scheme != "none":
                refuse_quantized(open_checkpoint(section.source))
            materialize(section.source, out, section.dtype, progress)
            made = open_checkpoint(out)
            formats = [vars(form) for form in dict.fromkeys(made.formats.values())]
            return {"model": made.spec.to_dict(), "source": section.source, "formats": formats}

        digest = source_digest(section.source, cache=self.layout.root / "source-digests.json")
        tools = ("safetensors", "transformers", "gguf")
        return Stage("checkpoint", self.layout.checkpoint, {"dtype": section.dtype}, {"source": digest}, make, tools)

    def _scales(self) -> Stage:
        from sits_trt.checkpoint.texts import text_digest

        section, smooth_keys = self.recipe.quantization, self.recipe.kv_cache.has_integer_codes

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.checkpoint import open_checkpoint
            from sits_trt.quant import search_scales

            return search_scales(open_checkpoint(self.layout.checkpoint), section, out, progress, smooth_keys)

        inputs = self._inputs("checkpoint") | {"text": text_digest(section.calibration.source)}
        settings = section.decisive() | {"smooth_keys": smooth_keys}
        return Stage("scales", self.layout.scales, settings, inputs, make, ("torch", "numpy"))

    def _quantized(self) -> Stage:
        section = self.recipe.quantization

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.checkpoint import open_checkpoint
            from sits_trt.quant import apply_scales

            return apply_scales(
                open_checkpoint(self.layout.checkpoint), self.layout.scales, section, out, progress
            )  # fmt: skip

        inputs = self._inputs("checkpoint", "scales")

        def judge(directory: Path) -> None:
            check_budget(section, directory / QUANTIZATION_REPORT)

        return Stage("quantized", self.layout.quantized, section.decisive(), inputs, make, judge=judge)

    def _graph(self) -> Stage:
        stage, directory = self._weights
        tile, limits = self._tile(), self._limits()

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.checkpoint import open_checkpoint
            from sits_trt.graph import export_graph

            return export_graph(open_checkpoint(directory), tile, limits, out, progress)

        settings = {
            "tile": vars(tile),
            "max_seq_tokens": limits.max_seq_tokens,
            "plugin_version": PLUGIN_VERSION,
        }
        tools = ("torch", "onnx", "onnx-ir", "onnxscript")
        return Stage("graph", self.layout.graph, settings, self._inputs(stage), make, tools)

    def _kernels(self) -> Stage:
        from sits_plugins.compile import sources_fingerprint

        sm, model, tile = self.sku.sm, self._model(), self._tile()
        assert sm is not None, "a target without a GPU has no kernels stage"
        needs: dict[str, Any] = {
            "dtype": self.recipe.model.dtype,
            "kv_dtype": tile.kv_dtype,
            "head_dim": model.head_dim,
            "group": model.num_heads // model.num_kv_heads,
            "tile_tokens": tile.tile_tokens,
            "int4": [[form.group_size, form.symmetric] for form in self._formats() if form in _INT4],
        }

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_plugins.compile import compile_bundle

            return {"bundle": compile_bundle(sm, out, progress, _needed_kernels(sm, **needs)).digest()}

        return Stage("kernels", self.layout.kernels, needs, {"sources": sources_fingerprint(sm)}, make, sm=sm)

    def _engine(self) -> Stage:
        stage, checkpoint = self._weights
        section, limits, tile = self.recipe.engine, self._limits(), self._tile()

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.engine import build_engine

            return build_engine(
                self.layout.graph if self._has_graph else None, checkpoint, section, self.sku,
                self._model(), tile, limits, out, progress, self.layout.kernels if self.sku.sm else None,
            )  # fmt: skip

        settings = {"engine": section.model_dump(mode="json"), "tile": vars(tile), "limits": limits.to_dict()}
        inputs = self._inputs(stage, *(("graph",) if self._has_graph else ()), *(("kernels",) if self.sku.sm else ()))
        tools = FLAVOURS[section.backend].distributions if self._has_graph else ()
        plugins = plugin_digests() if self._has_graph else {}
        return Stage("engine", self.layout.engine, settings, inputs, make, tools, self.sku.sm, plugins)

    def _repository(self) -> Stage:
        from sits_trt.repository import RepositoryPaths, render_repository

        section = self.recipe.serving

        def make(out: Path, progress: Progress) -> Mapping[str, Any]:
            from sits_trt.repository import write_repository

            return write_repository(out, self.layout.engine, section, self.recipe.kv_cache, progress)

        # What would be written, not what it is made from: another version's files are replaced, too.
        paths = RepositoryPaths(self.layout.engine.name, self._weights[0])
        settings = {"files": fingerprint(render_repository(paths, section, self.recipe.kv_cache))}
        return Stage("repository", self.layout.repository, settings, self._inputs("engine"), make, ("tritonclient",))


def _needed_kernels(
    sm: int,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    group: int,
    tile_tokens: int,
    int4: list[tuple[int, bool]],
) -> Callable[[str], bool]:
    """Return which kernels a build needs. `group` is query heads per KV head; `int4` has group sizes and symmetry."""
    from sits_plugins.attention_names import needed as attention_needed
    from sits_plugins.linear_catalogue import needed as linear_needed

    attention = attention_needed(sm, dtype, kv_dtype, head_dim, group, tile_tokens)
    linears = [linear_needed(dtype, *form) for form in int4]
    return lambda name: attention(name) and (not name.startswith("linear_") or any(one(name) for one in linears))
