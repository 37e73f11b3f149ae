"""What a step of the decoder must do at least: operations and bytes, counted from the shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sits_trt.checkpoint.expected import linear_shapes
from sits_trt.runtime.step import Step
from sits_trt.spec import ModelSpec, TileSpec, WeightFormat

RATE_SIZE = 8192
RATE_S = 0.5
"""Seconds of products before the rate is taken: a GPU that is hot is slower than one that was idle."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations (a product and its addition are two) and bytes of device memory."""

    flops: float
    moved_bytes: float

    def floor_us(self, copy_bytes_per_us: float, flops_per_us: float) -> float:
        """Return the roofline's time: the longer of moving every byte once and computing at the full rate."""
        return max(self.moved_bytes / copy_bytes_per_us, self.flops / flops_per_us)


class CostModel:
    """Costs of steps of one model whose projections are stored in `form` and whose head is in 16 bits."""

    def __init__(self, spec: ModelSpec, tile: TileSpec, form: WeightFormat) -> None:
        shapes = {name: shape for name, (shape, _) in linear_shapes(spec).items()}
        rows, columns = shapes.pop("lm_head")
        self.head_weights = rows * columns
        self.weights = sum(rows * columns for rows, columns in shapes.values())
        self.weight_bytes = sum(
            rows * columns * form.bits_per_weight(columns) / 8 for rows, columns in shapes.values()
        )  # fmt: skip
        self.kv_bytes_per_token = tile.tile_bytes / tile.tile_tokens
        self.attention_flops = 4 * spec.q_size * spec.num_layers

    def of(self, step: Step) -> Cost:
        """Return the cost of a step: each weight read once, each sequence's keys and values read or written once."""
        pairs = moved = 0.0
        for advance in step.advances:
            count = len(advance.token_ids)
            pairs += count * advance.context_len + count * (count + 1) / 2
            moved += (advance.context_len + count) * self.kv_bytes_per_token
        draws = len(step.draws)
        flops = 2 * (self.weights * step.num_tokens + self.head_weights * draws) + self.attention_flops * pairs
        head_bytes = 2 * self.head_weights if draws else 0
        return Cost(flops, moved + self.weight_bytes + head_bytes)


def cublas_flops_per_us() -> float:
    """Return the rate of large float16 products by cuBLAS on this GPU, once it is hot."""
    left, right = (torch.randn(RATE_SIZE, RATE_SIZE, device="cuda").half() for _ in range(2))
    flops, count, passed_us, spent_us = 2 * RATE_SIZE**3, 8, 0.0, 0.0
    while spent_us < RATE_S * 1e6:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        passed_us = start.elapsed_time(end) * 1000
        spent_us += passed_us
    return flops * count / passed_us
