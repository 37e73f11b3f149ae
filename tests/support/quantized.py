"""Random INT4 layers for tiny models: the tensors and formats of a quantized checkpoint, without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
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
    form: WeightFormat | None = None,
) -> tuple[dict[str, Tensor], dict[str, WeightFormat]]:
    """Replace every projection by random codes and scales of about its own spread; biases stay.

    `form` takes the place of INT4 with `group_size` and `symmetric`. With `input_scale` each layer gets one, with
    `scale_recover` each decoder layer. Projections whose name ends with an entry of `dense` stay as they are.
    """
    form = form or WeightFormat(4, group_size, symmetric)
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
        groups = (out_features, form.num_groups(in_features))
        formats[layer] = form
        # Of 8-bit floats all but the two bytes that are no number.
        codes = rng.integers(0, 127 if form.codes == "float8_e4m3" else 1 << form.bits, tensor.shape, dtype=np.uint8)
        spread = {4: 1.0, 8: 1 / 16}[form.bits]
        if form.codes == "float8_e4m3":
            codes |= rng.integers(0, 2, tensor.shape, dtype=np.uint8) << 7
            spread = 1 / 32
        result[f"{layer}.qweight"] = torch.from_numpy(pack_sits(codes) if form.bits == 4 else codes)
        result[f"{layer}.scales"] = floats(0.01 * spread, 0.05 * spread, *groups)
        if not form.symmetric:
            result[f"{layer}.zeros"] = torch.from_numpy(rng.integers(0, 1 << form.bits, groups, dtype=np.uint8))
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


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of one file by their stored names."""
    return load_file(directory / "model.safetensors")


def edit_stored(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the stored tensors of a checkpoint of one file."""
    tensors = stored_tensors(directory)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
