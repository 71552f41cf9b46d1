"""Tests of the layout of the sources: no include cycles, no missing headers, small folders."""

from __future__ import annotations

import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

from cupy_flash.families.contract import KERNEL_DIR

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FOLDERS = ("cupy_flash", "cli", "kernels_cu", "tests", "examples", "benchmarks")
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
MAX_FILES = 16  # in a folder


def included_by(folder: Path) -> dict[str, list[str]]:
    """Return for each CUDA file below a folder which files it includes, as paths in the folder."""
    return {
        path.relative_to(folder).as_posix(): INCLUDE.findall(path.read_text())
        for path in sorted(folder.rglob("*.cu*"))
    }


def test_every_included_file_exists() -> None:
    includes = included_by(KERNEL_DIR)
    assert len(includes) > 50
    missing = {
        name: absent
        for name, names in includes.items()
        if (absent := [header for header in names if header not in includes])
    }
    assert not missing


def test_includes_have_no_cycle() -> None:
    TopologicalSorter(included_by(KERNEL_DIR)).prepare()


def test_a_cycle_of_includes_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "tile"
    folder.mkdir()
    (tmp_path / "a.cu").write_text('#include "tile/b.cuh"\n')
    (folder / "b.cuh").write_text('#pragma once\n#include "tile/c.cuh"\n')
    (folder / "c.cuh").write_text('// A comment\n#include "tile/b.cuh"\n')
    with pytest.raises(CycleError):
        TopologicalSorter(included_by(tmp_path)).prepare()


@pytest.mark.skipif(not IN_CHECKOUT, reason="outside of a checkout")
def test_folders_have_at_most_16_files() -> None:
    paths = [path for folder in FOLDERS for path in (CHECKOUT / folder).rglob("*")]
    paths = [path for path in paths if path.suffix in SUFFIXES and path.name != "__init__.py"]
    sizes = Counter(path.parent for path in paths)
    assert len(sizes) > len(FOLDERS)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}
