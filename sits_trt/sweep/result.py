"""What a sweep found, as plain data: the JSON report is this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sits_trt.sweep.metrics import LevelMetrics
from sits_trt.sweep.workload import Load

SCHEMA_VERSION = 1
"""Raised when a reader of the JSON report has to change."""


class Status(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class BuildInfo:
    """What a build is. `served_by` is the runner that answered on the measuring machine, which need not be the
    target, and why; `server` the server's version. `weights_bytes` is the size of the weight files that the
    build was made from, `fingerprint` that of its model repository, `recipe` all of it, empty where it is missing.
    `quantized` says whether this program quantized the weights, `source_quantized` whether they came so, which leaves
    no fp16 model to compare with; `kv_dtype` is the recipe's type of the KV cache.
    """

    name: str
    directory: str
    model: str
    target: str
    backend: str
    weights: str
    quantized: bool
    weights_bytes: int
    fingerprint: str
    checkpoint_fingerprint: str
    recipe: Mapping[str, Any]
    kv_dtype: str = "float16"
    served_by: str = ""
    server: str = ""
    source_quantized: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with this build: neither its weights nor its KV cache are quantized."""
        return not self.quantized and not self.source_quantized and self.kv_dtype == "float16"


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a build, KV cache included, against its fp16 model, on `tokens` predicted tokens of a text.

    `kl_divergence` is the mean of KL(fp16 || build) in nats a token; `top1_agreement` the share of tokens
    on whose most likely successor both agree, `top5_agreement` the mean share of fp16's five most likely ones among
    the build's five; `exact_prompts` of `prompts` greedy answers of
    `answer_tokens` tokens are equal, and `exact_tokens` is the mean number of tokens before the first
    difference. An fp16 build is compared with nothing: only `perplexity` and `tokens` are set, the others None.
    `seconds` is how long measuring took, None where the figures come from another build's measurement.
    """

    perplexity: float
    tokens: int
    reference_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    prompts: int | None = None
    answer_tokens: int | None = None
    exact_prompts: int | None = None
    exact_tokens: float | None = None
    top5_agreement: float | None = None
    seconds: float | None = None

    @property
    def perplexity_increase(self) -> float:
        """Relative to fp16: 0.03 is 3 % more; 0 for the fp16 build itself."""
        return 0.0 if self.reference_perplexity is None else self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class LevelResult:
    """One level of load on one build. `client_cpu` and `late_ms` are those of `load.LevelTraces`.

    `measured` is when it ended (ISO 8601). `requests` holds each request in the order of the prompts:
    start after the level's first, TTFT and end-to-end in milliseconds, tokens, and error.
    """

    load: Load
    metrics: LevelMetrics
    client_cpu: float
    late_ms: float
    measured: str
    requests: list[dict[str, Any]]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LevelResult:
        return cls(**{**data, "load": Load(**data["load"]), "metrics": LevelMetrics.from_dict(data["metrics"])})


@dataclass(frozen=True)
class BuildResult:
    """One build's part of the sweep. Where `status` is not 'complete', `reason` says why in a sentence."""

    info: BuildInfo
    status: Status
    reason: str = ""
    accuracy: Accuracy | None = None
    levels: list[LevelResult] = field(default_factory=list)

    def level(self, key: str) -> LevelMetrics | None:
        return next((level.metrics for level in self.levels if level.load.key == key), None)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuildResult:
        return cls(
            info=BuildInfo(**data["info"]),
            status=Status(data["status"]),
            reason=data["reason"],
            accuracy=Accuracy(**data["accuracy"]) if data["accuracy"] else None,
            levels=[LevelResult.from_dict(level) for level in data["levels"]],
        )


@dataclass(frozen=True)
class SweepResult:
    """All of a sweep. `settings` is the recipe's sweep section, `machine` where it was measured."""

    created: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    builds: list[BuildResult]
    schema_version: int = SCHEMA_VERSION

    def loads(self) -> list[Load]:
        """The levels that were asked for, closed loops first."""
        closed = [Load(concurrency=count) for count in self.settings["concurrencies"]]
        cv = self.settings["arrival_cv"]
        return closed + [Load(requests_per_s=rate, arrival_cv=cv) for rate in self.settings["request_rates"]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepResult:
        return cls(**{**data, "builds": [BuildResult.from_dict(build) for build in data["builds"]]})
