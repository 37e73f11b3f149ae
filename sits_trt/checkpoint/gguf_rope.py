"""RoPE scaling in GGUF files: named in the metadata, or (Llama 3.1 and later) only as a tensor of divisors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt.errors import CheckpointError

DIVISORS = "rope_freqs.weight"
"""Tensor that divides each rotary frequency."""

_LOW, _HIGH = 1.0, 4.0
_ORIGINAL_LENGTHS = (8192, 4096, 2048, 16384, 32768)
"""What the llama3 settings can be: all published models use the first length; the file keeps only their result."""

_TOLERANCE = 1e-3


def llama3_settings(divisors: NDArray[np.float32], theta: float, where: str) -> dict[str, Any]:
    """Return the Hugging Face `rope_scaling` whose frequencies `divisors` [head_dim/2] describe.

    Raises CheckpointError when no llama3 setting does.
    """
    factor = float(divisors.max())
    for original in _ORIGINAL_LENGTHS:
        expected = _llama3_divisors(len(divisors), theta, factor, original)
        if np.allclose(divisors, expected, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(f"{where} scales its rotary frequencies in a way that is not known", DIVISORS)


def _llama3_divisors(count: int, theta: float, factor: float, original: int) -> NDArray[np.float64]:
    """Return what each frequency is divided by: 1 for short waves, `factor` for long ones, smoothly between."""
    wavelength = 2 * np.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((original / wavelength - _LOW) / (_HIGH - _LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
