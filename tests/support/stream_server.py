"""A gRPC server on loopback that speaks Triton's streaming protocol and answers by script."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Each prompt is a JSON list of steps: [at_ms, tokens], [at_ms, "error text"] or [at_ms, "abort"].

    The last step is sent with finish_reason 'length', or with the one that it has as a third value.

    `seen` holds the inputs of every request by name, `most_at_once` the highest number of streams open together.
    """

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.most_at_once = self._open = 0
        self._lock = threading.Lock()

    def ModelStreamInfer(self, request_iterator: Iterator, context: grpc.ServicerContext) -> Iterator:
        for request in request_iterator:
            inputs = dict(zip((t.name for t in request.inputs), request.raw_input_contents, strict=True))
            with self._lock:
                self.seen.append(inputs)
                self._open += 1
                self.most_at_once = max(self.most_at_once, self._open)
            try:
                yield from self._play(json.loads(inputs["text_input"][4:]), context)
            finally:
                with self._lock:
                    self._open -= 1

    def _play(self, script: list, context: grpc.ServicerContext) -> Iterator:
        began = time.monotonic()
        for number, (at_ms, what, *reason) in enumerate(script, 1):
            time.sleep(max(0.0, began + at_ms / 1000 - time.monotonic()))
            if what == "abort":
                context.abort(grpc.StatusCode.UNAVAILABLE, "server went away")
            answer = service_pb2.ModelStreamInferResponse()
            if isinstance(what, str):
                answer.error_message = what
            else:
                finish = reason[0] if reason else "length" if number == len(script) else ""
                self._add(answer, "num_output_tokens", "INT32", struct.pack("<i", what))
                self._add(answer, "finish_reason", "BYTES", struct.pack("<i", len(finish)) + finish.encode())
            yield answer

    def _add(self, answer: Any, name: str, datatype: str, content: bytes) -> None:
        answer.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        answer.infer_response.raw_output_contents.append(content)


@contextmanager
def scripted_server() -> Iterator[tuple[str, ScriptedServer]]:
    """Yield the address and the server."""
    servicer = ScriptedServer()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(grace=None).wait()
