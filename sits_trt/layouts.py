"""Orders in which 4-bit codes lie in bytes and words, as pure functions on numpy arrays.

The project's own layout ("sits") is uint8 [out, in/2]: byte (n, j) holds code (n, 2j) in its low and
code (n, 2j+1) in its high nibble, codes unsigned 0..15. Other layouts are those of the formats that
carry them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ GEMM: nibble i of an int32 (low first) holds output column AWQ_ORDER[i] of each eight."""


def pack_sits(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack uint8 codes [out, in], each 0..15, into uint8 [out, in/2]. `in` must be even."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def unpack_sits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack uint8 [out, in/2] into uint8 codes [out, in]."""
    out = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    out[:, 0::2] = packed & 0xF
    out[:, 1::2] = packed >> 4
    return out


def pack_awq(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack uint8 codes [rows, out], each 0..15, into int32 [rows, out/8] in AutoAWQ's GEMM order.

    Weights use rows = in, zero points rows = in/group. `out` must be a multiple of 8.
    """
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for nibble, column in enumerate(AWQ_ORDER):
        words |= eights[:, :, column] << np.uint32(4 * nibble)
    return words.view(np.int32)


def unpack_awq(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Undo `pack_awq`: int32 [rows, out/8] to uint8 codes [rows, out]."""
    unsigned = words.view(np.uint32)
    out = np.empty((*words.shape, 8), np.uint8)
    for nibble, column in enumerate(AWQ_ORDER):
        out[:, :, column] = (unsigned >> np.uint32(4 * nibble)) & 0xF
    return out.reshape(words.shape[0], -1)


def pack_modelopt(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack symmetric codes [out, in] (unsigned, zero point 8) into ModelOpt's uint8 [out/2, in].

    Byte (j, c) holds the signed code of row 2j in its low and of row 2j+1 in its high nibble.
    """
    signed = (codes ^ 8) & 0xF
    return (signed[0::2] | (signed[1::2] << 4)).astype(np.uint8)


def unpack_modelopt(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo `pack_modelopt`: uint8 [out/2, in] to unsigned codes [out, in] with zero point 8."""
    out = np.empty((packed.shape[0] * 2, packed.shape[1]), np.uint8)
    out[0::2] = (packed & 0xF) ^ 8
    out[1::2] = (packed >> 4) ^ 8
    return out
