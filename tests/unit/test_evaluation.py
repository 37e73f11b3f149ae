"""`sits-trt eval`: the figures of a build, shared with the sweep, and every bad input as one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sits_trt.artifacts import BuildDirectory
from sits_trt.cli import app
from sits_trt.errors import SitsError
from sits_trt.recipe.schema import AccuracySection
from sits_trt.spec import WeightFormat
from sits_trt.sweep import accuracy as room
from sits_trt.sweep.accuracy import measure_accuracy
from sits_trt.sweep.builds import describe_builds
from sits_trt.sweep.result import Accuracy, BuildResult, Status
from sits_trt.sweep.tables import build_table
from tests.support.builds import stub_build
from tests.support.quantized import edit_stored
from tests.support.sweep_results import made_build, made_result
from tests.support.tiny import write_checkpoint

SMALL = ("--blocks", "2", "--block-tokens", "70", "--prompts", "3", "--exact-match-tokens", "5")
LAYERS = [
    {"errors": {"model.layers.0.mlp.down_proj": 0.002, "model.layers.0.self_attn.q_proj": 0.07}, "drift": 0.01},
    {"errors": {"model.layers.1.mlp.down_proj": 0.03}, "drift": 0.02},
]


SCORES = {"kl": 0.05, "perplexity": 10.5, "reference_perplexity": 10.0}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an INT4 build and its fp16 reference, and the quantization report of the former."""
    root = tmp_path_factory.mktemp("evaluated")
    stub_build(root, "fp16")
    int4 = stub_build(root, "int4", quantized=True)
    report = {"bits_per_weight": 4.75, "evaluation": SCORES, "search": {"layers": LAYERS}}
    (BuildDirectory(int4).quantized / "report.json").write_text(json.dumps(report))
    return root


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_build_of_a_quantized_source_is_nobodys_reference(tmp_path: Path, kv_dtype: str) -> None:
    """Its weights have lost something, and nothing here knows how much."""
    build = stub_build(tmp_path, "theirs", kv_dtype=kv_dtype)
    path = build / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["details"]["formats"] = [vars(WeightFormat(4, 32))]
    path.write_text(json.dumps(manifest))
    (info,) = describe_builds([build])
    assert not info.is_reference
    found = json.loads(evaluate(build, *SMALL, "--json"))
    assert found["source_quantized"]
    assert (found["accuracy"]["perplexity_increase"] is None) == (kv_dtype == "float16")
    accuracy = Accuracy(**{key: value for key, value in found["accuracy"].items() if key != "perplexity_increase"})
    row = build_table(made_result([made_build(1), BuildResult(info, Status.COMPLETE, "", accuracy)])).rows[1]
    assert "reference" not in row
    assert not any("%" in cell for cell in row)
    assert "unquantized" not in evaluate(build, *SMALL)


def evaluate(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str | Path) -> str:
    """Return the sentence of the error, which `main` prints; what is not expected is raised."""
    with pytest.raises((SitsError, OSError)) as caught:
        CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    return str(caught.value)


def test_json_has_the_sweeps_figures_and_the_layers_worst_first(built: Path) -> None:
    found = json.loads(evaluate(built / "int4", *SMALL, "--json"))
    (info,) = describe_builds([built / "int4"])
    section = AccuracySection(blocks=2, block_tokens=70, prompts=3, exact_match_tokens=5)
    measured = measure_accuracy(info, section, lambda done, total, what: None)
    assert found["accuracy"] == vars(measured) | {"perplexity_increase": measured.perplexity_increase}
    assert found["settings"] == section.model_dump()
    assert found["bits_per_weight"] == 4.75
    assert [(layer["name"], layer["layer"], layer["drift"]) for layer in found["layers"]] == [
        ("model.layers.0.self_attn.q_proj", 0, 0.01),
        ("model.layers.1.mlp.down_proj", 1, 0.02),
        ("model.layers.0.mlp.down_proj", 0, 0.01),
    ]
    assert found["accuracy"]["seconds"] >= 0


def test_the_table_names_each_figure(built: Path) -> None:
    shown = evaluate(built / "int4", *SMALL)
    for words in (
        "perplexity",
        "KL divergence",
        "top-1",
        "top-5",
        "answers of 5 tokens",
        "of 3",
        "4.75 bits",
        "measured in",
    ):
        assert words in shown
    assert shown.index("model.layers.0.self_attn.q_proj") < shown.index("model.layers.1.mlp.down_proj")
    assert "worst 1 of 3" in evaluate(built / "int4", *SMALL, "--layers", "1")
    assert "model.layers" not in evaluate(built / "int4", *SMALL, "--layers", "0")


def test_an_fp16_build_has_a_perplexity_and_nothing_else(built: Path) -> None:
    found = json.loads(evaluate(built / "fp16", *SMALL, "--json"))
    assert found["accuracy"]["perplexity"] > 1
    assert found["accuracy"]["kl_divergence"] is found["accuracy"]["top5_agreement"] is None
    assert found["accuracy"]["perplexity_increase"] == 0
    assert (found["bits_per_weight"], found["layers"]) == (16, [])
    shown = evaluate(built / "fp16", *SMALL)
    assert "perplexity" in shown
    assert "KL" not in shown


def test_the_bits_of_a_source_that_was_quantized_before_are_its_own(built: Path, tmp_path: Path) -> None:
    build = stub_build(tmp_path, "awq")
    manifest = (build / "checkpoint" / "manifest.json").read_text()
    shutil.rmtree(build / "checkpoint")
    shutil.copytree(built / "int4" / "quantized", build / "checkpoint")
    (build / "checkpoint" / "manifest.json").write_text(manifest)
    found = json.loads(evaluate(build, *SMALL, "--json"))
    assert 4 < found["bits_per_weight"] < 5
    assert found["accuracy"]["kl_divergence"] is None


