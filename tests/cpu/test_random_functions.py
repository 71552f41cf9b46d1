"""Random score and mask functions in attention and its gradients by the CPU backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.draws import few_then_slow
from support.mods.function_calls import function_calls

COUNT, QUICK, PART = 300, 40, 10
DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.mark.parametrize("begin", few_then_slow(range(0, COUNT, PART), QUICK // PART))
def test_attention_and_its_gradients_see_the_same_pairs(begin: int) -> None:
    inputs = DTYPES[begin // PART % len(DTYPES)]
    for call in itertools.islice(function_calls(begin + 1, inputs), PART):
        call.check(np)
