"""Asking a server: one answer, or a stream of its parts, over tritonclient's gRPC.

A stream's last part is the one with a finish_reason; on the wire it also carries Triton's final flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from sits_trt import wire
from sits_trt.artifacts import BuildDirectory, read_manifest
from sits_trt.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sits_trt.errors import RequestError, ServerError, did_you_mean

_NUMPY: dict[str, type[np.generic]] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
_KINDS = {"STRING": "BYTES"}
_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


@dataclass(frozen=True)
class Part:
    """What one response brought. `finish_reason` is empty but for the last part: stop, length or cancelled."""

    text: str
    output_tokens: int
    prompt_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Answer:
    """A whole answer; the counts are tokens."""

    text: str
    output_tokens: int
    prompt_tokens: int
    finish_reason: str


def text_inputs(values: Mapping[str, Any]) -> list[InferInput]:
    """Return input tensors of the text models, each [1, n], for Python values by name; None leaves an input out.

    Raises RequestError for a name that the models do not have.
    """
    declared = {tensor.name: tensor for tensor in wire.TEXT_INPUTS}
    inputs = []
    for name, value in values.items():
        if value is None:
            continue
        if name not in declared:
            raise RequestError(f"there is no input '{name}'{did_you_mean(name, list(declared))}")
        inputs.append(make_input(declared[name], value))
    return inputs


def make_input(tensor: wire.Tensor, value: Any) -> InferInput:
    """Return one input [1, n] holding `value`, which may be a list. Texts travel as UTF-8."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if tensor.dtype == "STRING":
        listed = [text.encode("utf-8") if isinstance(text, str) else text for text in listed]
    kind = _NUMPY[tensor.dtype]
    try:
        # numpy 1.26 wraps integers that do not fit, with a warning only.
        if issubclass(kind, np.integer) and any(not np.iinfo(kind).min <= n <= np.iinfo(kind).max for n in listed):
            raise OverflowError(f"it is no {tensor.dtype}")
        array = np.array([listed], dtype=kind)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"input '{tensor.name}' cannot be {value!r}: {error}") from None
    made = InferInput(tensor.name, list(array.shape), _KINDS.get(tensor.dtype, tensor.dtype))
    made.set_data_from_numpy(array)
    return made


def stream(
    url: str,
    prompt: str,
    max_tokens: int,
    *,
    model: str = wire.ENSEMBLE,
    request_id: str = "",
    timeout_s: float | None = None,
    **inputs: Any,
) -> Iterator[Part]:
    """Yield the parts of an answer as they come; closing the iterator early cancels the request on the server.

    `url` is the gRPC 'host:port'. `inputs` are further inputs of the model by name: temperature, top_k, top_p, seed,
    stop_words, ... The answer must be complete `timeout_s` after the call where that is given.
    Raises RequestError when the server refuses the request or is too late, ServerError when there is no server.
    """
    values = {"text_input": prompt, "max_tokens": max_tokens, "stream": True} | inputs
    yield from _ask(url, model, values, request_id, timeout_s)


def generate(
    url: str,
    prompt: str,
    max_tokens: int,
    *,
    model: str = wire.ENSEMBLE,
    request_id: str = "",
    timeout_s: float | None = None,
    **inputs: Any,
) -> Answer:
    """Return a whole answer, which the server sends in one piece. Arguments and errors are those of `stream`."""
    values = {"text_input": prompt, "max_tokens": max_tokens, "stream": False} | inputs
    (part,) = _ask(url, model, values, request_id, timeout_s)
    return Answer(part.text, part.output_tokens, part.prompt_tokens, part.finish_reason)


def _ask(
    url: str, model: str, values: Mapping[str, Any], request_id: str, timeout_s: float | None
) -> Iterator[Part]:  # fmt: skip
    tensors = text_inputs({**values, "return_num_input_tokens": True, "return_num_output_tokens": True})
    outputs = [InferRequestedOutput(name) for name in _OUTPUTS]
    arrived: SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = SimpleQueue()
    client = InferenceServerClient(url)
    ended = False
    try:
        client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=timeout_s)
        try:
            client.async_stream_infer(
                model, tensors, outputs=outputs, request_id=request_id, enable_empty_final_response=True
            )
        except InferenceServerException as broken:
            # The stream broke before the request was sent; why, the receiving side has been told.
            raise _explain(arrived.get()[1] or broken, url, timeout_s) from None
        while True:
            result, error = arrived.get()
            if error is not None or result is None:
                raise _explain(error, url, timeout_s)
            response = result.get_response()
            ended = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield _part(result)
            if ended:
                return
    finally:
        client.stop_stream(cancel_requests=not ended)
        client.close()


def _part(result: InferResult) -> Part:
    values = {name: result.as_numpy(name) for name in _OUTPUTS}
    return Part(
        text=_text(values["text_output"]),
        output_tokens=int(values["num_output_tokens"].sum()),
        prompt_tokens=int(values["num_input_tokens"].sum()),
        finish_reason=_text(values["finish_reason"]),
    )


def _text(array: Any) -> str:
    return b"".join(array.reshape(-1)).decode("utf-8")


def _explain(error: InferenceServerException | None, url: str, timeout_s: float | None) -> RequestError | ServerError:
    message = " ".join(error.message().split()) if error else "the server closed the stream"
    status = (error.status() or "") if error else ""
    if "DEADLINE_EXCEEDED" in status:
        return RequestError(f"the answer was not complete within {timeout_s:g} s")
    if "UNAVAILABLE" in status:
        return ServerError(f"no Triton Server answers at {url} ({message}); start one with 'sits-trt serve'")
    return RequestError(message.removeprefix(f"in ensemble '{wire.ENSEMBLE}', "))


def tokenizer_of(build_dir: Path) -> Tokenizer:
    """Return the tokenizer of a build, whose chat template makes prompts."""
    repository = BuildDirectory(build_dir).repository
    return load_tokenizer(repository / str(read_manifest(repository, "repository").details["tokenizer"]))


def chat_prompt(tokenizer: Tokenizer, user: str, system: str | None = None) -> dict[str, Any]:
    """Return `prompt` and `add_special_tokens` for one turn of chat in the form that the model was trained on.

    Templates that begin with the BOS token themselves must not get it twice.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": user}])
    return {"prompt": prompt, "add_special_tokens": False}
