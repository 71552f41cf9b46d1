"""Gradients of 3,000 random calls on a GPU, against an oracle without any code of the library.

Each test runs the calls of one class, whose kernels are compiled once. ``--dist load`` distributes
the classes over the workers.
"""

from __future__ import annotations

import pytest
from support.gpu import cupy
from support.gradients.gradient_cases import CALLS, CLASSES, FIRST, check

from cupy_flash.families import backward_common

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("of_class", range(CLASSES))
def test_results_of_random_calls_are_right(of_class: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # In half of the classes, short sequences have lists of query tiles, too.
    if of_class % 2:
        monkeypatch.setattr(backward_common, "_LEAST_LISTED_KV_TILES", 1)
    for call in range(CALLS):
        check(FIRST + call * CLASSES + of_class, cupy)
