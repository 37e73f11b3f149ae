"""Enqueue tiled attention: choose its kernels by the types and the shape of the step, and launch them.

A step with no more tokens than sequences is decoding: one launch does everything, whatever the sequences' lengths.
Another step is mixed: its sequences of one new token are decoded, keys and values of the others are appended, and
their tokens attend in blocks. Lengths are on the device and are not looked at here.
"""

from __future__ import annotations

from typing import Any, Protocol

from sits_plugins.attention_names import DECODE_GROUP, STEP_TOKENS, STREAM_GROUP, stem
from sits_plugins.bundle import KernelBundle
from sits_plugins.launcher import PROGRAM_LIMIT, AttentionCall, attention_arrivals_bytes

from sits_trt.errors import PluginError

ANY_NUMBER = 2**31 - 1
UNITS_PER_PROGRAM = 8
"""Units of 64 keys that a block should have before a multiprocessor is given a second one."""
HOPPER_ROWS = 128
"""Rows of a block of the prefill kernel for SM 9.0."""


class Launches(Protocol):
    """What `launch.BundleLauncher` offers to the rooms that enqueue kernels."""

    bundle: KernelBundle
    multiprocessors: int

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: dict[str, Any], stream: int) -> None: ...

    def zero(self, address: int, size_bytes: int, stream: int) -> None: ...


def enqueue_attention(launcher: Launches, call: AttentionCall, stream: int) -> None:
    """Enqueue RoPE, append and attention of one layer. Raises PluginError for a shape that no kernel has."""
    if call.tokens == 0:
        return
    names = _choose(launcher, call)
    mixed = call.tokens > call.batch
    arguments = _arguments(call, decode_limit=1 if mixed else ANY_NUMBER)
    if mixed:
        append = launcher.bundle.kernel(names["append"])
        grid = (-(-call.tokens // append.constants["BLOCK_T"]), call.num_kv_heads, 1)
        launcher.launch(append.name, grid, arguments, stream)
        _enqueue_prefill(launcher, names["prefill"], call, arguments, stream)
    if not mixed or call.batch > 1:
        if not call.arrivals:
            launcher.zero(arguments["arrivals"], attention_arrivals_bytes(call.tokens, call.num_kv_heads), stream)
        launcher.launch(names["decode"], (_programs(launcher, names["decode"], call), 1, 1), arguments, stream)


def _choose(launcher: Launches, call: AttentionCall) -> dict[str, str]:
    """Return the names of the kernels for append, prefill and decode."""
    group, begin = call.num_heads // call.num_kv_heads, stem(call.dtype, call.kv_dtype, call.head_dim)
    if call.num_heads % call.num_kv_heads or group > DECODE_GROUP:
        raise PluginError(
            f"{call.num_heads} query heads for {call.num_kv_heads} KV heads are not supported; a KV head may have 1 to "
            f"{DECODE_GROUP} of them",
            "kernel attention",
        )
    if call.tile_tokens & (call.tile_tokens - 1):
        raise PluginError(
            f"tiles of {call.tile_tokens} tokens are not supported; use 16, 32, 64 or 128", "kernel attention"
        )
    known, spread = launcher.bundle.kernels, "_spread" if call.tile_tokens < STEP_TOKENS else ""
    stream = f"{begin}_stream" in known and group <= STREAM_GROUP
    hopper = f"{begin}_hopper{spread}" in known
    return {
        "append": f"{begin}_append",
        "prefill": f"{begin}_hopper{spread}" if hopper else f"{begin}_prefill{spread}",
        "decode": f"{begin}_stream" if stream else f"{begin}_decode{spread}",
    }


def _arguments(call: AttentionCall, decode_limit: int) -> dict[str, Any]:
    """Return the arguments of all the kernels by name; the workspace is cut as `attention_workspace_bytes` counts."""
    group = call.num_heads // call.num_kv_heads
    partial_stats = call.workspace + _aligned(2 * PROGRAM_LIMIT * group * call.head_dim * 4)
    scratch = partial_stats + _aligned(2 * PROGRAM_LIMIT * 2 * group * 4)
    return {
        "qkv": call.qkv,
        "out": call.out,
        "pool": call.kv_pool,
        "pool_scales": call.kv_scales,
        "tile_table": call.tile_table,
        "context_lens": call.context_lens,
        "query_starts": call.query_starts,
        "rope_table": call.rope_table,
        "partial_out": call.workspace,
        "partial_stats": partial_stats,
        "scratch": scratch,
        "arrivals": call.arrivals or scratch + PROGRAM_LIMIT * 128,
        "tokens": call.tokens,
        "batch": call.batch,
        "num_tiles": call.num_tiles,
        "table_width": call.tiles_per_seq,
        "num_layers": call.num_layers,
        "layer": call.layer,
        "kv_heads": call.num_kv_heads,
        "group": group,
        "tile_shift": call.tile_tokens.bit_length() - 1,
        "window": call.window,
        "decode_limit": decode_limit,
        "softmax_scale": call.scale,
    }


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


def _enqueue_prefill(
    launcher: Launches, name: str, call: AttentionCall, arguments: dict[str, Any], stream: int
) -> None:
    group, kernel = call.num_heads // call.num_kv_heads, launcher.bundle.kernel(name)
    rows = kernel.constants.get("BLOCK_M", HOPPER_ROWS)
    blocks = call.tokens // (rows // group) + call.batch
    if "BLOCK_M" not in kernel.constants:
        grid = (min(launcher.multiprocessors, blocks * call.num_kv_heads, PROGRAM_LIMIT), 1, 1)
    else:
        grid = (call.num_kv_heads, blocks, 1)
    launcher.launch(name, grid, arguments, stream)


def _programs(launcher: Launches, name: str, call: AttentionCall) -> int:
    """Return the blocks of a decode launch: what the GPU holds at a time, fewer when there is little to do."""
    resident = launcher.bundle.kernel(name).constants.get("BLOCKS", 2)
    units = call.batch * call.num_kv_heads * -(-call.tiles_per_seq * call.tile_tokens // STEP_TOKENS)
    busy = launcher.multiprocessors * min(resident, max(1, units // (UNITS_PER_PROGRAM * launcher.multiprocessors)))
    return min(busy, units, PROGRAM_LIMIT)
