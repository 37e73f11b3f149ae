"""GGUF files: the header, q and k row order, quantized types, the config, and the tokenizer tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.config import parse_config
from sits_trt.checkpoint.gguf_file import GgufFile
from sits_trt.errors import CheckpointError
from sits_trt.ops.rope import inverse_frequencies
from sits_trt.spec import ModelSpec, RopeSpec
from tests.support.tiny import tiny_config, tiny_tensors

TO_GGUF = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.", "blk."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)
HF = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def to_pair_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters to GGUF do to q and k of Llama: row j of a head goes to 2j, row j + d/2 to 2j + 1."""
    out, dim = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for row in range(dim):
            place = 2 * row if row < dim // 2 else 2 * (row - dim // 2) + 1
            out[head * dim + place] = rows[head * dim + row]
    return out


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> ModelSpec:
    """Write a tiny model as GGUF, `kinds` giving types of tensors whose name has a certain ending; return its spec."""
    spec = parse_config(tiny_config(HF[architecture], **config))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(spec.max_positions)
    writer.add_block_count(spec.num_layers)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    arrays = {name: tensor.numpy() for name, tensor in tiny_tensors(spec).items()} | dict(tensors or {})
    for name, array in arrays.items():
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            array = to_pair_order(array, spec.num_heads if ".q_proj." in name else spec.num_kv_heads)
        stored = name
        for pattern, replacement in TO_GGUF:
            stored = re.sub(pattern, replacement, stored)
        kind = next((k for ending, k in (kinds or {}).items() if name.endswith(ending)), None)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return spec


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_tensors_and_spec_come_back(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    spec = write_gguf(tmp_path / "m.gguf", architecture, **config)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    # GGUF keeps these two as float32.
    plain = {**spec.to_dict(), "norm_eps": np.float32(spec.norm_eps).item(), "bos_token_id": 1}
    assert checkpoint.spec.to_dict() == plain
    expected = tiny_tensors(spec)
    assert set(checkpoint) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint[name], tensor), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_stored_types_become_what_the_format_says(kind: str, tmp_path: Path) -> None:
    ggml = gguf.GGMLQuantizationType[kind]
    spec = write_gguf(tmp_path / "m.gguf", kinds={"up_proj.weight": ggml, "q_proj.weight": ggml})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        original = tiny_tensors(spec)[name].numpy()
        # Rows are quantized on their own, so their order does not matter to the values.
        rounded = gguf.quants.dequantize(gguf.quants.quantize(original, ggml), ggml)
        assert np.array_equal(checkpoint[name].numpy(), rounded)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_types_with_long_blocks(kind: str, tmp_path: Path) -> None:
    ggml = gguf.GGMLQuantizationType[kind]
    # Bytes of small positive halves wherever the block keeps its scales: any bytes are valid codes.
    width = gguf.quant_shape_to_byte_shape((256,), ggml)[0]
    data = np.random.default_rng(1).integers(0, 0x20, (6, width), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("weight", data, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert file.tensors["weight"].shape == (6, 256)
    assert np.array_equal(file.read("weight"), gguf.quants.dequantize(data, ggml))
    assert file.read("first").tolist() == [1, 1, 1]


def test_materialized_gguf_is_a_plain_directory(tmp_path: Path) -> None:
    spec = write_gguf(tmp_path / "m.gguf", extra=byte_tables("gpt-2"), vocab_size=260, tie_word_embeddings=True)
    materialize(tmp_path / "m.gguf", tmp_path / "out", "float16")
    back = open_checkpoint(tmp_path / "out")
    assert back.spec.to_dict() == open_checkpoint(tmp_path / "m.gguf").spec.to_dict()
    for name, tensor in tiny_tensors(spec).items():
        assert torch.equal(back[name], tensor.half())


class TestMetadata:
    @pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
    def test_llama3_scaling_is_found_in_its_divisors(self, factor: float, original: int, tmp_path: Path) -> None:
        rope = RopeSpec("llama3", 5e5, factor, 1.0, 4.0, original)
        plain = inverse_frequencies(RopeSpec(theta=5e5), 16)
        divisors = (plain / inverse_frequencies(rope, 16)).numpy()
        write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors}, rope_theta=5e5)
        found = open_checkpoint(tmp_path / "m.gguf").spec.rope
        assert torch.allclose(inverse_frequencies(found, 16), inverse_frequencies(rope, 16), rtol=1e-5)
        assert (found.kind, found.original_max_position) == ("llama3", original)

    def test_divisors_of_another_kind_are_refused(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})
        with pytest.raises(CheckpointError, match="rope_freqs"):
            open_checkpoint(tmp_path / "m.gguf")

    def test_linear_rope_scaling(self, tmp_path: Path) -> None:
        scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        write_gguf(tmp_path / "m.gguf", extra=scaling)
        assert open_checkpoint(tmp_path / "m.gguf").spec.rope == RopeSpec("linear", 10000.0, 4.0)

    @pytest.mark.parametrize(
        ("extra", "named"),
        [
            ({"llama.rope.scaling.type": "su"}, "'su'"),
            ({"llama.expert_count": 8}, "llama.expert_count"),
            ({"llama.attention.sliding_window": 512}, "sliding_window"),
            ({"llama.rope.dimension_count": 8}, "part of each head"),
        ],
    )
    def test_what_is_not_understood_is_refused(self, extra: dict[str, Any], named: str, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", extra=extra)
        with pytest.raises(CheckpointError, match=named):
            open_checkpoint(tmp_path / "m.gguf")

    def test_the_end_of_a_turn_ends_an_answer(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.eot_token_id": 7})
        assert open_checkpoint(tmp_path / "m.gguf").spec.eos_token_ids == (0, 7)
        write_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.eot_token_id": 0})
        assert open_checkpoint(tmp_path / "m.gguf").spec.eos_token_ids == (0,)

    def test_unknown_tensor_is_refused(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
        with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight"):
            open_checkpoint(tmp_path / "m.gguf")

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        gguf_path = tmp_path / "m.gguf"
        write_gguf(gguf_path)
        gguf_path.write_bytes(gguf_path.read_bytes().replace(b"llama", b"bloom"))
        with pytest.raises(CheckpointError, match="'bloom'"):
            open_checkpoint(gguf_path)

    @pytest.mark.parametrize("keep", [0, 3, 20, 100, 700, -1000])
    def test_a_file_cut_short(self, keep: int, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(path)


def byte_tables(pre: str, **extra: Any) -> dict[str, Any]:
    """Return the tokenizer tables of a byte-level BPE with three merges and two control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet())]
    tokens[-1:] = [tokens[-1], "Ġ1", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["Ġ 1", "1 2"],
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        **extra,
    }


class TestTokenizer:
    TEXT = "a 12 123 don't\n\n é🔥</s>x"

    @pytest.mark.parametrize(
        ("pre", "pieces"),
        [
            ("gpt-2", ["Ġ1", "2", "Ġ1", "2", "3"]),
            ("smollm", ["Ġ", "1", "2", "Ġ", "1", "2", "3"]),
            ("llama-bpe", ["Ġ", "12", "Ġ", "12", "3"]),
            ("qwen2", ["Ġ", "1", "2", "Ġ", "1", "2", "3"]),
        ],
    )
    def test_text_is_cut_as_the_name_says(self, pre: str, pieces: list[str], tmp_path: Path) -> None:
        tables = byte_tables(pre)
        write_gguf(tmp_path / "m.gguf", extra=tables, vocab_size=260)
        open_checkpoint(tmp_path / "m.gguf").save_tokenizer(tmp_path / "out")
        tokenizer = load_tokenizer(tmp_path / "out")
        ids = tokenizer.encode(self.TEXT)
        tokens = [tables["tokenizer.ggml.tokens"][i] for i in ids]
        assert tokens[1 : 1 + len(pieces)] == pieces
        assert tokens[-2:] == ["</s>", "x"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == self.TEXT
        assert tokenizer.decode(ids) == self.TEXT.replace("</s>", "")
        assert tokenizer.eos_token_ids == (0,)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == "hello"

    def test_first_token(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", extra=byte_tables("gpt-2", **{"tokenizer.ggml.add_bos_token": True}),
                   vocab_size=260)  # fmt: skip
        open_checkpoint(tmp_path / "m.gguf").save_tokenizer(tmp_path / "out")
        tokenizer = load_tokenizer(tmp_path / "out")
        assert tokenizer.encode("x")[0] == 1
        assert 1 not in tokenizer.encode("x", add_special_tokens=False)

    def test_a_file_without_one(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf")
        with pytest.raises(CheckpointError, match="no tokenizer"):
            open_checkpoint(tmp_path / "m.gguf").save_tokenizer(tmp_path / "out")
