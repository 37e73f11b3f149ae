"""The one thread that sends: a slow client or server process never holds up the executor's steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from sits_trt.runtime.executor import Handle
from sits_trt.runtime.request import TokenEvent
from sits_trt.serving.bodies.reply import Reply
from sits_trt.serving.bodies.tickets import Tickets, TicketTable
from sits_trt.serving.room import IDLE_FILE, is_stopping, room

logger = logging.getLogger(__name__)


class Outbox:
    """Sends the events of many replies, each in order, and cancels the request of a caller that has gone.

    All requests are cancelled when the server has to stop.

    `cancel_check_s` is how often callers are looked at.
    """

    def __init__(self, cancel_check_s: float, tickets: Tickets, table: TicketTable) -> None:
        self._cancel_check_s = cancel_check_s
        self._tickets = tickets
        self._table = table
        self._ready: SimpleQueue[Reply | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[Reply, Handle] = {}
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send, name="sits-sender", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="sits-cancel", daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._watcher.start()

    def open(self, reply: Reply, submit: Callable[[Callable[[TokenEvent], None]], Handle]) -> None:
        """Submit a request whose events go to `reply`. What `submit` raises is raised, and nothing is open then."""

        def on_event(event: TokenEvent) -> None:
            if reply.push(event):
                self._ready.put(reply)

        # Under the lock: the last event may be sent before `submit` has returned its handle.
        with self._lock:
            self._open[reply] = submit(on_event)

    def cancel(self, request_id: str) -> None:
        """Cancel every open request of this id."""
        with self._lock:
            handles = [handle for handle in self._open.values() if handle.request_id == request_id]
        for handle in handles:
            handle.cancel()

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """Send what is left and end the threads. The executor must be shut down."""
        self._closing.set()
        self._ready.put(None)
        self._sender.join()
        self._watcher.join()

    def _send(self) -> None:
        while (reply := self._ready.get()) is not None:
            try:
                reply.flush()
            # Sending runs foreign code; its error ends one reply and must not end them all.
            except Exception:
                logger.exception("a response could not be sent")
                self._give_up(reply)
            if reply.done:
                self._forget(reply)

    def _give_up(self, reply: Reply) -> None:
        reply.done = True
        with self._lock:
            handle = self._open.get(reply)
        if handle is not None:
            handle.cancel()
        try:
            reply.sink.fail("the server could not send the answer", "INTERNAL")
        except Exception:
            logger.exception("nor could its caller be told")

    def _forget(self, reply: Reply) -> None:
        with self._lock:
            was_open = self._open.pop(reply, None) is not None
        # Once only: the cancel of a reply that was given up brings another event.
        if was_open and reply.ticket is not None:
            self._tickets.give_back(reply.ticket)

    def _watch(self) -> None:
        while not self._closing.wait(self._cancel_check_s):
            with self._lock:
                replies = list(self._open.items())
            stopping = is_stopping()
            for reply, handle in replies:
                if not reply.done and (stopping or self._has_gone(reply)):
                    handle.cancel()
            if stopping and not replies:
                (room() / IDLE_FILE).touch()

    def _has_gone(self, reply: Reply) -> bool:
        if reply.ticket is not None and self._table.is_gone(reply.ticket):
            return True
        return reply.sink.is_cancelled()
