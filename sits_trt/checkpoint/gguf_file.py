"""GGUF files: metadata and tensor table read directly, tensors dequantized by the gguf package when asked for.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sits_trt.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is row-major (rows first), `kind` the number of its GGML type."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                self.metadata, self.tensors = _read_tables(handle, path)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path} is cut short or damaged ({error}); download it again") from None
        size = path.stat().st_size
        for name, tensor in self.tensors.items():
            if tensor.offset + prod(self._stored_shape(name)[0]) > size:
                raise CheckpointError(f"{path} is cut short: it ends before this tensor does; download it again", name)

    def _stored_shape(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType]:
        """Return the shape of a tensor in bytes as it is stored, and its GGML type."""
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.kind)
            return quant_shape_to_byte_shape(tensor.shape, kind), kind
        except ValueError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error})", name) from None

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32, dequantized. Raises CheckpointError for a type that gguf cannot dequantize."""
        from gguf.quants import dequantize

        shape, kind = self._stored_shape(name)
        data = np.memmap(self.path, np.uint8, "r", self.tensors[name].offset, shape)
        if kind.name in _PLAIN:
            return data.view(_PLAIN[kind.name]).astype(np.float32)
        try:
            return np.asarray(dequantize(data, kind), np.float32)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path} stores it as {kind.name}, which the gguf package cannot read", name
            ) from None


def _read_tables(handle: BinaryIO, path: Path) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
    if handle.read(4) != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file")
    version = _scalar(handle, 4)
    if version not in (2, 3):
        raise CheckpointError(f"{path} has GGUF version {version}; supported: 2 and 3")
    num_tensors, num_pairs = _scalar(handle, 10), _scalar(handle, 10)
    metadata = {}
    for _ in range(num_pairs):
        key = _string(handle)
        metadata[key] = _value(handle, _scalar(handle, 4))
    places = {}
    for _ in range(num_tensors):
        name = _string(handle)
        dims = tuple(_scalar(handle, 10) for _ in range(_scalar(handle, 4)))
        places[name] = (dims[::-1], _scalar(handle, 4), _scalar(handle, 10))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-handle.tell() // alignment) * alignment
    return metadata, {name: GgufTensor(shape, kind, start + at) for name, (shape, kind, at) in places.items()}


def _scalar(handle: BinaryIO, kind: int) -> Any:
    reader = _SCALARS[kind]
    return reader.unpack(handle.read(reader.size))[0]


def _string(handle: BinaryIO) -> str:
    length = _scalar(handle, 10)
    data = handle.read(length)
    if len(data) != length:
        raise struct.error("a string ends after the file")
    return data.decode("utf-8")


def _value(handle: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(handle)
    if kind != _ARRAY:
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return _scalar(handle, kind)
    item, count = _scalar(handle, 4), _scalar(handle, 10)
    if item in _SCALARS:
        reader = _SCALARS[item]
        return [value for (value,) in reader.iter_unpack(handle.read(reader.size * count))]
    return [_value(handle, item) for _ in range(count)]
