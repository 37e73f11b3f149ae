"""The tensors of the Triton models: written once here, declared by the repository, read by the serving bodies.

Names, data types and dimensions are those of tensorrtllm_backend, so that its clients work unchanged. Dimensions
leave out the batch dimension, which every model has and which is always 1: one Triton request is one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PREPROCESSING = "preprocessing"
EXECUTOR = "tensorrt_llm"
POSTPROCESSING = "postprocessing"
ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"

ANY = "any"
"""`neutral` of an input whose value never changes an answer here."""


@dataclass(frozen=True)
class Tensor:
    """One input or output of a Triton model.

    `dtype` is the config's TYPE_ name without the prefix. A `scalar` is sent with dims [1] and arrives without
    them. `neutral` is None for an input that is obeyed; otherwise the input is declared for clients that send it
    and refused unless each of its values is one of these.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    neutral: tuple[float, ...] | str | None = None
    doc: str = ""


def _scalar(name: str, dtype: str, neutral: tuple[float, ...] | str | None = None, doc: str = "") -> Tensor:
    return Tensor(name, dtype, scalar=True, neutral=neutral, doc=doc)


FINISH_REASON = Tensor("finish_reason", "STRING", (-1,), doc="stop, length or cancelled on the last response, else ''")
OUTPUT_TEXT = Tensor("output_text", "STRING", (-1,), doc="text of this response, only ever whole characters")
STOP_WORDS = Tensor("stop_words", "STRING", (-1,), doc="texts that end the answer and are not part of it")
BAD_WORDS = Tensor("bad_words", "STRING", (-1,), doc="texts that the answer may not hold")
PRIORITY = Tensor("priority", "INT32", doc="greater is scheduled earlier among waiting requests; 0 where absent")
ADD_SPECIAL_TOKENS = Tensor("add_special_tokens", "BOOL", doc="false for a prompt that already starts with BOS")

TICKET = Tensor("ticket", "INT64", (2,), doc="of a streamed answer: with it postprocessing reports a caller that left")

PREPROCESSING_INPUTS = (
    Tensor("QUERY", "STRING", optional=False),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", optional=False),
    Tensor("BAD_WORDS_DICT", "STRING", (-1,)),
    Tensor("STOP_WORDS_DICT", "STRING", (-1,)),
    Tensor("END_ID", "INT32"),
    Tensor("PAD_ID", "INT32"),
    replace(ADD_SPECIAL_TOKENS, name="ADD_SPECIAL_TOKENS"),
)
PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("OUT_END_ID", "INT32"),
    Tensor("OUT_PAD_ID", "INT32"),
)

POSTPROCESSING_INPUTS = (
    Tensor("TOKENS_BATCH", "INT32", (-1, -1), optional=False),
    Tensor("SEQUENCE_LENGTH", "INT32", (-1,), optional=False),
    replace(OUTPUT_TEXT, name="OUTPUT_TEXT", doc="passed through as OUTPUT: exact also in mid-character"),
    replace(TICKET, name="TICKET"),
)
POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "STRING", (-1,)),)

