"""The kernel that turns lists of keys into block tables, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import KINDS, random_call
from support.emulated_kernels import compiled

from cupy_flash.calls import key_lists
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.gpu.key_lists import ENTRY, KEY_LIST_DTYPE, key_list_unit
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.device import device_for_arch

THREADS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the compiled kernel."""
    return tmp_path_factory.mktemp("key_lists")


@pytest.mark.parametrize("kind", KINDS)
def test_block_tables_are_those_of_numpy(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    def compact(arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        names = tuple(arrays)
        packed = PackedStruct(KEY_LIST_DTYPE, sizes, dict(zip(names, names, strict=True)), names)
        memory = bytearray(KEY_LIST_DTYPE.itemsize)
        packed.pack_into(memory, tuple(x.ctypes.data for x in arrays.values()))
        parameters = "*static_cast<const KeyListParams*>(params)"
        run = compiled(key_list_unit(), ENTRY, parameters, folder)
        blocks = -(-sizes["lists"] * sizes["rows"] * 32 // THREADS)
        run(None, (ctypes.c_char * len(memory)).from_buffer(memory), blocks, THREADS)

    monkeypatch.setattr(key_lists.key_lists, "compact", compact)
    compared = 0
    plain = key_lists._tables_on_host

    def both(*arguments: Any) -> Any:
        nonlocal compared
        expected, found = plain(*arguments), key_lists._tables_on_gpu(*arguments)
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

    monkeypatch.setattr(key_lists, "_tables_on_host", both)
    for _ in range(8):
        random_call(rng, kind).run(np)
    assert compared == 8


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_the_kernel_compiles_without_spills(arch: str) -> None:
    cubin = compile_cubin(key_list_unit(), device_for_arch(arch))
    assert cubin.resources[ENTRY].spill_bytes == 0
