"""Model `postprocessing`: token ids to text.

Tokens decoded one response at a time lose what spans two of them. The executor's own text of a response is
exact, so it is passed through where it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.acknowledgement import TicketTable, table_path
from sits_trt.serving.bodies.model import Settings, arrays_of, failure, response
from sits_trt.serving.bodies.tensors import Arrays, strings


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings(args)
        self._tokenizer = load_tokenizer(settings.path("tokenizer_dir"))
        self._skip_special_tokens = settings.flag("skip_special_tokens")
        self._tickets: TicketTable | None = None

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
                self._acknowledge(*arrays["TICKET"].reshape(-1).tolist())
        return responses

    def _acknowledge(self, slot: int, number: int) -> None:
        if self._tickets is None:
            self._tickets = TicketTable(table_path())
        self._tickets.acknowledge(slot, number)


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
