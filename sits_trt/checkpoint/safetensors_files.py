"""Safetensors files of a Hugging Face directory: one, or shards with an index. Headers first, tensors when asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_trt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_LENGTH_BYTES = 8
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "uint8": "U8", "int32": "I32", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
"""Types that are read and written, by torch's name: whole numbers and 8-bit floats are codes, the others numbers."""

_NUMBERS = ("F64", "F32", "F16", "BF16")
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of `directory`. Raises CheckpointError naming every one that is missing.

    An index may only name files inside the directory. Files in PyTorch's own format are refused: they are
    pickles, which can run code when they are read.
    """
    index = directory / INDEX_NAME
    single = directory / SINGLE_NAME
    # Where both are there, transformers takes the single file too.
    if single.is_file():
        return [single]
    if index.is_file():
        names = _index_names(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} is incomplete: {', '.join(missing)} of the {len(names)} files named in {INDEX_NAME} "
                f"{'is' if len(missing) == 1 else 'are'} missing; download the checkpoint again"
            )
        return [directory / name for name in names]
    pickles = sorted(path.name for path in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
    if pickles:
        raise CheckpointError(
            f"{directory} holds its weights as {pickles[0]}, a pickle, which is never loaded here because it can run "
            "code; convert it to safetensors first (transformers: model.save_pretrained)"
        )
    raise CheckpointError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _index_names(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map'; download the checkpoint again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{index} names '{name}', which is not a file in its own directory; refused")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError naming the file when there is none or it is not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}; is it a Hugging Face model directory?") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return data


@dataclass(frozen=True)
class _Stored:
    """Where a tensor's bytes lie."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    size: int

    def needs_scales(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"has type {self.dtype} in {self.path.name}, which needs scales that are not read here; "
            "give the checkpoint in float16, bfloat16 or float32",
            name,
        )


class SafetensorsFiles:
    """The tensors of one or several safetensors files by name. `shapes` is read from the headers alone.

    Tensors are read, not mapped: memory holds what was asked for and nothing else. Raises CheckpointError for a
    damaged file, a tensor that two files hold, and a type outside DTYPES.
    """

    def __init__(self, files: list[Path]) -> None:
        self._stored: dict[str, _Stored] = {}
        for path in files:
            for name, stored in _read_header(path).items():
                if name in self._stored:
                    raise CheckpointError(f"found in both {self._stored[name].path.name} and {path.name}", name)
                if stored.dtype not in DTYPES.values():
                    raise stored.needs_scales(name)
                self._stored[name] = stored
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def require_numbers(self) -> None:
        """Raise CheckpointError for a tensor of codes: nothing in this checkpoint says what they stand for."""
        for name, stored in self._stored.items():
            if stored.dtype not in _NUMBERS:
                raise stored.needs_scales(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor in the type it is stored in."""
        import torch

        stored = self._stored[name]
        data = torch.empty(stored.size, dtype=torch.uint8)
        with stored.path.open("rb") as handle:
            handle.seek(stored.first)
            if handle.readinto(data.numpy().data) != stored.size:
                raise CheckpointError(f"{stored.path} has become shorter since it was opened", name)
        kind = next(torch_name for torch_name, short in DTYPES.items() if short == stored.dtype)
        dtype: torch.dtype = getattr(torch, kind)
        return data.view(dtype).reshape(stored.shape)


def _read_header(path: Path) -> Mapping[str, _Stored]:
    """Return where each tensor of a safetensors file lies. Raises CheckpointError when the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(HEADER_LENGTH_BYTES), "little")
        if length > size - HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{path} is cut short or no safetensors file; download the checkpoint again")
        start = HEADER_LENGTH_BYTES + length
        try:
            header: dict[str, Any] = json.loads(handle.read(length), object_pairs_hook=_without_repeats)
            header.pop("__metadata__", None)
            found = {name: _stored(path, start, entry) for name, entry in header.items()}
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            raise CheckpointError(f"{path} is no safetensors file; download the checkpoint again") from None
    # The format allows neither gaps nor overlaps: two tensors in one place would both look sound.
    end = start
    for name, stored in sorted(found.items(), key=lambda item: (item[1].first, item[1].size)):
        wrong_size = stored.dtype in _ITEM_BYTES and prod(stored.shape) * _ITEM_BYTES[stored.dtype] != stored.size
        if stored.first != end or stored.size < 0 or wrong_size:
            raise CheckpointError(f"{path} is damaged: shape and place disagree; download the checkpoint again", name)
        end += stored.size
    if size != end:
        raise CheckpointError(f"{path} has {size} bytes where its header promises {end}; download the checkpoint again")
    return found


def _stored(path: Path, start: int, entry: Any) -> _Stored:
    """Return one entry of a header. Raises ValueError, LookupError or TypeError for what is none."""
    dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (*shape, first, end)
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("not an entry of a safetensors header")
    return _Stored(path, dtype, tuple(shape), start + first, end - first)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found
