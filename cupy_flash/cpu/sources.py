"""Source files of the CPU backend, and their digest, which tuned tiles and records refer to."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORWARD = (
    "cpu/varlen.py",
    "cpu/forward.py",
    "cpu/thread_pool.py",
    "cpu/untiled.py",
    "cpu/tiled.py",
    "cpu/padding.py",
    "cpu/forward_pass.py",
    "arrays/quantized.py",
    "arrays/numpy_errors.py",
    "cpu/rowwise.py",
    "cpu/row_results.py",
    "arrays/sequences.py",
    "cpu/batching.py",
    "mods/on_arrays/bound_modifications.py",
    "mods/on_arrays/dropout.py",
    "mods/on_arrays/scores.py",
    "mods/on_arrays/block_visibility.py",
    "problem/mask.py",
)
#: Files of the package that determine the results and the speed of the CPU backend, by direction.
SOURCES = {
    "forward": _FORWARD,
    "backward": (
        *_FORWARD,
        "cpu/backward/untiled.py",
        "cpu/backward/backward_pass.py",
        "cpu/backward/tiled.py",
        "cpu/backward/gradients.py",
        "cpu/backward/ordered_sum.py",
        "mods/on_arrays/score_derivatives.py",
    ),
}


@functools.cache
def digest(direction: str = "forward") -> str:
    """Return a digest of sixteen hex digits over the syntax of the `SOURCES` of a direction.

    Comments, docstrings, formatting and file names do not change the digest. All versions of Python
    compute the same digest.
    """
    package = Path(__file__).parents[1]
    text = "".join(_syntax(package / name) for name in SOURCES[direction])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _syntax(path: Path) -> str:
    parts: list[str] = []
    _write(ast.parse(path.read_bytes()), parts.append)
    return "\0".join([*parts, ""])


def _write(node: Any, write: Callable[[str], None]) -> None:
    """Write a syntax tree as text, without docstrings and other strings that are statements.

    Unlike `ast.dump`, this omits empty fields, because they differ between versions of Python.
    """
    if isinstance(node, list):
        write("[")
        for item in node:
            if not _is_docstring(item):
                _write(item, write)
        write("]")
    elif isinstance(node, ast.AST):
        write(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:
                write(name)
                _write(value, write)
    else:
        write(repr(node))


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
