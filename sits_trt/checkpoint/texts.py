"""Texts for calibration and evaluation, as blocks of token ids. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from sits_trt.artifacts import file_digest, fingerprint
from sits_trt.errors import CheckpointError

Part = Literal["calibration", "evaluation"]

PYDOC = "pydoc"
"""Name of the text that needs no file: the topics of Python's own help."""

_CHARACTERS_PER_TOKEN = 32
"""Far above any natural text: this much of a file is enough for the tokens wanted, however large the file."""


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    bos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def read_blocks(source: str, tokenizer: Encoder, blocks: int, block_tokens: int, part: Part) -> list[list[int]]:
    """Return up to `blocks` blocks of `block_tokens` token ids; only the last may be shorter, none is empty.

    `source` is 'pydoc', a text file, or a .jsonl file with a 'text' key per line; documents are joined by
    blank lines and cut into blocks, so that no text is dropped for its length. Of pydoc, calibration
    takes every second topic and evaluation the others. Of a file, calibration takes the first blocks and
    evaluation the last: they are apart when the file holds enough for both. Where the tokenizer starts
    texts with a BOS token, every block starts with it.
    Raises CheckpointError when the source cannot be read or holds no tokens.
    """
    text = _pydoc(part) if source == PYDOC else _file_text(Path(source))
    from_end = source != PYDOC and part == "evaluation"
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and bos in tokenizer.encode("") else []
    body = block_tokens - len(start)
    if body < 1:
        raise CheckpointError(f"block_tokens={block_tokens} leaves no room beside the BOS token; use at least 2")
    ids = _enough(lambda piece: tokenizer.encode(piece, add_special_tokens=False), text, blocks * body, from_end)
    if not ids:
        raise CheckpointError(f"text source '{source}' holds no tokens; give a text with at least a few words")
    ids = ids[-(blocks * body) :] if from_end else ids[: blocks * body]
    return [[*start, *ids[i : i + body]] for i in range(0, len(ids), body)]


def text_digest(source: str) -> str:
    """Return what identifies the content of a text source, for fingerprints."""
    if source != PYDOC:
        return file_digest(_existing(Path(source)))
    return fingerprint([_pydoc("calibration"), _pydoc("evaluation")])


def _enough(encode: Callable[[str], list[int]], text: str, tokens: int, from_end: bool) -> list[int]:
    """Encode as much of `text` as `tokens` tokens need, from its start or its end."""
    window = tokens * _CHARACTERS_PER_TOKEN
    if len(text) > window:
        ids = encode(text[-window:] if from_end else text[:window])
        if len(ids) >= tokens:
            return ids
    return encode(text)


def _pydoc(part: Part) -> str:
    from pydoc_data.topics import topics

    names = sorted(topics)[0 if part == "calibration" else 1 :: 2]
    return "\n\n".join(topics[name] for name in names)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"text source '{path}' is no file; give '{PYDOC}', a text file or a .jsonl file")
    return path


def _file_text(path: Path) -> str:
    try:
        text = _existing(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"text source '{path}' is not UTF-8 ({error.reason} at byte {error.start})") from None
    return text if path.suffix.lower() != ".jsonl" else "\n\n".join(_rows(path, text))


def _rows(path: Path, text: str) -> list[str]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"line {number} of {path} is not JSON ({error})") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise CheckpointError(f"line {number} of {path} has no 'text' key with a string")
        rows.append(row["text"])
    return rows
