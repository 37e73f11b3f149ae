"""A checkpoint that another program quantized, seen as ours: the same tensors under our names, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError
from sits_trt.spec import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Made:
    """A tensor that is made from stored ones: its shape, known from their headers, and how it is made."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class ViewedFiles:
    """Stored tensors with those of quantized layers, `hidden`, replaced by the tensors `made` of them."""

    def __init__(self, files: TensorFiles, made: Mapping[str, Made], hidden: frozenset[str]) -> None:
        self._files, self._made = files, made
        kept = {name: shape for name, shape in files.shapes.items() if name not in hidden}
        self.shapes = kept | {name: tensor.shape for name, tensor in made.items()}

    def read(self, name: str) -> Tensor:
        return self._made[name].make() if name in self._made else self._files.read(name)


@dataclass(frozen=True)
class Foreign:
    """What a reader of another format finds.

    `formats` has the quantized layers by their stored name, `files` for each `<name>.qweight`, `.scales`, `.zeros`
    and `.input_scale` as in a checkpoint of ours, rows in stored order.
    """

    files: TensorFiles
    formats: Mapping[str, WeightFormat]


def layers_with(files: TensorFiles, ending: str) -> list[str]:
    """Return the stored names of the layers that have a tensor `<name>.<ending>`."""
    return [name.removesuffix(f".{ending}") for name in files.shapes if name.endswith(f".{ending}")]


def matrix_shape(files: TensorFiles, name: str) -> tuple[int, int]:
    """Return the shape of a stored matrix. Raises CheckpointError when it is missing or no matrix."""
    shape = files.shapes.get(name)
    if shape is None:
        raise CheckpointError("is missing, the layer's other tensors are there; download the checkpoint again", name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"has shape {list(shape)}, a matrix is needed; download the checkpoint again", name)
    return shape[0], shape[1]


def expect_shape(files: TensorFiles, name: str, wanted: tuple[int, ...], why: str) -> None:
    """Raise CheckpointError unless the stored tensor has the shape that `why` needs."""
    if files.shapes.get(name) != wanted:
        found = list(files.shapes[name]) if name in files.shapes else "nothing"
        raise CheckpointError(f"has shape {found}, {why} need {list(wanted)}", name)


def read_typed(files: TensorFiles, name: str, dtype: str) -> Tensor:
    """Return a stored tensor of the type (torch's name). Raises CheckpointError for another type."""
    tensor = files.read(name)
    found = str(tensor.dtype).removeprefix("torch.")
    if found != dtype:
        raise CheckpointError(f"has type {found}, its format needs {dtype}", name)
    return tensor


def group_size_of(said: object, columns: int, name: str) -> int:
    """Return inputs to a group, from what the settings say (-1: all). Raises CheckpointError when it cannot be."""
    size = columns if said == -1 else said
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or columns % size:
        raise CheckpointError(f"has {columns} inputs, which groups of {said!r} do not divide", name)
    return size
