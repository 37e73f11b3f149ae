"""The quantization of every family: what the search knows, what its folds leave as it was, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sits_trt.checkpoint import open_checkpoint
from sits_trt.models import build_decoder
from sits_trt.models.decoder import soft_cap
from sits_trt.models.scoring import block_logits, compare
from sits_trt.quant import layer_search, search, search_scales
from sits_trt.quant.equalization import shared_by_queries
from sits_trt.quant.evaluate import compare_checkpoints
from sits_trt.quant.layer_search import LayerSearch
from sits_trt.quant.rounding import Rounder
from sits_trt.quant.streams import Streams
from sits_trt.recipe.schema import CalibrationSection
from tests.pipeline.test_quantize import decoder_of, quantize, quiet, section
from tests.support.tiny import write_checkpoint

SEARCHED: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [0, 1], "attention_bias": True},
    "Phi3": {"sliding_window": 24, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"sliding_window": 24, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0,
               "attention_bias": True},
    "Gemma3": {"sliding_window": 24, "sliding_window_pattern": 2, "rope_local_base_freq": 100.0},
}  # fmt: skip
"""A tiny model of each family, with what makes it differ from the others."""


def tiny_of(family: str, directory: Path) -> Path:
    return write_checkpoint(directory, f"{family}ForCausalLM", dtype=torch.float16, **SEARCHED[family])


@pytest.mark.parametrize("family", SEARCHED)
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_the_search_knows_the_model_that_it_writes(
    tmp_path: Path, family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last residual streams of the search are those of the two models: biases, folds and windows included."""
    source = tiny_of(family, tmp_path / "source")
    seen: list[Streams] = []
    start = Streams.start

    def watched(embedding: Tensor, blocks: list[list[int]], embedding_scale: float) -> Streams:
        streams = start(embedding, blocks, embedding_scale)
        streams.blocks = blocks  # type: ignore[attr-defined]
        seen.append(streams)
        return streams

    monkeypatch.setattr(Streams, "start", watched)
    quantized = quantize(source, section(scheme=scheme), tmp_path)
    for checkpoint, stream in ((open_checkpoint(source), seen[0].reference), (quantized, seen[0].quantized)):
        decoder = decoder_of(checkpoint)
        for rows, block in zip(seen[0].rows(), seen[0].blocks, strict=True):  # type: ignore[attr-defined]
            expected = soft_cap(decoder.head(decoder.norm(stream[rows])), decoder.spec.logit_softcap)
            torch.testing.assert_close(block_logits(decoder, block), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SEARCHED)
def test_b20_folds_alone_leave_every_family_as_it_was(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B19, B20: the whole search with a rounding that changes nothing, in float32, and factors far from one."""
    source = write_checkpoint(tmp_path / "source", f"{family}ForCausalLM", **SEARCHED[family])
    generator = torch.Generator().manual_seed(1)
    used: list[Tensor] = []

    def some_factors(weight: Tensor, *_: object) -> Tensor:
        factors = torch.rand(weight.shape[1], generator=generator) * 3 + 0.25
        if len(used) % 4 == 1:  # o: query heads that share a kv head share its factors
            spec = open_checkpoint(source).spec
            factors = shared_by_queries(factors[: spec.kv_size], spec.num_heads, spec.head_dim)
        used.append(factors)
        return factors

    def keep(search: LayerSearch, name: str, weight: Tensor, rounder: Rounder, factors: Tensor) -> None:
        search._keep_float(f"{name}.weight", weight * factors)

    monkeypatch.setattr(layer_search, "search_channel_scales", some_factors)
    monkeypatch.setattr(LayerSearch, "_round", keep)
    checkpoint = open_checkpoint(source)
    search_scales(checkpoint, section(scale_recover=False), tmp_path / "scales", quiet)
    assert len(used) == 8
    folded = dict(checkpoint) | dict(search.read_layers(tmp_path / "scales", 2))
    assert not torch.equal(folded["model.layers.0.mlp.up_proj.weight"], checkpoint["model.layers.0.mlp.up_proj.weight"])
    block = [(7 * i + 3) % 97 for i in range(60)]
    before, after = (build_decoder(checkpoint.spec, tensors, {}, torch.float32) for tensors in (checkpoint, folded))
    # Float32 sums of products that were scaled by up to 3 and back, and drift corrections of nothing.
    torch.testing.assert_close(block_logits(after, block), block_logits(before, block), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SEARCHED)
def test_the_search_beats_rounding_in_every_family(tmp_path: Path, family: str) -> None:
    source = tiny_of(family, tmp_path / "source")
    calibration = CalibrationSection(blocks=8, block_tokens=128)
    reports = {}
    for method in ("rtn", "awq"):
        recipe = section(method=method, scale_recover=method == "awq", calibration=calibration)
        quantize(source, recipe, tmp_path / method)
        reports[method] = json.loads((tmp_path / method / "quantized" / "report.json").read_text())
    found, plain = (reports[method]["evaluation"]["kl"] for method in ("awq", "rtn"))
    assert found < 0.8 * plain


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_report_streams_what_whole_models_would_say(
    tmp_path: Path, family: str, symmetric: bool, tied: bool
) -> None:
    config = {**SEARCHED[family], "tie_word_embeddings": tied}
    source = write_checkpoint(tmp_path / "source", f"{family}ForCausalLM", dtype=torch.float16, **config)
    quantized = quantize(source, section(symmetric=symmetric, scale_recover=tied), tmp_path)
    blocks = [[(7 * i + 3) % 97 for i in range(length)] for length in (60, 1, 131)]
    streamed = compare_checkpoints(open_checkpoint(source), quantized, blocks, quiet)
    whole = compare(decoder_of(open_checkpoint(source)), decoder_of(quantized), blocks)
    # The same sums in another order; a near tie of two best tokens may fall the other way once.
    for name, value in whole.to_dict().items():
        assert streamed.to_dict()[name] == pytest.approx(value, rel=1e-3, abs=1.01 / 192 if "top" in name else 0)
