"""The sweep over real builds behind real servers: one command's worth, with a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from sits_trt.pipeline import BuildLine
from sits_trt.progress import Progress
from sits_trt.recipe.schema import Recipe, SweepSection
from sits_trt.sweep import Status, SweepResult, run_sweep
from sits_trt.sweep.builds import describe_builds
from tests.support.server import VOCABULARY
from tests.support.tiny import save_byte_tokenizer, write_checkpoint

pytestmark = pytest.mark.server

SWEEP = {
    "concurrencies": [1, 8],
    "request_rates": [20.0],
    "requests_per_level": 12,
    "prompt_tokens": 40,
    "output_tokens": 10,
    "accuracy": {"blocks": 1, "block_tokens": 64, "prompts": 2, "exact_match_tokens": 8},
}


def silent(name: str) -> nullcontext[Progress]:
    return nullcontext(lambda done, total, what: None)


def build(root: Path, name: str, source: Path, scheme: str) -> Path:
    recipe = Recipe.model_validate_json(
        json.dumps(
            {
                "name": name,
                "model": {"source": str(source)},
                "target": {"sku": "cpu"},
                "quantization": {
                    "scheme": scheme,
                    "method": "rtn",
                    "group_size": 32,
                    "calibration": {"blocks": 1, "block_tokens": 64},
                },
                "engine": {
                    "backend": "eager",
                    "prompt_tokens": {"p50": 40, "p95": 64, "max": 64},
                    "max_output_tokens": 16,
                    "max_tokens_per_step": 128,
                },
                "serving": {"max_batch_size": 8},
                "sweep": SWEEP,
            }
        )
    )
    assert [stage.rebuilt for stage in BuildLine(recipe, root / name, silent).run()]
    return root / name


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("sweep")
    source = write_checkpoint(root / "model", vocab_size=VOCABULARY)
    save_byte_tokenizer(source)
    return [build(root, "plain", source, "none"), build(root, "int4", source, "w4a16")]


@pytest.fixture(scope="module")
def section() -> SweepSection:
    return SweepSection.model_validate_json(json.dumps(SWEEP))


def test_sweep_measures_real_servers_and_says_what_served(
    builds: list[Path], section: SweepSection, tmp_path: Path
) -> None:
    result = run_sweep(builds, section, tmp_path / "report", lambda done, total, what: None)
    assert [(b.info.name, b.status, b.reason) for b in result.builds] == [
        ("plain", Status.COMPLETE, ""),
        ("int4", Status.COMPLETE, ""),
    ]
    for measured in result.builds:
        assert [level.load.key for level in measured.levels] == ["c1", "c8", "r20"]
        for level in measured.levels:
            metrics = level.metrics
            assert (metrics.completed, metrics.failed, metrics.empty) == (12, 0, 0), metrics.errors
            # Random weights end answers anywhere unless the sweep forbids it.
            assert metrics.output_tokens == 12 * 10
            assert metrics.ttft_ms
            assert metrics.itl_ms
            assert metrics.e2e_ms
            assert metrics.itl_ms.count == 12 * 9
            assert 0 < metrics.ttft_ms.p50 <= metrics.ttft_ms.p99 <= metrics.e2e_ms.max
            assert level.client_cpu > 0
        assert measured.info.served_by.startswith("eager runner on ")
        assert measured.info.server.count(".") == 2
    plain, int4 = (b.accuracy for b in result.builds)
    assert plain is not None
    assert int4 is not None
    assert int4.reference_perplexity == pytest.approx(plain.perplexity, rel=1e-5)
    assert int4.kl_divergence is not None
    assert int4.kl_divergence > 0
    assert {b.info.checkpoint_fingerprint for b in result.builds} == {
        describe_builds(builds[:1])[0].checkpoint_fingerprint
    }
    text = (tmp_path / "report" / "report.json").read_text(encoding="utf-8")
    assert SweepResult.from_dict(json.loads(text)) == result


def test_a_sweep_that_is_killed_leaves_no_server_and_goes_on(builds: list[Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sits_trt",
        "sweep",
        str(builds[1]),
        "--out",
        str(tmp_path / "report"),
        "--json",
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    parts = tmp_path / "report.partial" / "parts"
    for _ in waiting(120):
        if child.poll() is not None or len(list(parts.glob("*/*.json"))) >= 2:
            break
    child.kill()
    _, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors.decode()
    for _ in waiting(30):
        if not servers_of(builds):
            break
    assert not servers_of(builds)
    before = {path: path.stat().st_mtime_ns for path in parts.glob("*/*.json")}
    assert len(before) >= 2

    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = SweepResult.from_dict(json.loads(done.stdout))
    assert [(b.status, len(b.levels)) for b in result.builds] == [(Status.COMPLETE, 3)]
    kept = tmp_path / "report" / "parts"
    assert {path: (kept / path.relative_to(parts)).stat().st_mtime_ns for path in before} == before
    assert not servers_of(builds)


def waiting(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def servers_of(builds: list[Path]) -> list[str]:
    """Return the command lines of running servers over these builds' repositories."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(process.name) != os.getpid() and "triton" in line and any(str(build) in line for build in builds):
            lines.append(line)
    return lines
