"""Head dimensions that each kernel family supports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from support_cells import ARCHS

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.families import FAMILIES
from cupy_flash.problem.arrays import DTYPES, ArraySpec, Tensors
from cupy_flash.problem.backward import with_tangents
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import MAX_HEAD_DIM, Problem

# Directions whose families the page lists. The families of a log-sum-exp without output are those
# of forward calls, except for one that the calls of `attention_received` use.
DIRECTIONS = ("forward", "backward", "tangent", "received")
# All kernels support head dims that are multiples of this number, whose rows are aligned.
STEP = 8
# Head dimension of the kernels that compile fast.
SMALL = 16


class Dims(NamedTuple):
    """Head dimensions of a family for one dtype, with head_dim_v equal to head_dim.

    Attributes
    ----------
    ranges
        Smallest and largest head_dim of each range, by architecture.
    any_alignment
        Whether rows need not be aligned to 16 bytes.
    """

    ranges: dict[int, tuple[tuple[int, int], ...]]
    any_alignment: bool


def kernels() -> Iterator[tuple[str, str, str]]:
    """Yield the direction, the family and the name of each kernel that the page lists."""
    for direction in DIRECTIONS:
        for family in FAMILIES[direction]:
            yield direction, family, kernel_name(family, direction)


def served() -> Iterator[tuple[int, str, str]]:
    """Yield the architecture, direction and family of each kernel that the planner may choose."""
    for direction, family, _ in kernels():
        if FAMILIES[direction][family].automatic:
            for arch in ARCHS:
                if any(is_served(direction, family, dtype, arch, SMALL) for dtype in DTYPES):
                    yield arch, direction, family


@functools.cache
def plain_problem(direction: str, is_cache: bool, dtype: str, head_dim: int) -> Problem:
    """Return a problem without any feature, of a KV cache with one query if `is_cache`."""
    case = Case(dtype, 4, 4096, 4096, 16, 16, head_dim, head_dim)
    if is_cache:
        case = dataclasses.replace(case, seqlen_q=1, kind="cache")
    if direction == "backward":
        case = dataclasses.replace(case, direction="backward")
    problem = case.problem()
    if direction == "received":
        tensors = Tensors(**{name: problem.tensors[name] for name in ("q", "k")})
        return dataclasses.replace(problem, tensors=tensors, received="heads")
    if direction == "tangent":
        specs = [ArraySpec.contiguous(shape, dtype) for shape in case.bshd_shapes]
        return with_tangents(problem, dict(zip(ROWS, specs, strict=True)), specs[0])
    return problem


def dims_of(direction: str, family: str, dtype: str) -> Dims | None:
    """Return the head dimensions of a family for a dtype; None if it does not support the dtype."""
    serves = functools.partial(is_served, direction, family, dtype)
    found = {arch: tuple(_ranges(functools.partial(serves, arch))) for arch in ARCHS}
    ranges = {arch: its_ranges for arch, its_ranges in found.items() if its_ranges}
    if not ranges:
        return None
    arch, its_ranges = next(iter(ranges.items()))
    return Dims(ranges, serves(arch, its_ranges[-1][1] - 1))


def _ranges(serves: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Yield the smallest and the largest head_dim of each range that is served."""
    all_dims = range(STEP, MAX_HEAD_DIM + 1, STEP)
    for is_range, dims in itertools.groupby(all_dims, serves):
        if is_range:
            first, *others = dims
            yield (1 if first == STEP else first - STEP + 1), others[-1] if others else first


def is_served(direction: str, family: str, dtype: str, arch: int, head_dim: int) -> bool:
    """Return whether a family supports calls without any feature."""
    problem = plain_problem(direction, family == "decode", dtype, head_dim)
    return FAMILIES[direction][family].why_not(problem, device_for_arch(arch)) is None


def all_dims() -> dict[tuple[str, str], dict[str, Dims]]:
    """Return the head dimensions by (direction, family), and then by dtype."""
    return {
        (direction, family): {
            dtype: dims
            for dtype in DTYPES
            if (dims := dims_of(direction, family, dtype)) is not None
        }
        for direction, family, _ in kernels()
    }
