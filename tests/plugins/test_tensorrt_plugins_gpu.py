"""The plugin objects on a real GPU, driven as TensorRT drives them, over the kernels of a bundle."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import pytest
import torch
from sits_plugins.attention_names import needed
from sits_plugins.tensorrt_attention import ATTENTION
from sits_plugins.tensorrt_linear import LINEAR
from torch import Tensor

from sits_trt.contract import kv_format
from sits_trt.kernels.linear import relay_codes, relay_groups
from sits_trt.ops import quantized_tiled_attention, rope_table, tiled_attention
from sits_trt.ops.kv_quant import dequantize_kv, quantize_kv
from sits_trt.spec import RopeSpec, TileSpec
from tests.support.gpu_launcher import current_sm, gpu_launcher
from tests.support.linear import random_weight
from tests.support.plugin_driver import create, enqueue

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 64, 2
KV_DTYPES = ("float16", "int8", "float8_e4m3", "int4")
OPTIONS = ("zeros", "bias", "input_scale")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    attention = [needed(current_sm(), "float16", kv_dtype, DIM, HEADS // KV_HEADS, 64) for kv_dtype in KV_DTYPES]
    return gpu_launcher(tmp_path_factory.mktemp("kernels"), lambda name: any(wanted(name) for wanted in attention))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("counts", "contexts"), [((1, 1, 1), (5, 0, 131)), ((70, 1, 0, 3), (0, 64, 3, 200)), ((200,), (11,))]
)
def test_attention(launcher: Any, kv_dtype: str, counts: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    if kv_dtype == "float8_e4m3" and launcher.sm < 89:
        pytest.skip("FP8 pools need SM 8.9")
    check_attention(launcher, "cuda", kv_dtype, counts, contexts)


@pytest.mark.parametrize(("tokens", "group_size", "options"), list(product((1, 5, 40, 300), (32, 64), ((), OPTIONS))))
def test_linear(launcher: Any, tokens: int, group_size: int, options: tuple[str, ...]) -> None:
    check_linear(launcher, "cuda", tokens, group_size, options)


def stream_of(device: str) -> int:
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else 0


def check_attention(launcher: Any, device: str, kv_dtype: str, counts: tuple[int, ...], contexts: tuple[int, ...]):
    tile = TileSpec(LAYERS, KV_HEADS, DIM, 64, kv_dtype)
    tiles = 4 * len(counts) + 1
    pool = torch.randn(*tile.scales_shape(tiles), DIM, device=device).half()
    coded = tile.is_coded
    stored, scales = quantize_kv(pool, kv_dtype) if coded else (pool, None)
    qkv = torch.randn(sum(counts), (HEADS + 2 * KV_HEADS) * DIM, device=device).half()
    rest = [
        torch.randperm(tiles, device=device)[: tiles - 1].reshape(len(counts), 4).int(),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        rope_table(RopeSpec(), DIM, 256).to(device),
    ]
    numbers = (1, HEADS, KV_HEADS, 0, DIM**-0.5)
    twins = [stored.clone(), None if scales is None else scales.clone()]
    wide = qkv.float()
    if scales is None:
        expected = tiled_attention(wide, twins[0], *rest, *numbers)
    else:
        expected = quantized_tiled_attention(wide, *twins, *rest, *numbers, kv_dtype)
    values = {
        "layer": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "tile_tokens": 64, "window": 0,
        "scale": DIM**-0.5, "kv_format": kv_format(kv_dtype),
    }  # fmt: skip
    plugin = create(ATTENTION, values, lambda: launcher)
    out = torch.full((sum(counts), HEADS * DIM), float("nan"), dtype=torch.float16, device=device)
    enqueue(plugin, [qkv, stored, *rest, *([] if scales is None else [scales])], out, stream_of(device))
    # Half precision of the result, of the weights on their way to the tensor cores, and of the rotated queries.
    assert (out.float() - expected).norm() < 2e-3 * expected.norm()
    found, wanted = (
        p.float() if s is None else dequantize_kv(p, s, kv_dtype) for p, s in ((stored, scales), (twins[0], twins[1]))
    )
    # Rows of V that no token has written yet, in the tile of a sequence's last token, may become zeros.
    for table, count, context in zip(rest[0].tolist(), counts, contexts, strict=True):
        if count and (used := (context + count) % 64):
            unwritten = found[table[(context + count) // 64], 1, 1, :, used:]
            kept = wanted[table[(context + count) // 64], 1, 1, :, used:]
            assert bool(((unwritten == 0) | (unwritten == kept)).all())
            unwritten.copy_(kept)
    # Another order of RoPE's two products may move a value to the next code or half: few, and by one step.
    step = 2**-8 if scales is None else scales.float().amax() * (32 if kv_dtype == "float8_e4m3" else 1)
    assert (found - wanted).abs().max() <= 1.01 * step
    assert (found != wanted).float().mean() < 0.01


def check_linear(launcher: Any, device: str, tokens: int, group_size: int, options: tuple[str, ...]) -> None:
    rows, columns = 200, 320
    weight = random_weight(rows, columns, group_size, options, device, torch.float16)
    present: list[Tensor] = [] if weight.zeros is None else [relay_groups(weight.zeros, group_size)]
    present += [tensor for tensor in (weight.bias, weight.input_scale) if tensor is not None]
    values = {"out_features": rows, "group_size": group_size} | {f"has_{n}": int(n in options) for n in OPTIONS}
    x = torch.randn(tokens, columns, device=device).half()
    codes = relay_codes(weight.qweight).flatten(2).view(torch.int8)
    out = torch.full((tokens, rows), float("nan"), dtype=torch.float16, device=device)
    plugin = create(LINEAR, values, lambda: launcher)
    enqueue(plugin, [x, codes, relay_groups(weight.scales, group_size), *present], out, stream_of(device))
    expected = weight.reference(x)
    assert (out.double() - expected).norm() < 1e-3 * expected.norm()
