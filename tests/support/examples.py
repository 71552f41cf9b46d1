"""The examples, imported as modules and run as commands."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, folder: Path = EXAMPLES) -> Any:
    """Return a module of the examples, or of another folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module(name)


def call(command: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run an example's command; return its exit code, output and error output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["example.py", *arguments])
        patch.setenv("COLUMNS", "80")
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, *capsys.readouterr()
