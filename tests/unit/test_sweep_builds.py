"""Describing builds: whole, unfinished, and no builds at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sits_trt.errors import SitsError
from sits_trt.spec import PER_CHANNEL, WeightFormat
from sits_trt.sweep.builds import describe_builds, longest_sequence_tokens, unfinished_reason
from tests.support.builds import stub_build


def test_builds_are_described_from_recipe_and_manifests(tmp_path: Path) -> None:
    plain, int4 = stub_build(tmp_path, "plain"), stub_build(tmp_path, "int4", quantized=True)
    first, second = describe_builds([plain, int4])
    assert (first.name, first.weights, first.quantized) == ("plain", "float16", False)
    assert (second.name, second.weights) == ("int4", "INT4 AWQ g32, zero points, ScaleRecover")
    assert first.checkpoint_fingerprint == second.checkpoint_fingerprint != ""
    assert first.fingerprint != second.fingerprint
    assert 0 < second.weights_bytes < first.weights_bytes
    assert second.recipe["target"] == {"sku": "cpu"}
    assert unfinished_reason(first) == ""
    assert longest_sequence_tokens(first) == 256


def test_a_quantized_kv_cache_is_part_of_what_a_build_is(tmp_path: Path) -> None:
    builds = [
        stub_build(tmp_path, "plain"),
        stub_build(tmp_path, "fp8", kv_dtype="fp8"),
        stub_build(tmp_path, "both", quantized=True, kv_dtype="int8"),
    ]
    plain, fp8, both = describe_builds(builds)
    assert (fp8.weights, fp8.kv_dtype) == ("float16, FP8 KV cache", "fp8")
    assert both.weights == "INT4 AWQ g32, zero points, ScaleRecover, INT8 KV cache"
    assert [info.is_reference for info in (plain, fp8, both)] == [True, False, False]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (WeightFormat(4, 128, True), "INT4 g128, symmetric"),
        (WeightFormat(8, PER_CHANNEL, False), "INT8 per channel, zero points"),
        (WeightFormat(8, PER_CHANNEL, True, "float8_e4m3"), "FP8"),
        (WeightFormat(8, PER_CHANNEL, True, "float8_e4m3", "float8_e4m3"), "FP8, FP8 activations"),
        (WeightFormat(4, 64, True, activations="float8_e4m3"), "INT4 g64, symmetric, FP8 activations"),
    ],
)
def test_weights_that_came_quantized_are_called_what_they_are(
    tmp_path: Path, form: WeightFormat, expected: str
) -> None:
    build = stub_build(tmp_path, "plain")
    path = build / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["details"]["formats"] = [vars(form)]
    path.write_text(json.dumps(manifest))
    assert describe_builds([build])[0].weights == f"{expected}, as in the source"


def test_a_build_given_twice_counts_once_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    one, two = stub_build(tmp_path / "x", "tiny"), stub_build(tmp_path / "y", "tiny")
    assert len(describe_builds([one, one, one / ".." / "tiny"])) == 1
    names = [info.name for info in describe_builds([one, two])]
    assert len(set(names)) == 2
    assert str(one) in names[0]


def test_an_unfinished_build_says_what_is_missing(tmp_path: Path) -> None:
    build = stub_build(tmp_path, "tiny")
    (build / "repository" / "manifest.json").unlink()
    (info,) = describe_builds([build])
    assert "repository holds no manifest.json" in unfinished_reason(info)
    (build / "recipe.json").unlink()
    (info,) = describe_builds([build])
    assert info.name == "tiny"
    assert "recipe.json is missing" in unfinished_reason(info)


def test_what_is_no_build_is_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(SitsError, match="no builds were given"):
        describe_builds([])
    with pytest.raises(SitsError, match="typo is no build"):
        describe_builds([tmp_path / "typo"])
    build = stub_build(tmp_path, "tiny")
    (build / "recipe.json").write_text("{")
    with pytest.raises(SitsError, match=r"recipe\.json cannot be read"):
        describe_builds([build])
