"""Every specialisation of the INT4 linear's kernels that a bundle holds, and their names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from sits_plugins import linear_dense
from sits_plugins.kernel_spec import ONE, REALS, CudaKernel, CudaModule, TritonKernel, per
from sits_plugins.linear_enqueue import format_name
from sits_plugins.linear_shapes import CHUNKS_AHEAD, GATED, HOPPER, STREAM

GROUP_SIZES = (32, 64, 128)
DENSE_TILE = 128

_CPP_TYPES = {"float16": "Fp16", "bfloat16": "Bf16"}


def kernels(sm: int) -> list[TritonKernel | CudaModule]:
    """Return the linear kernels of a bundle for `sm`."""
    found: list[TritonKernel | CudaModule] = []
    for dtype in REALS:
        found.append(_dense(dtype))
        if sm == 90:
            found.append(_scale(dtype))
        for group, zeros in product(GROUP_SIZES, (False, True)):
            found += [_stream(sm, kind, dtype, group, zeros) for kind in ("stream", "gated")]
            found.append(_dequantize(dtype, group, zeros))
            if sm == 90:
                found.append(_hopper(dtype, group, zeros))
    return found


def needed(dtype: str, group_size: int, symmetric: bool) -> Callable[[str], bool]:
    """Return which kernels and modules a build with these weights needs: all that are not another format's linear."""
    real = REALS[dtype]
    mine = format_name(dtype, group_size, not symmetric)
    names = {f"linear_{kind}_{mine}" for kind in ("stream", "gated", "dequantize", "hopper")}
    names |= {f"linear_dense_{real}", f"linear_scale_{real}"}
    return lambda name: not name.startswith("linear_") or name in names


def _arguments(pointers: str, integers: str) -> tuple[tuple[str, str], ...]:
    return (*((name, "pointer") for name in pointers.split()), *((name, "i32") for name in integers.split()))


def _stream(sm: int, kind: str, dtype: str, group: int, zeros: bool) -> CudaModule:
    """Return the streaming kernels; those of kind "gated" store silu(gate) * up."""
    name = f"linear_{kind}_{format_name(dtype, group, zeros)}"
    gated = kind == "gated"
    found = [
        CudaKernel(
            name=f"{name}_{s.suffix}",
            arguments=_arguments("x qweight scales zeros bias input_scale out", "tokens rows columns"),
            grid=(per(("rows", 16 * s.row_blocks)), per(("tokens", 8 * s.tiles)), ONE),
            threads=32 * s.warps,
            # For SM 12.0 the compiler needs more registers: held to so many resident blocks, the kernels would spill.
            template=(
                _cpp(dtype), s.tiles, s.row_blocks, s.warps, s.depth, s.resident if sm <= 90 else 1, group,
                str(zeros).lower(), str(gated).lower(),
            ),
            dependent=True,
        )
        for s in (GATED if gated else STREAM)
    ]  # fmt: skip
    return CudaModule(name, "linear_stream.cu", tuple(found))


def _hopper(dtype: str, group: int, zeros: bool) -> CudaModule:
    name = f"linear_hopper_{format_name(dtype, group, zeros)}"
    found = [
        CudaKernel(
            name=f"{name}_{s.suffix}",
            arguments=(
                ("input", "tensor_map"),
                *_arguments("qweight scales zeros bias out sums flags", "tokens rows columns share_tiles blocks"),
            ),
            grid=(per("blocks"), ONE, ONE),
            threads=384,
            template=(
                _cpp(dtype), s.tokens, s.split, s.stages, CHUNKS_AHEAD, group, str(zeros).lower()
            ),
            shared_bytes=s.shared_bytes(group, zeros),
            dependent=True,
        )
        for s in {shape.suffix: shape for shape in HOPPER}.values()
    ]  # fmt: skip
    return CudaModule(name, "linear_hopper.cu", tuple(found), architecture_specific=True)


def _scale(dtype: str) -> CudaModule:
    name = f"linear_scale_{REALS[dtype]}"
    kernel = CudaKernel(
        name=name,
        arguments=_arguments("x input_scale scaled", "tokens columns"),
        grid=(per(("columns", 8 * 256), "tokens"), ONE, ONE),
        threads=256,
        template=(_cpp(dtype),),
        dependent=True,
    )
    return CudaModule(name, "linear_scale.cu", (kernel,))


def _dequantize(dtype: str, group: int, zeros: bool) -> CudaModule:
    name = f"linear_dequantize_{format_name(dtype, group, zeros)}"
    kernel = CudaKernel(
        name=name,
        arguments=_arguments("qweight scales zeros input_scale out", "rows columns"),
        grid=(per(("columns", 64 * 8)), per(("rows", 16)), ONE),
        threads=256,
        template=(_cpp(dtype), group, str(zeros).lower()),
        dependent=True,
    )
    return CudaModule(name, "linear_dequantize.cu", (kernel,))


def _cpp(dtype: str) -> str:
    return _CPP_TYPES[dtype]


def _dense(dtype: str) -> TritonKernel:
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{REALS[dtype]}")
    constants = {"BM": DENSE_TILE, "BN": DENSE_TILE, "BK": 64}
    return TritonKernel(
        name=f"linear_dense_{REALS[dtype]}",
        function=linear_dense.dense,
        signature=_signature(pointers, ("tokens", "rows", "columns", "stride", "has_bias"), constants),
        constants=constants,
        grid=(per(("tokens", DENSE_TILE)), per(("rows", DENSE_TILE)), ONE),
        aligned=(*pointers, "columns"),
        num_warps=8,
    )


def _signature(pointers: dict[str, str], sizes: tuple[str, ...], constants: dict[str, Any]) -> dict[str, str]:
    return {**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")}
