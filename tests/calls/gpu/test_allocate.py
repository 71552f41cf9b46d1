"""Allocation of result arrays: their number, alignment, and which arrays overlap in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.gpu import fake_gpu

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
