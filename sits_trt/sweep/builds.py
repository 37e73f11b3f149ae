"""What is known of a build before it is served: read from its recipe and manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sits_trt.artifacts import BuildDirectory, read_manifest
from sits_trt.contract import EngineDetails
from sits_trt.errors import SitsError
from sits_trt.recipe.schemes import SCHEMES
from sits_trt.spec import PER_CHANNEL, WeightFormat
from sits_trt.sweep.result import BuildInfo

_SHORT = {"float8_e4m3": "FP8"}


def describe_builds(directories: list[Path]) -> list[BuildInfo]:
    """Return what each directory holds, in the order given; directories given twice count once.

    A build that is not finished is described as far as it goes. Builds of one name are told apart by
    their directories. Raises SitsError for no directories, and for one that does not exist or is no build.
    """
    if not directories:
        raise SitsError("no builds were given; name at least one directory that 'sits-trt build' wrote")
    unique = list(dict.fromkeys(directory.resolve() for directory in directories))
    infos = [_describe(directory) for directory in unique]
    names = [info.name for info in infos]
    return [replace(i, name=f"{i.name} in {i.directory}") if names.count(i.name) > 1 else i for i in infos]


def unfinished_reason(info: BuildInfo) -> str:
    """Say which part of a build is missing, empty when it can be served."""
    layout = BuildDirectory(Path(info.directory))
    if not info.recipe:
        return f"its last 'sits-trt build' did not end: {layout.recipe_file} is missing; run it again"
    try:
        for directory, kind in ((layout.engine, "engine"), (layout.repository, "repository")):
            read_manifest(directory, kind)
    except SitsError as error:
        return str(error)
    return ""


def longest_sequence_tokens(info: BuildInfo) -> int:
    """Return how many tokens of prompt and answer together the build's engine takes."""
    engine = BuildDirectory(Path(info.directory)).engine
    return EngineDetails.from_dict(read_manifest(engine, "engine").details, engine).limits.max_seq_tokens


def weights_directory(info: BuildInfo) -> Path:
    """Return the checkpoint that the engine was made from."""
    layout = BuildDirectory(Path(info.directory))
    return layout.quantized if info.quantized else layout.checkpoint


def _describe(directory: Path) -> BuildInfo:
    layout = BuildDirectory(directory)
    if not any(stage.is_dir() for stage in (layout.checkpoint, layout.engine, layout.repository)):
        raise SitsError(f"{directory} is no build; give a directory that 'sits-trt build' wrote")
    recipe = _read_recipe(layout)
    info = BuildInfo(
        name=recipe.get("name", directory.name),
        directory=str(directory),
        model=recipe.get("model", {}).get("source", ""),
        target=recipe.get("target", {}).get("sku", ""),
        backend=recipe.get("engine", {}).get("backend", ""),
        weights=_weights(recipe, layout) if recipe else "",
        quantized=recipe.get("quantization", {}).get("scheme", "none") != "none",
        weights_bytes=0,
        fingerprint=_fingerprint(layout.repository, "repository"),
        checkpoint_fingerprint=_fingerprint(layout.checkpoint, "checkpoint"),
        recipe=recipe,
        kv_dtype=recipe.get("kv_cache", {}).get("dtype", "float16"),
        source_quantized=bool(_source_formats(layout)),
    )
    files = weights_directory(info).glob("*.safetensors")
    return replace(info, weights_bytes=sum(file.stat().st_size for file in files))


def _read_recipe(layout: BuildDirectory) -> dict[str, Any]:
    if not layout.recipe_file.is_file():
        return {}
    try:
        recipe: dict[str, Any] = json.loads(layout.recipe_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SitsError(f"{layout.recipe_file} cannot be read ({error}); build again") from None
    return recipe


def _fingerprint(directory: Path, kind: str) -> str:
    try:
        return read_manifest(directory, kind).fingerprint
    except SitsError:
        return ""


def _weights(recipe: dict[str, Any], layout: BuildDirectory) -> str:
    q, kv_dtype = recipe["quantization"], recipe["kv_cache"]["dtype"]
    cache = "" if kv_dtype == "float16" else f", {kv_dtype.upper()} KV cache"
    if q["scheme"] == "none":
        return f"{_as_in_the_source(layout) or recipe['model']['dtype']}{cache}"
    scheme, recovery = SCHEMES[q["scheme"]], ", ScaleRecover" if q["scale_recover"] else ""
    if scheme.codes != "int":
        return f"{scheme.title} {q['method'].upper()}{recovery}{cache}"
    if bits := q.get("bits_per_weight"):
        return f"INT4 {q['method'].upper()} mixed to {bits:g} bits{recovery}{cache}"
    groups = "per channel" if q["group_size"] == PER_CHANNEL else f"g{q['group_size']}"
    zeros = "symmetric" if q["symmetric"] else "zero points"
    return f"{scheme.title} {q['method'].upper()} {groups}, {zeros}{recovery}{cache}"


def _source_formats(layout: BuildDirectory) -> list[WeightFormat]:
    """Return the formats that the weights of a build came in, none where they were not quantized."""
    try:
        details = read_manifest(layout.checkpoint, "checkpoint").details
    except SitsError:
        return []
    try:
        return [WeightFormat(**form) for form in details.get("formats", [])]
    except TypeError:
        raise SitsError(f"the manifest of {layout.checkpoint} is damaged: 'formats'; build again") from None


def _kind(form: WeightFormat) -> str:
    """Return the name of a format of weights in a table."""
    activations = (
        "" if form.activations == "float16" else f", {_SHORT.get(form.activations, form.activations)} activations"
    )
    if form.codes != "int":
        return f"{_SHORT.get(form.codes, form.codes)}{activations}"
    groups = "per channel" if form.group_size == PER_CHANNEL else f"g{form.group_size}"
    return f"INT{form.bits} {groups}, {'symmetric' if form.symmetric else 'zero points'}{activations}"


def _as_in_the_source(layout: BuildDirectory) -> str:
    """Say what the weights of a build are whose source was quantized already, empty where it was not."""
    kinds = [_kind(form) for form in _source_formats(layout)]
    return f"{' and '.join(kinds)}, as in the source" if kinds else ""
