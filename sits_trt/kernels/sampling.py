"""From logits to tokens on the GPU, without sorting and without waiting for the host."""

from __future__ import annotations

import torch
from sits_plugins.fused_enqueue import Launches, enqueue_sampling, sampling_workspace
from torch import Tensor

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def draw_tokens(launcher: Launches, logits: Tensor, settings: Tensor, largest_only: bool = False) -> Tensor:
    """Return int64 [rows]: one token for each row of logits, -1 where the largest logit is not a finite number.

    logits: [rows, vocab] contiguous, float16, bfloat16 or float32, on the GPU. settings: float64 [rows, 4] there, of
    each row the temperature (0 for the largest logit), top_k (0 is off), top_p (1 is off) and the point in [0, 1) at
    which the distribution that they leave, in the order of ids, is inverted. largest_only: every temperature is 0. A
    row's token depends on nothing but the row. Raises PluginError for rows of more than 524288 logits.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    workspace = torch.empty(sampling_workspace(rows, vocab).total, dtype=torch.uint8, device=logits.device)
    enqueue_sampling(
        launcher, _NAMES[logits.dtype], rows, vocab, largest_only, logits.data_ptr(), settings.data_ptr(),
        tokens.data_ptr(), workspace.data_ptr(), torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    return tokens
