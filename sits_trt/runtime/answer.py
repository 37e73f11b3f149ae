"""One answer in the making: its text, and the token at which it ends."""

from __future__ import annotations

from sits_trt.runtime.detokenizer import Detokenizer
from sits_trt.runtime.request import FinishReason, SamplingParams
from sits_trt.runtime.stops import StopMatcher


class Answer:
    """Takes the tokens of one request in order; says what text each brings and when the answer is complete.

    Without a detokenizer every text is empty. `end_ids` are the ids that end the answer.
    """

    def __init__(self, sampling: SamplingParams, end_ids: frozenset[int], detokenizer: Detokenizer | None) -> None:
        assert detokenizer or not sampling.stop, "stop strings need text"
        self._sampling = sampling
        self._end_ids = end_ids
        self._detokenizer = detokenizer
        self._stops = StopMatcher(sampling.stop) if sampling.stop else None
        self.num_tokens = 0

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take the next token; return its new text, and why the answer ends with it if it does."""
        self.num_tokens += 1
        reason = None
        text = ""
        if token in self._end_ids:
            reason = FinishReason.STOP
        elif self._detokenizer:
            text = self._detokenizer.push(token)
        if reason is None and self.num_tokens == self._sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason and self._detokenizer:
            text += self._detokenizer.flush()
        if self._stops and self.num_tokens > self._sampling.min_tokens:
            text, found = self._stops.push(text)
            if found:
                return text, FinishReason.STOP
            if reason:
                text += self._stops.flush()
        return text, reason
