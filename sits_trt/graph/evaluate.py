"""Runs an exported graph on the CPU, in numpy: ONNX's reference evaluator with our two operators.

Nothing here comes from the torch ops, so agreement with the eager model says that the graph means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from sits_trt import contract
from sits_trt.contract import GRAPH_FILE, present_inputs
from sits_trt.errors import ExportError
from sits_trt.graph.kv_codes import decode_rows, encode_rows
from sits_trt.layouts import unpack_mma16, unpack_mma16_groups

Array = NDArray[Any]


class GraphEvaluator:
    """A graph, ready to run."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = ReferenceEvaluator(
            model, new_ops=[SitsTiledAttention, SitsW4A16Linear, Gemm, RMSNormalization]
        )

    @classmethod
    def open(cls, directory: Path) -> GraphEvaluator:
        """Load the graph, weights included, that `export_graph` wrote to `directory`."""
        return cls(onnx.load(directory / GRAPH_FILE))

    def run(self, inputs: Mapping[str, Array]) -> Array:
        """Return the logits, float32 [outputs, vocabulary], for inputs by name as in `contract.bindings`.

        `kv_pool`, and the `kv_scales` of a coded one, are written in place, as by the engine.
        """
        logits: Array = self._evaluator.run(None, dict(inputs))[0]
        return logits


class SitsTiledAttention(OpRun):
    """RoPE on q and k, append to the pool, causal attention over each sequence's tiles, in float32."""

    op_domain = contract.ONNX_DOMAIN

    def _run(
        self, qkv: Array, pool: Array, table: Array, contexts: Array, starts: Array, rope: Array,
        scales: Array | None = None, *,
        layer: int, num_heads: int, num_kv_heads: int, head_dim: int, tile_tokens: int, window: int, scale: float,
        kv_format: int, **plugin: str,
    ) -> tuple[Array]:  # fmt: skip
        heads = qkv.astype(np.float32).reshape(qkv.shape[0], -1, head_dim)
        out = np.zeros((qkv.shape[0], num_heads * head_dim), np.float32)
        for sequence, context in enumerate(contexts):
            begin, end = int(starts[sequence]), int(starts[sequence + 1])
            if begin == end:
                continue
            positions = np.arange(context, context + end - begin)
            new = heads[begin:end]
            q = _rotate(new[:, :num_heads], rope[positions])
            k = _rotate(new[:, num_heads : num_heads + num_kv_heads], rope[positions])
            v = new[:, num_heads + num_kv_heads :]
            tiles, rows = table[sequence][positions // tile_tokens], positions % tile_tokens
            everything = np.arange(context + end - begin)
            all_tiles, all_rows = table[sequence][everything // tile_tokens], everything % tile_tokens
            keys, values = (
                _through_pool(
                    new_rows, pool, scales, (tiles, layer, side, slice(None), rows),
                    (all_tiles, layer, side, slice(None), all_rows), kv_format,
                )
                for side, new_rows in ((0, k), (1, v))
            )  # fmt: skip
            attended = _attend(q, keys, values, positions, everything, window, scale)
            out[begin:end] = attended.reshape(end - begin, -1)
        return (out.astype(qkv.dtype),)


class SitsW4A16Linear(OpRun):
    """(x * input_scale) @ ((codes - zeros) * scales).T + bias, in float32."""

    op_domain = contract.ONNX_DOMAIN

    def _run(self, *inputs: Array, out_features: int, group_size: int, **fields: Any) -> tuple[Array]:
        names = [i.name for i in present_inputs(contract.LINEAR_INPUTS, fields)]
        given = dict(zip(names, inputs, strict=True))
        x = given["x"].astype(np.float32)
        words = given["qweight"].view(np.uint32)
        codes = unpack_mma16(words.reshape(*words.shape[:2], 32, 4), out_features, x.shape[1])
        size = (out_features, x.shape[1] // group_size)
        scales = unpack_mma16_groups(given["scales"], *size).astype(np.float32)
        zeros = (
            unpack_mma16_groups(given["zeros"], *size).astype(np.float32)
            if "zeros" in given
            else np.full(size, 8, np.float32)
        )
        grouped = codes.reshape(*size, group_size).astype(np.float32)
        weight = (grouped - zeros[:, :, None]) * scales[:, :, None]
        if "input_scale" in given:
            x = x * given["input_scale"].astype(np.float32)
        out = x @ weight.reshape(out_features, -1).T
        if "bias" in given:
            out = out + given["bias"].astype(np.float32)
        return (out.astype(given["x"].dtype),)


class Gemm(OpRun):
    """ONNX's Gemm summing in float32: numpy has no fast product of 16-bit matrices, and GPUs sum so too."""

    op_domain = ""

    def _run(
        self, a: Array, b: Array, c: Array | None = None, *, alpha: float, beta: float, transA: int, transB: int
    ) -> tuple[Array]:
        left = a.astype(np.float32).T if transA else a.astype(np.float32)
        right = b.astype(np.float32).T if transB else b.astype(np.float32)
        out = alpha * (left @ right)
        if c is not None:
            out = out + beta * c.astype(np.float32)
        return (out.astype(a.dtype),)


class RMSNormalization(OpRun):
    """ONNX's operator as the standard has it: float32 inside (stash_type 1), rounded before the weight.

    The reference evaluator's own squares float16 values in float16, which overflows from 256 on.
    """

    op_domain = ""

    def _run(self, x: Array, weight: Array, *, axis: int, epsilon: float, stash_type: int) -> tuple[Array]:
        if axis != -1 or stash_type != 1:
            raise ExportError(f"RMSNormalization over axis {axis} with stash_type {stash_type} is not this graph's")
        wide = x.astype(np.float32)
        normed = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + np.float32(epsilon))
        return (normed.astype(x.dtype) * weight,)


def _rotate(x: Array, rows: Array) -> Array:
    """Rotate x [tokens, heads, head_dim] by RoPE rows [tokens, head_dim]: pairs are (i, i + head_dim/2)."""
    half = x.shape[-1] // 2
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _through_pool(new: Array, pool: Array, scales: Array | None, places: Any, all_places: Any, kv_format: int) -> Array:
    """Write float32 rows to their places in the pool; return what the pool then holds at `all_places`, in float32."""
    if scales is None:
        pool[places] = new
        return pool[all_places].astype(np.float32)
    pool[places], scales[places] = encode_rows(new, kv_format)
    return decode_rows(pool[all_places], scales[all_places], kv_format)


def _attend(
    q: Array, keys: Array, values: Array, positions: Array, everything: Array, window: int, scale: float
) -> Array:
    """Return [new, heads, head_dim]; q [new, heads, head_dim], keys and values [all, kv_heads, head_dim]."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, repeat, axis=1), np.repeat(values, repeat, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * scale
    visible = everything[None, :] <= positions[:, None]
    if window:
        visible &= everything[None, :] > positions[:, None] - window
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)
