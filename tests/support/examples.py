"""The examples as modules and as commands."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, folder: Path = EXAMPLES) -> Any:
    """A module of the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module(name)


def call(command: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of an example's command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["example.py", *arguments])
        patch.setenv("COLUMNS", "80")
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, *capsys.readouterr()
