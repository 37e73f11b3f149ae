"""Checkpoint directories: single and sharded files, what is missing, damaged, superfluous or hostile; writing."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sits_trt.checkpoint import materialize, open_checkpoint, source_digest, write_quantized
from sits_trt.errors import CheckpointError
from sits_trt.models import build_decoder
from sits_trt.spec import WeightFormat
from tests.support.decode import whole_logits
from tests.support.tiny import tiny_tensors, write_checkpoint

SHARD_BYTES = 50_000


def entry(name: str = "x", dtype: Any = "F32", shape: Any = (8,), offsets: Any = (0, 32)) -> bytes:
    """Return a header of one tensor."""
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = write_checkpoint(tmp_path / "sharded", shard_bytes=SHARD_BYTES)
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_every_tensor_is_found_single_and_sharded(single: Path, sharded: Path) -> None:
    one, many = open_checkpoint(single), open_checkpoint(sharded)
    expected = tiny_tensors(one.spec)
    assert set(one) == set(many) == set(expected)
    assert len(one) == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(one[name], tensor)
        assert torch.equal(many[name], tensor)
    assert "model.layers.2.mlp.up_proj.weight" not in one
    with pytest.raises(KeyError):
        one["nothing"]


def test_tensors_are_read_when_asked_for(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    victim = (
        sharded / json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    )
    victim.unlink()
    assert checkpoint["model.norm.weight"].shape == (64,), "the headers are known, the other shards still readable"
    with pytest.raises(FileNotFoundError):
        checkpoint["lm_head.weight"]


class TestB06TiedHead:
    def test_the_embedding_is_the_head(self, tmp_path: Path) -> None:
        tied = open_checkpoint(write_checkpoint(tmp_path / "tied", tie_word_embeddings=True))
        assert "lm_head.weight" not in tied
        untied = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}
        ids = [5, 90, 3, 44]
        decoder = build_decoder(tied.spec, tied, dtype=torch.float32)
        assert torch.equal(
            whole_logits(decoder, ids), whole_logits(build_decoder(tied.spec, untied, dtype=torch.float32), ids)
        )

    def test_a_head_that_should_be_there_is_missed(self, single: Path) -> None:
        edit_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"tensor 'lm_head.weight': missing"):
            open_checkpoint(single)


class TestB12Incomplete:
    def test_missing_shards_are_named(self, sharded: Path, tmp_path: Path) -> None:
        shards = sorted(sharded.glob("model-*.safetensors"))
        shards[-1].unlink()
        with pytest.raises(CheckpointError, match=f"incomplete: {shards[-1].name} of the {len(shards)} files"):
            open_checkpoint(sharded)
        shards[0].unlink()
        with pytest.raises(CheckpointError, match=f"{shards[0].name}, {shards[-1].name}"):
            materialize(sharded, tmp_path / "out", "float16")
        assert not (tmp_path / "out").exists()

    def test_missing_tensor_is_named(self, single: Path) -> None:
        edit_tensors(single, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1.mlp.up" in n])
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            open_checkpoint(single)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused_and_never_opened(self, single: Path, tmp_path: Path, name: str) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
                return Path.touch, (tmp_path / "exploded",)

        (single / "model.safetensors").unlink()
        (single / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError, match=f"{name}.*never loaded"):
            open_checkpoint(single)
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize(
        "header",
        [
            *(b"[]", b'{"x": 1}', b'{"x": {"dtype": "F32"}}', b"\xff\xfe"),
            *(entry(shape="8"), entry(shape=[8.0]), entry(shape=[None]), entry(shape=[True]), entry(shape=[-2, -4])),
            *(entry(offsets=[0.0, 32.0]), entry(offsets=["0", "32"]), entry(offsets=[0]), entry(offsets=[-32, 0])),
            *(entry(dtype=None), entry(dtype=[]), entry()[:-1] + b", " + entry()[1:]),
            pytest.param(b"[" * 100_000, id="deep"),
        ],
    )
    def test_a_header_that_is_none(self, single: Path, header: bytes) -> None:
        (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="no safetensors file"):
            open_checkpoint(single)

    @pytest.mark.parametrize(
        "places", [([0, 32], [0, 32]), ([0, 32], [16, 48]), ([8, 40], [40, 72]), ([0, 32], [40, 72])]
    )
    def test_tensors_that_overlap_or_leave_gaps(self, single: Path, places: tuple[list[int], list[int]]) -> None:
        """Each alone looks sound, and one would be read for the other."""
        header = entry("x", offsets=places[0])[:-1] + b", " + entry("y", offsets=places[1])[1:]
        data = bytes(max(places[1]))
        (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        with pytest.raises(CheckpointError, match=r"'[xy]'.*shape and place disagree"):
            open_checkpoint(single)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_json_nested_too_deep(self, single: Path, name: str) -> None:
        (single / name).write_text("[" * 100_000)
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(single)

    @pytest.mark.parametrize("value", [5, "LlamaForCausalLM", {}, [{}], [5]])
    def test_architectures_that_are_no_names(self, single: Path, value: object) -> None:
        edit_config(single, architectures=value, model_type=...)
        with pytest.raises(CheckpointError, match="architecture"):
            open_checkpoint(single)

    def test_a_shape_that_does_not_fit_its_bytes(self, single: Path) -> None:
        header = b'{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
        (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointError, match=r"'x'.*shape and place disagree"):
            open_checkpoint(single)

    @pytest.mark.parametrize("keep", [0, 5, 300, -100])
    def test_a_file_cut_short(self, single: Path, keep: int) -> None:
        path = single / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match="download the checkpoint again"):
            open_checkpoint(single)

    def test_no_weights_no_config_no_directory(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="holds neither"):
            open_checkpoint(single)
        (single / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            open_checkpoint(single)
        with pytest.raises(CheckpointError, match="did you mean smollm2-135m-instruct"):
            open_checkpoint("smollm2-135m")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_no_path_in_an_index_leaves_the_directory(sharded: Path, name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a file in its own directory"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.down_proj.bias", "model.layers.2.extra.weight"]
)
def test_b08_a_tensor_that_the_model_would_ignore_is_refused(single: Path, name: str) -> None:
    edit_tensors(single, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"{name}.*no place for it"):
        open_checkpoint(single)


def test_rotary_buffers_of_old_checkpoints_are_recomputed(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(single, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert name not in open_checkpoint(single)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_number_types_that_need_scales_are_refused(single: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(single, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"{name}.*needs scales"):
        open_checkpoint(single)


def test_wrong_shape_names_both_sides(single: Path) -> None:
    edit_config(single, intermediate_size=80)
    with pytest.raises(CheckpointError, match=r"\[64, 96\].*\[64, 80\]|\[96, 64\].*\[80, 64\]"):
        open_checkpoint(single)


class TestMaterialize:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_values_are_rounded_and_all_else_kept(self, sharded: Path, tmp_path: Path, dtype: str) -> None:
        (sharded / "generation_config.json").write_text('{"eos_token_id": [0, 3], "temperature": 0.5}')
        seen: list[tuple[int, int]] = []
        materialize(sharded, tmp_path / "out", dtype, lambda done, total, what: seen.append((done, total)))
        source, copy = open_checkpoint(sharded), open_checkpoint(tmp_path / "out")
        assert copy.spec == source.spec
        assert copy.spec.eos_token_ids == (0, 3)
        for name in source:
            assert copy[name].dtype == getattr(torch, dtype)
            assert torch.equal(copy[name], source[name].to(copy[name].dtype))
        assert copy.hf_config["dtype"] == dtype
        assert seen == [(done, len(source)) for done in range(len(source) + 1)]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes()

    def test_a_second_run_replaces_shards_of_the_first(self, single: Path, sharded: Path, tmp_path: Path) -> None:
        materialize(single, tmp_path / "out", "float16")
        first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        (tmp_path / "out" / "00007.safetensors.partial").write_bytes(b"left by a killed run")
        materialize(single, tmp_path / "out", "float16")
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first

    def test_the_source_is_never_overwritten(self, single: Path) -> None:
        before = {path.name: path.read_bytes() for path in single.iterdir()}
        with pytest.raises(CheckpointError, match="another directory"):
            materialize(single, single / ".." / single.name, "float16")
        with pytest.raises(CheckpointError, match="another directory"):
            write_quantized(single, open_checkpoint(single), {}.items(), {})
        assert {path.name: path.read_bytes() for path in single.iterdir()} == before

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer(self, single: Path, tmp_path: Path, name: str) -> None:
        (single / name).write_text("[]")
        with pytest.raises(CheckpointError, match=name):
            materialize(single, tmp_path / "out", "float16")

    def test_values_that_float16_cannot_hold(self, single: Path, tmp_path: Path) -> None:
        edit_tensors(single, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
        with pytest.raises(CheckpointError, match=r"model.norm.weight.*overflows float16.*bfloat16"):
            materialize(single, tmp_path / "out", "float16")
        assert not list((tmp_path / "out").glob("model*"))
        materialize(single, tmp_path / "bf16", "bfloat16")
        edit_tensors(single, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
        with pytest.raises(CheckpointError, match="not finite"):
            materialize(single, tmp_path / "out", "bfloat16")


class TestDigest:
    def test_content_decides(self, single: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache" / "digests.json"
        first = source_digest(single, cache)
        assert first == source_digest(single, cache) == source_digest(single) == open_checkpoint(single).digest()
        twin = write_checkpoint(tmp_path / "twin")
        assert source_digest(twin) == first, "the place does not matter"
        (twin / "README.md").write_text("words")
        assert source_digest(twin) == first
        edit_config(twin, rope_theta=5.0)
        assert source_digest(twin) != first
        edit_tensors(single, lambda tensors: tensors["model.norm.weight"].mul_(2))
        assert source_digest(single, cache) != first

    def test_a_known_file_is_not_read_again(
        self, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = tmp_path / "digests.json"
        first = source_digest(single, cache)

        def no_reading(path: Path) -> str:
            raise AssertionError(f"{path} was read again")

        monkeypatch.setattr("sits_trt.checkpoint.source.file_digest", no_reading)
        assert source_digest(single, cache) == first
        cache.write_text("damaged")
        with pytest.raises(AssertionError):
            source_digest(single, cache)


FORMATS = {
    "model.layers.0.mlp.down_proj": WeightFormat(4, 32, symmetric=False),
    "model.layers.1.self_attn.q_proj": WeightFormat(4, 32, symmetric=True),
}


class TestQuantized:
    def tensors(self, source: Path) -> dict[str, torch.Tensor]:
        tensors = dict(open_checkpoint(source))
        for name, form in FORMATS.items():
            out, width = tensors.pop(f"{name}.weight").shape
            tensors[f"{name}.qweight"] = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8)
            tensors[f"{name}.scales"] = torch.rand(out, width // 32).half()
            if not form.symmetric:
                tensors[f"{name}.zeros"] = torch.randint(0, 16, (out, width // 32), dtype=torch.uint8)
                tensors[f"{name}.input_scale"] = torch.rand(width).half()
        tensors["model.layers.1.scale_recover"] = torch.rand(64).half()
        return tensors

    def test_round_trip(self, single: Path, tmp_path: Path) -> None:
        tensors = self.tensors(single)
        source = open_checkpoint(single)
        write_quantized(tmp_path / "q", source, tensors.items(), FORMATS)
        back = open_checkpoint(tmp_path / "q")
        assert back.spec == source.spec
        assert back.formats == FORMATS
        assert set(back) == set(tensors)
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
        decoder = build_decoder(back.spec, back, back.formats, torch.float32)
        assert whole_logits(decoder, [4, 8, 15]).isfinite().all()

    def test_a_quantized_source_keeps_its_codes(self, single: Path, tmp_path: Path) -> None:
        tensors = self.tensors(single)
        write_quantized(tmp_path / "q", open_checkpoint(single), tensors.items(), FORMATS)
        materialize(tmp_path / "q", tmp_path / "again", "bfloat16")
        back = open_checkpoint(tmp_path / "again")
        assert back.formats == FORMATS
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            kept = name.endswith((".qweight", ".scales", ".zeros"))
            assert torch.equal(back[name], tensor if kept else tensor.bfloat16()), name
        assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda t: t.pop("model.layers.0.mlp.down_proj.zeros"), "down_proj.zeros.*missing"),
            (
                lambda t: t.update({"model.layers.1.self_attn.q_proj.zeros": torch.zeros(64, 2)}),
                "q_proj.zeros.*no place",
            ),
            (lambda t: t.update({"model.layers.0.mlp.down_proj.scales": torch.ones(64, 1)}), r"shape \[64, 1\]"),
            (lambda t: t.update({"model.layers.0.mlp.up_proj.input_scale": torch.ones(64)}), "input_scale.*no place"),
        ],
    )
    def test_wrong_tensors_leave_no_checkpoint(
        self, single: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], named: str
    ) -> None:
        tensors = self.tensors(single)
        change(tensors)
        with pytest.raises(CheckpointError, match=named):
            write_quantized(tmp_path / "q", open_checkpoint(single), tensors.items(), FORMATS)
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "q")

    def test_formats_of_another_version(self, single: Path, tmp_path: Path) -> None:
        write_quantized(tmp_path / "q", open_checkpoint(single), self.tensors(single).items(), FORMATS)
        (tmp_path / "q" / "sits_quant.json").write_text('{"schema_version": 99, "formats": {}}')
        with pytest.raises(CheckpointError, match="schema version 99"):
            open_checkpoint(tmp_path / "q")

    def test_version_1_files_are_read(self, single: Path, tmp_path: Path) -> None:
        write_quantized(tmp_path / "q", open_checkpoint(single), self.tensors(single).items(), FORMATS)
        path = tmp_path / "q" / "sits_quant.json"
        content = json.loads(path.read_text())
        assert content["schema_version"] == 2
        for form in content["formats"].values():
            del form["codes"], form["activations"]
        path.write_text(json.dumps(content | {"schema_version": 1}))
        assert open_checkpoint(tmp_path / "q").formats == FORMATS
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="other fields than activations, bits, codes"):
            open_checkpoint(tmp_path / "q")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"bits": 3}, "3-bit codes"),
            ({"codes": "float8_e5m2"}, "'float8_e5m2'"),
            ({"codes": "float8_e4m3"}, "8-bit floats"),
            ({"group_size": 0}, "groups of 0"),
            ({"activations": "int7"}, "'int7'"),
        ],
    )
    def test_formats_that_no_weight_has(
        self, single: Path, tmp_path: Path, change: dict[str, object], named: str
    ) -> None:
        write_quantized(tmp_path / "q", open_checkpoint(single), self.tensors(single).items(), FORMATS)
        path = tmp_path / "q" / "sits_quant.json"
        content = json.loads(path.read_text())
        content["formats"]["model.layers.0.mlp.down_proj"] |= change
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"gives 'model.layers.0.mlp.down_proj' .*{named}"):
            open_checkpoint(tmp_path / "q")
