"""The plain Hugging Face format: every weight as one matrix of numbers, quantized ones multiplied out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

NAME = "hf"


class DenseTensors(Mapping[str, "Tensor"]):
    """A checkpoint's canonical tensors with a float32 `<name>.weight` in place of each quantized layer's parts.

    It is made when asked for: (code - zero point) * scale, times the input scale.
    """

    def __init__(self, tensors: Mapping[str, Tensor], formats: Mapping[str, WeightFormat]) -> None:
        self._tensors, self._formats = tensors, formats
        parts = {f"{name}.{part}" for name in formats for part in ("scales", "zeros", "input_scale")}
        self._names = {
            f"{name.removesuffix('.qweight')}.weight" if name.endswith(".qweight") else name: None
            for name in tensors
            if name not in parts
        }

    def __getitem__(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        return self._tensors[name] if layer not in self._formats or layer == name else self._multiplied_out(layer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _multiplied_out(self, layer: str) -> Tensor:
        import torch

        form, stored = self._formats[layer], self._tensors[f"{layer}.qweight"]
        if form.codes == "float8_e4m3":
            codes = stored.view(torch.float8_e4m3fn)
        else:
            codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(1) if form.bits == 4 else stored
        scales = self._tensors[f"{layer}.scales"].float()[..., None]
        grouped = codes.float().reshape(*scales.shape[:2], -1)
        if form.codes == "int":
            grouped -= (1 << (form.bits - 1)) if form.symmetric else self._tensors[f"{layer}.zeros"].float()[..., None]
        weight = grouped.mul_(scales).flatten(1)
        factors = f"{layer}.input_scale"
        return weight * self._tensors[factors].float() if factors in self._tensors else weight
