"""Block tables and gradients of lists of keys: the host side of `kernels_cu/cache/key_lists.cu`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.families.contract import TranslationUnit, ceil_div, source_digest
from cupy_flash.families.params import assertions
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.launch import StructLaunch
from cupy_flash.gpu.params import PackedStruct

SOURCE = "cache/key_lists.cu"
ENTRY, ADDING_ENTRY = "compact_key_lists", "add_listed"
_THREADS = 128
_WARP = 32

# Argument struct, which mirrors key_lists.cu.
KEY_LIST_DTYPE = np.dtype(
    [
        ("indices", np.uint64),
        *[(name, np.int64) for name in ("batch_stride", "query_stride", "list_stride")],
        *[(name, np.uint64) for name in ("begins", "ends", "prefixes", "sequences", "first_rows")],
        ("block_table", np.uint64),
        ("block_table_stride", np.int64),
        *[(name, np.int32) for name in ("page_size", "pages")],
        *[(name, np.uint64) for name in ("table", "keys", "counts")],
        *[(name, np.int32) for name in ("queries", "lists", "entries", "rows")],
    ],
    align=True,
)


# Argument struct of the kernel that adds gradients.
ADDED_DTYPE = np.dtype(
    [
        *[(name, np.uint64) for name in ("total", "parts", "order", "starts")],
        ("rows", np.int64),
        ("columns", np.int64),
    ],
    align=True,
)


@functools.cache
def key_list_unit() -> TranslationUnit:
    """Return the translation unit, which is the same for all calls."""
    lines = [
        f"// cupy_flash key lists, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("KeyListParams", KEY_LIST_DTYPE)),
        f'extern "C" __global__ void __launch_bounds__({_THREADS})',
        f"{ENTRY}(const __grid_constant__ KeyListParams params) {{ key_lists::compact(params); }}",
    ]
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), "key lists")


def compact(arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Enqueue the kernel on the current stream, for the current device.

    Parameters
    ----------
    arrays
        CuPy arrays by the names of the struct's pointers; a missing one is null.
    sizes
        Values of the other fields of the struct.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    lists = sizes["lists"] * sizes["rows"]
    if lists == 0:
        return
    params = PackedStruct(KEY_LIST_DTYPE, sizes, {name: name for name in arrays}, tuple(arrays))
    kernel = kernel_cache.get(key_list_unit(), {ENTRY: 0})[ENTRY]
    grid = (ceil_div(lists * _WARP, _THREADS), 1, 1)
    launch = StructLaunch(params, kernel, grid, (_THREADS, 1, 1))
    launch.run(tuple(array.data.ptr for array in arrays.values()))


@functools.cache
def adding_unit(dtype: str) -> TranslationUnit:
    """Return the translation unit of the kernel that adds gradients of float32 or float64."""
    lines = [
        f"// cupy_flash gradients of listed keys, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("AddedParams", ADDED_DTYPE)),
        f'extern "C" __global__ void __launch_bounds__({_THREADS})',
        f"{ADDING_ENTRY}(const __grid_constant__ AddedParams params) "
        f"{{ key_lists::add<{ {'float32': 'float', 'float64': 'double'}[dtype] }>(params); }}",
    ]
    return TranslationUnit("\n".join(lines) + "\n", (ADDING_ENTRY,), f"gradients of lists {dtype}")


def add_listed(total: Any, parts: Any, order: Any, starts: Any) -> None:
    """Enqueue the kernel that adds parts to the rows of `total` in a fixed order.

    Parameters
    ----------
    total : CuPy array, shape (rows, ...)
        Sums, contiguous, of float32 or float64; the kernel adds to them.
    parts : CuPy array, shape (R, K, ...)
        Summands, contiguous, with the dtype and the last axes of `total`.
    order : CuPy array of int64, shape (R * K,)
        Index of each part, sorted by its row.
    starts : CuPy array of int64, shape (rows + 1,)
        Index in `order` of the first part of each row.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    arrays = {"total": total, "parts": parts, "order": order, "starts": starts}
    rows, columns = len(total), total[0].size if len(total) else 0
    if rows * columns == 0:
        return
    sizes = {"rows": rows, "columns": columns}
    params = PackedStruct(ADDED_DTYPE, sizes, {name: name for name in arrays}, tuple(arrays))
    kernel = kernel_cache.get(adding_unit(str(total.dtype)), {ADDING_ENTRY: 0})[ADDING_ENTRY]
    grid = (ceil_div(rows * columns, _THREADS), 1, 1)
    launch = StructLaunch(params, kernel, grid, (_THREADS, 1, 1))
    launch.run(tuple(array.data.ptr for array in arrays.values()))
