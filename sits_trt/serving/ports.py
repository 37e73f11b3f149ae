"""The server's three ports: named when taken, chosen when 0, and held until the server has them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sits_trt.errors import ServerError


@dataclass(frozen=True)
class Endpoints:
    """Where a server listens; `http`, `grpc` and `metrics` are 'host:port' that a client on this machine can use."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def local_host(self) -> str:
        """The address to reach the server at from this machine, also when it listens on all."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104  compared, not bound

    @property
    def http(self) -> str:
        return f"{self.local_host}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{self.local_host}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"{self.local_host}:{self.metrics_port}"


class HeldPorts:
    """Binds the ports without listening on them, so that nobody else gets one while the server starts.

    The server, too, binds with SO_REUSEADDR, and Linux lets it join a socket that does not listen. `release`
    gives them up. Raises ServerError naming the port that another program has.
    """

    def __init__(self, host: str, http_port: int, grpc_port: int, metrics_port: int) -> None:
        self._sockets = ExitStack()
        try:
            ports = [
                self._hold(host, port, name)
                for name, port in (("http_port", http_port), ("grpc_port", grpc_port), ("metrics_port", metrics_port))
            ]
        except ServerError:
            self.release()
            raise
        self.endpoints = Endpoints(host, *ports)

    def _hold(self, host: str, port: int, name: str) -> int:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise ServerError(f"serving.host '{host}' is no address of this machine ({error.strerror})") from None
        held = self._sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)
        except OSError as error:
            raise ServerError(
                f"serving.{name} {port} on {host} cannot be used ({error.strerror}); choose another or 0 for a free one"
            ) from None
        return int(held.getsockname()[1])

    def release(self) -> None:
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.release()
