"""What the model of the linear's time assumes of the streaming kernels is so: their blocks fit a multiprocessor."""

from __future__ import annotations

import re
import subprocess
from itertools import product

import pytest
from sits_plugins.compile import compile_source
from sits_plugins.kernel_spec import REALS, CudaModule
from sits_plugins.linear_catalogue import GROUP_SIZES, kernels
from sits_plugins.linear_enqueue import format_name
from sits_plugins.linear_shapes import GATED, STREAM

REGISTERS, THREADS, SHARED_BYTES = 65536, 2048, 227 * 1024
"""Of one multiprocessor of an H200; registers and threads are an A100's, too."""

RESERVED_BYTES = 1024
"""Shared memory that each block loses."""

SPILLED_BYTES = 24
"""The loop with an input scale may spill some registers; kernels that spill in the other take twice the time."""


def resources(cubin):
    """Return (registers, stack bytes, shared bytes) of each kernel of a cubin."""
    from triton import knobs

    text = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: (int(registers), int(stack), int(shared)) for name, registers, stack, shared in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "dtype", "group", "zeros"),
    [*product((90,), REALS, GROUP_SIZES, (False, True)), (80, "float16", 64, True)],
)
def test_as_many_blocks_are_resident_as_the_shapes_say(sm, dtype, group, zeros, tmp_path):
    modules = {source.name: source for source in kernels(sm) if isinstance(source, CudaModule)}
    for kind, shapes in (("stream", STREAM), ("gated", GATED)):
        name = f"linear_{kind}_{format_name(dtype, group, zeros)}"
        compile_source(modules[name], sm, tmp_path)
        used = resources(tmp_path / f"{name}.cubin")
        assert len(used) == len(shapes)
        for shape in shapes:
            registers, stack, shared = used[f"{name}_{shape.suffix}"]
            allocated = -(-registers // 8) * 8 * 32 * shape.warps * shape.resident
            assert allocated <= REGISTERS, (name, shape, registers)
            assert 32 * shape.warps * shape.resident <= THREADS
            assert (shared + RESERVED_BYTES) * shape.resident <= SHARED_BYTES
            assert stack <= SPILLED_BYTES, (name, shape, stack)
