"""Model `tensorrt_llm_bls`: preprocessing and the executor as one model.

It makes the tokens itself and reaches the executor through its door. Each request has a thread of its own, so that
one instance serves as many at once as the executor does. Unlike an ensemble it hears of a client that has gone, and
cancels the executor's part.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sits_trt import wire
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.door import Call, Caller, CallFailed, door_path
from sits_trt.serving.bodies.model import Settings, TritonSink, call_of
from sits_trt.serving.bodies.preprocessing import Preprocessor
from sits_trt.serving.bodies.request import refuse_unknown, wanted_timeout_us
from sits_trt.serving.bodies.tensors import Arrays

logger = logging.getLogger(__name__)

CANCEL_CHECK_S = 0.1


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname).1s %(name)s: %(message)s")
        self._preprocessor = Preprocessor.of(Settings(args))
        self._door = door_path()
        self._lock = threading.Lock()
        self._open: dict[Caller, TritonSink] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sits-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            arguments = (request, TritonSink(request))
            threading.Thread(target=self._answer, args=arguments, name="sits-bls", daemon=True).start()

    def _answer(self, request: Any, sink: TritonSink) -> None:
        try:
            asked = call_of(request)
            refuse_unknown(asked.parameters)
            timeout_us = wanted_timeout_us(asked.parameters, asked.timeout_us)
            names = {name: _inner_name(name) for name in asked.wanted}
            call = Call(self._inputs(asked.arrays), asked.request_id, names.values(), timeout_us)
            self._relay(call, names, sink)
        except CallFailed as failed:
            sink.fail(str(failed), failed.code)
        except RequestError as error:
            sink.fail(str(error), "INVALID_ARG")
        # A caller must hear the end of its request whatever happened.
        except Exception as error:
            logger.exception("a request failed")
            if not sink.ended:
                sink.fail(f"the server failed on this request: {error}", "INTERNAL")

    def _inputs(self, arrays: Arrays) -> Arrays:
        """Return the executor's inputs for those of a text model."""
        given = {inner: arrays[outer] for outer, inner in wire.TEXT_TO_PREPROCESSING.items() if outer in arrays}
        made = self._preprocessor.outputs(given)
        inputs = {inner: made[outer] for outer, inner in wire.PREPROCESSING_TO_EXECUTOR.items()}
        return inputs | {inner: arrays[outer] for outer, inner in wire.TEXT_TO_EXECUTOR.items() if outer in arrays}

    def _relay(self, call: Call, names: Mapping[str, str], sink: TritonSink) -> None:
        """Pass on the executor's answer, its outputs under our names: `names` maps ours to the executor's."""
        caller = Caller(self._door, call)
        with self._lock:
            self._open[caller] = sink
        try:
            for found, final in caller.answers():
                sink.send({name: found[inner] for name, inner in names.items() if inner in found}, final)
        finally:
            with self._lock:
                del self._open[caller]

    def _watch(self) -> None:
        """Cancel the executor's part of every request whose client has gone."""
        while not self._closing.wait(CANCEL_CHECK_S):
            with self._lock:
                open_requests = list(self._open.items())
            for caller, sink in open_requests:
                if sink.is_cancelled():
                    caller.leave()

    def finalize(self) -> None:
        self._closing.set()
        self._watcher.join()


def _inner_name(name: str) -> str:
    return "output_text" if name == wire.TEXT_OUTPUT else name
