import math

import pytest

from sits_trt.errors import RequestError
from sits_trt.runtime.request import FinishReason, Request, SamplingParams, TokenEvent, join_events

VOCAB = 97


def refused(match: str, max_tokens: int = 4, **values: object) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams(max_tokens, **values).validate(VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [-1, 0, 97, 100000])
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-4])
@pytest.mark.parametrize("top_p", [0.0, 1.0])
def test_b31_odd_values_with_a_meaning_are_taken(top_k: int, temperature: float, top_p: float) -> None:
    SamplingParams(4, top_k=top_k, temperature=temperature, top_p=top_p).validate(VOCAB)


def test_b31_values_without_a_meaning_are_refused() -> None:
    refused("max_tokens is 0", max_tokens=0)
    refused("max_tokens is -1", max_tokens=-1)
    refused("top_p is 1.5", top_p=1.5)
    refused("top_p is -0.1", top_p=-0.1)
    for value in (math.nan, math.inf, -1.0):
        refused("temperature", temperature=value)
    refused("top_p is nan", top_p=math.nan)
    for value in (math.nan, math.inf, 0.0, -2.0):
        refused("repetition_penalty", repetition_penalty=value)
    refused("presence_penalty is nan", presence_penalty=math.nan)
    refused("frequency_penalty is inf", frequency_penalty=math.inf)
    refused("min_tokens is 5", min_tokens=5)
    refused("min_tokens is -1", min_tokens=-1)
    refused("stop token id 97 is not in the vocabulary of 97", stop_token_ids=(1, 97))
    refused("stop token id -1", stop_token_ids=(-1,))
    refused("a stop string is empty", stop=("a", ""))
    refused("a bad word has no tokens", bad_words=((1,), ()))
    refused("bad word 200", bad_words=((1, 200),))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, None])
def test_b43_every_64_bit_seed_is_taken(seed: int | None) -> None:
    SamplingParams(1, seed=seed).validate(VOCAB)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_b43_other_seeds_are_refused(seed: int) -> None:
    refused("seed", seed=seed)


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({}, True),
        ({"temperature": 1e-12}, True),
        ({"temperature": 1e-4}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_p": 0.0}, True),
        ({"temperature": 1.0}, False),
    ],
)
def test_b31_tiny_temperatures_are_greedy(values: dict[str, float], greedy: bool) -> None:
    assert SamplingParams(1, **values).greedy is greedy  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [64, 65, 5000])
def test_b30_a_prompt_without_room_for_an_answer_names_both_numbers(length: int) -> None:
    with pytest.raises(RequestError, match=rf"{length} tokens.* 64 tokens.*at most 63"):
        Request("x", (1,) * length, SamplingParams(1)).validate(VOCAB, 64)


def test_b30_prompt_and_max_tokens_must_fit_together() -> None:
    Request("x", (1,) * 63, SamplingParams(1)).validate(VOCAB, 64)
    Request("x", (1,) * 60, SamplingParams(4)).validate(VOCAB, 64)
    with pytest.raises(RequestError, match=r"60 tokens and max_tokens 5 are 65 together.*holds 64.*at most 4 tokens"):
        Request("x", (1,) * 60, SamplingParams(5)).validate(VOCAB, 64)


def test_prompts_are_checked() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        Request("x", (), SamplingParams(1)).validate(VOCAB, 64)
    for bad in (97, -1):
        with pytest.raises(RequestError, match=f"prompt token id {bad} is not in the vocabulary of 97"):
            Request("x", (1, bad), SamplingParams(1)).validate(VOCAB, 64)
    with pytest.raises(RequestError, match="queue_timeout_ms"):
        Request("x", (1,), SamplingParams(1), queue_timeout_ms=-1).validate(VOCAB, 64)


def test_joined_events_say_the_same_as_all_of_them() -> None:
    events = [
        TokenEvent("x", (1,), "a", logprobs=(-0.5,), output_tokens=1),
        TokenEvent("x", (2,), "", logprobs=(-0.25,), output_tokens=2),
        TokenEvent("x", (), "bc", FinishReason.STOP, output_tokens=2),
    ]
    joined = join_events(iter(events))
    assert (joined.token_ids, joined.text, joined.logprobs) == ((1, 2), "abc", (-0.5, -0.25))
    assert (joined.finish_reason, joined.output_tokens) == (FinishReason.STOP, 2)
