"""A step's arrays as tensors on a device, all of them in one piece of memory and moved by one copy."""

from __future__ import annotations

import dataclasses
from math import prod

import torch
from torch import Tensor

from sits_trt.runtime.step import StepInputs

ALIGNED_INTS = 64
"""Each array starts at a multiple of this: kernels read whole 16 bytes, and 256 are a safe multiple."""

_NAMES = tuple(field.name for field in dataclasses.fields(StepInputs))


def to_device(inputs: StepInputs, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a step on `device`, by the names that `models.Decoder.forward` gives them."""
    return views(packed(inputs, device).to(device, non_blocking=True), inputs)


def packed(inputs: StepInputs, device: torch.device) -> Tensor:
    """Return the arrays of a step behind one another, int32, in host memory that a copy to `device` need not wait for.

    On its way to a GPU that is page-locked memory, which torch hands out again only when the copy has ended.
    """
    starts, size = _places(inputs)
    memory = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = memory.numpy()
    for name, start in zip(_NAMES, starts, strict=True):
        array = getattr(inputs, name)
        numbers[start : start + array.size] = array.reshape(-1)
    return memory


def views(memory: Tensor, inputs: StepInputs) -> dict[str, Tensor]:
    """Return the arrays by name, as parts of `memory`, which holds what `packed` gives for a step of these shapes."""
    starts, _ = _places(inputs)
    arrays = [(name, start, getattr(inputs, name).shape) for name, start in zip(_NAMES, starts, strict=True)]
    return {name: memory[start : start + prod(shape)].view(shape) for name, start, shape in arrays}


def _places(inputs: StepInputs) -> tuple[list[int], int]:
    """Return where each array starts, in numbers, and the size of all."""
    starts, end = [], 0
    for name in _NAMES:
        starts.append(end)
        end += -(-getattr(inputs, name).size // ALIGNED_INTS) * ALIGNED_INTS
    return starts, end
