"""The ablation script on a tiny model: every row, its figures, and that finished rows are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.quant import apply_scales, search_scales
from sits_trt.quant.evaluate import compare_checkpoints
from sits_trt.recipe.schema import CalibrationSection, QuantizationSection
from tests.support.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "ablate_quantization.py"
SMALL = (
    *("--group-size", "32", "--calibration-blocks", "2", "--evaluation-blocks", "2", "--block-tokens", "64"),
    *("--prompts", "2", "--answer-tokens", "4"),
)
ROWS = ("round to nearest", "AWQ", "+ clip", "+ compensation", "+ ScaleRecover", "+ budget")


def ablate(source: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(source), "--out", str(out), *SMALL, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_finished_rows_are_kept_and_all_come_in_order(tmp_path: Path) -> None:
    source, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "out"
    first = ablate(source, out, "--only", "+ compensation", "round to nearest")
    assert first.returncode == 0, first.stderr
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(kept) == 2

    done = ablate(source, out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (out / "ablation.md").read_text() == done.stdout
    assert [cells(line)[0] for line in lines[2:]] == ["float16", *ROWS]
    names = ["recipe", "perplexity", "KL", "top-1", "top-5", "EM@4", "same prefix", "CPU seconds", "bits/weight"]
    assert cells(lines[0]) == names
    assert all(len(cells(line)) == len(names) for line in lines)
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert len(list(out.glob("*.json"))) == len(ROWS)
    assert sorted(path.suffix for path in out.iterdir()) == [*[".json"] * len(ROWS), ".md"]
    assert len({json.loads(path.read_text())["scores"]["kl"] for path in out.glob("*.json")}) == len(ROWS)

    # Eight bits for few layers, or smaller groups for some, within the others' average.
    assert 4.5 < float(cells(lines[-1])[8]) <= 4.75
    # The last row but one is what a build with the same recipe comes to.
    calibration = CalibrationSection(blocks=2, block_tokens=64)
    materialize(source, tmp_path / "checkpoint", "float16")
    section = QuantizationSection(group_size=32, calibration=calibration)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    search_scales(checkpoint, section, tmp_path / "scales", lambda *_: None)
    apply_scales(checkpoint, tmp_path / "scales", section, tmp_path / "quantized", lambda *_: None)
    blocks = read_blocks("pydoc", load_tokenizer(source), 2, 64, "evaluation")
    scores = compare_checkpoints(checkpoint, open_checkpoint(tmp_path / "quantized"), blocks, lambda *_: None)
    assert float(cells(lines[-2])[2]) == pytest.approx(scores.kl, rel=0.01)
    assert cells(lines[-2])[8] == "4.75"


def test_a_row_of_other_settings_is_another_row_and_an_error_is_one_sentence(tmp_path: Path) -> None:
    source, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "out"
    for more in ((), ("--symmetric",), ("--prompts", "1")):
        done = ablate(source, out, "--only", "round to nearest", *more)
        assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.json"))) == 3
    refused = ablate(source, out, "--text", str(tmp_path / "nowhere.txt"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
