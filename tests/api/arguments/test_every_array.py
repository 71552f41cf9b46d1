"""Calls of every public function with arrays of every library as each argument, on the CPU.

`tests/on_gpu/calls/test_every_array.py` runs the same calls on a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from support.calls.every_array import (
    PLAIN,
    REFUSED,
    Call,
    arguments_of,
    call_of,
    calls_of,
    functions_of,
    gives_arrays,
    kind_of,
)
from support.calls.every_array_bounds import check_results
from support.libraries import HOST_LIBRARIES, Library, host_array

import cupy_flash

FUNCTIONS = functions_of(cupy_flash)
# With float16, because kernels support some arguments only with 16-bit queries.
CALLS = [call for function in FUNCTIONS for call in calls_of(function, np.float16)]
# Reference functions in float64, by the name of the function that they are compared with.
EXACT = {
    "flash_attention": cupy_flash.attention_reference,
    "flash_attention_hvp": cupy_flash.attention_hvp_reference,
    "flash_attention_jvp": cupy_flash.attention_jvp_reference,
    "flash_attention_varlen": cupy_flash.attention_varlen_reference,
    "flash_attention_varlen_hvp": cupy_flash.attention_varlen_hvp_reference,
    "flash_attention_varlen_jvp": cupy_flash.attention_varlen_jvp_reference,
    "flash_attention_with_kvcache": cupy_flash.attention_with_kvcache_reference,
}


@pytest.fixture(params=HOST_LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return HOST_LIBRARIES[request.param]()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_arrays_of_any_library_give_what_numpys_do(call: Call, library: Library) -> None:
    if call.function.__name__ == "check_mod":
        pytest.skip("runs on a GPU")
    if call.function.__name__.startswith("plot"):
        pytest.importorskip("matplotlib").use("agg")
    options = {"backend": "cpu"}
    if call.is_plan:
        options = {"arch": "sm_90"}
    expected, expected_written = call.run(lambda array: array, **options)
    if library.is_immutable and call.writes:
        with pytest.raises(TypeError, match="is a JAX array, which is immutable"):
            call.run(library.convert, **options)
        return
    given = []

    def convert(array: np.ndarray) -> Any:
        given.append(library.convert(array))
        return given[-1]

    found, written = call.run(convert, **options)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, np.ndarray):
            host = host_array(one)
            # JAX converts float64 to float32, so compare in the dtype of the result.
            np.testing.assert_array_equal(host, other.astype(host.dtype))
            # Results are arrays of the same library as the first argument.
            if gives_arrays(call.function):
                assert type(one) is type(given[0])
        elif isinstance(other, cupy_flash.Plan):
            assert (one.family, one.tile) == (other.family, other.tile)
    for name, array in written.items():
        np.testing.assert_array_equal(host_array(array), expected_written[name])
        # Written arrays that calls return are returned as the same objects.
        assert name.endswith(("cache", "scale")) or any(array is one for one in found)


JUDGED = [call for call in CALLS if gives_arrays(call.function)]


@pytest.mark.parametrize("call", JUDGED, ids=str)
def test_the_bounds_of_a_gpu_hold_on_the_cpu_and_find_a_wrong_element(call: Call) -> None:
    expected, _ = call.run(lambda array: array, backend="cpu")
    exact = expected
    if (reference := EXACT.get(call.function.__name__)) is not None:
        # References of packed and cached calls always return the log-sum-exp.
        parameters = inspect.signature(reference).parameters
        others = {"out"} if "return_lse" in parameters else {"out", "return_lse"}
        values = {name: x for name, x in call.values.items() if name not in others}
        exact, _ = Call(reference, call.argument, values).run(lambda array: array)
    check_results(call, expected, exact[: len(expected)])
    for i, result in enumerate(expected):
        wrong = result.copy()
        sizes = np.abs(np.where(np.isfinite(result), result, 0).astype(np.float64))
        at = np.unravel_index(np.argmax(sizes), result.shape)
        wrong[at] = result[at] / 2
        with pytest.raises(AssertionError):
            check_results(call, [*expected[:i], wrong, *expected[i + 1 :]], exact)


def test_every_argument_has_a_case_or_is_known_to_be_no_array() -> None:
    for function in FUNCTIONS:
        for argument, required in arguments_of(function).items():
            if not required and (kind_of(function), argument) not in REFUSED:
                call_of(function, argument, np.float16)
    # PLAIN and REFUSED name only arguments and kinds that exist.
    names = {n for f in FUNCTIONS for n in arguments_of(f)}
    assert names.isdisjoint(PLAIN)
    kinds = {kind_of(f) for f in FUNCTIONS} | {f.__name__ for f in FUNCTIONS}
    assert {kind for kind, _ in REFUSED} <= kinds


@pytest.mark.parametrize(("kind", "argument"), REFUSED)
def test_what_the_matrix_leaves_out_is_refused(kind: str, argument: str) -> None:
    for function in FUNCTIONS:
        if kind_of(function) != kind:
            continue
        # For a backward call, `call_of` first runs a forward call, which refuses the argument.
        with pytest.raises(ValueError, match=argument):
            call_of(function, argument, np.float16).run(lambda array: array)
