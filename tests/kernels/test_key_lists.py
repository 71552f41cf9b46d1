"""Kernels that turn lists of keys into block tables, and that add gradients, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import KINDS, in_pages, random_call
from support.emulated_kernels import compiled

from cupy_flash.calls.key_lists import tables
from cupy_flash.families.contract import TranslationUnit
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.gpu.key_lists import (
    ADDED_DTYPE,
    ADDING_ENTRY,
    ENTRY,
    KEY_LIST_DTYPE,
    adding_unit,
    key_list_unit,
)
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.device import device_for_arch

THREADS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the compiled kernel."""
    return tmp_path_factory.mktemp("key_lists")


def run(
    folder: Path,
    unit: TranslationUnit,
    entry: str,
    struct: str,
    dtype: np.dtype,
    arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    threads: int | None = None,
) -> None:
    """Run a kernel that takes one struct, by default with a thread for each element of `total`."""
    names = tuple(arrays)
    packed = PackedStruct(dtype, sizes, dict(zip(names, names, strict=True)), names)
    memory = bytearray(dtype.itemsize)
    packed.pack_into(memory, tuple(x.ctypes.data for x in arrays.values()))
    function = compiled(unit, entry, f"*static_cast<const {struct}*>(params)", folder)
    count = arrays["total"].size if threads is None else threads
    buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
    function(None, buffer, -(-count // THREADS), THREADS)


@pytest.mark.parametrize("kind", KINDS)
def test_block_tables_are_those_of_numpy(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    def compact(arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        threads = sizes["lists"] * sizes["rows"] * 32
        struct = "KeyListParams"
        run(folder, key_list_unit(), ENTRY, struct, KEY_LIST_DTYPE, arrays, sizes, threads)

    monkeypatch.setattr(tables.key_lists, "compact", compact)
    compared = with_keys = 0
    plain = tables._tables_on_host

    def both(*arguments: Any) -> Any:
        nonlocal compared
        expected, found = plain(*arguments), tables._tables_on_gpu(*arguments)
        np.testing.assert_array_equal(found.counts, expected.counts)
        seen = np.arange(expected.rows.shape[2]) < expected.counts[..., None]
        for name, after in (("rows", -1), ("keys", 0)):
            table = getattr(found, name)
            if table is None:
                continue
            np.testing.assert_array_equal(table[seen], getattr(expected, name)[seen])
            assert (table[~seen] == after).all()
        compared += 1
        return found

    monkeypatch.setattr(tables, "_tables_on_host", both)
    for number in range(8):
        call = random_call(rng, kind, has_positions=number < 5)
        if "block_table" in call.arguments and number >= 5:
            call = in_pages(call)
        call.run(np)
        with_keys += call.arguments.get("max_seqlen_k", 1) > 0
    assert compared == with_keys > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parts_are_added_in_their_order(dtype: str, folder: Path, rng: np.random.Generator) -> None:
    for _ in range(3):
        rows, parts, columns = (int(x) for x in rng.integers(1, [30, 200, 20]))
        total = rng.standard_normal((rows, columns)).astype(dtype)
        added = rng.standard_normal((parts, columns)).astype(dtype)
        # Parts of row `rows` are of none.
        of_part = rng.integers(0, rows + 1, parts)
        expected = total.copy()
        np.add.at(expected, of_part[of_part < rows], added[of_part < rows])
        order = np.argsort(of_part, kind="stable")
        starts = np.searchsorted(of_part[order], np.arange(rows + 1))
        arrays = {"total": total, "parts": added, "order": order, "starts": starts}
        sizes = {"rows": rows, "columns": columns}
        struct = "AddedParams"
        run(folder, adding_unit(dtype), ADDING_ENTRY, struct, ADDED_DTYPE, arrays, sizes)
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_the_kernels_compile_without_spills(arch: str) -> None:
    for unit in (key_list_unit(), adding_unit("float32"), adding_unit("float64")):
        cubin = compile_cubin(unit, device_for_arch(arch))
        assert cubin.resources[unit.main_entry].spill_bytes == 0
