"""A Triton Inference Server as a child process: started, waited for, and gone with all its helpers."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from sits_trt.errors import ServerError
from sits_trt.progress import Progress, silent
from sits_trt.serving import launch
from sits_trt.serving.find_server import find_server
from sits_trt.serving.ports import HeldPorts
from sits_trt.serving.room import IDLE_FILE, STOP_FILE
from sits_trt.serving.stubs import Stub, find_stubs, is_alive, living, remove_shared_memory
from sits_trt.wire import EXECUTOR

CANCEL_S = 2
"""How long a stop waits for requests in flight to end as cancelled, before the server itself is told."""

SETTLE_S = 0.5
"""How long the last responses take on their way through the other models."""

KILL_AFTER_S = 5
"""After this long a server that was told to stop is killed: one open gRPC stream is enough to keep it from ending."""

POLL_S = 0.1

PREFIX = "sits-trt-server-"
"""How the names of the servers' rooms begin."""


class TritonServer:
    """One server over one model repository.

    The server runs in a process group of its own: a Ctrl-C in the terminal reaches this process alone, which stops
    the server in order. It is told to stop when this process dies in any way; what is left of its group, the Python
    stubs, is killed as soon as it has ended in any way.

    A server one of whose Python stubs dies is killed, as it would go on to look ready; `failure` then says which.

    Ports that are 0 are chosen; `endpoints` says them. All output goes to the file `log_path`.
    Raises ServerError when there is no server on this machine or a port is taken.
    """

    def __init__(
        self, repository: Path, log_path: Path, host: str, http_port: int, grpc_port: int, metrics_port: int
    ) -> None:
        self.log_path = log_path
        self._repository = repository
        self._installation = find_server()
        self._ports = HeldPorts(host, http_port, grpc_port, metrics_port)
        self.endpoints = self._ports.endpoints
        self._room = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor = threading.Thread(target=self._watch, name="sits-triton-server", daemon=True)
        self._launched = threading.Event()
        self._launch_error: OSError | None = None
        self._arguments: list[str] = []
        self._stubs: list[Stub] = []
        self._stopping = False
        self.failure = ""

    def start(self, timeout_s: float, progress: Progress = silent) -> None:
        """Start the server and return when all models are ready.

        `progress` is told how many of the models are loaded. Raises ServerError when the server ends before it is
        ready or is not ready after `timeout_s`; nothing is left running then.
        """
        try:
            self._arguments = self._command()
            self._monitor.start()
            self._launched.wait()
            if self._launch_error is not None:
                raise ServerError(f"Triton Server cannot be started ({self._launch_error})")
            self._wait_until_ready(timeout_s, progress)
        except BaseException:
            self.stop()
            raise
        finally:
            self._ports.release()

    def stop(self) -> None:
        """Stop the server and all its helpers; requests in flight end as cancelled. Does nothing when it has ended."""
        self._stopping = True
        if self._process is not None and self._monitor.is_alive():
            self._cancel_all()
            self._signal(signal.SIGTERM)
            self._monitor.join(KILL_AFTER_S)
            if self._monitor.is_alive():
                self._signal(signal.SIGKILL)
                self._monitor.join()
        self._ports.release()
        self._room.cleanup()

    def _cancel_all(self) -> None:
        """Let the executor end everything: Triton Server refuses an ensemble's next step once it is stopping itself."""
        if all(stub.model != EXECUTOR for stub in self._stubs):
            return
        room = Path(self._room.name)
        (room / STOP_FILE).touch()
        deadline = time.monotonic() + CANCEL_S
        while not (room / IDLE_FILE).exists() and self._monitor.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        self._monitor.join(SETTLE_S)

    def kill(self) -> None:
        """End the server at once. From any thread, also while `stop` waits."""
        if self._process is not None and self._monitor.is_alive():
            self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the server's exit code once it has ended, None when it still runs after `timeout_s`."""
        self._monitor.join(timeout_s)
        return None if self._monitor.is_alive() or self._process is None else self._process.returncode

    @property
    def running(self) -> bool:
        return self._monitor.is_alive()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def ready(self) -> bool:
        """Whether the server is there and all its models can be asked."""
        return _answers(self.endpoints.http, "/v2/health/ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.stop()

    def _watch(self) -> None:
        """Start the server, wait for its end, kill what it leaves. One thread, as the server ends with its starter."""
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), self._room.name, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._installation.environment(Path(self._room.name)),
                    process_group=0,
                )
        except OSError as error:
            self._launch_error = error
            return
        finally:
            self._launched.set()
        # Not reaped before its group is killed: until then no other process can get the group's number.
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            time.sleep(POLL_S)
            dead = [stub.model for stub in self._stubs if not is_alive(stub.pid)]
            if dead and not self._stopping:
                # Triton Server would go on to look ready, and requests to this model would wait for ever.
                self.failure = f"the Python process of model '{dead[0]}' has ended"
                break
        left = find_stubs(self.pid)
        while living(self.pid):
            self._signal(signal.SIGKILL)
            time.sleep(POLL_S / 10)
        remove_shared_memory([*self._stubs, *left])
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send SIGKILL to the whole group, any other signal to the server alone."""
        assert self._process is not None
        try:
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _command(self) -> list[str]:
        at = self.endpoints
        return [
            str(self._installation.binary),
            f"--model-repository={self._repository}",
            *self._installation.prepare(Path(self._room.name)),
            f"--http-address={at.host}",
            f"--http-port={at.http_port}",
            f"--grpc-address={at.host}",
            f"--grpc-port={at.grpc_port}",
            f"--metrics-address={at.host}",
            f"--metrics-port={at.metrics_port}",
            f"--exit-timeout-secs={KILL_AFTER_S}",
            # The configurations are complete; completing them would start every stub twice.
            "--disable-auto-complete-config",
        ]

    def _wait_until_ready(self, timeout_s: float, progress: Progress) -> None:
        total = sum((folder / "config.pbtxt").is_file() for folder in self._repository.iterdir())
        deadline = time.monotonic() + timeout_s
        loaded = -1
        # The metrics service is the last to start, a little after the models are ready.
        while not (self.ready() and _answers(self.endpoints.metrics, "/metrics")):
            if not self._monitor.is_alive():
                raise ServerError(f"Triton Server ended while starting: {self._reason()}; its log is {self.log_path}")
            now_loaded = len(_loaded(self._log()))
            if now_loaded != loaded:
                loaded = now_loaded
                progress(loaded, total, "models loaded")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"Triton Server was not ready after {timeout_s:g} s, with {loaded} of {total} models loaded; raise "
                    f"serving.start_timeout_s or see its log {self.log_path}"
                )
            time.sleep(POLL_S)
        progress(total, total, "models loaded")
        self._stubs = find_stubs(self.pid)

    def _log(self) -> str:
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _reason(self) -> str:
        return failure_reason(self._log()) or f"exit code {self._process.returncode if self._process else '?'}"


def _answers(address: str, path: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _loaded(log: str) -> set[str]:
    return set(re.findall(r"successfully loaded '([^']+)'", log))


def failure_reason(log: str) -> str:
    """Return the cause that a server's log gives for ending at its start, on one line; empty when it gives none."""
    for pattern in (
        r"failed to load '(?P<model>[^']+)' version \d+: [\w ]+: (?P<why>[^\n]+)",
        r"Poll failed for model directory '(?P<model>[^']+)': (?P<why>[^\n]+)",
    ):
        found = re.search(pattern, log)
        if found:
            # A traceback follows behind an escaped line break.
            why = found["why"].split("\\n")[0].strip().rstrip('"')
            return f"model '{found['model']}': {why}"
    errors = re.findall(r"^(?:E\d{4} \S+ \d+ \S+ \"?|error: )(.+?)\"?$", log, flags=re.MULTILINE)
    return errors[-1].strip() if errors else ""
