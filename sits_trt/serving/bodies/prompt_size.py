"""Texts too long for any engine step are refused before they are cut into tokens, which takes seconds a megabyte."""

from __future__ import annotations

from collections.abc import Mapping

from sits_trt.checkpoint.tokenizer import Tokenizer
from sits_trt.errors import RequestError


def max_prompt_chars(tokenizer: Tokenizer, max_seq_tokens: int) -> int:
    """Return the characters of the longest text that `max_seq_tokens` tokens can stand for."""
    return max_seq_tokens * tokenizer.longest_token_chars


def refuse_longer(texts: Mapping[str, str], max_chars: int) -> None:
    """Raise RequestError when one of `texts`, by what it is called, has more than `max_chars` characters."""
    for what, text in texts.items():
        if len(text) > max_chars:
            raise RequestError(
                f"the {what} has {len(text)} characters, but this engine's tokens hold at most {max_chars}; shorten it"
            )
