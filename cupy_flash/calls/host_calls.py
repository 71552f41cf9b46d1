"""What calls on packed and cached sequences do alike with arrays in host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.calls.backends import cpu_tile, host_runs_on_gpu
from cupy_flash.calls.sequence_arrays import CacheArrays, CacheOptions, VarlenArrays, VarlenOptions
from cupy_flash.planning.planner import is_served
from cupy_flash.problem.device import device_for_id
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


def all_cupy(arrays: VarlenArrays | CacheArrays) -> bool:
    """Whether every array that is given is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and {*map(type, arrays)} <= {cupy.ndarray, type(None)}


def runs_on_gpu(problem: Problem, options: VarlenOptions | CacheOptions, backend: str) -> bool:
    """Whether a GPU computes arrays in host memory: where it is left open, one that can."""
    if not host_runs_on_gpu(backend):
        return False
    if backend == "gpu" or options.family is not None:
        return True
    import cupy

    return is_served(problem, device_for_id(cupy.cuda.runtime.getDevice()))


# Problems of calls on host memory kept for reuse, as those on a GPU are in `launch_sequences`.
_MAX_KEPT = 1024
_kept: dict[Any, Problem] = {}


def kept_problem(
    make: Callable[[Any, Any], Problem],
    arrays: VarlenArrays | CacheArrays,
    options: VarlenOptions | CacheOptions,
) -> Problem:
    """What ``make`` finds, once for all arrays in host memory of these shapes, strides and dtypes.

    Finding it takes 70 us, twice what a short sequence takes to compute.
    """
    facts = [None if x is None else (x.shape, x.strides, x.dtype) for x in arrays]
    key = (make, *facts, options)
    problem = _kept.get(key)
    if problem is None:
        problem = make(arrays, options)
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = problem
    return problem


def requested_tile(problem: Problem, options: VarlenOptions | CacheOptions) -> Tile | None:
    """The tile that was asked for, or None; and an error for a family that is not the CPU's."""
    if options.tile is None and options.family in (None, "cpu"):
        return None
    tile = cpu_tile(problem, options.family, options.tile)
    return None if options.tile is None else tile


def new_lse(problem: Problem, shape: tuple[int, ...]) -> np.ndarray:
    """An array for the log-sum-exp, of the dtype that goes with the problem's."""
    return np.empty(shape, np.float64 if problem.dtype == "float64" else np.float32)


def require_writable(name: str, array: np.ndarray) -> None:
    """Raise ValueError for a read-only array."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; pass an array that can be written")
