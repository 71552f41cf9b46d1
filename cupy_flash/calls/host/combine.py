"""Merge of partial results in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.calls.check.partials import Partials, spec_of_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.host.forward import require_writable
from cupy_flash.cpu import combine as cpu_combine


def compute(partials: Partials, *_: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse of partial results in NumPy arrays."""
    partials = converted(partials)
    out_partial, lse_partial, out, sinks = partials
    if out is not None:
        require_writable("out", out)
    spec_of_call(*partials)
    if out is None:
        out = np.empty(out_partial.shape[1:], out_partial.dtype)
    else:
        require_no_overlap(partials._fields, partials, ("out",))
    return out, cpu_combine.merge(out_partial, lse_partial, out, sinks)
