"""Memory that is freed goes back to the system at once."""

from __future__ import annotations

import ctypes

_THRESHOLD_BYTES = 8 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def return_freed_memory() -> None:
    """Let the C library map each large tensor on its own, where it is glibc's.

    By default it moves the bound up to 32 MiB as tensors are freed, and below it keeps their memory in pieces for
    later: the search then holds a fifth more than it uses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
