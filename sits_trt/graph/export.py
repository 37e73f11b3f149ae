"""From a checkpoint to an ONNX graph with the two custom nodes: torch.export of the same model that runs eagerly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
import torch
from torch import Tensor

from sits_trt import contract
from sits_trt.contract import GRAPH_DATA_FILE, GRAPH_FILE, EngineLimits, bindings
from sits_trt.errors import ExportError
from sits_trt.graph.relay import relay_linears
from sits_trt.graph.schemas import OPSET, register_schemas, translations
from sits_trt.models import Decoder, build_decoder
from sits_trt.ops.kv_pool import CODE_DTYPES
from sits_trt.progress import Progress
from sits_trt.spec import ModelSpec, TileSpec, WeightFormat

_EMBEDDING = "model.embed_tokens.weight"


class CheckpointLike(Protocol):
    """What the exporter needs of a checkpoint: a mapping of canonical names to tensors, and what they are."""

    spec: ModelSpec
    formats: dict[str, WeightFormat]

    def __getitem__(self, name: str) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def digest(self) -> str: ...


def export_graph(
    checkpoint: CheckpointLike, tile: TileSpec, limits: EngineLimits, out_dir: Path, progress: Progress
) -> dict[str, Any]:
    """Write the graph of `checkpoint` into directory `out_dir`: model.onnx and its weights, model.onnx.data.

    Inputs and outputs are `contract.bindings`; activations have the type of the checkpoint's embedding,
    float16 or bfloat16. Of `limits` only max_seq_tokens is in the graph, as the length of the RoPE table.
    Returns what a manifest should say of it. Raises ExportError where checkpoint, tile and limits do not fit
    one another; nothing is written then.
    """
    dtype = _check(checkpoint, tile, limits)
    progress(0, 3, "load weights")
    decoder = build_decoder(
        checkpoint.spec, _as_mapping(checkpoint), checkpoint.formats, dtype, num_positions=limits.max_seq_tokens
    )
    progress(1, 3, "trace the model")
    model = trace(decoder, tile)
    progress(2, 3, "write the graph")
    ir.save(model, out_dir / GRAPH_FILE, external_data=GRAPH_DATA_FILE)
    progress(3, 3, "graph written")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tile": asdict(tile),
        "positions": limits.max_seq_tokens,
        "opset": OPSET,
        "nodes": count_nodes(model),
    }


def trace(decoder: Decoder, tile: TileSpec) -> ir.Model:
    """Return the ONNX model of `decoder`. Equal decoders give equal models, names included."""
    register_schemas()
    inputs = [b for b in bindings(decoder.spec, tile) if b.is_input]
    outputs = [b.name for b in bindings(decoder.spec, tile) if not b.is_input]
    names = [name for b in inputs for name in b.shape if isinstance(name, str)]
    # Sizes of the example only have to differ: equal ones could be taken for one dimension.
    sizes = {name: 5 + index for index, name in enumerate(dict.fromkeys(names))}
    dims = {name: torch.export.Dim(name, min=1) for name in sizes}
    # The op knows the kind of a coded pool by its type; the engine takes its bytes as int8.
    pool_dtype = {"kv_pool": CODE_DTYPES[tile.kv_dtype]} if tile.is_coded else {}
    example = tuple(
        torch.zeros(
            [sizes[d] if isinstance(d, str) else d for d in b.shape],
            dtype=pool_dtype.get(b.name, getattr(torch, b.dtype)),
        )
        for b in inputs
    )
    with _quiet_exporter():
        program = torch.onnx.export(
            decoder,
            example,
            dynamo=True,
            dynamic_shapes={
                b.name: {axis: dims[d] for axis, d in enumerate(b.shape) if isinstance(d, str)} for b in inputs
            },
            opset_version=OPSET,
            custom_translation_table=translations(tile.head_dim, tile.tile_tokens),
            input_names=[b.name for b in inputs],
            output_names=outputs,
            verbose=False,
        )
    if program is None:
        raise ExportError("torch.onnx.export returned no program for this model")
    model = program.model
    if tile.is_coded:
        (pool,) = (value for value in model.graph.inputs if value.name == "kv_pool")
        pool.dtype = ir.DataType.INT8
    _type_results(model)
    relay_linears(model)
    _strip_trace(model)
    return model


def count_nodes(model: ir.Model) -> dict[str, int]:
    """Return how often each operator occurs, custom ones as 'sits::Name'."""
    counts: dict[str, int] = {}
    for node in model.graph:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _check(checkpoint: CheckpointLike, tile: TileSpec, limits: EngineLimits) -> torch.dtype:
    spec = checkpoint.spec
    expected = TileSpec.of(spec, tile.tile_tokens, tile.kv_dtype)
    if tile != expected:
        raise ExportError(f"the tile is made for another model: this one needs {expected}, got {tile}")
    if limits.max_seq_tokens > spec.max_positions:
        raise ExportError(
            f"sequences of {limits.max_seq_tokens} tokens exceed the model's {spec.max_positions} positions; "
            "lower engine.prompt_tokens.max or engine.max_output_tokens"
        )
    if spec.attention_softcap:
        raise ExportError(
            f"models of family '{spec.family}' cap their attention scores, which {contract.ATTENTION_PLUGIN} does not; "
            "use engine.backend=eager"
        )
    for name, form in checkpoint.formats.items():
        if (form.bits, form.codes, form.activations) != (4, "int", "float16"):
            raise ExportError(
                f"{name} is quantized otherwise than to INT4 with 16-bit activations, which is all that "
                f"{contract.LINEAR_PLUGIN} computes; use engine.backend=eager"
            )
    if _EMBEDDING not in set(checkpoint):
        raise ExportError(f"the checkpoint has no {_EMBEDDING}; is the download complete?")
    dtype = checkpoint[_EMBEDDING].dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ExportError(
            f"the checkpoint holds {str(dtype).removeprefix('torch.')} weights, the kernels compute in float16 or "
            "bfloat16; set model.dtype and build the checkpoint stage again"
        )
    return dtype


def _as_mapping(checkpoint: CheckpointLike) -> Mapping[str, Tensor]:
    return checkpoint if isinstance(checkpoint, Mapping) else {name: checkpoint[name] for name in checkpoint}


def _type_results(model: ir.Model) -> None:
    """Say the result types of our nodes: those of their activations."""
    for node in model.graph:
        if node.domain == contract.ONNX_DOMAIN:
            activation = node.inputs[0]
            assert activation is not None
            node.outputs[0].dtype = activation.dtype


def _strip_trace(model: ir.Model) -> None:
    """Remove what the exporter noted about its run (paths, stacks): graphs of equal models shall be equal."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter's notes on packages that are not installed and on its own deprecations off the screen."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
