"""Tensor maps: how a kernel's copy engine finds boxes of a matrix in global memory, on SM 90 and later."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from cuda.bindings import driver as cuda
from sits_plugins.kernel_spec import ARGUMENT_BYTES

from sits_trt.errors import PluginError

BOX_COLUMNS = 64
"""Columns of a box of 16-bit numbers: 128 bytes, the width of the swizzle that wgmma reads without conflicts."""


class MatrixMap(NamedTuple):
    """Boxes of `box_rows` rows and 64 columns of a row-major 16-bit matrix at a byte address, in 128-byte swizzle."""

    address: int
    rows: int
    columns: int
    box_rows: int


@lru_cache(maxsize=4096)
def encoded(matrix: MatrixMap) -> bytes:
    """Return the 128 bytes that the driver makes for `matrix`.

    Raises PluginError when the driver refuses: an address or a row's length that is no multiple of 16 bytes.
    """
    kinds = cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16
    status, found = cuda.cuTensorMapEncodeTiled(
        kinds,
        2,
        matrix.address,
        [cuda.cuuint64_t(matrix.columns), cuda.cuuint64_t(matrix.rows)],
        [cuda.cuuint64_t(matrix.columns * 2)],
        [cuda.cuuint32_t(BOX_COLUMNS), cuda.cuuint32_t(matrix.box_rows)],
        [cuda.cuuint32_t(1), cuda.cuuint32_t(1)],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise PluginError(f"no tensor map for {matrix}: {status.name}", "CUDA driver")
    return ctypes.string_at(int(found.getPtr()), ARGUMENT_BYTES["tensor_map"])
