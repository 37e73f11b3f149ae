"""Every specialisation of the attention kernels that a bundle may hold, and which of them one model needs.

A kernel's name is `attention_<activations>_<pool>_d<head_dim>_<what>`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from sits_plugins import attention_append, attention_decode, attention_kv, attention_prefill, attention_prefill_hopper
from sits_plugins.attention_names import STREAM_HEAD_DIMS, stem
from sits_plugins.kernel_spec import ONE, REALS, CudaKernel, CudaModule, TritonKernel, per

HEAD_DIMS = (64, 96, 128, 256)
_NATIVE_PAIRS = (("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float16"))
_CODED_PAIRS = tuple(product(REALS, ("int8", "float8_e4m3", "int4")))
_POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "float8_e4m3": "*fp8e4nv", "int4": "*u8"}
_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Most shared memory that one block may have."""

_SIZES = (
    "batch", "table_width", "num_layers", "layer", "kv_heads", "group", "tile_shift", "window", "decode_limit",
)  # fmt: skip
_DECODE_ROWS = 16


def kernels(sm: int) -> list[TritonKernel | CudaModule]:
    """Return the attention kernels of a bundle for `sm`. FP8 pools need the conversions of SM 8.9 and later."""
    found: list[TritonKernel | CudaModule] = []
    for (dtype, kv_dtype), head_dim in product((*_NATIVE_PAIRS, *_CODED_PAIRS), HEAD_DIMS):
        if kv_dtype == "float8_e4m3" and sm < 89:
            continue
        found.append(_append(dtype, kv_dtype, head_dim))
        for spread in (False, True):
            found.append(_decode(dtype, kv_dtype, head_dim, spread))
            found.append(_prefill(sm, dtype, kv_dtype, head_dim, spread))
        if sm == 90 and kv_dtype in REALS and head_dim in (64, 128):
            found += [_hopper(dtype, kv_dtype, head_dim, spread) for spread in (False, True)]
        if head_dim in STREAM_HEAD_DIMS and (stream := _stream(sm, dtype, kv_dtype, head_dim)):
            found.append(stream)
    return found


