"""Bounds of accuracy: what is within them passes, what is beyond is named with ways out that the recipe leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sits_trt.budget import check_budget
from sits_trt.errors import BudgetError, RecipeError, SitsError
from sits_trt.layer_report import read_report
from sits_trt.recipe import load_recipe
from sits_trt.recipe.schema import QuantizationSection

LAYERS = [
    {"errors": {"model.layers.0.mlp.down_proj": 0.002, "model.layers.0.self_attn.q_proj": 0.07}, "drift": 0.01},
    {"errors": {"model.layers.1.mlp.down_proj": 0.03}, "drift": 0.02},
]


SCORES = {"kl": 0.05, "perplexity": 10.5, "reference_perplexity": 10.0}


def report(folder: Path, **scores: float) -> Path:
    path = folder / "report.json"
    evaluation = SCORES | scores
    data = {"bits_per_weight": 4.25, "evaluation": evaluation, "search": {"layers": LAYERS}}
    path.write_text(json.dumps(data))
    return path


def section(**values: Any) -> QuantizationSection:
    return QuantizationSection.model_validate(values)


@pytest.mark.parametrize(
    "bounds",
    [{}, {"max_kl": 0.05}, {"max_perplexity_increase": 0.0500001}, {"max_kl": 1.0, "max_perplexity_increase": 1.0}],
)
def test_a_model_within_its_bounds_passes(tmp_path: Path, bounds: dict[str, float]) -> None:
    check_budget(section(**bounds), report(tmp_path))


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"max_kl": 0.049}, ["KL divergence is 0.05 nats a token", "quantization.max_kl allows 0.049"]),
        ({"max_perplexity_increase": 0.04}, ["perplexity is 10.5, 0.05 of", "max_perplexity_increase allows 0.04"]),
        ({"max_kl": 0.01, "max_perplexity_increase": 0.01}, ["max_kl allows", "max_perplexity_increase allows"]),
    ],
)
def test_a_model_beyond_a_bound_is_one_sentence_with_value_bound_and_way_out(
    tmp_path: Path, bounds: dict[str, float], words: list[str]
) -> None:
    path = report(tmp_path)
    with pytest.raises(BudgetError) as caught:
        check_budget(section(**bounds), path)
    assert caught.value.report == path
    message = str(caught.value)
    assert "\n" not in message
    worst_first = "model.layers.0.self_attn.q_proj (0.07), model.layers.1.mlp.down_proj (0.03)"
    for word in (*words, str(path), worst_first, "group_size=32", "calibration.blocks above 32"):
        assert word in message


def test_only_what_the_recipe_leaves_is_proposed(tmp_path: Path) -> None:
    path = report(tmp_path)
    with pytest.raises(BudgetError) as best:
        check_budget(section(max_kl=0.01, group_size=32), path)
    assert not any(way in str(best.value) for way in ("group_size", "symmetric", "method", "clip=", "compensation="))
    assert "bits_per_weight above 4.25" in str(best.value)
    with pytest.raises(BudgetError) as plain:
        check_budget(section(max_kl=0.01, method="rtn", clip=False, compensation=False, symmetric=True), path)
    for way in ("method=awq", "clip=true", "compensation=true", "symmetric=false"):
        assert way in str(plain.value)
    with pytest.raises(BudgetError, match=r"group_size=128"):
        check_budget(section(max_kl=0.01, scheme="w8a16", group_size=-1), path)
    with pytest.raises(BudgetError, match=r"bits_per_weight above 4.75") as mixed:
        check_budget(section(max_kl=0.01, bits_per_weight=4.75), path)
    assert "group_size" not in str(mixed.value)
    with pytest.raises(BudgetError, match=r"scheme=w8a16") as fp8:
        check_budget(section(max_kl=0.01, scheme="w8a8-fp8", symmetric=True), path)
    assert not any(way in str(fp8.value) for way in ("group_size", "symmetric"))


@pytest.mark.parametrize("bound", ["max_kl", "max_perplexity_increase"])
def test_a_value_that_is_no_number_is_beyond_every_bound(tmp_path: Path, bound: str) -> None:
    with pytest.raises(BudgetError, match="nan"):
        check_budget(section(**{bound: 1e9}), report(tmp_path, kl=float("nan"), perplexity=float("nan")))


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"bits_per_weight": 4, "evaluation": {}, "search": {"layers": []}}'),
        json.dumps({"bits_per_weight": 4, "evaluation": SCORES, "search": {"layers": [5]}}),
        json.dumps({"bits_per_weight": 4, "evaluation": SCORES | {"kl": "x"}, "search": {"layers": []}}),
        json.dumps(
            {"bits_per_weight": 4, "evaluation": SCORES | {"reference_perplexity": 0}, "search": {"layers": []}}
        ),
    ],
)
def test_a_damaged_report_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SitsError, match="build again"):
        read_report(tmp_path / "report.json")


@pytest.mark.parametrize("value", ["0", "-0.1", ".inf", ".nan", "high"])
@pytest.mark.parametrize("bound", ["max_kl", "max_perplexity_increase"])
def test_a_bound_is_a_positive_number(tmp_path: Path, bound: str, value: str) -> None:
    (tmp_path / "mine.yaml").write_text("model: {source: somewhere}\ntarget: {sku: cpu}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "mine.yaml"), [f"quantization.{bound}={value}"])
    assert caught.value.key == f"quantization.{bound}"


def test_bounds_do_not_decide_weights() -> None:
    assert section(max_kl=0.1, max_perplexity_increase=0.1).decisive() == section().decisive()
    assert section(group_size=32).decisive() != section().decisive()
