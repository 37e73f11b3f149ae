"""The exported graph as a file: its inputs and outputs, its bytes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from sits_trt import contract
from sits_trt.contract import GRAPH_DATA_FILE, GRAPH_FILE, EngineLimits, bindings
from sits_trt.errors import ExportError
from sits_trt.graph.evaluate import GraphEvaluator
from sits_trt.graph.export import export_graph
from sits_trt.layouts import unpack_mma16, unpack_mma16_groups, unpack_sits
from sits_trt.models import build_decoder
from sits_trt.spec import CODED_KV_DTYPES, TileSpec
from tests.support.graphs import MemoryCheckpoint, MixedBatch, tiny_int4

LIMITS = EngineLimits(max_batch_size=4, max_tokens_per_step=64, max_seq_tokens=64, num_tiles=16)


def export(
    checkpoint: MemoryCheckpoint, out_dir: Path, limits: EngineLimits = LIMITS, kv_dtype: str = "float16"
) -> dict[str, object]:
    out_dir.mkdir()
    tile = TileSpec.of(checkpoint.spec, 16, kv_dtype)
    return export_graph(checkpoint, tile, limits, out_dir, lambda done, total, what: None)


@pytest.fixture(scope="module")
def checkpoint() -> MemoryCheckpoint:
    return tiny_int4()


@pytest.fixture(scope="module")
def graph_dir(checkpoint: MemoryCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("graph") / "graph"
    export(checkpoint, directory)
    return directory


@pytest.mark.parametrize("kv_dtype", ["float16", *CODED_KV_DTYPES])
def test_inputs_and_outputs_are_the_contract(kv_dtype: str, checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "graph", kv_dtype=kv_dtype)
    graph = onnx.load(tmp_path / "graph" / GRAPH_FILE, load_external_data=False).graph
    found = [
        (
            value.name,
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
        )
        for value in (*graph.input, *graph.output)
    ]
    tile = TileSpec.of(checkpoint.spec, 16, kv_dtype)
    assert found == [(b.name, b.dtype, b.shape) for b in bindings(checkpoint.spec, tile)]


def test_every_layer_is_one_attention_and_four_linear_nodes(graph_dir: Path) -> None:
    graph = onnx.load(graph_dir / GRAPH_FILE, load_external_data=False).graph
    ours = [node for node in graph.node if node.domain == contract.ONNX_DOMAIN]
    layers = [a.i for n in ours if n.op_type == contract.ATTENTION_PLUGIN for a in n.attribute if a.name == "layer"]
    assert layers == [0, 1]
    assert [node.op_type for node in ours].count(contract.LINEAR_PLUGIN) == 8
    for node in ours:
        fields = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (fields["plugin_version"], fields["plugin_namespace"]) == (contract.PLUGIN_VERSION.encode(), b"sits")
        assert not any(name == "" for name in node.input)


def test_weights_of_the_checkpoint_travel_as_the_kernels_read_them(
    graph_dir: Path, checkpoint: MemoryCheckpoint
) -> None:
    initializers = {t.name: t for t in onnx.load(graph_dir / GRAPH_FILE).graph.initializer}
    name = "model.layers.1.mlp.down_proj"
    stored = onnx.numpy_helper.to_array(initializers["layers.1.down.qweight"])
    assert stored.dtype == np.int8
    expected = unpack_sits(checkpoint[f"{name}.qweight"].numpy())
    words = np.ascontiguousarray(stored).view(np.uint32).reshape(*stored.shape[:2], 32, 4)
    np.testing.assert_array_equal(unpack_mma16(words, *expected.shape), expected)
    for part, dtype in (("scales", np.float16), ("zeros", np.int8)):
        laid = onnx.numpy_helper.to_array(initializers[f"layers.1.down.{part}"])
        values = checkpoint[f"{name}.{part}"].numpy()
        assert laid.dtype == dtype
        np.testing.assert_array_equal(unpack_mma16_groups(laid, *values.shape), values)


def test_bfloat16_scales_travel_as_bfloat16(tmp_path: Path) -> None:
    checkpoint = tiny_int4(torch.bfloat16)
    export(checkpoint, tmp_path / "graph")
    initializers = {t.name: t for t in onnx.load(tmp_path / "graph" / GRAPH_FILE).graph.initializer}
    laid = onnx.numpy_helper.to_array(initializers["layers.0.o.scales"])
    scales = checkpoint["model.layers.0.self_attn.o_proj.scales"].bfloat16()
    assert initializers["layers.0.o.scales"].data_type == onnx.TensorProto.BFLOAT16
    np.testing.assert_array_equal(unpack_mma16_groups(laid, *scales.shape).astype(np.float32), scales.float().numpy())


def test_the_same_checkpoint_gives_the_same_bytes(
    graph_dir: Path, checkpoint: MemoryCheckpoint, tmp_path: Path
) -> None:
    export(checkpoint, tmp_path / "again")
    for name in (GRAPH_FILE, GRAPH_DATA_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (graph_dir / name).read_bytes()
    # Neither weights nor traces of the machine that exported are in the model file.
    model = (graph_dir / GRAPH_FILE).read_bytes()
    assert b".py" not in model
    assert len(model) < 20_000


@pytest.mark.parametrize("magnitude", [1, 500])
def test_float16_graph_is_about_as_exact_as_the_eager_model(
    magnitude: int, graph_dir: Path, checkpoint: MemoryCheckpoint
) -> None:
    """Where nothing is rounded the two are equal (tests/pipeline/test_graph_families.py); here roundings differ.

    The squares of a residual stream of magnitude 500 do not fit into float16.
    """
    spec, tile = checkpoint.spec, TileSpec.of(checkpoint.spec, 16)
    model = onnx.load(graph_dir / GRAPH_FILE)
    (embedding,) = (t for t in model.graph.initializer if t.name == "embedding")
    grown = checkpoint["model.embed_tokens.weight"] * magnitude
    embedding.CopyFrom(onnx.numpy_helper.from_array(grown.numpy(), "embedding"))
    graph = GraphEvaluator(model)
    tensors = checkpoint | {"model.embed_tokens.weight": grown}
    decoders = {
        dtype: build_decoder(spec, tensors, checkpoint.formats, dtype, num_positions=64)
        for dtype in (torch.float16, torch.float32)
    }
    batch = MixedBatch(spec, tile, sequences=3, tiles_per_seq=3, seed=1)
    pools = {dtype: torch.from_numpy(batch.pools["kv_pool"]).to(dtype) for dtype in decoders}
    for counts in ((5, 17, 0), (1, 4, 9), (1, 1, 1)):
        inputs = batch.step(counts)
        logits = graph.run(inputs | batch.pools)
        assert logits.dtype == np.float32
        arguments = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.inference_mode():
            half, exact = (decoder(kv_pool=pools[dtype], **arguments) for dtype, decoder in decoders.items())
        error = float((torch.from_numpy(logits) - exact).square().mean().sqrt())
        # ONNX rounds a norm before its weight and SiLU's sigmoid, torch does neither: about a third more roundings.
        assert 0 < error <= 2 * float((half - exact).square().mean().sqrt())


def refused(checkpoint: MemoryCheckpoint, tmp_path: Path, message: str, **limits: int) -> None:
    out_dir = tmp_path / "refused"
    changed = EngineLimits(**(LIMITS.to_dict() | limits))
    with pytest.raises(ExportError, match=message):
        export(checkpoint, out_dir, changed)
    assert not any(out_dir.iterdir())


def test_refuses_float32_checkpoints(tmp_path: Path) -> None:
    refused(tiny_int4(torch.float32), tmp_path, "float32 weights.*set model.dtype")


def test_refuses_more_positions_than_the_model_has(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    refused(checkpoint, tmp_path, "513 tokens exceed the model's 512 positions", max_seq_tokens=513)


def test_refuses_capped_attention(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    spec = replace(checkpoint.spec, family="gemma2", attention_softcap=50.0)
    refused(MemoryCheckpoint(spec, dict(checkpoint), checkpoint.formats), tmp_path, "family 'gemma2' cap.*eager")


@pytest.mark.parametrize("change", [{"bits": 8}, {"activations": "float8_e4m3"}])
def test_refuses_formats_that_the_plugin_does_not_compute(
    checkpoint: MemoryCheckpoint, tmp_path: Path, change: dict[str, Any]
) -> None:
    formats = {name: replace(form, **change) for name, form in checkpoint.formats.items()}
    refused(MemoryCheckpoint(checkpoint.spec, dict(checkpoint), formats), tmp_path, "otherwise than to INT4.*eager")


def test_refuses_a_checkpoint_without_embedding(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    rest = {name: t for name, t in checkpoint.items() if name != "model.embed_tokens.weight"}
    refused(MemoryCheckpoint(checkpoint.spec, rest, checkpoint.formats), tmp_path, "no model.embed_tokens.weight")


def test_refuses_the_tile_of_another_model(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    tile = TileSpec(num_layers=3, num_kv_heads=2, head_dim=16)
    with pytest.raises(ExportError, match="another model"):
        export_graph(checkpoint, tile, LIMITS, tmp_path, lambda done, total, what: None)
