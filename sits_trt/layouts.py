"""Orders in which 4-bit codes lie in bytes and words, as pure functions on numpy arrays.

The project's own layout ("sits") is uint8 [out, in/2]: byte (n, j) holds code (n, 2j) in its low and
code (n, 2j+1) in its high nibble, codes unsigned 0..15. "mma16" is the order of the fast kernels, made
from it once, offline. Other layouts are those of the formats that carry them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MMA16_ROWS, MMA16_COLUMNS = 16, 64
"""One piece of the mma16 layout: 16 outputs by 64 inputs, 512 bytes, one 16-byte load for each of 32 lanes."""

MMA16_SPLIT = (2, 8, 2, 4, 2, 2, 2)
"""A piece's codes by row = 8*half + g and column = 32*a + 8*t + 4*b + 2*pair + odd: half, g, a, t, b, pair, odd."""

MMA16_AXES = (1, 3, 2, 4, 6, 5, 0)
"""Their order in memory: lane 4*g + t, its word 2*a + b, and nibble 4*odd + 2*pair + half of that word.

Nibbles i and i + 4 of a word are the two halves of A register i of mma.m16n8k16, so that one mask picks a register.
"""

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
    eights = codes.reshape(codes.shape[0], -1, 8)
    words = np.zeros(eights.shape[:2], np.uint32)
    for nibble, column in enumerate(AWQ_ORDER):
        words |= eights[:, :, column].astype(np.uint32) << np.uint32(4 * nibble)
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


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack uint8 codes [rows, columns] of 4 or 8 bits into compressed-tensors' int32 [rows, ceil(columns*bits/32)].

    Each word holds 32/bits columns in order, the first in its lowest bits; columns that pad a word are 0.
    """
    padded = _padded(codes, 1, 32 // bits)
    return np.ascontiguousarray(pack_sits(padded) if bits == 4 else padded).view("<i4")


def unpack_words(words: NDArray[np.int32], bits: int, columns: int) -> NDArray[np.uint8]:
    """Undo `pack_words`: int32 [rows, ceil(columns*bits/32)] to uint8 codes [rows, columns]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return (unpack_sits(data) if bits == 4 else data)[:, :columns]


def pack_mma16(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack codes [out, in] into mma16: uint32 [ceil(out/16), ceil(in/64), 32 lanes, 4 words], padded with code 0."""
    padded = _padded(codes, MMA16_ROWS, MMA16_COLUMNS)
    blocks, pieces = padded.shape[0] // MMA16_ROWS, padded.shape[1] // MMA16_COLUMNS
    half, g, *columns = MMA16_SPLIT
    split = padded.reshape(blocks, half, g, pieces, *columns).transpose(0, 3, 1, 2, 4, 5, 6, 7, 8)
    ordered = split.transpose(0, 1, *(axis + 2 for axis in MMA16_AXES)).reshape(blocks, pieces, 32, 4, 8)
    octets = ordered[..., 0::2] | (ordered[..., 1::2] << 4)
    words: NDArray[np.uint32] = octets.view("<u4")[..., 0]
    return words


def unpack_mma16(words: NDArray[np.uint32], out_features: int, in_features: int) -> NDArray[np.uint8]:
    """Undo `pack_mma16`: uint8 codes [out_features, in_features]."""
    blocks, pieces = words.shape[:2]
    nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 0xF
    ordered = nibbles.astype(np.uint8).reshape(blocks, pieces, *(MMA16_SPLIT[axis] for axis in MMA16_AXES))
    split = ordered.transpose(0, 1, *(MMA16_AXES.index(axis) + 2 for axis in range(len(MMA16_SPLIT))))
    codes = split.transpose(0, 2, 3, 1, 4, 5, 6, 7, 8).reshape(blocks * MMA16_ROWS, pieces * MMA16_COLUMNS)
    return np.ascontiguousarray(codes[:out_features, :in_features])


def pack_mma16_groups(values: NDArray[Any], group_size: int) -> NDArray[Any]:
    """Bring scales or zero points [out, in/group_size] into mma16: [ceil(out/16), groups, 8, 2], rows g and g + 8.

    Outputs and groups of 32 inputs that pad a piece become 0.
    """
    padded = _padded(values, MMA16_ROWS, max(1, MMA16_COLUMNS // group_size))
    split = padded.reshape(-1, 2, 8, padded.shape[1])
    return np.ascontiguousarray(split.transpose(0, 3, 2, 1))


def unpack_mma16_groups(values: NDArray[Any], out_features: int, groups: int) -> NDArray[Any]:
    """Undo `pack_mma16_groups`: [out_features, groups]."""
    rows = values.transpose(0, 3, 2, 1).reshape(-1, values.shape[1])
    return np.ascontiguousarray(rows[:out_features, :groups])


def _padded(values: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Append zeros until the sides are multiples of `rows` and `columns`."""
    return np.pad(values, [(0, -values.shape[0] % rows), (0, -values.shape[1] % columns)])
