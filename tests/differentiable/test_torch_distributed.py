"""Calls in processes of torch.distributed: fully sharded models, and local tensors of DTensor."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")


def test_processes_call_attention_on_their_tensors(device: str, tmp_path: Path) -> None:
    ranks = pytest.importorskip("support.in_torch.ranks")
    if device == "cuda" and torch.cuda.device_count() < ranks.RANKS:
        pytest.skip("each process needs a GPU")
    torch.multiprocessing.spawn(
        ranks.run, args=(str(tmp_path / "store"), device), nprocs=ranks.RANKS
    )


def test_results_of_collectives_are_waited_for(device: str) -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    inputs = [torch.randn(1, 5, 2, 4, device=device) for _ in range(3)]
    awaited = [collectives.AsyncCollectiveTensor(x) for x in inputs]
    out = ct.flash_attention(*awaited, causal=True)
    assert type(out) is torch.Tensor
    assert torch.equal(out, ct.flash_attention(*inputs, causal=True))
