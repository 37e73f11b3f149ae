"""AutoAWQ's GEMM format: eight outputs in an int32, zero points packed alike, scales transposed.

    <name>.qweight  int32   [in, out/8]         nibble i holds output AWQ_ORDER[i] of each eight
    <name>.qzeros   int32   [in/group, out/8]   the same order; the zero point itself, not one less
    <name>.scales   float16 [in/group, out]

Format: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py. Symmetric layers are written with the
zero point 8, which all readers take; layers whose zero points are all 8 are symmetric when read.
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
from sits_trt.checkpoint.formats.layer import (
    Plan,
    QuantizedLayer,
    refuse,
    require_dense_head,
    require_int4,
    require_no_input_scale,
)
from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError
from sits_trt.layouts import pack_awq, pack_sits, unpack_awq
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NAME = "autoawq"


def check(plan: Plan) -> None:
    """Raise CheckpointError, naming the layer, for what the format cannot hold."""
    require_int4(NAME, plan)
    require_dense_head(NAME, plan)
    require_no_input_scale(NAME, plan, list(plan.formats))
    plan.only_group_size(NAME)
    for name, (rows, _) in plan.shapes.items():
        if rows % 8:
            refuse(NAME, f"outputs by eights, but {name} has {rows}")


def tensors(layer: QuantizedLayer) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a layer."""
    import torch

    yield f"{layer.name}.qweight", torch.from_numpy(pack_awq(np.ascontiguousarray(layer.codes().T)))
    yield f"{layer.name}.qzeros", torch.from_numpy(pack_awq(np.ascontiguousarray(layer.zero_points().T)))
    yield f"{layer.name}.scales", layer.half_scales().T.contiguous()


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return config.json's `quantization_config`."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": plan.only_group_size(NAME),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(plan.kept),
    }


def read(settings: Mapping[str, Any], directory: Path, files: TensorFiles) -> Foreign:
    """Return the checkpoint with these `quantization_config` settings as ours. Zero points are read at once.

    Raises CheckpointError for another version or width than GEMM with 4 bits, and for layers that are not whole.
    """
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm" or settings.get("bits", settings.get("w_bit")) != 4:
        raise CheckpointError(
            f"{directory} is an AWQ checkpoint of version '{version}' with {settings.get('bits')} bits; "
            "of AWQ, version 'gemm' with 4 bits is read: save it so, or give the original checkpoint"
        )
    names = layers_with(files, "qweight")
    made: dict[str, Made] = {}
    formats = {}
    for name in names:
        columns, words = matrix_shape(files, f"{name}.qweight")
        size = group_size_of(settings.get("group_size", settings.get("q_group_size", 128)), columns, name)
        rows, groups = words * 8, columns // size
        why = f"{rows} outputs and groups of {size} of {columns} inputs"
        expect_shape(files, f"{name}.qzeros", (groups, words), why)
        expect_shape(files, f"{name}.scales", (groups, rows), why)
        zeros = _unpacked(files, f"{name}.qzeros")
        formats[name] = WeightFormat(4, size, symmetric=bool((zeros() == 8).all()))
        made[f"{name}.qweight"] = Made((rows, columns // 2), _packed(files, f"{name}.qweight"))
        made[f"{name}.scales"] = Made((rows, groups), _transposed(files, f"{name}.scales"))
        if not formats[name].symmetric:
            made[f"{name}.zeros"] = Made((rows, groups), zeros)
    hidden = frozenset(f"{name}.{part}" for name in names for part in ("qweight", "qzeros", "scales"))
    return Foreign(ViewedFiles(files, made, hidden), formats)


def _unpacked(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, rows] of int32 [rows, out/8]."""

    def make() -> Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(unpack_awq(read_typed(files, name, "int32").numpy()).T))

    return make


def _packed(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    """Return what makes uint8 [out, in/2], as `pack_sits` orders it, of int32 [in, out/8]."""

    def make() -> Tensor:
        import torch

        return torch.from_numpy(pack_sits(unpack_awq(read_typed(files, name, "int32").numpy()).T))

    return make


def _transposed(files: TensorFiles, name: str) -> Callable[[], Tensor]:
    return lambda: files.read(name).T.contiguous()
