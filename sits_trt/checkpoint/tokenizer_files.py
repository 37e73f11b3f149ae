"""The files of a tokenizer: copied from a Hugging Face directory, or made from the tables in a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path

from sits_trt.checkpoint.gguf_file import GgufFile
from sits_trt.checkpoint.gguf_tokenizer import can_build, write_tokenizer
from sits_trt.errors import CheckpointError

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def save_tokenizer(place: Path, directory: Path) -> None:
    """Write the tokenizer of the checkpoint at `place` (a directory or a GGUF file) into `directory`.

    A tokenizer.json is always written. Raises CheckpointError when the checkpoint has no tokenizer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if place.is_dir() and (place / "tokenizer.json").is_file():
        for name in _COPIED:
            if (place / name).is_file() and place.resolve() != directory.resolve():
                shutil.copyfile(place / name, directory / name)
        return
    if place.is_file():
        metadata = GgufFile(place).metadata
        if not metadata.get("tokenizer.ggml.tokens"):
            raise CheckpointError(f"{place} has no tokenizer; give a file that holds one, or a Hugging Face directory")
        if can_build(metadata):
            write_tokenizer(metadata, directory)
            return
    from transformers import AutoTokenizer

    try:
        if place.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{place} has no tokenizer that can be read ({first_line})") from None
    tokenizer.save_pretrained(directory)
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"the tokenizer of {place} cannot be written as tokenizer.json")
