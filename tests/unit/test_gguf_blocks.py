"""GGUF's quantized types against the definition of their blocks, number by number: ggml-quants.c of llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from sits_trt.checkpoint.gguf_file import GgufFile

Block = Callable[[bytes], list[float]]


def half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def q4_0(b: bytes) -> list[float]:
    d = half(b[:2])
    return [d * ((q & 15) - 8) for q in b[2:]] + [d * ((q >> 4) - 8) for q in b[2:]]


def q4_1(b: bytes) -> list[float]:
    d, least = half(b[:2]), half(b[2:4])
    return [d * (q & 15) + least for q in b[4:]] + [d * (q >> 4) + least for q in b[4:]]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in struct.unpack("<32b", b[2:])]


def scale_and_least(packed: bytes, sub_block: int) -> tuple[int, int]:
    """Return the 6-bit scale and minimum of one of eight blocks of 32 inside a K block."""
    j = sub_block
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4


def k_block(b: bytes, codes: Callable[[int, int], int]) -> list[float]:
    d, least = half(b[:2]), half(b[2:4])
    values = []
    for sub_block in range(8):
        scale, minimum = scale_and_least(b[4:16], sub_block)
        values += [d * scale * codes(sub_block, i) - least * minimum for i in range(32)]
    return values


def nibble(codes: bytes, sub_block: int, i: int) -> int:
    return codes[32 * (sub_block // 2) + i] >> 4 * (sub_block % 2) & 15


def q4_k(b: bytes) -> list[float]:
    return k_block(b, lambda sub_block, i: nibble(b[16:], sub_block, i))


def q5_k(b: bytes) -> list[float]:
    high, low = b[16:48], b[48:]
    return k_block(b, lambda sub_block, i: nibble(low, sub_block, i) + 16 * (high[i] >> sub_block & 1))


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b[208:])
    values = []
    for part in range(2):
        for quarter in range(4):
            for i in range(32):
                four = low[64 * part + 32 * (quarter % 2) + i] >> 4 * (quarter // 2) & 15
                code = four | (high[32 * part + i] >> 2 * quarter & 3) << 4
                values.append(d * scales[8 * part + 2 * quarter + i // 16] * (code - 32))
    return values


def bf16(b: bytes) -> list[float]:
    return [float(struct.unpack("<f", b"\0\0" + b)[0])]


TYPES: dict[str, tuple[Block, tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q8_0": (q8_0, (0,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    "BF16": (bf16, ()),
}
"""Type to the values of one block, and where its half-precision numbers lie."""


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_that_the_block_defines(kind: str, tmp_path: Path) -> None:
    block, halves = TYPES[kind]
    ggml = gguf.GGMLQuantizationType[kind]
    length, size = gguf.GGML_QUANT_SIZES[ggml]
    rng = np.random.default_rng(7)
    rows, blocks = 3, 2 if length > 1 else 40
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in halves:
        data[..., at : at + 2] = rng.uniform(-0.1, 0.1, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    if kind == "BF16":
        data[..., 1] = 0x3F
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("weight", data.reshape(rows, -1), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "m.gguf").read("weight")
    expected = [[value for part in row for value in block(part.tobytes())] for row in data]
    assert found.shape == (rows, blocks * length)
    # The package multiplies in float32, the definition above in float64.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
