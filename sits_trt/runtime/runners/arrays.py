"""A step's arrays as tensors on a device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sits_trt.runtime.step import StepInputs


def to_device(inputs: StepInputs, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a step on `device`, by the names that `models.Decoder.forward` gives them."""
    return {
        field.name: torch.from_numpy(getattr(inputs, field.name)).to(device) for field in dataclasses.fields(inputs)
    }
