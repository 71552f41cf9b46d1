"""Allocation of result arrays: their number, alignment, and which arrays overlap in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash.calls.gpu import allocate
from cupy_flash.calls.gpu.allocate import result_allocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("specs", "allocations"),
    [
        ([((3, 5), "float16"), ((7,), "float32"), ((1,), "float64")], 1),
        ([((MIB // 8,), "float16"), None, ((MIB // 8,), "float16")], 1),
        ([((MIB // 4,), "float16"), ((MIB // 4,), "float16")], 1),
        ([((MIB // 4,), "float16"), ((MIB // 4 - 1,), "float16"), ((MIB // 8,), "float16")], 3),
        ([((MIB // 4 + 1,), "float16"), ((MIB // 4,), "float16")], 2),
        ([((4, 128), "float16"), ((128,), "float16")], 1),
        ([((4, 129), "float16"), ((128,), "float16")], 2),
        ([None, ((2, MIB), "float16"), ((1,), "float16"), ((4,), "float32")], 3),
        ([((0, 4), "float32"), ((2, 0), "float16")], 1),
        ([((0, 4), "float32"), ((2, 1), "float16")], 2),
        ([None, None], 0),
    ],
)
def test_small_arrays_of_about_a_size_share_an_allocation(monkeypatch, specs, allocations):
    gpu = fake_gpu.install(monkeypatch)
    wanted = [spec and (spec[0], np.dtype(spec[1])) for spec in specs]
    new = result_allocator(wanted, uses_torch=False)
    held = []
    for _ in range(2):
        gpu.allocations.clear()
        arrays, places = new()
        assert len(gpu.allocations) == allocations
        for spec, array, place in zip(wanted, arrays, places, strict=True):
            if spec is None:
                assert (array, place) == (None, 0)
                continue
            assert (array.shape, array.dtype) == spec
            assert array.data.ptr == place
            assert place % 256 == 0
            end = place + array.size * array.itemsize
            assert any(at <= place <= end <= at + size for at, size in gpu.allocations)
            held.append((place, end))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(held)))


@pytest.mark.parametrize(
    ("sizes", "workspace", "expected"),
    [
        ((65536, 65536, 65536), 135680, [332288]),
        ((65536, 65536, 65536), 1, [196609]),
        ((65536, 65536, 65536), 4 * 65536, [458752]),
        ((65536, 65536, 65536), 4 * 65536 + 1, [196608, 262145]),
        ((1 << 18, 1 << 18, 1 << 18), 1 << 18, [MIB]),
        ((1 << 18, 1 << 18, 1 << 18), (1 << 18) + 1, [3 << 18, (1 << 18) + 1]),
        ((MIB, MIB), 100, [MIB, MIB, 100]),
        ((100,), 100, [612]),
        ((), 100, [100]),
        ((100, 200), 0, [1024]),
        ((), 0, []),
    ],
)
def test_a_workspace_that_is_not_much_larger_joins_the_results(
    monkeypatch, sizes, workspace, expected
):
    gpu = fake_gpu.install(monkeypatch)
    # The workspace follows also the results that are not requested.
    specs = [((size,), np.dtype(np.uint8)) for size in sizes] + [None]
    new = result_allocator(specs, uses_torch=False, workspace=workspace)
    for _ in range(2):
        gpu.allocations.clear()
        arrays, places = new()
        assert [size for _, size in gpu.allocations] == expected
        assert len(arrays) == len(places) == len(specs) + 1
        assert (arrays[-1] is None) == (places[-1] == 0) == (workspace == 0)
        assert (arrays[-2], places[-2]) == (None, 0)
        if not workspace:
            continue
        assert places[-1] % 512 == gpu.allocations[0][0] % 512
        # The last element owns the allocation that holds the workspace.
        ((begin, end),) = [(at, at + size) for at, size in gpu.allocations if at == arrays[-1].ptr]
        assert begin <= places[-1] <= end - workspace
        ends = [place + size for place, size in zip(places, sizes, strict=False)]
        assert all(not begin <= at <= end or at <= places[-1] for at in ends)


def test_arrays_equal_those_of_the_constructor_of_cupy():
    """CuPy has the private names that the allocation and the call keys use, also without a GPU."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 40, 1 << 20, None, 0), 512)
    make_array = allocate._array_maker()
    assert make_array is not cupy.ndarray
    for shape, dtype in (((2, 3, 4), "float16"), ((5,), "float32"), ((0, 4), "float64")):
        arrays = [make(shape, np.dtype(dtype), memory) for make in (make_array, cupy.ndarray)]
        for name in ("shape", "strides", "dtype", "size", "base", "_c_contiguous"):
            assert getattr(arrays[0], name) == getattr(arrays[1], name), name
        assert type(arrays[0]) is cupy.ndarray
        assert arrays[0].data.ptr == memory.ptr
        assert arrays[0].flags.c_contiguous
    strided = cupy.ndarray((3, 4), np.dtype("float32"), memory, (32, 4))
    assert strided._c_contiguous is False
