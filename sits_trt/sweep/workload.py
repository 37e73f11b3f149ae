"""What is asked, and when: prompts of an exact token length, and arrival times. All from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Protocol

from sits_trt.errors import SitsError

TRIES_PER_PROMPT = 200


class Tokenizer(Protocol):
    """The part of a checkpoint's tokenizer that prompts need."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Load:
    """One level of load. Exactly one of the two is set.

    `concurrency` keeps so many requests in flight (closed loop). `requests_per_s` sends at that mean
    rate whatever the server does (open loop), with gaps of coefficient of variation `arrival_cv`.
    """

    concurrency: int | None = None
    requests_per_s: float | None = None
    arrival_cv: float = 1.0

    @property
    def key(self) -> str:
        """Names the level in files: 'c16' or 'r2.5'."""
        return f"c{self.concurrency}" if self.concurrency else f"r{self.requests_per_s:g}"

    @property
    def label(self) -> str:
        """Names the level for a reader."""
        if self.concurrency:
            return f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}"
        return f"{self.requests_per_s:g} requests/s"


def make_prompts(tokenizer: Tokenizer, count: int, prompt_tokens: int, seed: int) -> list[str]:
    """Return `count` different texts that the tokenizer, special tokens included, turns into exactly `prompt_tokens`.

    The texts are windows of Python's own help (`pydoc_data.topics`) from random places, so that no two
    share a beginning and a prefix cache finds nothing. The same arguments give the same texts under one
    version of Python. Raises SitsError when the text has too few such windows.
    """
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
    if len(ids) <= prompt_tokens:
        raise SitsError(f"prompts of {prompt_tokens} tokens do not fit the built-in text of {len(ids)}; ask for less")
    chosen: dict[str, None] = {}
    for start in _starts(len(ids) - prompt_tokens, count, seed):
        text = _exact(tokenizer, ids, start, prompt_tokens)
        if text is not None:
            chosen.setdefault(text)
        if len(chosen) == count:
            return list(chosen)
    raise SitsError(
        f"only {len(chosen)} of {count} different prompts of {prompt_tokens} tokens could be cut from the "
        "built-in text; ask for fewer requests or other lengths"
    )


def _starts(end: int, count: int, seed: int) -> Iterator[int]:
    draw = random.Random(f"prompts {seed}")  # noqa: S311  no secret
    for _ in range(TRIES_PER_PROMPT * count):
        yield draw.randrange(end)


def _exact(tokenizer: Tokenizer, ids: list[int], start: int, prompt_tokens: int) -> str | None:
    """Cut a text at `start` that encodes to `prompt_tokens`; None where the tokens at its ends do not allow it."""
    length = prompt_tokens
    for _ in range(8):
        text = tokenizer.decode(ids[start : start + length], skip_special_tokens=False)
        surplus = len(tokenizer.encode(text)) - prompt_tokens
        if surplus == 0:
            return text
        length -= surplus
        if not 0 < length <= len(ids) - start:
            return None
    return None


def arrival_offsets_s(load: Load, count: int, seed: int) -> list[float]:
    """Return the times, in seconds after the level's start, at which an open loop sends its requests.

    Gaps are gamma distributed with mean 1 / requests_per_s and shape 1 / arrival_cv**2: a Poisson
    process at arrival_cv 1, bursts with pauses above it, an even pace towards 0. The first is at 0.
    """
    if not load.requests_per_s:
        raise ValueError("a closed loop has no planned arrivals")
    draw = random.Random(f"arrivals {seed}")  # noqa: S311  no secret
    shape = load.arrival_cv**-2
    scale = 1 / (load.requests_per_s * shape)
    offsets, now = [], 0.0
    for _ in range(count):
        offsets.append(now)
        now += draw.gammavariate(shape, scale)
    return offsets
