"""Shared fixtures of the tests of gradients: PyTorch's devices, and its compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.in_torch.compiler import discard_compiled_graphs
from support.in_torch.devices import device

__all__ = ["device"]  # fixture


@pytest.fixture(autouse=True, scope="module")
def _without_compiled_graphs() -> Iterator[None]:
    """Discard what `torch.compile` compiled for a file: its state changes errors of later files."""
    yield
    discard_compiled_graphs()
