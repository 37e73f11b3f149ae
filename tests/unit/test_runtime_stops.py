import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_trt.runtime.stops import StopMatcher


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], bool]:
    """Return what is shown after each chunk, the rest last, and whether a stop was found."""
    matcher = StopMatcher(stops)
    shown = []
    for chunk in chunks:
        text, found = matcher.push(chunk)
        shown.append(text)
        if found:
            return shown, True
    return [*shown, matcher.flush()], False


def slow(stops: list[str], text: str) -> tuple[str, bool]:
    """The meaning, character by character: cut at the stop that is complete first, at the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def test_b36_a_stop_string_over_several_tokens_is_never_shown() -> None:
    assert run(["ALPHA BETA"], ["AL", "PH", "A BE", "TA"]) == (["", "", "", ""], True)


def test_b36_what_did_not_become_a_stop_is_all_shown() -> None:
    shown, found = run(["ALPHAX"], ["AL", "PH", "A BE", "TA"])
    assert not found
    assert "".join(shown) == "ALPHA BETA"
    # The tail is released as soon as it cannot match any more.
    assert shown[2] == "ALPHA BE"


def test_b36_nothing_behind_the_stop_is_shown() -> None:
    assert run(["END"], ["one EN", "D two"]) == (["one ", ""], True)


def test_b36_of_two_stops_the_one_complete_first_wins() -> None:
    assert run(["later", "soon"], ["a soon b later"]) == (["a "], True)
    assert run(["BC", "ABCD"], ["xABCD"]) == (["xA"], True)
    assert run(["C", "ABC"], ["xABC"]) == (["x"], True)


def test_no_more_is_held_back_than_can_become_a_stop() -> None:
    matcher = StopMatcher(["abab!"])
    assert matcher.push("xab") == ("x", False)
    assert matcher.push("ab") == ("", False)
    # "abab" + "a": the first "ab" can no longer start a stop, "aba" can.
    assert matcher.push("a") == ("ab", False)
    assert matcher.push("c") == ("abac", False)
    assert matcher.flush() == ""


@given(
    st.lists(st.text("ab!", min_size=1, max_size=5), min_size=1, max_size=3),
    st.text("ab!", max_size=30),
    st.integers(0, 2**32),
)
def test_b36_the_result_does_not_depend_on_the_chunks(stops: list[str], text: str, seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    chunks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, found = run(stops, chunks)
    assert ("".join(shown), found) == slow(stops, text)


@pytest.mark.parametrize("stop", ["🔥é", "\n\n", "</s>"])
def test_any_characters_will_do(stop: str) -> None:
    assert run([stop], ["a", *stop, "b"])[1]
