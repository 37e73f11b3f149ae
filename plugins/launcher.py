"""The seam between whoever owns the tensors (TensorRT's plugins, the torch runner) and the kernels of a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

from sits_trt.errors import PluginError

BUNDLE_VARIABLE = "SITS_KERNEL_BUNDLE"
"""Environment variable with the directory of the kernel bundle, for processes that load an engine by themselves."""


class AttentionCall(NamedTuple):
    """One launch of tiled attention. Addresses are byte addresses on the launcher's device.

    Shapes and meaning of the operands: `contract.ATTENTION_INPUTS`; `out` is the result, `kv_scales` the float16
    scales of a quantized pool, [tiles, layers, 2, num_kv_heads, tile_tokens]. All but qkv must have been written
    before the kernel before this one began. `arrivals` is memory that this stream keeps for the purpose, of
    `attention_arrivals_bytes`, zero at first; without it the workspace serves, at the price of zeroing it each time.
    """

    qkv: int
    kv_pool: int
    tile_table: int
    context_lens: int
    query_starts: int
    rope_table: int
    out: int
    workspace: int
    dtype: str
    kv_dtype: str
    tokens: int
    batch: int
    num_tiles: int
    tiles_per_seq: int
    num_layers: int
    positions: int
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tile_tokens: int
    window: int
    scale: float
    kv_scales: int = 0
    arrivals: int = 0


class LinearCall(NamedTuple):
    """One launch of the INT4 linear. Operands: `contract.LINEAR_INPUTS`; an absent one has address 0.

    The workspace is of `linear_plan.workspace_bound`. Addresses are multiples of 16. `flags` is memory that this
    layer keeps for the purpose, of `linear_plan.flags_bytes`, zero at first, for one launch at a time; without it the
    workspace serves, at the price of zeroing it.
    """

    x: int
    qweight: int
    scales: int
    zeros: int
    bias: int
    input_scale: int
    out: int
    workspace: int
    dtype: str
    tokens: int
    in_features: int
    out_features: int
    group_size: int
    flags: int = 0


class KernelLauncher(Protocol):
    """Launches kernels on `stream` (a CUstream address, 0 for the default) and returns without waiting for them."""

    def tiled_attention(self, call: AttentionCall, stream: int) -> None: ...

    def w4a16_linear(self, call: LinearCall, stream: int) -> None: ...


PROGRAM_LIMIT = 1024
"""Most blocks of a decode launch: more than any supported GPU holds at a time; sizes the workspace."""


def attention_arrivals_bytes(tokens: int, num_kv_heads: int) -> int:
    """Return the size of the int32 counters, one a token and KV head, that tell decode's last block from the others."""
    return _aligned(tokens * num_kv_heads * 4)


def attention_workspace_bytes(tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the workspace of `KernelLauncher.tiled_attention` for up to `tokens` new tokens.

    Two partial results a block of the decode launch (float32: values, maximum and sum of each query head of one KV
    head), descriptors of the prefill launch, and the arrivals.
    """
    group = num_heads // num_kv_heads
    partials = _aligned(2 * PROGRAM_LIMIT * group * head_dim * 4) + _aligned(2 * PROGRAM_LIMIT * 2 * group * 4)
    return partials + PROGRAM_LIMIT * 128 + attention_arrivals_bytes(tokens, num_kv_heads)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


def launcher_from_environment() -> KernelLauncher:
    """Return the launcher of the bundle that SITS_KERNEL_BUNDLE names. Raises PluginError when there is none."""
    directory = os.environ.get(BUNDLE_VARIABLE, "")
    if not directory:
        raise PluginError(
            f"no kernel bundle is given; set {BUNDLE_VARIABLE} to the 'kernels' directory of the build", "kernel bundle"
        )
    return open_launcher(Path(directory))


def open_launcher(directory: Path) -> KernelLauncher:
    """Return the launcher of the kernel bundle in `directory`. Raises PluginError when it is missing or unusable."""
    try:
        from sits_plugins.bundle import KernelBundle
        from sits_plugins.launch import BundleLauncher
    except ImportError as error:
        raise PluginError(f"{error.name} is not installed; pip install 'sits-trt[gpu]'", "kernel bundle") from None
    launcher: KernelLauncher = BundleLauncher(KernelBundle.load(directory))
    return launcher
