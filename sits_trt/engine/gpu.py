"""Which GPU this machine has, asked of the driver without any framework."""

from __future__ import annotations

import ctypes

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""


def gpu_sm() -> int | None:
    """Return the architecture of the first GPU (80, 89, ...), None where there is no driver or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(call() != 0 for call in calls):
        return None
    return major.value * 10 + minor.value
