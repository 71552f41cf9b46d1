"""The scripts of the checkout's folder benchmarks/, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[2]
# The tests may stand outside of one.
IN_CHECKOUT = (CHECKOUT / "benchmarks").is_dir()


def script(name: str) -> ModuleType:
    """A module of the folder benchmarks/, which finds its neighbours there."""
    folder = str(CHECKOUT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
