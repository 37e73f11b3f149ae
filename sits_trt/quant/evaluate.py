"""Comparing a quantized checkpoint with its float source layer by layer, without either model whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sits_trt.checkpoint import Checkpoint
from sits_trt.models.decoder import RmsNorm, build_layer, soft_cap
from sits_trt.models.scoring import Agreement, AgreementSums
from sits_trt.quant.streams import BlockRunner, Streams, layer_tensors

Progress = Callable[[int, int, str], None]


@torch.inference_mode()
def compare_checkpoints(
    reference: Checkpoint, quantized: Checkpoint, blocks: Sequence[Sequence[int]], progress: Progress
) -> Agreement:
    """Return what `models.scoring.compare` returns for the two models in float32.

    Both must have the same embedding and head. Memory holds one layer, the head, the residual streams of all blocks,
    and the logits of one block.
    """
    spec = reference.spec
    streams = Streams.start(reference["model.embed_tokens.weight"], blocks, spec.embedding_scale)
    runner = BlockRunner(spec, max(streams.lengths))
    for index in range(spec.num_layers):
        progress(index, spec.num_layers, "compare with the float model")
        for checkpoint, stream in ((reference, streams.reference), (quantized, streams.quantized)):
            layer = build_layer(spec, index, layer_tensors(checkpoint, index), torch.float32, checkpoint.formats)
            for rows in streams.rows():
                stream[rows] = runner.run(layer, stream[rows])
    norm = RmsNorm(spec.norm_offset + reference["model.norm.weight"].float(), spec.norm_eps)
    name = "lm_head.weight" if "lm_head.weight" in reference else "model.embed_tokens.weight"
    head = reference[name].float()
    sums = AgreementSums()
    for rows, block in zip(streams.rows(), blocks, strict=True):
        theirs, ours = (
            soft_cap(nn.functional.linear(norm(x[rows]), head), spec.logit_softcap)
            for x in (streams.reference, streams.quantized)
        )
        sums.add_block(theirs, ours, block)
    progress(spec.num_layers, spec.num_layers, "compare with the float model")
    return sums.agreement(spec.vocab_size)
