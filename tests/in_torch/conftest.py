"""Fixtures of the tests of `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.in_torch.compiler import discard_compiled_graphs
from support.in_torch.devices import device

__all__ = ["device"]  # fixture


@pytest.fixture(autouse=True)
def _without_compiled_graphs() -> Iterator[None]:
    """Discard what a test compiled: each function may be compiled a limited number of times."""
    yield
    discard_compiled_graphs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # PyTorch's compiler uses deprecated functions of PyTorch.
    for item in items:
        if item.path.parent.name == "in_torch":
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
