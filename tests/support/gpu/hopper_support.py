"""Helpers for the tests of the Hopper family."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from cupy_flash.families import FORWARD
from cupy_flash.families.hopper import HopperTile
from support.gpu.gpu_support import Case, current_device


def marks(dtype: str = "float16", head_dim: int = 64) -> list[Any]:
    """Return the pytest marks of a module that tests this dtype and head_dim."""
    case = Case("hopper", dtype, head_dim=head_dim, head_dim_v=head_dim)
    reason = "the hopper family needs sm_90"
    return [pytest.mark.gpu, pytest.mark.skipif(not case.is_supported(), reason=reason)]


def random_chunks(
    random_case: Callable[[random.Random], Case], seed: int, *, problems: int, chunk: int
) -> list[list[Case]]:
    """Return `problems` random cases, which the seed determines, in chunks of one test each.

    Cases with the same kernel are adjacent, so that each worker of xdist compiles few kernels.
    """
    draw = random.Random(seed)
    cases = [random_case(draw) for _ in range(problems)]
    cases.sort(key=lambda case: (case.dtype, case.head_dim, case.head_dim_v, case.causal))
    return [cases[first : first + chunk] for first in range(0, problems, chunk)]


def tiled(case: Case, fields: Iterable[dict[str, int]]) -> Iterator[Case]:
    """Yield the case with a tile for each set of fields, if legal, with as many stages as fit."""
    family, problem, device = FORWARD["hopper"], case.problem(), current_device()
    for some in fields:
        tiles = (
            HopperTile(**({"turns": int(some["Br"] > 64)} | some | {"stages": stages}))
            for stages in range(8, 1, -1)
        )
        legal = (t for t in tiles if family.why_not_tile(problem, device, t) is None)
        if tile := next(legal, None):
            yield dataclasses.replace(case, tile=tile)
