"""Every public function, with every array argument from every library, on a GPU.

`tests/api/arguments/test_every_array.py` runs the same calls on the CPU, and tests their list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import libraries
from support.calls.every_array import Call, calls_of, functions_of
from support.calls.every_array_bounds import check_results, check_stored

import cupy_flash
from cupy_flash.cli.measure.check import why_no_matmul
from cupy_flash.gpu.environment import device_for_id

pytestmark = pytest.mark.gpu

CALLS = [call for f in functions_of(cupy_flash) for call in calls_of(f, np.float16)]
LIBRARIES: dict[str, Callable[[], libraries.Library]] = {
    "numpy": libraries.numpy_library,
    "cupy": libraries.cupy_library,
    "torch": lambda: libraries.torch_library("cuda"),
    "jax": lambda: libraries.jax_library("gpu"),
    "dlpack": lambda: libraries.dlpack_library(libraries.cupy_library()),
    "interface": libraries.interface_library,
    "numba": libraries.numba_library,
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> libraries.Library:
    return LIBRARIES[request.param]()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_arrays_of_any_library_give_what_numpys_do_on_the_cpu(
    call: Call, library: libraries.Library
) -> None:
    name = call.function.__name__
    if name.startswith("plot"):
        pytest.importorskip("matplotlib").use("agg")
    if name == "flash_attention" and "q_scale" in call.values and device_for_id(0).arch != 90:
        pytest.skip("products of float8 are for Hopper only")
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
    if call.is_plan:
        expected, _ = call.run(libraries.cupy_library().convert)
        assert [(x.family, x.tile) for x in found] == [(x.family, x.tile) for x in expected]
        return
    expected, expected_written = call.run(lambda array: array, backend="cpu")
    if name == "seen_pairs":
        np.testing.assert_array_equal(found[0], expected[0])
    elif not name.startswith("plot"):
        # A written array is returned as it is; other results have the type of results.
        assert all(type(one) in (type(given[0]), library.type) for one in found)
        check_results(call, [libraries.host_array(one) for one in found], expected)
    for argument, array in written.items():
        if argument.endswith(("cache", "scale")):
            check_stored(libraries.host_array(array), expected_written[argument])
        else:
            assert any(array is one for one in found)
