"""The seam between whoever owns the tensors (TensorRT's plugins, the torch runner) and the kernels of a bundle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sits_trt.errors import PluginError

BUNDLE_VARIABLE = "SITS_KERNEL_BUNDLE"
"""Environment variable with the directory of the kernel bundle, for processes that load an engine by themselves."""

SPLIT_LIMIT = 32
"""Most parts that one sequence's context is split into while decoding; sizes the workspace."""


@dataclass(frozen=True)
class AttentionCall:
    """One launch of tiled attention. Addresses are byte addresses on the launcher's device.

    Shapes and meaning of the operands: `contract.ATTENTION_INPUTS`; `out` is the result.
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


@dataclass(frozen=True)
class LinearCall:
    """One launch of the INT4 linear. Operands: `contract.LINEAR_INPUTS`; an absent one has address 0."""

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


class KernelLauncher(Protocol):
    """Launches kernels on `stream` (a CUstream address, 0 for the default) and returns without waiting for them."""

    def tiled_attention(self, call: AttentionCall, stream: int) -> None: ...

    def w4a16_linear(self, call: LinearCall, stream: int) -> None: ...


def attention_workspace_bytes(batch: int, num_heads: int, head_dim: int) -> int:
    """Return the workspace of `KernelLauncher.tiled_attention`: float32 partial results of split decoding.

    For each sequence, head and part: a running maximum, a sum, and head_dim weighted values.
    """
    return batch * num_heads * SPLIT_LIMIT * (head_dim + 2) * 4


def linear_workspace_bytes(tokens: int, in_features: int, out_features: int) -> int:
    """Return the workspace of `KernelLauncher.w4a16_linear` for up to `tokens` tokens."""
    return 0


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
