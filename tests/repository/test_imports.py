"""Imports between packages and modules follow the rules of docs/engineering/architecture.md."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Packages that each package may import; all may import `errors` and `opaque`, too.
MAY_IMPORT = {
    "flash_attn": {"torch", "calls", "arrays"},
    "torch": {"api", "calls", "differentiable", "folding", "arrays", "mods", "problem"},
    "parallel": {"api", "calls", "gpu", "arrays", "mods", "problem"},
    "api": {"calls", "reference", "planning", "mods", "problem"},
    "jax": {
        *("api", "calls", "differentiable", "folding", "gpu"),
        *("planning", "arrays", "mods", "problem"),
    },
    "calls": {"gpu", "cpu", "planning", "families", "arrays", "mods", "problem"},
    "gpu": {"planning", "families", "problem"},
    "cpu": {"planning", "families", "arrays", "mods", "problem"},
    "reference": {"arrays", "mods", "problem"},
    "planning": {"families", "problem"},
    "families": {"problem"},
    "arrays": {"problem"},
    "mods": {"arrays", "problem"},
    "problem": set[str](),
}
CUPY = {"gpu", "arrays"}


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the full names of the modules that a file imports anywhere."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            are_modules = [(ROOT / (name.replace(".", "/") + ".py")).exists() for name in names]
            found += (
                name if is_module else module
                for name, is_module in zip(names, are_modules, strict=True)
            )
    return tuple(found)


def modules(folder: str) -> dict[str, Path]:
    """Return the files below a folder by module name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


LIBRARY = modules("cupy_flash")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may_import(package: str) -> None:
    files = {name: path for name, path in LIBRARY.items() if name.split(".")[1:2] == [package]}
    assert files
    for name, path in files.items():
        packages = {m.split(".")[1] for m in imported(path) if m.startswith("cupy_flash.")}
        strangers = packages - MAY_IMPORT[package] - {package, "errors", "opaque"}
        assert not strangers, f"{name} imports {strangers}"
        roots = {module.partition(".")[0] for module in imported(path)}
        assert package in CUPY or "cupy" not in roots, f"{name} imports CuPy"


def test_every_package_has_its_rule() -> None:
    packages = {name.split(".")[1] for name in LIBRARY if name.count(".") > 1}
    assert packages == set(MAY_IMPORT)


def test_the_library_does_not_know_its_command_line() -> None:
    users = {name for name, path in LIBRARY.items() if any(".cli" in m for m in imported(path))}
    assert users == {"cupy_flash.__main__"}


@pytest.mark.parametrize("folder", ["cupy_flash", "cli"])
def test_modules_do_not_import_each_other_in_a_circle(folder: str) -> None:
    graph = {name: set(imported(path)) - {name} for name, path in modules(folder).items()}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done or name not in graph:
            return
        for module in sorted(graph[name]):
            walk(module, (*path, name))
        done.add(name)

    for name in graph:
        walk(name, ())
