"""Compare orders of the KV cache on this GPU with one and the same kernel: python scripts/bench_kv_layouts.py

The stream of `plugins/attention_stream.cu` is compiled (NVRTC) for tiles of any size and for both orders inside a
tile, so that nothing differs but the places of the rows:

    row-major        one piece a sequence, [tokens, kv_heads, head_dim], room for the longest sequence
    paged-16         blocks of 16 tokens, [16, kv_heads, head_dim], anywhere
    SITS tiles       tiles of 64 tokens of one head, [kv_heads, 64, head_dim], anywhere

Hit rate and throughput come from Nsight Compute:

    ncu --clock-control none --metrics lts__t_sector_hit_rate.pct,dram__throughput.avg.pct_of_peak_sustained_elapsed \\
        python scripts/bench_kv_layouts.py --launch-once
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bench_timing import copy_bytes_per_us, graph_us
from sits_plugins.attention_catalogue import kernels
from sits_plugins.attention_names import stem
from sits_plugins.bundle import KernelBundle
from sits_plugins.compile import compile_source
from sits_plugins.kernel_spec import CudaModule
from sits_plugins.launch import BundleLauncher

from sits_trt.kernels.attention import KernelAttention
from sits_trt.ops.rope import rope_table
from sits_trt.spec import RopeSpec

HEADS, DIM, CONTEXT, LAYERS = (32, 8), 128, 16384, 4


@dataclass(frozen=True)
class Layout:
    name: str
    tile_tokens: int
    token_major: bool


LAYOUTS = (
    Layout("row-major", CONTEXT, True),
    Layout("paged-16", 16, True),
    Layout("SITS tiles", 64, False),
)


def launcher_of(layout: Layout, directory: Path) -> BundleLauncher:
    """Return a launcher of the stream alone, compiled for this layout."""
    major, minor = torch.cuda.get_device_capability()
    name = f"{stem('float16', 'float16', DIM)}_stream"
    module = next(spec for spec in kernels(10 * major + minor) if spec.name == name)
    assert isinstance(module, CudaModule)
    module = replace(module, defines={**module.defines, "TOKEN_MAJOR": int(layout.token_major)})
    directory.mkdir()
    compiled = compile_source(module, 10 * major + minor, directory)
    bundle = KernelBundle(directory, 10 * major + minor, (1, 0), {k.name: k for k in compiled}, {}, {})
    return BundleLauncher(bundle)


class Case:
    """Sequences of CONTEXT tokens, each with one new token, in one layout."""

    def __init__(self, layout: Layout, sequences: int, launcher: BundleLauncher) -> None:
        width = -(-CONTEXT // layout.tile_tokens)
        tile = (layout.tile_tokens, HEADS[1]) if layout.token_major else (HEADS[1], layout.tile_tokens)
        # The kernel takes the size of a tile from the fifth dimension.
        self.pool = torch.empty(sequences * width, LAYERS, 2, *tile, DIM, dtype=torch.float16, device="cuda").normal_()
        self.pool = self.pool.view(-1, LAYERS, 2, HEADS[1], layout.tile_tokens, DIM)
        self.table = torch.randperm(sequences * width).int().reshape(sequences, width).cuda()
        self.contexts = torch.full((sequences,), CONTEXT - 1, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
        self.rope = rope_table(RopeSpec(), DIM, CONTEXT + 1).cuda()
        self.qkv = torch.randn(sequences, (HEADS[0] + 2 * HEADS[1]) * DIM, device="cuda").half()
        self.attention = KernelAttention(launcher, sequences, *HEADS, DIM, "cuda")

    def launch(self, layer: int) -> torch.Tensor:
        places = (self.table, self.contexts, self.starts, self.rope)
        return self.attention(self.qkv, self.pool, *places, layer, 0, DIM**-0.5)


def reserved_bytes(layout: Layout, lengths: list[int]) -> int:
    """Return the memory of one layer that sequences of these lengths hold."""
    tokens = sum(-(-length // layout.tile_tokens) * layout.tile_tokens for length in lengths)
    return tokens * HEADS[1] * 2 * DIM * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch-once", action="store_true", help="one launch a layout, for a profiler")
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    with tempfile.TemporaryDirectory() as scratch:
        launchers = {layout.name: launcher_of(layout, Path(scratch) / layout.name) for layout in LAYOUTS}
        if options.launch_once:
            for layout in LAYOUTS:
                case = Case(layout, 8, launchers[layout.name])
                case.launch(0)
                torch.cuda.synchronize()
            return
        bandwidth = copy_bytes_per_us()
        for sequences in (1, 8, 32):
            size = sequences * CONTEXT * HEADS[1] * 2 * DIM * 2
            for layout in LAYOUTS:
                case = Case(layout, sequences, launchers[layout.name])
                us = graph_us(lambda i, c=case: c.launch(i % LAYERS), 8 * LAYERS)
                share = size / us / bandwidth
                print(f"{sequences:3d} x {CONTEXT} {layout.name:12s} {us:8.2f} us {share:6.3f} of copy", flush=True)
                del case
        lengths = torch.randint(1, CONTEXT, (32,)).tolist()
        for layout in LAYOUTS:
            print(f"32 sequences of 1..{CONTEXT} tokens, one layer: {layout.name:12s} "
                  f"{reserved_bytes(layout, lengths) / 2**20:8.1f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
