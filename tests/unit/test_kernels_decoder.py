"""The kernel decoder's wiring, with the kernels' references in their places: the same function as the decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sits_trt.errors import SitsError
from sits_trt.kernels import decoder as module
from sits_trt.kernels.decoder import KernelDecoder
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.linear import W4A16Linear
from sits_trt.ops import quantized_tiled_attention, tiled_attention
from sits_trt.ops.kv_pool import code_kind
from sits_trt.spec import CODED_KV_DTYPES, ModelSpec, WeightFormat
from tests.support.decode import ScatteredRun
from tests.support.quantized import quantize_tensors
from tests.support.tiny import tiny_spec, tiny_tensors


class Attention:
    """`kernels.attention.KernelAttention` by the op."""

    def __init__(
        self, launcher: Any, max_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, device: str
    ) -> None:  # fmt: skip
        self._heads = (num_heads, num_kv_heads)

    def __call__(
        self, qkv: Tensor, pool: Tensor, table: Tensor, contexts: Tensor, starts: Tensor, rope: Tensor, layer: int,
        window: int, scale: float, scales: Tensor | None,
    ) -> Tensor:  # fmt: skip
        given = (table, contexts, starts, rope, layer, *self._heads, window, scale)
        if scales is None:
            return tiled_attention(qkv, pool, *given)
        return quantized_tiled_attention(qkv, pool, scales, *given, code_kind(pool))


def add_norm(
    launcher: Any, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None,
    recover: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if delta is not None:
        residual += delta
    if recover is not None:
        residual *= recover
    return nn.functional.rms_norm(residual, residual.shape[-1:], weight, eps)


def silu_mul(launcher: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class Linear(nn.Module):
    """`kernels.linear.KernelLinear` by the op; counts how many there are, and calls of the gated linear."""

    made = 0
    gated = 0

    def __init__(self, layer: W4A16Linear, dtype: torch.dtype, launcher: Any) -> None:
        super().__init__()
        type(self).made += 1
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(x)

    def silu_gated(self, x: Tensor) -> Tensor:
        type(self).gated += 1
        return silu_mul(None, self(x))


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KernelAttention", Attention)
    monkeypatch.setattr(module, "KernelLinear", Linear)
    monkeypatch.setattr(module, "add_norm", add_norm)
    monkeypatch.setattr(module, "silu_mul", silu_mul)
    monkeypatch.setattr(Linear, "made", 0)
    monkeypatch.setattr(Linear, "gated", 0)


def decoders(spec: ModelSpec, tensors: dict[str, Tensor], formats: dict[str, WeightFormat]) -> tuple[Decoder, Decoder]:
    return tuple(build_decoder(spec, tensors, formats, torch.float32) for _ in range(2))  # type: ignore[return-value]


SPECS = {
    "llama": tiny_spec(),
    "qwen3": tiny_spec(qk_norm=True, qkv_bias=True),
    "windows": tiny_spec(layer_windows=(5, 0)),
    "gemma": tiny_spec(
        post_norms=True, embedding_scale=8.0, norm_offset=1.0, activation="gelu_tanh", logit_softcap=5.0
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("recovered", [False, True])
def test_it_computes_what_the_decoder_computes(name: str, recovered: bool) -> None:
    spec = SPECS[name]
    tensors = tiny_tensors(spec)
    if recovered:
        for layer in range(spec.num_layers):
            tensors[f"model.layers.{layer}.scale_recover"] = torch.rand(spec.hidden_size) + 0.5
    plain, taken = decoders(spec, tensors, {})
    kernel = KernelDecoder(taken, None, 64)  # type: ignore[arg-type]
    runs = [ScatteredRun(plain, 2), ScatteredRun(plain, 2)]
    runs[1].decoder = kernel  # type: ignore[assignment]
    for new in ([[5, 6, 7, 8, 9, 10, 11], [3]], [[1], [2]], [[4], [7, 8, 9]]):
        theirs, ours = (run.step(new) for run in runs)
        for their, our in zip(theirs, ours, strict=True):
            # The same float32 operations in the same order, but for the recover that moves into the norm.
            torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
def test_a_coded_pool_reaches_the_kernels_with_its_scales(kv_dtype: str) -> None:
    spec = tiny_spec()
    plain, taken = decoders(spec, tiny_tensors(spec), {})
    runs = [ScatteredRun(plain, 2, kv_dtype=kv_dtype) for _ in range(2)]
    runs[1].decoder = KernelDecoder(taken, None, 64)  # type: ignore[arg-type, assignment]
    for new in ([[5, 6, 7, 8, 9, 10, 11], [3]], [[1], [2]]):
        for their, our in zip(*(run.step(new) for run in runs), strict=True):
            torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


def test_every_int4_layer_is_replaced_and_no_other() -> None:
    spec = tiny_spec()
    tensors, formats = quantize_tensors(tiny_tensors(spec), dense=("k_proj", "up_proj", "down_proj"))
    plain, taken = decoders(spec, tensors, formats)
    kernel = KernelDecoder(taken, None, 64)  # type: ignore[arg-type]
    assert Linear.made == len(formats) == 4 * spec.num_layers
    runs = [ScatteredRun(plain, 1), ScatteredRun(plain, 1)]
    runs[1].decoder = kernel  # type: ignore[assignment]
    (theirs,), (ours,) = (run.step([[5, 6, 7]]) for run in runs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "calls"), [("silu", 2), ("gelu_tanh", 0)])
def test_silu_is_left_to_an_int4_layer(activation: str, calls: int) -> None:
    spec = tiny_spec(activation=activation)
    tensors, formats = quantize_tensors(tiny_tensors(spec))
    plain, taken = decoders(spec, tensors, formats)
    runs = [ScatteredRun(plain, 1), ScatteredRun(plain, 1)]
    runs[1].decoder = KernelDecoder(taken, None, 64)  # type: ignore[arg-type, assignment]
    (theirs,), (ours,) = (run.step([[5, 6, 7]]) for run in runs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert Linear.gated == calls * spec.num_layers // 2


def test_a_model_with_a_soft_cap_is_refused_by_name() -> None:
    spec = tiny_spec(attention_softcap=50.0)
    decoder = build_decoder(spec, tiny_tensors(spec), dtype=torch.float32)
    with pytest.raises(SitsError, match=r"no soft cap.*use eager"):
        KernelDecoder(decoder, None, 64)  # type: ignore[arg-type]
