"""From the tensors of one Triton request to a request of the executor. What is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sits_trt import wire
from sits_trt.errors import RequestError, did_you_mean
from sits_trt.runtime.request import Request, SamplingParams
from sits_trt.serving.bodies.tensors import Arrays, one, texts, word_ids

_TYPES = {
    "BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32,
    "STRING": np.object_,
}  # fmt: skip

KNOWN_PARAMETERS = ("id", "timeout", "sequence_id", "sequence_start", "sequence_end")
"""Request parameters that the server or its HTTP front end sets by itself, and `timeout`, which is obeyed."""


class Words(Protocol):
    """What is needed of a tokenizer here."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing; `queue_timeout_ms` 0 is no bound."""

    exclude_input: bool
    queue_timeout_ms: int


@dataclass(frozen=True)
class Asked:
    """One request, and the form in which its caller wants the answer.

    `echo` is put before the answer; only an answer in one piece has one, as in tensorrtllm_backend.
    """

    request: Request
    streaming: bool
    echo: bool
    logprobs: bool
    timings: bool
    input_count: bool
    output_count: bool


def read_request(
    arrays: Arrays, request_id: str, parameters: Mapping[str, Any], timeout_us: int, words: Words, defaults: Defaults
) -> Asked:
    """Return what the tensors ask for.

    Answers are greedy unless a temperature, top_k or top_p is given; temperature is 1 where only the others are.
    Raises RequestError for values of the wrong form, and for anything unsupported that would change the answer.
    """
    refuse_undeclared(arrays, wire.EXECUTOR_INPUTS)
    refuse_unsupported(arrays, wire.EXECUTOR_INPUTS)
    refuse_unknown(parameters)
    streaming = bool(one(arrays, "streaming"))
    exclude_input = one(arrays, "exclude_input_in_output")
    logprobs = bool(one(arrays, "return_log_probs"))
    request = Request(
        request_id,
        _prompt(arrays),
        _sampling(arrays, words, logprobs),
        priority=one(arrays, "priority") or 0,
        queue_timeout_ms=_queue_timeout_ms(parameters, timeout_us, defaults.queue_timeout_ms),
    )
    return Asked(
        request,
        streaming=streaming,
        echo=not streaming and not (defaults.exclude_input if exclude_input is None else exclude_input),
        logprobs=logprobs,
        timings=bool(one(arrays, "return_perf_metrics")),
        input_count=bool(one(arrays, "return_num_input_tokens")),
        output_count=bool(one(arrays, "return_num_output_tokens")),
    )


def refuse_undeclared(arrays: Arrays, declared: Sequence[wire.Tensor]) -> None:
    """Raise RequestError for an input that the model does not have, or has as another type.

    Triton sees to it for those that come through it.
    """
    types = {tensor.name: tensor.dtype for tensor in declared}
    for name, array in arrays.items():
        if name not in types:
            raise RequestError(f"there is no input '{name}'{did_you_mean(name, list(types))}")
        if array.dtype != _TYPES[types[name]]:
            raise RequestError(f"input '{name}' has the type {array.dtype}; send {types[name]}")


def refuse_unsupported(arrays: Arrays, declared: Sequence[wire.Tensor]) -> None:
    """Raise RequestError for an input that is declared for its senders' sake and has a value that asks for more."""
    for tensor in declared:
        array = arrays.get(tensor.name)
        if array is None or tensor.neutral is None or tensor.neutral == wire.ANY:
            continue
        for value in array.reshape(-1).tolist():
            if value not in tensor.neutral:
                allowed = " or ".join(f"{v:g}" for v in tensor.neutral)
                way_out = f"send {allowed} or leave it out" if tensor.neutral else "leave it out"
                raise RequestError(f"input '{tensor.name}' is not supported by this server; {way_out}")


def refuse_unknown(parameters: Mapping[str, Any]) -> None:
    """Raise RequestError for a request parameter that nobody reads: most often a misspelt input of 'generate'."""
    for name in parameters:
        if name not in KNOWN_PARAMETERS and not name.startswith("triton_"):
            known = sorted({t.name for t in wire.TEXT_INPUTS + wire.EXECUTOR_INPUTS})
            raise RequestError(f"there is no input or parameter '{name}'{did_you_mean(name, known)}")


def wanted_timeout_us(parameters: Mapping[str, Any], timeout_us: int) -> int:
    """Return the request's own longest wait, from its header or a parameter; 0 is none. Raises RequestError."""
    wanted = timeout_us or parameters.get("timeout") or 0
    if not isinstance(wanted, int) or not 0 <= wanted < 2**63:
        raise RequestError(f"timeout is {wanted!r}; it must be a number of microseconds")
    return wanted


def _prompt(arrays: Arrays) -> tuple[int, ...]:
    ids = arrays.get("input_ids")
    length = one(arrays, "input_lengths")
    if ids is None or length is None:
        raise RequestError("input_ids and input_lengths are needed")
    flat = ids.reshape(-1)
    if not 0 <= length <= flat.size:
        raise RequestError(f"input_lengths is {length}, but input_ids has {flat.size} tokens")
    return tuple(flat[:length].tolist())


def _sampling(arrays: Arrays, words: Words, logprobs: bool) -> SamplingParams:
    temperature, top_k, top_p = (one(arrays, n) for n in ("temperature", "runtime_top_k", "runtime_top_p"))
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    end_id = one(arrays, "end_id")
    own_end = end_id is not None and end_id not in words.eos_token_ids
    stop_ids, stop = _stops(arrays, words)
    if own_end and end_id != -1:
        stop_ids = (*stop_ids, end_id)
    max_tokens = one(arrays, "request_output_len")
    if max_tokens is None:
        raise RequestError("request_output_len is needed")
    penalties = {name: one(arrays, name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")}
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=one(arrays, "min_tokens") or 0,
        temperature=temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        seed=one(arrays, "seed"),
        stop_token_ids=stop_ids,
        stop=stop,
        bad_words=_bad_words(arrays, words),
        ignore_eos=own_end,
        logprobs=logprobs,
        **{name: value for name, value in penalties.items() if value is not None},
    )


def _stops(arrays: Arrays, words: Words) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids and the texts that end the answer. A list of several ids stops where its text appears."""
    listed = word_ids(arrays, "stop_words_list")
    ids = tuple(word[0] for word in listed if len(word) == 1)
    spelt = tuple(words.decode(word) for word in listed if len(word) > 1)
    return ids, texts(arrays, "stop_words") + tuple(text for text in spelt if text)


def _bad_words(arrays: Arrays, words: Words) -> tuple[tuple[int, ...], ...]:
    """Return the banned token sequences: those listed, and the spellings of each text alone and after a space."""
    banned = list(word_ids(arrays, "bad_words_list"))
    for text in texts(arrays, "bad_words"):
        banned += [tuple(words.encode(form, add_special_tokens=False)) for form in (text, f" {text}")]
    return tuple(dict.fromkeys(word for word in banned if word))


def _queue_timeout_ms(parameters: Mapping[str, Any], timeout_us: int, default_ms: int) -> int:
    """Return the longest wait: the request's own, but never more than the model's, as Triton has it; 0 is no bound."""
    wanted_ms = -(-wanted_timeout_us(parameters, timeout_us) // 1000)
    return min(wanted_ms, default_ms) if wanted_ms and default_ms else wanted_ms or default_ms
