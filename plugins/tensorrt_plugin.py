"""What the TensorRT plugins share: one IPluginV3 and one creator, made for whichever TensorRT flavour is given.

The flavours (`tensorrt`, `tensorrt_rtx`, `tensorrt_rtx_bindings`) are modules with the same names in them, so
classes are made by functions that take the module.

In Python TensorRT reads no status from `enqueue`: an exception is what makes it report a failed launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sits_plugins.launcher import KernelLauncher, launcher_from_environment
from sits_plugins.tensorrt_fields import declare_fields, read_fields, write_fields

from sits_trt import contract
from sits_trt.contract import PluginInput, present_inputs
from sits_trt.errors import PluginError

_log = logging.getLogger(__name__)

LauncherSource = Callable[[], KernelLauncher]

_ACTIVATIONS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Operand:
    """One input or output as it is at enqueue time."""

    shape: tuple[int, ...]
    dtype: str
    address: int = 0


Operands = Mapping[str, Operand]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class PluginDefinition:
    """What tells one plugin from another. Operands are keyed by input name, the result by 'out'.

    `check` raises PluginError where shapes do not fit the fields; `launch` starts the kernels.
    """

    name: str
    inputs: tuple[PluginInput, ...]
    fields: Mapping[str, str]
    output_shape: Callable[[Any, Fields, Mapping[str, Any]], list[Any]]
    check: Callable[[Fields, Operands], None]
    workspace_bytes: Callable[[Fields, Operands], int]
    launch: Callable[[KernelLauncher, Fields, Operands, int, int], None]


def plugin_classes(
    trt: Any, definition: PluginDefinition, find_launcher: LauncherSource = launcher_from_environment
) -> tuple[type, type]:
    """Return (plugin class, creator class) of `definition` for TensorRT module `trt`.

    `find_launcher` is called at the first enqueue of a plugin, never while building.
    """
    name, version, namespace = definition.name, contract.PLUGIN_VERSION, contract.ONNX_DOMAIN
    dtype_names = {
        getattr(trt, ours): ours for ours in ("float32", "float16", "bfloat16", "int8", "int32") if hasattr(trt, ours)
    }

    def operands(fields: Fields, descriptions: Sequence[Any], addresses: Sequence[int] | None = None) -> Operands:
        names = [i.name for i in present_inputs(definition.inputs, fields)] + ["out"]
        if len(descriptions) != len(names):
            raise PluginError(f"{len(descriptions)} operands given, {len(names)} expected ({names})", name, version)
        places = addresses or [0] * len(names)
        return {
            key: Operand(tuple(d.dims), dtype_names.get(d.type, str(d.type)), int(place))
            for key, d, place in zip(names, descriptions, places, strict=True)
        }

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        def __init__(self, fields: Fields) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name = name
            self.plugin_version = version
            self.plugin_namespace = namespace
            self.num_outputs = 1
            self.fields = dict(fields)
            self.inputs = present_inputs(definition.inputs, fields)
            self.launcher: KernelLauncher | None = None
            self._serialized: Any = None

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.fields)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            return [input_types[0]]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], build: Any) -> list[Any]:
            by_name = {i.name: dims for i, dims in zip(self.inputs, inputs, strict=True)}
            dims = definition.output_shape(build, self.fields, by_name)
            shape = trt.DimsExprs(len(dims))
            for axis, extent in enumerate(dims):
                shape[axis] = extent
            return [shape]

        def supports_format_combination(self, position: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            description = in_out[position].desc
            if description.format != trt.TensorFormat.LINEAR or num_inputs != len(self.inputs):
                return False
            found = dtype_names.get(description.type)
            wanted = self.inputs[position].dtype if position < num_inputs else "activation"
            if wanted != "activation":
                return bool(found == wanted)
            return found in _ACTIVATIONS and bool(description.type == in_out[0].desc.type)

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            return

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            names = [i.name for i in self.inputs]
            largest = {
                key: Operand(tuple(d.max), dtype_names.get(d.desc.type, str(d.desc.type)))
                for key, d in zip(names, inputs, strict=True)
            }
            return definition.workspace_bytes(self.fields, largest)

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            definition.check(self.fields, operands(self.fields, [*inputs, *outputs]))

        def get_fields_to_serialize(self) -> Any:
            # Kept on the object, arrays and all: TensorRT reads them after this call has returned.
            self._serialized = write_fields(trt, definition.fields, self.fields)
            return self._serialized[0]

        def enqueue(
            self, input_desc: Sequence[Any], output_desc: Sequence[Any], inputs: Sequence[int],
            outputs: Sequence[int], workspace: int, stream: int,
        ) -> None:  # fmt: skip
            try:
                if self.launcher is None:
                    self.launcher = find_launcher()
                call = operands(self.fields, [*input_desc, *output_desc], [*inputs, *outputs])
                definition.launch(self.launcher, self.fields, call, workspace, stream)
            except Exception:
                _log.exception("plugin %s %s could not be launched", name, version)
                raise

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = name
            self.plugin_version = version
            self.plugin_namespace = namespace
            self.field_names = declare_fields(trt, definition.fields)

        def create_plugin(self, node: str, collection: Any, phase: Any) -> Any:
            return Plugin(read_fields(name, version, definition.fields, collection))

    Plugin.__name__ = Plugin.__qualname__ = name
    Creator.__name__ = Creator.__qualname__ = f"{name}Creator"
    return Plugin, Creator


def expect(plugin: str, what: str, wanted: object, found: object) -> None:
    """Raise PluginError unless both are equal."""
    if wanted != found:
        raise PluginError(f"{what} must be {wanted}, got {found}", plugin, contract.PLUGIN_VERSION)
