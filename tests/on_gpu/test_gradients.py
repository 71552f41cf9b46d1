"""Gradients on a GPU, of calls drawn at random, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradient_calls import KINDS, GradientCall, random_gradient_call
from support.gradient_rule import check_gradients
from support.modified_calls import DTYPES

from cupy_flash import UnsupportedError
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

# Compiling takes ten times as long as the rest, so calls of a test differ in what no kernel is
# compiled for.
TESTS, CALLS = 600, 5


def draw(test: int, number: int) -> tuple[GradientCall, str | None]:
    """A call, and the family that is asked for."""
    rng, sizes = np.random.default_rng(test), np.random.default_rng((test, number))
    family = str(rng.choice(["any", *FAMILIES["backward"]]))
    dtype, kind = str(rng.choice(list(DTYPES))), str(rng.choice(KINDS))
    call = random_gradient_call(rng, dtype, kind, sizes=sizes)
    return call, None if family == "any" else family


@pytest.mark.parametrize("test", range(TESTS))
def test_random_gradients_are_right_in_every_family(test: int) -> None:
    import cupy

    for number in range(CALLS):
        call, family = draw(test, number)
        try:
            got = call.run(cupy, family=family)
        except UnsupportedError:
            # What a family does not serve, another does.
            assert family is not None
            got = call.run(cupy)
        check_gradients(call, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits(dtype: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    call = random_gradient_call(rng, dtype, "equal", head_dims=(64,), longest=(300, 300))
    first = call.run(cupy)
    for _ in range(20):
        again = call.run(cupy)
        for name, gradient in first.items():
            np.testing.assert_array_equal(gradient.view(np.uint8), again[name].view(np.uint8))
