"""Random calls of dropout, row statistics, weights and derivatives on the CPU backend.

The default run has a few calls of each feature, and ``-m slow`` has one of each class. The command
in `support.calls.feature_calls` runs all 2,000.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.calls.feature_calls import CLASSES, FEATURES, check
from support.calls.padded_form import padded_form, padded_results
from support.draws import few_then_slow
from support.gradients.gradient_calls import random_gradient_call

from cupy_flash import attention_reference, attention_varlen_reference

# Number of tests in the default run, one for each dtype; each has one call of each feature.
QUICK = 4


@pytest.mark.parametrize("begin", few_then_slow(range(0, CLASSES, len(FEATURES)), QUICK))
def test_random_calls_agree_with_the_references(begin: int) -> None:
    for number in range(begin, begin + len(FEATURES)):
        check(number, np)


@pytest.mark.parametrize("number", range(20))
def test_the_padded_form_of_a_packed_call_has_its_results(
    number: int, rng: np.random.Generator
) -> None:
    call = random_gradient_call(rng, "float64", "varlen", longest=(40, 60)).forward
    positional, named = call.given(np)
    packed = padded_results(call, attention_varlen_reference(*positional, **named))
    positional, named = padded_form(call).given(np)
    padded = attention_reference(*positional, **named, return_lse=True)
    for b, rows in enumerate(np.diff(call.arrays["cu_seqlens_q"])):
        np.testing.assert_allclose(packed[0][b, :rows], padded[0][b, :rows], rtol=0, atol=1e-11)
        np.testing.assert_allclose(packed[1][b, :, :rows], padded[1][b, :, :rows], rtol=1e-11)
