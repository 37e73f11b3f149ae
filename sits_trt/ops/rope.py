"""Rotary position embedding: frequencies by kind, and the table that the attention op reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sits_trt.errors import CheckpointError
from sits_trt.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return float32 [head_dim/2] angular frequencies per position.

    Sources: Su et al. 2021 (default); position interpolation, Chen et al. 2023 (linear); the
    wavelength-banded interpolation of Llama 3.1 (llama3). Raises CheckpointError for another kind.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        longest = rope.original_max_position / rope.low_freq_factor
        shortest = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - smooth) * base / rope.factor + smooth * base
        return torch.where(wavelength > longest, base / rope.factor, torch.where(wavelength < shortest, base, between))
    raise CheckpointError(f"RoPE kind '{rope.kind}' is not supported; supported: default, linear, llama3")


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Return float32 [num_positions, head_dim]: the cosines of a position's angles, then the sines."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def apply_rope(x: Tensor, table_rows: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by rows [tokens, head_dim] of the RoPE table (half-split pairs)."""
    half = x.shape[-1] // 2
    cos, sin = table_rows[:, None, :half], table_rows[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
