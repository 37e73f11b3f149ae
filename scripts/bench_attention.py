"""Rows of the kernel benchmark for tiled attention, against FlashInfer, torch's attention and the copy rate.

Every launch reads another layer of the pool, so the cache holds nothing of what it reads. "alone" rows wait for the
launch before them; the others are a chain of dependent launches, as in a decoder, where each begins to fetch its keys
while the one before it ends.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace

import torch
from bench_timing import Row, graph_us
from check_attention import attention_of, check, make_step, run
from sits_plugins.launch import BundleLauncher
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, DIM = (32, 8), 128
ELEMENT_BYTES = {"float16": 2.0, "int8": 1 + 2 / DIM, "float8_e4m3": 1 + 2 / DIM, "int4": 0.5 + 2 / DIM}
"""Bytes of one element of each pool, scales included."""

flashinfer_peer = importlib.import_module("bench_flashinfer") if importlib.util.find_spec("flashinfer") else None
"""FlashInfer's timings, where it is installed."""


@dataclass(frozen=True)
class DecodeCase:
    """Sequences that decode one token each, and the layers of the pool that keep every launch cold."""

    name: str
    contexts: list[int]
    layers: int

    @property
    def elements(self) -> int:
        """Numbers that a step reads from the pool."""
        return (sum(self.contexts) + len(self.contexts)) * HEADS[1] * 2 * DIM


def bench(launcher: BundleLauncher, bandwidth: float) -> list[Row]:
    """Check every kernel, then return the rows; `bandwidth` is the copy rate in bytes a microsecond."""
    check(launcher)
    if flashinfer_peer:
        flashinfer_peer.check(HEADS, DIM)
    alone, cases = independent(launcher), decode_cases()
    rows = decode_rows(launcher, "decode", cases, bandwidth) + decode_rows(alone, "decode alone", cases, bandwidth)
    return rows + prefill_rows(launcher) + mixed_rows(launcher) + tile_rows(launcher, bandwidth)


def decode_cases() -> list[DecodeCase]:
    """Return sequences by context; the ragged ones are drawn anew at every call."""
    return [
        DecodeCase("64 x 4096", [4095] * 64, 4),
        DecodeCase("1 x 16384", [16383], 16),
        DecodeCase("1 x 4096", [4095], 32),
        DecodeCase("8 x 2048", [2047] * 8, 16),
        DecodeCase("64 x 100..8000", torch.randint(100, 8000, (64,)).tolist(), 4),
    ]


def independent(launcher: BundleLauncher) -> BundleLauncher:
    """Return a launcher of the same bundle whose launches wait for one another."""
    kernels = {name: replace(kernel, dependent=False) for name, kernel in launcher.bundle.kernels.items()}
    return BundleLauncher(replace(launcher.bundle, kernels=kernels))


def step_us(launcher: BundleLauncher, contexts: list[int], new: list[int], layers: int, **options: object) -> float:
    step = make_step(contexts, new, HEADS, DIM, layers=layers, **options)
    attention = attention_of(launcher, step)
    return graph_us(lambda i: run(attention, step, i % layers), layers)


def decode_rows(launcher: BundleLauncher, what: str, cases: list[DecodeCase], bandwidth: float) -> list[Row]:
    """Time decoding with pools of every type, and FlashInfer with a float16 pool."""
    rows = []
    for case in cases:
        peers = flashinfer_rows(what, case, bandwidth)
        rows += peers
        fp16_us = 0.0
        for kv_dtype, element_bytes in ELEMENT_BYTES.items():
            us = step_us(launcher, case.contexts, [1] * len(case.contexts), case.layers, kv_dtype=kv_dtype)
            fp16_us = fp16_us or us
            figures = {"of copy": case.elements * element_bytes / us / bandwidth, "x fp16 pool": fp16_us / us}
            if peers:
                figures["x FlashInfer fp16"] = min(peer.time_us for peer in peers) / us
            rows.append(Row(what, f"{case.name}, {kv_dtype}", us, dict(figures)))
    return rows


