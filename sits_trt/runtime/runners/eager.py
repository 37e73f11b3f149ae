"""The decoder in plain torch: the oracle, and what serves where there is nothing faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sits_trt.checkpoint import open_checkpoint
from sits_trt.models import Decoder, build_decoder
from sits_trt.models.threads import leave_a_core
from sits_trt.ops import allocate_pool
from sits_trt.runtime.runners.arrays import to_device
from sits_trt.runtime.step import StepInputs
from sits_trt.spec import TileSpec


class EagerRunner:
    """Runs a Decoder. The pool lies on the decoder's device, its type is `tile.kv_dtype`: codes are stored as codes."""

    def __init__(self, decoder: Decoder, tile: TileSpec, num_tiles: int) -> None:
        self.vocab_size = decoder.spec.vocab_size
        self.num_tiles = num_tiles
        self._decoder = decoder
        self._device = decoder.embedding.device
        self._pool, self._scales = allocate_pool(tile, num_tiles, self._device)

    def run(self, inputs: StepInputs) -> Tensor:
        arrays = to_device(inputs, self._device)
        with torch.inference_mode():
            logits: Tensor = self._decoder(kv_pool=self._pool, kv_scales=self._scales, **arrays)
        return logits

    def close(self) -> None:
        del self._pool, self._scales, self._decoder


def cuda_available() -> bool:
    return torch.cuda.is_available()


def free_cuda_bytes() -> int:
    """Memory of the current GPU that is free now, what torch has cached included."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def load_decoder(
    checkpoint_dir: Path, tile: TileSpec, num_positions: int, device: str, keep_int4: bool = False
) -> tuple[Decoder, TileSpec]:
    """Load a checkpoint for `device` ('cpu' or 'cuda'); return the decoder and the tile geometry of its pool.

    On a CPU everything is float32, as 16-bit arithmetic is emulated there; so is the pool, unless it holds codes. On
    a GPU weights and activations keep the type of the checkpoint's embedding. INT4 layers are dequantized once, as
    torch has no kernel for them, unless `keep_int4`.
    """
    if device == "cpu":
        leave_a_core()
    checkpoint = open_checkpoint(checkpoint_dir)
    dtype = torch.float32 if device == "cpu" else checkpoint["model.embed_tokens.weight"].dtype
    decoder = build_decoder(checkpoint.spec, checkpoint, checkpoint.formats, dtype, num_positions)
    if not keep_int4:
        decoder.dequantize_(dtype)
    float_pool = device == "cpu" and not tile.is_coded
    return decoder.to(device), replace(tile, kv_dtype="float32") if float_pool else tile
