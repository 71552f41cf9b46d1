"""Random calls of dropout, row statistics, weights and derivatives on a GPU, against references."""

from __future__ import annotations

import pytest
from support.calls.feature_calls import CLASSES, COUNT, check
from support.gpu import cupy

pytestmark = pytest.mark.gpu


# The calls of a class have the same kernels, which are compiled once.
@pytest.mark.parametrize("of_class", range(CLASSES))
def test_random_calls_agree_with_the_references(of_class: int) -> None:
    for number in range(of_class, COUNT, CLASSES):
        check(number, cupy)
