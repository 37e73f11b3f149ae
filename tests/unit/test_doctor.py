"""The doctor sees what programs and packages say, and concludes what can be built and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sits_trt import doctor
from sits_trt.recipe import find_sku


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_machine_without_gpu(programs: Path) -> None:
    report = doctor.examine(programs / "not" / "yet" / "there")
    assert report.gpus == ()
    assert report.nvcc is None
    assert report.torch is not None
    assert report.cpus >= 1
    assert report.memory_free_gb > 0
    assert report.disk_free_gb > 0
    assert report.can_run(find_sku("h200")) == (True, "eager, on the CPU")
    assert report.can_build(find_sku("cpu")) == (True, "eager")
    json.dumps(report.to_dict())


def test_gpus_are_read_and_decide(programs: Path) -> None:
    write(programs, "nvidia-smi", "echo 'NVIDIA H200, 9.0, 143771, 580.95'; echo 'NVIDIA L40S, 8.9, 46068, 580.95'")
    write(programs, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    report = doctor.examine(programs)
    assert report.gpus == (
        doctor.Gpu("NVIDIA H200", 90, 143771, "580.95"),
        doctor.Gpu("NVIDIA L40S", 89, 46068, "580.95"),
    )
    assert report.nvcc == "13.0"
    assert report.can_run(find_sku("h100")) == (True, "on the GPU")
    assert report.can_build(find_sku("h100")) == (True, "cuda")
    assert report.can_build(find_sku("l40s")) == (True, "tensorrt-rtx")


@pytest.mark.parametrize("script", ["exit 9", "sleep 5; echo 'NVIDIA H200, 9.0, 1, 1'"])
def test_broken_driver_is_no_gpu(programs: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROGRAM_TIMEOUT_S", 0.2)
    write(programs, "nvidia-smi", f"PATH=/bin:/usr/bin; {script}")
    assert doctor.examine(programs).gpus == ()
