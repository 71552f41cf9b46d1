"""Choice of the backend for the argument `backend`, and of the tile of the CPU backend."""

from __future__ import annotations

from collections.abc import Iterable

from cupy_flash.cpu.plan import choose_cpu_tile
from cupy_flash.errors import UnsupportedError
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import FrozenTile, Tile

BACKENDS = ("auto", "gpu", "cpu")


def require_backend(backend: str) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")


def require_gpu_backend(backend: str) -> None:
    """Raise ValueError if the backend is "cpu", because the arrays are in GPU memory."""
    if backend == "cpu":
        raise ValueError("backend is 'cpu', but the arrays lie in GPU memory; pass NumPy arrays")


def host_runs_on_gpu(backend: str) -> bool:
    """Return whether arrays in host memory are computed on a GPU.

    Raises
    ------
    UnsupportedError
        If the backend is "gpu" and no GPU is available.
    """
    if backend == "gpu" and (reason := gpu_unavailable()):
        raise UnsupportedError(f"backend is 'gpu', but {reason}")
    return backend == "gpu" or (backend == "auto" and gpu_unavailable() is None)


def cpu_tile(problem: Problem, family: str | None, tile: FrozenTile) -> Tile:
    """Return the tile of the CPU backend: the requested one, the tuned one, or its default.

    Raises
    ------
    ValueError
        If the family is unknown, or the tile does not fit.
    UnsupportedError
        If the family is one of GPU kernels.
    """
    require_cpu_family(family, FORWARD)
    return choose_cpu_tile(problem, tile)


def require_cpu_family(family: str | None, families: Iterable[str]) -> None:
    """Raise as `cpu_tile` does unless the family is None or "cpu"; `families` run on a GPU."""
    if family not in (None, "cpu", *families):
        raise ValueError(f"unknown family {family!r}; expected one of {', '.join(families)}, cpu")
    if family not in (None, "cpu"):
        raise UnsupportedError(
            f"family {family!r} is a GPU kernel, but the CPU backend computes this"
            + (f": {reason}" if (reason := gpu_unavailable()) else "")
        )
