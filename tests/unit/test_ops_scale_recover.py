"""ScaleRecover multiplies each channel."""

from __future__ import annotations

import torch

from sits_trt.ops import scale_recover


def test_each_channel_is_multiplied_by_its_scale() -> None:
    x, scale = torch.randn(5, 7), torch.rand(7) + 0.5
    got = scale_recover(x, scale)
    for token in range(5):
        for channel in range(7):
            assert got[token, channel] == x[token, channel] * scale[channel]
    assert torch.equal(scale_recover(x, torch.ones(7)), x)
