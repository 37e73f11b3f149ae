"""Rotary position embedding: frequencies by kind, and the table that the attention op reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sits_trt.errors import CheckpointError
from sits_trt.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, num_positions: int = 0) -> Tensor:
    """Return float32 [head_dim/2] angular frequencies per position; those of rows that are not rotated are 0.

    Sources: Su et al. 2021 (default); position interpolation, Chen et al. 2023 (linear); NTK-aware scaling by
    length (dynamic); the wavelength-banded interpolation of Llama 3.1 (llama3); YaRN, Peng et al. 2023 (yarn);
    LongRoPE, Ding et al. 2024 (longrope). The frequencies of 'dynamic' and 'longrope' depend on the length of the
    text: `num_positions`, the most positions that will be used, decides for all of them, so that keys in the cache
    agree with later queries. Raises CheckpointError for another kind.
    """
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    rotary_dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = _scaled(rope, exponents, rotary_dim, num_positions)
    return torch.cat((frequencies, torch.zeros((head_dim - rotary_dim) // 2)))


def _scaled(rope: RopeSpec, exponents: Tensor, rotary_dim: int, num_positions: int) -> Tensor:
    base = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "dynamic":
        length = max(num_positions, rope.original_max_position)
        growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        return 1.0 / (rope.theta * growth ** (rotary_dim / (rotary_dim - 2))) ** exponents
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, rotary_dim)
    if rope.kind == "longrope":
        longer = num_positions > rope.original_max_position
        return base / torch.tensor(rope.long_factor if longer else rope.short_factor)
    raise CheckpointError(f"RoPE kind '{rope.kind}' is not supported")


def _llama3(rope: RopeSpec, base: Tensor) -> Tensor:
    wavelength = 2 * math.pi / base
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    return torch.where(wavelength > longest, base / rope.factor, torch.where(wavelength < shortest, base, between))


def _yarn(rope: RopeSpec, base: Tensor, rotary_dim: int) -> Tensor:
    """Interpolate pairs that turn less than beta_slow times in the original length, keep those beyond beta_fast."""

    def pair_of(turns: float) -> float:
        return rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return base / rope.factor * interpolated + base * (1 - interpolated)


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Return float32 [num_positions, head_dim]: the cosines of a position's angles, then the sines.

    Both carry the kind's attention factor, except for rows that are not rotated (cosine 1, sine 0).
    """
    frequencies = inverse_frequencies(rope, head_dim, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    factors = torch.where(torch.arange(head_dim // 2) < (rope.rotary_dim or head_dim) // 2, rope.attention_factor, 1.0)
    return torch.cat((angles.cos() * factors, angles.sin() * factors), dim=1)


def apply_rope(x: Tensor, table_rows: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by rows [tokens, head_dim] of the RoPE table (half-split pairs)."""
    half = x.shape[-1] // 2
    cos, sin = table_rows[:, None, :half], table_rows[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
