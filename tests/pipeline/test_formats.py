"""Formats of other programs, read by those programs: transformers, and the compressed-tensors package through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sits_trt.checkpoint import convert, open_checkpoint
from sits_trt.models import Decoder, build_decoder
from sits_trt.spec import PER_CHANNEL, WeightFormat
from tests.support.decode import whole_logits
from tests.support.quantized import write_tiny_quantized

IDS = [(7 * position + 3) % 97 for position in range(23)]

TOLERANCE = 5e-5
"""Two float32 programs that sum in different orders, logits of up to 6; measured differences lie below 5e-6."""

PARTLY = {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "rope_type": "default"}

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 32}),
    ("Phi3", {"rope_parameters": PARTLY}),
    ("SmolLM3", {"no_rope_layers": [0, 1], "tie_word_embeddings": True}),
    ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 2}),
)
"""Tied and untied heads (B06), biases (B08), head_dim apart from the hidden size (B04), fused and reordered rows."""


def decoder_of(directory: Path) -> Decoder:
    checkpoint = open_checkpoint(directory)
    return build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, torch.float32, 64)


def transformers_logits(directory: Path, **options: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *case[1]))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_symmetric_compressed_tensors_in_transformers(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Its linears multiply the codes out in float32 as they run, as the oracle does."""
    name, config = case
    ours = write_tiny_quantized(tmp_path / "q", f"{name}ForCausalLM", {"symmetric": True}, **config)
    convert(ours, "compressed-tensors", tmp_path / "out")
    expected = whole_logits(decoder_of(ours), IDS)
    assert torch.allclose(transformers_logits(tmp_path / "out"), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_compressed_tensors_with_zero_points_in_transformers(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """transformers 5.24 reads packed zero points only with `dequantize`, which multiplies out in float16.

    (code - zero point) * scale rounded once to float16 is what our dense format in float16 holds, too.
    """
    name, config = case
    ours = write_tiny_quantized(tmp_path / "q", f"{name}ForCausalLM", {"symmetric": False}, **config)
    convert(ours, "compressed-tensors", tmp_path / "out")
    convert(ours, "hf", tmp_path / "dense")
    multiplied_out = transformers.CompressedTensorsConfig(dequantize=True)
    found = transformers_logits(tmp_path / "out", quantization_config=multiplied_out)
    assert torch.allclose(found, whole_logits(decoder_of(tmp_path / "dense"), IDS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packs_the_same_words(symmetric: bool, bits: int, tmp_path: Path) -> None:
    """Also for outputs that do not fill a word, where packed zero points are padded."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    quantize = {"form": WeightFormat(bits, 32, symmetric), "dense": ("down_proj",)}
    ours = write_tiny_quantized(tmp_path / "q", quantize=quantize, intermediate_size=98)
    convert(ours, "compressed-tensors", tmp_path / "out")
    convert(ours, "hf", tmp_path / "dense", "float32")
    stored, checkpoint = load_file(tmp_path / "out" / "model.safetensors"), open_checkpoint(ours)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    assert len(checkpoint.formats) == 12
    for name in checkpoint.formats:
        state = {"weight": dense[f"{name}.weight"], "weight_scale": checkpoint[f"{name}.scales"].float()}
        if not symmetric:
            state["weight_zero_point"] = (checkpoint[f"{name}.zeros"].int() - (1 << bits - 1)).to(torch.int8)
        wanted = compressor.compress(state, scheme)
        assert torch.equal(wanted.pop("weight_scale"), stored[f"{name}.weight_scale"].float())
        for part, tensor in wanted.items():
            assert torch.equal(stored[f"{name}.{part}"], tensor), f"{name}.{part}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_dense_in_transformers(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, config = case
    # Input scales differ between the parts of a fused matrix: they go into its weight.
    ours = write_tiny_quantized(tmp_path / "q", f"{name}ForCausalLM", {"input_scale": True}, **config)
    convert(ours, "hf", tmp_path / "out", "float32")
    expected = whole_logits(decoder_of(ours), IDS)
    assert torch.allclose(transformers_logits(tmp_path / "out"), expected, rtol=0, atol=TOLERANCE)


EIGHT_BITS = (
    (WeightFormat(8, PER_CHANNEL, True), TOLERANCE),
    (WeightFormat(8, 32, True), TOLERANCE),
    (WeightFormat(8, PER_CHANNEL, True, "float8_e4m3"), TOLERANCE),
    # Inputs that differ by a float32 rounding may round to neighbouring e4m3 values, up to a sixteenth apart.
    (WeightFormat(8, PER_CHANNEL, True, "float8_e4m3", "float8_e4m3"), 0.05),
)


@pytest.mark.parametrize(("form", "tolerance"), EIGHT_BITS, ids=str)
def test_eight_bits_in_transformers(form: WeightFormat, tolerance: float, tmp_path: Path) -> None:
    ours = write_tiny_quantized(tmp_path / "q", quantize={"form": form})
    convert(ours, "compressed-tensors", tmp_path / "out")
    expected = whole_logits(decoder_of(ours), IDS)
    assert torch.allclose(transformers_logits(tmp_path / "out"), expected, rtol=0, atol=tolerance)
