"""The sweep's course: order, kills and resumption, builds that fail. The server is scripted, the builds are tiny."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sits_trt.artifacts import read_manifest
from sits_trt.errors import ServerError, SitsError
from sits_trt.recipe.schema import AccuracySection, SweepSection
from sits_trt.sweep import run as room
from sits_trt.sweep.result import Accuracy, Status, SweepResult
from sits_trt.sweep.run import WARM_UP_REQUESTS, run_sweep
from tests.support.builds import stub_build
from tests.support.stream_server import ScriptedServer, scripted_server

SECTION = SweepSection(
    concurrencies=(1, 2),
    request_rates=(50.0,),
    requests_per_level=3,
    prompt_tokens=8,
    output_tokens=2,
    accuracy=AccuracySection(blocks=1, block_tokens=8, prompts=1, exact_match_tokens=2),
)
WARM = WARM_UP_REQUESTS
LEVEL = WARM + 3
"""Requests that a server sees for one level."""


@dataclass
class Bench:
    """What the sweep meets instead of Triton: a scripted server, counted, and switches to break things."""

    server: ScriptedServer
    address: str
    served: list[str] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)
    kill_after_requests: int | None = None
    dead_after_requests: int | None = None
    script: str = "[[1, 1], [2, 1]]"

    @contextmanager
    def serve(self, build: Path, start_timeout_s: float) -> Iterator[Bench]:
        assert start_timeout_s == 180
        if build.name in self.refuse:
            raise ServerError("Triton Server ended while starting: no such engine")
        self.served.append(build.name)
        yield self

    runner = "eager runner on cpu: no GPU"
    version = "2.51.0"

    def check(self, settle_s: float = 0) -> None:
        if self.kill_after_requests is not None and len(self.server.seen) >= self.kill_after_requests:
            raise KeyboardInterrupt
        if self.dead_after_requests is not None and len(self.server.seen) >= self.dead_after_requests:
            raise ServerError("Triton Server ended while it was measured")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with scripted_server() as (address, server):
        made = Bench(server, address)
        monkeypatch.setattr(room, "serve", made.serve)
        monkeypatch.setattr(room, "make_prompts", lambda tokenizer, count, tokens, seed: [made.script] * count)
        yield made


@pytest.fixture
def builds(tmp_path: Path) -> list[Path]:
    return [stub_build(tmp_path, "fp16"), stub_build(tmp_path, "int4", quantized=True)]


def silent(done: int, total: int, what: str) -> None:
    pass


def test_every_build_is_measured_at_every_level_and_reported(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "report"
    result = run_sweep(builds, SECTION, out, lambda done, total, what: seen.append((done, total)))
    assert bench.served == ["fp16", "int4"]
    assert [b.status for b in result.builds] == [Status.COMPLETE] * 2
    for build in result.builds:
        assert [level.load.key for level in build.levels] == ["c1", "c2", "r50"]
        assert all(level.metrics.completed == 3 and level.metrics.output_tokens == 6 for level in build.levels)
        assert build.info.served_by == "eager runner on cpu: no GPU"
        assert [sorted(r) for r in build.levels[0].requests] == [
            ["e2e_ms", "error", "start_ms", "tokens", "ttft_ms"]
        ] * 3
    assert isinstance(result.builds[1].accuracy, Accuracy)
    assert result.builds[1].accuracy.exact_prompts is not None
    assert SweepResult.from_dict(json.loads((out / "report.json").read_text())) == result
    assert (out / "report.md").is_file()
    assert (out / "report.html").is_file()
    manifest = read_manifest(out, "sweep")
    assert manifest.details == {"builds": {"fp16": "complete", "int4": "complete"}}
    assert seen == sorted(seen)
    assert seen[-1] == (24, 24)


def test_a_killed_sweep_goes_on_at_the_next_level(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report"
    bench.kill_after_requests = 4 * LEVEL + WARM
    with pytest.raises(KeyboardInterrupt):
        run_sweep(builds, SECTION, out, silent)
    assert not out.exists()
    before = len(bench.server.seen)
    bench.kill_after_requests = None
    result = run_sweep(builds, SECTION, out, silent)
    assert bench.served == ["fp16", "int4", "int4"]
    assert len(bench.server.seen) - before == 2 * LEVEL
    assert [b.status for b in result.builds] == [Status.COMPLETE] * 2
    assert [len(b.levels) for b in result.builds] == [3, 3]


def test_what_was_measured_is_kept_until_its_conditions_change(
    bench: Bench, builds: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "report"
    first = run_sweep(builds[:1], SECTION, out, silent)
    again = run_sweep(builds[:1], SECTION, out, silent)
    assert again.builds == first.builds
    assert bench.served == ["fp16"]
    more = run_sweep(builds, SECTION, out, silent)
    assert bench.served == ["fp16", "int4"]
    assert more.builds[0] == first.builds[0]
    before = len(bench.server.seen)
    fewer = run_sweep(builds, SECTION.model_copy(update={"concurrencies": (2, 4)}), out, silent)
    assert len(bench.server.seen) - before == 2 * LEVEL
    assert [level.load.key for level in fewer.builds[0].levels] == ["c2", "c4", "r50"]
    assert len(list((out / "parts").glob("*/*.json"))) == 6
    run_sweep(builds[:1], SECTION.model_copy(update={"output_tokens": 3}), out, silent)
    assert bench.served[-1] == "fp16"
    stub_build(tmp_path, "fp16", seed=5)
    changed = run_sweep(builds[:1], SECTION.model_copy(update={"output_tokens": 3}), out, silent)
    assert bench.served[-2:] == ["fp16", "fp16"]
    assert changed.builds[0].info.fingerprint != first.builds[0].info.fingerprint


def test_a_build_that_fails_is_shown_and_the_others_go_on(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report"
    bench.refuse = {"fp16"}
    result = run_sweep(builds, SECTION, out, silent)
    assert [b.status for b in result.builds] == [Status.FAILED, Status.COMPLETE]
    assert result.builds[0].reason == "Triton Server ended while starting: no such engine"
    assert "no such engine" in (out / "report.html").read_text()
    bench.refuse = set()
    result = run_sweep(builds, SECTION, out, silent)
    assert [b.status for b in result.builds] == [Status.COMPLETE] * 2
    assert bench.served == ["int4", "fp16"]


def test_a_server_that_dies_fails_its_build_and_keeps_the_levels_before(
    bench: Bench, builds: list[Path], tmp_path: Path
) -> None:
    bench.dead_after_requests = 2 * LEVEL
    result = run_sweep(builds[:1], SECTION, tmp_path / "report", silent)
    (build,) = result.builds
    assert (build.status, build.reason) == (Status.FAILED, "Triton Server ended while it was measured")
    assert [level.load.key for level in build.levels] == ["c1"]


def test_a_server_that_refuses_every_request_fails_its_build(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    bench.script = '[[1, "the engine is dead"]]'
    (build,) = run_sweep(builds[:1], SECTION, tmp_path / "report", silent).builds
    assert build.status is Status.FAILED
    assert build.reason == "every warm-up request failed, the first with: the engine is dead"


def test_an_fp16_build_after_its_int4_one_is_not_scored_again(
    bench: Bench, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    real = room.measure_accuracy
    monkeypatch.setattr(room, "measure_accuracy", lambda info, *rest: scored.append(info.name) or real(info, *rest))
    _, plain = run_sweep(builds[::-1], SECTION, tmp_path / "report", silent).builds
    assert scored == ["int4"]
    alone = real(plain.info, SECTION.accuracy, silent)
    assert plain.accuracy is not None
    assert plain.accuracy.perplexity == pytest.approx(alone.perplexity, rel=1e-6)
    assert plain.accuracy.tokens == alone.tokens
    assert plain.accuracy.kl_divergence is None


def test_an_unfinished_build_is_shown_and_not_served(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    (builds[0] / "repository" / "manifest.json").unlink()
    result = run_sweep(builds, SECTION, tmp_path / "report", silent)
    assert [b.status for b in result.builds] == [Status.UNFINISHED, Status.COMPLETE]
    assert "build it first" in result.builds[0].reason
    assert bench.served == ["int4"]


def test_prompts_longer_than_the_engine_fail_the_build_before_it_is_served(
    bench: Bench, builds: list[Path], tmp_path: Path
) -> None:
    section = SECTION.model_copy(update={"prompt_tokens": 255})
    (build,) = run_sweep(builds[:1], section, tmp_path / "report", silent).builds
    assert build.status is Status.FAILED
    assert "prompts of 255 and answers of 2 tokens do not fit its engine, which holds 256" in build.reason
    assert not bench.served


def test_bugs_are_not_reported_as_failed_builds(
    bench: Bench, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(room, "level_metrics", broken)
    with pytest.raises(ZeroDivisionError):
        run_sweep(builds, SECTION, tmp_path / "report", silent)


def test_a_directory_with_other_things_is_never_replaced(bench: Bench, builds: list[Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(SitsError, match="holds something other than a sweep"):
        run_sweep(builds, SECTION, mine, silent)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert not bench.served
