"""Safetensors files of a Hugging Face directory: one, or shards with an index. Headers first, tensors when asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from sits_trt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_HEADER_LENGTH_BYTES = 8
_DTYPES = ("F64", "F32", "F16", "BF16", "U8")
"""Types that are read: U8 for packed codes, the others as they are."""


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
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return data


class SafetensorsFiles:
    """The tensors of one or several safetensors files by name. `shapes` is read from the headers alone.

    Raises CheckpointError for a damaged file, a tensor that two files hold, and a number type outside _DTYPES.
    """

    def __init__(self, files: list[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path in files:
            for name, entry in read_header(path).items():
                if name in self._file_of:
                    raise CheckpointError(f"found in both {self._file_of[name].name} and {path.name}", name)
                if entry["dtype"] not in _DTYPES:
                    raise CheckpointError(
                        f"has type {entry['dtype']} in {path.name}, which needs scales that are not read here; "
                        "give the checkpoint in float16, bfloat16 or float32",
                        name,
                    )
                self._file_of[name] = path
                self.shapes[name] = tuple(entry["shape"])

    def read(self, name: str) -> Tensor:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)


def read_header(path: Path) -> Mapping[str, Any]:
    """Return name -> {dtype, shape, data_offsets} of a safetensors file. Raises CheckpointError when it is damaged."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(_HEADER_LENGTH_BYTES), "little")
        if length > size - _HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{path} is cut short or no safetensors file; download the checkpoint again")
        try:
            header: dict[str, Any] = json.loads(handle.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise CheckpointError(f"{path} is no safetensors file; download the checkpoint again") from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != _HEADER_LENGTH_BYTES + length + end:
        raise CheckpointError(
            f"{path} has {size} bytes where its header promises {_HEADER_LENGTH_BYTES + length + end}; "
            "download the checkpoint again"
        )
    return header
