"""One result for each way of asking; texts of any kind both ways; what cannot be served is refused in one sentence."""

from __future__ import annotations

import json
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from sits_trt.errors import RequestError, ServerError
from sits_trt.serving.client import Part, generate, stream, text_inputs
from sits_trt.serving.server import TritonServer
from tests.serving.conftest import MAX_SEQ_TOKENS, Foretold
from tests.support.server import http_generate, http_post, http_stream, metrics, wait_until_idle

pytestmark = pytest.mark.server

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
ENDLESS = {"end_id": -1}
TOKENS = 400
"""So many that a stream takes more than one response, however many tokens the server puts into one when it is busy."""


def streamed(value: bool | None) -> dict[str, Any]:
    return {} if value is None else {"stream": value}


def grpc_parts(server: TritonServer, model: str, **inputs: Any) -> list[Part]:
    return list(stream(server.endpoints.grpc, "matrix", TOKENS, model=model, **ENDLESS, **inputs))


@pytest.mark.parametrize("model", TEXT_MODELS)
class TestMatrix:
    """B51: endpoint by `stream`."""

    @pytest.mark.parametrize("value", [False, None])
    def test_b51_generate_gives_one_whole_answer(
        self, value: bool | None, model: str, null_server: TritonServer, foretold: Foretold
    ) -> None:
        status, answer = http_generate(
            null_server, model, text_input="matrix", max_tokens=TOKENS, **ENDLESS, **streamed(value)
        )
        assert (status, answer["text_output"]) == (200, foretold.text("matrix", TOKENS))
        assert answer["finish_reason"] == "length"

    def test_b51_generate_refuses_a_stream_and_names_the_other_endpoint(
        self, model: str, null_server: TritonServer
    ) -> None:
        _, answer = http_generate(null_server, model, text_input="matrix", max_tokens=TOKENS, stream=True, **ENDLESS)
        assert "use generate stream" in answer["error"]
        wait_until_idle(null_server)

    @pytest.mark.parametrize("value", [True, False, None])
    def test_b51_generate_stream_follows_the_input(
        self, value: bool | None, model: str, null_server: TritonServer, foretold: Foretold
    ) -> None:
        status, events = http_stream(
            null_server, model, text_input="matrix", max_tokens=TOKENS, **ENDLESS, **streamed(value)
        )
        assert status == 200
        assert "".join(event["text_output"] for event in events) == foretold.text("matrix", TOKENS)
        assert (len(events) > 1) is bool(value)
        assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]

    @pytest.mark.parametrize("value", [True, False, None])
    def test_b51_grpc_stream_follows_the_input(
        self, value: bool | None, model: str, null_server: TritonServer, foretold: Foretold
    ) -> None:
        parts = grpc_parts(null_server, model, stream=value)
        assert "".join(part.text for part in parts) == foretold.text("matrix", TOKENS)
        assert (len(parts) > 1) is bool(value)
        assert [part.finish_reason for part in parts] == [""] * (len(parts) - 1) + ["length"]

    @pytest.mark.parametrize("value", [True, False, None])
    def test_b51_unary_calls_are_refused_and_say_why(
        self, value: bool | None, model: str, null_server: TritonServer
    ) -> None:
        inputs = text_inputs({"text_input": "matrix", "max_tokens": TOKENS, "stream": value})
        with (
            InferenceServerClient(null_server.endpoints.grpc) as client,
            pytest.raises(InferenceServerException, match="doesn't support models with decoupled"),
        ):
            client.infer(model, inputs)
        body = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["matrix"]}]}
        status, text = http_post(null_server, f"/v2/models/{model}/infer", json.dumps(body).encode())
        assert status == 501
        assert b"doesn't support models with decoupled" in text


