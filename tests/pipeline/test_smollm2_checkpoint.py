"""SmolLM2-135M-Instruct from its GGUF file: weights and logits equal what transformers makes of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.source import find_source
from sits_trt.models import build_decoder
from tests.support.decode import chunked_logits, whole_logits

SOURCE = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    place = find_source(SOURCE)
    return AutoModelForCausalLM.from_pretrained(place.parent, gguf_file=place.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    materialize(SOURCE, out, "float16")
    return out


@pytest.mark.slow
def test_logits_equal_transformers(reference: Any) -> None:
    checkpoint = open_checkpoint(SOURCE)
    weights = reference.state_dict()
    for name in checkpoint:
        assert torch.equal(checkpoint[name], weights[name]), name
    ids = torch.randint(20, 49000, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    decoder = build_decoder(checkpoint.spec, checkpoint, dtype=torch.float32, num_positions=128)
    # Thirty layers of float32 sums in another order; logits are of size 20.
    assert (whole_logits(decoder, ids) - expected).abs().max() < 1e-3
    assert (chunked_logits(decoder, ids, (50, 15)) - expected).abs().max() < 1e-3


@pytest.mark.slow
def test_materialized_directory_is_read_by_transformers(reference: Any, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)
    for name, weight in reference.state_dict().items():
        assert torch.equal(copy.state_dict()[name], weight.half()), name
    for key in ("head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "eos_token_id"):
        assert getattr(copy.config, key) == getattr(reference.config, key), key
    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    messages = [{"role": "user", "content": "Write 3 lines about 1984:\n\n  12 é🔥\n"}]
    text = ours.apply_chat_template(messages)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.eos_token_ids == (2,)
    # The model was trained with every digit cut from what stands before it, white space included.
    assert ours.encode("\n\n1") == [*ours.encode("\n\n"), *ours.encode("1")]