def _half(head_dim: int) -> int:
    return 1 << (head_dim // 2 - 1).bit_length()


def _format(kv_dtype: str) -> int:
    return attention_kv.KV_FORMATS["native" if kv_dtype in REALS else kv_dtype]


def _triton(
    name: str, function: Any, dtype: str, kv_dtype: str, constants: dict[str, Any], **options: Any
) -> TritonKernel:
    """A kernel whose pointers have the types that their names imply; sizes are int32."""
    real = _POINTERS[dtype]
    types = {
        "qkv": real, "out": real, "pool": _POINTERS[kv_dtype], "pool_scales": "*fp16", "tile_table": "*i32",
        "context_lens": "*i32", "query_starts": "*i32", "rope_table": "*fp32", "partial_out": "*fp32",
        "partial_stats": "*fp32", "arrivals": "*i32", "softmax_scale": "fp32",
    }  # fmt: skip
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    return TritonKernel(
        name=name,
        function=function,
        signature=signature,
        constants=constants,
        aligned=tuple(n for n in names if signature[n].startswith("*")),
        **options,
    )


def _append(dtype: str, kv_dtype: str, head_dim: int) -> TritonKernel:
    constants = {
        "HEAD_DIM": head_dim, "KV_FORMAT": _format(kv_dtype), "HALF": _half(head_dim), "BLOCK_T": 16, "BLOCK_BATCH": 64,
    }  # fmt: skip
    name = f"{stem(dtype, kv_dtype, head_dim)}_append"
    grid = (per(("tokens", constants["BLOCK_T"])), per("kv_heads"), ONE)
    return _triton(name, attention_append.attention_append, dtype, kv_dtype, constants, grid=grid)


def _decode(dtype: str, kv_dtype: str, head_dim: int, spread: bool) -> TritonKernel:
    stages = 2 if head_dim == 256 else 3
    constants = {
        "HEAD_DIM": head_dim, "KV_FORMAT": _format(kv_dtype), "HALF": _half(head_dim), "ROWS": _DECODE_ROWS,
        "BLOCK_N": 64, "SPREAD": spread, "BLOCK_BATCH": 128, "LEAST_UNITS": 1, "STAGES": stages, "BLOCK_C": 512,
        "AT_ONCE": 8,
    }  # fmt: skip
    name = f"{stem(dtype, kv_dtype, head_dim)}_decode{'_spread' if spread else ''}"
    grid = (per("programs"), ONE, ONE)
    return _triton(
        name, attention_decode.attention_decode, dtype, kv_dtype, constants, grid=grid, num_stages=stages
    )  # fmt: skip


def _prefill(sm: int, dtype: str, kv_dtype: str, head_dim: int, spread: bool) -> TritonKernel:
    small = _SHARED_BYTES[sm] < (128 << 10)
    rows = 64 if head_dim == 256 else 128
    keys = 32 if head_dim == 256 and small else 64
    stages = 2 if head_dim == 256 or small else 3
    constants = {
        "HEAD_DIM": head_dim, "KV_FORMAT": _format(kv_dtype), "HALF": _half(head_dim), "BLOCK_M": rows,
        "BLOCK_N": keys, "SPREAD": spread, "BLOCK_BATCH": 64, "STAGES": stages,
    }  # fmt: skip
    name = f"{stem(dtype, kv_dtype, head_dim)}_prefill{'_spread' if spread else ''}"
    grid = (per("kv_heads"), per("blocks"), ONE)
    return _triton(
        name, attention_prefill.attention_prefill, dtype, kv_dtype, constants,
        grid=grid, num_warps=rows // 16, num_stages=stages,
    )  # fmt: skip


def _hopper(dtype: str, kv_dtype: str, head_dim: int, spread: bool) -> TritonKernel:
    constants = {"HEAD_DIM": head_dim, "KEYS": 128, "STAGES": 2, "BOX": 16 if spread else 64}
    name = f"{stem(dtype, kv_dtype, head_dim)}_hopper{'_spread' if spread else ''}"
    function = attention_prefill_hopper.attention_prefill_hopper
    return _triton(name, function, dtype, kv_dtype, constants, grid=(per("programs"), ONE, ONE))


def _stream(sm: int, dtype: str, kv_dtype: str, head_dim: int) -> CudaModule | None:
    """The stream for this SM, or None where its ring does not fit."""
    bits = {"int8": 8, "float8_e4m3": 8, "int4": 4}.get(kv_dtype, 16)
    depth, blocks = _STREAM_RINGS[bits, head_dim]
    if _SHARED_BYTES[sm] < (128 << 10):
        depth = 2 if bits == 16 else depth
    shared = _stream_shared_bytes(bits, head_dim, depth)
    if shared > _SHARED_BYTES[sm]:
        return None
    name = f"{stem(dtype, kv_dtype, head_dim)}_stream"
    kinds = {"softmax_scale": "f32"} | dict.fromkeys(_SIZES, "i32")
    arguments = tuple(
        (n, kinds.get(n, "pointer")) for n in attention_decode.attention_decode.arg_names if not n.isupper()
    )  # fmt: skip
    constants = {"HEAD_DIM": head_dim, "FORMAT": _format(kv_dtype), "DEPTH": depth, "BLOCKS": blocks}
    defines = {
        **constants, "NAME": name, "BF16": int(dtype == "bfloat16"), "POOL_BF16": int(kv_dtype == "bfloat16"),
        "TOKEN_MAJOR": 0,
    }  # fmt: skip
    kernel = CudaKernel(
        name, arguments, (per("programs"), ONE, ONE), threads=128, shared_bytes=shared, dependent=True,
        constants=constants,
    )  # fmt: skip
    return CudaModule(name, "attention_stream.cu", (kernel,), defines)


_STREAM_RINGS = {
    (16, 64): (3, 4), (16, 128): (3, 2), (16, 256): (2, 1),
    (8, 64): (4, 4), (8, 128): (4, 3), (8, 256): (3, 2),
    (4, 64): (4, 4), (4, 128): (4, 3), (4, 256): (3, 2),
}  # fmt: skip
"""(bits of an element, head_dim) -> (steps of 16 keys in a warp's ring, blocks a multiprocessor is to hold)."""


def _stream_shared_bytes(bits: int, head_dim: int, depth: int) -> int:
    """Shared memory of the stream: its four warps' rings, or what the results need if that is more."""
    step = 32 * head_dim * bits // 8 + (0 if bits == 16 else 128)
    results = 4 * (4 * 8 * head_dim + 2 * 4 * 8 + 64 * 8) + 16
    return max(4 * depth * step, results)