TEXTS = ["é🔥", "a\0\0b\0", "line\nline\r\n\ttab", "漢字かな 한글 ｱ", "\u202e\ufeff\U0010ffff", "x" * 3000]


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_b50_text_survives_both_ways(text: str, model: str, null_server: TritonServer, foretold: Foretold) -> None:
    """The null runner's answer depends on every byte of the prompt, and the echo is the prompt itself."""
    expected = text + foretold.text(text, 5)
    values = {"exclude_input_in_output": False, **ENDLESS}
    answer = generate(null_server.endpoints.grpc, text, 5, model=model, **values)
    assert answer.text == expected
    assert answer.prompt_tokens == len(text.encode())
    status, found = http_generate(null_server, model, text_input=text, max_tokens=5, **values)
    assert (status, found["text_output"]) == (200, expected)


def test_b50_a_megabyte_of_text_arrives_whole(null_server: TritonServer) -> None:
    """It is more than the engine holds: the refusal counts its characters."""
    text = "ü🔥\0" * 150_000
    assert len(text.encode()) > 1_000_000
    sentence = f"the prompt has {len(text)} characters, but this engine's tokens hold at most"
    with pytest.raises(RequestError, match=sentence):
        generate(null_server.endpoints.grpc, text, 5)
    status, found = http_generate(null_server, "tensorrt_llm_bls", text_input=text, max_tokens=5)
    assert status == 400
    assert sentence in found["error"]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_b50_bad_utf8_is_refused(model: str, null_server: TritonServer) -> None:
    with pytest.raises(RequestError, match="input 'text_input' is not UTF-8: byte 2 is 0xff"):
        list(stream(null_server.endpoints.grpc, b"ab\xff", 5, model=model))  # type: ignore[arg-type]
    status, text = http_post(
        null_server, f"/v2/models/{model}/generate", b'{"text_input": "ab\xff", "max_tokens": 5}'
    )  # fmt: skip
    assert status == 400
    assert b"is not UTF-8" in text
    with pytest.raises(RequestError, match="input 'stop_words' is not UTF-8"):
        list(stream(null_server.endpoints.grpc, "ab", 5, model=model, stop_words=[b"\xe9"]))


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("stream_flag", [True, False])
def test_b30_length_limits_say_both_numbers(stream_flag: bool, model: str, null_server: TritonServer) -> None:
    limit = MAX_SEQ_TOKENS
    for tokens, max_tokens, sentence in (
        (limit - 1, 1, None),
        (limit - 1, 2, f"{limit + 1} together, but this engine holds {limit}"),
        (limit, 1, f"the prompt has {limit} tokens, but this engine holds {limit}"),
        (limit + 1, 1, f"the prompt has {limit + 1} tokens"),
        (5 * limit, 1, f"the prompt has {5 * limit} tokens"),
    ):
        status, events = http_stream(
            null_server, model, text_input="p" * tokens, max_tokens=max_tokens, stream=stream_flag, **ENDLESS
        )
        if sentence is None:
            assert (status, events[-1]["finish_reason"]) == (200, "length")
        else:
            assert status == 400
            assert sentence in events[0]["error"]
        assert generate(null_server.endpoints.grpc, "short", 2, model=model, **ENDLESS).output_tokens == 2


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"top_k": -1}, None),
        ({"top_k": 0}, None),
        ({"top_k": 257}, None),
        ({"top_k": 100_000}, None),
        ({"temperature": 0.0}, None),
        ({"temperature": 1e-12}, None),
        ({"temperature": 1e-4}, None),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, None),
        ({"top_p": 1.0}, None),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"seed": 2**64 - 1, "temperature": 1.0}, None),
        ({"beam_width": 1, "num_return_sequences": 1, "length_penalty": 3.0}, None),
        ({"beam_width": 2}, "input 'beam_width' is not supported by this server; send 1 or leave it out"),
        ({"num_return_sequences": 2}, "input 'num_return_sequences' is not supported"),
        ({"lora_task_id": 0}, "input 'lora_task_id' is not supported by this server; leave it out"),
        ({"return_context_logits": True}, "input 'return_context_logits' is not supported"),
        ({"return_context_logits": False}, None),
        ({"guided_decoding_guide": "{}"}, "input 'guided_decoding_guide' is not supported"),
        ({"stop_words": [""], "bad_words": [""]}, None),
    ],
)
def test_b31_odd_values_are_refused_or_served(
    values: dict[str, Any], refusal: str | None, null_server: TritonServer
) -> None:
    asked = {"max_tokens": 3, **ENDLESS, **values}
    for model in TEXT_MODELS:
        if refusal is None:
            assert generate(null_server.endpoints.grpc, "odd", model=model, **asked).output_tokens == 3
        else:
            with pytest.raises(RequestError, match=refusal.replace("(", r"\(")):
                generate(null_server.endpoints.grpc, "odd", model=model, **asked)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_misspelt_key_is_named(model: str, null_server: TritonServer) -> None:
    status, answer = http_generate(null_server, model, text_input="x", max_tokens=2, temprature=0.5)
    assert status == 400
    assert "there is no input or parameter 'temprature' (did you mean temperature?)" in answer["error"]
    status, _ = http_generate(null_server, model, text_input="x", max_tokens=2, priority=3)
    assert status == 200


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_what_is_asked_for_is_returned(model: str, null_server: TritonServer) -> None:
    plain = http_generate(null_server, model, text_input="abc", max_tokens=4, **ENDLESS)[1]
    extras = {"return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"}
    full = http_generate(
        null_server, model, text_input="abc", max_tokens=4, **ENDLESS, **dict.fromkeys(extras, True)
    )[1]  # fmt: skip
    assert set(full) - set(plain) == {
        "cum_log_probs", "output_log_probs", "num_input_tokens", "num_output_tokens",
        "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
    }  # fmt: skip
    assert (full["num_input_tokens"], full["num_output_tokens"]) == (3, 4)
    assert len(full["output_log_probs"]) == 4
    assert full["cum_log_probs"] == pytest.approx(sum(full["output_log_probs"]), rel=1e-5)
    times = [full[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_caller_that_wants_no_text_gets_its_whole_answer(model: str, null_server: TritonServer) -> None:
    """Triton leaves postprocessing out of such an ensemble: nobody reports on its caller then."""
    reasons: SimpleQueue[str] = SimpleQueue()

    def take(result: Any, error: Any) -> None:
        found = b"error" if error else result.as_numpy("finish_reason").reshape(-1)[0]
        if found:
            reasons.put(found.decode())

    with InferenceServerClient(null_server.endpoints.grpc) as client:
        client.start_stream(take)
        inputs = text_inputs({"text_input": "no text", "max_tokens": 3000, "stream": True, **ENDLESS})
        client.async_stream_infer(model, inputs, outputs=[InferRequestedOutput("finish_reason")])
        assert reasons.get(timeout=60) == "length"
        client.stop_stream()


def test_token_ids_in_and_out_without_the_text_models(null_server: TritonServer) -> None:
    """A client of tensorrtllm_backend that tokenizes itself; the prompt is part of the answer where it asks so."""
    ids = [5, 6, 7]
    body = {"input_ids": ids, "input_lengths": 3, "request_output_len": 4, "end_id": -1}
    answer = http_generate(null_server, "tensorrt_llm", **body)[1]
    assert answer["sequence_length"] == 4
    whole = http_generate(null_server, "tensorrt_llm", **body, exclude_input_in_output=False)[1]
    assert whole["output_ids"] == ids + answer["output_ids"]
    text = {"TOKENS_BATCH": answer["output_ids"], "SEQUENCE_LENGTH": 4}
    inputs = [
        {"name": "TOKENS_BATCH", "shape": [1, 1, 4], "datatype": "INT32", "data": text["TOKENS_BATCH"]},
        {"name": "SEQUENCE_LENGTH", "shape": [1, 1], "datatype": "INT32", "data": [4]},
    ]
    status, found = http_post(null_server, "/v2/models/postprocessing/infer", json.dumps({"inputs": inputs}).encode())
    assert status == 200
    assert json.loads(found)["outputs"][0]["data"] == [answer["output_text"]]
    stopped = http_generate(null_server, "tensorrt_llm", **{**body, "end_id": answer["output_ids"][1]})[1]
    assert (stopped["finish_reason"], stopped["output_ids"]) == ("stop", answer["output_ids"][:2])


def test_preprocessing_gives_words_as_tensorrtllm_backend_does(null_server: TritonServer) -> None:
    inputs = [
        {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["hey"]},
        {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [9]},
        {"name": "STOP_WORDS_DICT", "shape": [1, 2], "datatype": "BYTES", "data": ["ab", "c"]},
    ]
    _, text = http_post(null_server, "/v2/models/preprocessing/infer", json.dumps({"inputs": inputs}).encode())
    found = {t["name"]: (t["shape"], t["data"]) for t in json.loads(text)["outputs"]}
    shape, words = found["STOP_WORDS_IDS"]
    assert shape == [1, 2, 3]
    assert words[3:] == [2, 3, -1]
    assert found["BAD_WORDS_IDS"] == ([1, 2, 1], [0, -1])
    assert found["REQUEST_INPUT_LEN"] == ([1, 1], [3])
    assert np.array(found["INPUT_ID"][1]).shape == (3,)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_stop_words_end_the_answer(model: str, null_server: TritonServer, foretold: Foretold) -> None:
    full = foretold.text("stop here", 300)
    word = next(full[i : i + 3] for i in range(40, 200) if full[i : i + 3].isascii() and full[i : i + 3].isprintable())
    expected = full[: full.index(word)]
    for flag in (True, False):
        parts = list(
            stream(
                null_server.endpoints.grpc,
                "stop here",
                300,
                model=model,
                stream=flag,
                stop_words=["🦆", word],
                **ENDLESS,
            )
        )
        assert "".join(part.text for part in parts) == expected
        assert parts[-1].finish_reason == "stop"


def test_loading_and_unloading_is_refused_and_changes_nothing(null_server: TritonServer) -> None:
    """B34: no part of an ensemble can be taken away from under it."""
    for action, model in (("unload", "ensemble"), ("unload", "postprocessing"), ("load", "tensorrt_llm")):
        status, text = http_post(null_server, f"/v2/repository/models/{model}/{action}", b"{}")
        assert status >= 400
        assert b"not allowed" in text
    status, text = http_post(null_server, "/v2/repository/index", b"{}")
    assert status == 200
    assert {model["state"] for model in json.loads(text)} == {"READY"}
    assert null_server.ready()


def test_metrics_count_what_happened(null_server: TritonServer) -> None:
    wait_until_idle(null_server)
    before = metrics(null_server)
    with pytest.raises(RequestError):
        generate(null_server.endpoints.grpc, "x", 0)
    for index in range(3):
        generate(null_server.endpoints.grpc, f"count {index}", 7, **ENDLESS)
    wait_until_idle(null_server)
    after = metrics(null_server)
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["sits_requests_total[completed]"] == 3
    assert change["sits_generated_tokens_total"] == 21
    assert change["sits_ttft_ms_count"] == change["sits_ttft_ms_bucket[+Inf]"] == 3
    assert change["sits_request_ms_count"] == 3
    assert change["sits_itl_ms_count"] == 18
    assert after["sits_tiles_total"] == after["sits_tiles_used"] + after["sits_tiles_free"]
    assert after["sits_executor_up"] == 1


def test_the_client_says_what_went_wrong(null_server: TritonServer) -> None:
    with pytest.raises(
        ServerError, match=r"no Triton Server answers at 127\.0\.0\.1:1 .* start one with 'sits-trt serve'"
    ):
        generate("127.0.0.1:1", "x", 1)
    with pytest.raises(RequestError, match=r"there is no input 'temprature' \(did you mean temperature"):
        generate(null_server.endpoints.grpc, "x", 1, temprature=1.0)
    with pytest.raises(RequestError, match="input 'max_tokens' cannot be 4294967296"):
        generate(null_server.endpoints.grpc, "x", 2**32)
    with pytest.raises(RequestError, match="nowhere"):
        generate(null_server.endpoints.grpc, "x", 1, model="nowhere")
