"""A build behind its own Triton Inference Server, for as long as it is measured."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import InferenceServerClient

from sits_trt.errors import ServerError
from sits_trt.recipe.schema import ServingSection
from sits_trt.serving import serve as serving
from sits_trt.serving.server import TritonServer

LOG_NAME = "sweep-server.log"
GRACE_S = 10
"""A server that no longer answers gets so long to end, for its exit code."""


@dataclass(frozen=True)
class Served:
    """A server that answers at gRPC `address`. `runner` says what computes its answers, and why."""

    address: str
    runner: str
    version: str
    server: TritonServer

    def check(self, settle_s: float = 0) -> None:
        """Raise ServerError when the server has ended or can no longer serve.

        A server that crashed may answer a little longer, while it writes its stack: `settle_s` waits for that.
        """
        time.sleep(settle_s)
        if self.server.running and self.server.ready():
            return
        exit_code = self.server.wait(GRACE_S)
        ended = "is not ready any more" if exit_code is None else f"ended with exit code {exit_code}"
        what = self.server.failure or f"Triton Server {ended} while it was measured"
        raise ServerError(f"{what}; its log is {self.server.log_path}")


@contextmanager
def serve(build: Path, start_timeout_s: int) -> Iterator[Served]:
    """Serve a build on free ports of the loopback interface and stop the server when the block ends.

    Raises ServerError when it does not get ready in time; its output is in the build's directory.
    """
    section = ServingSection(http_port=0, grpc_port=0, metrics_port=0, start_timeout_s=start_timeout_s)
    with serving.serve(build, section, log_path=build / LOG_NAME) as server:
        with InferenceServerClient(server.endpoints.grpc) as client:
            version = client.get_server_metadata().version
        yield Served(server.endpoints.grpc, _runner(server.log_path), version, server)


def _runner(log: Path) -> str:
    """Return the runner and its reason as the executor's model writes them when it is ready."""
    found = re.search(r"serving with the (.+)", log.read_text(encoding="utf-8", errors="replace"))
    return found[1].strip() if found else ""
