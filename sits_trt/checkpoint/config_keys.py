"""Config keys that cannot change what a model computes, and the rule for keys that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sits_trt.errors import CheckpointError

_BOOKKEEPING = frozenset({
    "architectures", "model_type", "auto_map", "name_or_path", "transformers_version", "transformers.js_config",
    "torch_dtype", "dtype", "use_bfloat16", "torchscript", "tokenizer_class", "prefix", "finetuning_task",
    "task_specific_params", "problem_type", "num_labels", "id2label", "label2id", "unsloth_version", "unsloth_fixed",
    "is_llama_config", "attn_implementation", "license", "language", "return_dict", "use_return_dict",
    "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate", "use_cache",
    "cache_implementation", "tf_legacy_loss", "chunk_size_feed_forward", "pretraining_tp", "sep_token_id",
    "unk_token_id", "mask_token_id", "cls_token_id",
    "decoder_start_token_id", "remove_invalid_values", "model_max_length", "max_sequence_length",
    "max_seq_len", "max_seq_length", "seq_length", "bos_token", "eos_token", "pad_token",
    "model_parallel", "use_flash_attn",
})  # fmt: skip

_TRAINING = frozenset({
    "initializer_range", "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "embd_pdrop", "resid_pdrop", "gradient_checkpointing", "router_aux_loss_coef", "output_router_logits",
    "neftune_noise_alpha",
})  # fmt: skip

_GENERATION = frozenset({
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip

_NEUTRAL: Mapping[str, Any] = {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "logit_scale": 1,
    "residual_multiplier": 1,
    "embedding_multiplier": 1,
}
"""Keys that would change the result with any other value than this."""

IRRELEVANT = _BOOKKEEPING | _TRAINING | _GENERATION


def refuse_unknown(config: Mapping[str, Any], known: frozenset[str], architecture: str) -> None:
    """Raise CheckpointError for a key that is neither known nor irrelevant and is switched on.

    A key is off when its value is null, false or empty; those, and keys that start with an underscore (the
    writer's own), are passed over. Everything else may change the result, so it is refused by name.
    """
    for key, value in config.items():
        if key in known or key in IRRELEVANT or key.startswith("_") or value is None or value is False:
            continue
        if (isinstance(value, (str, list, dict)) and not value) or value == _NEUTRAL.get(key):
            continue
        raise CheckpointError(
            f"config key '{key}' = {value!r} is not supported for {architecture} and may change the result; "
            "remove it from config.json if you know that it does not"
        )
