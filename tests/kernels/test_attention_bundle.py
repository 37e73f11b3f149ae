"""The attention kernels of a bundle: their names and arguments, and that they compile for every SM."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
from sits_plugins.attention_catalogue import HEAD_DIMS, kernels
from sits_plugins.attention_enqueue import enqueue_attention
from sits_plugins.attention_names import names_for, needed
from sits_plugins.bundle import KernelBundle
from sits_plugins.compile import SMS
from sits_plugins.launcher import AttentionCall, attention_workspace_bytes

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Most shared memory that a block may have, from the CUDA programming guide's table of compute capabilities."""

KV_DTYPES = ("float16", "int8", "float8_e4m3", "int4")


@pytest.mark.parametrize("sm", SMS)
def test_every_needed_kernel_is_in_the_catalogue(sm):
    names = [spec.name for spec in kernels(sm)]
    assert len(names) == len(set(names))
    for kv_dtype, head_dim, tile_tokens in product(KV_DTYPES, HEAD_DIMS, (16, 64)):
        if kv_dtype == "float8_e4m3" and sm < 89:
            continue
        wanted = set(names_for(sm, "float16", kv_dtype, head_dim, 4, tile_tokens))
        absent = {name for name in wanted - set(names) if not name.endswith("_stream")}
        assert not absent, "only the stream may be absent, where its ring does not fit"
        chosen = needed(sm, "float16", kv_dtype, head_dim, 4, tile_tokens)
        assert {name for name in names if chosen(name)} == wanted & set(names)
    assert needed(sm, "float16", "float16", 64, 4, 64)("linear_of_any_kind")


class RecordingLauncher:
    """Stands for a GPU: checks what is launched against the manifest, and computes nothing."""

    def __init__(self, bundle: KernelBundle) -> None:
        self.bundle, self.multiprocessors = bundle, 100
        self.launched: list[str] = []
        self.zeroed: list[int] = []

    def launch(self, name, grid, args, stream):
        kernel = self.bundle.kernel(name)
        assert {argument for argument, _ in kernel.arguments} <= set(args)
        assert all(blocks > 0 for blocks in grid)
        self.launched.append(name.rsplit("_", 1)[1])

    def zero(self, address, size_bytes, stream):
        self.zeroed.append(size_bytes)


def a_call(**changes) -> AttentionCall:
    numbers = dict.fromkeys(AttentionCall._fields, 1)
    types = {"dtype": "float16", "kv_dtype": "float16"}
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tile_tokens": 64, "tiles_per_seq": 64}
    return AttentionCall(**{**numbers, **types, **sizes, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("sm", SMS)
def test_kernels_compile_and_fit(sm, tmp_path):
    names = set(names_for(sm, "float16", "float16", 128, 4, 64))
    if sm == 90:
        names |= set(names_for(sm, "bfloat16", "int8", 64, 1, 16)) | {"attention_bf16_fp16_d64_hopper_spread"}
    pattern = f"^({'|'.join(sorted(names))})$"
    subprocess.run([sys.executable, "-m", "sits_plugins.compile", str(sm), str(tmp_path), pattern], check=True)
    bundle = KernelBundle.load(tmp_path)
    assert names >= set(bundle.kernels)
    for kernel in bundle.kernels.values():
        assert kernel.shared_bytes <= SHARED_KIB[sm] << 10, kernel.name
    launcher = RecordingLauncher(bundle)
    enqueue_attention(launcher, a_call(tokens=64, batch=64), 0)
    enqueue_attention(launcher, a_call(tokens=600, batch=2, arrivals=0), 0)
    enqueue_attention(launcher, a_call(tokens=600, batch=1), 0)
    enqueue_attention(launcher, a_call(tokens=0), 0)
    prefill = "hopper" if sm == 90 else "prefill"
    assert launcher.launched == ["stream", "append", prefill, "stream", "append", prefill]
    assert launcher.zeroed == [600 * 8 * 4], "only the mixed step of several sequences without counters of its own"


def test_workspace_holds_what_a_call_cuts_from_it():
    """The last thing cut from the workspace, the counters of a call that brings none, ends where the workspace ends."""
    from sits_plugins.attention_enqueue import _arguments

    call = a_call(tokens=700, batch=3)._replace(workspace=1 << 20, arrivals=0)
    end = _arguments(call, 1)["arrivals"] + 700 * 8 * 4
    size = attention_workspace_bytes(700, 32, 8, 128)
    assert size - 256 < end - (1 << 20) <= size
