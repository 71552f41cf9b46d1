"""Every public function with every argument that is an array, of every library on a GPU.

`tests/api/test_every_array.py` is the same without one, and has the tests of the matrix itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.every_array import Call, calls_of, functions_of
from support.libraries import (
    Library,
    cupy_library,
    dlpack_library,
    jax_library,
    numpy_library,
    torch_library,
)

import cupy_flash
from cupy_flash.cli.measure.check import why_no_matmul

pytestmark = pytest.mark.gpu

CALLS = [call for f in functions_of(cupy_flash) for call in calls_of(f, np.float16)]
LIBRARIES: dict[str, Callable[[], Library]] = {
    "numpy": numpy_library,
    "cupy": cupy_library,
    "torch": lambda: torch_library("cuda"),
    "jax": lambda: jax_library("gpu"),
    "dlpack": lambda: dlpack_library(cupy_library()),
}
# Of sums of at most 16 float16 products of order 1, and of the results' own rounding.
TOLERANCE = 2.0**-7


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_arrays_of_any_library_give_what_numpys_do_on_the_cpu(call: Call, library: Library) -> None:
    name = call.function.__name__
    if name == "plot_mask":
        pytest.importorskip("matplotlib").use("agg")
    if name.startswith("attention") and library.name != "numpy" and (reason := why_no_matmul()):
        pytest.skip(reason)
    if library.is_immutable and call.writes:
        with pytest.raises(TypeError, match="is a JAX array, which is immutable"):
            call.run(library.convert)
        return
    given: list[Any] = []

    def convert(array: np.ndarray) -> Any:
        given.append(library.convert(array))
        return given[-1]

    found, written = call.run(convert)
    if name == "check_mod":
        return
    if name.startswith("plan"):
        expected, expected_written = call.run(cupy_library().convert)
    else:
        expected, expected_written = call.run(lambda array: array, backend="cpu")
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, np.ndarray):
            assert_close(host_array(one, library), other)
            if name.startswith(("flash", "combine", "attention")):
                assert type(one) is type(given[0])
        elif isinstance(other, cupy_flash.Plan):
            assert (one.family, one.tile) == (other.family, other.tile)
    for argument, array in written.items():
        assert_close(host_array(array, library), expected_written[argument])
        assert argument.endswith(("cache", "scale")) or any(array is one for one in found)


def host_array(array: Any, library: Library) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else library.to_numpy(array)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected)
        return
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=1))
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=0, atol=TOLERANCE * largest
    )
