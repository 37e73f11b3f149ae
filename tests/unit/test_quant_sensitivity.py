"""Estimated losses against finite differences of the whole model, and what a budget makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sits_trt.checkpoint import Checkpoint, open_checkpoint
from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.errors import QuantizationError
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.scoring import block_logits
from sits_trt.quant.bit_budget import decide_formats, read_formats, spend
from sits_trt.quant.grid import decode, encode, fit_grid
from sits_trt.quant.sensitivity import measure_losses
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import WeightFormat
from tests.support.tiny import tiny_spec, write_checkpoint

FORM = WeightFormat(4, 32, False)
BLOCKS = [[(7 * i + 3) % 97 for i in range(9)], [(5 * i + 1) % 97 for i in range(5)]]


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total, what


def section(**values: object) -> QuantizationSection:
    return QuantizationSection.model_validate(values)


def loss_of(decoder: Decoder, block: list[int], drawn: Tensor) -> float:
    return nn.functional.cross_entropy(block_logits(decoder, block).double(), drawn, reduction="sum").item()


def slow_estimate(checkpoint: Checkpoint, module: str, rows: slice, name: str) -> float:
    """The estimate by its definition: a thousandth of each token's weight error alone is let into the model."""
    weight = checkpoint[f"{name}.weight"].float()
    grid = fit_grid(weight, FORM, None)
    error = (decode(encode(weight, grid), grid) - weight).double()
    exact = build_decoder(checkpoint.spec, checkpoint, dtype=torch.float64)
    half = build_decoder(checkpoint.spec, checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    changes = []
    for block in BLOCKS:
        drawn = torch.multinomial(block_logits(half, block).softmax(-1), 1, generator=generator)[:, 0]
        for token in range(len(block)):
            losses = []
            for step in (1e-3, -1e-3):

                def perturb(
                    _: nn.Module, inputs: tuple[Tensor], output: Tensor, token: int = token, step: float = step
                ):  # type: ignore[no-untyped-def]
                    output[token, rows] += step * (error @ inputs[0][token])
                    return output

                handle = exact.get_submodule(module).register_forward_hook(perturb)
                losses.append(loss_of(exact, block, drawn))
                handle.remove()
            changes.append(abs(losses[0] - losses[1]) / 2e-3)
    change = torch.tensor(changes)
    return float(torch.where(change < 1, change.square() / 2, change - 0.5).mean())


@pytest.mark.parametrize(
    "family", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"], ids=["llama", "qwen3", "gemma2"]
)
def test_estimates_are_the_definition_by_finite_differences(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "source", family))
    names = {
        "model.layers.0.self_attn.v_proj": ("layers.0.qkv", slice(96, 128)),
        "model.layers.0.mlp.up_proj": ("layers.0.gate_up", slice(96, 192)),
        "model.layers.1.self_attn.o_proj": ("layers.1.o", slice(None)),
        "model.layers.1.mlp.down_proj": ("layers.1.down", slice(None)),
    }
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "77.safetensors").write_text("left by a killed run")
    losses = measure_losses(checkpoint, BLOCKS, {name: {"f": FORM} for name in names}, tmp_path, quiet)
    for name, place in names.items():
        assert losses[name]["f"] == pytest.approx(slow_estimate(checkpoint, *place, name), rel=1e-2)
    assert set(losses) == {name for name in linear_shapes(checkpoint.spec) if name != "lm_head"}
    assert not list(tmp_path.glob("streams*"))


def test_more_bits_lose_less_and_the_same_twice(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "source"))
    forms = {"int4": FORM, "int8": WeightFormat(8, -1), "fp8": WeightFormat(8, -1, True, "float8_e4m3")}
    candidates = {name: forms for name in linear_shapes(checkpoint.spec) if name != "lm_head"}
    losses = measure_losses(checkpoint, BLOCKS, candidates, tmp_path, quiet)
    for each in losses.values():
        assert 0 < each["int8"] < each["fp8"] < each["int4"]
    assert measure_losses(checkpoint, BLOCKS, candidates, tmp_path, quiet) == losses


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "source"))
    tensors = {name: checkpoint[name] for name in checkpoint}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    class Damaged(dict[str, Tensor]):
        spec = checkpoint.spec

    with pytest.raises(QuantizationError, match="not finite"):
        measure_losses(Damaged(tensors), BLOCKS, {}, tmp_path, quiet)  # type: ignore[arg-type]


def equal_losses(spec_losses: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        name: {"int4-g64": loss, "int4-g32": loss / 2, "int8": loss / 300} for name, loss in spec_losses.items()
    }  # fmt: skip


def test_the_budget_goes_to_the_layers_that_need_it_and_fused_ones_agree() -> None:
    spec = tiny_spec()
    losses = dict.fromkeys((name for name in linear_shapes(spec) if name != "lm_head"), 1.0)
    losses["model.layers.1.self_attn.k_proj"] = 50.0
    losses["model.layers.0.mlp.down_proj"] = 80.0
    recipe = section(bits_per_weight=5.7, budget_formats=("int4-g32", "int8"))
    chosen = spend(spec, recipe, equal_losses(losses))
    raised = {name for name, form in chosen.items() if form == "int8"}
    assert raised >= {f"model.layers.1.self_attn.{x}_proj" for x in "qkv"} | {"model.layers.0.mlp.down_proj"}
    for layer in range(2):
        for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            assert len({chosen[f"model.layers.{layer}.{name}_proj"] for name in names}) == 1
    everything = spend(
        spec, section(bits_per_weight=5).model_copy(update={"bits_per_weight": 16.0}), equal_losses(losses)
    )
    assert set(everything.values()) == {"float16"}


def test_b13_formats_that_do_not_divide_are_left_out(tmp_path: Path) -> None:
    """Down has 96 inputs: of the INT4 formats only groups of 32 fit it."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "source"))
    recipe = section(bits_per_weight=4.6)
    formats = decide_formats(checkpoint, recipe, BLOCKS, tmp_path / "scales", quiet)
    assert formats["model.layers.0.mlp.down_proj"].group_size == 32
    written = json.loads((tmp_path / "scales" / "bit_budget.json").read_text())
    assert set(written["losses"]["model.layers.0.mlp.down_proj"]) == {"int4-g32", "int8"}
    assert read_formats(checkpoint.spec, recipe, tmp_path / "scales") == formats
    # What was decided stays: a search that goes on must not change its plan.
    assert decide_formats(checkpoint, recipe, BLOCKS[1:], tmp_path / "scales", quiet) == formats
    with pytest.raises(QuantizationError, match=r"no format of budget_formats fits .*down_proj.*96 inputs; add int8"):
        decide_formats(checkpoint, section(bits_per_weight=5, budget_formats=("int4-g64",)), BLOCKS, tmp_path, quiet)


def test_budgets_below_the_smallest_formats_are_refused_with_what_they_take(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "source"))
    for values, least in (({}, "4.450"), ({"ignore": (r"re:.*down_proj",)}, "6.700")):
        with pytest.raises(QuantizationError, match=f"smallest formats of budget_formats take {least}"):
            decide_formats(checkpoint, section(bits_per_weight=4.1, **values), BLOCKS, tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()
