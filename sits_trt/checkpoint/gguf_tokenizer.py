"""The byte-level BPE tokenizers that GGUF files carry, built from their tables.

How text is cut before merging is not in the file, only its name (`tokenizer.ggml.pre`). The patterns are those of
the models that the names stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are recognised in text before it is cut."""

_CONTRACTION_OR_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_OR_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTION_OR_WORD}|\p{{N}}{{1,3}}|{_SIGNS_OR_SPACE}"
_QWEN2_PATTERN = rf"{_CONTRACTION_OR_WORD}|\p{{N}}|{_SIGNS_OR_SPACE}"

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


@dataclass(frozen=True)
class _Cutting:
    """How a text is cut into pieces that are merged on their own."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False


def _by_pattern(pattern: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


_CUTTINGS: Mapping[str, _Cutting] = {
    "gpt-2": _Cutting(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": _Cutting(
        lambda: pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])
    ),
    "llama-bpe": _Cutting(_by_pattern(_LLAMA3_PATTERN), ignore_merges=True),
    "qwen2": _Cutting(_by_pattern(_QWEN2_PATTERN), nfc=True),
}  # fmt: skip


def can_build(metadata: Mapping[str, Any]) -> bool:
    """Say whether the tokenizer in a GGUF file's metadata is one that `write_tokenizer` knows."""
    return metadata.get("tokenizer.ggml.model") == "gpt2" and metadata.get("tokenizer.ggml.pre") in _CUTTINGS


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file into `directory`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {
        role: tokens[metadata[f"tokenizer.ggml.{key}"]]
        for role, key in _ROLES.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    backend = _build(metadata, tokens, roles)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _build(metadata: Mapping[str, Any], tokens: list[str], roles: Mapping[str, str]) -> Tokenizer:
    cutting = _CUTTINGS[metadata["tokenizer.ggml.pre"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=cutting.ignore_merges,
        )
    )
    if cutting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cutting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in roles:
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return backend
