"""The formats of compressed-tensors, which llm-compressor writes and transformers and vLLM read.

pack-quantized, for whole numbers of 4 and 8 bits, 32/bits of them in a word:

    <name>.weight_packed      int32 [out, in*bits/32]             `layouts.pack_words`: unsigned codes, in order
    <name>.weight_scale       [out, groups]
    <name>.weight_zero_point  int32 [ceil(out*bits/32), groups]   packed down the outputs; absent where symmetric
    <name>.weight_shape       int64 [2]                           out, in

float-quantized, for e4m3 with one scale per output, inputs as they are or rounded to e4m3 token by token:

    <name>.weight             float8_e4m3 [out, in]
    <name>.weight_scale       [out, 1]

Format: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized and naive_quantized. There codes
and zero points are signed and stored plus 2**(bits-1), which are the unsigned ones of sits-trt.
"""

from __future__ import annotations

import re
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
from sits_trt.checkpoint.formats.layer import (
    Plan,
    QuantizedLayer,
    refuse,
    require_no_input_scale,
    require_plain_activations,
)
from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError
from sits_trt.layouts import pack_words, unpack_words
from sits_trt.spec import PER_CHANNEL, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NAME = "compressed-tensors"
PACKED, FLOAT, MIXED = "pack-quantized", "float-quantized", "mixed-precision"
E4M3 = "float8_e4m3"
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def check(plan: Plan) -> None:
    """Raise CheckpointError, naming the layer, for what the format cannot hold."""
    require_no_input_scale(NAME, plan, list(plan.formats))
    for name, form in plan.formats.items():
        columns, in_word = plan.shapes[name][1], 32 // form.bits
        if form.codes == E4M3:
            if form.group_size != PER_CHANNEL or form.activations not in ("float16", E4M3):
                refuse(NAME, f"8-bit floats with one scale per output, but {name} has {form}", "use --to sits")
            continue
        require_plain_activations(NAME, name, form)
        if columns % in_word:
            refuse(NAME, f"{in_word} inputs in a word, but {name} has {columns}", "use --to hf")


def tensors(layer: QuantizedLayer) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a layer."""
    import torch

    name, bits = layer.name, layer.form.bits
    if layer.form.codes == E4M3:
        yield f"{name}.weight", layer.qweight.view(torch.float8_e4m3fn)
        yield f"{name}.weight_scale", layer.scales
        return
    codes = layer.codes()
    # First, as the one of eight bytes an item: data must lie at multiples of its item's size.
    yield f"{name}.weight_shape", torch.tensor(codes.shape)
    yield f"{name}.weight_packed", torch.from_numpy(pack_words(codes, bits))
    if layer.zeros is not None:
        packed = np.ascontiguousarray(pack_words(layer.zero_points().T, bits).T)
        yield f"{name}.weight_zero_point", torch.from_numpy(packed)
    yield f"{name}.weight_scale", layer.scales


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return config.json's `quantization_config`: one group of settings for each format among the layers."""
    forms = list(dict.fromkeys(plan.formats.values()))
    kinds = {form: FLOAT if form.codes == E4M3 else PACKED for form in forms}
    mixed = len(set(kinds.values())) > 1
    groups = {}
    for index, form in enumerate(forms):
        named = [name for name, other in plan.formats.items() if other == form]
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(forms) == 1 else named,
            "weights": _weights(form),
            "input_activations": _E4M3_TOKENS if form.activations == E4M3 else None,
            "output_activations": None,
            **({"format": kinds[form]} if mixed else {}),
        }
    return {
        "quant_method": "compressed-tensors",
        "format": MIXED if mixed else kinds[forms[0]],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plan.kept),
        "kv_cache_scheme": None,
    }


_E4M3_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
"""Inputs rounded to e4m3 with one scale per token, as they come."""


def _weights(form: WeightFormat) -> dict[str, Any]:
    per_channel = form.group_size == PER_CHANNEL
    return {
        "num_bits": form.bits,
        "type": "float" if form.codes == E4M3 else "int",
        "symmetric": form.symmetric,
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else form.group_size,
        "dynamic": False,
    }


def read(settings: Mapping[str, Any], directory: Path, files: TensorFiles) -> Foreign:
    """Return the checkpoint with these `quantization_config` settings as ours; the 16 bytes of shapes are read.

    Raises CheckpointError for a scheme that is not one of those above, for groups in activation order, and for
    layers that are not whole.
    """
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if settings.get(key):
            raise _other(directory, key, settings[key])
    if settings.get("format") not in (PACKED, FLOAT, MIXED):
        raise _other(directory, "format", settings.get("format"))
    made: dict[str, Made] = {}
    formats = {}
    packed = layers_with(files, "weight_packed")
    floats = [name for name in layers_with(files, "weight_scale") if f"{name}.weight" in files.shapes]
    for name in (*packed, *floats):
        scheme = _scheme_of(name, settings, directory)
        read_layer = _read_packed if name in packed else _read_float
        form, tensors_of_it = read_layer(name, scheme, files, directory)
        formats[name] = form
        made |= {f"{name}.{part}": tensor for part, tensor in tensors_of_it.items()}
    hidden = {f"{name}.{part}" for name in packed for part in _PARTS}
    hidden |= {f"{name}.{part}" for name in floats for part in ("weight", "weight_scale")}
    return Foreign(ViewedFiles(files, made, frozenset(hidden)), formats)


