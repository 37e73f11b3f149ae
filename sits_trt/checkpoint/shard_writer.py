"""Writes tensors as they come into safetensors files of bounded size, with an index when there are several.

Format: https://github.com/huggingface/safetensors#format. The header lies before the data but is known only after
it, so room is left for it and what it does not need is filled with spaces, as the format allows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sits_trt.checkpoint.safetensors_files import DTYPES, HEADER_LENGTH_BYTES, INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 4 << 30
HEADER_BYTES = (256 << 10) - HEADER_LENGTH_BYTES
_METADATA = {"__metadata__": {"format": "pt"}}


class ShardWriter:
    """Writes each tensor to disk at once: memory stays near one tensor.

    Nothing carries its final name before `finish`, so that a reader never meets a part. Equal tensors in equal
    order give equal bytes.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory, self.shard_bytes = directory, shard_bytes
        self._shards: list[_Shard] = []
        self._shard_of: dict[str, int] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob("model*.safetensors"), *directory.glob("*.safetensors.partial")):
            old.unlink()
        (directory / INDEX_NAME).unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor. Types are those of `safetensors_files.DTYPES`."""
        if name in self._shard_of:
            raise ValueError(f"tensor {name} was added before")
        if not self._shards or not self._shards[-1].has_room(name, tensor, self.shard_bytes):
            self._close_last()
            self._shards.append(_Shard(self._partial(len(self._shards))))
        self._shards[-1].add(name, tensor)
        self._shard_of[name] = len(self._shards) - 1

    def finish(self) -> None:
        """Give the files their names. At least one tensor must have been added."""
        self._close_last()
        count = len(self._shards)
        names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for index, name in enumerate(names):
            os.replace(self._partial(index), self.directory / name)
        if count > 1:
            content = {
                "metadata": {"total_size": sum(shard.size for shard in self._shards)},
                "weight_map": {tensor: names[index] for tensor, index in self._shard_of.items()},
            }
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (self.directory / INDEX_NAME).write_text(text, encoding="utf-8")

    def _partial(self, index: int) -> Path:
        return self.directory / f"{index + 1:05}.safetensors.partial"

    def _close_last(self) -> None:
        if self._shards:
            self._shards[-1].close()


class _Shard:
    """One file: tensor data behind the room for the header."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._file.seek(HEADER_LENGTH_BYTES + HEADER_BYTES)
        self._entries: dict[str, dict[str, Any]] = {}
        self._header_bytes = len(json.dumps(_METADATA))
        self.size = 0

    def has_room(self, name: str, tensor: Tensor, shard_bytes: int) -> bool:
        # A reader maps the file: data must lie at a multiple of its item size, and the format allows no gaps.
        aligned = self.size % tensor.element_size() == 0
        entry_bytes = len(json.dumps({name: self._entry(tensor)}))
        fits = self.size + tensor.nbytes <= shard_bytes or not self._entries
        return aligned and fits and self._header_bytes + entry_bytes <= HEADER_BYTES

    def add(self, name: str, tensor: Tensor) -> None:
        import torch

        self._entries[name] = self._entry(tensor)
        self._header_bytes += len(json.dumps({name: self._entries[name]}))
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self.size += tensor.nbytes

    def _entry(self, tensor: Tensor) -> dict[str, Any]:
        kind = str(tensor.dtype).removeprefix("torch.")
        return {
            "dtype": DTYPES[kind],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, self.size + tensor.nbytes],
        }

    def close(self) -> None:
        if self._file.closed:
            return
        header = json.dumps({**_METADATA, **self._entries}, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(HEADER_LENGTH_BYTES, "little"))
        self._file.write(header.ljust(HEADER_BYTES))
        self._file.close()
