"""Tiled attention on the GPU: `ops.tiled_attention` through the kernels of a bundle."""

from __future__ import annotations

import torch
from sits_plugins.launcher import (
    AttentionCall,
    KernelLauncher,
    attention_arrivals_bytes,
    attention_workspace_bytes,
)
from torch import Tensor

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.uint8: "int4",
}
"""Types of activations and pools as the kernels call them; a pool of uint8 holds two INT4 codes a byte."""


class KernelAttention:
    """`ops.tiled_attention` on one CUDA stream, for steps of up to `max_tokens` new tokens.

    Also `ops.kv_quant.quantized_tiled_attention`, by the type of the pool and its scales. Fit for CUDA graph capture
    once the launcher has loaded its kernels: it never waits and allocates nothing but the result. All arguments but
    qkv must have been written before the kernel before this one began.
    """

    def __init__(
        self, launcher: KernelLauncher, max_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, device: str
    ) -> None:
        self.launcher, self.num_heads, self.num_kv_heads = launcher, num_heads, num_kv_heads
        size = attention_workspace_bytes(max_tokens, num_heads, num_kv_heads, head_dim)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        arrivals = attention_arrivals_bytes(max_tokens, num_kv_heads)
        self._arrivals = torch.zeros(arrivals, dtype=torch.uint8, device=device)
        self.max_tokens, self.head_dim = max_tokens, head_dim

    def __call__(
        self,
        qkv: Tensor,
        kv_pool: Tensor,
        tile_table: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        rope_table: Tensor,
        layer: int,
        window: int,
        scale: float,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Return [tokens, num_heads * head_dim] in qkv's type; arguments as of `ops.tiled_attention`, contiguous."""
        tokens, tiles, layers = qkv.shape[0], kv_pool.shape[0], kv_pool.shape[1]
        assert tokens <= self.max_tokens, f"{tokens} tokens, but the workspace is for {self.max_tokens}"
        out = qkv.new_empty(tokens, self.num_heads * self.head_dim)
        call = AttentionCall(
            qkv=qkv.data_ptr(),
            kv_pool=kv_pool.data_ptr(),
            tile_table=tile_table.data_ptr(),
            context_lens=context_lens.data_ptr(),
            query_starts=query_starts.data_ptr(),
            rope_table=rope_table.data_ptr(),
            out=out.data_ptr(),
            workspace=self._workspace.data_ptr(),
            dtype=_NAMES[qkv.dtype],
            kv_dtype=_NAMES[kv_pool.dtype],
            tokens=tokens,
            batch=tile_table.shape[0],
            num_tiles=tiles,
            tiles_per_seq=tile_table.shape[1],
            num_layers=layers,
            positions=rope_table.shape[0],
            layer=layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tile_tokens=kv_pool.shape[4],
            window=window,
            scale=scale,
            kv_scales=0 if kv_scales is None else kv_scales.data_ptr(),
            arrivals=self._arrivals.data_ptr(),
        )
        self.launcher.tiled_attention(call, torch.cuda.current_stream().cuda_stream)
        return out
