"""Nibble orders: the words that each format is known by, and that unpacking undoes packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sits_trt.layouts import (
    AWQ_ORDER,
    pack_awq,
    pack_modelopt,
    pack_sits,
    pack_words,
    unpack_awq,
    unpack_modelopt,
    unpack_sits,
    unpack_words,
)

Codes = NDArray[np.uint8]


@st.composite
def codes(draw: st.DrawFn, rows_of: int, columns_of: int) -> Codes:
    """Random codes 0..15 with row and column counts that are multiples of the given numbers."""
    rows, columns = draw(st.integers(1, 5)) * rows_of, draw(st.integers(1, 5)) * columns_of
    values = draw(st.binary(min_size=rows * columns, max_size=rows * columns))
    return np.frombuffer(values, np.uint8).reshape(rows, columns) & 15


def test_b21_awq_word_of_ascending_columns() -> None:
    word = pack_awq(np.arange(8, dtype=np.uint8)[None, :])
    assert word.dtype == np.int32
    assert word.shape == (1, 1)
    assert word.view(np.uint32)[0, 0] == 0x75316420


def test_b21_awq_order_and_its_inverse() -> None:
    assert AWQ_ORDER == (0, 2, 4, 6, 1, 3, 5, 7)
    # Where column c lies, as readers of the format state it.
    assert [AWQ_ORDER.index(column) for column in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]
    plain = np.array([[0x76543210]], np.int32)
    np.testing.assert_array_equal(unpack_awq(plain), [[0, 4, 1, 5, 2, 6, 3, 7]])


def test_b21_awq_word_with_the_sign_bit() -> None:
    word = np.array([[0x80000000]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(unpack_awq(word), [[0, 0, 0, 0, 0, 0, 0, 8]])


def test_modelopt_byte_of_plus_three_and_minus_two() -> None:
    signed = np.array([[3], [-2]], np.int8)
    assert pack_modelopt((signed + 8).astype(np.uint8)).tolist() == [[0xE3]]


def test_words_of_ascending_codes() -> None:
    assert pack_words(np.arange(8, dtype=np.uint8)[None], 4).view(np.uint32).tolist() == [[0x76543210]]
    assert pack_words(np.array([[1, 2, 3, 0xFF]], np.uint8), 8).view(np.uint32).tolist() == [[0xFF030201]]
    assert pack_words(np.array([[9]], np.uint8), 4).tolist() == [[9]], "padded with zeros"


@given(values=codes(1, 1), bits=st.sampled_from([4, 8]))
@settings(max_examples=30, deadline=None)
def test_words_come_back(values: Codes, bits: int) -> None:
    words = pack_words(values, bits)
    assert words.shape == (values.shape[0], -(-values.shape[1] * bits // 32))
    np.testing.assert_array_equal(unpack_words(words, bits, values.shape[1]), values)


def test_sits_byte_holds_the_even_column_low() -> None:
    assert pack_sits(np.array([[0x1, 0xA, 0xF, 0x0]], np.uint8)).tolist() == [[0xA1, 0x0F]]


@settings(deadline=None)
@given(codes(rows_of=1, columns_of=2))
def test_sits_round_trip(values: Codes) -> None:
    packed = pack_sits(values)
    assert (packed.dtype, packed.shape) == (np.uint8, (values.shape[0], values.shape[1] // 2))
    np.testing.assert_array_equal(unpack_sits(packed), values)


@settings(deadline=None)
@given(codes(rows_of=1, columns_of=8))
def test_b21_awq_round_trip(values: Codes) -> None:
    packed = pack_awq(values)
    assert (packed.dtype, packed.shape) == (np.int32, (values.shape[0], values.shape[1] // 8))
    np.testing.assert_array_equal(unpack_awq(packed), values)


@settings(deadline=None)
@given(codes(rows_of=2, columns_of=1))
def test_modelopt_round_trip(values: Codes) -> None:
    packed = pack_modelopt(values)
    assert (packed.dtype, packed.shape) == (np.uint8, (values.shape[0] // 2, values.shape[1]))
    np.testing.assert_array_equal(unpack_modelopt(packed), values)


@settings(deadline=None)
@given(codes(rows_of=1, columns_of=8), st.integers(0, 2**31))
def test_b21_awq_dequantizes_to_the_fake_quantized_matrix(values: Codes, seed: int) -> None:
    """Weights [in, out] and zero points [groups, out] are packed alike; what comes back is the matrix itself."""
    rng = np.random.default_rng(seed)
    zeros = rng.integers(0, 16, (1, values.shape[1]), dtype=np.uint8)
    scales = rng.uniform(0.01, 1, (1, values.shape[1])).astype(np.float16)
    fake = (values.astype(np.float32) - zeros) * scales
    read = (unpack_awq(pack_awq(values)).astype(np.float32) - unpack_awq(pack_awq(zeros))) * scales
    np.testing.assert_array_equal(read, fake)


@pytest.mark.parametrize("pack", [pack_sits, pack_awq, pack_modelopt])
def test_packing_uses_half_a_byte_a_code(pack) -> None:
    assert pack(np.full((16, 16), 15, np.uint8)).nbytes == 128
