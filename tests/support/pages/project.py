"""Settings of the project in `pyproject.toml`."""

from __future__ import annotations

import sys
from typing import Any

from support.cli.benchmark_scripts import CHECKOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def project_settings() -> dict[str, Any]:
    """Return the tables of the checkout's `pyproject.toml`."""
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
