"""FlashInfer as the peer of the attention benchmark: float16, pages of 16 tokens, this process, this GPU.

It is timed as our kernels are: every launch reads another layer of the pool, inside one CUDA graph. Its `plan` runs
before the graph, for exactly these lengths (`use_cuda_graph`, which would pad the schedule, is off): its best case. It
attends only; our op also applies RoPE and writes the new keys and values. scripts/bench_attention.py takes the times;
python scripts/bench_flashinfer.py only compares FlashInfer with torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import flashinfer
import torch
from bench_timing import graph_us
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PAGE_TOKENS = 16
WORKSPACE_BYTES = 256 << 20


@dataclass
class PagedStep:
    """Queries [tokens, query heads, dim] and a pool [layers, pages, K and V, page tokens, KV heads, dim], on the GPU.

    Sequence b owns queries query_starts[b:b + 2] and pages page_ids[page_starts[b]:page_starts[b + 1]], the last of
    which holds last_page_tokens[b]; these four are int32, on the CPU.
    """

    queries: Tensor
    pool: Tensor
    query_starts: Tensor
    page_starts: Tensor
    page_ids: Tensor
    last_page_tokens: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, dim and page tokens, as `plan` takes them."""
        return self.queries.shape[1], self.pool.shape[4], self.pool.shape[5], self.pool.shape[3]


def make_paged_step(lengths: list[int], new: list[int], heads: tuple[int, int], dim: int, layers: int) -> PagedStep:
    """Return a random step; `lengths` counts each sequence's keys, the new ones included. Pages lie in random order."""
    pages = [-(-length // PAGE_TOKENS) for length in lengths]
    last = [length - (count - 1) * PAGE_TOKENS for length, count in zip(lengths, pages, strict=True)]
    pool = torch.empty(layers, sum(pages), 2, PAGE_TOKENS, heads[1], dim, dtype=torch.float16, device="cuda")
    return PagedStep(
        queries=torch.randn(sum(new), heads[0], dim, device="cuda").half(),
        pool=pool.normal_(),
        query_starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32),
        page_starts=torch.tensor([0, *accumulate(pages)], dtype=torch.int32),
        page_ids=torch.randperm(sum(pages)).int(),
        last_page_tokens=torch.tensor(last, dtype=torch.int32),
    )


def plan_decode(step: PagedStep, tensor_cores: bool) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    """Return the planned wrapper for one new token a sequence, by its kernel for tensor cores or the one without."""
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=tensor_cores, backend="fa2")
    wrapper.plan(step.page_starts, step.page_ids, step.last_page_tokens, *step.shape, q_data_type=torch.float16)
    return wrapper


def plan_prefill(step: PagedStep) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    """Return the planned wrapper for causal prefill over pages, by its kernel for Hopper."""
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa3")
    places = (step.query_starts, step.page_starts, step.page_ids, step.last_page_tokens)
    wrapper.plan(*places, *step.shape, causal=True, q_data_type=torch.float16)
    return wrapper


def decode_us(
    lengths: list[int], heads: tuple[int, int], dim: int, layers: int, tensor_cores: bool, dependent: bool
) -> float:
    """Return the microseconds of a decoding step; with `dependent`, launches overlap with the one before them."""
    step = make_paged_step(lengths, [1] * len(lengths), heads, dim, layers)
    wrapper, out = plan_decode(step, tensor_cores), torch.empty_like(step.queries)
    return graph_us(lambda i: wrapper.run(step.queries, step.pool[i % layers], out=out, enable_pdl=dependent), layers)


def paged_prefill_us(tokens: int, heads: tuple[int, int], dim: int, layers: int) -> float:
    """Return the microseconds of causal prefill of one sequence whose keys lie in pages."""
    step = make_paged_step([tokens], [tokens], heads, dim, layers)
    wrapper, out = plan_prefill(step), torch.empty_like(step.queries)
    return graph_us(lambda i: wrapper.run(step.queries, step.pool[i % layers], out=out), layers)


def prefill_us(tokens: int, heads: tuple[int, int], dim: int, layers: int) -> float:
    """Return the microseconds of causal prefill of one sequence whose keys are one tensor."""
    queries = torch.randn(tokens, heads[0], dim, device="cuda").half()
    keys, values = torch.randn(2, layers, tokens, heads[1], dim, device="cuda").half()
    return graph_us(
        lambda i: flashinfer.single_prefill_with_kv_cache(
            queries, keys[i % layers], values[i % layers], causal=True, backend="fa3"
        ),
        layers,
    )


def check(heads: tuple[int, int], dim: int) -> None:
    """Compare every kernel that is timed with torch on random steps. Raises AssertionError."""
    step = make_paged_step([1, 16, 17, 1000], [1] * 4, heads, dim, 1)
    for tensor_cores in (True, False):
        out = plan_decode(step, tensor_cores).run(step.queries, step.pool[0])
        compare(f"decode, tensor cores {tensor_cores}", out, reference(step))
    step = make_paged_step([5, 130, 1000], [5, 130, 300], heads, dim, 1)
    compare("paged prefill", plan_prefill(step).run(step.queries, step.pool[0]), reference(step))
    step = make_paged_step([320], [320], heads, dim, 1)
    keys, values = keys_values(step, 0)
    out = flashinfer.single_prefill_with_kv_cache(step.queries, keys, values, causal=True, backend="fa3")
    compare("prefill", out, reference(step))


def compare(label: str, out: Tensor, want: Tensor) -> None:
    """Raise AssertionError unless the relative error is what float16 probabilities and output allow."""
    error = float((out.float() - want).norm() / want.norm())
    print(f"{error:.1e} of 1e-03  FlashInfer {label}", flush=True)
    assert error < 1e-3, label


def keys_values(step: PagedStep, sequence: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of one sequence in layer 0, [tokens, KV heads, dim]."""
    begin, end = step.page_starts[sequence : sequence + 2].tolist()
    rows = step.pool[0, step.page_ids[begin:end].long().cuda()].transpose(0, 1).flatten(1, 2)
    keys, values = rows[:, : (end - begin - 1) * PAGE_TOKENS + int(step.last_page_tokens[sequence])]
    return keys.contiguous(), values.contiguous()


def reference(step: PagedStep) -> Tensor:
    """Return causal attention of every sequence's last tokens over layer 0 in float32, [tokens, query heads, dim]."""
    found = []
    starts = step.query_starts.tolist()
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        keys, values = (part.float().transpose(0, 1) for part in keys_values(step, sequence))
        queries = step.queries[begin:end].float().transpose(0, 1)
        new, total = end - begin, keys.shape[1]
        seen = torch.ones(new, total, dtype=torch.bool, device=keys.device).tril(total - new)
        found.append(scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(found)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, FlashInfer {flashinfer.__version__}")
    check((32, 8), 128)


if __name__ == "__main__":
    main()