EXECUTOR_INPUTS = (
    Tensor("input_ids", "INT32", (-1,)),
    replace(_scalar("input_lengths", "INT32"), optional=False),
    replace(_scalar("request_output_len", "INT32"), optional=False),
    _scalar("end_id", "INT32", doc="replaces the model's end tokens; -1 for none"),
    _scalar("pad_id", "INT32", ANY),
    Tensor("stop_words_list", "INT32", (2, -1), doc="row 0: token ids; row 1: end offsets, padded with -1"),
    Tensor("bad_words_list", "INT32", (2, -1), doc="as stop_words_list"),
    STOP_WORDS,
    BAD_WORDS,
    PRIORITY,
    _scalar("runtime_top_k", "INT32"),
    _scalar("runtime_top_p", "FP32"),
    _scalar("temperature", "FP32"),
    _scalar("min_tokens", "INT32"),
    _scalar("repetition_penalty", "FP32"),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("seed", "UINT64"),
    _scalar("return_log_probs", "BOOL"),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar("streaming", "BOOL"),
    _scalar("stop", "BOOL", doc="true cancels the running requests of the same, non-empty request id"),
    _scalar("beam_width", "INT32", (1,)),
    _scalar("num_return_sequences", "INT32", (1,)),
    _scalar("len_penalty", "FP32", ANY, "matters to beam search only"),
    _scalar("early_stopping", "BOOL", ANY, "matters to beam search only"),
    _scalar("beam_search_diversity_rate", "FP32", ANY, "matters to beam search only"),
    _scalar("runtime_top_p_decay", "FP32", (1.0,)),
    _scalar("runtime_top_p_min", "FP32", ANY, "matters to top_p_decay only"),
    _scalar("runtime_top_p_reset_ids", "INT32", ANY, "matters to top_p_decay only"),
    _scalar("return_context_logits", "BOOL", (False,)),
    _scalar("return_generation_logits", "BOOL", (False,)),
    Tensor("embedding_bias", "FP32", (-1,), neutral=(0.0,)),
    Tensor("draft_input_ids", "INT32", (-1,), neutral=()),
    _scalar("prompt_vocab_size", "INT32", (0,)),
    _scalar("lora_task_id", "UINT64", ()),
    Tensor("guided_decoding_guide_type", "STRING", neutral=()),
    Tensor("guided_decoding_guide", "STRING", neutral=()),
)
TIMING_OUTPUTS = tuple(
    Tensor(f"{what}_time_ns", "INT64") for what in ("arrival", "first_scheduled", "first_token", "last_token")
)
COUNT_OUTPUTS = (
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
)
LOGPROB_OUTPUTS = (Tensor("cum_log_probs", "FP32", (-1,)), Tensor("output_log_probs", "FP32", (-1, -1)))
DETAIL_OUTPUTS = LOGPROB_OUTPUTS + COUNT_OUTPUTS + TIMING_OUTPUTS
EXECUTOR_OUTPUTS = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    OUTPUT_TEXT,
    FINISH_REASON,
    TICKET,
    *DETAIL_OUTPUTS,
)

TEXT_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "add_special_tokens": "ADD_SPECIAL_TOKENS",
}
"""Inputs of the text models (ensemble and BLS) that go to preprocessing."""

PREPROCESSING_TO_EXECUTOR = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
"""Stop and bad words are left out: the executor takes them as text, which also finds a match across tokens."""

EXECUTOR_TO_POSTPROCESSING = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "output_text": "OUTPUT_TEXT",
    "ticket": "TICKET",
}

_RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
_SAME_NAME = (
    "stop_words",
    "bad_words",
    "priority",
    "temperature",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "return_log_probs",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "exclude_input_in_output",
    "beam_width",
    "num_return_sequences",
    "return_context_logits",
    "return_generation_logits",
    "prompt_vocab_size",
    "lora_task_id",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
)
TEXT_TO_EXECUTOR = _RENAMED | {name: name for name in _SAME_NAME}
"""Inputs of the text models that go to the executor model, under their names there."""


def _text_inputs() -> tuple[Tensor, ...]:
    declared = {t.name: t for t in PREPROCESSING_INPUTS + EXECUTOR_INPUTS}
    names = TEXT_TO_PREPROCESSING | {k: v for k, v in TEXT_TO_EXECUTOR.items() if k not in TEXT_TO_PREPROCESSING}
    return tuple(replace(declared[inner], name=outer, scalar=False) for outer, inner in names.items())


TEXT_INPUTS = _text_inputs()
"""Inputs of `ensemble` and `tensorrt_llm_bls`; only text_input and max_tokens are required."""

TEXT_OUTPUT = "text_output"
TEXT_OUTPUTS = (Tensor(TEXT_OUTPUT, "STRING", (-1,)), FINISH_REASON, *DETAIL_OUTPUTS)
