"""ModelOpt's unified Hugging Face format, algorithm W4A16_AWQ: two outputs in a byte, symmetric.

    <name>.weight           uint8   [out/2, in]      `layouts.pack_modelopt`: signed codes
    <name>.weight_scale     float32 [out, in/group]
    <name>.pre_quant_scale  [in]                     multiplies the layer's input

Format: https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export. Where layers share an input (q, k, v; gate,
up), an export first gives them one `pre_quant_scale`, the mean of theirs, folds it into the norm before them and rounds
their weights anew: an export and the calibrated model it was made of differ about as much as either from the float
model. A layer that is alone on its input keeps its vector: o_proj, down_proj, and matrices that hold q, k, v or gate
and up in one (Phi-3).
Other readers look for it in o_proj and down_proj without asking (so it is written there in any case), and pass over it
in q, k, v, gate and up. The group size stands in hf_quant_config.json alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_trt import __version__
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
    require_dense_head,
    require_int4,
    require_no_input_scale,
)
from sits_trt.checkpoint.safetensors_files import read_json
from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError
from sits_trt.layouts import pack_modelopt, pack_sits, unpack_modelopt
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NAME = "modelopt"
FILE_NAME = "hf_quant_config.json"
ALGORITHM = "W4A16_AWQ"
_SCALED = ("o_proj", "down_proj")
"""The layers whose `pre_quant_scale` is read: what precedes the others is a norm, which takes the scale."""


def check(plan: Plan) -> None:
    """Raise CheckpointError, naming the layer, for what the format cannot hold."""
    require_int4(NAME, plan)
    require_dense_head(NAME, plan)
    require_no_input_scale(NAME, plan, [name for name in plan.formats if not name.endswith(_SCALED)])
    plan.only_group_size(NAME)
    for name, form in plan.formats.items():
        if not form.symmetric:
            refuse(
                NAME,
                f"symmetric codes only, but {name} has zero points",
                "use --to autoawq or compressed-tensors, or quantize with quantization.symmetric=true",
            )
        if plan.shapes[name][0] % 2:
            refuse(NAME, f"outputs by twos, but {name} has {plan.shapes[name][0]}")


def tensors(layer: QuantizedLayer) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a layer."""
    import torch

    yield f"{layer.name}.weight", torch.from_numpy(pack_modelopt(layer.codes()))
    yield f"{layer.name}.weight_scale", layer.scales.float()
    if layer.name.endswith(_SCALED):
        ones = torch.ones(layer.qweight.shape[1] * 2, dtype=layer.scales.dtype)
        yield f"{layer.name}.pre_quant_scale", ones if layer.input_scale is None else layer.input_scale


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return config.json's `quantization_config`."""
    return {
        "quant_method": "modelopt",
        "quant_algo": ALGORITHM,
        "ignore": list(plan.kept),
        "producer": _PRODUCER,
    }


_PRODUCER = {"name": "sits-trt", "version": __version__}


def write_side_file(directory: Path, plan: Plan) -> None:
    """Write the file that readers take the group size from."""
    quantization = {
        "quant_algo": ALGORITHM,
        "kv_cache_quant_algo": None,
        "group_size": plan.only_group_size(NAME),
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": list(plan.kept),
    }
    content = {"producer": _PRODUCER, "quantization": quantization}
    (directory / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(settings: Mapping[str, Any], directory: Path, files: TensorFiles) -> Foreign:
    """Return the checkpoint as ours. `settings` is not needed: hf_quant_config.json says more.

    Vectors `pre_quant_scale` are read at once: those of ones are left out. Raises CheckpointError for another
    algorithm, a quantized KV cache, and layers that are not whole.
    """
    said = read_json(directory / FILE_NAME).get("quantization")
    said = said if isinstance(said, dict) else {}
    if said.get("quant_algo") != ALGORITHM or said.get("has_zero_point") or said.get("kv_cache_quant_algo"):
        raise CheckpointError(
            f"{directory / FILE_NAME} says quant_algo {said.get('quant_algo')!r}, kv_cache_quant_algo "
            f"{said.get('kv_cache_quant_algo')!r} and has_zero_point {said.get('has_zero_point')!r}; of ModelOpt, "
            f"{ALGORITHM} without zero points and KV quantization is read: give the original checkpoint"
        )
    names = layers_with(files, "weight_scale")
    made: dict[str, Made] = {}
    formats = {}
    hidden = []
    for name in names:
        half_rows, columns = matrix_shape(files, f"{name}.weight")
        size = group_size_of(said.get("group_size"), columns, name)
        rows, groups = half_rows * 2, columns // size
        why = f"{rows} outputs and groups of {size} of {columns} inputs"
        expect_shape(files, f"{name}.weight_scale", (rows, groups), why)
        formats[name] = WeightFormat(4, size, symmetric=True)
        made[f"{name}.qweight"] = Made((rows, columns // 2), _packed(files, f"{name}.weight"))
        made[f"{name}.scales"] = Made((rows, groups), _scales(files, f"{name}.weight_scale"))
        hidden += [f"{name}.weight", f"{name}.weight_scale", f"{name}.pre_quant_scale"]
        if f"{name}.pre_quant_scale" in files.shapes and not bool((files.read(f"{name}.pre_quant_scale") == 1).all()):
            expect_shape(files, f"{name}.pre_quant_scale", (columns,), f"{columns} inputs")
            made[f"{name}.input_scale"] = Made((columns,), _stored(files, f"{name}.pre_quant_scale"))
    return Foreign(ViewedFiles(files, made, frozenset(hidden)), formats)


def _packed(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, in/2], as `pack_sits` orders it, of uint8 [out/2, in]."""

    def make() -> Tensor:
        import torch

        return torch.from_numpy(pack_sits(unpack_modelopt(read_typed(files, name, "uint8").numpy())))

    return make


def _scales(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    """Return what makes the scales: float16 where that holds them exactly, as it does those that sits-trt wrote."""

    def make() -> Tensor:
        stored = files.read(name)
        half = stored.half()
        return half if stored.is_floating_point() and bool((half.float() == stored.float()).all()) else stored

    return make


def _stored(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    return lambda: files.read(name)
