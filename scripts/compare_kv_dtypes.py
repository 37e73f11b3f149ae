"""Measures what the type of the KV cache costs in accuracy: one Markdown row per type.

    python scripts/compare_kv_dtypes.py [SOURCE] [--weights DIRECTORY] ...

SOURCE is a checkpoint as in a recipe; --weights is a quantized one of the same model, such as a build's 'quantized'
folder, for rows that hold both errors. Everything is computed in float32 on the CPU, with keys and values of the
tokens before going through a pool of the row's type; the reference is the float model with a float32 pool.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.models import build_oracle
from sits_trt.models.kv_scoring import KvScores, score_kv_dtypes
from sits_trt.spec import CODED_KV_DTYPES, TileSpec

HEADER = "| KV cache | perplexity | change | KL | top-1 | top-5 | EM@{n} | same prefix | bytes a token |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="smollm2-135m-instruct", help="checkpoint, as in a recipe")
    parser.add_argument("--weights", type=Path, help="quantized checkpoint of the same model")
    parser.add_argument("--text", default="pydoc", help="evaluation text, as in a recipe")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of --block-tokens tokens")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8, help="first 64 tokens of as many blocks")
    parser.add_argument("--answer-tokens", type=int, default=128)
    return parser.parse_args()


def report_progress(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what}\033[K", end="", file=sys.stderr)


def row(scores: KvScores, token_bytes: float) -> str:
    found, match = scores.agreement, scores.match
    return (
        f"| {scores.kv_dtype} | {found.perplexity:.3f} | {found.perplexity / found.reference_perplexity - 1:+.2%} | "
        f"{found.kl:.5f} | {found.top1:.4f} | {found.top5:.4f} | {match.exact_match:.2f} | "
        f"{match.matched_prefix:.2f} | {token_bytes:.0f} |"
    )


def measure(arguments: argparse.Namespace, source: Path) -> Iterator[str]:
    materialize(arguments.source, source, "float16", report_progress)
    reference = build_oracle(open_checkpoint(source))
    candidate = build_oracle(open_checkpoint(arguments.weights)) if arguments.weights else reference
    tokenizer = load_tokenizer(source)
    blocks = read_blocks(arguments.text, tokenizer, arguments.blocks, arguments.block_tokens, "evaluation")
    prompts = [block[:64] for block in blocks[: arguments.prompts]]
    kv_dtypes = ("float16", *CODED_KV_DTYPES)
    found = score_kv_dtypes(
        reference, candidate, kv_dtypes, blocks, prompts, arguments.answer_tokens, report_progress
    )  # fmt: skip
    yield HEADER.format(n=arguments.answer_tokens)
    yield "|---|---|---|---|---|---|---|---|---|"
    for scores in found:
        tile = TileSpec.of(reference.spec, kv_dtype=scores.kv_dtype)
        yield row(scores, tile.tile_bytes / tile.tile_tokens)


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        for line in measure(parse_arguments(), Path(work) / "checkpoint"):
            print(line, flush=True)


if __name__ == "__main__":
    main()
