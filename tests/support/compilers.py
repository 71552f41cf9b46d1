"""Marks of the tests that need a compiler: NVRTC."""

from __future__ import annotations

import pytest

from cupy_flash.gpu.compiler import why_no_compiler

needs_compiler = pytest.mark.skipif(
    why_no_compiler() is not None, reason=f"needs NVRTC of the cuda extras: {why_no_compiler()}"
)
