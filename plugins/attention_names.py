"""Names of the attention kernels, and which of them a model needs. Imports no compiler."""

from __future__ import annotations

from collections.abc import Callable

from sits_plugins.kernel_spec import REALS

POOLS = {**REALS, "int8": "int8", "float8_e4m3": "fp8", "int4": "int4"}
"""Short names of the types of the pool."""

STREAM_HEAD_DIMS = (64, 128, 256)
STREAM_GROUP = 8
"""Head sizes of the CUDA C++ stream, and most query heads a KV head."""

DECODE_GROUP = 16
"""Most query heads a KV head of the OpenAI Triton decode kernel."""

STEP_TOKENS = 64
"""Keys that decode and prefill take at a time; smaller tiles need the kernels that gather several."""


def stem(dtype: str, kv_dtype: str, head_dim: int) -> str:
    """Return what the names of the kernels for these types and head size begin with."""
    return f"attention_{REALS[dtype]}_{POOLS[kv_dtype]}_d{head_dim}"


def names_for(sm: int, dtype: str, kv_dtype: str, head_dim: int, group: int, tile_tokens: int) -> tuple[str, ...]:
    """Return the names of the kernels that a model with `group` query heads a KV head may launch on `sm`."""
    begin = stem(dtype, kv_dtype, head_dim)
    spread = "_spread" if tile_tokens < STEP_TOKENS else ""
    names = [f"{begin}_append", f"{begin}_decode{spread}", f"{begin}_prefill{spread}"]
    if head_dim in STREAM_HEAD_DIMS and group <= STREAM_GROUP:
        names.append(f"{begin}_stream")
    if sm == 90 and kv_dtype in REALS and head_dim in (64, 128):
        names.append(f"{begin}_hopper{spread}")
    return tuple(names)


def needed(sm: int, dtype: str, kv_dtype: str, head_dim: int, group: int, tile_tokens: int) -> Callable[[str], bool]:
    """Return which kernels and modules a build for this model needs: all that are not another model's attention."""
    names = names_for(sm, dtype, kv_dtype, head_dim, group, tile_tokens)
    return lambda name: not name.startswith("attention_") or name in names
