"""The program that builds one TensorRT engine, run as a process of its own: python -m sits_trt.engine.tensorrt_child.

The native library can abort the process that it is in, so nothing else lives here. It takes a request file, writes
the engine and a result file that the request names, reports progress as JSON lines on standard output, and logs to
standard error.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from sits_plugins.tensorrt_registry import register_plugins

_PR_SET_PDEATHSIG = 1
"""Of Linux' sys/prctl.h."""

_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")


def main(request_file: str) -> int:
    """Build what the request says. Returns the exit status; failures are explained on standard error."""
    _end_with_parent()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    began = time.monotonic()
    trt = importlib.import_module(request["module"])
    print(f"{request['module']} {trt.__version__}", file=sys.stderr)
    logger = _logger(trt)
    creators = register_plugins(trt)
    progress = _Progress(_own_channel())
    progress.report(0, "parse the graph")
    builder = trt.Builder(logger)
    network = _parse(trt, builder, logger, request["graph"])
    if network is None:
        return 1
    config = _configure(trt, builder, request)
    # The monitor is TensorRT's to call while the engine is built; this name keeps it alive.
    config.progress_monitor = monitor = _monitor(trt, progress)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        print("the builder returned no engine", file=sys.stderr)
        return 1
    progress.report(progress.steps + 1, "write the engine")
    with Path(request["engine"]).open("wb") as handle:
        handle.write(engine)
    result = {
        "version": trt.__version__,
        "layers": _layers(network),
        "plugin_layers": _plugin_layers(trt, network),
        "bindings": _bindings(trt, network),
        "seconds": round(time.monotonic() - began, 3),
        # Linux counts in KiB.
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(request["result"]).write_text(json.dumps(result, indent=2), encoding="utf-8")
    progress.report(progress.steps + 2, "engine written")
    del monitor, creators
    return 0


class _Progress:
    """Counts parsing, the builder's own steps, and writing. How many steps the builder takes, it says itself."""

    steps = 6
    """What the builder usually takes; corrected when it begins."""

    def __init__(self, channel: TextIO) -> None:
        self.channel = channel

    def report(self, done: int, what: str) -> None:
        print(json.dumps({"done": done, "total": self.steps + 2, "what": what}), file=self.channel, flush=True)


def _own_channel() -> TextIO:
    """Return standard output, and send to standard error what anybody else, native code too, writes to it."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: a second build may then write to the same folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _logger(trt: Any) -> Any:
    class StandardErrorLogger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity != trt.ILogger.VERBOSE:
                print(f"[{_SEVERITIES[int(severity)]}] {message}", file=sys.stderr, flush=True)

    return StandardErrorLogger()


def _monitor(trt: Any, progress: _Progress) -> Any:
    class OutermostPhase(trt.IProgressMonitor):
        """Passes on the steps of the phase that all others are parts of."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost = ""

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            if parent is None:
                self.outermost, progress.steps = name, num_steps

        def step_complete(self, name: str, step: int) -> bool:
            if name == self.outermost:
                progress.report(step + 1, "build the engine")
            return True

        def phase_finish(self, name: str) -> None:
            return

    return OutermostPhase()


def _parse(trt: Any, builder: Any, logger: Any, graph: str) -> Any:
    """Return the network of an ONNX file, None when the parser refuses it."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(graph):
        return network
    for index in range(parser.num_errors):
        print(f"[ERROR] {parser.get_error(index)}", file=sys.stderr)
    return None


def _configure(trt: Any, builder: Any, request: Mapping[str, Any]) -> Any:
    config = builder.create_builder_config()
    config.builder_optimization_level = request["optimization_level"]
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for planned in request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (least, typical, most) in planned["shapes"].items():
            profile.set_shape(name, tuple(least), tuple(typical), tuple(most))
        config.add_optimization_profile(profile)
    if request["compute_capability"] is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{request['compute_capability']}"), 0)
    return config


def _bindings(trt: Any, network: Any) -> list[list[Any]]:
    """Return name, type and shape (-1 where symbolic) of the inputs, then the outputs, as TensorRT inferred them."""
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    return [[tensor.name, trt.nptype(tensor.dtype).__name__, list(tensor.shape)] for tensor in tensors]


def _layers(network: Any) -> dict[str, int]:
    kinds = Counter(str(network.get_layer(i).type).removeprefix("LayerType.") for i in range(network.num_layers))
    return dict(sorted(kinds.items()))


def _plugin_layers(trt: Any, network: Any) -> dict[str, int]:
    """Return how many layers each plugin has, by plugin name."""
    found: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer  # the binding's own way to a layer's derived type
            found[layer.plugin.plugin_name] += 1
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
