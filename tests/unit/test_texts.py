"""Blocks of calibration and evaluation text."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from sits_trt.checkpoint.texts import read_blocks, text_digest
from sits_trt.errors import CheckpointError


class Characters:
    """A tokenizer with one token per character, and BOS (id 1) where asked for."""

    def __init__(self, bos_token_id: int | None = None) -> None:
        self.bos_token_id = bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(character) for character in text]
        return [self.bos_token_id, *ids] if add_special_tokens and self.bos_token_id is not None else ids


def text_of(blocks: list[list[int]]) -> str:
    return "".join(chr(token) for block in blocks for token in block)


def write_rows(path: Path, *texts: str) -> str:
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    return str(path)


def test_pydoc_parts_are_the_alternate_topics() -> None:
    names = sorted(topics)
    for part, first in (("calibration", 0), ("evaluation", 1)):
        blocks = read_blocks("pydoc", Characters(), 3, 100, part)
        assert [len(block) for block in blocks] == [100, 100, 100]
        assert text_of(blocks) == "\n\n".join(topics[name] for name in names[first::2])[:300]


def test_b17_long_rows_are_chunked(tmp_path: Path) -> None:
    rows = [letter * 600 for letter in "abcd"]
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    blocks = read_blocks(source, Characters(), 32, 512, "calibration")
    assert text_of(blocks) == "\n\n".join(rows)
    assert [len(block) for block in blocks] == [512, 512, 512, 512, 358]


def test_b17_a_short_text_gives_one_short_block(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", "twenty tokens, it is")
    assert [len(block) for block in read_blocks(source, Characters(), 32, 512, "calibration")] == [20]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}'])
def test_b17_no_tokens_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="holds no tokens"):
        read_blocks(str(path), Characters(), 32, 512, "calibration")


def test_calibration_takes_a_files_first_blocks_and_evaluation_its_last(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x4E00 + i) for i in range(1000)), encoding="utf-8")
    first = read_blocks(str(path), Characters(), 2, 100, "calibration")
    last = read_blocks(str(path), Characters(), 2, 100, "evaluation")
    assert first[0][0] == 0x4E00
    assert last[-1][-1] == 0x4E00 + 999
    assert [len(block) for block in first + last] == [100] * 4


def test_only_the_needed_part_of_a_large_file_is_encoded(tmp_path: Path) -> None:
    longest = 0

    class Watched(Characters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode(text, add_special_tokens)

    path = tmp_path / "text.txt"
    path.write_text("x" * 100_000)
    assert len(read_blocks(str(path), Watched(), 2, 100, "calibration")) == 2
    assert longest <= 200 * 32


def test_every_block_starts_with_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh")
    blocks = read_blocks(str(path), Characters(bos_token_id=1), 4, 4, "calibration")
    assert blocks == [[1, *map(ord, "abc")], [1, *map(ord, "def")], [1, *map(ord, "gh")]]


def test_a_line_separator_inside_a_row_does_not_break_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", "one\u2028line")
    assert text_of(read_blocks(source, Characters(), 1, 512, "calibration")) == "one\u2028line"


def test_bad_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.txt"):
        read_blocks(str(tmp_path / "nowhere.txt"), Characters(), 1, 8, "calibration")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"txet": "wrong"}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        read_blocks(str(path), Characters(), 1, 8, "calibration")
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"line 1 .* not JSON"):
        read_blocks(str(path), Characters(), 1, 8, "calibration")
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"line 1 .* not JSON"):
        read_blocks(str(path), Characters(), 1, 8, "calibration")
    path.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(CheckpointError, match="not UTF-8"):
        read_blocks(str(path), Characters(), 1, 8, "calibration")


def test_text_digest_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one")
    before = text_digest(str(path))
    path.write_text("two")
    assert text_digest(str(path)) != before
    assert text_digest("pydoc") == text_digest("pydoc")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.JSONL"])
def test_a_byte_order_mark_and_a_suffix_in_capitals_change_nothing(tmp_path: Path, name: str) -> None:
    rows, plain = tmp_path / name, tmp_path / "plain.txt"
    rows.write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "one two"}).encode())
    plain.write_bytes(b"\xef\xbb\xbfone two")
    for path in (rows, plain):
        assert text_of(read_blocks(str(path), Characters(), 1, 100, "evaluation")) == "one two"
