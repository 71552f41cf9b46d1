"""Tests of the KV work of `decode` thread blocks if windows start elsewhere in each sequence.

The kernel's code runs on the host.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from support.draws import few_then_slow
from support.host_programs import HostProgram, needs_host_compiler

from cupy_flash.problem.mask import Mask

UNIT = 128

pytestmark = needs_host_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    return HostProgram("kv_partition_window", tmp_path_factory)


@pytest.mark.parametrize("batch", few_then_slow([8, 1, 2, 33, 70], 1))
def test_every_unit_from_the_first_visible_key_on_is_processed_once(
    program: HostProgram, batch: int, rng: Any
) -> None:
    keys = int(rng.integers(1, 9000))
    positions = [
        1000 * np.arange(batch),
        8191 - 1000 * np.arange(batch),
        rng.integers(-500, keys + 500, batch),
    ]
    launches = [
        (has_seqlens, has_lengths, left, blocks, offsets)
        for has_seqlens, has_lengths in ((0, 0), (1, 0), (1, 1))
        for left, blocks in itertools.product((0, 511), (4, 32, 132))
        for offsets in positions
    ]
    lines = (
        " ".join(map(str, (of, has, batch, keys, left, blocks, *offsets)))
        for of, has, left, blocks, offsets in launches
    )
    results = program.output(lines).split("\n\n")[:-1]
    assert len(results) == len(launches)
    for (*_, left, _, offsets), text in zip(launches, results, strict=True):
        units: dict[int, list[int]] = defaultdict(list)
        for line in text.splitlines():
            b, begin, end = map(int, line.split())
            units[b] += range(begin, end)
        for b, offset in enumerate(offsets):
            first = Mask(1, keys, causal=True, q_offset=int(offset), left=left).begin(0) // UNIT
            last = max(-(-keys // UNIT), first + 1)
            assert sorted(units.pop(b)) == list(range(first, last))
        assert not units
