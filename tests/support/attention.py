"""Random steps for the attention kernels, with everything poisoned that they may not read, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from sits_plugins.attention_catalogue import kernels
from sits_plugins.attention_enqueue import enqueue_attention
from sits_plugins.kernel_spec import TritonKernel
from sits_plugins.launcher import AttentionCall, attention_workspace_bytes
from torch import Tensor

from sits_trt.ops.attention import tiled_attention
from sits_trt.ops.kv_quant import dequantize_kv, quantize_kv, quantized_tiled_attention
from sits_trt.ops.rope import rope_table
from sits_trt.spec import RopeSpec
from tests.support.interpreter import interpreted

_TYPES = {
    "*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32, "*i32": torch.int32, "*i8": torch.int8,
    "*u8": torch.uint8, "*fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass
class Step:
    """One step over a pool of two layers, of which the second is used."""

    qkv: Tensor
    pool: Tensor
    scales: Tensor
    tile_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    rope: Tensor
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    window: int
    layer: int = 1

    @property
    def head_dim(self) -> int:
        return self.rope.shape[1]

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (result, pool, scales) after the step by the ops' references."""
        pool, scales = self.pool.clone(), self.scales.clone()
        given = (self.tile_table, self.context_lens, self.query_starts, self.rope, self.layer)
        rest = (self.num_heads, self.num_kv_heads, self.window, self.head_dim**-0.5)
        if self.kv_dtype == "float16":
            return tiled_attention(self.qkv.float(), pool, *given, *rest), pool, scales
        out = quantized_tiled_attention(self.qkv.float(), pool, scales, *given, *rest, self.kv_dtype)
        return out, pool, scales

    def rows(self, pool: Tensor, scales: Tensor) -> Tensor:
        """Return all K and V, float32, of sequence after sequence in this step's pool or one after it."""
        found = []
        for index, context in enumerate(self.context_lens.tolist()):
            total = context + int(self.query_starts[index + 1] - self.query_starts[index])
            used = self.tile_table[index, : -(-total // pool.shape[4])].long()
            part = pool[used, self.layer]
            if self.kv_dtype == "float16":
                values = part.float()
            else:
                values = dequantize_kv(part, scales[used, self.layer], self.kv_dtype)
            found.append(values.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :total].flatten())
        return torch.cat(found)


def random_step(
    contexts: list[int], new: list[int], heads: tuple[int, int], head_dim: int, tile_tokens: int = 64,
    kv_dtype: str = "float16", window: int = 0,
) -> Step:  # fmt: skip
    """Return a step of sequences with these lengths; tiles lie anywhere, and what no token has written is NaN."""
    lengths = [c + n for c, n in zip(contexts, new, strict=True)]
    needed = [-(-length // tile_tokens) for length in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    tiles = torch.randperm(sum(needed) + 2).int()
    for row, (count, end) in enumerate(zip(needed, accumulate(needed), strict=True)):
        table[row, :count] = tiles[end - count : end]
    num_heads, num_kv_heads = heads
    shape = (len(tiles), 2, 2, num_kv_heads, tile_tokens, head_dim)
    pool = torch.randn(shape)
    written = torch.zeros(shape[:-1], dtype=torch.bool)
    for row, context in enumerate(contexts):
        for position in range(context):
            written[table[row, position // tile_tokens].long(), :, :, :, position % tile_tokens] = True
    if kv_dtype == "float16":
        stored = pool.masked_fill(~written[..., None], float("nan")).half()
        scales = torch.zeros(1, dtype=torch.float16)
    else:
        stored, scales = quantize_kv(pool, kv_dtype)
        scales = scales.masked_fill(~written, float("nan"))
    return Step(
        qkv=torch.randn(sum(new), (num_heads + 2 * num_kv_heads) * head_dim).half(),
        pool=stored,
        scales=scales,
        tile_table=table,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32),
        rope=rope_table(RopeSpec(), head_dim, max(lengths) + 1),
        kv_dtype=kv_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=window,
    )


class InterpreterLauncher:
    """Runs a bundle's OpenAI Triton kernels in the interpreter; addresses must lie in tensors of `memory`."""

    def __init__(self, sm: int, multiprocessors: int) -> None:
        self.multiprocessors = multiprocessors
        self.launched: list[str] = []
        self.memory: list[Tensor] = []
        self._specs = {spec.name: spec for spec in kernels(sm) if _runs_interpreted(spec)}
        entries = {
            name: SimpleNamespace(name=name, constants=dict(spec.constants)) for name, spec in self._specs.items()
        }
        self.bundle: Any = SimpleNamespace(kernels=entries, kernel=entries.__getitem__)

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: dict[str, Any], stream: int) -> None:
        spec = self._specs[name]
        self.launched.append(name.rsplit("_", 1)[1])
        given = {
            key: spec.constants[key] if kind == "constexpr"
            else self._tensor(args[key], _TYPES[kind]) if kind in _TYPES
            else args[key]
            for key, kind in spec.signature.items()
        }  # fmt: skip
        module = f"sits_plugins.{spec.function.__module__.rsplit('.', 1)[1]}"
        getattr(interpreted(module), spec.function.__name__)[grid](**given)

    def zero(self, address: int, size_bytes: int, stream: int) -> None:
        self._tensor(address, torch.int32)[: size_bytes // 4] = 0

    def _tensor(self, address: int, dtype: torch.dtype) -> Tensor:
        for tensor in self.memory:
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.numel() * tensor.element_size():
                left = tensor.view(torch.uint8).flatten()[offset:]
                return left[: left.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        raise AssertionError(f"address {address} lies in no tensor of the test")


def _runs_interpreted(spec: Any) -> bool:
    return isinstance(spec, TritonKernel) and not spec.function.is_gluon()


def run_step(
    step: Step, launcher: InterpreterLauncher, arrivals: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the step's kernels in poisoned memory and return (result, pool, scales)."""

    tokens = step.qkv.shape[0]
    out = torch.full((tokens, step.num_heads * step.head_dim), float("nan"), dtype=torch.float16)
    size = attention_workspace_bytes(tokens, step.num_heads, step.num_kv_heads, step.head_dim)
    workspace = torch.full((size // 4,), float("nan"))
    pool, scales = step.pool.clone(), step.scales.clone()
    operands = [
        step.qkv,
        pool,
        scales,
        step.tile_table,
        step.context_lens,
        step.query_starts,
        step.rope,
        out,
        workspace,
    ]
    launcher.memory = operands + ([] if arrivals is None else [arrivals])
    call = AttentionCall(
        qkv=step.qkv.data_ptr(),
        kv_pool=pool.data_ptr(),
        tile_table=step.tile_table.data_ptr(),
        context_lens=step.context_lens.data_ptr(),
        query_starts=step.query_starts.data_ptr(),
        rope_table=step.rope.data_ptr(),
        out=out.data_ptr(),
        workspace=workspace.data_ptr(),
        dtype="float16",
        kv_dtype=step.kv_dtype,
        tokens=tokens,
        batch=step.tile_table.shape[0],
        num_tiles=pool.shape[0],
        tiles_per_seq=step.tile_table.shape[1],
        num_layers=pool.shape[1],
        positions=step.rope.shape[0],
        layer=step.layer,
        num_heads=step.num_heads,
        num_kv_heads=step.num_kv_heads,
        head_dim=step.head_dim,
        tile_tokens=pool.shape[4],
        window=step.window,
        scale=step.head_dim**-0.5,
        kv_scales=scales.data_ptr(),
        arrivals=0 if arrivals is None else arrivals.data_ptr(),
    )
    enqueue_attention(launcher, call, 0)
    return out, pool, scales
