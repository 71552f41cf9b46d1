"""CuPy, imported at the first use of an attribute, so that tests can be collected without it."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("cupy"), name)
