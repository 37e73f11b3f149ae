"""Random steps for the attention kernels on this GPU, and their comparison with the ops' references.

python -m sits_plugins.compile 90 BUNDLE '^attention_'     (on any machine)
python scripts/check_attention.py BUNDLE
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from sits_plugins.bundle import KernelBundle
from sits_plugins.launch import BundleLauncher

from sits_trt.kernels.attention import KernelAttention
from sits_trt.ops.attention import tiled_attention
from sits_trt.ops.kv_pool import allocate_pool
from sits_trt.ops.kv_quant import dequantize_kv, quantize_kv, quantized_tiled_attention
from sits_trt.ops.rope import rope_table
from sits_trt.spec import RopeSpec, TileSpec


@dataclass
class Step:
    """One step, on the GPU. The pool's last tile is nobody's."""

    qkv: torch.Tensor
    pool: torch.Tensor
    scales: torch.Tensor | None
    table: torch.Tensor
    contexts: torch.Tensor
    starts: torch.Tensor
    rope: torch.Tensor
    heads: tuple[int, int]
    kv_dtype: str

    def places(self, device: str) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(device) for t in (self.table, self.contexts, self.starts, self.rope))


def make_step(
    contexts: list[int], new: list[int], heads: tuple[int, int], dim: int, tile: int = 64, kv_dtype: str = "float16",
    dtype: torch.dtype = torch.float16, layers: int = 2, poison: bool = False,
) -> Step:  # fmt: skip
    """Return a random step; with `poison`, rows of the pool that no token has written are NaN."""
    needed = [-(-(c + n) // tile) for c, n in zip(contexts, new, strict=True)]
    table = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    tiles = torch.randperm(sum(needed) + 1).int()
    for row, (count, end) in enumerate(zip(needed, accumulate(needed), strict=True)):
        table[row, :count] = tiles[end - count : end]
    pool, scales = allocate_pool(TileSpec(layers, heads[1], dim, tile, kv_dtype), len(tiles), "cuda")
    if scales is None:
        pool.normal_()
    else:
        for index in range(len(tiles)):
            pool[index], scales[index] = quantize_kv(torch.randn(*scales.shape[1:], dim, device="cuda"), kv_dtype)
    poisoned = pool if scales is None else scales
    for row, context in enumerate(contexts if poison else []):
        for index in range(context // tile, needed[row]):
            poisoned[table[row, index].long(), :, :, :, max(0, context - index * tile) :] = float("nan")
    width = (heads[0] + 2 * heads[1]) * dim
    return Step(
        qkv=torch.empty(sum(new), width, device="cuda").normal_().to(dtype),
        pool=pool,
        scales=scales,
        table=table.cuda(),
        contexts=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32, device="cuda"),
        rope=rope_table(RopeSpec(), dim, max(c + n for c, n in zip(contexts, new, strict=True)) + 1).cuda(),
        heads=heads,
        kv_dtype=kv_dtype,
    )


def attention_of(launcher: BundleLauncher, step: Step) -> KernelAttention:
    tokens, dim = step.qkv.shape[0], step.rope.shape[1]
    return KernelAttention(launcher, max(tokens, 1), *step.heads, dim, "cuda")


def run(attention: KernelAttention, step: Step, layer: int = 1, window: int = 0) -> torch.Tensor:
    places = (step.table, step.contexts, step.starts, step.rope)
    return attention(step.qkv, step.pool, *places, layer, window, attention.head_dim**-0.5, step.scales)


def check(launcher: BundleLauncher) -> None:
    """Compare every kind of kernel with the ops' references on fresh random steps. Raises AssertionError."""
    decode = ([0, 5, 64, 63, 130, 1000, 2047], [1] * 7)
    odd = ([0, 5, 64, 63, 130, 1000], [1, 0, 3, 1, 0, 1])
    mixed = ([0, 5, 64, 63, 130, 1000], [64, 1, 129, 33, 2, 301])
    cases = [(decode, (32, 8), 128, 64, 0), (odd, (9, 3), 64, 16, 0), (mixed, (32, 8), 128, 64, 0)]
    cases += [(decode, (32, 8), 128, 64, 100), (mixed, (8, 8), 64, 128, 90), (mixed, (16, 1), 128, 64, 0)]
    cases += [(decode, (8, 2), 256, 64, 0), (mixed, (8, 2), 256, 64, 0), (mixed, (6, 2), 96, 32, 0)]
    for (contexts, new), heads, dim, tile, window in cases:
        for dtype, kv_dtype, tolerance in (
            (torch.float16, "float16", 1e-3), (torch.bfloat16, "bfloat16", 6e-3), (torch.bfloat16, "float16", 6e-3),
            (torch.float16, "int8", 1e-3), (torch.float16, "float8_e4m3", 1e-3), (torch.bfloat16, "int4", 6e-3),
        ):  # fmt: skip
            step = make_step(contexts, new, heads, dim, tile, kv_dtype, dtype, poison=True)
            want, rows = reference(step, window)
            out = run(attention_of(launcher, step), step, 1, window).cpu().double()
            error = float((out - want).norm() / want.norm())
            label = f"heads {heads} d {dim} tiles {tile} window {window} {dtype} {kv_dtype} new {new}"
            print(f"{error:.1e} of {tolerance:.0e}  {label}", flush=True)
            assert error < tolerance, label
            # RoPE in float32 or float64 can round to neighbouring numbers, or codes.
            scales = None if step.scales is None else step.scales.cpu()
            assert (written(step, step.pool.cpu(), scales) - rows).norm() < 1e-3 * rows.norm(), label


def reference(step: Step, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, float64, and the rows that the step writes, by the ops on the CPU."""
    pool, dim = step.pool.cpu().clone(), step.rope.shape[1]
    rest = (1, *step.heads, window, dim**-0.5)
    qkv = step.qkv.cpu().double()
    if step.scales is None:
        return tiled_attention(qkv, pool, *step.places("cpu"), *rest), written(step, pool, None)
    scales = step.scales.cpu().clone()
    out = quantized_tiled_attention(qkv.float(), pool, scales, *step.places("cpu"), *rest, step.kv_dtype)
    return out.double(), written(step, pool, scales)


def written(step: Step, pool: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the rows, float32, that the step has to write, from a pool on the CPU."""
    found = []
    starts = step.starts.tolist()
    for row, (context, begin, end) in enumerate(zip(step.contexts.tolist(), starts, starts[1:], strict=False)):
        position = torch.arange(context, context + end - begin)
        tiles, places = step.table[row].cpu()[position // pool.shape[4]].long(), position % pool.shape[4]
        rows = pool[tiles, 1, :, :, places]
        found.append(
            rows.float() if scales is None else dequantize_kv(rows, scales[tiles, 1, :, :, places], step.kv_dtype)
        )
    return torch.cat(found)


def main() -> None:
    torch.zeros(1, device="cuda")
    check(BundleLauncher(KernelBundle.load(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
