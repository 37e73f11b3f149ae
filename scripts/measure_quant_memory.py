"""Measures the peak memory of quantizing a synthetic checkpoint, stage by stage, each in a process of its own.

    python scripts/measure_quant_memory.py [--layers 21] [--decided 21] [--work DIR]

Writes a checkpoint of random float16 weights in the shape of Llama-3.2-1B (hidden 2048, intermediate 8192, 32 query and
8 key-value heads of 64, vocabulary 128256, tied), by default with 21 layers: 3.1 GB in shards. Then runs the stages of
a build on it, with awq, clip, compensation and ScaleRecover on 4 blocks of 512 tokens of pydoc, and prints each
process's peak resident memory as the kernel counted it (VmHWM), and for comparison that of a process that only imports.
Of the layers, the first `--decided` are quantized; the others are only run through, to save time. The last table says
what the largest terms are for other models. It is computed, not measured: of this shape a quarter more was measured
than the sum and the import, most of it slices, kept inputs and buffers of the matrix products.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 8192, 32, 8, 64, 128256
STAGES = ("import", "checkpoint", "search", "apply")
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--decided", type=int, help="layers that are quantized, from the first (default: all)")
    parser.add_argument("--blocks", type=int, default=4, help="calibration blocks of 512 tokens")
    parser.add_argument("--work", type=Path, help="directory for the files (default: a temporary one)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_checkpoint(directory: Path, layers: int) -> None:
    """Write random weights layer by layer, with the tokenizer of the packaged SmolLM2."""
    import torch

    from sits_trt.checkpoint import open_checkpoint
    from sits_trt.checkpoint.config import parse_config
    from sits_trt.checkpoint.expected import expected_tensors
    from sits_trt.checkpoint.shard_writer import ShardWriter

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    writer = ShardWriter(directory, shard_bytes=1 << 30)
    generator = torch.Generator().manual_seed(0)
    for name, shape in expected_tensors(parse_config(config), {}).items():
        noise = torch.randn(shape, generator=generator)
        writer.add(name, (noise.mul_(0.1).add_(1) if "norm" in name else noise.mul_(0.02)).half())
    writer.finish()
    (directory / "config.json").write_text(json.dumps(config))
    open_checkpoint("smollm2-135m-instruct").save_tokenizer(directory)


def run_stage(stage: str, arguments: argparse.Namespace) -> None:
    """Run one stage of a build on the files in `arguments.work`, as `pipeline` does."""
    from sits_trt.checkpoint import materialize, open_checkpoint
    from sits_trt.quant import apply_scales, search_scales
    from sits_trt.recipe.schema import CalibrationSection, QuantizationSection

    decided = arguments.layers if arguments.decided is None else arguments.decided
    kept = "|".join(str(index) for index in range(decided, arguments.layers))
    section = QuantizationSection(
        calibration=CalibrationSection(blocks=arguments.blocks),
        ignore=("lm_head", rf"re:model\.layers\.({kept})\..*") if kept else ("lm_head",),
    )
    work = arguments.work
    results = {"checkpoint": "checkpoint", "search": "scales", "apply": "quantized"}
    if stage in results:
        shutil.rmtree(work / results[stage], ignore_errors=True)
    if stage == "checkpoint":
        materialize(work / "source", work / "checkpoint", "float16", show)
    if stage == "search":
        search_scales(open_checkpoint(work / "checkpoint"), section, work / "scales", show)
    if stage == "apply":
        apply_scales(open_checkpoint(work / "checkpoint"), work / "scales", section, work / "quantized", show)


def show(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what}\033[K", end="", file=sys.stderr)


def peak_mib() -> int:
    """Return the peak resident memory of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def terms_mib(hidden: int, inner: int, kv_size: int, tokens: int) -> dict[str, float]:
    """Return the largest terms of the search's memory in MiB while `down` is decided, where most is needed.

    streams: both residual streams, float32. hessian and factor: [inner, inner], float32. weight: `down` corrected for
    drift, float32, and as stored, float16. layer: what is decided of it so far, one byte a weight, and its scales.
    """
    decided = hidden * (2 * hidden + 2 * kv_size) + 2 * hidden * inner
    return {
        "streams": 2 * tokens * hidden * 4 / MIB,
        "hessian": inner * inner * 4 / MIB,
        "factor": inner * inner * 4 / MIB,
        "weight": inner * hidden * 6 / MIB,
        "layer": decided * (1 + 8 / 64) / MIB,
    }


def print_terms() -> None:
    shapes = {
        "this one, 4 blocks": (HIDDEN, INNER, KV_HEADS * HEAD_DIM, 2048),
        "Llama-3.2-1B, 32 blocks": (2048, 8192, 512, 16384),
        "Llama-3-8B, 32 blocks": (4096, 14336, 1024, 16384),
        "Llama-3-70B, 32 blocks": (8192, 28672, 1024, 16384),
    }
    columns = list(terms_mib(1, 1, 1, 1))
    print("\nComputed, MiB, beside the import and a dozen slices of 8 MiB (`terms_mib`):\n")
    print(f"| model | {' | '.join(columns)} | sum |")
    print("|---" * (len(columns) + 2) + "|")
    for name, shape in shapes.items():
        terms = terms_mib(*shape)
        print(f"| {name} | {' | '.join(f'{terms[key]:.0f}' for key in columns)} | {sum(terms.values()):.0f} |")


def measure(arguments: argparse.Namespace) -> None:
    source = arguments.work / "source"
    if not source.exists():
        write_checkpoint(source, arguments.layers)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    files = len(list(source.glob("*.safetensors")))
    print(f"checkpoint: {size / 1e9:.2f} GB in {files} files, {arguments.layers} layers\n")
    print("| stage | peak MiB | seconds |\n|---|---|---|")
    for stage in STAGES:
        command = [sys.executable, __file__, "--stage", stage, "--work", str(arguments.work)]
        command += ["--layers", str(arguments.layers), "--blocks", str(arguments.blocks)]
        command += [] if arguments.decided is None else ["--decided", str(arguments.decided)]
        began = time.monotonic()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        print(f"| {stage} | {done.stdout.strip()} | {time.monotonic() - began:.0f} |", flush=True)
    print_terms()


def main() -> None:
    arguments = parse_arguments()
    if arguments.stage:
        run_stage(arguments.stage, arguments)
        print(peak_mib())
        return
    if arguments.work:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as work:
        arguments.work = Path(work)
        measure(arguments)
        shutil.rmtree(arguments.work / "source")


if __name__ == "__main__":
    main()
