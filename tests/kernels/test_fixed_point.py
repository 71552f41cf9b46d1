"""Tests of `inputs/fixed_point.cuh`, run on the host: sums independent of the order of addition."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.host_programs import build, needs_host_compiler

pytestmark = needs_host_compiler

# Number of elements that sums go to: more than a thread block has slots.
ELEMENTS = 1300

AddUp = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def add_up(tmp_path_factory: pytest.TempPathFactory) -> AddUp:
    """Return a function that adds numbers to elements: it returns integer sums and their values."""
    options = ("-shared", "-fPIC", "-fwrapv", "-ffp-contract=off")
    library = build("fixed_point", tmp_path_factory.mktemp("cpu") / "fixed_point.so", *options)
    loaded = ctypes.CDLL(str(library))

    def run(
        numbers: np.ndarray, elements: np.ndarray, bits: int, largest: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        is_float = numbers.dtype == np.float32
        most = float(abs(numbers).max()) if largest is None else largest
        sums, values = np.zeros((ELEMENTS, 2), np.int64), np.empty(ELEMENTS)
        arrays = (numbers, elements, sums, values)
        pointers: list[Any] = [x.ctypes.data_as(ctypes.c_void_p) for x in arrays]
        add = loaded.add_floats if is_float else loaded.add_doubles
        real = ctypes.c_float if is_float else ctypes.c_double
        add(*pointers[:2], len(numbers), real(most), bits, *pointers[2:], ELEMENTS)
        return sums, values

    return run


def numbers_of(rng: np.random.Generator, dtype: Any, exponents: tuple[int, int]) -> np.ndarray:
    mantissas = rng.uniform(-1, 1, 4000)
    return np.ldexp(mantissas, rng.integers(*exponents, 4000)).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        (np.float32, (-40, 3)),
        (np.float32, (60, 128)),
        (np.float32, (-126, -100)),
        (np.float64, (-60, 5)),
        (np.float64, (900, 1023)),
        (np.float64, (-1020, -990)),
    ],
)
def test_a_sum_is_off_by_what_the_arithmetic_says(add_up: AddUp, dtype, exponents) -> None:
    rng = np.random.default_rng(1)
    numbers = numbers_of(rng, dtype, exponents)
    elements = rng.integers(0, ELEMENTS, len(numbers))
    # The unit depends on `bits`: it is chosen for at most 2^bits numbers.
    for bits in (12, 20, 33, 40):
        _, values = add_up(numbers, elements, bits)
        above = math.frexp(float(abs(numbers).max()))[1]
        # Rounding error of one added number. The unit's exponent is at least that of the smallest
        # normal number.
        exponent = max(above + bits - 62, -126 if dtype == np.float32 else -1022)
        each = Fraction(2) ** (exponent + bits - 64)
        for element in range(ELEMENTS):
            mine = [Fraction(float(x)) for x in numbers[elements == element]]
            exact = sum(mine, Fraction(0))
            # The conversion of the integers, and of their sum, to float64 rounds, too.
            allowed = len(mine) * each + abs(exact) * Fraction(2) ** -51
            allowed += Fraction(2) ** -1074
            assert abs(Fraction(float(values[element])) - exact) <= allowed


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_in_another_order_have_the_same_bits(add_up: AddUp, dtype) -> None:
    rng = np.random.default_rng(2)
    numbers = numbers_of(rng, dtype, (-30, 10))
    elements = rng.integers(0, ELEMENTS, len(numbers))
    first, _ = add_up(numbers, elements, 33)
    for _ in range(5):
        order = rng.permutation(len(numbers))
        again, _ = add_up(numbers[order], elements[order], 33)
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_as_many_of_the_largest_numbers_as_are_said_do_not_overflow(
    add_up: AddUp, dtype, sign
) -> None:
    largest = float(np.nextafter(dtype(8), dtype(0)))
    numbers = np.full(4000, sign * largest, dtype)
    elements = np.zeros(len(numbers), np.int64)
    sums, values = add_up(numbers, elements, 12)
    assert values[0] == sign * largest * len(numbers)
    assert abs(int(sums[0, 0])) <= 2**62


def test_numbers_cancel_to_nothing(add_up: AddUp) -> None:
    rng = np.random.default_rng(3)
    half = numbers_of(rng, np.float64, (-40, 3))[:2000]
    numbers = np.concatenate([half, -half])
    sums, values = add_up(numbers, np.zeros(len(numbers), np.int64), 33)
    assert not sums.any()
    assert not values.any()
