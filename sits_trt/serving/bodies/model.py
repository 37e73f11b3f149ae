"""What every body has in common: its parameters, and Triton's classes behind names of ours.

Runs inside Triton's Python stub only: `triton_python_backend_utils` exists nowhere else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from numpy.typing import NDArray

from sits_trt.errors import SitsError
from sits_trt.serving.bodies.door import Call

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Settings:
    """The configuration that Triton gives a model instance. `directory` is that of the model repository."""

    def __init__(self, args: Mapping[str, str]) -> None:
        self.model = args["model_name"]
        self.version = args["model_version"]
        self.config: dict[str, Any] = json.loads(args["model_config"])
        self.directory = Path(args["model_repository"]).parent

    def text(self, key: str) -> str:
        """Return a parameter. Raises SitsError naming it when it is missing."""
        try:
            return str(self.config["parameters"][key]["string_value"])
        except KeyError:
            raise SitsError(f"parameter '{key}' is missing in the config.pbtxt of model '{self.model}'") from None

    def flag(self, key: str) -> bool:
        """Return a parameter that is true or false, in the spellings of tensorrtllm_backend."""
        value = self.text(key).lower()
        if value not in ("true", "1", "false", "0"):
            raise SitsError(f"parameter '{key}' of model '{self.model}' is '{value}'; write true or false")
        return value in ("true", "1")

    def number(self, key: str) -> float:
        """Return a parameter that is a number."""
        try:
            return float(self.text(key))
        except ValueError:
            raise SitsError(f"parameter '{key}' of model '{self.model}' is no number: {self.text(key)}") from None

    def count(self, key: str) -> int:
        """Return a parameter that is a whole number from 0 upwards."""
        value = self.number(key)
        if value < 0 or value != int(value):
            raise SitsError(f"parameter '{key}' of model '{self.model}' is {self.text(key)}; write 0 or more")
        return int(value)

    def path(self, key: str) -> Path:
        """Return a parameter that is a path relative to the model repository. Raises SitsError when it is not there."""
        path = Path(self.directory, self.text(key)).resolve()
        if not path.exists():
            raise SitsError(f"model '{self.model}' needs {path}, which is not there; build again with 'sits-trt build'")
        return path


def arrays_of(request: Any) -> dict[str, NDArray[Any]]:
    """Return the inputs of a Triton request by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _parameters_of(request: Any) -> dict[str, Any]:
    """Return the custom parameters of a Triton request; over HTTP 'generate' also keys that are no inputs."""
    text = request.parameters()
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def call_of(request: Any) -> Call:
    """Return a Triton request as plain data."""
    return Call(
        arrays_of(request),
        request.request_id(),
        request.requested_output_names(),
        request.timeout(),
        _parameters_of(request),
    )


def tensors(arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
    return [pb.Tensor(name, array) for name, array in arrays.items()]


def response(arrays: Mapping[str, NDArray[Any]]) -> Any:
    return pb.InferenceResponse(tensors(arrays))


def failure(message: str, code: str) -> Any:
    """Return an error response; `code` is a name of pb.TritonError such as INVALID_ARG."""
    return pb.InferenceResponse(error=pb.TritonError(message, getattr(pb.TritonError, code)))


class TritonSink:
    """The response sender of one decoupled request, for use from several threads.

    Triton Server crashes when it is asked about a request whose last response has been sent: both happen
    under one lock here, and a request that has ended does not count as cancelled.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the last response has been sent."""
        return self._ended

    def send(self, arrays: Mapping[str, NDArray[Any]], final: bool) -> None:
        self._send(response(arrays), final)

    def fail(self, message: str, code: str) -> None:
        self._send(failure(message, code), final=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _send(self, made: Any, final: bool) -> None:
        with self._lock:
            assert not self._ended, "a request has one last response"
            self._ended = final
            self._sender.send(made, flags=FINAL if final else 0)


def metric_family(name: str, description: str, is_counter: bool) -> Any:
    kind = pb.MetricFamily.COUNTER if is_counter else pb.MetricFamily.GAUGE
    return pb.MetricFamily(name=name, description=description, kind=kind)


def pick(outputs: Mapping[str, NDArray[Any]], wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the outputs that a request asked for."""
    return {name: array for name, array in outputs.items() if name in wanted}


def int32(*values: int) -> NDArray[np.int32]:
    """Return an INT32 tensor [1, n]."""
    return np.array([values], dtype=np.int32)
