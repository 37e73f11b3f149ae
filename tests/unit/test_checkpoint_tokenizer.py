"""The light tokenizer: ids, text, special tokens and chat templates, without torch or transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sits_trt.checkpoint import load_tokenizer
from sits_trt.errors import CheckpointError, RequestError
from tests.support.tiny import save_byte_tokenizer, save_tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def settings(directory: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    path = directory / name
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**old, **changes}))


def test_round_trip(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.pad_token_id, tokenizer.bos_token_id) == (
        257, (0,), 0, None,
    )  # fmt: skip
    for text in ("", "plain", " lead and  trail ", "hi 🔥é迭!\n\0\t", "a\u0301"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a<|end|>b")
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("🔥")[:2])


def test_tiny_tokenizer_has_the_vocabulary_of_the_tiny_models(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 97
    assert tokenizer.decode(tokenizer.encode("Any ASCII\ntext~")) == "Any ASCII\ntext~"


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    settings(tmp_path, "config.json", eos_token_id=5, bos_token_id=7)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((5,), 7)
    settings(tmp_path, "generation_config.json", eos_token_id=[5, 6])
    assert load_tokenizer(tmp_path).eos_token_ids == (5, 6)


class TestChatTemplate:
    def test_from_the_settings_and_from_its_own_file(self, tmp_path: Path) -> None:
        save_tiny_tokenizer(tmp_path)
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "user: hi\nassistant: "
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES, add_generation_prompt=False) == "user: hi\n"
        settings(tmp_path, "chat_template.json", chat_template="B")
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "B"
        (tmp_path / "chat_template.jinja").write_text("C{{ bos_token }}{{ eos_token }}")
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "C<|end|>"

    def test_named_templates(self, tmp_path: Path) -> None:
        save_tiny_tokenizer(tmp_path)
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        settings(tmp_path, chat_template=named)
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "D"

    def test_what_published_templates_use(self, tmp_path: Path) -> None:
        save_tiny_tokenizer(tmp_path)
        template = (
            "{%- for m in messages %}\n    {%- if loop.index0 > 0 %}{% break %}{% endif %}\n"
            "    {%- generation %}{{- m['content'] | trim }}{% endgeneration %}|"
            "{{ m | tojson }}|{{ strftime_now('%Y') | length }}\n{%- endfor %}"
        )
        settings(tmp_path, chat_template=template)
        messages = [{"role": "user", "content": " é "}, {"role": "user", "content": "second"}]
        text = load_tokenizer(tmp_path).apply_chat_template(messages)
        assert text == 'é|{"role": "user", "content": " é "}|4'

    def test_none_damaged_refusing_hostile(self, tmp_path: Path) -> None:
        save_tiny_tokenizer(tmp_path)

        def render(template: Any) -> str:
            settings(tmp_path, chat_template=template)
            return load_tokenizer(tmp_path).apply_chat_template(MESSAGES)

        with pytest.raises(CheckpointError, match="no chat template"):
            render(None)
        with pytest.raises(CheckpointError, match="damaged"):
            render("{% for %}")
        with pytest.raises(RequestError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError):
            render("{{ messages[0].nothing.deeper }}")
        with pytest.raises(RequestError):
            render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
        with pytest.raises(RequestError):
            render("{{ messages.append(1) }}")
        with pytest.raises(RequestError, match="refuses these messages"):
            render("{{ messages[0]['content'] + 1 }}")
        with pytest.raises(RequestError, match="refuses these messages"):
            render("{{ 1 / 0 }}")
        with pytest.raises(RequestError, match="refuses these messages"):
            render("{% for i in range(10 ** 9) %}{% endfor %}")


def test_half_a_surrogate_pair_is_one_bad_request(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="not valid Unicode"):
        load_tokenizer(tmp_path).encode("a\ud83d")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_import_is_light() -> None:
    code = (
        "import sys, sits_trt.checkpoint; from sits_trt.checkpoint import load_tokenizer, source_digest; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
