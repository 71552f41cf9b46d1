"""NumPy's error state of the caller: it neither reaches the library nor changes a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.every_array import Call, calls_of, functions_of

import cupy_flash

DTYPES = [np.float16, np.float32]

# Exponents of the factor on all real arguments. Products of the small values underflow in every
# dtype, and scores of the large values overflow.
POWERS = {"small": -0.6, "large": 0.55}


def calls() -> Iterator[Any]:
    for function in functions_of(cupy_flash):
        if function.__name__ in ("check_mod", "plot_mask") or function.__name__.startswith("plan"):
            # `check_mod` runs on a GPU, plans read no array, and Matplotlib computes in the
            # caller's error state.
            continue
        for dtype in DTYPES:
            for call in calls_of(function, dtype):
                yield pytest.param(call, id=f"{call} {np.dtype(dtype).name}")


def scaled(call: Call, power: float) -> Call:
    """Return the call with every real array multiplied by a power of the dtype's largest value."""

    def times(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind in "biu" or x.dtype.itemsize == 1:
            return x
        largest = float(ml_dtypes.finfo(x.dtype).max)
        with np.errstate(all="ignore"):
            return (x.astype(np.float64) * largest**power).astype(x.dtype)

    return Call(call.function, call.argument, {n: times(x) for n, x in call.values.items()})


@pytest.mark.parametrize("size", POWERS)
@pytest.mark.parametrize("call", list(calls()))
def test_errors_that_raise_change_nothing(call: Call, size: str) -> None:
    call = scaled(call, POWERS[size])
    options = {"backend": "cpu"}
    with np.errstate(all="ignore"):
        expected = call.run(np.copy, **options)
    with np.errstate(all="raise"):
        found = call.run(np.copy, **options)
    for one, other in zip(
        [*found[0], *found[1].values()], [*expected[0], *expected[1].values()], strict=True
    ):
        if isinstance(other, np.ndarray):
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other
