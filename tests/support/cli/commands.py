"""Commands of `cupy-flash`, run in the process of the tests, and the files that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from cupy_flash.cli.main import main


def run(*arguments: str | Path, code: int | None = 0, **options: Any) -> Result:
    """Return the result of `cupy-flash` with `arguments`; fail unless its exit code is `code`.

    `code` None allows any exit code. `options` are those of click's `invoke`.
    """
    line = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, line, **{"catch_exceptions": False} | options)
    assert code in (None, result.exit_code), result.output
    return result


def refusal(*arguments: str | Path, code: int = 2, **options: Any) -> str:
    """Return the one line that a command with a wrong option writes to stderr."""
    return only_line(run(*arguments, code=code, **options))


def only_line(result: Result) -> str:
    """Return what a command wrote to stderr; fail unless it is one line."""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def written(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def record_of(path: Path, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Return the record that a command writes to `path`; fail unless its exit code is `code`."""
    run(*arguments, "--output", path, code=code)
    return written(path)


def input_options(folder: Path, **arrays: np.ndarray) -> tuple[str, str]:
    """Save arrays to `qkv.npz` in a folder, and return the options that make them the inputs."""
    path = folder / "qkv.npz"
    np.savez(path, **arrays)
    return "--input", str(path)


def float16_inputs() -> dict[str, np.ndarray]:
    """Return random q, k and v of grouped-query attention with ragged lengths."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((37, 6), (53, 3), (53, 3)))
    return {name: x.astype(np.float16) for name, x in zip("qkv", (q, k, v), strict=True)}
