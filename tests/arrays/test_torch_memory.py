"""Memory of torch for arrays of CuPy, with stand-ins for both libraries."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_flash.arrays import torch_arrays
from cupy_flash.calls.check import whole_call


class _Memory:
    """Memory that an allocator of CuPy returns."""

    def __init__(self, allocate: Callable[..., int], free: Callable[..., None], size: int) -> None:
        self.address, self._free = allocate(size, 1), free

    def __del__(self) -> None:
        self._free(self.address, 1)


def test_arrays_in_the_context_are_allocated_and_freed_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[Any, ...]] = []
    current: list[Any] = ["pool"]

    class Allocator:
        def __init__(self, allocate: Any, free: Any) -> None:
            self.malloc = lambda size: _Memory(allocate, free, size)

    @contextlib.contextmanager
    def using_allocator(allocator: Any) -> Iterator[None]:
        current.append(allocator)
        yield
        current.pop()

    cuda = SimpleNamespace(PythonFunctionAllocator=Allocator, using_allocator=using_allocator)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            caching_allocator_alloc=lambda *x: events.append(x) or 4096,
            caching_allocator_delete=lambda *x: events.append(x),
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch_arrays, "_cuda", lambda: cuda)
    monkeypatch.setattr(torch_arrays, "current_stream", lambda device: 70 + device)
    torch_arrays._torch_allocator.cache_clear()
    try:
        with torch_arrays.with_torch_memory():
            memory = current[-1](100)
        assert current == ["pool"]
        # Size, device and stream.
        assert events == [(100, 1, 71)]
        assert memory.address == 4096
        del memory
        assert events[1:] == [(4096,)]
    finally:
        torch_arrays._torch_allocator.cache_clear()


@pytest.mark.parametrize("captures", [False, True])
def test_only_captured_calls_of_tensors_use_memory_of_torch(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    monkeypatch.setattr(whole_call, "is_torch_on_gpu", lambda q: isinstance(q, str))
    monkeypatch.setattr(whole_call, "is_capturing", lambda: captures)
    monkeypatch.setattr(whole_call, "on_torch_stream", lambda name, q: context("stream"))
    monkeypatch.setattr(whole_call, "with_torch_memory", lambda: context("memory"))
    with whole_call.on_stream_of_tensors(np.zeros(1)):
        assert not entered
    with whole_call.on_stream_of_tensors("tensor"):
        assert entered == ["stream", "memory"][: 1 + captures]
