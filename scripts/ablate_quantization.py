"""Measures what each part of the quantization is worth: one Markdown row per recipe, from round-to-nearest up.

    python scripts/ablate_quantization.py [SOURCE] [--out DIR] [--symmetric] [--text FILE] ...

Every row is quantized by `sits_trt.quant` as a build would, on the calibration part of the text, and compared with the
float model on the evaluation part. Seconds are CPU seconds of the search alone, of all threads. Finished rows are kept
in DIR: run it again after a kill, or with more rows, and only what is missing is measured. The code of this project is
no part of what makes a row current: give a new DIR after changing it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sits_trt import __version__
from sits_trt.artifacts import fingerprint, tool_versions, write_json
from sits_trt.checkpoint import load_tokenizer, materialize, open_checkpoint
from sits_trt.checkpoint.source import source_digest
from sits_trt.checkpoint.texts import read_blocks, text_digest
from sits_trt.console import show_error, stage_progress
from sits_trt.errors import SitsError
from sits_trt.models import Decoder, build_oracle
from sits_trt.models.scoring import check_blocks, compare, exact_match
from sits_trt.quant import apply_scales, search_scales
from sits_trt.recipe.schema import CalibrationSection, QuantizationSection
from sits_trt.spec import WeightFormat

STEPS: dict[str, dict[str, Any]] = {
    "round to nearest": {"method": "rtn", "clip": False, "compensation": False, "scale_recover": False},
    "AWQ": {"clip": False, "compensation": False, "scale_recover": False},
    "+ clip": {"compensation": False, "scale_recover": False},
    "+ compensation": {"scale_recover": False},
    "+ ScaleRecover": {},
    "+ budget": {},
}
BUDGET = "+ budget"
"""The row that spends the average bits of the others on formats mixed by sensitivity."""

PROMPT_TOKENS = 64
TABLE_NAME = "ablation.md"
CONSOLE = Console(stderr=True, highlight=False)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="smollm2-135m-instruct", help="checkpoint, as in a recipe")
    parser.add_argument("--out", type=Path, default=Path("builds/ablation"), help="where rows and the table are kept")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="rows to measure")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--text", default="pydoc", help="calibration and evaluation text, as in a recipe")
    parser.add_argument("--evaluation-text", help="another text for the evaluation")
    parser.add_argument("--calibration-blocks", type=positive, default=32)
    parser.add_argument("--evaluation-blocks", type=positive, default=40)
    parser.add_argument("--block-tokens", type=positive, default=512)
    parser.add_argument("--prompts", type=positive, default=8, help=f"first {PROMPT_TOKENS} tokens of so many blocks")
    parser.add_argument("--answer-tokens", type=positive, default=128)
    return parser.parse_args()


class Ablation:
    """The rows of one table. The float model and the texts are loaded when the first missing row needs them."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments, self.work = arguments, work
        self.evaluation_text = arguments.evaluation_text or arguments.text
        texts = (arguments.text, self.evaluation_text)
        sizes = ("evaluation_blocks", "block_tokens", "prompts", "answer_tokens")
        self.conditions = {
            "source": source_digest(arguments.source),
            "texts": [text_digest(text) for text in texts],
            "sizes": {name: getattr(arguments, name) for name in sizes},
            "tools": {"sits-trt": __version__} | tool_versions("torch", "transformers"),
        }
        self.reference: Decoder | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each wanted row's name and figures, from its file where it was measured before."""
        for name in self.arguments.only:
            section = self.section(name)
            identity = fingerprint(self.conditions | {"quantization": section.model_dump(mode="json")})
            path = self.arguments.out / f"{identity}.json"
            if not path.is_file():
                figures = {"name": name} | self.measure(name, section)
                write_json(path, figures)
            yield json.loads(path.read_text(encoding="utf-8"))

    def section(self, name: str) -> QuantizationSection:
        a = self.arguments
        calibration = CalibrationSection(source=a.text, blocks=a.calibration_blocks, block_tokens=a.block_tokens)
        bits = WeightFormat(4, a.group_size, a.symmetric).bits_per_weight(a.group_size) if name == BUDGET else None
        return QuantizationSection(
            group_size=a.group_size, symmetric=a.symmetric, calibration=calibration, bits_per_weight=bits, **STEPS[name]
        )

    def measure(self, name: str, section: QuantizationSection) -> dict[str, Any]:
        if self.reference is None:
            self.load()
        assert self.reference is not None
        with tempfile.TemporaryDirectory(dir=self.work) as folder, stage_progress(CONSOLE, name) as progress:
            scales, quantized = Path(folder) / "scales", Path(folder) / "quantized"
            began = time.process_time()
            search_scales(self.checkpoint, section, scales, progress)
            seconds = time.process_time() - began
            details = apply_scales(self.checkpoint, scales, section, quantized, progress)
            candidate = build_oracle(open_checkpoint(quantized))
            scores = compare(self.reference, candidate, self.blocks, progress)
            match = exact_match(self.reference, candidate, self.prompts, self.arguments.answer_tokens, progress)
        return {
            "scores": scores.to_dict(),
            "match": match.to_dict(),
            "seconds": seconds,
            "bits_per_weight": details["bits_per_weight"],
        }

    def load(self) -> None:
        a = self.arguments
        with stage_progress(CONSOLE, "checkpoint") as progress:
            materialize(a.source, self.work / "checkpoint", "float16", progress)
        self.checkpoint = open_checkpoint(self.work / "checkpoint")
        tokenizer = load_tokenizer(self.checkpoint.directory)
        self.blocks = read_blocks(self.evaluation_text, tokenizer, a.evaluation_blocks, a.block_tokens, "evaluation")
        check_blocks(self.blocks)
        self.prompts = [block[:PROMPT_TOKENS] for block in self.blocks[: a.prompts]]
        self.reference = build_oracle(self.checkpoint)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, the float model first."""
    tokens = rows[0]["match"]["tokens"]
    lines = [
        f"| recipe | perplexity | KL | top-1 | top-5 | EM@{tokens} | same prefix | CPU seconds | bits/weight |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| float16 | {rows[0]['scores']['reference_perplexity']:.2f} | 0 | 1 | 1 | 1 | 1 | | 16 |",
    ]
    for row in rows:
        scores, match = row["scores"], row["match"]
        lines.append(
            f"| {row['name']} | {scores['perplexity']:.2f} | {scores['kl']:.4f} | {scores['top1']:.3f} | "
            f"{scores['top5']:.3f} | {match['exact_match']:.2f} | {match['matched_prefix']:.2f} | "
            f"{row['seconds']:.0f} | {row['bits_per_weight']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parse_arguments()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        work = arguments.out / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        rows = []
        for row in Ablation(arguments, work).rows():
            rows.append(row)
            (arguments.out / TABLE_NAME).write_text(table(rows), encoding="utf-8")
        shutil.rmtree(work)
    except (SitsError, OSError) as error:
        show_error(CONSOLE, error)
        return 2
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
