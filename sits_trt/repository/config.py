"""A Triton model configuration as plain data, and the five of the repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sits_trt import wire
from sits_trt.recipe.schema import KvCacheSection, ServingSection
from sits_trt.wire import Tensor


@dataclass(frozen=True)
class EnsembleStep:
    """One model of an ensemble. Maps go from the model's tensor names to names in the ensemble."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ModelConfig:
    """What one config.pbtxt says. A model without steps runs in Triton's Python backend.

    None has dynamic batching: requests are batched in flight, the executor's own queue holds those that wait, and
    the batcher of Triton Server 2.51 now and then misses a request until it looks again after half a second.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    decoupled: bool = False
    instances: int = 1
    steps: tuple[EnsembleStep, ...] = ()


@dataclass(frozen=True)
class RepositoryPaths:
    """Where the models find what they serve, relative to the repository's own directory."""

    engine: str
    tokenizer: str


def model_configs(
    paths: RepositoryPaths, serving: ServingSection, kv_cache: KvCacheSection
) -> tuple[ModelConfig, ...]:  # fmt: skip
    """Return the five models in the order in which a request meets them."""
    return (
        _preprocessing(paths, serving),
        _executor(paths, serving, kv_cache),
        _postprocessing(paths, serving),
        _ensemble(),
        _bls(paths, serving),
    )


def _preprocessing(paths: RepositoryPaths, serving: ServingSection) -> ModelConfig:
    return ModelConfig(
        wire.PREPROCESSING,
        wire.PREPROCESSING_INPUTS,
        wire.PREPROCESSING_OUTPUTS,
        _preprocessor(paths),
        instances=serving.preprocessing_instances,
    )


def _preprocessor(paths: RepositoryPaths) -> dict[str, str]:
    return {"tokenizer_dir": paths.tokenizer, "add_special_tokens": "true", "gpt_model_path": paths.engine}


def _executor(paths: RepositoryPaths, serving: ServingSection, kv_cache: KvCacheSection) -> ModelConfig:
    parameters = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": paths.engine,
        "runner": "auto",
        "max_num_sequences": str(serving.max_batch_size),
        "max_queue_size": str(serving.max_queue_size),
        "queue_timeout_ms": str(serving.queue_timeout_ms),
        "kv_cache_free_gpu_mem_fraction": str(kv_cache.memory_fraction),
        "exclude_input_in_output": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "200",
    }
    if kv_cache.max_tiles is not None:
        parameters["max_tiles"] = str(kv_cache.max_tiles)
    return ModelConfig(
        wire.EXECUTOR,
        wire.EXECUTOR_INPUTS,
        wire.EXECUTOR_OUTPUTS,
        parameters,
        decoupled=True,
    )


def _postprocessing(paths: RepositoryPaths, serving: ServingSection) -> ModelConfig:
    return ModelConfig(
        wire.POSTPROCESSING,
        wire.POSTPROCESSING_INPUTS,
        wire.POSTPROCESSING_OUTPUTS,
        {"tokenizer_dir": paths.tokenizer, "skip_special_tokens": "true"},
        instances=serving.postprocessing_instances,
    )


def _ensemble() -> ModelConfig:
    between = {inner: f"_{inner}" for inner in wire.PREPROCESSING_TO_EXECUTOR}
    steps = (
        EnsembleStep(
            wire.PREPROCESSING,
            {inner: outer for outer, inner in wire.TEXT_TO_PREPROCESSING.items()},
            between,
        ),
        EnsembleStep(
            wire.EXECUTOR,
            {inner: between[outer] for outer, inner in wire.PREPROCESSING_TO_EXECUTOR.items()}
            | {inner: outer for outer, inner in wire.TEXT_TO_EXECUTOR.items()},
            {name: f"_{name}" for name in wire.EXECUTOR_TO_POSTPROCESSING}
            | {t.name: t.name for t in wire.TEXT_OUTPUTS if t.name != wire.TEXT_OUTPUT},
        ),
        EnsembleStep(
            wire.POSTPROCESSING,
            {inner: f"_{outer}" for outer, inner in wire.EXECUTOR_TO_POSTPROCESSING.items()},
            {"OUTPUT": wire.TEXT_OUTPUT},
        ),
    )
    return ModelConfig(wire.ENSEMBLE, wire.TEXT_INPUTS, wire.TEXT_OUTPUTS, steps=steps)


def _bls(paths: RepositoryPaths, serving: ServingSection) -> ModelConfig:
    return ModelConfig(
        wire.BLS,
        wire.TEXT_INPUTS,
        wire.TEXT_OUTPUTS,
        _preprocessor(paths),
        decoupled=True,
        instances=serving.bls_instances,
    )
