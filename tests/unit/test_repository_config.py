"""Model configurations: complete, consistent, and the same after a trip through the server's protobuf."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from sits_trt import wire
from sits_trt.errors import SitsError
from sits_trt.recipe.schema import KvCacheSection, ServingSection
from sits_trt.repository.config import ModelConfig, RepositoryPaths, model_configs
from sits_trt.repository.pbtxt import parse, to_message, to_text

PATHS = RepositoryPaths(engine="../engine", tokenizer="../quantized")


def configs(serving: ServingSection | None = None, kv_cache: KvCacheSection | None = None) -> dict[str, ModelConfig]:
    made = model_configs(PATHS, serving or ServingSection(), kv_cache or KvCacheSection())
    return {config.name: config for config in made}


def test_the_five_models_are_those_of_tensorrtllm_backend() -> None:
    assert list(configs()) == ["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"]


@pytest.mark.parametrize("name", configs())
def test_b27_every_file_parses_back_equal_and_has_no_placeholder(name: str) -> None:
    serving = ServingSection(max_queue_size=3, queue_timeout_ms=250, bls_instances=2)
    config = configs(serving, KvCacheSection(max_tiles=77))[name]
    text = to_text(config)
    assert "$" not in text
    assert text_format.Parse(text, model_config_pb2.ModelConfig()) == to_message(config)


def test_text_with_special_characters_survives_folding() -> None:
    paths = RepositoryPaths(engine='a "quoted"\nfolder { here', tokenizer="größe/\\x")
    for config in model_configs(paths, ServingSection(), KvCacheSection()):
        assert text_format.Parse(to_text(config), model_config_pb2.ModelConfig()) == to_message(config)


def test_b27_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    with pytest.raises(SitsError, match=r"config\.pbtxt is missing"):
        parse(path)
    path.write_text("name: ${name}\n")
    with pytest.raises(SitsError, match=r"config\.pbtxt is no Triton model configuration \(1:7"):
        parse(path)


def test_queue_limits_and_timeouts_are_the_executors_own() -> None:
    made = configs(ServingSection(max_queue_size=5, queue_timeout_ms=1500))
    assert made["tensorrt_llm"].parameters["max_queue_size"] == "5"
    assert made["tensorrt_llm"].parameters["queue_timeout_ms"] == "1500"
    assert not any(to_message(config).HasField("dynamic_batching") for config in made.values())


def test_instances_pool_and_batch_follow_the_recipe() -> None:
    serving = ServingSection(
        max_batch_size=7, bls_instances=2, preprocessing_instances=3, postprocessing_instances=4
    )  # fmt: skip
    made = configs(serving, KvCacheSection(memory_fraction=0.25, max_tiles=99))
    counts = {name: to_message(config).instance_group[0].count for name, config in made.items() if not config.steps}
    assert counts == {"preprocessing": 3, "tensorrt_llm": 1, "postprocessing": 4, "tensorrt_llm_bls": 2}
    parameters = made["tensorrt_llm"].parameters
    assert parameters["max_num_sequences"] == "7"
    assert parameters["max_tiles"] == "99"
    assert parameters["kv_cache_free_gpu_mem_fraction"] == "0.25"
    assert "max_tiles" not in configs()["tensorrt_llm"].parameters


@pytest.mark.parametrize(
    ("model", "name", "dtype", "dims", "scalar"),
    [
        ("preprocessing", "QUERY", "STRING", (1,), False),
        ("preprocessing", "STOP_WORDS_DICT", "STRING", (-1,), False),
        ("tensorrt_llm", "input_ids", "INT32", (-1,), False),
        ("tensorrt_llm", "input_lengths", "INT32", (1,), True),
        ("tensorrt_llm", "stop_words_list", "INT32", (2, -1), False),
        ("tensorrt_llm", "runtime_top_p", "FP32", (1,), True),
        ("tensorrt_llm", "seed", "UINT64", (1,), True),
        ("tensorrt_llm", "streaming", "BOOL", (1,), True),
        ("postprocessing", "TOKENS_BATCH", "INT32", (-1, -1), False),
        ("ensemble", "text_input", "STRING", (1,), False),
        ("ensemble", "max_tokens", "INT32", (1,), False),
        ("tensorrt_llm_bls", "temperature", "FP32", (1,), False),
    ],
)
def test_inputs_are_those_that_clients_of_tensorrtllm_backend_send(
    model: str, name: str, dtype: str, dims: tuple[int, ...], scalar: bool
) -> None:
    tensor = next(t for t in configs()[model].inputs if t.name == name)
    assert (tensor.dtype, tensor.dims, tensor.scalar) == (dtype, dims, scalar)


def test_only_what_upstream_requires_is_required() -> None:
    required = {n: [t.name for t in c.inputs if not t.optional] for n, c in configs().items()}
    assert required == {
        "preprocessing": ["QUERY", "REQUEST_OUTPUT_LEN"],
        "tensorrt_llm": ["input_lengths", "request_output_len"],
        "postprocessing": ["TOKENS_BATCH", "SEQUENCE_LENGTH"],
        "ensemble": ["text_input", "max_tokens"],
        "tensorrt_llm_bls": ["text_input", "max_tokens"],
    }


def test_the_ensemble_connects_tensors_of_equal_type_and_loses_none() -> None:
    made = configs()
    ensemble = made["ensemble"]
    types = {t.name: (t.dtype, t.dims) for t in ensemble.inputs}
    used = set()
    for step in ensemble.steps:
        model = made[step.model]
        inputs = {t.name: t for t in model.inputs}
        outputs = {t.name: t for t in model.outputs}
        for inner, outer in step.inputs.items():
            dtype, dims = types[outer]
            wanted = inputs[inner]
            assert dtype == wanted.dtype, (step.model, inner)
            assert len(dims) == len(wanted.dims), (step.model, inner)
            assert all(a == b or -1 in (a, b) for a, b in zip(dims, wanted.dims, strict=True)), (step.model, inner)
            used.add(outer)
        assert {t.name for t in model.inputs if not t.optional} <= set(step.inputs)
        types |= {outer: (outputs[inner].dtype, outputs[inner].dims) for inner, outer in step.outputs.items()}
    assert {t.name for t in ensemble.inputs} <= used
    assert {t.name: (t.dtype, t.dims) for t in ensemble.outputs}.items() <= types.items()
    assert all(name in used for name in types if name.startswith("_"))


@pytest.mark.parametrize("name", configs())
def test_tensor_names_are_unique(name: str) -> None:
    config = configs()[name]
    for tensors in (config.inputs, config.outputs):
        names = [t.name for t in tensors]
        assert len(names) == len(set(names))


def test_required_inputs_are_never_refused() -> None:
    for tensor in (*wire.EXECUTOR_INPUTS, *wire.PREPROCESSING_INPUTS, *wire.TEXT_INPUTS):
        assert tensor.optional or tensor.neutral is None
