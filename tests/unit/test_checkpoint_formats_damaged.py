"""Checkpoints of other programs that are damaged, or of a scheme that is not read: refused, naming what and where."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sits_trt.checkpoint import convert, materialize, open_checkpoint, write_quantized
from sits_trt.errors import CheckpointError
from sits_trt.spec import PER_CHANNEL, WeightFormat
from tests.support.quantized import edit_stored, quantize_tensors, stored_tensors, write_tiny_quantized
from tests.support.tiny import write_checkpoint

LAYER = "model.layers.0.mlp.up_proj"


def scheme(targets: Any = ("Linear",), inputs: Any = None, **weights: Any) -> dict[str, Any]:
    described = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, **weights}
    return {"config_groups": {"group_0": {"targets": targets, "weights": described, "input_activations": inputs}}}


class TestDamaged:
    @pytest.fixture
    def awq(self, tmp_path: Path) -> Path:
        convert(write_tiny_quantized(tmp_path / "q"), "autoawq", tmp_path / "awq")
        return tmp_path / "awq"

    @pytest.fixture
    def packed(self, tmp_path: Path) -> Path:
        convert(write_tiny_quantized(tmp_path / "q"), "compressed-tensors", tmp_path / "ct")
        return tmp_path / "ct"

    @pytest.fixture
    def modelopt(self, tmp_path: Path) -> Path:
        convert(write_tiny_quantized(tmp_path / "q", quantize={"symmetric": True}), "modelopt", tmp_path / "mo")
        return tmp_path / "mo"

    def configure(self, directory: Path, **changes: Any) -> None:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] |= changes
        (directory / "config.json").write_text(json.dumps(config))

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"bits": 8}, "8 bits"),
            ({"version": "gemv"}, "'gemv'"),
            ({"group_size": 48}, "groups of 48"),
            ({"group_size": 0}, "groups of 0"),
            ({"group_size": "x"}, "groups of 'x'"),
            ({"group_size": 64}, r"qzeros.*has shape \[2, 8\].*need \[1, 8\]"),
            ({"group_size": -1}, "qzeros"),
            ({"quant_method": "gptq"}, "already quantized.*'gptq'.*awq, compressed-tensors, modelopt"),
            ({"quant_method": ["x"]}, "already quantized"),
        ],
    )
    def test_awq_settings(self, awq: Path, changes: dict[str, Any], match: str) -> None:
        self.configure(awq, **changes)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(awq)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda t: t.pop(f"{LAYER}.qzeros"), "up_proj.qzeros"),
            (lambda t: t.pop(f"{LAYER}.scales"), "up_proj.scales"),
            (lambda t: t.pop(f"{LAYER}.qweight"), "up_proj.weight.*missing"),
            (lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:32]}), "up_proj"),
            (lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].flatten()}), "up_proj.qweight.*matrix"),
            (lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"].long()}), "up_proj.qzeros.*int64.*int32"),
            (lambda t: t.update({f"{LAYER}.g_idx": torch.arange(64, dtype=torch.int32)}), "up_proj.g_idx.*no place"),
        ],
    )
    def test_awq_tensors(self, awq: Path, change: Any, match: str) -> None:
        edit_stored(awq, change)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(awq)

    def test_a_type_that_shows_when_it_is_read(self, awq: Path) -> None:
        edit_stored(awq, lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].float()}))
        checkpoint = open_checkpoint(awq)
        with pytest.raises(CheckpointError, match=r"up_proj.qweight.*float32.*int32"):
            checkpoint[f"{LAYER}.qweight"]

    def test_nothing_is_quantized(self, awq: Path) -> None:
        plain = write_checkpoint(awq.parent / "plain")
        (awq / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match="'awq', but no tensor is"):
            open_checkpoint(awq)

    def test_awq_groups_of_all_inputs(self, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        tensors, formats = quantize_tensors(source, 64, dense=("down_proj",))
        write_quantized(tmp_path / "q", source, tensors.items(), formats)
        convert(tmp_path / "q", "autoawq", tmp_path / "out")
        self.configure(tmp_path / "out", group_size=-1)
        assert open_checkpoint(tmp_path / "out").formats == formats

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
            ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
            ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
            ({"config_groups": {}}, "no group"),
            ({"config_groups": {"g": 3}}, "config_groups"),
            (scheme(num_bits=2), "num_bits': 2"),
            (scheme(num_bits=8), r"weight_shape.*8-bit codes of \[64, 32\]"),
            (scheme(type="float"), "'float'"),
            (scheme(strategy="tensor"), "'tensor'"),
            (scheme(group_size=16), r"weight_scale.*groups of 16"),
            (scheme(actorder="group"), "actorder"),
            (scheme(inputs={"num_bits": 8}), "input_activations"),
            (scheme(["model.layers.0.mlp.up_proj"]), "no group"),
            (scheme(["re:("]), "no group"),
            (scheme("Linear"), "config_groups"),
            (scheme(3), "config_groups"),
            (scheme(num_bits=4.0), "num_bits': 4.0"),
            (scheme(actorder="dynamic"), "actorder"),
            (scheme(symmetric=True), "weight_zero_point.*symmetric"),
            (
                {
                    "config_groups": {
                        "g": {**scheme()["config_groups"]["group_0"], "output_activations": {"num_bits": 8}}
                    }
                },
                "output",
            ),
        ],
    )
    def test_compressed_tensors_settings(self, packed: Path, changes: dict[str, Any], match: str) -> None:
        self.configure(packed, **changes)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(packed)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda t: t.pop(f"{LAYER}.weight_shape"), "weight_shape"),
            (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale"),
            (lambda t: t.pop(f"{LAYER}.weight_zero_point"), r"weight_zero_point.*nothing.*need \[12, 2\]"),
            (lambda t: t[f"{LAYER}.weight_shape"].fill_(7), r"weight_shape.*\[7, 7\].*\[96, 64\]"),
            (lambda t: t.update({f"{LAYER}.weight_zero_point": torch.zeros(96, 2, dtype=torch.int32)}), r"\[12, 2\]"),
            (lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(96, 7)}), "weight_scale"),
            (lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(96, 0)}), "weight_scale"),
            (lambda t: t.update({f"{LAYER}.weight_g_idx": torch.arange(64)}), "weight_g_idx.*no place"),
        ],
    )
    def test_compressed_tensors_tensors(self, packed: Path, change: Any, match: str) -> None:
        edit_stored(packed, change)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(packed)

    def test_compressed_tensors_floats_with_zero_points(self, tmp_path: Path) -> None:
        form = WeightFormat(8, PER_CHANNEL, True, "float8_e4m3")
        convert(write_tiny_quantized(tmp_path / "q", quantize={"form": form}), "compressed-tensors", tmp_path / "ct")
        edit_stored(tmp_path / "ct", lambda t: t.update({f"{LAYER}.weight_zero_point": torch.ones(96, 1)}))
        with pytest.raises(CheckpointError, match=r"up_proj.weight_zero_point.*no place"):
            open_checkpoint(tmp_path / "ct")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"quant_algo": "FP8"}, "'FP8'"),
            ({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo 'FP8'"),
            ({"has_zero_point": True}, "has_zero_point True"),
            ({"group_size": None}, "groups of None"),
        ],
    )
    def test_modelopt_settings(self, modelopt: Path, changes: dict[str, Any], match: str) -> None:
        path = modelopt / "hf_quant_config.json"
        content = json.loads(path.read_text())
        content["quantization"] |= changes
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(modelopt)

    def test_modelopt_without_its_file_or_without_the_key(self, modelopt: Path) -> None:
        config = json.loads((modelopt / "config.json").read_text())
        del config["quantization_config"]
        (modelopt / "config.json").write_text(json.dumps(config))
        assert len(open_checkpoint(modelopt).formats) == 14
        (modelopt / "hf_quant_config.json").unlink()
        with pytest.raises(CheckpointError, match="needs scales"):
            open_checkpoint(modelopt)

    def test_modelopt_scales_that_float16_rounds_stay_as_they_are(self, modelopt: Path) -> None:
        name = f"{LAYER}.weight_scale"
        edit_stored(modelopt, lambda tensors: tensors[name].mul_(1 + 2**-20))
        assert torch.equal(open_checkpoint(modelopt)[f"{LAYER}.scales"], stored_tensors(modelopt)[name])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    edit_stored(plain, lambda t: t.update({f"{LAYER}.weight": torch.ones(96, 64).to(dtype)}))
    with pytest.raises(CheckpointError, match=r"up_proj.weight.*needs scales"):
        open_checkpoint(plain)
    convert(write_tiny_quantized(tmp_path / "q"), "autoawq", tmp_path / "awq")
    edit_stored(tmp_path / "awq", lambda t: t.update({"model.norm.weight": torch.ones(64).to(dtype)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*numbers are needed"):
        materialize(tmp_path / "awq", tmp_path / "out", "float16")


FP8 = WeightFormat(8, PER_CHANNEL, True, "float8_e4m3")

DAMAGED_PARTS: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str], ...] = (
    ("autoawq", "scales", lambda t: t.to(torch.int32), "type int32"),
    ("autoawq", "scales", lambda t: t.to(torch.float8_e4m3fn), "type float8_e4m3fn"),
    ("autoawq", "scales", lambda t: t.fill_(math.nan), "not finite"),
    ("modelopt", "weight_scale", lambda t: t.to(torch.int32), "type int32"),
    ("modelopt", "weight_scale", lambda t: t.fill_(math.inf), "not finite"),
    ("compressed-tensors", "weight_scale", lambda t: t.to(torch.uint8), "type uint8"),
    ("compressed-tensors", "weight_scale", lambda t: t.fill_(math.nan), "not finite"),
    ("float", "weight_scale", lambda t: t.fill_(-math.inf), "not finite"),
    ("float", "weight", lambda t: t.fill_(math.nan), "no numbers"),
    ("sits", "qweight", lambda t: t.int(), "type int32"),
    ("sits", "qweight", lambda t: t.half(), "type float16"),
    ("sits", "scales", lambda t: t.fill_(math.nan), "not finite"),
    ("sits", "scales", lambda t: t.int(), "type int32"),
    ("sits", "zeros", lambda t: t.fill_(16), "zero point 16"),
    ("sits", "zeros", lambda t: t.half(), "type float16"),
    ("sits", "input_scale", lambda t: t.fill_(math.nan), "not finite"),
)


@pytest.mark.parametrize(("kind", "part", "change", "match"), DAMAGED_PARTS)
@pytest.mark.parametrize("to", ["hf", "sits", "compressed-tensors"])
def test_a_damaged_part_of_a_layer_reaches_no_other_format(
    kind: str, part: str, change: Callable[[torch.Tensor], torch.Tensor], match: str, to: str, tmp_path: Path
) -> None:
    """A scale that is no number, a code of another type or a zero point beyond its bits means something else there."""
    ours: dict[str, Any] = {"form": FP8} if kind == "float" else {"symmetric": kind == "modelopt"}
    place = write_tiny_quantized(tmp_path / "q", quantize=ours | {"input_scale": part == "input_scale"})
    if kind != "sits":
        convert(place, "compressed-tensors" if kind == "float" else kind, tmp_path / "theirs")
        place = tmp_path / "theirs"
    name = f"{LAYER}.{part}"
    edit_stored(place, lambda tensors: tensors.update({name: change(tensors[name])}))
    if part == "input_scale" and to == "compressed-tensors":
        match = "no input scale"
    with pytest.raises(CheckpointError, match=match):
        convert(place, to, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("layer", "changes", "match"),
    [
        (LAYER, {"group_size": "32"}, "group_size = '32'"),
        (LAYER, {"bits": 4.0}, "bits = 4.0"),
        (LAYER, {"symmetric": "no"}, "symmetric = 'no'"),
        (LAYER, {"codes": ["int"]}, "codes"),
        ("model.layers.9.mlp.up_proj", {}, "layers.9.*no such linear layer"),
        ("model.embed_tokens", {}, "embed_tokens.*no such linear layer"),
    ],
)
def test_a_description_of_ours_that_no_layer_can_have(
    layer: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    place = write_tiny_quantized(tmp_path / "q")
    content = json.loads((place / "sits_quant.json").read_text())
    content["formats"][layer] = content["formats"][LAYER] | changes
    (place / "sits_quant.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(place)


def test_a_tokenizer_that_cannot_be_read_ends_a_conversion(tmp_path: Path) -> None:
    place = write_tiny_quantized(tmp_path / "q")
    (place / "tokenizer.json").write_text("{")
    for to in ("hf", "sits"):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            convert(place, to, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
