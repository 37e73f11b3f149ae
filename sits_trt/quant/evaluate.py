"""Comparing a quantized checkpoint with its float source layer by layer, without either model whole in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sits_trt.checkpoint import Checkpoint
from sits_trt.models.decoder import RmsNorm, build_layer, soft_cap
from sits_trt.models.scoring import Agreement, AgreementSums
from sits_trt.progress import Progress
from sits_trt.quant.streams import BlockRunner, LayerTensors, Streams

_POSITIONS = 64
"""Positions whose logits are held at a time."""

_HEAD_ROWS = 8192
"""Rows of the head that are held in float32 at a time."""


@torch.inference_mode()
def compare_checkpoints(
    reference: Checkpoint, quantized: Checkpoint, blocks: Sequence[Sequence[int]], progress: Progress
) -> Agreement:
    """Return what `models.scoring.compare` returns for the two models in float32.

    Both must have the same embedding and head. Memory holds one layer, the head, and the residual streams of
    all blocks.
    """
    spec = reference.spec
    streams = Streams.start(reference["model.embed_tokens.weight"], blocks, spec.embedding_scale)
    runner = BlockRunner(spec, max(streams.lengths))
    for index in range(spec.num_layers):
        progress(index, spec.num_layers, "compare with the float model")
        for checkpoint, stream in ((reference, streams.reference), (quantized, streams.quantized)):
            layer = build_layer(spec, index, LayerTensors(checkpoint, index), torch.float32, checkpoint.formats)
            for rows in streams.rows():
                stream[rows] = runner.run(layer, stream[rows])
            del layer
    norm = RmsNorm(spec.norm_offset + reference["model.norm.weight"].float(), spec.norm_eps)
    head = reference["lm_head.weight" if "lm_head.weight" in reference else "model.embed_tokens.weight"]
    sums = AgreementSums()
    for rows, block in zip(streams.rows(), blocks, strict=True):
        following = torch.tensor(block[1:], dtype=torch.int64)
        both = [x[rows].split(_POSITIONS) for x in (streams.reference, streams.quantized)]
        for number, (theirs, ours) in enumerate(zip(*both, strict=True)):
            logits = soft_cap(_head_outputs(norm(torch.cat((theirs, ours))), head), spec.logit_softcap)
            sums.add(logits[: len(theirs)], logits[len(theirs) :], following[number * _POSITIONS :][: len(theirs)])
    progress(spec.num_layers, spec.num_layers, "compare with the float model")
    return sums.agreement(spec.vocab_size)


def _head_outputs(normed: Tensor, head: Tensor) -> Tensor:
    """Return normed @ head.T, float32 [positions, vocab]; the head [vocab, hidden] becomes float32 in parts."""
    outputs = torch.empty(len(normed), len(head))
    for part, result in zip(head.split(_HEAD_ROWS), outputs.split(_HEAD_ROWS, 1), strict=True):
        result.copy_(normed @ part.float().T)
    return outputs
