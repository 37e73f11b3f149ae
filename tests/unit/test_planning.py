"""Engine limits from recipe, model and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sits_trt.errors import RecipeError
from sits_trt.planning import check_kv_cache, plan_limits, weight_bytes
from sits_trt.recipe import find_sku
from sits_trt.recipe.schema import EngineSection, KvCacheSection, PromptTokens, ServingSection
from sits_trt.spec import ModelSpec, RopeSpec, TileSpec

LLAMA_8B = ModelSpec(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, RopeSpec(theta=500000.0), 131072, (0,) * 32
)  # fmt: skip
TILE = TileSpec.of(LLAMA_8B)
ENGINE = EngineSection(prompt_tokens=PromptTokens(p50=256, p95=1024, max=1500), max_output_tokens=100)


def limits(
    sku: str, max_tiles: int | None = None, batch: int = 64, engine: EngineSection = ENGINE, tile: TileSpec = TILE
):
    kv_cache, serving = KvCacheSection(max_tiles=max_tiles), ServingSection(max_batch_size=batch)
    return plan_limits(LLAMA_8B, tile, find_sku(sku), engine, kv_cache, serving, 4.25)


def test_weights_of_llama_8b_are_those_of_its_published_size() -> None:
    linears, tables = 6.98e9, 1.05e9
    assert weight_bytes(LLAMA_8B, 16.0) == pytest.approx(2 * (linears + tables), rel=0.002)
    assert weight_bytes(replace(LLAMA_8B, tie_word_embeddings=True), 16.0) == pytest.approx(
        2 * linears + tables, rel=0.002
    )


def test_pool_holds_every_sequence_where_memory_allows() -> None:
    assert limits("h200").num_tiles == 64 * 25
    assert limits("h200").max_seq_tokens == 1600


def test_memory_bounds_the_pool() -> None:
    tight = limits("rtx5090", batch=256)
    left_bytes = 32e9 - weight_bytes(LLAMA_8B, 4.25)
    assert tight.num_tiles == int(left_bytes * 0.9) // TILE.tile_bytes
    assert tight.num_tiles < 256 * 25


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("int8", 130), ("float8_e4m3", 130), ("int4", 66)])
def test_more_tiles_of_codes_fit(kv_dtype: str, row_bytes: int) -> None:
    """A row of 128 elements is 256 bytes of float16, or its codes and two bytes of scale."""
    tile = TileSpec.of(LLAMA_8B, kv_dtype=kv_dtype)
    assert tile.tile_bytes * 256 == TILE.tile_bytes * row_bytes
    left_bytes = 32e9 - weight_bytes(LLAMA_8B, 4.25)
    assert limits("rtx5090", batch=4096, tile=tile).num_tiles == int(left_bytes * 0.9) // tile.tile_bytes


def test_fp8_is_refused_where_no_kernel_has_it() -> None:
    for sku in ("l40s", "h100", "rtx5090", "cpu"):
        check_kv_cache(KvCacheSection(dtype="fp8"), find_sku(sku))
    for dtype in ("float16", "int8", "int4"):
        check_kv_cache(KvCacheSection(dtype=dtype), find_sku("a100-80gb"))
    with pytest.raises(RecipeError, match=r"SM 8\.9 and a100-80gb has SM 8\.0; use int8") as caught:
        check_kv_cache(KvCacheSection(dtype="fp8"), find_sku("a100-80gb"))
    assert caught.value.key == "kv_cache.dtype"


def test_max_tiles_bounds_the_pool() -> None:
    assert limits("cpu", max_tiles=77).num_tiles == 77


def test_one_sequence_must_fit() -> None:
    with pytest.raises(RecipeError, match="24 tiles fit") as caught:
        limits("cpu", max_tiles=24)
    assert caught.value.key == "kv_cache"


def test_sequence_beyond_the_models_positions_is_refused_with_both_numbers() -> None:
    long = EngineSection(prompt_tokens=PromptTokens(p50=1, p95=1, max=131072), max_output_tokens=1)
    with pytest.raises(RecipeError, match=r"131073.*131072"):
        limits("h200", engine=long)


def test_a_step_has_room_for_one_token_of_every_sequence() -> None:
    assert (
        limits("h200", batch=100, engine=ENGINE.model_copy(update={"max_tokens_per_step": 7})).max_tokens_per_step
        == 100
    )
