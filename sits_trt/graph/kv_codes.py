"""Rows of a coded KV pool in numpy: for each format of a SitsTiledAttention node, codes as int8 bytes and scales.

The same formulas as `ops.kv_quant`, written again, so that agreement means something.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sits_trt.spec import CODED_KV_DTYPES

Array = NDArray[Any]

_LARGEST = {"int8": 127, "float8_e4m3": 448, "int4": 7}
_LEAST_SCALE = np.float16(2.0**-14)


def encode_rows(rows: Array, kv_format: int) -> tuple[Array, Array]:
    """Return int8 codes (half as wide for INT4) and float16 scales [...] of float32 rows [..., head_dim]."""
    kind = CODED_KV_DTYPES[kv_format - 1]
    largest = np.float32(_LARGEST[kind])
    scales = np.maximum((np.abs(rows).max(axis=-1) / largest).astype(np.float16), _LEAST_SCALE)
    steps = np.clip(rows / scales.astype(np.float32)[..., None], -largest, largest)
    if kind == "float8_e4m3":
        return steps.astype(ml_dtypes.float8_e4m3fn).view(np.int8), scales
    codes = np.rint(steps).astype(np.int8)
    if kind == "int8":
        return codes, scales
    first, second = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
    return (first + 16 * second).view(np.int8), scales


def decode_rows(codes: Array, scales: Array, kv_format: int) -> Array:
    """Undo `encode_rows`: float32 [..., head_dim]."""
    kind = CODED_KV_DTYPES[kv_format - 1]
    if kind == "float8_e4m3":
        steps = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif kind == "int8":
        steps = codes.astype(np.float32)
    else:
        pairs = codes.view(np.uint8)
        steps = np.concatenate((pairs % 16, pairs // 16), axis=-1).astype(np.float32) - 8
    return steps * scales.astype(np.float32)[..., None]
