"""Tests of the KV work of `decode` thread blocks if windows start elsewhere in each sequence.

The kernel's code runs on the host.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draws import few_then_slow

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.problem.mask import Mask

FOLDER = Path(__file__).resolve().parent / "on_cpu"
COMPILER = shutil.which("g++")
UNIT = 128

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("cpu") / "kv_partition_window"
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options += [f"-I{path}" for path in (KERNEL_DIR, FOLDER)]
    source = FOLDER / "kv_partition_window.cpp"
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("batch", few_then_slow([8, 1, 2, 33, 70], 1))
def test_every_unit_from_the_first_visible_key_on_is_processed_once(
    program: Path, batch: int, rng: Any
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
    lines = [
        " ".join(map(str, (of, has, batch, keys, left, blocks, *offsets)))
        for of, has, left, blocks, offsets in launches
    ]
    done = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = done.stdout.split("\n\n")[:-1] if done.stdout.strip() else []
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
