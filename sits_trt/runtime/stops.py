"""Stop strings in streamed text: found across chunks, and no more held back than can still become one."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Knuth-Morris-Pratt automaton of one stop string. `matched` is how many of its characters the text ends with."""

    __slots__ = ("fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fallback = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self.fallback[length - 1]
            length += text[index] == text[length]
            self.fallback[index] = length

    def step(self, character: str) -> bool:
        """Take one character; say whether the text now ends with the whole stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self.fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class StopMatcher:
    """Cuts a text at the stop string that is complete first; of several complete at once, at the longest.

    The result depends on the text alone, not on how it is cut into chunks.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown now, and whether a stop string is complete.

        After a match nothing may be pushed any more: what is shown ends right before the stop string.
        """
        for index, character in enumerate(text):
            complete = [len(pattern.text) for pattern in self._patterns if pattern.step(character)]
            if complete:
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - max(complete)], True
        seen = self._held + text
        keep = len(seen) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = seen[keep:]
        return seen[:keep], False

    def flush(self) -> str:
        """Return what was held back: the text has ended and it did not become a stop string."""
        held, self._held = self._held, ""
        return held
