"""Measures what each part of the quantization is worth: one Markdown row per recipe, from round-to-nearest up.

    python scripts/ablate_quantization.py [SOURCE] [--symmetric] [--text FILE] ...

Every row is quantized by `sits_trt.quant` as a build would, on the calibration part of the text, and compared with
the float model on the evaluation part. Seconds are those of the search alone, on this machine as busy as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sits_trt.checkpoint import Checkpoint, load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.scoring import Agreement, ExactMatch, compare, exact_match
from sits_trt.quant import apply_scales, search_scales
from sits_trt.recipe.schema import CalibrationSection, QuantizationSection

STEPS = {
    "round to nearest": {"method": "rtn", "clip": False, "compensation": False, "scale_recover": False},
    "AWQ": {"clip": False, "compensation": False, "scale_recover": False},
    "+ clip": {"compensation": False, "scale_recover": False},
    "+ compensation": {"scale_recover": False},
    "+ ScaleRecover": {},
}
HEADER = "| recipe | perplexity | KL | top-1 | top-5 | EM@{n} | same prefix | seconds | bits/weight |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="smollm2-135m-instruct", help="checkpoint, as in a recipe")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS), help="rows to measure")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--text", default="pydoc", help="calibration and evaluation text, as in a recipe")
    parser.add_argument("--evaluation-text", help="another text for the evaluation")
    parser.add_argument("--calibration-blocks", type=int, default=32)
    parser.add_argument("--evaluation-blocks", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8, help="first 64 tokens of as many evaluation blocks")
    parser.add_argument("--answer-tokens", type=int, default=128)
    return parser.parse_args()


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    decoder = build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, torch.float32)
    decoder.dequantize_(torch.float32)
    return decoder


def report_progress(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what}\033[K", end="", file=sys.stderr)


def row(name: str, scores: Agreement, match: ExactMatch, seconds: float, bits: float) -> str:
    return (
        f"| {name} | {scores.perplexity:.2f} | {scores.kl:.4f} | {scores.top1:.3f} | {scores.top5:.3f} | "
        f"{match.exact_match:.2f} | {match.matched_prefix:.2f} | {seconds:.0f} | {bits:.2f} |"
    )


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    materialize(arguments.source, work / "checkpoint", "float16", report_progress)
    checkpoint = open_checkpoint(work / "checkpoint")
    text = arguments.evaluation_text or arguments.text
    blocks = read_blocks(
        text, load_tokenizer(checkpoint.directory), arguments.evaluation_blocks, 512, "evaluation"
    )  # fmt: skip
    prompts = [block[:64] for block in blocks[: arguments.prompts]]
    reference = decoder_of(checkpoint)
    yield HEADER.format(n=arguments.answer_tokens)
    yield "|---|---|---|---|---|---|---|---|---|"
    for number, name in enumerate(arguments.only):
        section = QuantizationSection(
            group_size=arguments.group_size,
            symmetric=arguments.symmetric,
            calibration=CalibrationSection(source=arguments.text, blocks=arguments.calibration_blocks),
            **STEPS[name],
        )
        began = time.monotonic()
        search_scales(checkpoint, section, work / f"scales-{number}", report_progress)
        seconds = time.monotonic() - began
        details = apply_scales(checkpoint, work / f"scales-{number}", section, work / f"{number}", report_progress)
        candidate = decoder_of(open_checkpoint(work / f"{number}"))
        scores = compare(reference, candidate, blocks, report_progress)
        match = exact_match(reference, candidate, prompts, arguments.answer_tokens, report_progress)
        if number == 0:
            yield f"| float16 | {scores.reference_perplexity:.2f} | 0 | 1 | 1 | 1 | 1 | | 16 |"
        yield row(name, scores, match, seconds, details["bits_per_weight"])


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as work:
        for line in measure(arguments, Path(work)):
            print(f"\r\033[K{line}" if sys.stdout.isatty() else line, flush=True)


if __name__ == "__main__":
    main()
