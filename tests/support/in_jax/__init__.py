"""Programs that use JAX, each run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(name: str, *arguments: object, **environment: str) -> str:
    """Run a program of this folder, and return its output; fail if it does not end well."""
    program = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-4000:]}"
    return done.stdout
