"""Random INT4 layers for tiny models: the tensors and formats of a quantized checkpoint, without a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sits_trt.checkpoint import open_checkpoint, write_quantized
from sits_trt.layouts import pack_sits
from sits_trt.spec import PER_CHANNEL, WeightFormat
from tests.support.tiny import write_checkpoint

FORMS = {
    "int4": WeightFormat(4, 32, True),
    "int4 with zeros": WeightFormat(4, 32, False),
    "int8": WeightFormat(8, PER_CHANNEL, True),
    "int8 with zeros": WeightFormat(8, 32, False),
    "fp8": WeightFormat(8, PER_CHANNEL, True, "float8_e4m3"),
}
"""A format of every kind of codes, scales and zero points."""


def quantize_tensors(
    tensors: Mapping[str, Tensor],
    group_size: int = 32,
    symmetric: bool = False,
    input_scale: bool = False,
    scale_recover: bool = False,
    dense: tuple[str, ...] = (),
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, WeightFormat]]:
    """Replace every projection by random codes and scales of about its own spread; biases stay.

    With `input_scale` each layer gets one, with `scale_recover` each decoder layer. Projections whose name ends
    with an entry of `dense` stay as they are.
    """
    rng = np.random.default_rng(seed)
    result: dict[str, Tensor] = {}
    formats: dict[str, WeightFormat] = {}

    def floats(low: float, high: float, *shape: int) -> Tensor:
        return torch.from_numpy(rng.uniform(low, high, shape).astype(np.float16))

    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or layer.endswith(dense):
            result[name] = tensor
            continue
        out_features, in_features = tensor.shape
        groups = (out_features, in_features // group_size)
        formats[layer] = WeightFormat(4, group_size, symmetric)
        codes = rng.integers(0, 16, (out_features, in_features), dtype=np.uint8)
        result[f"{layer}.qweight"] = torch.from_numpy(pack_sits(codes))
        result[f"{layer}.scales"] = floats(0.01, 0.05, *groups)
        if not symmetric:
            result[f"{layer}.zeros"] = torch.from_numpy(rng.integers(0, 16, groups, dtype=np.uint8))
        if input_scale:
            result[f"{layer}.input_scale"] = floats(0.5, 2.0, in_features)
        if scale_recover and layer.endswith("mlp.down_proj"):
            result[f"{layer.removesuffix('.mlp.down_proj')}.scale_recover"] = floats(0.8, 1.25, out_features)
    return result, formats


def write_tiny_quantized(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    quantize: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
    **config: Any,
) -> Path:
    """Write a quantized checkpoint of ours of a tiny model; `quantize` are arguments of `quantize_tensors`."""
    plain = write_checkpoint(directory.with_name(f"{directory.name}-float"), architecture, dtype=dtype, **config)
    source = open_checkpoint(plain)
    tensors, formats = quantize_tensors(source, **(quantize or {}))
    write_quantized(directory, source, tensors.items(), formats)
    return directory
