"""Recipes: strict YAML, blocks, overrides, and errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sits_trt.errors import RecipeError
from sits_trt.recipe import SKUS, Recipe, find_sku, load_recipe, recipe_of_build
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.recipe.schemes import budget_formats, possible_formats, weight_format
from sits_trt.recipe.strict_yaml import parse_yaml
from sits_trt.spec import CODED_KV_DTYPES, PER_CHANNEL, WeightFormat

MINIMAL = "model: {source: somewhere}\ntarget: {sku: cpu}\n"


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-7", -7),
        ("0", 0),
        ("no", "no"),
        ("on", "on"),
        ("0123", "0123"),
        ("1:30", "1:30"),
        ("true", True),
        ("~", None),
        ("2026-11-30", "2026-11-30"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
    ],
)
def test_b01_scalars_are_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(f"key: {text}", "test")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("quantization.scale_recover=no", "quantization.scale_recover"),
        ("quantization.scale_recover=on", "quantization.scale_recover"),
        ("serving.max_batch_size=0123", "serving.max_batch_size"),
        ("serving.start_timeout_s=1:30", "serving.start_timeout_s"),
        ("serving.max_batch_size=8.5", "serving.max_batch_size"),
        ("serving.max_batch_size=true", "serving.max_batch_size"),
        ("serving.max_batch_size='8'", "serving.max_batch_size"),
        ("serving.max_batch_size=0", "serving.max_batch_size"),
        ("kv_cache.memory_fraction=1e5", "kv_cache.memory_fraction"),
        ("quantization.group_size=48", "quantization.group_size"),
        ("quantization.group_size=-1", "quantization"),
        ("engine.prompt_tokens.p50=100000", "engine.prompt_tokens"),
        ("target.sku=a100", "target.sku"),
        ("quantisation.group_size=64", "quantisation"),
        ("quantization.groupsize=64", "quantization.groupsize"),
        ("quantization.ignore=lm_head", "quantization.ignore"),
        ("name=Has Spaces", "name"),
    ],
)
def test_b01_wrong_value_is_refused_by_key(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a8", "w8a8-fp8"])
@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt", "cuda"])
def test_schemes_without_kernels_are_refused_with_the_way_out(tmp_path: Path, scheme: str, backend: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(RecipeError, match=f"scheme {scheme} has no kernels for .*{backend}; set engine.backend=eager"):
        load_recipe(path, [f"quantization.scheme={scheme}", f"engine.backend={backend}"])
    assert load_recipe(path, [f"quantization.scheme={scheme}", "engine.backend=eager"]).quantization.scheme == scheme


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantization.scheme=w8a16"], "bits_per_weight is for scheme w4a16, not w8a16"),
        (["quantization.budget_formats=[]"], "must not be empty"),
        (["quantization.budget_formats=[int3]"], "quantization.budget_formats"),
        (["quantization.bits_per_weight=0"], "quantization.bits_per_weight"),
        (["quantization.bits_per_weight=16"], "16 leaves nothing to quantize.*scheme=none"),
        (["quantization.bits_per_weight=1e308"], "leaves nothing to quantize"),
        (["engine.backend=cuda"], "budget_formats has int8, which has no kernels for engine.backend cuda; take it out"),
    ],
)
def test_budgets_that_cannot_be_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    path = write(tmp_path, MINIMAL)
    budget = ["engine.backend=eager", "quantization.bits_per_weight=5"]
    section = load_recipe(path, budget).quantization
    assert possible_formats(section) == [
        *(WeightFormat(4, size, False) for size in (128, 64, 32)),
        WeightFormat(8, PER_CHANNEL, False),
    ]
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, [*budget, *overrides])
    int4 = "quantization.budget_formats=[float16, int4-g32]"
    section = load_recipe(path, [*budget, "engine.backend=cuda", int4]).quantization
    assert budget_formats(section) == {"int4-g32": WeightFormat(4, 32, False), "float16": None}
    assert possible_formats(section) == [WeightFormat(4, 32, False)]


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("w4a16", WeightFormat(4, 32, False)),
        ("w8a16", WeightFormat(8, 32, False)),
        ("w4a8", WeightFormat(4, 32, False, activations="float8_e4m3")),
        ("w8a8-fp8", WeightFormat(8, PER_CHANNEL, True, "float8_e4m3", "float8_e4m3")),
    ],
)
def test_schemes_and_their_formats(scheme: str, form: WeightFormat) -> None:
    section = QuantizationSection.model_validate({"scheme": scheme, "group_size": 32})
    assert weight_format(section) == form
    assert not form.problem()
    assert (
        weight_format(section).bits_per_weight(64)
        == {"w4a16": 4.75, "w8a16": 8.75, "w4a8": 4.75, "w8a8-fp8": 8.25}[scheme]
    )


def test_b01_float_in_exponent_form_is_a_number(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, MINIMAL), ["kv_cache.memory_fraction=5e-1"]).kv_cache.memory_fraction == 0.5


def test_b01_repeated_key_is_refused_with_its_line(tmp_path: Path) -> None:
    text = MINIMAL + "quantization:\n  group_size: 64\n  group_size: 32\n"
    with pytest.raises(RecipeError, match=r"group_size.*line 5"):
        load_recipe(write(tmp_path, text))


def test_near_names_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean group_size"):
        load_recipe(write(tmp_path, MINIMAL), ["quantization.groupsize=64"])
    with pytest.raises(RecipeError, match="did you mean h200"):
        load_recipe(write(tmp_path, MINIMAL), ["target.sku=h20"])


def test_missing_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, "target: {sku: cpu}\n"))
    assert caught.value.key == "model"


@pytest.mark.parametrize("text", ["[1, 2]", "model: [", "3: x", "key: 'open", "blocks: smollm2"])
def test_not_a_recipe_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(path))


def test_later_blocks_and_own_keys_win(tmp_path: Path) -> None:
    write(tmp_path, "serving: {max_batch_size: 2, max_queue_size: 3}\n", "blocks/one.yaml")
    write(tmp_path, "serving: {max_batch_size: 4}\n", "blocks/two.yaml")
    recipe = load_recipe(write(tmp_path, "blocks: [one, two]\n" + MINIMAL + "serving: {bls_instances: 5}\n"))
    assert (recipe.serving.max_batch_size, recipe.serving.max_queue_size, recipe.serving.bls_instances) == (4, 3, 5)


def test_unknown_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no block .smolm2. .did you mean smollm2"):
        load_recipe(write(tmp_path, "blocks: [smolm2]\n" + MINIMAL))


def test_overrides_apply_in_order_and_reach_lists(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, MINIMAL), ["sweep.concurrencies=[1, 2]", "sweep.concurrencies=[3]", "quantization.ignore=[]"]
    )
    assert recipe.sweep.concurrencies == (3,)
    assert recipe.quantization.ignore == ()


@pytest.mark.parametrize("override", ["x", "=3", "a..b=3", ".a=3"])
def test_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        load_recipe(write(tmp_path, MINIMAL), [override])


def test_recipe_round_trips_through_json(tmp_path: Path) -> None:
    recipe = load_recipe("a100", ["serving.max_batch_size=7"])
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_every_key_has_a_type_in_the_schema() -> None:
    assert json.loads(json.dumps(Recipe.model_json_schema()))["additionalProperties"] is False


def test_sku_names_are_their_keys() -> None:
    assert all(find_sku(name).name == name for name in SKUS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.concurrencies=[4, 1, 4]", "concurrencies must not repeat"),
        ("sweep.request_rates=[2.5, 2.5]", "request_rates must not repeat"),
        ("sweep.concurrencies=[]", "must not both be empty"),
        ("sweep.arrival_cv=0", "sweep.arrival_cv"),
        ("sweep.request_rates=[.inf]", "sweep.request_rates"),
    ],
)
def test_sweep_levels_are_checked(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, MINIMAL), [override])


BOMB = "a: &a [x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{chr(ord(key) - 1)}'] * 9)}]\n" for key in "bcdefghijkl"
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BOMB, id="bomb"),
        pytest.param("&a [*a]", id="circle"),
        pytest.param("[" * 3000, id="deep"),
        "!!binary aGk=",
        "!!timestamp 2026-11-30",
        "!!int x",
        "!!bool x",
        "!!map [a]",
        pytest.param("9" * 5000, id="digits"),
    ],
)
def test_yaml_that_cannot_become_a_recipe_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_yaml(text, "test")


def test_types_of_the_kv_cache(tmp_path: Path) -> None:
    words = ("float16", "int8", "fp8", "int4")
    found = [load_recipe(write(tmp_path, MINIMAL), [f"kv_cache.dtype={word}"]).kv_cache for word in words]
    assert tuple(section.dtype for section in found) == words
    assert [section.pool_dtype for section in found] == ["float16", *CODED_KV_DTYPES]
    with pytest.raises(RecipeError, match=r"kv_cache\.dtype.*'float8'"):
        load_recipe(write(tmp_path, MINIMAL), ["kv_cache.dtype=float8"])


@pytest.mark.parametrize("content", ["[]", "5", "[" * 100_000])
def test_a_builds_recipe_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(RecipeError, match="build again"):
        recipe_of_build(tmp_path)
