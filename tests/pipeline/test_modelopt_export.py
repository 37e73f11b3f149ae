"""A checkpoint as ModelOpt exports it, put together by hand from its documented steps, gives the model it stands for.

Layers that share an input share one `pre_quant_scale`, and the norm before them takes it (`fuse_prequant_layernorm`);
a layer alone on its input keeps its own (o and down, and every fused matrix); v and up may take those of o and down
(`fuse_prequant_to_linear`). Whoever multiplies by the inverse, or leaves one out, is off by far more than TOLERANCE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sits_trt.checkpoint import convert, open_checkpoint
from sits_trt.models import build_decoder
from tests.support.decode import whole_logits
from tests.support.tiny import save_tiny_tokenizer, tiny_model

IDS = [(7 * position + 3) % 97 for position in range(23)]
GROUP = 32
TOLERANCE = 5e-5
"""Two float32 programs that sum in different orders; measured differences lie below 5e-6."""

NORM_OF = {
    "self_attn.q_proj": "input_layernorm", "self_attn.k_proj": "input_layernorm", "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm", "mlp.up_proj": "post_attention_layernorm",
}  # fmt: skip
FOUR_NORMS = {name: norm.replace("post_attention", "pre_feedforward") for name, norm in NORM_OF.items()}
BEFORE = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}
PARTLY = {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "rope_type": "default"}

CASES: dict[str, tuple[str, dict[str, str], float, dict[str, Any]]] = {
    "folded into norms": ("LlamaForCausalLM", NORM_OF, 0.0, {"attention_bias": True, "mlp_bias": True}),
    "folded into norms of 1 + weight": ("Gemma3ForCausalLM", FOUR_NORMS, 1.0, {"query_pre_attn_scalar": 16}),
    "on every fused matrix": ("Phi3ForCausalLM", {}, 0.0, {"rope_parameters": PARTLY}),
    "folded into v and up, too": ("LlamaForCausalLM", NORM_OF | BEFORE, 0.0, {"num_key_value_heads": 4}),
}
"""Architecture, into which module a layer's scale is folded, what its norms add to their weights, config."""


def drawn(generator: torch.Generator, count: int) -> Tensor:
    return torch.exp2(2 * torch.rand(count, generator=generator) - 1)


def exported(model: Any, folded: dict[str, str], offset: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an export, and change the model to what they stand for."""
    generator = torch.Generator().manual_seed(5)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for prefix, layer in ((f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)):
        linears = {name: module for name, module in layer.named_modules() if name.endswith("_proj")}
        shared: dict[str, Tensor] = {}
        for name, linear in linears.items():
            scale = shared.setdefault(folded.get(name, name), drawn(generator, linear.in_features))
            into = layer.get_submodule(folded[name]) if name in folded else None
            if into in linears.values():
                into.weight.div_(scale[:, None])  # its codes are drawn for scaled rows
            elif into is not None:
                stored[f"{prefix}.{folded[name]}.weight"] = (into.weight + offset) * scale - offset
            else:
                stored[f"{prefix}.{name}.pre_quant_scale"] = scale
            codes = torch.randint(-8, 8, linear.weight.shape, generator=generator)
            steps = 0.04 * drawn(generator, codes.numel() // GROUP).reshape(codes.shape[0], -1)
            stored[f"{prefix}.{name}.weight"] = ((codes[0::2] & 15) | ((codes[1::2] & 15) << 4)).to(torch.uint8)
            stored[f"{prefix}.{name}.weight_scale"] = steps
            linear.weight.copy_(codes * steps.repeat_interleave(GROUP, dim=1) * scale)
    yield from stored.items()


def write_export(directory: Path, model: Any, folded: dict[str, str], offset: float) -> None:
    model.save_pretrained(directory)  # for its config.json
    with torch.no_grad():
        tensors = {name: tensor.contiguous() for name, tensor in exported(model, folded, offset)}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    ignored = ["lm_head", "model.embed_tokens"]
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ignored}
    (directory / "config.json").write_text(json.dumps(config))
    said = {
        "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None, "group_size": GROUP, "has_zero_point": False,
        "pre_quant_scale": True, "exclude_modules": ignored,
    }  # fmt: skip
    content = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": said}
    (directory / "hf_quant_config.json").write_text(json.dumps(content))
    save_tiny_tokenizer(directory)


def logits_of(directory: Path) -> Tensor:
    checkpoint = open_checkpoint(directory)
    return whole_logits(build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, torch.float32, 64), IDS)


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_read_as_the_model_it_stands_for(case: str, tmp_path: Path) -> None:
    architecture, folded, offset, config = CASES[case]
    model = tiny_model(architecture, **config)
    write_export(tmp_path / "export", model, folded, offset)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert torch.allclose(logits_of(tmp_path / "export"), expected, rtol=0, atol=TOLERANCE)
    for target in ("sits", "hf"):
        convert(tmp_path / "export", target, tmp_path / target, "float32")
        assert torch.allclose(logits_of(tmp_path / target), expected, rtol=0, atol=TOLERANCE), target
