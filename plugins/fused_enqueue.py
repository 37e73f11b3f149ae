"""Enqueue the fused small kernels. Rows are of multiples of 16, but for the sampling's, which have any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sits_plugins.kernel_spec import REALS

from sits_trt.errors import PluginError

NORM_BLOCKS = (1024, 2048, 4096, 8192, 16384)
"""Longest row of each kernel of the norm."""
SILU_BLOCK = 1024

LOGITS = {**REALS, "float32": "fp32"}
SAMPLING_BLOCK, SAMPLING_GROUP, SAMPLING_BLOCKS = 4096, 256, 128
"""Logits of a program, and of one maximum; most blocks of a row, so that 2**43 units of each weight fit 63 bits."""
SAMPLING_CAPACITY = 32768
"""Tokens of a row that are listed for top-k and top-p; with more of them every search reads the whole row."""
SAMPLING_PROGRAMS = 512
"""Programs that share a step's weights: some for each multiprocessor, and few enough to repeat little work."""
MAX_VOCAB = SAMPLING_BLOCK * SAMPLING_BLOCKS


class Launches(Protocol):
    """What `launch.BundleLauncher` offers to the rooms that enqueue kernels."""

    def launch(self, name: str, grid: tuple[int, int, int] | None, args: dict[str, Any], stream: int) -> None: ...


def norm_name(dtype: str, block: int) -> str:
    """Return the name of the norm's kernel for rows of up to `block`."""
    return f"fused_norm_{REALS[dtype]}_{block}"


def silu_name(dtype: str) -> str:
    """Return the name of the kernel of SiLU times up."""
    return f"fused_silu_{REALS[dtype]}"


def enqueue_norm(
    launcher: Launches, dtype: str, tokens: int, hidden: int, eps: float,
    residual: int, delta: int, recover: int, weight: int, out: int, stream: int,
) -> None:  # fmt: skip
    """Enqueue `fused_norm.add_norm`; addresses are byte addresses, 0 for an absent delta or recover.

    Raises PluginError for rows that are longer than every kernel's or no multiple of 16.
    """
    block = next((b for b in NORM_BLOCKS if b >= hidden), 0)
    if not block or hidden % 16:
        message = f"rows of {hidden} are not supported; use a multiple of 16 up to {NORM_BLOCKS[-1]}"
        raise PluginError(message, "kernel fused_norm")
    if tokens:
        arguments = {
            "residual": residual, "delta": delta, "recover": recover, "weight": weight, "out": out, "hidden": hidden,
            "has_delta": int(delta != 0), "has_recover": int(recover != 0), "eps": eps,
        }  # fmt: skip
        launcher.launch(norm_name(dtype, block), (tokens, 1, 1), arguments, stream)


def enqueue_silu(launcher: Launches, dtype: str, tokens: int, size: int, gate_up: int, out: int, stream: int) -> None:
    """Enqueue `fused_norm.silu_mul`. Raises PluginError for rows that are no multiple of 16."""
    if size % 16:
        raise PluginError(f"rows of {size} are not supported; use a multiple of 16", "kernel fused_silu")
    if tokens:
        grid = (-(-size // SILU_BLOCK) * tokens, 1, 1)
        launcher.launch(silu_name(dtype), grid, {"gate_up": gate_up, "out": out, "size": size}, stream)


def sampling_names(dtype: str, vocab: int) -> tuple[str, str, str]:
    """Return the names of the kernels of maxima, weights and tokens, for rows of `vocab` logits."""
    real, rows = LOGITS[dtype], "" if vocab % 16 == 0 else "_any"
    return f"fused_maxima_{real}{rows}", f"fused_weights_{real}{rows}", f"fused_tokens_{real}"


@dataclass(frozen=True)
class SamplingWorkspace:
    """Offsets in bytes of the sampling's intermediate results, and their size in all."""

    maxima: int
    best: int
    best_ids: int
    masses: int
    collected: int
    listed_weights: int
    listed_ids: int
    total: int


def sampling_workspace(rows: int, vocab: int) -> SamplingWorkspace:
    """Return where the intermediate results of `rows` rows of `vocab` logits lie."""
    groups = -(-vocab // SAMPLING_BLOCK) * (SAMPLING_BLOCK // SAMPLING_GROUP)
    offsets = [0]
    for row_bytes in (
        4 * groups, 4 * SAMPLING_BLOCKS, 4 * SAMPLING_BLOCKS, 8 * SAMPLING_BLOCKS, 4, 4 * SAMPLING_CAPACITY,
        4 * SAMPLING_CAPACITY,
    ):  # fmt: skip
        offsets.append(offsets[-1] + -(-rows * row_bytes // 256) * 256)
    return SamplingWorkspace(*offsets)


def enqueue_sampling(
    launcher: Launches, dtype: str, rows: int, vocab: int, largest_only: bool,
    logits: int, settings: int, tokens: int, workspace: int, stream: int,
) -> None:  # fmt: skip
    """Enqueue `fused_sampling`; addresses are byte addresses, the logits' a multiple of 16.

    largest_only: every row has temperature 0. workspace: of `sampling_workspace`, with any content. Raises
    PluginError for a vocabulary of more than MAX_VOCAB.
    """
    if vocab > MAX_VOCAB:
        message = f"rows of {vocab} are not supported; the longest have {MAX_VOCAB}"
        raise PluginError(message, "kernel fused_sampling")
    if not rows:
        return
    blocks = -(-vocab // SAMPLING_BLOCK)
    places = sampling_workspace(rows, vocab)
    arguments = {
        "logits": logits, "settings": settings, "tokens": tokens, "vocab": vocab, "blocks": blocks,
        "groups": blocks * (SAMPLING_BLOCK // SAMPLING_GROUP),
        **{
            name: workspace + getattr(places, name)
            for name in ("maxima", "best", "best_ids", "masses", "collected", "listed_weights", "listed_ids")
        },
    }  # fmt: skip
    maxima, weights, picked = sampling_names(dtype, vocab)
    launcher.launch(maxima, (blocks, rows, 1), arguments, stream)
    if not largest_only:
        pieces = min(blocks, max(1, SAMPLING_PROGRAMS // rows))
        launcher.launch(weights, (pieces, rows, 1), arguments, stream)
    launcher.launch(picked, (rows, 1, 1), arguments, stream)
