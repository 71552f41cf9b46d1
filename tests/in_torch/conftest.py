"""Fixtures of the tests of `torch.compile`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_compiled_graphs() -> Iterator[None]:
    """Discard what a test compiled: each function may be compiled a limited number of times."""
    yield
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.modules["torch._dynamo"].reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # PyTorch's compiler uses deprecated functions of PyTorch.
    for item in items:
        if item.path.parent.name == "in_torch":
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
