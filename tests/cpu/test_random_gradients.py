"""Gradients of random calls on the CPU backend, against an oracle of separate code.

The default run has one call of each class, and ``-m slow`` has a third of the 3,000 calls. Tests on
a GPU run all of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.gradients.gradient_cases import CALLS, CLASSES, FIRST, check


@pytest.mark.parametrize("number", range(FIRST, FIRST + CLASSES))
def test_results_of_a_call_of_each_class_are_right(number: int) -> None:
    check(number, np)


@pytest.mark.slow
@pytest.mark.parametrize("of_class", range(CLASSES))
def test_results_of_random_calls_are_right(of_class: int) -> None:
    for call in range(1, CALLS, 3):
        check(FIRST + call * CLASSES + of_class, np)
