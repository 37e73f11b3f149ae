"""Serving a build: for the length of a `with` block, or until somebody says stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sits_trt.artifacts import BuildDirectory, read_manifest
from sits_trt.errors import ServerError, SitsError
from sits_trt.progress import Progress, silent
from sits_trt.recipe.schema import ServingSection
from sits_trt.serving.ports import Endpoints
from sits_trt.serving.server import TritonServer

LOG_NAME = "server.log"


@contextmanager
def serve(
    build_dir: Path,
    section: ServingSection,
    progress: Progress = silent,
    log_path: Path | None = None,
) -> Iterator[TritonServer]:
    """Serve the model repository of a build; the server is ready inside the block and gone after it.

    Of `section` the host, the ports and start_timeout_s are taken; all else was written into the repository when
    it was built. The server's output goes to `log_path`, by default server.log in the build directory.
    Raises SitsError when the build has no repository or engine, ServerError when the server does not start.
    """
    repository = repository_of(build_dir)
    server = TritonServer(
        repository,
        log_path or build_dir / LOG_NAME,
        section.host,
        section.http_port,
        section.grpc_port,
        section.metrics_port,
    )
    with server:
        server.start(section.start_timeout_s, progress)
        yield server


def repository_of(build_dir: Path) -> Path:
    """Return the model repository of a build after checking that it and its engine are there."""
    repository = BuildDirectory(build_dir).repository
    engine = repository / str(read_manifest(repository, "repository").details["engine"])
    if not engine.is_dir():
        raise SitsError(f"the repository {repository} serves {engine}, which is not there; build it again")
    return repository.resolve()


def serve_until_stopped(
    build_dir: Path,
    section: ServingSection,
    on_ready: Callable[[Endpoints], None],
    progress: Progress = silent,
    log_path: Path | None = None,
) -> int:
    """Serve a build until SIGINT, SIGTERM or SIGHUP and return the exit code: 0 for a stop that was asked for.

    `on_ready` is told the endpoints once every model is ready. A second signal kills the server at once. SIGHUP, the
    end of the terminal, is left ignored where it is, as under nohup.
    Must run in the main thread. Raises ServerError when the server ends by itself.
    """
    asked = threading.Event()
    running: list[TritonServer] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not running:
            raise KeyboardInterrupt
        if asked.is_set():
            running[0].kill()
        asked.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        with serve(build_dir, section, progress, log_path) as server:
            running.append(server)
            on_ready(server.endpoints)
            while not asked.wait(0.2):
                if not server.running:
                    what = server.failure or f"Triton Server ended by itself with exit code {server.wait()}"
                    raise ServerError(f"{what}; its log is {server.log_path}")
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
