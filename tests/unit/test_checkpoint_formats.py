"""Formats of other programs: what is written comes back as it was, unpacked by hand, and what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sits_trt.checkpoint import convert, materialize, open_checkpoint, write_quantized
from sits_trt.errors import CheckpointError, SitsError
from sits_trt.ops import dequantize
from sits_trt.ops.quantized_linear import decode_weight
from sits_trt.spec import PER_CHANNEL, WeightFormat
from tests.support.quantized import quantize_tensors, stored_tensors, write_tiny_quantized
from tests.support.tiny import write_checkpoint

PARTLY = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "rope_type": "default"}}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
    ("Phi3", PARTLY),
    ("Gemma2", {"query_pre_attn_scalar": 24}),
)
FP8 = WeightFormat(8, PER_CHANNEL, True, "float8_e4m3", "float8_e4m3")
EIGHT_BITS = (
    WeightFormat(8, PER_CHANNEL, True),
    WeightFormat(8, 32, False),
    WeightFormat(8, PER_CHANNEL, False),
    WeightFormat(8, PER_CHANNEL, True, "float8_e4m3"),
    FP8,
)
BOTH = ((True, "autoawq"), (False, "autoawq"), (True, "modelopt"), (True, "compressed-tensors"),
        (False, "compressed-tensors"))  # fmt: skip


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return case[0]


def settings(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return found


class TestRoundTrip:
    @pytest.mark.parametrize(("symmetric", "target"), BOTH)
    @pytest.mark.parametrize("case", CASES, ids=name_of)
    def test_codes_scales_and_zero_points(
        self, case: tuple[str, dict[str, Any]], symmetric: bool, target: str, tmp_path: Path
    ) -> None:
        ours = write_tiny_quantized(tmp_path / "q", f"{case[0]}ForCausalLM", {"symmetric": symmetric}, **case[1])
        convert(ours, target, tmp_path / "out")
        before, after = open_checkpoint(ours), open_checkpoint(tmp_path / "out")
        assert after.spec == before.spec
        assert after.formats == before.formats
        assert set(after) == set(before)
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
        assert (tmp_path / "out" / "tokenizer.json").is_file()
        convert(tmp_path / "out", "sits", tmp_path / "back")
        back = open_checkpoint(tmp_path / "back")
        assert back.formats == before.formats
        assert back.hf_config == before.hf_config | {"dtype": "float16"}
        assert all(torch.equal(back[name], tensor) for name, tensor in before.items())

    @pytest.mark.parametrize("target", ["autoawq", "compressed-tensors", "modelopt", "hf"])
    def test_two_runs_write_the_same_bytes(self, target: str, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", quantize={"symmetric": True})
        for name in ("one", "two"):
            convert(ours, target, tmp_path / name)
        for path in (tmp_path / "one").iterdir():
            assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()

    def test_layers_of_several_formats(self, tmp_path: Path) -> None:
        """Only compressed-tensors describes each layer by itself."""
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        coarse, coarse_formats = quantize_tensors(
            source, 32, symmetric=True, dense=("gate_proj", "up_proj", "down_proj")
        )
        fine, fine_formats = quantize_tensors(source, 16, dense=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj"))
        layers = {name for name in fine if name.rpartition(".")[0] in fine_formats}
        tensors = {
            name: tensor
            for name, tensor in coarse.items()
            if not name.endswith(("gate_proj.weight", "down_proj.weight"))
        }
        tensors |= {name: fine[name] for name in layers}
        write_quantized(tmp_path / "q", source, tensors.items(), coarse_formats | fine_formats)
        convert(tmp_path / "q", "compressed-tensors", tmp_path / "out")
        after = open_checkpoint(tmp_path / "out")
        assert after.formats == coarse_formats | fine_formats
        assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
        assert settings(tmp_path / "out")["ignore"] == [
            *(f"model.layers.{layer}.mlp.up_proj" for layer in range(2)),
            "lm_head",
        ]
        for target in ("autoawq", "modelopt"):
            with pytest.raises(CheckpointError, match=r"one group size.*32.*16|zero points"):
                convert(tmp_path / "q", target, tmp_path / "no")

    @pytest.mark.parametrize("form", EIGHT_BITS, ids=str)
    def test_eight_bits(self, form: WeightFormat, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", "Phi3ForCausalLM", {"form": form}, **PARTLY)
        convert(ours, "compressed-tensors", tmp_path / "out")
        before, after = open_checkpoint(ours), open_checkpoint(tmp_path / "out")
        assert after.formats == before.formats
        assert set(after) == set(before)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        for target in ("autoawq", "modelopt"):
            with pytest.raises(CheckpointError, match=r"INT4 codes only, but .* has 8-bit"):
                convert(ours, target, tmp_path / "no")
        if form.activations == "float16":
            convert(ours, "hf", tmp_path / "dense", "float32")
            name = "model.layers.0.mlp.down_proj"
            parts = (before.get(f"{name}.{part}") for part in ("qweight", "scales", "zeros"))
            assert torch.equal(open_checkpoint(tmp_path / "dense")[f"{name}.weight"], decode_weight(*parts, form))
        else:
            with pytest.raises(CheckpointError, match=r"hf format holds 16-bit activations, but .* rounds its own"):
                convert(ours, "hf", tmp_path / "no")

    def test_int4_whose_activations_are_rounded(self, tmp_path: Path) -> None:
        form = WeightFormat(4, 32, True, activations="float8_e4m3")
        ours = write_tiny_quantized(tmp_path / "q", quantize={"form": form})
        for target in ("autoawq", "modelopt", "compressed-tensors", "hf"):
            with pytest.raises(CheckpointError, match=r"16-bit activations, but .* rounds its own to float8_e4m3"):
                convert(ours, target, tmp_path / "no")
        convert(ours, "sits", tmp_path / "out")
        assert open_checkpoint(tmp_path / "out").formats == open_checkpoint(ours).formats

    def test_floats_beside_whole_numbers(self, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        ffn = ("gate_proj", "up_proj", "down_proj")
        tensors, formats = quantize_tensors(source, 32, dense=ffn)
        rest, more = quantize_tensors(tensors, dense=(), form=FP8)
        write_quantized(tmp_path / "q", source, rest.items(), formats | more)
        convert(tmp_path / "q", "compressed-tensors", tmp_path / "out")
        after = open_checkpoint(tmp_path / "out")
        assert after.formats == formats | more
        assert all(torch.equal(after[name], tensor) for name, tensor in rest.items())

    def test_a_build_takes_it_as_it_is(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q")
        convert(ours, "autoawq", tmp_path / "awq")
        materialize(tmp_path / "awq", tmp_path / "checkpoint", "float16")
        before, after = open_checkpoint(ours), open_checkpoint(tmp_path / "checkpoint")
        assert after.formats == before.formats
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


class TestByHand:
    """The layouts as their own documents state them, unpacked one code at a time."""

    NAME = "model.layers.1.mlp.down_proj"

    def weight(self, directory: Path) -> torch.Tensor:
        checkpoint = open_checkpoint(directory)
        parts = (checkpoint.get(f"{self.NAME}.{part}") for part in ("qweight", "scales", "zeros"))
        return dequantize(*parts, checkpoint.formats[self.NAME].group_size)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_b21_autoawq(self, symmetric: bool, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", quantize={"symmetric": symmetric})
        convert(ours, "autoawq", tmp_path / "out")
        tensors = stored_tensors(tmp_path / "out")
        codes, zeros, scales = (tensors[f"{self.NAME}.{part}"] for part in ("qweight", "qzeros", "scales"))
        assert (codes.dtype, zeros.dtype, scales.dtype) == (torch.int32, torch.int32, torch.float16)
        assert (codes.shape, zeros.shape, scales.shape) == ((96, 8), (3, 8), (3, 64))
        expected = self.weight(ours)
        for row in range(64):
            shift = 4 * NIBBLE_OF_COLUMN[row % 8]
            code, zero = ((words[:, row // 8] >> shift) & 15 for words in (codes, zeros))
            weight = (code - zero.repeat_interleave(32)) * scales[:, row].float().repeat_interleave(32)
            assert torch.equal(weight, expected[row])
        if symmetric:
            assert (zeros == -0x77777778).all(), "eight nibbles of 8"
        assert settings(tmp_path / "out") == {
            "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip

    def test_modelopt(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", quantize={"symmetric": True})
        convert(ours, "modelopt", tmp_path / "out")
        tensors = stored_tensors(tmp_path / "out")
        packed, scales = tensors[f"{self.NAME}.weight"], tensors[f"{self.NAME}.weight_scale"]
        assert (packed.dtype, packed.shape, scales.dtype, scales.shape) == (
            torch.uint8, (32, 96), torch.float32, (64, 3),
        )  # fmt: skip
        expected = self.weight(ours)
        for row in range(64):
            nibbles = (packed[row // 2].int() >> (4 * (row % 2))) & 15
            signed = torch.where(nibbles > 7, nibbles - 16, nibbles)
            assert torch.equal(signed * scales[row].repeat_interleave(32), expected[row])
        # Readers look for it in these two without asking, and nowhere else.
        scaled = {name for name in tensors if name.endswith("pre_quant_scale")}
        layers = [f"model.layers.{index}" for index in range(2)]
        assert scaled == {
            f"{layer}.{part}.pre_quant_scale" for layer in layers for part in ("self_attn.o_proj", "mlp.down_proj")
        }
        assert all((tensors[name] == 1).all() for name in scaled)
        side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert side == {
            "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None, "group_size": 32, "has_zero_point": False,
            "pre_quant_scale": True, "exclude_modules": ["lm_head"],
        }  # fmt: skip
        assert settings(tmp_path / "out")["quant_algo"] == "W4A16_AWQ"

    def test_modelopt_input_scales_where_they_are_read(self, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        tensors, formats = quantize_tensors(source, symmetric=True, input_scale=True)
        folded = {
            name: tensor for name, tensor in tensors.items()
            if not name.endswith(".input_scale") or "o_proj" in name or "down_proj" in name
        }  # fmt: skip
        write_quantized(tmp_path / "q", source, folded.items(), formats)
        convert(tmp_path / "q", "modelopt", tmp_path / "out")
        after = open_checkpoint(tmp_path / "out")
        assert set(after) == set(folded)
        assert all(torch.equal(after[name], tensor) for name, tensor in folded.items())
        write_quantized(tmp_path / "all", source, tensors.items(), formats)
        with pytest.raises(CheckpointError, match=r"no input scale, but model.layers.0.self_attn.q_proj has one"):
            convert(tmp_path / "all", "modelopt", tmp_path / "no")

    def test_dense(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q")
        convert(ours, "hf", tmp_path / "out", "float32")
        after = open_checkpoint(tmp_path / "out")
        assert not after.formats
        assert torch.equal(after[f"{self.NAME}.weight"], self.weight(ours))
        convert(ours, "hf", tmp_path / "half")
        assert torch.equal(open_checkpoint(tmp_path / "half")[f"{self.NAME}.weight"], self.weight(ours).half())

    def test_phi3_lies_in_its_own_rows(self, tmp_path: Path) -> None:
        """Half-split RoPE over the first 12 of 16 rows of a head: canonical rows 0..5 and 8..13 are stored first."""
        ours = write_tiny_quantized(tmp_path / "q", "Phi3ForCausalLM", **PARTLY)
        convert(ours, "hf", tmp_path / "out", "float32")
        fused = stored_tensors(tmp_path / "out")["model.layers.0.self_attn.qkv_proj.weight"]
        checkpoint = open_checkpoint(ours)
        q = dequantize(
            *(checkpoint[f"model.layers.0.self_attn.q_proj.{p}"] for p in ("qweight", "scales", "zeros")), 32
        )
        first_head = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 6, 7, 14, 15]
        assert torch.equal(fused[:16], q[first_head])


class TestRefused:
    def refused(self, ours: Path, target: str, tmp_path: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            convert(ours, target, tmp_path / "no")
        assert not list(tmp_path.glob("no*"))

    @pytest.mark.parametrize("target", ["autoawq", "compressed-tensors", "modelopt", "hf"])
    def test_scale_recover(self, target: str, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", quantize={"symmetric": True, "scale_recover": True})
        self.refused(ours, target, tmp_path, r"layers.0.scale_recover.*quantization.scale_recover=false")

    @pytest.mark.parametrize("target", ["autoawq", "hf"])
    def test_scale_recover_of_ones_means_nothing(self, target: str, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        tensors, formats = quantize_tensors(source)
        tensors["model.layers.1.scale_recover"] = torch.ones(64).half()
        write_quantized(tmp_path / "q", source, tensors.items(), formats)
        convert(tmp_path / "q", target, tmp_path / "out")
        assert "model.layers.1.scale_recover" not in open_checkpoint(tmp_path / "out")

    @pytest.mark.parametrize("target", ["autoawq", "compressed-tensors"])
    def test_input_scale(self, target: str, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", quantize={"input_scale": True})
        self.refused(ours, target, tmp_path, r"no input scale, but model.layers.0.self_attn.q_proj.*--to hf")

    def test_zero_points_in_modelopt(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q")
        self.refused(
            ours, "modelopt", tmp_path, r"symmetric codes only, but model.layers.0.*quantization.symmetric=true"
        )

    def test_outputs_that_do_not_fill_a_word(self, tmp_path: Path) -> None:
        quantize = {"dense": ("down_proj",), "symmetric": True}
        ours = write_tiny_quantized(tmp_path / "q", quantize=quantize, intermediate_size=100)
        self.refused(ours, "autoawq", tmp_path, r"by eights, but model.layers.0.mlp.gate_proj has 100")
        convert(ours, "modelopt", tmp_path / "out")

    @pytest.mark.parametrize("dense", ["q_proj", "up_proj"])
    def test_half_of_a_fused_matrix(self, dense: str, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q", "Phi3ForCausalLM", {"dense": (dense,)})
        self.refused(ours, "autoawq", tmp_path, rf"{dense}.*quantize all parts of that matrix alike")
        convert(ours, "hf", tmp_path / "out")

    def test_parts_of_a_fused_matrix_with_other_groups(self, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", "Phi3ForCausalLM", dtype=torch.float16))
        tensors, formats = quantize_tensors(source, 32, symmetric=True)
        name = "model.layers.0.mlp.up_proj"
        tensors[f"{name}.scales"] = torch.ones(96, 4).half()
        write_quantized(tmp_path / "q", source, tensors.items(), formats | {name: WeightFormat(4, 16, True)})
        self.refused(
            tmp_path / "q", "compressed-tensors", tmp_path, r"gate_proj, model.layers.0.mlp.up_proj.*different"
        )

    def test_a_checkpoint_that_is_not_quantized(self, tmp_path: Path) -> None:
        plain = write_checkpoint(tmp_path / "plain")
        self.refused(plain, "autoawq", tmp_path, "not quantized.*sits-trt build")
        self.refused(plain, "sits", tmp_path, "not quantized")
        convert(plain, "hf", tmp_path / "out", "bfloat16")
        assert open_checkpoint(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16

    def test_an_unknown_format_and_dtype(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "awq", tmp_path, r"'awq' is unknown \(did you mean autoawq")
        with pytest.raises(CheckpointError, match="'half' is not one of"):
            convert(tmp_path, "hf", tmp_path / "no", "half")

    def test_scales_beyond_float16(self, tmp_path: Path) -> None:
        source = open_checkpoint(write_checkpoint(tmp_path / "float", dtype=torch.float16))
        tensors, formats = quantize_tensors(source)
        name = "model.layers.1.mlp.up_proj.scales"
        tensors[name] = tensors[name].float() * 1e-7
        write_quantized(tmp_path / "q", source, tensors.items(), formats)
        self.refused(tmp_path / "q", "autoawq", tmp_path, rf"{name}.*float16")

    def test_a_directory_with_something_in_it(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("keep")
        with pytest.raises(SitsError, match=r"not empty.*--out"):
            convert(ours, "autoawq", tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
        (tmp_path / "out" / "mine.txt").unlink()
        convert(ours, "autoawq", tmp_path / "out")

    def test_an_interrupted_run_leaves_nothing(self, tmp_path: Path) -> None:
        ours = write_tiny_quantized(tmp_path / "q")

        def interrupt(done: int, total: int, what: str) -> None:
            if done == 10:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(ours, "autoawq", tmp_path / "no", progress=interrupt)
        assert {path.name for path in tmp_path.iterdir()} == {"q", "q-float"}
