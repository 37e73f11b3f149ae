"""Which program quantized a checkpoint, and what that makes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sits_trt.checkpoint.formats import autoawq, compressed_tensors, modelopt
from sits_trt.checkpoint.formats.foreign import Foreign
from sits_trt.checkpoint.text_part import TensorFiles
from sits_trt.errors import CheckpointError

KEY = "quantization_config"
Read = Callable[[Mapping[str, Any], Path, TensorFiles], Foreign]

READERS: Mapping[str, Read] = {
    "awq": autoawq.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
}
"""`quant_method` of config.json to the function that reads such a checkpoint."""


def read_foreign(config: Mapping[str, Any], directory: Path, files: TensorFiles) -> Foreign | None:
    """Return what another program quantized, None when nothing is quantized.

    Raises CheckpointError, naming the method, for one that is not read.
    """
    settings = config.get(KEY)
    if not settings:
        has_side_file = (directory / modelopt.FILE_NAME).is_file()
        return modelopt.read({}, directory, files) if has_side_file else None
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in READERS:
        raise CheckpointError(
            f"the weights are already quantized (config key '{KEY}', method '{method}'); methods that are read: "
            f"{', '.join(READERS)}; give the checkpoint in float16, bfloat16 or float32"
        )
    found = READERS[method](settings, directory, files)
    if not found.formats:
        raise CheckpointError(
            f"config.json of {directory} says that the weights are quantized by '{method}', but no tensor is; "
            f"remove '{KEY}' from it if that is so"
        )
    return found
