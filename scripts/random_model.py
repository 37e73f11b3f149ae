"""A decoder in the shape of Llama-3-8B with random INT4 weights, made where it runs: no checkpoint, no download."""

from __future__ import annotations

import torch
from torch import Tensor

from sits_trt.checkpoint.expected import expected_tensors, linear_shapes
from sits_trt.models import Decoder, build_decoder
from sits_trt.spec import FULL_ATTENTION, ModelSpec, RopeSpec, WeightFormat

FORMAT = WeightFormat(bits=4, group_size=128, symmetric=True)
CODE_SPREAD = 4.6
"""Standard deviation of evenly distributed codes from -8 to 7."""


def llama_8b(num_layers: int = 32, num_positions: int = 8192) -> ModelSpec:
    """Return the shape of Llama-3-8B, with fewer layers if so asked."""
    return ModelSpec(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0),
        max_positions=num_positions,
        layer_windows=(FULL_ATTENTION,) * num_layers,
    )


def random_decoder(spec: ModelSpec, device: str) -> Decoder:
    """Return a float16 decoder whose projections are INT4, with ScaleRecover, and whose embedding and head are not.

    Every layer keeps the size of its input: weights have a variance of 1 / in. Scales have either sign, as codes are
    not centred on 0 and their mean would else grow from layer to layer.
    """
    formats = {name: FORMAT for name in linear_shapes(spec) if name != "lm_head"}
    shapes = expected_tensors(spec, formats)
    shapes |= {f"model.layers.{index}.scale_recover": (spec.hidden_size,) for index in range(spec.num_layers)}
    tensors = {name: _random(name, shape, device) for name, shape in shapes.items()}
    return build_decoder(spec, tensors, formats, torch.float16).to(device)


def _random(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    if name.endswith("qweight"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float16, device=device)
    if name.endswith("scale_recover"):
        return 0.9 + 0.2 * torch.rand(shape, dtype=torch.float16, device=device)
    noise = torch.randn(shape, dtype=torch.float16, device=device)
    if name.endswith("scales"):
        return noise * ((shape[1] * FORMAT.group_size) ** -0.5 / CODE_SPREAD)
    return noise if name.endswith("embed_tokens.weight") else noise * shape[1] ** -0.5
