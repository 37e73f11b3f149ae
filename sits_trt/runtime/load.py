"""From an engine directory to an executor: reads the manifest, picks the runner, sizes the pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sits_trt.artifacts import read_manifest, require_input
from sits_trt.checkpoint.tokenizer import load_tokenizer
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.errors import SitsError
from sits_trt.models import Decoder
from sits_trt.runtime.executor import Executor
from sits_trt.runtime.pool import available_host_bytes, pool_tiles
from sits_trt.runtime.runners.base import Runner
from sits_trt.runtime.runners.eager import EagerRunner, cuda_available, free_cuda_bytes, load_decoder
from sits_trt.runtime.runners.null import NullRunner
from sits_trt.runtime.sampler import Draw
from sits_trt.spec import TileSpec

if TYPE_CHECKING:
    from sits_trt.runtime.runners.cuda import CudaRunner

logger = logging.getLogger(__name__)


def load_executor(
    engine_dir: Path,
    *,
    max_batch_size: int | None = None,
    max_queue_size: int = 0,
    queue_timeout_ms: int = 0,
    memory_fraction: float = 0.9,
    max_tiles: int | None = None,
    device: str = "auto",
    runner: str = "auto",
) -> Executor:
    """Return an executor, not yet started, for the engine in `engine_dir`.

    max_batch_size: sequences in flight, at most the engine's own bound, which is the default.
    max_queue_size, queue_timeout_ms: as in Executor. memory_fraction, max_tiles: as in the recipe's kv_cache section.
    device: 'cpu', 'cuda' or 'auto'. runner: 'eager', 'cuda' (the build's kernel bundle), 'null' (no model: to test what
    lies around it) or 'auto'.
    `Executor.description` says which runner it is and why. Raises SitsError when the engine cannot run here.
    """
    manifest = read_manifest(engine_dir, "engine")
    details = EngineDetails.from_dict(manifest.details, engine_dir)
    limits = _limits(details.limits, max_batch_size)
    checkpoint_dir = engine_dir / details.checkpoint
    require_input(engine_dir, manifest, checkpoint_dir)
    kind, place, reason = choose_runner(details.backend, runner, device, cuda_available())
    tokenizer = load_tokenizer(checkpoint_dir)
    made: Runner
    draw: Draw | None = None
    if kind == "null":
        tile = details.tile
        tiles = max_tiles or limits.max_batch_size * tile.tiles_for(limits.max_seq_tokens)
        made = NullRunner(tile, tiles, details.model.vocab_size)
    else:
        decoder, tile = load_decoder(checkpoint_dir, details.tile, limits.max_seq_tokens, place, kind == "cuda")
        on_gpu = place == "cuda"
        available = free_cuda_bytes() if on_gpu else available_host_bytes()
        tiles = pool_tiles(tile, limits, available, memory_fraction, max_tiles, on_gpu)
        if kind == "cuda":
            made = _cuda_runner(decoder, tile, tiles, limits, engine_dir / details.kernels)
            draw = made.draw
        else:
            made = EagerRunner(decoder, tile, tiles)
    description = f"{kind} runner on {place}: {reason}"
    logger.info(
        "%s; %d tiles of %d tokens, KV as %s", description, made.num_tiles, tile.tile_tokens, tile.kv_dtype
    )  # fmt: skip
    return Executor(
        made,
        tile,
        limits,
        eos_token_ids=tokenizer.eos_token_ids or details.model.eos_token_ids,
        tokenizer=tokenizer,
        byte_token_ids=tokenizer.byte_token_ids,
        max_queue_size=max_queue_size,
        queue_timeout_ms=queue_timeout_ms,
        description=description,
        draw=draw,
    )


def choose_runner(backend: str, runner: str, device: str, has_cuda: bool) -> tuple[str, str, str]:
    """Return the runner's name, its device, and why, for an engine of `backend` on this machine.

    Raises SitsError for an unknown name and for a GPU that is not there.
    """
    if runner not in ("auto", "eager", "cuda", "null"):
        raise SitsError(f"there is no runner '{runner}'; choose auto, eager, cuda or null")
    if device not in ("auto", "cpu", "cuda"):
        raise SitsError(f"there is no device '{device}'; choose auto, cpu or cuda")
    if runner == "null":
        return "null", "cpu", "asked for; answers are pseudo-random and need no model"
    if "cuda" in (device, runner) and not has_cuda:
        raise SitsError("'cuda' was asked for, but torch sees no NVIDIA GPU here; use device 'cpu' and runner 'eager'")
    if runner == "cuda":
        return "cuda", "cuda", "asked for"
    place = device if device != "auto" else "cuda" if has_cuda else "cpu"
    here = "asked for" if device != "auto" else "an NVIDIA GPU is here" if has_cuda else "no NVIDIA GPU is here"
    if (backend, runner, place) == ("cuda", "auto", "cuda"):
        return "cuda", place, here
    instead = "" if backend == "eager" else f"; it computes what the {backend} engine does, from the same checkpoint"
    return "eager", place, here + instead


def _cuda_runner(decoder: Decoder, tile: TileSpec, tiles: int, limits: EngineLimits, kernels_dir: Path) -> CudaRunner:
    # Needs the CUDA driver's bindings, which a machine without a GPU may do without.
    from sits_plugins.bundle import KernelBundle
    from sits_plugins.launch import BundleLauncher

    from sits_trt.runtime.runners.cuda import CudaRunner

    return CudaRunner(decoder, tile, tiles, limits, BundleLauncher(KernelBundle.load(kernels_dir)))


def _limits(limits: EngineLimits, max_batch_size: int | None) -> EngineLimits:
    if max_batch_size is None:
        return limits
    if not 1 <= max_batch_size <= limits.max_batch_size:
        raise SitsError(
            f"max_batch_size is {max_batch_size}, but this engine was built for 1 to {limits.max_batch_size}; "
            f"change serving.max_batch_size and build again"
        )
    return replace(limits, max_batch_size=max_batch_size)
