"""Plugin attributes: from TensorRT's field collections to plain numbers and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sits_trt.errors import PluginError

_NUMPY_TYPES: dict[str, type[np.generic]] = {"int": np.int32, "float": np.float32}


def declare_fields(trt: Any, kinds: Mapping[str, str]) -> Any:
    """Return the collection that tells the ONNX parser which attributes to pass, and their types."""
    return trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.array([], _NUMPY_TYPES[kind]), _field_type(trt, kind))
            for name, kind in kinds.items()
        ]
    )


def write_fields(trt: Any, kinds: Mapping[str, str], values: Mapping[str, float]) -> tuple[Any, list[Any]]:
    """Return the collection that is serialized into the engine, and the arrays that it points into.

    TensorRT keeps bare addresses: whoever has the collection keeps the arrays for as long as it is read.
    """
    arrays = {name: np.array([values[name]], _NUMPY_TYPES[kind]) for name, kind in kinds.items()}
    fields = [trt.PluginField(name, arrays[name], _field_type(trt, kind)) for name, kind in kinds.items()]
    return trt.PluginFieldCollection(fields), list(arrays.values())


def read_fields(plugin: str, version: str, kinds: Mapping[str, str], collection: Any) -> dict[str, Any]:
    """Return the values of a collection by name. Raises PluginError naming a field that is missing or no number."""
    found: dict[str, Any] = {}
    for field in collection:
        if field.name not in kinds:
            continue
        data = np.asarray(field.data).reshape(-1)
        if data.size != 1:
            raise PluginError(f"field '{field.name}' holds {data.size} values instead of one", plugin, version)
        found[field.name] = float(data[0]) if kinds[field.name] == "float" else int(data[0])
    missing = [name for name in kinds if name not in found]
    if missing:
        raise PluginError(
            f"the node lacks {', '.join(missing)}; the graph was made by another version: build it again",
            plugin,
            version,
        )
    return found


def _field_type(trt: Any, kind: str) -> Any:
    return {"int": trt.PluginFieldType.INT32, "float": trt.PluginFieldType.FLOAT32}[kind]
