"""Texts that no engine could take are refused by their length alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.prompt_size import max_prompt_chars, refuse_longer
from tests.support.tiny import save_byte_tokenizer, save_tiny_tokenizer


@pytest.fixture(params=[save_byte_tokenizer, save_tiny_tokenizer])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    request.param(tmp_path)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["a" * 40, "hi there", "a b c " * 9])
def test_no_text_that_fits_is_refused(tokenizer: Tokenizer, text: str) -> None:
    tokens = len(tokenizer.encode(text))
    refuse_longer({"prompt": text}, max_prompt_chars(tokenizer, tokens))


@pytest.mark.parametrize("what", ["prompt", "list of stop words"])
def test_longer_text_is_refused_with_both_numbers(what: str) -> None:
    texts = {"prompt": "short"} | {what: "x" * 11}
    with pytest.raises(RequestError, match=rf"the {what} has 11 characters.*at most 10"):
        refuse_longer(texts, 10)
    refuse_longer(texts, 11)
