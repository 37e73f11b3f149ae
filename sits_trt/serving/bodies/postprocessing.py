"""Model `postprocessing`: token ids to text.

Tokens decoded one response at a time lose what spans two of them. The executor's own text of a response is
exact, so it is passed through where it is given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.model import Settings, arrays_of, failure, response
from sits_trt.serving.bodies.tensors import Arrays, strings
from sits_trt.serving.bodies.tickets import Ticket, TicketTable, table_path

ASK_EVERY_NS = 50_000_000
"""How long a caller counts as present after it was asked about."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings(args)
        self._tokenizer = load_tokenizer(settings.path("tokenizer_dir"))
        self._skip_special_tokens = settings.flag("skip_special_tokens")
        self._gone: TicketTable | None = None
        self._asked_ns: dict[int, int] = {}

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        responses = []
        for request in requests:
            arrays = arrays_of(request)
            try:
                output = postprocess(arrays, self._tokenizer, self._skip_special_tokens)
                responses.append(response({"OUTPUT": output}))
            except RequestError as error:
                responses.append(failure(str(error), "INVALID_ARG"))
            if "TICKET" in arrays:
                self._report(request, Ticket(*arrays["TICKET"].reshape(-1).tolist()))
        return responses

    def _report(self, request: Any, ticket: Ticket) -> None:
        """Write down that the caller has gone if it has. Asking crosses processes: not for every token."""
        now_ns = time.monotonic_ns()
        if now_ns - self._asked_ns.get(ticket.slot, 0) < ASK_EVERY_NS:
            return
        self._asked_ns[ticket.slot] = now_ns
        if request.is_cancelled():
            if self._gone is None:
                self._gone = TicketTable(table_path())
            self._gone.mark_gone(ticket)


def postprocess(arrays: Arrays, tokenizer: Tokenizer, skip_special_tokens: bool) -> NDArray[Any]:
    """Return OUTPUT: the texts of the sequences in TOKENS_BATCH [1, n, tokens], cut to SEQUENCE_LENGTH [1, n]."""
    if "OUTPUT_TEXT" in arrays:
        return arrays["OUTPUT_TEXT"]
    tokens, lengths = arrays["TOKENS_BATCH"][0], arrays["SEQUENCE_LENGTH"].reshape(-1)
    if len(tokens) != len(lengths):
        raise RequestError(f"TOKENS_BATCH holds {len(tokens)} sequences and SEQUENCE_LENGTH {len(lengths)} lengths")
    if tokens.size and tokens.min() < 0:
        raise RequestError(f"TOKENS_BATCH has the token id {tokens.min()}; ids start at 0")
    return strings(
        tokenizer.decode(row[:length].tolist(), skip_special_tokens)
        for row, length in zip(tokens, lengths.tolist(), strict=True)
    )
