"""A quantized linear layer on its way into another format, and what that format must be told of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from sits_trt.errors import CheckpointError
from sits_trt.layouts import unpack_sits
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


SITS = "sits"
"""Our own format, which holds all that there is."""


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer under its stored name, its rows in stored order.

    qweight: uint8, as `write_quantized` describes it. scales: [out, groups]. zeros: uint8 [out, groups], None for the
    symmetric zero point. input_scale: [in] or None.
    """

    name: str
    form: WeightFormat
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    input_scale: Tensor | None

    def codes(self) -> NDArray[np.uint8]:
        """Return unsigned codes [out, in]."""
        stored = self.qweight.numpy()
        return unpack_sits(stored) if self.form.bits == 4 else stored

    def zero_points(self) -> NDArray[np.uint8]:
        """Return unsigned zero points [out, groups]."""
        if self.zeros is None:
            return np.full(tuple(self.scales.shape), 1 << (self.form.bits - 1), np.uint8)
        return self.zeros.numpy()

    def half_scales(self) -> Tensor:
        """Return the scales as float16. Raises CheckpointError where it holds them as nothing or not at all."""
        import torch

        half = self.scales.to(torch.float16)
        if not torch.isfinite(half).all() or bool(((half == 0) & (self.scales != 0)).any()):
            raise CheckpointError("does not fit into float16; use another format", f"{self.name}.scales")
        return half


@dataclass(frozen=True)
class Plan:
    """What is to be written: stored names of the quantized layers with their formats and shapes (out, in).

    `kept` are the linear layers that stay as they are, the head always among them unless it is quantized;
    `scaled` the quantized layers that have an input scale.
    """

    formats: Mapping[str, WeightFormat]
    shapes: Mapping[str, tuple[int, int]]
    kept: Sequence[str]
    scaled: frozenset[str]

    def only_group_size(self, target: str) -> int:
        """Return the group size of all layers. Raises CheckpointError, naming two layers, where it differs."""
        first, form = next(iter(self.formats.items()))
        for name, other in self.formats.items():
            if other.group_size != form.group_size:
                refuse(
                    target,
                    f"one group size for all layers, but {first} has {form.group_size} and {name} {other.group_size}",
                )
        return form.group_size


class Format(Protocol):
    """A module that writes one format.

    `check` raises CheckpointError, naming the layer, for what the format cannot hold; `tensors` yields a layer's
    stored tensors by name; `quantization_config` is that entry of config.json, empty for none.
    """

    NAME: str

    def check(self, plan: Plan) -> None: ...

    def tensors(self, layer: QuantizedLayer) -> Iterator[tuple[str, Tensor]]: ...

    def quantization_config(self, plan: Plan) -> dict[str, Any]: ...


def refuse(target: str, cannot: str, way_out: str = "use --to compressed-tensors or hf") -> NoReturn:
    """Raise CheckpointError: the format takes only so much."""
    raise CheckpointError(f"the {target} format holds {cannot}; {way_out}")


def require_int4(target: str, plan: Plan) -> None:
    """Raise CheckpointError naming the first layer that is not INT4 with 16-bit activations."""
    for name, form in plan.formats.items():
        if (form.bits, form.codes) != (4, "int"):
            refuse(target, f"INT4 codes only, but {name} has {form.bits}-bit codes of kind '{form.codes}'")
        require_plain_activations(target, name, form)


def require_plain_activations(target: str, name: str, form: WeightFormat) -> None:
    """Raise CheckpointError when a layer rounds its input."""
    if form.activations != "float16":
        refuse(
            target,
            f"16-bit activations, but {name} rounds its own to {form.activations}",
            f"use --to {SITS}, or quantize with a scheme that leaves activations in 16 bits",
        )


def require_no_input_scale(target: str, plan: Plan, names: Sequence[str]) -> None:
    """Raise CheckpointError naming the first of the layers `names` that has an input scale."""
    for name in names:
        if name in plan.scaled:
            refuse(
                target,
                f"no input scale, but {name} has one",
                "use --to hf, or quantize again: sits-trt folds scales into the layer before",
            )


def require_dense_head(target: str, plan: Plan) -> None:
    """Raise CheckpointError when the head is quantized."""
    if "lm_head" in plan.formats:
        refuse(target, "the head unquantized, but lm_head is quantized")
