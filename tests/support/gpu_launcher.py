"""The kernels that tests on a real GPU launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sits_plugins.launcher import BUNDLE_VARIABLE, open_launcher


def gpu_launcher(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> Any:
    """Return the launcher of the bundle that SITS_KERNEL_BUNDLE names, so that tests run where no compiler is.

    Without one the `wanted` kernels are compiled into `directory` for this GPU.
    """
    if given := os.environ.get(BUNDLE_VARIABLE):
        return open_launcher(Path(given))
    from sits_plugins.compile import compile_bundle

    compile_bundle(current_sm(), directory, wanted=wanted)
    return open_launcher(directory)


def current_sm() -> int:
    """Return the SM of the current GPU: 90, ..."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
