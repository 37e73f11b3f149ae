"""Rows of the kernel benchmark for the INT4 linear, against cuBLAS float16 and torch's int4 tinygemm."""

from __future__ import annotations

from itertools import pairwise

import torch
from bench_timing import Row, graph_us, graphs_us, rotation
from sits_plugins.linear_enqueue import Launches
from torch import Tensor

from sits_trt.kernels.linear import KernelLinear
from sits_trt.models.linear import W4A16Linear

GROUP = 128
LLAMA_3_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
DECODE_TOKENS = (2, 4, 8, 16, 17, 24, 32, 48, 64)
UNEVEN_TOKENS = (
    1, 2, 3, 5, 8, 11, 16, 17, 23, 32, 41, 56, 64, 65, 90, 128, 150, 192, 256, 300, 384, 512, 700, 1024, 1500, 2048,
    3000, 4096,
)  # fmt: skip


def random_layer(rows: int, columns: int) -> W4A16Linear:
    """Return a symmetric INT4 layer with random codes and scales, on the GPU."""
    qweight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(rows, columns // GROUP, device="cuda") * 0.01 + 0.001).half()
    return W4A16Linear(qweight, scales, None, None, None, GROUP)


def int4_bytes(rows: int, columns: int) -> float:
    """Return the bytes of a symmetric INT4 weight, scales included."""
    return rows * columns * (0.5 + 2 / GROUP)


def inputs(tokens: int, columns: int) -> Tensor:
    """Return activations, one set for all weights: who made them just left them in the L2, if it is large."""
    return torch.randn(tokens, columns, device="cuda").half()


class Peers:
    """One weight shape with everything that multiplies by it; each over its own rotating buffers."""

    def __init__(self, rows: int, columns: int, launcher: Launches) -> None:
        self.rows, self.columns = rows, columns
        self.ours = [
            KernelLinear(random_layer(rows, columns), torch.float16, launcher)
            for _ in range(rotation(int4_bytes(rows, columns)))
        ]
        self.dense = [
            torch.randn(rows, columns, device="cuda").half() for _ in range(rotation(2 * rows * columns))
        ]  # fmt: skip

    def ours_and_cublas_us(self, tokens: int) -> tuple[float, float]:
        x = inputs(tokens, self.columns)
        ours, cublas = graphs_us(
            [
                (lambda i: self.ours[i](x), len(self.ours)),
                (lambda i: torch.mm(x, self.dense[i].t()), len(self.dense)),
            ]
        )
        return ours, cublas

    def tinygemm_us(self, tokens: int) -> float:
        sets = rotation(int4_bytes(self.rows, self.columns))
        shape = (self.rows, self.columns // 2)
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(
                torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda"), 8
            )
            for _ in range(sets)
        ]
        scales = torch.randn(self.columns // GROUP, self.rows, 2, device="cuda").bfloat16()
        x = torch.randn(tokens, self.columns, device="cuda").bfloat16()
        return graph_us(lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i], GROUP, scales), sets)


def bench(launcher: Launches, copy_bytes_per_us: float) -> list[Row]:
    """Return the rows of the issue's table: one token, few tokens, uneven steps."""
    rows: list[Row] = []
    for size in (*LLAMA_3_8B, (8192, 8192)):
        peers = Peers(*size, launcher)
        rows += _one_token(peers, copy_bytes_per_us)
        if size in LLAMA_3_8B:
            rows += [_against_cublas("few tokens", peers, tokens) for tokens in DECODE_TOKENS]
            uneven = [_against_cublas("uneven steps", peers, tokens) for tokens in UNEVEN_TOKENS]
            _compare_neighbours(uneven, peers, copy_bytes_per_us)
            rows += uneven
        del peers
        torch.cuda.empty_cache()
    return rows


def _settings(peers: Peers, tokens: int) -> str:
    return f"{peers.rows}x{peers.columns} M={tokens}"


def _one_token(peers: Peers, copy_bytes_per_us: float) -> list[Row]:
    found = []
    for tokens in (1, 16):
        (ours, cublas), tinygemm = peers.ours_and_cublas_us(tokens), peers.tinygemm_us(tokens)
        bandwidth = int4_bytes(peers.rows, peers.columns) / ours / copy_bytes_per_us
        figures: dict[str, float | str] = {
            "of copy bandwidth": bandwidth, "x cuBLAS": cublas / ours, "x tinygemm": tinygemm / ours,
            "cuBLAS us": cublas, "tinygemm us": tinygemm,
        }  # fmt: skip
        found.append(Row("W4A16 g128", _settings(peers, tokens), ours, figures))
    return found


def _against_cublas(what: str, peers: Peers, tokens: int) -> Row:
    ours, cublas = peers.ours_and_cublas_us(tokens)
    tflops = 2 * tokens * peers.rows * peers.columns / ours / 1e6
    figures: dict[str, float | str] = {"x cuBLAS": cublas / ours, "cuBLAS us": cublas, "TFLOP/s": tflops}
    return Row(f"W4A16 g128, {what}", _settings(peers, tokens), ours, figures)


def _compare_neighbours(rows: list[Row], peers: Peers, copy_bytes_per_us: float) -> None:
    """Add each point's share of its roofline, and what a cliff would show in: both figures are 1 or more without one.

    The roofline is the larger of two times: every byte once at copy bandwidth, and the products at the best rate
    that cuBLAS reached in these rows. 'tokens/s / fewer': this point's tokens a second over those of the neighbour with
    fewer tokens. 'more / time': the time of the neighbour with more tokens over this point's.
    """
    rate = max(float(row.figures["TFLOP/s"]) / float(row.figures["x cuBLAS"]) for row in rows)
    for row, tokens in zip(rows, UNEVEN_TOKENS, strict=True):
        moved = int4_bytes(peers.rows, peers.columns) + 2 * tokens * (peers.rows + peers.columns)
        floor = max(moved / copy_bytes_per_us, 2 * tokens * peers.rows * peers.columns / rate / 1e6)
        row.figures["of roofline"] = floor / row.time_us
    points = list(zip(rows, UNEVEN_TOKENS, strict=True))
    for (fewer, few), (more, many) in pairwise(points):
        more.figures["tokens/s / fewer"] = many / more.time_us / (few / fewer.time_us)
        fewer.figures["more / time"] = more.time_us / fewer.time_us
