"""The plugin objects, driven as TensorRT drives them, on host memory: creator, serialized fields, shapes, enqueue."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sits_plugins.attention_kv import KV_FORMATS
from sits_plugins.launcher import BUNDLE_VARIABLE
from sits_plugins.tensorrt_attention import ATTENTION
from sits_plugins.tensorrt_fields import write_fields
from sits_plugins.tensorrt_linear import LINEAR
from sits_plugins.tensorrt_plugin import PluginDefinition, plugin_classes
from torch import Tensor

from sits_trt.contract import PLUGIN_VERSION, kv_format
from sits_trt.errors import PluginError
from sits_trt.kernels.linear import relay_codes, relay_groups
from sits_trt.ops import quantized_tiled_attention, rope_table, tiled_attention
from sits_trt.ops.kv_quant import quantize_kv
from sits_trt.spec import CODED_KV_DTYPES, RopeSpec, TileSpec
from tests.support.cpu_launcher import CpuLauncher
from tests.support.linear import random_weight
from tests.support.plugin_driver import create, describe_dynamic, describe_tensors, enqueue, trt

HEADS, KV_HEADS, DIM, TILE_TOKENS, LAYERS = 4, 2, 16, 16, 3
ATTENTION_VALUES = {
    "layer": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "tile_tokens": TILE_TOKENS,
    "window": 5, "scale": 0.25, "kv_format": 0,
}  # fmt: skip
OUT = 40
LINEAR_OPTIONS = ("zeros", "bias", "input_scale")


def attention_inputs(counts: Sequence[int], contexts: Sequence[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tile = TileSpec(LAYERS, KV_HEADS, DIM, TILE_TOKENS)
    tiles_per_seq = 3
    tiles = tiles_per_seq * len(counts) + 2
    width = (HEADS + 2 * KV_HEADS) * DIM
    return [
        torch.randn(sum(counts), width, generator=generator).to(dtype),
        torch.randn(tile.pool_shape(tiles), generator=generator).to(torch.float16),
        torch.randperm(tiles, generator=generator)[: tiles - 2].reshape(len(counts), -1).int(),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        rope_table(RopeSpec(), DIM, 48),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("counts", "contexts"), [((1, 1, 1), (5, 0, 33)), ((7, 0, 1), (0, 3, 40)), ((20,), (11,))])
def test_attention_equals_the_op_and_writes_the_pool(
    counts: tuple[int, ...], contexts: tuple[int, ...], dtype: torch.dtype
) -> None:
    launcher = CpuLauncher()
    plugin = create(ATTENTION, ATTENTION_VALUES, lambda: launcher)
    inputs = attention_inputs(counts, contexts, dtype, seed=sum(contexts))
    before = inputs[1].clone()
    twin = [t.clone() for t in inputs]
    expected = tiled_attention(*twin, 1, HEADS, KV_HEADS, 5, 0.25)
    out = torch.full((sum(counts), HEADS * DIM), float("nan"), dtype=dtype)
    enqueue(plugin, inputs, out, stream=1234)
    # The launcher computes with the same reference: what is tested is that every address, size and field arrived.
    assert torch.equal(out, expected)
    assert torch.equal(inputs[1], twin[1])
    changed = (inputs[1] != before).flatten(2).any(-1)
    assert changed[:, 1].any()
    assert not changed[:, [0, 2]].any()
    assert launcher.streams == [1234]


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
@pytest.mark.parametrize(("counts", "contexts"), [((1, 1, 1), (5, 0, 33)), ((7, 0, 1), (0, 3, 40))])
def test_attention_over_a_coded_pool_writes_codes_and_scales(
    counts: tuple[int, ...], contexts: tuple[int, ...], kv_dtype: str
) -> None:
    values = ATTENTION_VALUES | {"kv_format": kv_format(kv_dtype)}
    plugin = create(ATTENTION, values, CpuLauncher)
    qkv, pool, *rest = attention_inputs(counts, contexts, torch.float16, seed=3)
    codes, scales = quantize_kv(pool, kv_dtype)
    twins = codes.clone(), scales.clone()
    expected = quantized_tiled_attention(qkv, *twins, *rest, 1, HEADS, KV_HEADS, 5, 0.25, kv_dtype)
    before = scales.clone()
    out = torch.full_like(expected, float("nan"))
    enqueue(plugin, [qkv, codes, *rest, scales], out)
    assert torch.equal(out, expected)
    assert torch.equal(codes.view(torch.uint8), twins[0].view(torch.uint8))
    assert torch.equal(scales, twins[1])
    changed = (scales != before).flatten(2).any(-1)
    assert changed[:, 1].any()
    assert not changed[:, [0, 2]].any()


def test_attention_over_a_coded_pool_has_one_input_more() -> None:
    qkv, pool, *rest = attention_inputs((2, 1), (0, 4), torch.float16, 0)
    codes, scales = quantize_kv(pool, "int4")
    out = torch.zeros(3, HEADS * DIM, dtype=torch.float16)
    int4, int8 = (create(ATTENTION, ATTENTION_VALUES | {"kv_format": f}, CpuLauncher) for f in (3, 1))
    int4.on_shape_change(describe_tensors([qkv, codes, *rest, scales]), describe_tensors([out]))
    for plugin, operands, message in (
        (int4, [qkv, codes, *rest], "8 expected"),
        (int8, [qkv, codes, *rest, scales], r"pool after its layers must be \(2, 2, 16, 16\), got \(2, 2, 16, 8\)"),
        (int4, [qkv, codes, *rest, scales[1:]], "shape of kv_scales must be"),
    ):
        with pytest.raises(PluginError, match=message):
            plugin.on_shape_change(describe_tensors(operands), describe_tensors([out]))
    types = [trt.float16, trt.int8, *[trt.int32] * 3, trt.float32, trt.float16, trt.float16]
    for position, wrong in ((1, trt.float16), (6, trt.float32)):
        descriptions = [describe_dynamic((2, 2), t) for t in types]
        assert int4.supports_format_combination(position, descriptions, 7)
        descriptions[position] = describe_dynamic((2, 2), wrong)
        assert not int4.supports_format_combination(position, descriptions, 7)


def test_formats_of_a_node_are_those_of_the_kernels() -> None:
    assert {name: kv_format(name) for name in ("native", *CODED_KV_DTYPES)} == KV_FORMATS


def linear_values(group_size: int, *present: str) -> dict[str, int]:
    """Return the fields of a linear of OUT outputs that has these optional inputs."""
    flags = {f"has_{name}": int(name in present) for name in LINEAR_OPTIONS}
    return {"out_features": OUT, "group_size": group_size} | flags


def linear_operands(fields: Mapping[str, int], tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of a linear node, weights as the kernels read them, and the op's result."""
    present = [name for name in LINEAR_OPTIONS if fields[f"has_{name}"]]
    weight = random_weight(OUT, 96, fields["group_size"], present, dtype=dtype)
    x = torch.randn(tokens, 96).to(dtype)
    zeros = [] if weight.zeros is None else [relay_groups(weight.zeros, weight.group_size)]
    rest = [tensor for tensor in (weight.bias, weight.input_scale) if tensor is not None]
    codes = relay_codes(weight.qweight).flatten(2).view(torch.int8)
    return [x, codes, relay_groups(weight.scales, weight.group_size), *zeros, *rest], weight.layer()(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("present", range(8))
def test_linear_equals_the_op_with_any_optional_inputs(present: int, tokens: int, dtype: torch.dtype) -> None:
    values = linear_values(32, *(name for bit, name in enumerate(LINEAR_OPTIONS) if present >> bit & 1))
    plugin = create(LINEAR, values, CpuLauncher)
    inputs, expected = linear_operands(values, tokens, dtype)
    out = torch.full_like(expected, float("nan"))
    enqueue(plugin, inputs, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("definition", "values"),
    [(ATTENTION, ATTENTION_VALUES), (LINEAR, linear_values(32))],
)
def test_enqueue_without_a_bundle_fails_loudly(
    definition: PluginDefinition,
    values: Mapping[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(BUNDLE_VARIABLE, raising=False)
    plugin = create(definition, values)
    if definition is ATTENTION:
        inputs, width = attention_inputs((2,), (0,), torch.float16, 0), HEADS * DIM
    else:
        inputs, width = linear_operands({k: int(v) for k, v in values.items()}, 2, torch.float16)[0], OUT
    out = torch.zeros(2, width, dtype=torch.float16)
    with caplog.at_level(logging.ERROR), pytest.raises(PluginError, match=f"set {BUNDLE_VARIABLE}"):
        enqueue(plugin, inputs, out)
    assert f"plugin {definition.name}" in caplog.text


def test_a_plugin_names_the_fields_that_a_node_lacks() -> None:
    _, creator_class = plugin_classes(trt, ATTENTION)
    kinds = {name: kind for name, kind in ATTENTION.fields.items() if name not in ("layer", "window")}
    collection, _arrays = write_fields(trt, kinds, ATTENTION_VALUES)
    with pytest.raises(PluginError, match=f"SitsTiledAttention {PLUGIN_VERSION}: the node lacks layer, window"):
        creator_class().create_plugin("node", collection, trt.TensorRTPhase.BUILD)


def changed_input(index: int, shape: tuple[int, ...]) -> list[Tensor]:
    inputs = attention_inputs((2, 1), (0, 4), torch.float16, 0)
    inputs[index] = torch.zeros(shape, dtype=inputs[index].dtype)
    return inputs


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (3, 100), "width of qkv must be 128, got 100"),
        (1, (8, 3, 2, 2, 32, 16), "pool after its layers must be"),
        (1, (8, 1, 2, 2, 16, 16), "layer must be below 1, got 1"),
        (3, (3,), "length of context_lens must be 2, got 3"),
        (4, (4,), "length of query_starts must be 3, got 4"),
        (5, (48, 8), "width of rope_table must be 16, got 8"),
    ],
)
def test_attention_refuses_shapes_that_do_not_fit(index: int, shape: tuple[int, ...], message: str) -> None:
    plugin = create(ATTENTION, ATTENTION_VALUES, CpuLauncher)
    out = torch.zeros(3, HEADS * DIM, dtype=torch.float16)
    with pytest.raises(PluginError, match=message):
        plugin.on_shape_change(describe_tensors(changed_input(index, shape)), describe_tensors([out]))


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (1, (3, 1, 512), r"shape of qweight must be \(3, 2, 512\), got \(3, 1, 512\)"),
        (2, (3, 2, 8, 2), r"shape of scales must be \(3, 4, 8, 2\), got \(3, 2, 8, 2\)"),
        (3, (3, 3, 8, 2), r"shape of zeros must be \(3, 4, 8, 2\)"),
        (4, (48,), r"shape of bias must be \(40,\)"),
    ],
)
def test_linear_refuses_shapes_that_do_not_fit(index: int, shape: tuple[int, ...], message: str) -> None:
    values = linear_values(32, "zeros", "bias")
    plugin = create(LINEAR, values, CpuLauncher)
    inputs, expected = linear_operands(values, 2, torch.float16)
    inputs[index] = torch.zeros(shape, dtype=inputs[index].dtype)
    with pytest.raises(PluginError, match=message):
        plugin.on_shape_change(describe_tensors(inputs), describe_tensors([expected]))


