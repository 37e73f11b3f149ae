"""Compares the quantization schemes on one model: a Markdown table of accuracy, bits and seconds.

    python scripts/compare_schemes.py [SOURCE] [--bits 4.75 5 ...] [--text FILE] ...

Every row is quantized by `sits_trt.quant` as a build would, on the calibration part of the text, and run by the eager
decoder on the evaluation part. W4A4 is a simulation, which no recipe builds: the weights of W4A16, and activations
rounded to INT4 with one scale per token and group. More than one `--group-size` adds rows of W4A16, `--bits` rows of
W4A16 with a bit budget. Seconds are CPU seconds of the search alone. The float model's logits of the whole evaluation
text are kept in memory: 100 MB a block of 512 tokens at a vocabulary of 49152.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint, write_quantized
from sits_trt.checkpoint.texts import read_blocks
from sits_trt.console import show_error, stage_progress
from sits_trt.errors import SitsError
from sits_trt.models import Decoder, build_oracle
from sits_trt.models.scoring import AgreementSums, block_logits
from sits_trt.quant import search_scales
from sits_trt.quant.apply import quantized_tensors, storage_costs
from sits_trt.quant.bit_budget import read_formats
from sits_trt.recipe.schema import CalibrationSection, QuantizationSection

SCHEMES = ("W4A16", "W8A16", "W4A8", "W8A8-FP8")
CONSOLE = Console(stderr=True, highlight=False)
HEADER = "| scheme | perplexity | KL | top-1 | bits/weight | CPU seconds |\n|---|---|---|---|---|---|"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="smollm2-135m-instruct", help="checkpoint, as in a recipe")
    parser.add_argument("--only", nargs="*", choices=SCHEMES, default=SCHEMES, help="schemes to measure")
    parser.add_argument(
        "--group-size", nargs="+", type=int, choices=(32, 64, 128), default=[64], help="of INT4 weights"
    )
    parser.add_argument("--bits", nargs="*", type=float, default=[], help="bit budgets to measure, too")
    parser.add_argument("--text", default="pydoc", help="calibration and evaluation text, as in a recipe")
    parser.add_argument("--calibration-blocks", type=int, default=8)
    parser.add_argument("--evaluation-blocks", type=int, default=12)
    return parser.parse_args()


def wanted_rows(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what each row says of quantization, by its name."""
    sizes, rows = arguments.group_size, {}
    if "W4A16" in arguments.only:
        rows |= {f"W4A16 g{size}": {"group_size": size} for size in sizes}
    if "W8A16" in arguments.only:
        rows["W8A16"] = {"scheme": "w8a16", "group_size": -1, "symmetric": True}
    if "W4A8" in arguments.only:
        rows[f"W4A8 g{sizes[0]}"] = {"scheme": "w4a8", "group_size": sizes[0]}
    if "W8A8-FP8" in arguments.only:
        rows["W8A8-FP8"] = {"scheme": "w8a8-fp8"}
    return rows | {f"W4A16, budget {bits:g}": {"bits_per_weight": bits} for bits in arguments.bits}


class Comparison:
    """The float model's logits on the evaluation text, and what candidates are beside them."""

    def __init__(self, source: str, text: str, blocks: int, work: Path) -> None:
        with stage_progress(CONSOLE, "checkpoint") as progress:
            materialize(source, work / "checkpoint", "float16", progress)
        self.checkpoint = open_checkpoint(work / "checkpoint")
        self.blocks = read_blocks(text, load_tokenizer(self.checkpoint.directory), blocks, 512, "evaluation")
        reference = build_oracle(self.checkpoint, formats={})
        self.logits = [block_logits(reference, block) for block in self.blocks]

    def row(self, name: str, candidate: Decoder | None, bits: float, seconds: float | None) -> str:
        """Return a candidate's row; without one, that of the float model itself."""
        sums = AgreementSums()
        for logits, block in zip(self.logits, self.blocks, strict=True):
            sums.add_block(logits, logits if candidate is None else block_logits(candidate, block), block)
        found = sums.agreement(self.checkpoint.spec.vocab_size)
        spent = "" if seconds is None else f"{seconds:.0f}"
        return f"| {name} | {found.perplexity:.2f} | {found.kl:.5f} | {found.top1:.3f} | {bits:.2f} | {spent} |"


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    comparison = Comparison(arguments.source, arguments.text, arguments.evaluation_blocks, work)
    checkpoint = comparison.checkpoint
    yield HEADER
    yield comparison.row("FP16", None, 16, None)
    calibration = CalibrationSection(source=arguments.text, blocks=arguments.calibration_blocks)
    for number, (name, values) in enumerate(wanted_rows(arguments).items()):
        section, scales = QuantizationSection(calibration=calibration, **values), work / f"scales-{number}"
        began = time.process_time()
        with stage_progress(CONSOLE, name) as progress:
            search_scales(checkpoint, section, scales, progress)
        seconds = time.process_time() - began
        formats = read_formats(checkpoint.spec, section, scales)
        write_quantized(work / f"{number}", checkpoint, quantized_tensors(checkpoint, scales), formats)
        quantized = open_checkpoint(work / f"{number}")
        bits = storage_costs(checkpoint.spec, formats)["bits_per_weight"]
        yield comparison.row(name, build_oracle(quantized), bits, seconds)
        if name == f"W4A16 g{arguments.group_size[0]}":
            coarse = {layer: replace(form, activations="int4") for layer, form in formats.items()}
            simulated = f"W4A4 g{arguments.group_size[0]}, simulated"
            yield comparison.row(simulated, build_oracle(quantized, formats=coarse), bits, None)


def main() -> int:
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory() as work:
            for line in measure(arguments, Path(work)):
                print(line, flush=True)
    except (SitsError, OSError) as error:
        show_error(CONSOLE, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
