"""Every family: our decoder's logits equal those of transformers, whole and in chunks over scattered tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sits_trt.checkpoint import materialize, open_checkpoint
from sits_trt.checkpoint.config import parse_config
from sits_trt.models import Decoder, build_decoder
from tests.support.decode import chunked_logits, whole_logits
from tests.support.tiny import SIZES, save_tiny_tokenizer, tiny_checkpoint, tiny_config, tiny_model

# Two float32 programs that sum in different orders; measured differences lie below 5e-6.
TOLERANCE = 5e-5
TOKENS = 41

SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
PARTLY = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE = {**PARTLY, "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
ALL_OF_YARN = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 1}),
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"head_dim": 32}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}),
    ("Mistral", {"sliding_window": None}),
    ("Mistral", {"sliding_window": 8}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ("Qwen2", {"rope_parameters": YARN}),
    ("Qwen2", {"rope_parameters": ALL_OF_YARN}),
    ("Qwen3", {"head_dim": 32}),
    ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("SmolLM3", {"no_rope_layers": [0, 1]}),
    ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    ("Phi3", {"sliding_window": 8}),
    ("Phi3", {"rope_parameters": PARTLY, "tie_word_embeddings": True}),
    ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    ("Gemma", {"head_dim": 32}),
    ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 0.5}),
    ("Gemma2", {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0}),
    ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 2}),
    (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPES,
            "final_logit_softcapping": 2.0,
        },
    ),
)


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *case[1]))


def load(directory: Path) -> Decoder:
    checkpoint = open_checkpoint(directory)
    # What dynamic and longrope do depends on how long the text is, for transformers and for us.
    return build_decoder(checkpoint.spec, checkpoint, dtype=torch.float32, num_positions=TOKENS)


def prompt() -> list[int]:
    return torch.randint(1, 97, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()


def reference_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt()])).logits[0]
    assert logits.std() > 0.1, "a model whose logits are all alike would pass anything"
    return logits


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits_equal_transformers(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    family, config = case
    architecture = f"{family}ForCausalLM"
    tiny_checkpoint(tmp_path, architecture, seed=3, **config)
    # transformers' other attention functions leave out the soft cap.
    expected = reference_logits(tiny_model(architecture, seed=3, attn_implementation="eager", **config))
    decoder = load(tmp_path)
    assert (whole_logits(decoder, prompt()) - expected).abs().max() < TOLERANCE
    # Chunk edges: inside a tile, at its end, across it.
    assert (chunked_logits(decoder, prompt(), (5, 11, 1, 16)) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Gemma3"])
def test_a_materialized_copy_is_the_same_model_for_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    architecture = f"{family}ForCausalLM"
    config = {"rope_parameters": PARTLY} if family == "Phi3" else {}
    tiny_checkpoint(tmp_path / "source", architecture, seed=3, **config)
    expected = reference_logits(tiny_model(architecture, seed=3, **config))
    materialize(tmp_path / "source", tmp_path / "copy", "float32")
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    assert torch.equal(reference_logits(copy), expected)
    assert (whole_logits(load(tmp_path / "copy"), prompt()) - expected).abs().max() < TOLERANCE


def test_the_language_part_of_a_model_that_reads_images(tmp_path: Path) -> None:
    import transformers

    text = {**SIZES, "head_dim": 32, "sliding_window": 8, "rope_parameters": GEMMA3_ROPES}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(5)
    whole = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=96)
    ).eval()
    with torch.no_grad():
        whole.get_input_embeddings().weight.mul_(10)
    whole.save_pretrained(tmp_path / "source")
    save_tiny_tokenizer(tmp_path / "source")
    expected = reference_logits(whole)
    decoder = load(tmp_path / "source")
    assert (whole_logits(decoder, prompt()) - expected).abs().max() < TOLERANCE
    materialize(tmp_path / "source", tmp_path / "copy", "float32")
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    assert type(copy).__name__ == "Gemma3ForCausalLM"
    assert (reference_logits(copy) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_b06_a_tied_head_that_is_not_in_the_file_is_the_embedding(family: str, tmp_path: Path) -> None:
    config = {"tie_word_embeddings": True}
    tiny_checkpoint(tmp_path, f"{family}ForCausalLM", seed=4, **config)
    assert "lm_head.weight" not in open_checkpoint(tmp_path)
    expected = reference_logits(tiny_model(f"{family}ForCausalLM", seed=4, **config))
    assert (whole_logits(load(tmp_path), prompt()) - expected).abs().max() < TOLERANCE


def test_b11_a_window_that_is_switched_off_or_null_is_none(tmp_path: Path) -> None:
    full = {"sliding_window": 8, "use_sliding_window": False}
    tiny_checkpoint(tmp_path / "off", "Qwen2ForCausalLM", seed=5, **full)
    assert open_checkpoint(tmp_path / "off").spec.layer_windows == (0, 0)
    expected = reference_logits(tiny_model("Qwen2ForCausalLM", seed=5, **full))
    ours = whole_logits(load(tmp_path / "off"), prompt())
    assert (ours - expected).abs().max() < TOLERANCE
    windowed = load(tmp_path / "off")
    for layer in windowed.layers:
        layer.spec = replace(layer.spec, layer_windows=(8, 8))
    differs = (whole_logits(windowed, prompt()) - ours).abs().amax(-1) > TOLERANCE
    assert differs.nonzero()[0, 0] == 8, "a wrongly applied window of 8 shows from position 8 on"
    tiny_checkpoint(tmp_path / "null", "MistralForCausalLM", seed=5, sliding_window=None)
    assert open_checkpoint(tmp_path / "null").spec.layer_windows == (0, 0)


def test_b11_layers_below_max_window_layers_stay_full_and_an_absent_mistral_window_is_4096() -> None:
    on = tiny_config("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert parse_config(on).layer_windows == (0, 8)
    assert parse_config(tiny_config("MistralForCausalLM", sliding_window=...)).layer_windows == (4096, 4096)
