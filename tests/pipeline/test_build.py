"""The build line as a user runs it: what is current is kept, what a key decides is rebuilt, killed work goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from sits_trt.artifacts import BuildDirectory, read_manifest
from sits_trt.checkpoint import open_checkpoint
from sits_trt.errors import SitsError
from sits_trt.pipeline import BuildLine, _needed_kernels
from sits_trt.recipe import load_recipe
from sits_trt.repository import write
from sits_trt.runtime.load import load_executor
from sits_trt.sweep.builds import describe_builds
from tests.support.tiny import tiny_checkpoint

RECIPE = """
model: {{source: {source}}}
target: {{sku: cpu}}
quantization: {{scheme: w4a16, group_size: 32, calibration: {{blocks: 2, block_tokens: 64}}}}
engine:
  backend: eager
  prompt_tokens: {{p50: 16, p95: 32, max: 48}}
  max_output_tokens: 16
  max_tokens_per_step: 64
serving: {{max_batch_size: 4}}
"""


def run(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sits_trt", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)


def rebuilt(cwd: Path, *overrides: str) -> list[str]:
    """Build and return the stages that were made anew."""
    sets = [word for override in overrides for word in ("--set", override)]
    done = run(["build", "tiny.yaml", "--json", *sets], cwd)
    assert done.returncode == 0, done.stderr
    return [stage["stage"] for stage in json.loads(done.stdout)["stages"] if stage["rebuilt"]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with tiny.yaml and the checkpoint that it names."""
    source = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(source=source))
    return tmp_path


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built")
    source = tiny_checkpoint(directory / "model")
    (directory / "tiny.yaml").write_text(RECIPE.format(source=source))
    assert rebuilt(directory)
    return directory


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Path:
    """A directory with tiny.yaml and its finished build; a build may be copied as a whole."""
    shutil.copytree(built_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_only_what_a_key_decides_is_rebuilt(place: Path) -> None:
    everything = ["checkpoint", "scales", "quantized", "engine", "repository"]
    assert rebuilt(place) == everything
    assert rebuilt(place) == []
    assert rebuilt(place, "serving.max_batch_size=5") == ["engine", "repository"]
    assert rebuilt(place, "serving.max_batch_size=5", "serving.max_queue_size=9") == ["repository"]
    assert rebuilt(place, "serving.max_batch_size=5", "sweep.seed=3") == ["repository"]
    assert rebuilt(place, "serving.max_batch_size=5", "kv_cache.dtype=fp8") == ["engine", "repository"]
    # Integer codes want smooth keys, which are the same for both.
    assert rebuilt(place, "serving.max_batch_size=5", "kv_cache.dtype=int4") == everything[1:]
    assert rebuilt(place, "serving.max_batch_size=5", "kv_cache.dtype=int8") == ["engine", "repository"]
    other_groups = ("quantization.group_size=64", "quantization.ignore=['re:.*down_proj', lm_head]")
    assert rebuilt(place, *other_groups) == everything[1:]
    assert rebuilt(place, "quantization.scheme=none") == ["engine", "repository"]


def test_changed_source_is_seen(built: Path) -> None:
    config = built / "model" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_length": 77}))
    assert rebuilt(built, f"model.source={config.parent}")[0] == "checkpoint"


@pytest.mark.parametrize("stage", ["checkpoint", "scales", "engine"])
def test_killed_build_finishes_when_run_again(place: Path, stage: str) -> None:
    build = place / "builds" / "tiny"
    command = [sys.executable, "-m", "sits_trt", "build", "tiny.yaml"]
    child = subprocess.Popen(command, cwd=place, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not ((build / f"{stage}.partial").exists() or (build / stage).exists()):
        assert child.poll() is None, "the build ended before its stage began"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    done = run(["build", "tiny.yaml"], place)
    assert done.returncode == 0, done.stderr
    assert not list(build.glob("*.partial"))
    assert rebuilt(place) == []


def test_unchanged_build_is_fast(built: Path) -> None:
    """In CPU time, as the machine may be busy: a build with nothing to do must end within 3 s."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert rebuilt(built) == []
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_files_of_another_version_of_the_repository_are_replaced(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(built)
    line = BuildLine(load_recipe("tiny.yaml"), Path("builds/tiny"), lambda name: nullcontext(lambda *told: None))
    assert [stage.name for stage in line.run() if stage.rebuilt] == []
    monkeypatch.setattr(write, "_BODY", write._BODY + "# changed\n")
    assert [stage.name for stage in line.run() if stage.rebuilt] == ["repository"]
    assert Path("builds/tiny/repository/tensorrt_llm/1/model.py").read_text().endswith("# changed\n")


def test_errors_are_one_sentence_with_exit_code_2(place: Path) -> None:
    for arguments, words in (
        (["build", "tiny.yaml", "--set", "model.source=/nowhere"], "does not exist"),
        (["build", "tiny.yaml", "--set", "engine.prompt_tokens.max=100000"], "positions"),
        (["build", "tiny.yaml", "--set", "quantization.group_size=128"], "128"),
        (["build", "nothing.yaml"], "no recipe"),
        (["serve", "nothing"], "no finished build"),
        (["sweep", "nothing"], "no finished build"),
        (["eval", "nothing"], "no finished build"),
        (["engine", "inspect", "nothing"], "sits-trt build"),
        (["generate", "hello"], "--build"),
        (["generate", "hello", "--raw", "--url", "127.0.0.1:9"], "no Triton Server answers"),
    ):
        done = run(arguments, place)
        assert done.returncode == 2, (arguments, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, done.stderr
        assert done.stderr.rstrip().endswith(lines[0]), done.stderr
        assert words in lines[0], done.stderr


def test_a_bound_of_accuracy_fails_the_build_and_redoes_nothing_else(place: Path) -> None:
    build = place / "builds" / "tiny"
    tight = ["build", "tiny.yaml", "--set", "quantization.max_kl=1e-6"]
    refused = run(tight, place)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "KL divergence is" in error
    assert "quantization.max_kl allows 1e-06" in error
    assert "worst 8 of 14 quantized layers" in refused.stderr
    report = build / "quantized.partial" / "report.json"
    assert str(report.relative_to(place)) in error
    measured = json.loads(report.read_text())["evaluation"]
    assert 0 < measured["kl"] < 1
    assert 0 < measured["top5"] <= 1
    for absent in ("quantized", "engine", "repository", "recipe.json"):
        assert not (build / absent).exists()

    written = (report.parent / "model.safetensors").stat().st_ino
    assert rebuilt(place, "quantization.max_kl=5") == ["quantized", "engine", "repository"]
    assert (build / "quantized" / "model.safetensors").stat().st_ino == written, "the weights were written again"
    assert rebuilt(place, "quantization.max_kl=4", "quantization.max_perplexity_increase=9.5") == []
    assert json.loads((build / "recipe.json").read_text())["quantization"]["max_kl"] == 4
    assert run(tight, place).returncode == 2
    assert json.loads((build / "recipe.json").read_text())["quantization"]["max_kl"] == 4
    assert rebuilt(place) == []


def test_eval_finds_what_the_bound_was_held_against(built: Path) -> None:
    text = ["--text", "pydoc", "--blocks", "8", "--block-tokens", "64", "--prompts", "1", "--exact-match-tokens", "2"]
    done = run(["eval", "builds/tiny", *text, "--json"], built)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gate = read_manifest(built / "builds" / "tiny" / "quantized", "quantized").details
    assert found["bits_per_weight"] == gate["bits_per_weight"]
    # The same sums in another order.
    assert found["accuracy"]["kl_divergence"] == pytest.approx(gate["evaluation"]["kl"], rel=1e-3)
    assert found["accuracy"]["perplexity"] == pytest.approx(gate["evaluation"]["perplexity"], rel=1e-4)
    assert found["accuracy"]["tokens"] == gate["evaluation"]["positions"] == 512
    assert len(found["layers"]) == 14


def test_b01_refused_recipe_writes_nothing(place: Path) -> None:
    done = run(["build", "tiny.yaml", "--set", "serving.max_batch_size=no"], place)
    assert done.returncode == 2
    assert not (place / "builds").exists()


def test_moved_build_still_describes_itself(built: Path) -> None:
    (built / "builds" / "tiny").rename(built / "elsewhere")
    done = run(["engine", "inspect", "elsewhere", "--json"], built)
    assert done.returncode == 0, done.stderr
    checkpoint = built / "elsewhere" / "engine" / json.loads(done.stdout)["checkpoint"]
    assert (checkpoint / "config.json").is_file()


def test_generate_in_process_streams_the_greedy_answer(built: Path) -> None:
    one = run(["generate", "--build", "builds/tiny", "--raw", "--max-tokens", "9", "--json", "abc"], built)
    assert one.returncode == 0, one.stderr
    answer = json.loads(one.stdout)
    plain = run(["generate", "--build", "builds/tiny", "--raw", "--max-tokens", "9", "abc"], built)
    assert plain.stdout.removesuffix("\n") == answer["text"]
    assert answer["prompt_tokens"] == 3
    assert answer["output_tokens"] <= 9


@pytest.mark.parametrize("scheme", ["none", "w4a16"])
def test_a_build_killed_on_its_way_to_other_weights_is_neither_measured_nor_served(place: Path, scheme: str) -> None:
    """Its recipe and engine are those of the build before, the weights beside them are not."""
    group = ["quantization.group_size=32", "quantization.method=rtn", f"quantization.scheme={scheme}"]

    def line(*overrides: str) -> BuildLine:
        recipe = load_recipe(str(place / "tiny.yaml"), [*group, *overrides])
        return BuildLine(recipe, place / "build", lambda name: nullcontext(lambda done, total, what: None))

    list(line().run())
    changed = f"model.source={tiny_checkpoint(place / 'other', seed=5)}"
    stages = line(changed if scheme == "none" else "quantization.symmetric=true").run()
    while next(stages).name != ("checkpoint" if scheme == "none" else "quantized"):
        pass
    stages.close()  # type: ignore[attr-defined]  # a generator
    evaluated = run(["eval", "build"], place)
    assert evaluated.returncode == 2
    assert "the last 'sits-trt build' did not end" in evaluated.stderr
    with pytest.raises(SitsError, match="was not made from what now lies in"):
        load_executor(place / "build" / "engine", runner="eager")


def test_manifests_chain_from_source_to_repository(built: Path) -> None:
    layout = BuildDirectory(built / "builds" / "tiny")
    names = ("checkpoint", "scales", "quantized", "engine", "repository")
    prints = {name: read_manifest(getattr(layout, name), name).fingerprint for name in names}
    inputs = {name: read_manifest(getattr(layout, name), name).inputs for name in names}
    assert inputs["quantized"] == {"checkpoint": prints["checkpoint"], "scales": prints["scales"]}
    assert inputs["engine"] == {"quantized": prints["quantized"]}
    assert inputs["repository"] == {"engine": prints["engine"]}


def test_recipe_commands_print_json(place: Path) -> None:
    shown = json.loads(run(["recipe", "show", "a100", "--set", "serving.max_batch_size=3"], place).stdout)
    assert shown["serving"]["max_batch_size"] == 3
    assert json.loads(run(["recipe", "schema"], place).stdout)["title"] == "Recipe"
    assert json.loads(run(["recipe", "skus"], place).stdout)["h200"]["sm"] == 90
    doctor = json.loads(run(["doctor", "--json"], place).stdout)
    assert doctor["skus"]["cpu"]["run"][0] is True
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run(["version"], place).stdout)


def test_another_format_and_back(built: Path) -> None:
    """A build converts to AutoAWQ and is built again from there: the quantize stages are passed through."""
    assert rebuilt(built, "quantization.scale_recover=false")
    converted = run(["convert", "builds/tiny", "--to", "autoawq", "--out", "awq", "--json"], built)
    assert converted.returncode == 0, converted.stderr
    assert json.loads(converted.stdout)["quantized_layers"] == 14
    as_it_is = ("--set", "model.source=awq", "--out", "again")
    unclear = run(["build", "tiny.yaml", *as_it_is], built)
    assert unclear.returncode == 2
    assert "already quantized (4 bits, groups of 32): set quantization.scheme=none" in unclear.stderr
    done = run(["build", "tiny.yaml", *as_it_is, "--set", "quantization.scheme=none", "--json"], built)
    assert done.returncode == 0, done.stderr
    assert [stage["stage"] for stage in json.loads(done.stdout)["stages"]] == ["checkpoint", "engine", "repository"]
    before, after = open_checkpoint(built / "builds/tiny/quantized"), open_checkpoint(built / "again/checkpoint")
    assert after.formats == before.formats
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert describe_builds([built / "again"])[0].weights == "INT4 g32, zero points, as in the source"
    bounded = ("--set", "quantization.scheme=none", "--set", "quantization.max_kl=1")
    unmeasured = run(["build", "tiny.yaml", *as_it_is, *bounded], built)
    assert unmeasured.returncode == 2
    assert "no float model to hold max_kl" in unmeasured.stderr


def test_a_build_takes_the_kernels_of_every_format_that_its_weights_may_have() -> None:
    """With a bit budget the formats are known only after the search, the bundle is made from the recipe."""
    budget = _needed_kernels(80, "float16", "float16", 64, 4, 64, [(128, False), (64, False), (32, False)])
    one = _needed_kernels(80, "float16", "float16", 64, 4, 64, [(64, False)])
    none = _needed_kernels(80, "float16", "float16", 64, 4, 64, [])
    for group in (32, 64, 128):
        name = f"linear_stream_fp16_g{group}_asym"
        assert (budget(name), one(name), none(name)) == (True, group == 64, False)
    assert not budget("linear_stream_fp16_g64_sym")
