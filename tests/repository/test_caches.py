"""Caches without a bound hold no entries whose number grows with the arguments of calls."""

from __future__ import annotations

import ast
from pathlib import Path

import cupy_flash

PACKAGE = Path(cupy_flash.__file__).parent

# Functions with an unbounded cache, and the few values that their arguments can have.
FEW = {
    "_numbers_of_codes": "dtypes of 8 bits and dtypes that attention is computed in",
    "_ones": "powers of two and dtypes of scratch",
    "_parts_of_file": "files of the package",
    "_syntax": "files of the package",
    "_warn_of_cache": "folders of kernels",
    "adding_unit": "dtypes of sums",
    "compute_dtype": "dtypes that attention is computed in",
    "digest": "backends on the CPU",
    "device_for_id": "GPUs",
    "driver_function": "functions of the driver",
    "lowest": "dtypes of scratch",
    "source_digest": "files of the package",
}


def remembering() -> dict[str, str]:
    """Return functions with arguments and an unbounded cache, and the files that define them."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not (node.args.args or node.args.vararg):
                continue
            texts = {ast.unparse(decorator) for decorator in node.decorator_list}
            unbounded = {"functools.cache", "functools.lru_cache(None)"}
            unbounded |= {"functools.lru_cache(maxsize=None)"}
            if texts & unbounded:
                found[node.name] = path.name
    return found


def test_what_is_remembered_without_a_bound_is_known_to_be_little() -> None:
    assert remembering().keys() == FEW.keys()
