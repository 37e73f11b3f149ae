"""The exported graph, evaluated in numpy, against the eager model it was traced from: every family, every format."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from sits_trt.graph.evaluate import GraphEvaluator
from sits_trt.graph.export import trace
from sits_trt.models import build_decoder
from sits_trt.ops.kv_pool import CODE_DTYPES
from sits_trt.spec import CODED_KV_DTYPES, RopeSpec, TileSpec
from tests.support.graphs import MixedBatch
from tests.support.quantized import quantize_tensors
from tests.support.tiny import tiny_spec, tiny_tensors

FAMILIES = {
    "llama": {"rope": RopeSpec("llama3", 500000.0, 8.0, 1.0, 4.0, 32), "tie_word_embeddings": True},
    "llama-biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "layer_windows": (7, 7)},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "layer_windows": (0, 9)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 32},
}
FORMATS = {
    "dense": None,
    "symmetric": {"symmetric": True},
    "zero-points": {"symmetric": False, "dense": ("k_proj", "up_proj")},
    "everything": {"symmetric": False, "input_scale": True, "scale_recover": True},
}
CASES = [(family, fmt) for family in FAMILIES for fmt in FORMATS if family == "llama" or fmt in ("dense", "everything")]
STEPS = ((6, 0, 11), (1, 8, 5), (1, 1, 1), (0, 1, 17), (1, 1, 1))


@pytest.mark.parametrize(("family", "fmt"), CASES)
def test_graph_equals_the_eager_model(family: str, fmt: str) -> None:
    spec = tiny_spec(**FAMILIES[family])
    tensors, formats = tiny_tensors(spec, seed=3), {}
    if FORMATS[fmt] is not None:
        tensors, formats = quantize_tensors(tensors, seed=4, **FORMATS[fmt])
    decoder = build_decoder(spec, tensors, formats, torch.float32, num_positions=64)
    tile = TileSpec.of(spec, tile_tokens=16, kv_dtype="float32")
    graph = GraphEvaluator(ir.to_proto(trace(decoder, tile)))
    batch = MixedBatch(spec, tile, sequences=3, tiles_per_seq=3, seed=5)
    eager_pool = torch.from_numpy(batch.pools["kv_pool"].copy())
    for counts in STEPS:
        inputs = batch.step(counts)
        logits = graph.run(inputs | batch.pools)
        with torch.inference_mode():
            eager = decoder(kv_pool=eager_pool, **{name: torch.from_numpy(array) for name, array in inputs.items()})
        # Float32 on both sides: what differs is the order of sums, over at most 96 terms of logits below 10.
        np.testing.assert_allclose(logits, eager.numpy(), atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(batch.pools["kv_pool"], eager_pool.numpy(), atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
def test_graph_codes_keys_and_values_as_the_eager_model(kv_dtype: str) -> None:
    """Each step starts from the eager model's pool: a sum in another order may move a code, and must not add up."""
    spec = tiny_spec(layer_windows=(0, 9), head_dim=32)
    decoder = build_decoder(spec, tiny_tensors(spec, seed=3), dtype=torch.float32, num_positions=64)
    tile = TileSpec.of(spec, 16, kv_dtype)
    graph = GraphEvaluator(ir.to_proto(trace(decoder, tile)))
    batch = MixedBatch(spec, tile, sequences=3, tiles_per_seq=3, seed=5)
    moved = rows = 0
    for counts in STEPS:
        inputs = batch.step(counts)
        pool, scales = (torch.from_numpy(array.copy()) for array in batch.pools.values())
        logits = graph.run(inputs | batch.pools)
        with torch.inference_mode():
            eager = decoder(
                kv_pool=pool.view(CODE_DTYPES[kv_dtype]), kv_scales=scales,
                **{name: torch.from_numpy(array) for name, array in inputs.items()},
            )  # fmt: skip
        different = (batch.pools["kv_pool"] != pool.numpy()).any(axis=-1)
        moved, rows = moved + int(different.sum()), rows + 8 * sum(counts)
        if not different.any():
            np.testing.assert_allclose(logits, eager.numpy(), atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(batch.pools["kv_scales"], scales.numpy(), rtol=2**-10, equal_nan=True)
        batch.pools = {"kv_pool": pool.numpy(), "kv_scales": scales.numpy()}
    assert moved <= rows // 50
