"""The pack-quantized format of compressed-tensors, which llm-compressor writes and transformers and vLLM read.

    <name>.weight_packed      int32 [out, in/8]              `layouts.pack_words`: unsigned codes, in order
    <name>.weight_scale       [out, in/group]
    <name>.weight_zero_point  int32 [ceil(out/8), in/group]  packed down the outputs; absent where symmetric
    <name>.weight_shape       int64 [2]                      out, in

Format: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized. There codes and zero points
are signed and stored plus 8, which are the unsigned ones of sits-trt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sits_trt.checkpoint.formats.foreign import (
    Foreign,
    Made,
    ViewedFiles,
    expect_shape,
    group_size_of,
    layers_with,
    matrix_shape,
    read_typed,
)
from sits_trt.checkpoint.formats.layer import Plan, QuantizedLayer, refuse, require_int4, require_no_input_scale
from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError
from sits_trt.layouts import pack_words, unpack_words
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NAME = "compressed-tensors"
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def check(plan: Plan) -> None:
    """Raise CheckpointError, naming the layer, for what the format cannot hold."""
    require_int4(NAME, plan)
    require_no_input_scale(NAME, plan, list(plan.formats))
    for name, (_, columns) in plan.shapes.items():
        if columns % 8:
            refuse(NAME, f"inputs by eights, but {name} has {columns}", "use --to hf")


def tensors(layer: QuantizedLayer) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a layer."""
    import torch

    rows, half_columns = layer.qweight.shape
    # First, as the one of eight bytes an item: data must lie at multiples of its item's size.
    yield f"{layer.name}.weight_shape", torch.tensor([rows, half_columns * 2])
    yield f"{layer.name}.weight_packed", torch.from_numpy(pack_words(layer.codes()))
    if layer.zeros is not None:
        packed = np.ascontiguousarray(pack_words(layer.zero_points().T).T)
        yield f"{layer.name}.weight_zero_point", torch.from_numpy(packed)
    yield f"{layer.name}.weight_scale", layer.scales


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return config.json's `quantization_config`: one group of settings for each format among the layers."""
    forms = list(dict.fromkeys(plan.formats.values()))
    groups = {}
    for index, form in enumerate(forms):
        named = [name for name, other in plan.formats.items() if other == form]
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(forms) == 1 else named,
            "weights": {
                "num_bits": form.bits,
                "type": "int",
                "symmetric": form.symmetric,
                "strategy": "group",
                "group_size": form.group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plan.kept),
        "kv_cache_scheme": None,
    }


def read(settings: Mapping[str, Any], directory: Path, files: TensorFiles) -> Foreign:
    """Return the checkpoint with these `quantization_config` settings as ours; the 16 bytes of shapes are read.

    Raises CheckpointError for another format or width than pack-quantized INT4 weights with nothing else quantized,
    for groups in activation order, and for layers that are not whole.
    """
    _refuse_other_schemes(settings, directory)
    names = layers_with(files, "weight_packed")
    made: dict[str, Made] = {}
    formats = {}
    for name in names:
        rows, words = matrix_shape(files, f"{name}.weight_packed")
        expect_shape(files, f"{name}.weight_shape", (2,), "two sides")
        shape = files.read(f"{name}.weight_shape").tolist()
        columns = words * 8
        if shape != [rows, columns]:
            raise CheckpointError(
                f"says {shape}, but weight_packed holds 4-bit codes of [{rows}, {columns}]", f"{name}.weight_shape"
            )
        groups = matrix_shape(files, f"{name}.weight_scale")[1]
        size = group_size_of(columns // groups, columns, name)
        why = f"{rows} outputs and groups of {size} of {columns} inputs"
        expect_shape(files, f"{name}.weight_scale", (rows, columns // size), why)
        zeros = f"{name}.weight_zero_point"
        formats[name] = WeightFormat(4, size, symmetric=zeros not in files.shapes)
        made[f"{name}.qweight"] = Made((rows, columns // 2), _packed(files, f"{name}.weight_packed"))
        made[f"{name}.scales"] = Made((rows, groups), _stored(files, f"{name}.weight_scale"))
        if not formats[name].symmetric:
            expect_shape(files, zeros, (-(-rows // 8), groups), f"{rows} outputs and {groups} groups")
            made[f"{name}.zeros"] = Made((rows, groups), _zeros(files, zeros, rows))
    hidden = frozenset(f"{name}.{part}" for name in names for part in _PARTS)
    return Foreign(ViewedFiles(files, made, hidden), formats)


def _refuse_other_schemes(settings: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError naming the first setting that is not INT4 weights alone."""
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    odd = {
        key: settings[key] for key in ("kv_cache_scheme", "sparsity_config", "transform_config") if settings.get(key)
    }
    if settings.get("format") != "pack-quantized":
        odd["format"] = settings.get("format")
    for scheme in schemes:
        scheme = scheme if isinstance(scheme, dict) else {}
        weights = scheme["weights"] if isinstance(scheme.get("weights"), dict) else {}
        odd |= {key: scheme[key] for key in ("input_activations", "output_activations") if scheme.get(key)}
        if weights.get("type") != "int" or weights.get("num_bits") != 4:
            odd["weights"] = {key: weights.get(key) for key in ("type", "num_bits")}
        if weights.get("actorder") in ("group", True):
            odd["actorder"] = weights["actorder"]
    if odd or not schemes:
        key, value = next(iter(odd.items()), ("config_groups", groups))
        raise CheckpointError(
            f"{directory} has '{key}' = {value!r} in its quantization_config; of compressed-tensors, pack-quantized "
            "4-bit weights alone are read: give the original checkpoint"
        )


def _packed(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, in/2], as `pack_sits` orders it, of int32 [out, in/8]: the same bytes."""

    def make() -> Tensor:
        import torch

        return read_typed(files, name, "int32").view(torch.uint8)

    return make


def _zeros(files: TensorFiles, name: str, rows: int) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, groups] of int32 [ceil(out/8), groups]."""

    def make() -> Tensor:
        import torch

        words = np.ascontiguousarray(read_typed(files, name, "int32").numpy().T)
        return torch.from_numpy(np.ascontiguousarray(unpack_words(words, rows).T))

    return make


def _stored(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    return lambda: files.read(name)
