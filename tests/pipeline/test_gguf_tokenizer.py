"""Tokenizers in GGUF files that are converted by transformers: SentencePiece tables with byte fallback."""

from __future__ import annotations

from pathlib import Path

from sits_trt.checkpoint import load_tokenizer, open_checkpoint
from tests.unit.test_checkpoint_gguf import write_gguf

UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1


def test_sentencepiece(tmp_path: Path) -> None:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "w", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(index) for index in range(len(pieces), 0, -1)]
    tables = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_gguf(tmp_path / "m.gguf", extra=tables, vocab_size=len(tokens))
    open_checkpoint(tmp_path / "m.gguf").save_tokenizer(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode("hello w é")
    assert [tokens[token] for token in ids] == ["<s>", "▁hello", "▁w", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello w é"
