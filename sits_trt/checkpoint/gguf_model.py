"""A GGUF file as a Hugging Face checkpoint: its metadata as a config, its tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sits_trt.checkpoint.families import FAMILIES
from sits_trt.checkpoint.gguf_file import GgufFile
from sits_trt.checkpoint.gguf_rope import DIVISORS, llama3_settings
from sits_trt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architecture to the Hugging Face one. Mistral files call themselves llama."""

_CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}

_KNOWN_WITHOUT_KEY = ("attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
                      "rope.scaling.original_context_length", "rope.scaling.finetuned")  # fmt: skip

_PERMUTED = ("llama",)
"""GGUF architectures whose q and k rows are stored in interleaved pair order."""

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")


class GgufModel:
    """The tensors of a GGUF file by Hugging Face name, and its config. `shapes` is read from the header alone."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{file.path} has GGUF architecture '{self.architecture}', which is not supported; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        self._stored = {self._hf_name(name): name for name in file.tensors if name != DIVISORS}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def _hf_name(self, name: str) -> str:
        if in_layer := _LAYER_NAME.fullmatch(name):
            layer, part, kind = in_layer.groups()
            if part in _IN_LAYER:
                return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
        elif (top := _TOP_NAME.fullmatch(name)) and top[1] in _TOP_LEVEL:
            return f"{_TOP_LEVEL[top[1]]}.{top[2]}"
        raise CheckpointError(f"{self.file.path} holds it, but no supported model of this architecture has it", name)

    def _get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def config(self) -> dict[str, Any]:
        """Return the config.json that the model would have. Raises CheckpointError for unknown metadata."""
        prefix = f"{self.architecture}."
        known = {*_CONFIG_KEYS, *_KNOWN_WITHOUT_KEY}
        for key, value in self.file.metadata.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in known and value:
                raise CheckpointError(
                    f"{self.file.path}: metadata key '{key}' = {value!r} is not supported and may change the result"
                )
        hf_architecture = _ARCHITECTURES[self.architecture]
        config: dict[str, Any] = {
            hf: self._get(key) for key, hf in _CONFIG_KEYS.items() if self._get(key) is not None
        }  # fmt: skip
        if "model.embed_tokens.weight" in self.shapes:
            config["vocab_size"] = self.shapes["model.embed_tokens.weight"][0]
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if self._get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
            raise CheckpointError(f"{self.file.path}: RoPE over a part of each head is not supported")
        tokens = {key: self.file.metadata.get(f"tokenizer.ggml.{name}") for key, name in _TOKEN_KEYS.items()}
        # Chat models end an answer with the end of the text or of the turn.
        end_of_turn = self.file.metadata.get("tokenizer.ggml.eot_token_id")
        ends = {end for end in (tokens["eos_token_id"], end_of_turn) if end is not None}
        tokens["eos_token_id"] = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
        return {
            "architectures": [hf_architecture],
            "model_type": FAMILIES[hf_architecture].model_type,
            "hidden_act": "silu",
            **config,
            **self._rope_scaling(config),
            **{key: value for key, value in tokens.items() if value is not None},
            **self._biases(),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
        }

    def _biases(self) -> dict[str, bool]:
        if self.architecture != "llama":
            return {}
        first = "model.layers.0."
        return {
            "attention_bias": f"{first}self_attn.q_proj.bias" in self.shapes,
            "mlp_bias": f"{first}mlp.gate_proj.bias" in self.shapes,
        }

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = self._get("rope.scaling.type", "none")
        if DIVISORS in self.file.tensors:
            if kind != "none":
                raise CheckpointError(f"{self.file.path}: RoPE scaling '{kind}' beside {DIVISORS} is not supported")
            theta = config.get("rope_theta", FAMILIES[_ARCHITECTURES[self.architecture]].theta)
            return {"rope_scaling": llama3_settings(self.file.read(DIVISORS), theta, str(self.file.path))}
        if kind == "none":
            return {}
        if kind != "linear":
            raise CheckpointError(f"{self.file.path}: RoPE scaling '{kind}' is not supported in GGUF files")
        return {"rope_scaling": {"rope_type": "linear", "factor": self._get("rope.scaling.factor")}}

    def read(self, name: str) -> Tensor:
        import torch

        array = self.file.read(self._stored[name])
        if self.architecture in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = self._get("attention.head_count")
            if ".k_proj." in name:
                heads = self._get("attention.head_count_kv", heads)
            # Pair order (row 2j and 2j+1 rotate together) to half-split order (row j and j + head_dim/2).
            pairs = array.reshape(heads, -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return torch.from_numpy(array.copy())


_TOKEN_KEYS: Mapping[str, str] = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
