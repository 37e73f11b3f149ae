"""The language model inside a checkpoint that also reads images, as a checkpoint of its own. Images are not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sits_trt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class TensorFiles(Protocol):
    """Stored tensors: shapes from the headers, data when asked for."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Wrapper:
    """An architecture around a language model: which one, and where its config and tensors lie.

    `prefixes` maps beginnings of stored names to what replaces them; tensors that begin with one of `left_out`
    belong to the other parts.
    """

    inner: str
    config_key: str
    prefixes: Mapping[str, str]
    left_out: tuple[str, ...]


WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "Gemma3ForCausalLM",
        "text_config",
        {"language_model.": "", "model.language_model.": "model."},
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
}

_FROM_OUTSIDE = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype"),
    "quantization_config",
)
"""Keys that the outer config may have in place of the inner one."""


def text_part(config: Mapping[str, Any], files: TensorFiles) -> tuple[Mapping[str, Any], TensorFiles]:
    """Return config and tensors of the language model; both as they came when there is nothing around it.

    Raises CheckpointError when the outer config has no inner one.
    """
    named: Any = config.get("architectures") or [None]
    if not isinstance(named, list) or not isinstance(named[0], str | None):
        raise CheckpointError(f"config key 'architectures' must be a list of names, found {named!r}")
    wrapper = WRAPPERS.get(named[0] or "")
    if wrapper is None:
        return config, files
    inner = config.get(wrapper.config_key)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config key '{wrapper.config_key}' is missing, which {named[0]} needs")
    outside = {key: config[key] for key in _FROM_OUTSIDE if config.get(key) is not None}
    return {**outside, **inner, "architectures": [wrapper.inner]}, _TextFiles(files, wrapper)


class _TextFiles:
    """The tensors of the language model under the names that they have without the other parts."""

    def __init__(self, files: TensorFiles, wrapper: Wrapper) -> None:
        self._files = files
        self._stored = {
            _inner_name(name, wrapper): name for name in files.shapes if not name.startswith(wrapper.left_out)
        }
        self.shapes = {name: files.shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        return self._files.read(self._stored[name])


def _inner_name(name: str, wrapper: Wrapper) -> str:
    for prefix, replacement in wrapper.prefixes.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
