"""Requests on their way into the executor: read, checked, submitted; whatever goes wrong, the caller hears it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from sits_trt import wire
from sits_trt.checkpoint.tokenizer import Tokenizer
from sits_trt.errors import EngineDead, RequestError
from sits_trt.runtime.executor import Executor
from sits_trt.runtime.request import FinishReason
from sits_trt.serving.bodies.door import Call
from sits_trt.serving.bodies.outbox import Outbox
from sits_trt.serving.bodies.reply import Reply, Sink
from sits_trt.serving.bodies.request import Defaults, read_request
from sits_trt.serving.bodies.tensors import one, strings
from sits_trt.serving.bodies.tickets import Tickets

logger = logging.getLogger(__name__)


class Intake:
    """Takes calls from any thread; the answers leave through the outbox."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, defaults: Defaults, outbox: Outbox, tickets: Tickets
    ) -> None:  # fmt: skip
        self._executor = executor
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._outbox = outbox
        self._tickets = tickets

    def take(self, read: Callable[[], Call], sink: Sink) -> None:
        """Submit the call that `read` returns, or tell its caller why not."""
        try:
            self._begin(read(), sink)
        except RequestError as error:
            sink.fail(str(error), "INVALID_ARG")
        # A caller must hear the end of its request whatever happened.
        except Exception as error:
            logger.exception("a request failed at the door")
            sink.fail(f"the server failed on this request: {error}", "INTERNAL")

    def _begin(self, call: Call, sink: Sink) -> None:
        if one(call.arrays, "stop"):
            self._stop(call, sink)
            return
        asked = read_request(
            call.arrays, call.request_id, call.parameters, call.timeout_us, self._tokenizer, self._defaults
        )
        asked.request.validate(self._executor.vocab_size, self._executor.max_seq_tokens)
        echoed = self._tokenizer.decode(asked.request.prompt_ids) if asked.echo else ""
        ticket = self._tickets.take() if asked.streaming and wire.TICKET.name in call.wanted else None
        reply = Reply(asked, call.wanted, sink, echoed, ticket)
        try:
            self._outbox.open(reply, functools.partial(self._executor.submit, asked.request))
        except (RequestError, EngineDead) as error:
            # The request is sound: there is no room for it, or nobody to serve it.
            if ticket is not None:
                self._tickets.give_back(ticket)
            sink.fail(str(error), "UNAVAILABLE")

    def _stop(self, call: Call, sink: Sink) -> None:
        if not call.request_id:
            raise RequestError("input 'stop' cancels the requests of its own request id; send one")
        self._outbox.cancel(call.request_id)
        told = {"output_text": strings([""]), "finish_reason": strings([FinishReason.CANCELLED])}
        sink.send({name: array for name, array in told.items() if name in call.wanted}, final=True)
