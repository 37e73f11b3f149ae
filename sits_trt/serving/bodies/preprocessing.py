"""Model `preprocessing`: a prompt and its words to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_trt import wire
from sits_trt.artifacts import read_manifest
from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.contract import EngineDetails
from sits_trt.errors import RequestError
from sits_trt.serving.bodies.model import Settings, arrays_of, failure, int32, pick, response
from sits_trt.serving.bodies.prompt_size import max_prompt_chars, refuse_longer
from sits_trt.serving.bodies.tensors import Arrays, one, pack_word_ids, texts

_WORD_LISTS = {"list of bad words": "BAD_WORDS_DICT", "list of stop words": "STOP_WORDS_DICT"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings(args)
        self._tokenizer = load_tokenizer(settings.path("tokenizer_dir"))
        self._add_special_tokens = settings.flag("add_special_tokens")
        engine = settings.path("gpt_model_path")
        limits = EngineDetails.from_dict(read_manifest(engine, "engine").details, engine).limits
        self._max_chars = max_prompt_chars(self._tokenizer, limits.max_seq_tokens)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                outputs = preprocess(arrays_of(request), self._tokenizer, self._add_special_tokens, self._max_chars)
                responses.append(response(pick(outputs, request.requested_output_names())))
            except RequestError as error:
                responses.append(failure(str(error), "INVALID_ARG"))
        return responses


def preprocess(
    arrays: Arrays, tokenizer: Tokenizer, add_special_tokens: bool, max_chars: int
) -> dict[str, NDArray[Any]]:
    """Return the output tensors. A prompt may be empty where the tokenizer adds a token of its own.

    Raises RequestError, without tokenizing it, for a text of more than `max_chars` characters: no engine step could
    take it, and every other request would wait while it is cut into tokens.
    """
    asked = one(arrays, "ADD_SPECIAL_TOKENS")
    prompt = "".join(_texts(arrays, "QUERY"))
    words = {what: "".join(_texts(arrays, name)) for what, name in _WORD_LISTS.items()}
    refuse_longer({"prompt": prompt, **words}, max_chars)
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
