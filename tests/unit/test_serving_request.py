"""Tensors of a Triton request to a request of the executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from sits_trt import wire
from sits_trt.checkpoint.tokenizer import Tokenizer
from sits_trt.errors import RequestError
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.serving.bodies.request import Asked, Defaults, read_request, wanted_timeout_us
from sits_trt.serving.bodies.tensors import one, pack_word_ids, strings, texts, word_ids

TYPES = {"INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
INPUTS = {tensor.name: tensor for tensor in wire.EXECUTOR_INPUTS}


class Words:
    """A tokenizer of single letters: 'a' is 1; 0 and 99 end an answer."""

    eos_token_ids = (0, 99)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("`") if letter != " " else 50 for letter in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token + ord("`")) for token in ids)


def arrays(**values: Any) -> dict[str, Any]:
    """Return tensors as Triton delivers them: a batch dimension in front, scalars without their own."""
    made = {"input_ids": [3, 4], "input_lengths": 2, "request_output_len": 5} | values
    result = {}
    for name, value in made.items():
        tensor = INPUTS[name]
        if tensor.dtype == "STRING":
            result[name] = strings(value)
        else:
            array = np.array([value], dtype=TYPES[tensor.dtype])
            result[name] = array if tensor.scalar or array.ndim > 1 else array.reshape(1, -1)
    return result


def read(parameters: dict[str, Any] | None = None, timeout_us: int = 0, limit_ms: int = 0, **values: Any) -> Asked:
    return read_request(arrays(**values), "id", parameters or {}, timeout_us, Words(), Defaults(True, limit_ms))


def test_the_smallest_request_is_greedy_and_whole() -> None:
    asked = read()
    assert asked.request == Request("id", (3, 4), SamplingParams(5))
    assert not any((asked.streaming, asked.echo, asked.logprobs, asked.timings))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"runtime_top_k": 7}, {"temperature": 1.0, "top_k": 7}),
        ({"runtime_top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"runtime_top_p": 0.0, "temperature": 2.0}, {"temperature": 2.0, "top_p": 0.0}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": 0}, {"seed": 0}),
        ({"min_tokens": 2, "repetition_penalty": 1.5}, {"min_tokens": 2, "repetition_penalty": 1.5}),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.5}, {"presence_penalty": 0.5, "frequency_penalty": -0.5}),
        ({"return_log_probs": True}, {"logprobs": True}),
        ({"end_id": 99}, {}),
        ({"end_id": 7}, {"ignore_eos": True, "stop_token_ids": (7,)}),
        ({"end_id": -1}, {"ignore_eos": True}),
        ({"stop_words": ["xy", "", "z"]}, {"stop": ("xy", "z")}),
        ({"stop_words_list": [[5, 1, 2], [1, 3, -1]]}, {"stop_token_ids": (5,), "stop": ("ab",)}),
        ({"bad_words": ["ab"]}, {"bad_words": ((1, 2), (50, 1, 2))}),
        ({"bad_words_list": [[5, 1, 2], [1, 3, -1]], "bad_words": ["e"]}, {"bad_words": ((5,), (1, 2), (50, 5))}),
    ],
)
def test_sampling_inputs_do_what_they_say(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(**values).request.sampling == SamplingParams(5, **expected)


def test_form_of_the_answer() -> None:
    assert read(streaming=True).streaming
    assert read(exclude_input_in_output=False).echo
    assert not read(exclude_input_in_output=False, streaming=True).echo
    assert not read(exclude_input_in_output=True).echo
    echoing = read_request(arrays(), "", {}, 0, Words(), Defaults(exclude_input=False, queue_timeout_ms=0))
    assert echoing.echo
    flags = read(return_perf_metrics=True, return_num_input_tokens=True, return_num_output_tokens=True)
    assert all((flags.timings, flags.input_count, flags.output_count))


def test_padding_behind_the_prompt_is_left_out() -> None:
    assert read(input_ids=[3, 4, 0, 0]).request.prompt_ids == (3, 4)
    with pytest.raises(RequestError, match="input_lengths is 3, but input_ids has 2 tokens"):
        read(input_lengths=3)
    with pytest.raises(RequestError, match="input_ids and input_lengths are needed"):
        read_request({"input_lengths": np.array([1], np.int32)}, "", {}, 0, Words(), Defaults(True, 0))


@pytest.mark.parametrize("number", [3.5, float("nan"), True, b"8", 1j, np.int64(8)])
def test_a_number_of_another_type_is_refused(number: Any) -> None:
    """It would be found in the middle of a step, which all share: Triton checks types, the other door does not."""
    given = arrays() | {"request_output_len": np.array([[number]], object if isinstance(number, bytes) else None)}
    with pytest.raises(RequestError, match=r"input 'request_output_len' has the type .*; send INT32"):
        read_request(given, "", {}, 0, Words(), Defaults(True, 0))


def test_an_input_that_is_not_declared_is_refused() -> None:
    given = arrays() | {"temprature": np.array([[0.5]], np.float32)}
    with pytest.raises(RequestError, match=r"no input 'temprature' \(did you mean temperature"):
        read_request(given, "", {}, 0, Words(), Defaults(True, 0))


@pytest.mark.parametrize(
    ("parameters", "timeout_us", "limit_ms", "expected"),
    [({}, 0, 0, 0), ({}, 0, 700, 700), ({}, 1500, 0, 2), ({"timeout": 900_000}, 0, 700, 700), ({}, 5000, 700, 5)],
)
def test_a_request_may_shorten_the_longest_wait(
    parameters: dict[str, Any], timeout_us: int, limit_ms: int, expected: int
) -> None:
    assert read(parameters, timeout_us, limit_ms).request.queue_timeout_ms == expected


def test_priority_travels() -> None:
    assert read(priority=3).request.priority == 3
    assert read(priority=-2).request.priority == -2


@pytest.mark.parametrize("tensor", [t for t in wire.EXECUTOR_INPUTS if t.neutral is not None], ids=lambda t: t.name)
def test_unsupported_inputs_are_refused_unless_they_change_nothing(tensor: wire.Tensor) -> None:
    other: Any = "{}" if tensor.dtype == "STRING" else 1 if tensor.dtype == "BOOL" else 7
    if tensor.neutral == wire.ANY:
        assert read(**{tensor.name: other}) == read()
        return
    with pytest.raises(RequestError, match=f"input '{tensor.name}' is not supported by this server"):
        read(**{tensor.name: [other] if not tensor.scalar else other})
    assert isinstance(tensor.neutral, tuple)
    for value in tensor.neutral:
        assert read(**{tensor.name: [value] if not tensor.scalar else value}) == read()


def test_every_input_that_is_obeyed_is_read() -> None:
    """An input that is neither refused nor neutral must make a difference to what is asked."""
    values: dict[str, Any] = {
        "input_ids": [7, 8], "input_lengths": 1, "request_output_len": 9, "end_id": 7, "stop_words": ["a"],
        "stop_words_list": [[1], [1]], "bad_words": ["a"], "bad_words_list": [[1], [1]], "runtime_top_k": 3,
        "runtime_top_p": 0.5, "temperature": 0.5, "min_tokens": 1, "repetition_penalty": 2.0, "presence_penalty": 1.0,
        "frequency_penalty": 1.0, "seed": 1, "priority": 1, "return_log_probs": True,
        "return_perf_metrics": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
        "exclude_input_in_output": False, "streaming": True,
    }  # fmt: skip
    obeyed = {tensor.name for tensor in wire.EXECUTOR_INPUTS if tensor.neutral is None}
    assert obeyed - set(values) == {"stop"}, "'stop' is the model's own affair"
    for name, value in values.items():
        assert read(**{name: value}) != read(), name


def test_unknown_parameters_are_named() -> None:
    assert read({"id": "x", "sequence_id": 0, "triton_enable_empty_final_response": True}) == read()
    with pytest.raises(RequestError, match=r"no input or parameter 'max_token' \(did you mean max_tokens"):
        read({"max_token": 3})
    with pytest.raises(RequestError, match="timeout is 'soon'"):
        read({"timeout": "soon"})


def test_word_lists_go_both_ways() -> None:
    for words in ([], [[1]], [[1, 2], [3]], [[1], [2], [3, 4, 5]]):
        packed = pack_word_ids(words)
        assert packed.shape[:2] == (1, 2)
        assert word_ids({"w": packed}, "w") == tuple(tuple(word) for word in words)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((1, 3, 2), np.int32), r"has the shape \[1, 3, 2\]; send \[1, 2, n\]"),
        (np.array([[[1, 2], [3, -1]]]), "must rise and stay within 2"),
        (np.array([[[1, 2], [2, 1]]]), "must rise and stay within 2"),
        (np.array([[[-1, 2], [2, -1]]]), "has the token id -1"),
    ],
)
def test_damaged_word_lists_are_refused(array: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        word_ids({"w": array}, "w")


def test_b50_texts_are_utf8() -> None:
    values = ["é🔥", "a\0\0", "\n", "漢"]
    assert texts({"t": strings(values)}, "t") == tuple(values)
    bad = np.array([[b"ok", b"a\xff"]], dtype=object)
    with pytest.raises(RequestError, match="input 't' is not UTF-8: byte 1 is 0xff"):
        texts({"t": bad}, "t")
    with pytest.raises(RequestError, match="input 'text_input' is not UTF-8"):
        texts({"QUERY": bad}, "QUERY", called="text_input")


def test_one_value_is_one_value() -> None:
    assert one({}, "x") is None
    assert one({"x": np.zeros((1, 0))}, "x") is None
    assert one({"x": np.array([[True]])}, "x") is True
    with pytest.raises(RequestError, match="input 'x' has 2 values; send one"):
        one({"x": np.array([[1, 2]])}, "x")


def test_a_real_tokenizer_has_what_is_needed() -> None:
    """Negative ids would be an OverflowError inside the tokenizers library; they never get there."""
    tokenizer = Tokenizer(Backend.from_str('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'), {}, {}, None)
    with pytest.raises(RequestError, match="has the token id -5"):
        read_request(
            arrays(stop_words_list=[[-5, 0], [2, -1]]), "", {}, 0, tokenizer, Defaults(True, 0)
        )  # fmt: skip


@pytest.mark.parametrize("value", ["x", -1, 1.5, [1], 2**63])
def test_a_timeout_that_is_no_count_of_microseconds(value: object) -> None:
    with pytest.raises(RequestError, match="microseconds"):
        wanted_timeout_us({"timeout": value}, 0)
