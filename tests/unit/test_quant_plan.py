"""Which layers are quantized: ignore patterns and group sizes."""

from __future__ import annotations

import pytest

from sits_trt.errors import QuantizationError
from sits_trt.quant.plan import plan_formats
from sits_trt.recipe.schema import QuantizationSection
from sits_trt.spec import PER_CHANNEL, WeightFormat
from tests.support.tiny import tiny_spec


def section(**values: object) -> QuantizationSection:
    return QuantizationSection.model_validate({"group_size": 32, **values})


def test_every_projection_and_never_the_head() -> None:
    for ignore in (("lm_head",), ()):
        formats = plan_formats(tiny_spec(), section(ignore=ignore, symmetric=True))
        assert len(formats) == 2 * 7
        assert "lm_head" not in formats
        assert set(formats.values()) == {WeightFormat(4, 32, True)}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("lm_hed", "did you mean lm_head"),
        (r"re:.*layers\.9\..*", "matches no linear layer"),
        ("layers.0.mlp.down_proj", r"did you mean model\.layers\.0\.mlp\.down_proj"),
        ("re:down_proj", r"must match the whole name, such as model\.layers\.0\.mlp\.down_proj"),
        ("re:(", "no regular expression"),
        ("", "matches no linear layer"),
        ("re:", "matches no linear layer"),
        ("model.embed_tokens", "matches no linear layer"),
    ],
)
def test_b02_a_pattern_that_matches_nothing_is_refused(pattern: str, hint: str) -> None:
    with pytest.raises(QuantizationError, match=hint):
        plan_formats(tiny_spec(), section(ignore=("lm_head", pattern)))


def test_b02_ignored_layers_stay_float() -> None:
    formats = plan_formats(tiny_spec(), section(ignore=("model.layers.0.self_attn.o_proj", r"re:.*\.1\..*_proj")))
    assert len(formats) == 6
    assert all(name.startswith("model.layers.0.") and not name.endswith("o_proj") for name in formats)


def test_b02_patterns_that_leave_nothing_are_refused() -> None:
    with pytest.raises(QuantizationError, match=r"leaves no layer.*quantization\.scheme=none"):
        plan_formats(tiny_spec(), section(ignore=("re:.*",)))


def test_b13_group_sizes_that_do_not_divide_are_refused_with_the_layers() -> None:
    with pytest.raises(QuantizationError) as found:
        plan_formats(tiny_spec(), section(group_size=64))
    message = str(found.value)
    assert "model.layers.0.mlp.down_proj (96), model.layers.1.mlp.down_proj (96)" in message
    assert "q_proj" not in message
    assert "use group_size 32" in message
    with pytest.raises(QuantizationError, match="and 6 more"):
        plan_formats(tiny_spec(), section(group_size=128))
    assert len(plan_formats(tiny_spec(), section(group_size=64, ignore=(r"re:.*\.down_proj",)))) == 12


def test_one_scale_per_channel_fits_every_width() -> None:
    with pytest.raises(QuantizationError, match="use group_size 32 or -1, or ignore"):
        plan_formats(tiny_spec(), section(scheme="w8a16", group_size=64))
    for values in ({"scheme": "w8a16", "group_size": -1}, {"scheme": "w8a8-fp8", "group_size": 128}):
        formats = plan_formats(tiny_spec(intermediate_size=90), section(**values))
        assert {(form.bits, form.group_size) for form in formats.values()} == {(8, PER_CHANNEL)}
