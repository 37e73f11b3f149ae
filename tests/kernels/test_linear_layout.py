"""The mma16 layout: what each lane finds, on numpy and torch alike, and that it multiplies to the right product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sits_trt.kernels.linear import relay_codes, relay_groups
from sits_trt.layouts import pack_mma16, pack_mma16_groups, pack_sits, unpack_mma16, unpack_mma16_groups

SHAPES = [(16, 64), (37, 160), (1, 32), (130, 576)]


def random_codes(rows, columns):
    return np.random.default_rng().integers(0, 16, (rows, columns), dtype=np.uint8)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpacking_undoes_packing(rows, columns):
    codes = random_codes(rows, columns)
    words = pack_mma16(codes)
    assert words.shape == (-(-rows // 16), -(-columns // 64), 32, 4)
    assert np.array_equal(unpack_mma16(words, rows, columns), codes)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_torch_relays_as_numpy_does(rows, columns):
    codes = random_codes(rows, columns)
    words = relay_codes(torch.from_numpy(pack_sits(codes)))
    assert np.array_equal(words.numpy().view(np.uint32), pack_mma16(codes))
    values = np.random.default_rng().random((rows, columns // 32)).astype(np.float16)
    assert np.array_equal(relay_groups(torch.from_numpy(values), 32).numpy(), pack_mma16_groups(values, 32))


def test_groups_of_32_are_padded_to_whole_pieces():
    values = np.ones((20, 3), np.float16)
    packed = pack_mma16_groups(values, 32)
    assert packed.shape == (2, 4, 8, 2)
    assert packed.sum() == 60
    assert np.array_equal(unpack_mma16_groups(packed, 20, 3), values)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_unpacking_undoes_packing_of_groups(group_size):
    values = np.random.default_rng().random((37, 640 // group_size)).astype(np.float16)
    assert np.array_equal(unpack_mma16_groups(pack_mma16_groups(values, group_size), *values.shape), values)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_fragments_multiply_to_the_linear(group):
    """Multiply as the tensor cores do, register by register, from the packed words and scales alone.

    A of mma.m16n8k16: register i of lane 4g + t holds row g + 8 (i odd) and columns 2t, 2t + 1 (+ 8 from i = 2 on)
    of the instruction's 16; B's columns are brought to the same places.
    """
    rows, columns, tokens = 32, 256, 3
    rng = np.random.default_rng()
    codes = random_codes(rows, columns)
    scales = rng.random((rows, columns // group)) + 0.5
    x = rng.standard_normal((tokens, columns))
    words, packed_scales = pack_mma16(codes), pack_mma16_groups(scales, group)
    out = np.zeros((tokens, rows))
    for block, piece, lane, word in np.ndindex(*words.shape):
        g, t = divmod(lane, 4)
        for nibble in range(8):
            register, odd = nibble % 4, nibble // 4
            half, pair = register % 2, register // 2
            # Columns 2t + odd + 8 pair of the instruction are these of the weight: eight in a row for each lane.
            column = piece * 64 + 32 * (word // 2) + 8 * t + 4 * (word % 2) + 2 * pair + odd
            scale = packed_scales[block, column // group, g, half]
            code = int(words[block, piece, lane, word] >> np.uint32(4 * nibble)) & 0xF
            out[:, block * 16 + g + 8 * half] += (code - 8) * scale * x[:, column]
    want = x @ ((codes.astype(float) - 8) * scales.repeat(group, axis=1)).T
    assert np.allclose(out, want)
