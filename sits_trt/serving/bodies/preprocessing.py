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


class Preprocessor:
    """Turns the inputs of `wire.PREPROCESSING_INPUTS` into tokens, as the parameters of a model say.

    A text of more than `max_chars` characters is refused without tokenizing it: no engine step could take it, and
    every other request would wait while it is cut into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool, max_chars: int) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._max_chars = max_chars

    @classmethod
    def of(cls, settings: Settings) -> Preprocessor:
        tokenizer = load_tokenizer(settings.path("tokenizer_dir"))
        engine = settings.path("gpt_model_path")
        limits = EngineDetails.from_dict(read_manifest(engine, "engine").details, engine).limits
        max_chars = max_prompt_chars(tokenizer, limits.max_seq_tokens)
        return cls(tokenizer, settings.flag("add_special_tokens"), max_chars)

    def outputs(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the output tensors. A prompt may be empty where the tokenizer adds a token of its own.

        Raises RequestError.
        """
        asked = one(arrays, "ADD_SPECIAL_TOKENS")
        prompt = "".join(_texts(arrays, "QUERY"))
        words = {what: "".join(_texts(arrays, name)) for what, name in _WORD_LISTS.items()}
        refuse_longer({"prompt": prompt, **words}, self._max_chars)
        ids = self._tokenizer.encode(prompt, self._add_special_tokens if asked is None else asked)
        end_id, pad_id = one(arrays, "END_ID"), one(arrays, "PAD_ID")
        if end_id is None:
            end_id = next(iter(self._tokenizer.eos_token_ids), -1)
        if pad_id is None:
            pad_id = end_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        return {
            "INPUT_ID": np.array([ids], dtype=np.int32),
            "REQUEST_INPUT_LEN": int32(len(ids)),
            "BAD_WORDS_IDS": pack_word_ids(self._encode(arrays, "BAD_WORDS_DICT")),
            "STOP_WORDS_IDS": pack_word_ids(self._encode(arrays, "STOP_WORDS_DICT")),
            "REQUEST_OUTPUT_LEN": int32(one(arrays, "REQUEST_OUTPUT_LEN")),
            "OUT_END_ID": int32(end_id),
            "OUT_PAD_ID": int32(pad_id),
        }

    def _encode(self, arrays: Arrays, name: str) -> list[list[int]]:
        return [self._tokenizer.encode(word, add_special_tokens=False) for word in _texts(arrays, name)]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._preprocessor = Preprocessor.of(Settings(args))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                outputs = self._preprocessor.outputs(arrays_of(request))
                responses.append(response(pick(outputs, request.requested_output_names())))
            except RequestError as error:
                responses.append(failure(str(error), "INVALID_ARG"))
        return responses


def _texts(arrays: Arrays, name: str) -> tuple[str, ...]:
    outer = next(outer for outer, inner in wire.TEXT_TO_PREPROCESSING.items() if inner == name)
    return texts(arrays, name, called=outer)
