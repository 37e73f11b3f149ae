"""The comparison of schemes on a tiny model: its rows, and what must be better than what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.support.tiny import write_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_schemes.py"


def test_every_scheme_has_a_row_and_more_bits_are_nearer(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", dtype=torch.float16)
    sizes = ("--group-size", "32", "--calibration-blocks", "2", "--evaluation-blocks", "2", "--bits", "6")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(source), *sizes], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    names = ["FP16", "W4A16 g32", "W4A4 g32, simulated", "W8A16", "W4A8 g32", "W8A8-FP8", "W4A16, budget 6"]
    assert [row[0] for row in rows[2:]] == names
    assert {len(row) for row in rows} == {6}
    kl = {row[0]: float(row[2]) for row in rows[2:]}
    assert 0 == kl["FP16"] < kl["W8A16"] < kl["W8A8-FP8"] < kl["W4A16 g32"] < kl["W4A4 g32, simulated"]
    assert kl["W4A16, budget 6"] < kl["W4A16 g32"]
    assert [row[4] for row in rows[2:5]] == ["16.00", "4.75", "4.75"]

    refused = subprocess.run(
        [sys.executable, str(SCRIPT), str(source)], capture_output=True, text=True, timeout=280, check=False
    )
    assert refused.returncode == 2
    assert "use group_size 32" in refused.stderr.replace("\n", " ")
