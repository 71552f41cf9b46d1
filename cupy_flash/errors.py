"""Exceptions that the library defines."""

from __future__ import annotations


class CupyFlashError(Exception):
    """Base class of the library's exceptions."""


class CompileError(CupyFlashError, RuntimeError):
    """Failed compilation of a kernel.

    The message contains the name of the unit, the compiler's log and the source of the unit.
    """


class UnsupportedError(CupyFlashError, ValueError):
    """Problem that no kernel family, or not the requested family, supports on this machine."""


class DriverError(CupyFlashError, RuntimeError):
    """Failed call of the CUDA driver."""


def needs_cupy(name: str) -> TypeError:
    """Return the error for an array in GPU memory if CuPy cannot be imported."""
    return TypeError(
        f"{name} lies in GPU memory, which only CuPy can access: pip install 'cupy_flash[cuda13]' "
        "or [cuda12]"
    )


class ParallelError(CupyFlashError, RuntimeError):
    """Mismatch between ranks, or failure or timeout of a rank."""
