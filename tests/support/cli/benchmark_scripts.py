"""Scripts in the folder benchmarks/ of the checkout, imported as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[3]
# The tests may be outside of a checkout.
IN_CHECKOUT = (CHECKOUT / "benchmarks").is_dir()


def script(name: str) -> ModuleType:
    """Return a script of the folder benchmarks/. It can import the other scripts there."""
    path = CHECKOUT / "benchmarks" / name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.name)