def test_each_text_is_measured_once_and_stays_known(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "own.jsonl"
    text.write_text("".join(json.dumps({"text": f"The {i}th line of a text of its own."}) + "\n" for i in range(40)))
    own = json.loads(evaluate(built / "int4", *SMALL, "--text", text, "--json"))
    pydoc = json.loads(evaluate(built / "int4", *SMALL, "--text", "pydoc", "--json"))
    assert own["accuracy"] != pydoc["accuracy"]
    monkeypatch.setattr(room, "_measure", lambda *_: pytest.fail("measured again"))
    assert json.loads(evaluate(built / "int4", *SMALL, "--text", text, "--json")) == own
    assert json.loads(evaluate(built / "int4", *SMALL, "--json")) == pydoc
    text.write_text(text.read_text() + json.dumps({"text": "More."}))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        evaluate(built / "int4", *SMALL, "--text", text)


def test_bad_input_is_one_sentence_and_leaves_nothing(built: Path, tmp_path: Path) -> None:
    build = built / "int4"
    (tmp_path / "latin1.txt").write_bytes("für".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("sixty-nine tokens is one too few".ljust(69, "."))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"txet": "wrong"}\n')
    before = sorted(build.rglob("*"))
    for arguments, words in (
        ((tmp_path / "nothing", *SMALL), "no finished build"),
        ((tmp_path, *SMALL), "no finished build"),
        ((build, *SMALL, "--text", tmp_path / "nowhere.txt"), "is no file"),
        ((build, *SMALL, "--text", tmp_path), "is no file"),
        ((build, *SMALL, "--text", tmp_path / "latin1.txt"), "not UTF-8"),
        ((build, *SMALL, "--text", tmp_path / "short.txt"), "holds 69 tokens and a block is of 70"),
        ((build, *SMALL, "--text", tmp_path / "empty.txt"), "holds no tokens"),
        ((build, *SMALL, "--text", tmp_path / "rows.jsonl"), "no 'text' key"),
        ((build, "--blocks", "0"), "sweep.accuracy.blocks"),
        ((build, "--prompts", "-1"), "sweep.accuracy.prompts"),
        ((build, "--block-tokens", "1"), "no two tokens"),
        ((build, *SMALL, "--block-tokens", "513"), "needs 513 positions, the model has 512"),
        ((build, *SMALL, "--exact-match-tokens", "449"), "needs 513 positions, the model has 512"),
    ):
        assert words in refused(*arguments), arguments
    assert sorted(build.rglob("*")) == before


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("checkpoint/manifest.json", "checkpoint holds no manifest.json"),
        ("quantized/manifest.json", "quantized holds no manifest.json"),
        ("quantized/report.json", "no report of a quantization"),
        ("recipe.json", "no finished build"),
    ],
)
def test_a_build_with_a_part_missing_is_one_sentence(tmp_path: Path, missing: str, words: str) -> None:
    build = stub_build(tmp_path, "int4", quantized=True)
    report = {"bits_per_weight": 4.75, "evaluation": SCORES, "search": {"layers": []}}
    (build / "quantized" / "report.json").write_text(json.dumps(report))
    (build / missing).unlink()
    assert words in refused(build, *SMALL)
    assert not (build / "accuracy").exists()


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sits_trt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_error_ends_the_command_with_exit_code_2(tmp_path: Path) -> None:
    done = run(["eval", str(tmp_path / "nothing")])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("stage", ["checkpoint", "quantized"])
def test_weights_that_were_changed_after_the_build_are_measured_anew(tmp_path: Path, stage: str) -> None:
    build = prepared(tmp_path)
    before = json.loads(evaluate(build, *SMALL, "--json"))["accuracy"]
    edit_stored(build / stage, lambda tensors: tensors["model.norm.weight"].mul_(3))
    after = json.loads(evaluate(build, *SMALL, "--json"))["accuracy"]
    changed = "reference_perplexity" if stage == "checkpoint" else "perplexity"
    kept = {"reference_perplexity", "perplexity"} - {changed}
    assert after[changed] != before[changed]
    assert all(after[key] == before[key] for key in kept)


@pytest.mark.parametrize("content", ["{", "[]", '{"perplexity": 1}', None])
def test_a_measurement_that_cannot_be_read_is_made_again(tmp_path: Path, content: str | None) -> None:
    build = prepared(tmp_path)
    before = json.loads(evaluate(build, *SMALL, "--json"))["accuracy"]
    (path,) = (build / "accuracy").glob("*/accuracy.json")
    path.unlink() if content is None else path.write_text(content)
    after = json.loads(evaluate(build, *SMALL, "--json"))["accuracy"]
    assert after | {"seconds": 0} == before | {"seconds": 0}
    assert json.loads(path.read_text()) | {"perplexity_increase": before["perplexity_increase"]} == after


def test_checkpoints_of_two_models_are_no_build(tmp_path: Path) -> None:
    build = prepared(tmp_path)
    other = write_checkpoint(tmp_path / "other", vocab_size=50)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(other / name, build / "checkpoint" / name)
    assert "two different models" in refused(build, *SMALL)


def prepared(root: Path) -> Path:
    build = stub_build(root, "int4", quantized=True)
    report = {"bits_per_weight": 4.75, "evaluation": SCORES, "search": {"layers": []}}
    (build / "quantized" / "report.json").write_text(json.dumps(report))
    return build
