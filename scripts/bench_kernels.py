"""Measure the kernels on this GPU: python scripts/bench_kernels.py --bundle DIRECTORY [--only linear|attention|fused].

Every row is cold (buffers rotate), a median, inside a CUDA graph, and stands beside a peer of the same run.
FlashInfer is a peer where it is installed, and is named as absent where not. Prints Markdown; --json writes the rows
too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench_timing import copy_bytes_per_us, markdown
from sits_plugins.bundle import KernelBundle
from sits_plugins.launch import BundleLauncher

BENCHES = ("linear", "attention", "fused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="the 'kernels' directory of a build for this GPU")
    parser.add_argument("--only", choices=BENCHES, help="only these kernels")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    launcher = BundleLauncher(KernelBundle.load(arguments.bundle))
    bandwidth = copy_bytes_per_us()
    card = torch.cuda.get_device_name()
    peers = {"torch": torch.__version__, "FlashInfer": flashinfer_version()}
    named = ", ".join(f"{name} {version}" for name, version in peers.items())
    print(f"{card}, {named}, {datetime.now(UTC):%Y-%m-%d}; device copy {bandwidth / 1e6:.2f} TB/s\n")
    rows = []
    for name in [arguments.only] if arguments.only else BENCHES:
        found = importlib.import_module(f"bench_{name}").bench(launcher, bandwidth)
        print(markdown(found), "\n", flush=True)
        rows += found
    if arguments.json:
        data = {"card": card, "peers": peers, "copy_tb_s": bandwidth / 1e6, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


def flashinfer_version() -> str:
    return importlib.import_module("flashinfer").__version__ if importlib.util.find_spec("flashinfer") else "absent"


if __name__ == "__main__":
    main()
