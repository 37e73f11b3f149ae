"""What the type of the KV cache costs: one model with pools of several types beside the same model with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sits_trt.models.decoder import Decoder
from sits_trt.models.scoring import (
    Agreement,
    AgreementSums,
    ExactMatch,
    block_logits,
    check_blocks,
    greedy_tokens,
    match_answers,
)
from sits_trt.progress import Progress


@dataclass(frozen=True)
class KvScores:
    """A decoder over a pool of type `kv_dtype` (as in TileSpec) beside itself over a pool that rounds nothing."""

    kv_dtype: str
    agreement: Agreement
    match: ExactMatch


def score_kv_dtypes(
    reference: Decoder,
    candidate: Decoder,
    kv_dtypes: Sequence[str],
    blocks: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    progress: Progress,
) -> list[KvScores]:
    """Return the scores of `candidate` with a pool of each type, against `reference` with a pool of its own type.

    The same as `scoring.compare` and `scoring.exact_match` for each type, but the reference runs once. `blocks` are
    token ids that are scored, `prompts` those that are answered with `answer_tokens` tokens. Raises CheckpointError
    when no block has two tokens.
    """
    check_blocks(blocks)
    total = len(blocks) + len(kv_dtypes) + 1
    sums = {kv_dtype: AgreementSums() for kv_dtype in kv_dtypes}
    for done, block in enumerate(blocks):
        progress(done, total, "score blocks")
        theirs = block_logits(reference, block)
        for kv_dtype, found in sums.items():
            found.add_block(theirs, block_logits(candidate, block, kv_dtype), block)
    progress(len(blocks), total, "answers of the reference")
    answers = greedy_tokens(reference, prompts, answer_tokens)
    scores = []
    for done, (kv_dtype, found) in enumerate(sums.items(), len(blocks) + 1):
        progress(done, total, f"answers with {kv_dtype}")
        ours = greedy_tokens(candidate, prompts, answer_tokens, kv_dtype=kv_dtype)
        scores.append(KvScores(kv_dtype, found.agreement(candidate.spec.vocab_size), match_answers(answers, ours)))
    progress(total, total, "scored")
    return scores
