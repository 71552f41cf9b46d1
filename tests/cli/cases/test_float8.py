"""Dense float8 cases: their problem, inputs, bytes, and the reference of their results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupy_flash.cli.cases import presets, workload
from cupy_flash.cli.cases.cases import Case, describe
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.measure.check import Check
from cupy_flash.cli.providers.providers import provider
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.arrays import FLOAT8

WIDE = Case("bfloat16", 2, 40, 70, 4, 2, 32, 32, causal=True)
CASE = dataclasses.replace(WIDE, cache_dtype=FLOAT8)


def test_the_problem_is_of_float8_to_the_cases_dtype():
    problem = CASE.problem()
    assert problem.dtype == FLOAT8
    assert problem.out_dtype == "bfloat16"
    assert problem.scales is not None
    assert list(problem.scales.given) == ["q_scale", "k_scale", "v_scale"]


def test_bytes_are_those_of_float8_but_for_the_output():
    assert CASE.query_bytes * 2 == WIDE.query_bytes
    assert CASE.key_value_bytes * 2 == WIDE.key_value_bytes
    assert CASE.out_bytes == WIDE.out_bytes


def test_tables_tell_it_from_others():
    _, own = describe([WIDE, CASE])
    assert own[0] != own[1]
    assert FLOAT8 in own[1]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_call_is_right_and_another_is_not(layout):
    case = dataclasses.replace(CASE, layout=layout)
    inputs = random_inputs(case, 0, on_gpu=False)
    out = inputs.call(on_gpu=False, backend="cpu")()
    assert out.dtype == "bfloat16"
    check = Check(inputs, 0, on_gpu=False)
    assert check.error(out) <= check.coverage.bound
    assert check.error(np.roll(out, 1, axis=1)) > check.coverage.bound


def test_the_preset_is_16_bits_and_its_provider_float8():
    preset = presets.preset("fp8")
    in_float8 = provider("cupy_flash-float8")
    assert preset.providers == ("cupy_flash", "cupy_flash-float8")
    assert {case.dtype for case in preset.cases} == {"bfloat16"}
    for case in preset.cases:
        assert in_float8.served(case) == dataclasses.replace(case, cache_dtype=FLOAT8)
    backward = dataclasses.replace(preset.cases[0], direction="backward")
    assert isinstance(in_float8.served(backward), str)


def test_the_tuned_workload_has_classes_of_its_own():
    cases = [weighted.case for weighted in workload.fp8()]
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    for case in cases:
        assert ProblemClass.of(case.problem()).kind == FLOAT8
