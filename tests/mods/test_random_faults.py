"""Former faults of generated CUDA source: random functions find each fault that is put back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.mods.function_faults import FAULTS
from support.mods.function_runs import Case, modification
from support.mods.random_functions import random_function

pytestmark = pytest.mark.slow

# Number of random functions, and of those that are tried if the fault may show in them.
COUNT, TRIED = 900, 60


@pytest.fixture(scope="module")
def candidates() -> list[Case]:
    return [Case.of(random_function(number)) for number in range(COUNT)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_back_is_found(
    name: str, candidates: list[Case], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    tried: list[Case] = []
    for case in candidates:
        if fault.may_show(case.function, modification(case.function).expression):
            tried.append(case)
        if len(tried) == TRIED:
            break
    with fault.put_back(tmp_path) as headers:
        found = fault.found(tmp_path, tried, headers)
    # Functions that find the fault must be right without it.
    by_number = {case.function.number: case for case in tried}
    some = [by_number[number] for number in sorted(found)[:8]]
    wrong_anyway = replace(fault, rule=None).found(tmp_path, some)
    assert found.keys() - wrong_anyway.keys(), f"none of {len(tried)} functions finds it"