def flashinfer_rows(what: str, case: DecodeCase, bandwidth: float) -> list[Row]:
    """Time FlashInfer's two kernels for decoding, its launches as dependent as ours; no rows where it is absent."""
    if flashinfer_peer is None:
        return []
    rows = []
    for name, tensor_cores in (("tensor cores", True), ("CUDA cores", False)):
        lengths = [context + 1 for context in case.contexts]
        us = flashinfer_peer.decode_us(lengths, HEADS, DIM, case.layers, tensor_cores, dependent=what == "decode")
        share = case.elements * ELEMENT_BYTES["float16"] / us / bandwidth
        rows.append(Row(f"FlashInfer {what}", f"{case.name}, float16, {name}", us, {"of copy": share}))
    return rows


def prefill_rows(launcher: BundleLauncher) -> list[Row]:
    """Time causal prefill of one sequence: our whole op, RoPE and append included, and the peers' attention alone."""
    rows = []
    for tokens in (1024, 4096, 8192, 16384):
        flops, peers = 4 * tokens * tokens / 2 * HEADS[0] * DIM, prefill_peers_us(tokens)
        for name, us in peers.items():
            rows.append(Row(name, f"{tokens} tokens", us, {"TFLOP/s": flops / us / 1e6}))
        us = step_us(launcher, [0], [tokens], 2)
        against = {f"x {name}": peer_us / us for name, peer_us in peers.items()}
        rows.append(Row("prefill", f"{tokens} tokens", us, {"TFLOP/s": flops / us / 1e6, **against}))
    return rows


def prefill_peers_us(tokens: int) -> dict[str, float]:
    """Return the microseconds of every peer by its name."""
    peers = {
        "torch FA2": torch_us(tokens, SDPBackend.FLASH_ATTENTION),
        "torch cuDNN": torch_us(tokens, SDPBackend.CUDNN_ATTENTION),
    }
    if flashinfer_peer:
        peers["FlashInfer FA3"] = flashinfer_peer.prefill_us(tokens, HEADS, DIM, 4)
        peers["FlashInfer FA3 paged"] = flashinfer_peer.paged_prefill_us(tokens, HEADS, DIM, 4)
    return peers


def torch_us(tokens: int, backend: SDPBackend) -> float:
    def inputs() -> Tensor:
        return torch.randn(1, HEADS[0], tokens, DIM, device="cuda").half()

    q, k, v = inputs(), inputs(), inputs()
    with sdpa_kernel(backend):
        return graph_us(lambda _: scaled_dot_product_attention(q, k, v, is_causal=True), 4)


def mixed_rows(launcher: BundleLauncher) -> list[Row]:
    """Time a step of 32 decoding sequences and one chunk of 2048 tokens, beside its parts."""
    return [
        Row("mixed step", name, step_us(launcher, contexts, new, 4))
        for name, contexts, new in (
            ("chunk of 2048 at 4096", [4096], [2048]),
            ("32 x 4096 decode", [4095] * 32, [1] * 32),
            ("both", [4095] * 32 + [4096], [1] * 32 + [2048]),
        )
    ]


def tile_rows(launcher: BundleLauncher, bandwidth: float) -> list[Row]:
    """Time tile sizes in decoding and in prefill."""
    rows = []
    for tile in (16, 32, 64, 128):
        us = step_us(launcher, [4095] * 64, [1] * 64, 4, tile=tile)
        share = 64 * 4096 * HEADS[1] * 2 * DIM * 2 / us / bandwidth
        rows.append(Row(f"tiles of {tile}", "decode 64 x 4096", us, {"of copy": share}))
        rows.append(Row(f"tiles of {tile}", "prefill 8192 tokens", step_us(launcher, [0], [8192], 2, tile=tile)))
    return rows
