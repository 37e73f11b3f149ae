"""Tiny random models and tokenizers: vocabulary 97, hidden 64, intermediate 96, 2 layers, 4 heads, 2 kv heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from sits_trt.checkpoint.config import parse_config
from sits_trt.checkpoint.expected import expected_tensors
from sits_trt.checkpoint.families import FAMILIES
from sits_trt.checkpoint.shard_writer import SHARD_BYTES, ShardWriter
from sits_trt.spec import FULL_ATTENTION, ModelSpec, RopeSpec

END_TOKEN = "<|end|>"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_spec(**overrides: Any) -> ModelSpec:
    """Return the ModelSpec of a tiny Llama; any field can be overridden."""
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-6,
        "rope": RopeSpec(),
        "max_positions": 512,
        "eos_token_ids": (0,),
        "pad_token_id": 0,
    }
    values.update(overrides)
    values.setdefault("layer_windows", (FULL_ATTENTION,) * values["num_layers"])
    return ModelSpec(**values)


def tiny_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 tensors for every canonical name of `spec`: norms near one, all else small."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(spec, {}).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 - spec.norm_offset + 0.1 * noise if "norm" in name else 0.15 * noise
    return tensors


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """Return a config.json of `architecture`; any key can be overridden, and left out with `KEY=...`."""
    family = FAMILIES[architecture]
    config = {
        "architectures": [architecture],
        "model_type": family.model_type,
        family.activation_key: next(iter(family.activations)),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "head_dim": 16,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **SIZES,
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not ...}


def write_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    **config: Any,
) -> Path:
    """Write a tiny Hugging Face directory without the help, and the import time, of transformers."""
    settings = tiny_config(architecture, **config)
    writer = ShardWriter(directory, shard_bytes)
    stored = {canonical: name for name, canonical in FAMILIES[architecture].renamed.items()}
    for name, tensor in tiny_tensors(parse_config(settings), seed).items():
        writer.add(".".join(stored.get(part, part) for part in name.split(".")), tensor.to(dtype))
    writer.finish()
    (directory / "config.json").write_text(json.dumps(settings, indent=2))
    save_tiny_tokenizer(directory)
    return directory


def tiny_model(architecture: str = "LlamaForCausalLM", seed: int = 0, **config: Any) -> Any:
    """Return a transformers model of `architecture` in float32 with random weights, biases and norms."""
    import transformers

    settings = {**SIZES, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, **config}
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    offset = FAMILIES[architecture].norm_offset
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 - offset + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model


def tiny_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Save a tiny model with its tokenizer as a Hugging Face directory and return the directory."""
    model = tiny_model(architecture, seed, **config).to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    save_tiny_tokenizer(directory)
    return directory


def save_tiny_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 97 tokens: the end token (id 0), newline, and the printable ASCII characters."""
    characters = ["\n", *map(chr, range(0x20, 0x7F))]
    vocabulary = {END_TOKEN: 0} | {character: index + 1 for index, character in enumerate(characters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    _save(backend, directory)


def save_byte_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer of 257 tokens: the end token (id 0) and every byte. Any text survives it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END_TOKEN: 0} | {character: index + 1 for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _save(backend, directory)


def _save(backend: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.add_special_tokens([END_TOKEN])
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
