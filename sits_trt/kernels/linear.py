"""The INT4 linear on the GPU: weights re-laid once for the fast kernels, and the layer that launches them."""

from __future__ import annotations

import torch
from sits_plugins.launcher import LinearCall
from sits_plugins.linear_enqueue import Launches, enqueue_dequantize, enqueue_gated, enqueue_shape
from sits_plugins.linear_plan import DenseShape, choose_gated, choose_shape, flags_bytes, workspace
from torch import Tensor, nn

from sits_trt.kernels.fused import silu_mul
from sits_trt.layouts import MMA16_AXES, MMA16_COLUMNS, MMA16_ROWS, MMA16_SPLIT
from sits_trt.models.linear import W4A16Linear

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def relay_codes(qweight: Tensor) -> Tensor:
    """Return packed codes uint8 [out, in/2] in the mma16 layout: int32 [ceil(out/16), ceil(in/64), 32, 4].

    The same as `layouts.pack_mma16`, on the tensor's device.
    """
    codes = torch.stack((qweight & 0xF, qweight >> 4), dim=-1).flatten(1)
    codes = _padded(codes, MMA16_ROWS, MMA16_COLUMNS)
    blocks, pieces = codes.shape[0] // MMA16_ROWS, codes.shape[1] // MMA16_COLUMNS
    half, g, *columns = MMA16_SPLIT
    split = codes.reshape(blocks, half, g, pieces, *columns).permute(0, 3, 1, 2, 4, 5, 6, 7, 8)
    ordered = split.permute(0, 1, *(axis + 2 for axis in MMA16_AXES)).reshape(blocks, pieces, 32, 4, 8)
    words = torch.zeros(ordered.shape[:-1], dtype=torch.int32, device=qweight.device)
    for nibble in range(8):
        words |= ordered[..., nibble].int() << (4 * nibble)
    return words


def relay_groups(values: Tensor, group_size: int) -> Tensor:
    """Return scales or zero points [out, in/group_size] in the mma16 layout: [ceil(out/16), groups, 8, 2]."""
    padded = _padded(values, MMA16_ROWS, max(1, MMA16_COLUMNS // group_size))
    return padded.reshape(-1, 2, 8, padded.shape[1]).permute(0, 3, 2, 1).contiguous()


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    return nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))


class KernelLinear(nn.Module):
    """`models.linear.W4A16Linear` on a GPU: the same function, through the kernels of a bundle.

    Activations are [tokens, in], float16 or bfloat16, at a multiple of 16 bytes; scales, bias and input scale are kept
    in `dtype`, which is theirs. The layer stays on the device where it was made, and works on one stream at a time:
    launches that share its flags must not overlap. Fit for CUDA graph capture once the launcher has loaded its kernels.
    """

    def __init__(self, layer: W4A16Linear, dtype: torch.dtype, launcher: Launches) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.qweight.shape[0], 2 * layer.qweight.shape[1]
        self.group_size = layer.group_size
        self.dtype = dtype
        self.launcher = launcher
        # Plain attributes, not buffers: their addresses, taken once, are passed on with every launch.
        self.qweight = relay_codes(layer.qweight)
        self.scales = relay_groups(layer.scales.to(dtype), layer.group_size)
        self.zeros = None if layer.zeros is None else relay_groups(layer.zeros, layer.group_size)
        self.bias = None if layer.bias is None else layer.bias.to(dtype)
        self.input_scale = None if layer.input_scale is None else layer.input_scale.to(dtype)
        self.flags = torch.zeros(flags_bytes() // 4, dtype=torch.int32, device=layer.qweight.device)
        operands = (self.qweight, self.scales, self.zeros, self.bias, self.input_scale)
        self._operands = tuple(0 if tensor is None else tensor.data_ptr() for tensor in operands)

    def forward(self, x: Tensor) -> Tensor:
        """Return (x * input_scale) @ weight.T + bias as [tokens, out], enqueued on the current stream."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        if not x.shape[0]:
            return out
        launcher, size = self.launcher, (x.shape[0], self.out_features, self.in_features)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        shape = choose_shape(*size, launcher.sm, launcher.multiprocessors, library_gemm=True)
        if isinstance(shape, DenseShape):
            weight = x.new_empty(self.out_features, self.in_features)
            enqueue_dequantize(launcher, self._call(x, out, 0), weight.data_ptr(), 0, self.out_features, stream)
            return nn.functional.linear(x, weight, self.bias)
        scratch = workspace(shape, *size, launcher.multiprocessors, self.input_scale is not None)
        memory = x.new_empty(scratch.total, dtype=torch.uint8)
        enqueue_shape(launcher, self._call(x, out, memory.data_ptr()), shape, scratch, stream)
        return out

    def silu_gated(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up as [tokens, out / 2], gate and up the halves of `forward(x)`."""
        launcher, size = self.launcher, (x.shape[0], self.out_features, self.in_features)
        shape = choose_gated(*size, launcher.sm, launcher.multiprocessors) if x.shape[0] else None
        if shape is None:
            return silu_mul(launcher, self(x))
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features // 2)
        enqueue_gated(launcher, self._call(x, out, 0), shape, torch.cuda.current_stream(x.device).cuda_stream)
        return out

    def _call(self, x: Tensor, out: Tensor, memory: int) -> LinearCall:
        qweight, scales, zeros, bias, input_scale = self._operands
        return LinearCall(
            x=x.data_ptr(),
            qweight=qweight,
            scales=scales,
            zeros=zeros,
            bias=bias,
            input_scale=input_scale,
            out=out.data_ptr(),
            workspace=memory,
            dtype=_DTYPES[self.dtype],
            tokens=x.shape[0],
            in_features=self.in_features,
            out_features=self.out_features,
            group_size=self.group_size,
            flags=self.flags.data_ptr(),
        )
