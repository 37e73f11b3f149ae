"""Every family: our decoder's logits equal those of transformers, whole and in chunks over scattered tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sits_trt.checkpoint import open_checkpoint
from sits_trt.models import Decoder, build_decoder
from tests.support.decode import chunked_logits, whole_logits
from tests.support.tiny import tiny_checkpoint, tiny_model

# Two float32 programs that sum in different orders; measured differences lie below 5e-6.
TOLERANCE = 5e-5
TOKENS = 41

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "mistral, no window": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral, window 8": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, window off": ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2, upper layer windowed": (
        "Qwen2ForCausalLM",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3, biases, tied": (
        "Qwen3ForCausalLM",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def load(directory: Path) -> Decoder:
    checkpoint = open_checkpoint(directory)
    return build_decoder(checkpoint.spec, checkpoint, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    tiny_checkpoint(tmp_path, architecture, seed=3, **config)
    reference = tiny_model(architecture, seed=3, **config)
    ids = torch.randint(1, 97, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    decoder = load(tmp_path)
    assert (whole_logits(decoder, ids) - expected).abs().max() < TOLERANCE
    # Chunk edges: inside a tile, at its end, across it.
    assert (chunked_logits(decoder, ids, (5, 11, 1, 16)) - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.1, "a model whose logits are all alike would pass anything"