def _read_packed(
    name: str, scheme: Mapping[str, Any], files: TensorFiles, directory: Path
) -> tuple[WeightFormat, dict[str, Made]]:
    weights = scheme["weights"]
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if (
        weights.get("type") != "int"
        or type(bits) is not int
        or bits not in (4, 8)
        or strategy not in ("group", "channel")
    ):
        raise _other(directory, "weights", {key: weights.get(key) for key in ("type", "num_bits", "strategy")})
    if scheme.get("input_activations"):
        raise _other(directory, "input_activations", scheme["input_activations"])
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _other(directory, "actorder", weights["actorder"])
    rows, words = matrix_shape(files, f"{name}.weight_packed")
    expect_shape(files, f"{name}.weight_shape", (2,), "two sides")
    columns = words * 32 // bits
    shape = files.read(f"{name}.weight_shape").tolist()
    if shape != [rows, columns]:
        raise CheckpointError(
            f"says {shape}, but weight_packed holds {bits}-bit codes of [{rows}, {columns}]", f"{name}.weight_shape"
        )
    per_channel = strategy == "channel"
    width = group_size_of(-1 if per_channel else weights.get("group_size"), columns, name)
    groups, why = columns // width, f"{rows} outputs and groups of {width} of {columns} inputs"
    expect_shape(files, f"{name}.weight_scale", (rows, groups), why)
    zeros = f"{name}.weight_zero_point"
    form = WeightFormat(bits, PER_CHANNEL if per_channel else width, symmetric=zeros not in files.shapes)
    if weights.get("symmetric") is True and not form.symmetric:
        raise CheckpointError(
            "is there, but config.json calls the layer's weights symmetric: one of the two is wrong", zeros
        )
    made = {
        "qweight": Made((rows, columns * bits // 8), _bytes_of(files, f"{name}.weight_packed", "int32")),
        "scales": Made((rows, groups), lambda: files.read(f"{name}.weight_scale")),
    }
    if not form.symmetric or weights.get("symmetric") is False:
        expect_shape(files, zeros, (-(-rows * bits // 32), groups), why)
        made["zeros"] = Made((rows, groups), _zeros(files, zeros, bits, rows))
    return form, made


def _read_float(
    name: str, scheme: Mapping[str, Any], files: TensorFiles, directory: Path
) -> tuple[WeightFormat, dict[str, Made]]:
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    wanted = _weights(WeightFormat(8, PER_CHANNEL, True, E4M3))
    if any(weights.get(key) != wanted[key] for key in ("type", "num_bits", "strategy")):
        raise _other(directory, "weights", {key: weights.get(key) for key in ("type", "num_bits", "strategy")})
    if inputs and (not isinstance(inputs, dict) or any(inputs.get(key) != _E4M3_TOKENS[key] for key in _E4M3_TOKENS)):
        raise _other(directory, "input_activations", inputs)
    rows, columns = matrix_shape(files, f"{name}.weight")
    expect_shape(files, f"{name}.weight_scale", (rows, 1), f"{rows} outputs")
    form = WeightFormat(8, PER_CHANNEL, True, E4M3, E4M3 if inputs else "float16")
    return form, {
        "qweight": Made((rows, columns), _bytes_of(files, f"{name}.weight", "float8_e4m3fn")),
        "scales": Made((rows, 1), lambda: files.read(f"{name}.weight_scale")),
    }


def _scheme_of(name: str, settings: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return the group of settings that means the layer: by its name, an expression, or its class."""
    groups = settings.get("config_groups")
    found: dict[int, Mapping[str, Any]] = {}
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise _other(directory, "config_groups", groups)
        if not isinstance(targets := group.get("targets", []), list) or group.get("output_activations"):
            raise _other(directory, "config_groups", groups)
        for target in targets:
            rank = 0 if target == name else 1 if _expression_means(target, name) else 2 if target == "Linear" else None
            if rank is not None:
                found.setdefault(rank, group)
    if not found:
        raise CheckpointError(f"no group of the quantization_config of {directory} means this layer", name)
    return found[min(found)]


def _expression_means(target: object, name: str) -> bool:
    if not isinstance(target, str) or not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _other(directory: Path, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{directory} has '{key}' = {value!r} in its quantization_config; of compressed-tensors, {PACKED} weights of "
        f"4 and 8 bits and {FLOAT} ones with inputs by token are read: give the original checkpoint"
    )


def _bytes_of(files: TensorFiles, name: str, dtype: str) -> Callable[[], Tensor]:
    """Return what makes the uint8 codes, which are the same bytes as those stored."""

    def make() -> Tensor:
        import torch

        return read_typed(files, name, dtype).view(torch.uint8)

    return make


def _zeros(files: TensorFiles, name: str, bits: int, rows: int) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, groups] of int32 [ceil(out*bits/32), groups]."""

    def make() -> Tensor:
        import torch

        words = np.ascontiguousarray(read_typed(files, name, "int32").numpy().T)
        return torch.from_numpy(np.ascontiguousarray(unpack_words(words, bits, rows).T))

    return make
