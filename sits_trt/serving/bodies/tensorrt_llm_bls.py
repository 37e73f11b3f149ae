"""Model `tensorrt_llm_bls`: preprocessing and the executor as one model, by calls from Python.

Each request has a thread of its own, so that one instance serves as many at once as the executor does. Unlike an
ensemble it hears of a client that has gone, and cancels the executor's part.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from numpy.typing import NDArray

from sits_trt import wire
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.model import Settings, TritonSink, arrays_of, parameters_of, tensors
from sits_trt.serving.bodies.request import refuse_unknown, wanted_timeout_us
from sits_trt.serving.find_server import bls_refusal

logger = logging.getLogger(__name__)

CANCEL_CHECK_S = 0.1


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname).1s %(name)s: %(message)s")
        self._executor_model = Settings(args).text("tensorrt_llm_model_name")
        self._refusal = bls_refusal(os.environ, sys.version_info[:2])
        self._lock = threading.Lock()
        self._open: dict[str, TritonSink] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sits-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            arguments = (request, TritonSink(request))
            if self._refusal:
                arguments[1].fail(self._refusal, "UNSUPPORTED")
                continue
            threading.Thread(target=self._answer, args=arguments, name="sits-bls", daemon=True).start()

    def _answer(self, request: Any, sink: TritonSink) -> None:
        try:
            self._relay(request, sink)
        except _Refused as refused:
            sink.pass_error(refused.error)
        except RequestError as error:
            sink.fail(str(error), "INVALID_ARG")
        # A caller must hear the end of its request whatever happened.
        except Exception as error:
            logger.exception("a request failed")
            if not sink.ended:
                sink.fail(f"the server failed on this request: {error}", "INTERNAL")

    def _relay(self, request: Any, sink: TritonSink) -> None:
        arrays = arrays_of(request)
        parameters = parameters_of(request)
        refuse_unknown(parameters)
        timeout_us = wanted_timeout_us(parameters, request.timeout())
        wanted = request.requested_output_names()
        tokens = self._preprocess(arrays)
        inputs = {inner: tokens[outer] for outer, inner in wire.PREPROCESSING_TO_EXECUTOR.items()}
        inputs |= {inner: arrays[outer] for outer, inner in wire.TEXT_TO_EXECUTOR.items() if outer in arrays}
        # Not the caller's id: two callers may use the same one, and a cancel must reach this request only.
        inner_id = uuid.uuid4().hex
        with self._lock:
            self._open[inner_id] = sink
        try:
            call = pb.InferenceRequest(
                model_name=self._executor_model,
                inputs=tensors(inputs),
                requested_output_names=[_inner_name(name) for name in wanted] + ["finish_reason"],
                request_id=inner_id,
                timeout=timeout_us,
            )
            for answer in call.exec(decoupled=True):
                self._forward(answer, wanted, sink)
            if not sink.ended:
                sink.fail(f"model '{self._executor_model}' ended without an answer", "INTERNAL")
        finally:
            with self._lock:
                del self._open[inner_id]

    def _preprocess(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        inputs = {inner: arrays[outer] for outer, inner in wire.TEXT_TO_PREPROCESSING.items() if outer in arrays}
        answer = pb.InferenceRequest(
            model_name=wire.PREPROCESSING,
            inputs=tensors(inputs),
            requested_output_names=list(wire.PREPROCESSING_TO_EXECUTOR),
        ).exec()
        return _outputs(answer)

    def _forward(self, answer: Any, wanted: set[str], sink: TritonSink) -> None:
        found = _outputs(answer)
        if not found:
            return
        reason = bytes(found["finish_reason"].reshape(-1)[0])
        outer = {name: found[_inner_name(name)] for name in wanted if _inner_name(name) in found}
        sink.send(outer, final=bool(reason))

    def _watch(self) -> None:
        """Cancel the executor's part of every request whose client has gone."""
        stopped: set[str] = set()
        while not self._closing.wait(CANCEL_CHECK_S):
            with self._lock:
                open_requests = dict(self._open)
            stopped &= open_requests.keys()
            for inner_id in open_requests.keys() - stopped:
                if open_requests[inner_id].is_cancelled():
                    stopped.add(inner_id)
                    # Now and then such a call takes half a second in the server: the next one does not wait for it.
                    threading.Thread(target=self._stop, args=(inner_id,), name="sits-stop", daemon=True).start()

    def _stop(self, inner_id: str) -> None:
        one = np.ones((1, 1), dtype=np.int32)
        inputs = {"input_lengths": one, "request_output_len": one, "stop": np.array([[True]])}
        call = pb.InferenceRequest(
            model_name=self._executor_model,
            inputs=tensors(inputs),
            requested_output_names=["finish_reason"],
            request_id=inner_id,
        )
        for _ in call.exec(decoupled=True):
            pass

    def finalize(self) -> None:
        self._closing.set()
        self._watcher.join()


class _Refused(Exception):
    """A model that was called answered with this Triton error."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.message())
        self.error = error


def _inner_name(name: str) -> str:
    return "output_text" if name == wire.TEXT_OUTPUT else name


def _outputs(answer: Any) -> dict[str, NDArray[Any]]:
    if answer.has_error():
        raise _Refused(answer.error())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
