"""The KV pool as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.spec import TileSpec

CODE_DTYPES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn, "int4": torch.uint8}
"""Types of the pools of `spec.CODED_KV_DTYPES`; a byte of an INT4 pool holds two codes."""

_KINDS = {dtype: kind for kind, dtype in CODE_DTYPES.items()}


def allocate_pool(tile: TileSpec, num_tiles: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Return a pool (`TileSpec.pool_shape`) and its float16 scales (`TileSpec.scales_shape`), None if it has none.

    Neither is written: attention never reads a slot that was not written, and an untouched page costs no memory.
    """
    if not tile.is_coded:
        return torch.empty(tile.pool_shape(num_tiles), dtype=getattr(torch, tile.kv_dtype), device=device), None
    pool = torch.empty(tile.pool_shape(num_tiles), dtype=CODE_DTYPES[tile.kv_dtype], device=device)
    return pool, torch.empty(tile.scales_shape(num_tiles), dtype=torch.float16, device=device)


def code_kind(pool: Tensor) -> str:
    """Return which of `spec.CODED_KV_DTYPES` a coded pool holds, by its type."""
    return _KINDS[pool.dtype]
