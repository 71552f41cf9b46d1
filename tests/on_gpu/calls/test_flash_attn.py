"""Functions with flash_attn's names on a GPU: CUDA graphs of torch, and work on a side stream.

`tests/differentiable/test_flash_attn.py` compares their results with the formula there, too.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
fa = pytest.importorskip("cupy_flash.flash_attn")

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 4, 64


def random(*shape: int) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def integers(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def test_a_graph_follows_lengths_tables_and_indices() -> None:
    q, k, v = random(2, 1, HEADS, DIM), random(2, 1, 2, DIM), random(2, 1, 2, DIM)
    caches = [random(12, PAGE, 2, DIM) for _ in range(2)]
    lengths, order = integers(3, 29), integers(2, 0)
    table = torch.randperm(12, device="cuda").to(torch.int32).view(3, 4)

    def call(*caches: Any) -> Any:
        return fa.flash_attn_with_kvcache(
            *(q, *caches, k, v),
            cache_seqlens=lengths,
            cache_batch_idx=order,
            block_table=table,
            causal=True,
        )

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(*caches)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = call(*caches)
    for step in range(3):
        lengths.add_(1)
        order.copy_(integers(step, (step + 1) % 3))
        table.copy_(torch.randperm(12, device="cuda").view(3, 4))
        alike = [x.clone() for x in caches]
        graph.replay()
        expected = call(*alike)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert all(map(torch.equal, caches, alike))


def test_a_training_step_is_ordered_on_a_side_stream() -> None:
    source = random(2, 300, 3, HEADS, DIM)

    def step(qkv: Any) -> Any:
        qkv = qkv.detach().requires_grad_()
        out = fa.flash_attn_qkvpacked_func(qkv * 2, causal=True, window_size=(127, 0))
        return torch.autograd.grad(out.square().sum(), qkv)[0]

    expected = step(source)
    late = torch.full_like(source, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        found = step(late)
        late.fill_(torch.nan)
        host = found.cpu()
    assert torch.equal(host, expected.cpu())
