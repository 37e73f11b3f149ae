from collections.abc import Sequence

import pytest

from sits_trt.runtime.answer import Answer
from sits_trt.runtime.detokenizer import Detokenizer
from sits_trt.runtime.request import FinishReason, SamplingParams


class Words:
    """Token i is word i."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[token] for token in ids)


def run(
    words: Sequence[str], tokens: Sequence[int], end: frozenset[int] = frozenset(), **sampling: object
) -> tuple[list[str], FinishReason | None]:
    params = SamplingParams(**{"max_tokens": len(tokens), **sampling})  # type: ignore[arg-type]
    answer = Answer(params, end, Detokenizer(Words(*words)))
    shown: list[str] = []
    for token in tokens:
        text, reason = answer.push(token)
        shown.append(text)
        if reason:
            return shown, reason
    return shown, None


def test_length_flushes_what_was_held() -> None:
    assert run(["ab", "c"], [0, 1], stop=("cd",)) == (["ab", "c"], FinishReason.LENGTH)
    assert run(["ab", "c"], [0, 1], stop=("cd",), max_tokens=3) == (["ab", ""], None)


def test_a_stop_id_ends_without_text_and_releases_what_was_held() -> None:
    assert run(["ab", "c", "END"], [0, 1, 2], frozenset({2}), stop=("cd",)) == (["ab", "", "c"], FinishReason.STOP)


def test_b36_a_stop_string_ends_with_stop() -> None:
    words = ["AL", "PH", "A BE", "TA", "x"]
    assert run(words, [0, 1, 2, 3, 4], stop=("ALPHA BETA",)) == (["", "", "", ""], FinishReason.STOP)
    # Complete with the last token that is allowed: it is a stop, not a length.
    assert run(words, [4, 0, 1, 2, 3], stop=("ALPHA BETA",))[1] is FinishReason.STOP
    shown, reason = run(words, [0, 1, 2, 3, 4], stop=("ALPHAX",))
    assert ("".join(shown), reason) == ("ALPHA BETAx", FinishReason.LENGTH)


def test_a_stop_string_before_min_tokens_is_text() -> None:
    assert run(["a", "STOP"], [1, 0, 1], stop=("STOP",), min_tokens=1) == (["STOP", "a", ""], FinishReason.STOP)


def test_a_held_character_is_flushed_at_the_end() -> None:
    assert run(["a", "\ufffd"], [0, 1]) == (["a", "\ufffd"], FinishReason.LENGTH)


def test_without_a_detokenizer_there_is_no_text() -> None:
    answer = Answer(SamplingParams(2), frozenset({9}), None)
    assert [answer.push(1), answer.push(9)] == [("", None), ("", FinishReason.STOP)]
    with pytest.raises(AssertionError, match="need text"):
        Answer(SamplingParams(2, stop=("x",)), frozenset(), None)
