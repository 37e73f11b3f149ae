import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sits_trt.runtime.detokenizer import REPLACEMENT, Detokenizer

WORDS = ["▁", "▁Hello", "▁world", "lo", ",", "!", "▁▁", ".", "▁é", "迭"]


class Text:
    """A tokenizer of the tokenizers library, with the one method that is needed."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.vocab = backend.get_vocab_size()
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self.byte_tokens = frozenset(id for id in ids if id is not None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def ids(self, *tokens: str) -> list[int]:
        return [self.backend.token_to_id(token) for token in tokens]


def byte_level() -> Text:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Text(backend)


def sentencepiece() -> Text:
    """Words that begin with a space, and a token for each byte, as in Llama 2 and Mistral."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Text(backend)


def metaspace() -> Text:
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(WORDS)}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return Text(backend)


KINDS = {"byte_level": byte_level(), "sentencepiece": sentencepiece(), "metaspace": metaspace()}


def pieces(text: Text, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(text, text.byte_tokens)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def check(text: Text, ids: Sequence[int]) -> list[str]:
    parts = pieces(text, ids)
    whole = text.decode(ids)
    assert "".join(parts) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in part for part in parts)
    return parts


def encode_bytes(text: Text, words: str) -> list[int]:
    return text.backend.encode(words).ids


def test_b35_emoji_and_cjk_over_several_tokens() -> None:
    text = KINDS["byte_level"]
    ids = encode_bytes(text, "hi 🔥é迭!")
    assert all(REPLACEMENT in text.decode([token]) for token in ids[3:7]), "each of the four alone is no character"
    assert check(text, ids) == ["h", "i", " ", "", "", "", "🔥", "", "é", "", "", "迭", "!", ""]


@pytest.mark.parametrize("length", range(1, 13))
def test_b35_an_answer_cut_in_mid_emoji_ends_as_the_decoder_ends_it(length: int) -> None:
    text = KINDS["byte_level"]
    check(text, encode_bytes(text, "hi 🔥é迭!")[:length])


def test_b35_spaces_between_words_are_kept() -> None:
    for kind in ("sentencepiece", "metaspace"):
        text = KINDS[kind]
        assert check(text, text.ids("▁Hello", "▁world", "▁Hello", "lo")) == ["Hello", " world", " Hello", "lo", ""]
        # The first space of the answer goes, as in the decoder; a special token does not take it along.
        assert check(text, text.ids("</s>", "▁Hello", "</s>", "▁world"))[1:4] == ["Hello", "", " world"]


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_b35_a_space_after_many_special_tokens_is_kept(kind: str) -> None:
    """A window of special tokens alone would begin with the next word, and the decoder would drop its space."""
    text = KINDS[kind]
    for count in range(1, 40):
        assert check(text, text.ids("▁Hello", *["</s>"] * count, "▁world"))[-2] == " world"


def test_a_run_of_byte_tokens_is_shown_when_it_is_whole() -> None:
    text = KINDS["sentencepiece"]
    emoji = [f"<0x{byte:02X}>" for byte in "🔥".encode()]
    assert check(text, text.ids("▁Hello", *emoji, "lo")) == ["Hello", "", "", "", "", "🔥lo", ""]
    # This decoder gives up a whole run for one bad byte, the good ones before it too.
    assert check(text, text.ids("▁Hello", *emoji, "<0xFF>", "lo"))[-2] == REPLACEMENT * 5 + "lo"
    assert check(text, text.ids("▁Hello", "<0x0A>"))[-1] == "\n"
    # A special token is left out before runs are looked for.
    assert check(text, text.ids("▁Hello", "<0x0A>", "</s>", "<0xFF>", "lo"))[-2] == REPLACEMENT * 2 + "lo"


def test_a_long_answer_is_decoded_in_small_windows() -> None:
    text = KINDS["byte_level"]
    longest = 0

    class Counting(Text):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    ids = encode_bytes(text, "word 🔥 " * 100)
    counting = Counting(text.backend)
    assert "".join(pieces(counting, ids)) == text.decode(ids)
    # Sixteen, and the rest of a character that is open when the sixteenth comes.
    assert longest <= 19


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_repeats_an_invalid_byte_streams_on(kind: str) -> None:
    text = KINDS[kind]
    ids = [200] * 50 if kind != "metaspace" else [0] * 50
    check(text, ids)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 2**32), st.integers(0, 80))
def test_b35_joined_pieces_are_the_one_shot_decode_of_any_ids(kind: str, seed: int, length: int) -> None:
    text, rng = KINDS[kind], random.Random(seed)
    # Runs of one token and of a few make what happens at window edges likely.
    few = [rng.randrange(text.vocab) for _ in range(rng.randrange(1, 6))]
    check(text, [rng.choice(few) if rng.random() < 0.7 else rng.randrange(text.vocab) for _ in range(length)])


@given(st.text("a \n\0é迭🔥\u0301\u200d\ufeff\U0010ffff", max_size=40))
def test_b35_any_text_streams_without_replacement_marks(words: str) -> None:
    text = KINDS["byte_level"]
    assert "".join(check(text, encode_bytes(text, words))) == words
