"""Profiles: every shape that the runtime may ask for lies in one, and each is tuned for something it allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_trt.contract import EngineLimits, bindings
from sits_trt.engine.profiles import Profile, plan_profiles
from sits_trt.recipe.schema import PromptTokens
from sits_trt.spec import ModelSpec, TileSpec
from tests.support.tiny import tiny_spec

MODEL = tiny_spec()
TILE = TileSpec.of(MODEL, 16)
PROMPT = PromptTokens(p50=10, p95=30, max=50)


def plan(limits: EngineLimits, prompt: PromptTokens = PROMPT, max_output_tokens: int = 14) -> dict[str, Profile]:
    return {profile.name: profile for profile in plan_profiles(MODEL, TILE, limits, prompt, max_output_tokens)}


def test_shapes_of_a_small_plan() -> None:
    limits = EngineLimits(max_batch_size=4, max_tokens_per_step=24, max_seq_tokens=64, num_tiles=16)
    profiles = plan(limits)
    assert list(profiles) == ["decode", "mixed"]
    assert profiles["decode"].shapes["input_ids"] == ((1,), (4,), (4,))
    assert profiles["mixed"].shapes["input_ids"] == ((1,), (24,), (24,))
    for profile in profiles.values():
        assert profile.shapes["kv_pool"][2] == (16, 2, 2, 2, 16, 16)
        # Half-way through the answer to a median prompt: 10 + 7 tokens are two tiles of 16.
        assert profile.shapes["tile_table"] == ((1, 1), (4, 2), (4, 4))
        assert profile.shapes["query_starts"] == ((2,), (5,), (5,))
        assert profile.shapes["logit_indices"] == ((1,), (4,), (4,))


def test_the_scales_of_a_coded_pool_grow_with_the_pool() -> None:
    limits, tile = EngineLimits(4, 24, 64, 16), TileSpec.of(MODEL, 16, "int4")
    for profile in plan_profiles(MODEL, tile, limits, PROMPT, 14):
        for index, tiles in enumerate((1, 16, 16)):
            assert profile.shapes["kv_pool"][index] == (tiles, 2, 2, 2, 16, 8)
            assert profile.shapes["kv_scales"][index] == (tiles, 2, 2, 2, 16)
    names = [b.name for b in bindings(MODEL, tile) if b.is_input]
    assert names == [*(b.name for b in bindings(MODEL, TILE) if b.is_input), "kv_scales"]
    assert {b.name: b.dtype for b in bindings(MODEL, tile)}["kv_pool"] == "int8"


def test_a_mixed_step_is_tuned_for_one_long_prompt_beside_decoding() -> None:
    limits = EngineLimits(max_batch_size=8, max_tokens_per_step=512, max_seq_tokens=64, num_tiles=32)
    assert plan(limits)["mixed"].shapes["input_ids"] == ((1,), (37,), (512,))


@st.composite
def plans(draw: st.DrawFn) -> tuple[EngineLimits, PromptTokens, int]:
    p50, more, most = draw(st.integers(1, 400)), draw(st.integers(0, 400)), draw(st.integers(0, 400))
    prompt = PromptTokens(p50=p50, p95=p50 + more, max=p50 + more + most)
    output = draw(st.integers(1, 300))
    batch = draw(st.integers(1, 300))
    limits = EngineLimits(batch, draw(st.integers(batch, 4096)), prompt.max + output, draw(st.integers(1, 10**6)))
    return limits, prompt, output


@settings(deadline=None)
@given(plans())
def test_every_profile_is_ordered_and_reaches_the_limits(given_plan: tuple[EngineLimits, PromptTokens, int]) -> None:
    limits, prompt, output = given_plan
    profiles = plan(limits, prompt, output)
    for profile in profiles.values():
        assert set(profile.shapes) == {b.name for b in bindings(MODEL, TILE) if b.is_input}
        for least, typical, most in profile.shapes.values():
            assert len(least) == len(typical) == len(most)
            assert all(1 <= a <= b <= c for a, b, c in zip(least, typical, most, strict=True))
    mixed = profiles["mixed"].shapes
    assert mixed["input_ids"][2] == (limits.max_tokens_per_step,)
    assert mixed["tile_table"][2] == (limits.max_batch_size, TILE.tiles_for(limits.max_seq_tokens))
    assert mixed["kv_pool"][2][0] == limits.num_tiles
    assert profiles["decode"].shapes["input_ids"][2] == (limits.max_batch_size,)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_lie_within_the_mixed_profile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = EngineLimits(max_batch_size=6, max_tokens_per_step=100, max_seq_tokens=64, num_tiles=24)
    shapes = plan(limits)["mixed"].shapes
    for _ in range(50):
        batch = int(rng.integers(1, limits.max_batch_size + 1))
        tokens = int(rng.integers(batch, limits.max_tokens_per_step + 1))
        asked = {
            "input_ids": (tokens,),
            "tile_table": (batch, int(rng.integers(1, 5))),
            "context_lens": (batch,),
            "query_starts": (batch + 1,),
            "logit_indices": (int(rng.integers(1, batch + 1)),),
        }
        for name, shape in asked.items():
            least, _, most = shapes[name]
            assert all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)), name


def test_profiles_survive_json() -> None:
    model: ModelSpec = MODEL
    limits = EngineLimits(2, 16, 64, 8)
    as_dict = plan_profiles(model, TILE, limits, PROMPT, 14)[0].to_dict()
    assert as_dict["name"] == "decode"
    assert as_dict["shapes"]["context_lens"] == [[1], [2], [2]]
