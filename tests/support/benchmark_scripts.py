"""The scripts of the checkout's folder benchmarks/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# The tests may stand outside of one.
IN_CHECKOUT = (CHECKOUT / "benchmarks").is_dir()


def script(name: str) -> ModuleType:
    """A module of the folder benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def render() -> ModuleType:
    """What makes the page of benchmarks."""
    if not IN_CHECKOUT:
        pytest.skip("the tests stand outside a checkout")
    return script("render")
