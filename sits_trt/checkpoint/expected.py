"""Which tensors a model must have, by canonical (Hugging Face Llama) name and shape, and the check against a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sits_trt.errors import CheckpointError
from sits_trt.spec import ModelSpec, WeightFormat

Shape = tuple[int, ...]


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[Shape, bool]]:
    """Return name -> ((out, in), has bias) of every linear layer, head included, in the order of the model."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[Shape, bool]] = {}
    for index in range(spec.num_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        shapes[f"{attention}.q_proj"] = ((spec.q_size, hidden), spec.qkv_bias)
        shapes[f"{attention}.k_proj"] = ((spec.kv_size, hidden), spec.qkv_bias)
        shapes[f"{attention}.v_proj"] = ((spec.kv_size, hidden), spec.qkv_bias)
        shapes[f"{attention}.o_proj"] = ((hidden, spec.q_size), spec.o_bias)
        shapes[f"{mlp}.gate_proj"] = ((inner, hidden), spec.mlp_bias)
        shapes[f"{mlp}.up_proj"] = ((inner, hidden), spec.mlp_bias)
        shapes[f"{mlp}.down_proj"] = ((hidden, inner), spec.mlp_bias)
    shapes["lm_head"] = ((spec.vocab_size, hidden), False)
    return shapes


def expected_tensors(spec: ModelSpec, formats: Mapping[str, WeightFormat]) -> dict[str, Shape]:
    """Return name -> shape of every tensor that must be there; a tied head is not among them."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (spec.hidden_size,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (spec.hidden_size,)
        if spec.post_norms:
            shapes[f"{prefix}.attention_output_layernorm.weight"] = (spec.hidden_size,)
            shapes[f"{prefix}.mlp_output_layernorm.weight"] = (spec.hidden_size,)
        if spec.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
    for name, (shape, has_bias) in linear_shapes(spec).items():
        if name == "lm_head" and spec.tie_word_embeddings and name not in formats:
            continue
        shapes.update(_weight_shapes(name, shape, formats.get(name)))
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _weight_shapes(name: str, shape: Shape, stored: WeightFormat | None) -> Iterator[tuple[str, Shape]]:
    rows, columns = shape
    if stored is None:
        yield f"{name}.weight", shape
        return
    groups = (rows, stored.num_groups(columns))
    yield f"{name}.qweight", (rows, columns * stored.bits // 8)
    yield f"{name}.scales", groups
    if not stored.symmetric:
        yield f"{name}.zeros", groups


def optional_tensors(spec: ModelSpec, formats: Mapping[str, WeightFormat]) -> dict[str, Shape]:
    """Return name -> shape of tensors that may be there: a tied head, input scales and ScaleRecover vectors."""
    shapes: dict[str, Shape] = {"lm_head.weight": (spec.vocab_size, spec.hidden_size)}
    linears = linear_shapes(spec)
    shapes.update({f"{name}.input_scale": linears[name][0][1:] for name in formats if name in linears})
    if formats:
        shapes.update({f"model.layers.{index}.scale_recover": (spec.hidden_size,) for index in range(spec.num_layers)})
    return shapes


def check_tensors(found: Mapping[str, Shape], spec: ModelSpec, formats: Mapping[str, WeightFormat], where: str) -> None:
    """Raise CheckpointError unless `found` holds every tensor of the model in its shape, and no other."""
    linears = linear_shapes(spec)
    if strangers := [name for name in formats if name not in linears]:
        raise CheckpointError(
            f"described as a quantized layer of {where}{_and_more(strangers)}, but the model has no such linear layer",
            strangers[0],
        )
    needed = expected_tensors(spec, formats)
    missing = [name for name in needed if name not in found]
    if missing:
        raise CheckpointError(
            f"missing from {where}{_and_more(missing)}; the download is incomplete, or config.json describes "
            "another model",
            missing[0],
        )
    allowed = {**optional_tensors(spec, formats), **needed}
    for name, shape in found.items():
        if name in allowed and shape != allowed[name]:
            raise CheckpointError(f"has shape {list(shape)} in {where}, config.json needs {list(allowed[name])}", name)
    left = [name for name in found if name not in allowed]
    if left:
        raise CheckpointError(
            f"in {where}, but a model of family '{spec.family}' with this config has no place for it"
            f"{_and_more(left)}; leaving it out would change the result",
            left[0],
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
