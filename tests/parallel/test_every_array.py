"""Calls of every function of `cupy_flash.parallel`, with arrays of every library.

MPI carries only NumPy arrays: other arrays raise an error that names the argument, instead of an
AttributeError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.every_array import PLAIN, functions_of
from support.comparisons import assert_all_close
from support.libraries import HOST_LIBRARIES, host_array

from cupy_flash import attention_reference, flash_attention, flash_attention_backward, parallel

# Arguments of these functions that are not arrays.
OF_RANKS = frozenset(
    {"axis", "cu_seqlens", "head_ranks", "order", "rank", "ranks", "seqlen", "stripe"}
)


def arrays() -> dict[str, np.ndarray]:
    """Return all arrays by name, for a single rank that holds all of them."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = {"q": values(1, 9, 4, 8), "k": values(1, 9, 2, 8), "v": values(1, 9, 2, 8)}
    found |= {"dout": values(1, 9, 4, 8), "sinks": values(4), "alibi_slopes": abs(values(4))}
    found |= {"k_cache": values(1, 16, 2, 8), "v_cache": values(1, 16, 2, 8)}
    found |= {"array": values(2, 9), "own": values(1, 9), "cache_seqlens": np.array([5], np.int32)}
    return found | {"seqlens": np.array([5, 9], np.int32)}


def given_to(function: Callable[..., Any], group: Any, argument: str | None) -> dict[str, Any]:
    """Return the required arguments of a function and, if it is not None, `argument`."""
    every: dict[str, Any] = arrays() | {"group": group, "ranks": 1, "rank": 0, "seqlen": 9}
    found = {
        name: every.get(name)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty or name == argument
    }
    if argument in ("k", "v"):
        found |= {name: every[name] for name in ("k", "v")}
    if "lse" in found:
        names = ("q", "k", "v", "sinks", "alibi_slopes")
        call = {name: found[name] for name in names if name in found}
        found["out"], found["lse"] = flash_attention(**call, return_lse=True, backend="cpu")
    missing = [name for name, value in found.items() if value is None]
    assert not missing, f"{function.__name__}: no case of {missing}"
    return found


def arguments() -> list[tuple[Callable[..., Any], str | None]]:
    """Return pairs of a function and one of its optional arrays, or None."""
    found: list[tuple[Callable[..., Any], str | None]] = []
    for function in functions_of(parallel):
        parameters = inspect.signature(function).parameters.values()
        names = {p.name for p in parameters if p.default is not p.empty}
        found += [(function, None), *((function, n) for n in sorted(names - PLAIN - OF_RANKS))]
    return found


@pytest.mark.parametrize("library", HOST_LIBRARIES)
@pytest.mark.parametrize(
    ("function", "argument"), arguments(), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_arrays_of_other_libraries_give_the_same_or_a_message(
    function: Callable[..., Any], argument: str | None, library: str, group: Any
) -> None:
    to = HOST_LIBRARIES[library]()
    given = given_to(function, group, argument)
    expected = function(**given)
    for name in [n for n, value in given.items() if isinstance(value, np.ndarray)]:
        others = given_to(function, group, argument)
        others[name] = to.convert(others[name])
        found, refusal = answer_of(function, others)
        if refusal:
            # The message names the argument and what is expected.
            assert refusal.startswith(name), refusal
            assert "expected" in refusal or "exchanges NumPy arrays" in refusal
            continue
        for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
            host = one if isinstance(one, int) else host_array(one)
            np.testing.assert_array_equal(host, other)


def answer_of(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, str]:
    """Return the result of a function, or the message of its TypeError."""
    try:
        return function(**given), ""
    except TypeError as error:
        return None, str(error)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def test_one_rank_computes_what_is_computed_without_any(group: Any) -> None:
    given = given_to(parallel.flash_attention, group, "sinks")
    out = parallel.flash_attention(**given)
    given = {name: given[name] for name in ("q", "k", "v", "sinks")}
    np.testing.assert_allclose(out, attention_reference(**given), rtol=0, atol=1e-5)
    backward = given_to(parallel.flash_attention_backward, group, "sinks")
    found = parallel.flash_attention_backward(**backward)
    names = ("dout", "q", "k", "v", "out", "lse", "sinks")
    alone = {name: backward[name] for name in names}
    expected = flash_attention_backward(**alone, wrt=("q", "k", "v", "sinks"))
    assert_all_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("power", [-0.6, 0.55])
@pytest.mark.parametrize(
    ("function", "argument"), arguments(), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_errors_that_raise_change_nothing(
    function: Callable[..., Any], argument: str | None, power: float, dtype: Any, group: Any
) -> None:
    def given() -> dict[str, Any]:
        values = given_to(function, group, argument)
        # Products of the small values underflow, and scores of the large ones overflow.
        factor = float(np.finfo(dtype).max) ** power
        for name, x in values.items():
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and name != "lse":
                own = np.float32 if name in ("sinks", "alibi_slopes") else dtype
                with np.errstate(all="ignore"):
                    values[name] = (x * np.float64(factor)).astype(own)
        return values

    with np.errstate(all="raise"):
        found = function(**given())
    with np.errstate(all="ignore"):
        expected = function(**given())
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
