"""The tiled attention op: rotate, append to the pool, attend over the sequence's tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sits_trt.ops.rope import apply_rope

Places = tuple[Tensor, Tensor]
"""Where new tokens go: their tiles and the offsets in them, int64 [tokens] each."""


def _token_places(tile_table: Tensor, context_lens: Tensor, query_starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index and the position of each of `tokens` new tokens, both int64 [tokens]."""
    device = tile_table.device
    lengths = (query_starts[1:] - query_starts[:-1]).long()
    sequence = torch.repeat_interleave(torch.arange(tile_table.shape[0], device=device), lengths, output_size=tokens)
    position = torch.arange(tokens, device=device) - (query_starts[:-1] - context_lens).long()[sequence]
    return sequence, position


def _attend(q: Tensor, k: Tensor, v: Tensor, context: int, window: int, scale: float, softcap: float = 0.0) -> Tensor:
    """Causal attention of q [new, heads, d] over k and v [kv_heads, context+new, d]; window and softcap 0 are none."""
    new, heads, dim = q.shape
    kv_heads, total, _ = k.shape
    grouped = q.reshape(new, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (grouped @ k.transpose(1, 2)).reshape(kv_heads, -1, new, total) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(context, context + new, device=q.device)[:, None]
    key = torch.arange(total, device=q.device)[None, :]
    hidden = key > query
    if window:
        hidden = hidden | (key <= query - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = (weights.reshape(kv_heads, -1, total) @ v).reshape(kv_heads, heads // kv_heads, new, dim)
    return out.permute(2, 0, 1, 3).reshape(new, heads * dim)


def block_attention(
    qkv: Tensor,
    rope_table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """`tiled_attention` of one whole sequence from its start, without a pool: gradients flow through it.

    qkv: [tokens, (num_heads + 2*num_kv_heads) * head_dim]. Other arguments and the result are `tiled_attention`'s.
    """
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows = rope_table[: len(qkv)]
    q, k = apply_rope(q, rows), apply_rope(k, rows)
    return _attend(q, k.transpose(0, 1), v.transpose(0, 1), 0, window, scale, softcap)


def attend_over_tiles(
    qkv: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    tile_tokens: int,
    window: int,
    scale: float,
    softcap: float,
    write: Callable[[Places, int, Tensor], None],
    read: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """`tiled_attention` over whatever pool `write` and `read` know; side 0 is K, 1 is V.

    `write` puts rows [tokens, num_kv_heads, head_dim] at their places; `read` returns the tiles of these ids,
    [tiles, num_kv_heads, tile_tokens, head_dim]. The arithmetic and the other arguments are `tiled_attention`'s.
    """
    tokens, dim = qkv.shape[0], rope_table.shape[-1]
    exact = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    sequence, position = _token_places(tile_table, context_lens, query_starts, tokens)
    q, k, v = qkv.reshape(tokens, -1, dim).to(exact).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows = rope_table.to(exact)[position]
    q, k = apply_rope(q, rows), apply_rope(k, rows)
    places = tile_table[sequence, position // tile_tokens].long(), position % tile_tokens
    write(places, 0, k)
    write(places, 1, v)
    out = qkv.new_empty(tokens, num_heads * dim)
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for index, context in enumerate(contexts):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        total = context + end - begin
        used = tile_table[index, : -(-total // tile_tokens)].long()
        keys, values = (
            read(used, side).permute(1, 0, 2, 3).reshape(num_kv_heads, -1, dim)[:, :total].to(exact) for side in (0, 1)
        )
        out[begin:end] = _attend(q[begin:end], keys, values, context, window, scale, softcap).to(out.dtype)
    return out


@torch.library.custom_op("sits::tiled_attention", mutates_args=("kv_pool",))
def tiled_attention(
    qkv: Tensor,
    kv_pool: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Rotate q and k, append k and v of one layer to the pool, and attend causally.

    qkv: [tokens, (num_heads + 2*num_kv_heads) * head_dim], all sequences' new tokens back to back.
    kv_pool: [tiles, layers, 2, num_kv_heads, tile_tokens, head_dim], written in place.
    tile_table: int32 [batch, tiles_per_seq]; tile i of a sequence holds its positions i*tile_tokens onwards.
    context_lens: int32 [batch], tokens of each sequence already in the pool.
    query_starts: int32 [batch+1], where each sequence's new tokens start in qkv, then their end.
    rope_table: float32 [positions, head_dim] of `ops.rope.rope_table`.
    window: newest tokens that a token may attend to, itself included; 0 for all.
    scale: factor of the scores. softcap: c turns a score x into c * tanh(x / c); 0 leaves it as it is.
    Returns [tokens, num_heads * head_dim] in qkv's dtype. Arithmetic is float32, or float64 for float64 input.
    """

    def write(places: Places, side: int, new: Tensor) -> None:
        tiles, offsets = places
        kv_pool[tiles, layer, side, :, offsets] = new.to(kv_pool.dtype)

    def read(used: Tensor, side: int) -> Tensor:
        return kv_pool[used, layer, side]

    return attend_over_tiles(
        qkv, tile_table, context_lens, query_starts, rope_table, num_heads, num_kv_heads, kv_pool.shape[-2],
        window, scale, softcap, write, read,
    )  # fmt: skip


@torch.library.custom_op("sits::tiled_attention_functional", mutates_args=())
def tiled_attention_functional(
    qkv: Tensor,
    kv_pool: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """The twin that graphs are exported with: same result, the pool's update left to the plugin behind the node."""
    return tiled_attention(
        qkv, kv_pool.clone(), tile_table, context_lens, query_starts, rope_table,
        layer, num_heads, num_kv_heads, window, scale, softcap,
    )  # fmt: skip


@tiled_attention.register_fake
@tiled_attention_functional.register_fake
def _(
    qkv: Tensor,
    kv_pool: Tensor,
    tile_table: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rope_table: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], num_heads * kv_pool.shape[-1])
