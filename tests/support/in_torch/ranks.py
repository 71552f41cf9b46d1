"""Functions that processes of torch.distributed run, each on its own device."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import cupy_flash.torch as ct

RANKS = 2


class Block(torch.nn.Module):
    """Attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.outer = torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        """Return the result of the layer for a batch (batch, seqlen, 16)."""
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 4)).unbind(-3)
        return x + self.outer(ct.flash_attention(q, k, v, causal=True).flatten(-2))


def run(rank: int, place: str, device: str) -> None:
    """Join the group whose store is the file `place`, and run all checks."""
    torch.manual_seed(0)
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{place}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh(device, (RANKS,))
        check_sharded_parameters(mesh, rank, device)
        check_sharded_heads(mesh, device)
    finally:
        dist.destroy_process_group()
    # While the interpreter ends, PyTorch 2.14 sometimes aborts, because a thread of its own is not
    # joined ("terminate called without an active exception").
    os._exit(0)


def check_sharded_parameters(mesh: Any, rank: int, device: str) -> None:
    """Compare the gradients of a fully sharded model with those of the model on all samples."""
    model = torch.nn.Sequential(Block(), Block()).to(device)
    x = torch.randn(2 * RANKS, 7, 16, dtype=torch.float64, device=device)
    alone = copy.deepcopy(model)
    alone(x).square().mean().backward()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x.chunk(RANKS)[rank]).square().mean().backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(found.grad, DTensor)
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


def check_sharded_heads(mesh: Any, device: str) -> None:
    """Compare calls on heads that are sharded with a call on all heads."""
    shapes = (2, 7, 4, 6), (2, 9, 2, 6), (2, 9, 2, 3)
    whole = [torch.randn(s, dtype=torch.float64, device=device) for s in shapes]
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = ct.flash_attention(*leaves, causal=True)
    expected.square().sum().backward()
    heads = [Shard(2)]
    inputs = [distribute_tensor(x, mesh, heads).requires_grad_() for x in whole]

    def local(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q, k, v, causal=True)

    mapped = local_map(
        local, out_placements=heads, in_placements=(heads, heads, heads), device_mesh=mesh
    )
    for call in (mapped, lambda *xs: _from_local(local(*(x.to_local() for x in xs)), mesh, heads)):
        out = call(*inputs)
        torch.testing.assert_close(out.full_tensor(), expected)
        found = torch.autograd.grad(out.square().sum().full_tensor(), inputs)
        for gradient, leaf in zip(found, leaves, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), leaf.grad)
    for function in (ct.flash_attention, ct.scaled_dot_product_attention):
        with pytest.raises(TypeError, match="is a DTensor, of which this process has a part"):
            function(*inputs)


def _from_local(out: Any, mesh: Any, placements: Any) -> Any:
    return DTensor.from_local(out, mesh, placements)
