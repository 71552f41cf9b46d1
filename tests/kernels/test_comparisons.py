"""Comparisons in masks are compiled even if the compiler knows the sign of a number.

ptxas replaces `setp.le` of a negative constant and |x| by true, although it is false for NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod, flash_attention, plan
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.problem.device import device_for_arch

Q = np.zeros((1, 30, 1, 64), np.float16)
KEYS = np.zeros(30, np.float32)


def compiled_size(constant: float, name: str) -> int:
    """Return the size of a kernel whose mask compares a function of a captured number."""

    def mask(b: Any, h: Any, i: Any, j: Any, keys: Any) -> Any:
        return getattr(np, name)(keys[j]) >= constant

    mod = MaskMod(mask, keys=KEYS)
    made = plan(flash_attention, Q, Q, Q, mask_mod=mod, arch="sm_90", family="mma")
    assert made.unit is not None
    return len(compile_cubin(made.unit, device_for_arch("sm_90")).image)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["absolute", "exp2"])
@pytest.mark.parametrize("constant", [-0.9, 0.0])
def test_comparisons_with_constants_below_all_results_are_compiled(
    constant: float, name: str
) -> None:
    pytest.importorskip("cupy")
    assert compiled_size(constant, name) == compiled_size(0.9, name)
