"""What the tensors of a quantized layer may hold: outside of it every format means something else, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sits_trt.errors import CheckpointError
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

PARTS = ("qweight", "scales", "zeros", "input_scale")

_E4M3_NAN = 0x7F
"""The byte of e4m3's only number that is none, without its sign."""


def check_part(name: str, tensor: Tensor, form: WeightFormat) -> None:
    """Raise CheckpointError unless `tensor` can be the part `name` of a layer in the format `form`.

    Codes and zero points are uint8, zero points below 2**bits, 8-bit floats numbers; scales and input scales are
    finite and of 16 bits or more.
    """
    kind, dtype = name.rpartition(".")[2], str(tensor.dtype).removeprefix("torch.")
    is_code = kind in ("qweight", "zeros")
    if dtype != "uint8" if is_code else not tensor.is_floating_point() or tensor.itemsize < 2:
        raise CheckpointError(
            f"has type {dtype}, {'uint8' if is_code else 'numbers of 16 bits or more'} are needed", name
        )
    if kind == "zeros" and tensor.numel() and int(tensor.max()) >> form.bits:
        raise CheckpointError(
            f"holds the zero point {int(tensor.max())}, codes of {form.bits} bits need smaller ones", name
        )
    if kind == "qweight" and form.codes == "float8_e4m3" and bool(((tensor & _E4M3_NAN) == _E4M3_NAN).any()):
        raise CheckpointError("holds codes that are no numbers; download the checkpoint again or quantize again", name)
    if not is_code and not bool(tensor.isfinite().all()):
        raise CheckpointError("holds values that are not finite; download the checkpoint again or quantize again", name)
