"""Search and application together on a tiny checkpoint: contents, exactness, determinism, resumption, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sits_trt.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.errors import CheckpointError, QuantizationError
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.scoring import Agreement, block_logits, compare
from sits_trt.quant import apply, apply_scales, search, search_scales
from sits_trt.quant.evaluate import compare_checkpoints
from sits_trt.quant.streams import Streams
from sits_trt.recipe.schema import CalibrationSection, QuantizationSection
from sits_trt.runtime.runners.eager import load_decoder
from sits_trt.spec import TileSpec
from tests.support.tiny import write_checkpoint


def section(**values: object) -> QuantizationSection:
    calibration = CalibrationSection(blocks=6, block_tokens=80)
    return QuantizationSection.model_validate({"group_size": 32, "calibration": calibration, **values})


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total, what


def quantize(source: Path, recipe: QuantizationSection, root: Path, smooth_keys: bool = False) -> Checkpoint:
    checkpoint = open_checkpoint(source)
    search_scales(checkpoint, recipe, root / "scales", quiet, smooth_keys)
    apply_scales(checkpoint, root / "scales", recipe, root / "quantized", quiet)
    return open_checkpoint(root / "quantized")


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    return build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, torch.float32)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", dtype=torch.float16)


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("compensation", [True, False])
def test_the_quantized_model_stays_near_the_float_one(
    tiny: Path, tmp_path: Path, method: str, symmetric: bool, compensation: bool
) -> None:
    recipe = section(method=method, symmetric=symmetric, compensation=compensation)
    quantized = quantize(tiny, recipe, tmp_path)
    assert len(quantized.formats) == 14
    report = json.loads((tmp_path / "quantized" / "report.json").read_text())
    assert report["bits_per_weight"] == pytest.approx(4 + (16 if symmetric else 24) / 32)
    assert 0 < report["evaluation"]["kl"] < 0.2
    assert set(report["search"]["layers"][1]["errors"]) == {name for name in quantized.formats if ".1." in name}
    assert report["search"]["calibration_tokens"] == 480


@pytest.mark.parametrize("ignored", [(), ("re:.*[qk]_proj",)], ids=["all", "float-keys"])
def test_smoothed_keys_fit_an_int4_cache_and_cost_the_weights_nothing(
    tiny: Path, tmp_path: Path, ignored: tuple[str, ...]
) -> None:
    path = tiny / "model.safetensors"
    tensors = load_file(path)
    for name, factor in (("k_proj", 16.0), ("q_proj", 1 / 16)):
        for key in [key for key in tensors if name in key]:
            tensors[key].reshape(-1, 16, 64)[:, 5] *= factor
    save_file(tensors, path, {"format": "pt"})
    recipe, blocks = section(ignore=(*ignored, "lm_head")), [[(7 * i + 3) % 97 for i in range(60)]]
    reference = decoder_of(open_checkpoint(tiny))
    plain, smooth = (
        decoder_of(quantize(tiny, recipe, tmp_path / str(smooth_keys), smooth_keys)) for smooth_keys in (False, True)
    )
    exact = [compare(reference, decoder, blocks).kl for decoder in (plain, smooth)]
    coded = [compare(reference, decoder, blocks, kv_dtype="int4").kl for decoder in (plain, smooth)]
    assert exact[1] < 1.5 * exact[0]
    assert coded[1] < 0.7 * coded[0]


SCHEMES = {
    "w8a16": {"scheme": "w8a16"},
    "w8a16 per channel": {"scheme": "w8a16", "group_size": -1, "symmetric": True},
    "w4a8": {"scheme": "w4a8"},
    "w8a8-fp8": {"scheme": "w8a8-fp8"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_every_scheme_is_written_read_and_near_the_float_model(
    tiny: Path, tmp_path: Path, scheme: str, method: str
) -> None:
    quantized = quantize(tiny, section(method=method, **SCHEMES[scheme]), tmp_path)
    source, blocks = open_checkpoint(tiny), [[(7 * i + 3) % 97 for i in range(60)]]
    decoder = decoder_of(quantized)
    scores = compare(decoder_of(source), decoder, blocks)
    # 4 bits cost most; rounding to e4m3 costs more than 8-bit whole numbers.
    assert 0 < scores.kl < {"w8a16": 2e-3, "w8a16 per channel": 4e-3, "w4a8": 0.2, "w8a8-fp8": 0.05}[scheme]
    streamed = compare_checkpoints(source, quantized, blocks, quiet)
    assert streamed.kl == pytest.approx(scores.kl, rel=0.02)
    decoder.dequantize_(torch.float32)
    assert compare(decoder_of(source), decoder, blocks).kl == pytest.approx(scores.kl, rel=0.02)
    bits = json.loads((tmp_path / "quantized" / "report.json").read_text())["bits_per_weight"]
    # Layers have 64 and 96 inputs, most of them 64.
    assert bits == pytest.approx({"w8a16": 8.75, "w4a8": 4.75}.get(scheme, 8.22), abs=0.02)


def test_the_activations_of_w4a8_are_rounded_wherever_it_runs(tiny: Path, tmp_path: Path) -> None:
    """The same weights without rounding are another model: by more than the two ways of running one differ."""
    quantized = quantize(tiny, section(scheme="w4a8", method="rtn"), tmp_path)
    ids = [(7 * i + 3) % 97 for i in range(40)]
    weights_only = {name: replace(form, activations="float16") for name, form in quantized.formats.items()}
    plain = block_logits(build_decoder(quantized.spec, quantized, weights_only, torch.float32), ids)
    exact = block_logits(decoder_of(quantized), ids)
    assert (exact - plain).abs().max() > 0.05
    served, _ = load_decoder(tmp_path / "quantized", TileSpec.of(quantized.spec), 64, "cpu")
    assert (block_logits(served, ids) - exact).abs().max() < 0.01


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8-fp8"])
def test_the_search_rounds_activations_as_the_model_will(
    tiny: Path, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search's last stream is the written model's. Where a value lies between two codes they may part ways."""
    seen: list[Streams] = []
    real = search.LayerSearch

    def watched(*arguments: object) -> object:
        seen.append(arguments[4])  # type: ignore[arg-type]
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "LayerSearch", watched)
    quantized = quantize(tiny, section(scheme=scheme), tmp_path)
    decoder, stream = decoder_of(quantized), seen[-1]
    blocks = read_blocks("pydoc", load_tokenizer(tiny), 6, 80, "calibration")
    expected = torch.cat([block_logits(decoder, block) for block in blocks])
    found = decoder.head(decoder.norm(stream.quantized))
    reference = decoder.head(decoder.norm(stream.reference))
    assert (found - expected).square().mean() < 0.01 * (reference - expected).square().mean()


