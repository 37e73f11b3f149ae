"""The tokenizer of a Hugging Face directory, light enough for a server process: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from sits_trt.checkpoint.safetensors_files import read_json
from sits_trt.errors import CheckpointError, RequestError


class Tokenizer:
    """Text to token ids and back, with the special tokens and chat template of a checkpoint.

    `eos_token_ids` are those of generation_config.json where there is one, else of config.json, else of the
    tokenizer itself. `byte_token_ids` are the 256 byte-fallback tokens of SentencePiece, empty where there are none.
    """

    def __init__(
        self,
        backend: Backend,
        special: Mapping[str, str],
        token_ids: Mapping[str, Sequence[int]],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self._special = dict(special)
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.longest_token_chars: int = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.bos_token_id: int | None = self._first("bos_token", token_ids)
        self.pad_token_id: int | None = self._first("pad_token", token_ids)
        byte_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self.byte_token_ids: frozenset[int] = frozenset(byte_ids if None not in byte_ids else ())
        self.eos_token_ids: tuple[int, ...] = self._ids("eos_token", token_ids)

    def _ids(self, name: str, token_ids: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        if token_ids.get(name):
            return tuple(token_ids[name])
        found = self._backend.token_to_id(self._special[name]) if name in self._special else None
        return () if found is None else (found,)

    def _first(self, name: str, token_ids: Mapping[str, Sequence[int]]) -> int | None:
        return next(iter(self._ids(name, token_ids)), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in the text are recognised.

        Raises RequestError for text that is no Unicode, such as half of a surrogate pair.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text is not valid Unicode; send it as UTF-8") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are no complete UTF-8 come out as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return `messages` ({role, content}) as the prompt text that the model was trained on.

        The template comes with the checkpoint and runs in jinja2's sandbox. Raises CheckpointError when there
        is none, RequestError when it refuses the messages.
        """
        if self.chat_template is None:
            raise CheckpointError("this checkpoint has no chat template; send a plain prompt")
        try:
            template = _environment().from_string(self.chat_template)
        except TemplateError as error:
            raise CheckpointError(f"the chat template of this checkpoint is damaged ({error})") from None
        try:
            text: str = template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._special
            )
        except _TEMPLATE_FAILURES as error:
            raise RequestError(f"the chat template refuses these messages ({error})") from None
        return text


_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""What a template raises on messages that it was not written for, such as content that is no text."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model is trained to say. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for (transformers documents the helpers)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory. Raises CheckpointError when it has none or a damaged one."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    settings = _optional_json(directory / "tokenizer_config.json")
    special = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(settings.get(name))) is not None
    }
    configs = {**_optional_json(directory / "config.json"), **_optional_json(directory / "generation_config.json")}
    token_ids = {name: _as_list(configs.get(f"{name}_id")) for name in ("bos_token", "eos_token", "pad_token")}
    return Tokenizer(backend, special, token_ids, _chat_template(directory, settings))


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _optional_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_list(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if isinstance(item, int) and item >= 0]
