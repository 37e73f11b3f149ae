"""From token ids to text, piece by piece: the pieces joined are what decoding all ids at once gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

OPEN_BYTES = 3
"""Bytes at the end of a text that can still become another character: a UTF-8 character has at most four."""

WINDOW_TOKENS = 16
"""Tokens decoded together at most, as long as the text is whole; then all but the newest OVERLAP_TOKENS leave."""

OVERLAP_TOKENS = 6


class Decoding(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one growing answer.

    A decoder may look at neighbours: SentencePiece drops the space before the first word, bytes of several tokens
    make one character. So a window of recent tokens is decoded, and what was already returned of it is cut off its
    front. The window always begins with a token that has text, so that a dropped first space is dropped every time.

    `byte_tokens` are ids of byte-fallback tokens (`<0x0A>`). Such a decoder turns a whole run of bytes into
    replacement characters when the run as a whole is not UTF-8, so nothing of a run is known before its end. A
    token that has no text, as a special one, does not end a run.
    """

    def __init__(self, tokenizer: Decoding, byte_tokens: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._ids: list[int] = []
        self._shown = ""
        self._in_run = False

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now and was not returned yet."""
        self._ids.append(token)
        if token in self._byte_tokens:
            self._in_run = True
            return ""
        text = self._tokenizer.decode(self._ids)
        if self._in_run and text == self._tokenizer.decode(self._ids[:-1]):
            return ""
        self._in_run = False
        certain = _certain(text)
        if not certain.startswith(self._shown):
            return ""
        new = certain[len(self._shown) :]
        self._shown = certain
        if len(self._ids) >= WINDOW_TOKENS and certain == text:
            self._move_window()
        return new

    def flush(self) -> str:
        """Return the rest: no token follows, so an unfinished character stays a replacement character."""
        text = self._tokenizer.decode(self._ids) if self._ids else ""
        same = len(self._shown)
        while text[:same] != self._shown[:same]:
            same -= 1
        self._ids, self._shown = [], ""
        return text[same:]

    def _move_window(self) -> None:
        recent = self._ids[-OVERLAP_TOKENS:]
        text = self._tokenizer.decode(recent)
        if text:
            self._ids, self._shown = recent, text


def _certain(text: str) -> str:
    """Return `text` without the replacement characters at its end that another byte could still change."""
    end = len(text)
    while end > len(text) - OPEN_BYTES and text[:end].endswith(REPLACEMENT):
        end -= 1
    return text[:end]
