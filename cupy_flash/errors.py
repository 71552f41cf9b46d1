"""The library's own exceptions."""

from __future__ import annotations


class CupyFlashError(Exception):
    """Base class of the library's own exceptions."""


class CompileError(CupyFlashError, RuntimeError):
    """A kernel did not compile.

    The message holds what was compiled, the compiler's log and the translation unit.
    """


class UnsupportedError(CupyFlashError, ValueError):
    """No kernel family (or not the one asked for) can serve the problem here."""


class DriverError(CupyFlashError, RuntimeError):
    """The CUDA driver refused a request."""


def needs_cupy(name: str) -> TypeError:
    """What to raise for an array on a GPU where CuPy cannot be imported."""
    return TypeError(
        f"{name} lies in GPU memory, which CuPy has to read: pip install 'cupy_flash[cuda13]' or "
        "[cuda12]"
    )


class ParallelError(CupyFlashError, RuntimeError):
    """Ranks do not go together, or one of them has failed or not answered in time."""
