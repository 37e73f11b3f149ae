"""The shard writer: what other readers make of its files, bounds, order of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sits_trt.checkpoint import shard_writer
from sits_trt.checkpoint.safetensors_files import SafetensorsFiles, weight_files
from sits_trt.checkpoint.shard_writer import ShardWriter

TENSORS = {
    "halves": torch.randn(3, 5).half(),
    "codes": torch.arange(7, dtype=torch.uint8),
    "after seven bytes": torch.randn(4, dtype=torch.bfloat16),
    "one number": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "turned": torch.randn(4, 6).T,
    "wide": torch.randn(2, dtype=torch.float64),
}


def write(directory: Path, shard_bytes: int = 1 << 20) -> list[Path]:
    writer = ShardWriter(directory, shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    assert not list(directory.glob("model*")), "nothing has its name before the end"
    writer.finish()
    assert not list(directory.glob("*.partial"))
    return weight_files(directory)


@pytest.mark.parametrize("shard_bytes", [1, 60, 1 << 20])
def test_files_are_read_by_us_and_by_others(tmp_path: Path, shard_bytes: int) -> None:
    files = write(tmp_path, shard_bytes)
    ours = SafetensorsFiles(files)
    theirs = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert set(ours.shapes) == set(theirs) == set(TENSORS)
    for name, tensor in TENSORS.items():
        for read in (ours.read(name), theirs[name]):
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    files = write(tmp_path, 60)
    assert len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for path in files:
        size = sum(tensor.nbytes for tensor in load_file(path).values())
        assert size <= 60 or len(load_file(path)) == 1


def test_a_full_header_starts_a_new_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "HEADER_BYTES", 512)
    files = write(tmp_path)
    assert len(files) > 1
    assert {name for path in files for name in load_file(path)} == set(TENSORS)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a")[0], write(tmp_path / "b")[0]
    assert first.read_bytes() == second.read_bytes()


def test_a_name_is_used_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.add("x", torch.ones(2))
    with pytest.raises(ValueError, match="x was added before"):
        writer.add("x", torch.ones(2))
