"""Calls in processes of torch.distributed: fully sharded models, and local tensors of DTensor."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy_flash.torch")


def test_processes_call_attention_on_their_tensors(device: str, tmp_path: Path) -> None:
    ranks = pytest.importorskip("support.torch_ranks")
    if device == "cuda" and torch.cuda.device_count() < ranks.RANKS:
        pytest.skip("each process needs a GPU")
    torch.multiprocessing.spawn(
        ranks.run, args=(str(tmp_path / "store"), device), nprocs=ranks.RANKS
    )
