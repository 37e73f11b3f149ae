"""Writes tensors as they come into safetensors files of bounded size, with an index when there are several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sits_trt.checkpoint.safetensors_files import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 1 << 30


class ShardWriter:
    """Collects tensors and writes a shard whenever `shard_bytes` are full: memory stays near one shard.

    Nothing carries its final name before `finish`, so that a reader never meets a part.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory, self.shard_bytes = directory, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob("model*.safetensors"), *directory.glob("*.safetensors.partial")):
            old.unlink()
        (directory / INDEX_NAME).unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        # safetensors refuses tensors that share memory or have gaps.
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for index, name in enumerate(names):
            os.replace(self._partial(index), self.directory / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.directory / INDEX_NAME).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _partial(self, index: int) -> Path:
        return self.directory / f"{index + 1:05}.safetensors.partial"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        partial = self._partial(len(self._shards))
        save_file(self._pending, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # safetensors writes 0600: a server under another user could not read it
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
