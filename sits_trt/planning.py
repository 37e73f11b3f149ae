"""How many sequences, tokens and tiles an engine is built for: from the recipe, the model and the target's memory."""

from __future__ import annotations

from sits_trt.contract import EngineLimits
from sits_trt.errors import RecipeError
from sits_trt.recipe.schema import EngineSection, KvCacheSection, ServingSection
from sits_trt.recipe.skus import Sku
from sits_trt.spec import ModelSpec, TileSpec


def weight_bytes(model: ModelSpec, bits_per_weight: float) -> int:
    """Return the bytes of a model's weights: linears at `bits_per_weight`, embedding and head in 16 bits."""
    attention = model.hidden_size * (2 * model.q_size + 2 * model.kv_size)
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    linears = model.num_layers * (attention + feed_forward)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return int(linears * bits_per_weight / 8 + tables * 2)


FP8_SM = 89
"""The first architecture with FP8 conversions, which the kernels for FP8 pools need."""


def check_kv_cache(kv_cache: KvCacheSection, sku: Sku) -> None:
    """Raise RecipeError where the kernels for `sku` have no pool of this type."""
    if kv_cache.dtype == "fp8" and sku.sm is not None and sku.sm < FP8_SM:
        raise RecipeError(
            f"fp8 needs SM {FP8_SM / 10} and {sku.name} has SM {sku.sm / 10}; use int8, which takes the same memory",
            "kv_cache.dtype",
        )


def plan_limits(
    model: ModelSpec,
    tile: TileSpec,
    sku: Sku,
    engine: EngineSection,
    kv_cache: KvCacheSection,
    serving: ServingSection,
    bits_per_weight: float,
) -> EngineLimits:
    """Return the limits of an engine for this recipe.

    The pool holds `serving.max_batch_size` full sequences, or as many tiles as the target's memory leaves after the
    weights (`kv_cache.memory_fraction` of the rest), or `kv_cache.max_tiles`, whichever is least.
    Raises RecipeError when a sequence is longer than the model's positions or does not fit into the pool.
    """
    max_seq_tokens = engine.max_seq_tokens
    if max_seq_tokens > model.max_positions:
        raise RecipeError(
            f"prompt_tokens.max + max_output_tokens is {max_seq_tokens}, the model has "
            f"{model.max_positions} positions; lower one of them",
            "engine",
        )
    num_tiles = serving.max_batch_size * tile.tiles_for(max_seq_tokens)
    if sku.sm is not None:
        left_bytes = sku.memory_gb * 1e9 - weight_bytes(model, bits_per_weight)
        num_tiles = min(num_tiles, int(left_bytes * kv_cache.memory_fraction) // tile.tile_bytes)
    if kv_cache.max_tiles is not None:
        num_tiles = min(num_tiles, kv_cache.max_tiles)
    if num_tiles < tile.tiles_for(max_seq_tokens):
        raise RecipeError(
            f"{max(num_tiles, 0)} tiles fit beside the weights, one full sequence of {max_seq_tokens} tokens needs "
            f"{tile.tiles_for(max_seq_tokens)}; lower engine.prompt_tokens.max or take a larger target",
            "kv_cache",
        )
    return EngineLimits(
        max_batch_size=serving.max_batch_size,
        max_tokens_per_step=max(engine.max_tokens_per_step, serving.max_batch_size),
        max_seq_tokens=max_seq_tokens,
        num_tiles=num_tiles,
    )
