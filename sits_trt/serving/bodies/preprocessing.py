"""Model `preprocessing`: a prompt and its words to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt import wire
from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.model import Settings, arrays_of, failure, int32, pick, response
from sits_trt.serving.bodies.tensors import Arrays, one, pack_word_ids, texts


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings(args)
        self._tokenizer = load_tokenizer(settings.path("tokenizer_dir"))
        self._add_special_tokens = settings.flag("add_special_tokens")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                outputs = preprocess(arrays_of(request), self._tokenizer, self._add_special_tokens)
                responses.append(response(pick(outputs, request.requested_output_names())))
            except RequestError as error:
                responses.append(failure(str(error), "INVALID_ARG"))
        return responses


def preprocess(arrays: Arrays, tokenizer: Tokenizer, add_special_tokens: bool) -> dict[str, NDArray[Any]]:
    """Return the output tensors. A prompt may be empty where the tokenizer adds a token of its own."""
    asked = one(arrays, "ADD_SPECIAL_TOKENS")
    prompt = "".join(_texts(arrays, "QUERY"))
    ids = tokenizer.encode(prompt, add_special_tokens if asked is None else asked)
    end_id, pad_id = one(arrays, "END_ID"), one(arrays, "PAD_ID")
    if end_id is None:
        end_id = next(iter(tokenizer.eos_token_ids), -1)
    if pad_id is None:
        pad_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {
        "INPUT_ID": np.array([ids], dtype=np.int32),
        "REQUEST_INPUT_LEN": int32(len(ids)),
        "BAD_WORDS_IDS": pack_word_ids(_encode(arrays, "BAD_WORDS_DICT", tokenizer)),
        "STOP_WORDS_IDS": pack_word_ids(_encode(arrays, "STOP_WORDS_DICT", tokenizer)),
        "REQUEST_OUTPUT_LEN": int32(one(arrays, "REQUEST_OUTPUT_LEN")),
        "OUT_END_ID": int32(end_id),
        "OUT_PAD_ID": int32(pad_id),
    }


def _encode(arrays: Arrays, name: str, tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(word, add_special_tokens=False) for word in _texts(arrays, name)]


def _texts(arrays: Arrays, name: str) -> tuple[str, ...]:
    outer = next(outer for outer, inner in wire.TEXT_TO_PREPROCESSING.items() if inner == name)
    return texts(arrays, name, called=outer)