def test_formats_are_linear_and_types_those_of_the_contract() -> None:
    plugin = create(ATTENTION, ATTENTION_VALUES)
    wanted = [trt.float16, trt.float16, trt.int32, trt.int32, trt.int32, trt.float32, trt.float16]

    def supported(types: Sequence[Any], layout: Any = trt.TensorFormat.LINEAR) -> list[bool]:
        descriptions = [describe_dynamic((2, 2), t, layout) for t in types]
        return [plugin.supports_format_combination(i, descriptions, len(types) - 1) for i in range(len(types))]

    assert all(supported(wanted))
    assert not any(supported(wanted, trt.TensorFormat.HWC))
    for position, wrong in ((0, trt.float32), (1, trt.bfloat16), (2, trt.int64), (5, trt.float16), (6, trt.bfloat16)):
        changed = [wrong if i == position else t for i, t in enumerate(wanted)]
        assert not supported(changed)[position]
    bfloat16 = [trt.bfloat16, *wanted[1:6], trt.bfloat16]
    assert all(supported(bfloat16))


def test_a_clone_keeps_the_fields_and_finds_its_own_launcher() -> None:
    found: list[CpuLauncher] = []

    def find() -> CpuLauncher:
        found.append(CpuLauncher())
        return found[-1]

    values = linear_values(32, "bias")
    plugin = create(LINEAR, values, find)
    inputs, out = linear_operands(values, 1, torch.float16)
    enqueue(plugin, inputs, out)
    clone = plugin.clone()
    assert clone.fields == values
    enqueue(clone, inputs, out)
    enqueue(clone, inputs, out)
    assert [len(launcher.streams) for launcher in found] == [1, 2]


def test_serialized_fields_outlive_the_call_that_returns_them() -> None:
    """TensorRT's collection holds addresses, and reads them when the engine is written."""
    plugins = [create(ATTENTION, ATTENTION_VALUES | {"layer": layer}) for layer in range(20)]
    collections = [plugin.get_fields_to_serialize() for plugin in plugins]
    reused = [np.full(1, -1, np.int32) for _ in range(1000)]
    for layer, collection in enumerate(collections):
        values = {field.name: np.asarray(field.data).item() for field in collection}
        assert values == pytest.approx(ATTENTION_VALUES | {"layer": layer})
    assert len(reused) == 1000


def test_field_values_survive_as_numbers() -> None:
    plugin = create(ATTENTION, ATTENTION_VALUES | {"scale": 0.1, "window": 2**20})
    assert plugin.fields["window"] == 2**20
    assert plugin.fields["scale"] == np.float32(0.1)