def test_a_budget_mixes_formats_and_says_why(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = section(bits_per_weight=6.5)
    quantized = quantize(tiny, recipe, tmp_path / "one")
    report = json.loads((tmp_path / "one" / "quantized" / "report.json").read_text())
    assert 6 < report["bits_per_weight"] <= 6.5
    assert len({(form.bits, form.group_size) for form in quantized.formats.values()}) > 1
    for name, choice in report["bit_budget"]["chosen"].items():
        assert (choice == "float16") == (name not in quantized.formats)
        assert set(report["bit_budget"]["losses"][name]) <= {"int4-g64", "int4-g32", "int8"}
    scores = compare(decoder_of(open_checkpoint(tiny)), decoder_of(quantized), [[(7 * i + 3) % 97 for i in range(60)]])
    assert 0 < scores.kl < 0.1

    def twice(*_: object) -> object:
        raise AssertionError("the budget is decided once")

    # A search that goes on keeps the decision, and the same recipe gives the same bytes.
    root = tmp_path / "two" / "scales"
    root.mkdir(parents=True)
    (root / "bit_budget.json").write_bytes((tmp_path / "one" / "scales" / "bit_budget.json").read_bytes())
    monkeypatch.setattr("sits_trt.quant.bit_budget.measure_losses", twice)
    quantize(tiny, recipe, tmp_path / "two")
    one, two = (tmp_path / name / "quantized" / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-fp8"])
def test_the_same_recipe_twice_gives_the_same_bytes(tiny: Path, tmp_path: Path, scheme: str) -> None:
    for name in ("one", "two"):
        quantize(tiny, section(scheme=scheme), tmp_path / name)
    one, two = (tmp_path / name / "quantized" / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_killed_search_goes_on_at_its_layer(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(tiny, section(), tmp_path / "whole")
    decided: list[int] = []
    real = search.LayerSearch

    class Killed(Exception):
        pass

    def until_second(*arguments: object) -> object:
        streams = arguments[4]
        assert isinstance(streams, Streams)
        decided.append(streams.layer)
        if decided == [0, 1]:
            raise Killed
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "LayerSearch", until_second)
    with pytest.raises(Killed):
        quantize(tiny, section(), tmp_path / "parts")
    (tmp_path / "parts" / "scales" / ".tmpAb12").write_bytes(b"a layer that was being written")
    quantize(tiny, section(), tmp_path / "parts")
    assert not list((tmp_path / "parts" / "scales").glob(".tmp*"))
    assert decided == [0, 1, 1]
    whole, parts = (tmp_path / name / "quantized" / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    assert not list((tmp_path / "parts" / "scales").glob("streams*"))


@pytest.mark.parametrize(("file", "content"), [("report.json", "{"), ("report.json", "{}"), ("model.safetensors", "x")])
def test_damaged_work_of_an_earlier_run_is_done_again(tiny: Path, tmp_path: Path, file: str, content: str) -> None:
    quantized = tmp_path / "quantized"
    quantize(tiny, section(method="rtn"), tmp_path)
    before = {path.name: path.read_bytes() for path in quantized.iterdir()}
    (quantized / file).write_text(content)
    quantize(tiny, section(method="rtn"), tmp_path)
    after = {path.name: path.read_bytes() for path in quantized.iterdir()}
    assert after.keys() == before.keys()
    assert after["model.safetensors"] == before["model.safetensors"]
    assert json.loads(after["report.json"])["bits_per_weight"] == json.loads(before["report.json"])["bits_per_weight"]


def test_b02_ignored_layers_stay_float_and_still_take_their_share_of_a_fold(tiny: Path, tmp_path: Path) -> None:
    kept = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj")
    quantized = quantize(tiny, section(ignore=("lm_head", *kept)), tmp_path)
    assert set(quantized.formats).isdisjoint(kept)
    for name in kept:
        assert quantized[f"{name}.weight"].dtype == torch.float16
    source = open_checkpoint(tiny)
    folded = quantized["model.layers.0.input_layernorm.weight"] / source["model.layers.0.input_layernorm.weight"]
    stretched = quantized[f"{kept[0]}.weight"] / source[f"{kept[0]}.weight"]
    torch.testing.assert_close((stretched * folded).float(), torch.ones_like(stretched).float(), rtol=0.01, atol=0.01)
    # The last: nothing of layer 1's down is quantized, so its producer keeps its rows.
    assert torch.equal(quantized[f"{kept[2]}.weight"], source[f"{kept[2]}.weight"])


def edited(source: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    from safetensors.torch import save_file

    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return source


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w4a8", "w8a8-fp8"])
def test_b14_zero_groups_tiny_groups_and_dead_channels(tiny: Path, tmp_path: Path, scheme: str) -> None:
    groups = scheme != "w8a8-fp8"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][3, slice(32, 64) if groups else slice(None)] = 0
        tensors["model.layers.0.self_attn.q_proj.weight"][5, :32] = 1e-7
        tensors["model.layers.1.input_layernorm.weight"][7] = 0
        tensors["model.layers.1.mlp.up_proj.weight"][:] = 0

    for method in ("rtn", "awq"):
        root = tmp_path / method
        quantized = quantize(edited(tiny, change), section(method=method, scheme=scheme), root)
        for name in quantized:
            tensor = quantized[name]
            assert bool(torch.isfinite(tensor).all()), name
            if name.endswith(".scales"):
                assert bool((tensor > 0).all()), name
        decoder = decoder_of(quantized)
        decoder.dequantize_(torch.float32)
        assert bool((decoder.layers[0].down.weight[3, 32:64] == 0).all())
        assert bool((decoder.layers[1].gate_up.weight[96:] == 0).all())
        assert bool(torch.isfinite(block_logits(decoder, [1, 2, 3])).all())


OUTLIERS: dict[str, tuple[str, tuple[int | slice, ...], float]] = {
    "input channel": ("model.layers.0.input_layernorm.weight", (7,), 1e3),
    "channel of the stream": ("model.embed_tokens.weight", (slice(None), 11), 3e3),
    "token": ("model.embed_tokens.weight", (slice(60, 80),), 3e3),
    "output channel": ("model.layers.0.self_attn.q_proj.weight", (3,), 1e3),
    "weight": ("model.layers.0.mlp.down_proj.weight", (3, 5), 1e4),
    "weight near the end of float16": ("model.layers.0.self_attn.v_proj.weight", (3, 5), 2e5),
}
"""What is multiplied by how much. All stay in the range of float16."""


@pytest.mark.parametrize("outlier", OUTLIERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_b14_outliers_leave_finite_scales_and_the_search_its_lead(
    tiny: Path, tmp_path: Path, outlier: str, symmetric: bool
) -> None:
    name, place, factor = OUTLIERS[outlier]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][place] *= factor
        assert bool(torch.isfinite(tensors[name]).all())

    edited(tiny, change)
    kl = {}
    for method in ("rtn", "awq"):
        quantized = quantize(tiny, section(method=method, symmetric=symmetric), tmp_path / method)
        for tensor in (key for key in quantized if key.endswith(".scales")):
            assert bool((torch.isfinite(quantized[tensor]) & (quantized[tensor] > 0)).all()), tensor
        kl[method] = json.loads((tmp_path / method / "quantized" / "report.json").read_text())["evaluation"]["kl"]
    # Without an outlier the search leaves a sixth to a quarter of the divergence of round-to-nearest.
    assert kl["awq"] < 0.7 * kl["rtn"]


@pytest.mark.parametrize("characters", [3, 20, 100])
def test_b17_short_and_ragged_calibration_texts_do(tiny: Path, tmp_path: Path, characters: int) -> None:
    """Fewer tokens than channels leave most directions unknown; damping must keep those weights near the original."""
    text = tmp_path / "short.txt"
    text.write_text("".join(chr(0x21 + i % 90) for i in range(characters)))
    calibration = CalibrationSection(source=str(text), blocks=6, block_tokens=80)
    quantize(tiny, section(calibration=calibration), tmp_path)
    report = json.loads((tmp_path / "quantized" / "report.json").read_text())
    assert report["search"]["calibration_tokens"] == characters
    assert report["evaluation"]["calibrated_tokens"] == characters, "the text is too short for both"
    quantized, source = (open_checkpoint(place) for place in (tmp_path / "quantized", tiny))
    other_text = [[(7 * i + 3) % 97 for i in range(60)]]
    assert compare(decoder_of(source), decoder_of(quantized), other_text).kl < 0.3


@pytest.mark.parametrize(("characters", "seen_twice"), [(80 * 10, 0), (80 * 9 - 7, 80 + 7), (80 * 2 + 5, 80 * 2)])
def test_b17_the_report_says_what_of_its_text_the_search_has_seen(
    tiny: Path, tmp_path: Path, characters: int, seen_twice: int
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(0x21 + i * i % 90) for i in range(characters)))
    calibration = CalibrationSection(source=str(text), blocks=2, block_tokens=80)
    quantize(tiny, section(calibration=calibration, method="rtn"), tmp_path)
    evaluation = json.loads((tmp_path / "quantized" / "report.json").read_text())["evaluation"]
    assert evaluation["positions"] == min(characters, 80 * 8)
    assert evaluation["calibrated_tokens"] == seen_twice


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tiny: Path, tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = value

    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        quantize(edited(tiny, change), section(), tmp_path)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-fp8"])
def test_activations_that_are_not_finite_are_refused_by_layer(tiny: Path, tmp_path: Path, scheme: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:] = float("inf")

    with pytest.raises(QuantizationError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        quantize(edited(tiny, change), section(scheme=scheme), tmp_path)


def test_b14_weights_beyond_the_scales_of_float16_are_refused_with_a_way_out(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"][4, 9] = 3e6

    edited(source, change)
    with pytest.raises(QuantizationError, match=r"a scale of model\.layers\.1\.mlp\.up_proj does not fit .* ignore it"):
        quantize(source, section(), tmp_path / "refused")
    quantized = quantize(source, section(ignore=("lm_head", name)), tmp_path / "taken")
    assert bool(torch.isfinite(quantized[f"{name}.weight"]).all())


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_b14_a_tensor_outside_the_layers_that_is_not_finite_is_refused(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", dtype=torch.float16, tie_word_embeddings=False)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].flatten()[5] = float("nan")

    with pytest.raises(QuantizationError, match=name.replace(".", r"\.")):
        quantize(edited(source, change), section(), tmp_path)
    assert not (tmp_path / "quantized" / "report.json").exists()


def test_scores_that_are_not_finite_are_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing known leads there: the checks of weights and activations come first. The last line holds anyway."""
    nan = float("nan")
    monkeypatch.setattr(apply, "compare_checkpoints", lambda *_: Agreement(nan, 5.0, nan, 0.0, 0.0, 10))
    with pytest.raises(QuantizationError, match="perplexity is nan"):
        quantize(tiny, section(method="rtn"), tmp_path)
    assert not (tmp_path / "quantized" / "report.json").exists()


def test_a_written_report_means_a_whole_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(tiny, section(method="rtn"), tmp_path)
    checkpoint = open_checkpoint(tiny)
    again = [checkpoint, tmp_path / "scales", section(method="rtn"), tmp_path / "quantized", quiet]
    monkeypatch.setattr(apply, "write_quantized", lambda *_: pytest.fail("written again"))
    details = apply_scales(*again)
    assert details["evaluation"]["kl"] > 0
    (tmp_path / "quantized" / "report.json").unlink()
    with pytest.raises(pytest.fail.Exception, match="written again"):
        apply_scales(*again)


def test_b13_nothing_is_written_when_the_plan_fails(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="group_size 64"):
        quantize(tiny, section(group_size=64), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_not_quantized_again(tiny: Path, tmp_path: Path) -> None:
    quantized = quantize(tiny, section(method="rtn"), tmp_path)
    with pytest.raises(CheckpointError, match="already quantized"):
        search_scales(quantized, section(), tmp_path / "again", quiet)


def test_scale_recover_is_the_least_squares_factor(tiny: Path, tmp_path: Path) -> None:
    with_it = quantize(tiny, section(method="rtn"), tmp_path / "with")
    without = quantize(tiny, section(method="rtn", scale_recover=False), tmp_path / "without")
    assert not [name for name in without if name.endswith("scale_recover")]
    factors = with_it["model.layers.0.scale_recover"]
    assert factors.shape == (64,)
    drift = [
        json.loads((tmp_path / name / "quantized" / "report.json").read_text())["search"]["layers"][0]["drift"]
        for name in ("with", "without")
    ]
    assert drift[0] < drift[1]
