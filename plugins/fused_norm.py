"""Between two matrix products: residual add, ScaleRecover and RMSNorm in one pass; SiLU of the gate times up."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_norm(
    residual, delta, recover, weight, out, hidden, has_delta, has_recover, eps, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """residual = (residual + delta) * recover; out = RMSNorm(residual) * weight. Grid: (tokens,).

    residual: [tokens, hidden], written in place; delta: likewise, left out where has_delta is 0; recover: [hidden],
    left out where has_recover is 0; weight: [hidden]. Every step is rounded to the residual's type, as the separate
    operations do. BLOCK: hidden rounded up to a power of two. DEPENDENT: may start before the kernel that wrote
    residual and delta has ended, and lets the next one start.
    """
    DTYPE: tl.constexpr = residual.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    there = lanes < hidden
    row = tl.program_id(0).to(tl.int64) * hidden
    factor = tl.load(weight + lanes, mask=there, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(residual + row + lanes, mask=there, other=0.0).to(tl.float32)
    if has_delta != 0:
        x = (x + tl.load(delta + row + lanes, mask=there, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)
    if has_recover != 0:
        x = (x * tl.load(recover + lanes, mask=there, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)
    if (has_delta != 0) | (has_recover != 0):
        tl.store(residual + row + lanes, x.to(DTYPE), mask=there)
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out + row + lanes, (x * scale * factor).to(DTYPE), mask=there)


@triton.jit
def silu_mul(gate_up, out, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """out = silu(gate) * up for gate_up [tokens, 2 * size], gate first. Grid: (tokens * ceil(size / BLOCK),).

    DEPENDENT: as of `add_norm`. The grid has one dimension, since tokens may be more than the others hold.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    blocks = tl.cdiv(size, BLOCK)
    lanes = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = lanes < size
    row = (tl.program_id(0) // blocks).to(tl.int64) * size
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + 2 * row + lanes, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + size + lanes, mask=there, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    tl.store(out + row + lanes, (activated * up).to(DTYPE), mask=there)
