"""A build behind its own Triton Inference Server, for as long as it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import InferenceServerClient

from sits_trt.artifacts import BuildDirectory
from sits_trt.errors import ServerError
from sits_trt.serving.server import TritonServer

LOG_NAME = "sweep-server.log"


@dataclass(frozen=True)
class Served:
    """A server that answers at gRPC `address`. `runner` says what computes its answers, and why."""

    address: str
    runner: str
    version: str
    server: TritonServer

    def check(self) -> None:
        """Raise ServerError when the server has ended."""
        if not self.server.running:
            raise ServerError(f"Triton Server ended while it was measured; its log is {self.server.log_path}")


@contextmanager
def serve(build: Path, start_timeout_s: float) -> Iterator[Served]:
    """Serve a build on free ports of the loopback interface and stop the server when the block ends.

    Raises ServerError when it does not get ready in time; its output is in the build's directory.
    """
    log_path = build / LOG_NAME
    with TritonServer(BuildDirectory(build).repository, log_path, "127.0.0.1", 0, 0, 0) as server:
        server.start(start_timeout_s)
        with InferenceServerClient(server.endpoints.grpc) as client:
            version = client.get_server_metadata().version
        yield Served(server.endpoints.grpc, "", version, server)
