"""What the load generator saw of one request: plain timestamps, the only input of the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One message of a response stream. `tokens` is how many generated tokens it carried, 0 for none.

    `at_ns` is on the clock of the request's other timestamps (a monotonic one).
    """

    at_ns: int
    tokens: int


@dataclass(slots=True)
class RequestTrace:
    """One request from its start to the end of its stream.

    `started_ns` is when the request was due: in a closed loop when it was sent, in an open loop when
    its arrival was planned, so that a late client cannot make the server look fast. `ended_ns` is
    when the stream ended, for whatever reason. `error` is empty when the server completed the answer.
    """

    started_ns: int
    sent_ns: int
    ended_ns: int = 0
    events: list[StreamEvent] = field(default_factory=list)
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(event.tokens for event in self.events)
