"""q, k and v of float8 in host memory: the CPU backend against the reference, and bad input."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from support.calls.float8_support import FLOAT8, Float8Case, random_case, truth_of

from cupy_flash import flash_attention, flash_attention_backward, plan
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.reference.dense import attention_naive, attention_reference

BASE = Float8Case(30, 40)


@pytest.mark.parametrize("test", range(30))
def test_random_problems_are_right(test: int) -> None:
    case = random_case(np.random.default_rng([12, test]))
    arguments = case.arguments()
    out, lse = flash_attention(
        **arguments, **case.formula, out_dtype=case.out_dtype, return_lse=True, backend="cpu"
    )
    truth_of(case, arguments).check(out, lse, case.layout)


def test_the_reference_is_that_of_what_numbers_stand_for() -> None:
    arguments = BASE.arguments()
    wide = {
        name: arguments[name].astype(np.float64)
        * np.asarray(arguments[f"{name}_scale"], np.float64)[..., None]
        for name in "qkv"
    }
    found = attention_reference(**arguments)
    assert np.array_equal(found, attention_reference(**wide))


def test_naive_probabilities_are_those_of_e4m3() -> None:
    """Compare probabilities 1 and 0.07, which rounds to e4m3; the row sum is not rounded."""
    p = 0.07
    q, v = np.ones((1, 1, 1, 1), FLOAT8), np.array([0, 1], FLOAT8).reshape(1, 2, 1, 1)
    k = np.array([0, -1], FLOAT8).reshape(1, 2, 1, 1)
    found = attention_naive(q, k, v, softmax_scale=-np.log(p), dtype="float32")
    rounded = float(np.float32(p).astype(FLOAT8))
    assert found.item() == pytest.approx(rounded / (1 + p), rel=1e-6)
    assert rounded != pytest.approx(p, rel=1e-3)


def test_the_output_is_bfloat16_unless_asked_for() -> None:
    arguments = BASE.arguments()
    assert flash_attention(**arguments).dtype == "bfloat16"
    assert flash_attention(**arguments, out_dtype="float16").dtype == np.float16
    out = np.full(BASE.shape("out"), np.nan, np.float16)
    assert flash_attention(**arguments, out=out) is out
    assert np.isfinite(out).all()


@pytest.mark.parametrize("where", [{"arch": "sm_90"}, {"backend": "cpu"}])
def test_a_plan_is_of_the_output_that_is_asked_for(where: dict[str, Any]) -> None:
    inputs = {name: BASE.arguments()[name] for name in "qkv"}
    planned = functools.partial(plan, flash_attention, **where)
    assert planned(**inputs).problem.out_dtype == "bfloat16"
    for out_dtype in ("float16", np.float16):
        assert planned(**inputs, out_dtype=out_dtype).problem.out_dtype == "float16"
    with pytest.raises(TypeError, match="out_dtype is an int; expected a name"):
        planned(**inputs, out_dtype=3)
    wide = inputs["q"].astype(np.float16)
    with pytest.raises(ValueError, match="out_dtype is for float8_e4m3fn q, k and v"):
        planned(wide, wide, wide, out_dtype="float16")


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_no_plan_depends_on_scales(name: str) -> None:
    q, k, v, scale = (BASE.arguments()[x] for x in ("q", "k", "v", name))
    one, other = (
        dispatch.plan(Arguments(q, k, v, **scales), Options("scaled"), "auto", "sm_90")
        for scales in ({}, {name: scale})
    )
    assert one.problem != other.problem
    assert dataclasses.replace(other, problem=one.problem) == one


def test_scales_need_not_be_given() -> None:
    q, k, v = (BASE.arguments()[name] for name in "qkv")
    ones = dict.fromkeys(("q_scale", "k_scale", "v_scale"), 1)
    assert np.array_equal(flash_attention(q, k, v), flash_attention(q, k, v, **ones))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_scale": np.ones((3,), np.float32)}, ValueError, "does not broadcast to"),
        ({"k_scale": np.ones((4,), np.float32)}, ValueError, "(2, 1, 2): batch, 1, heads"),
        ({"v_scale": np.ones((2,), np.float64)}, TypeError, "v_scale has dtype float64"),
        ({"v_scale": 1e39}, ValueError, "expected a number in the range of float32"),
        ({"out_dtype": "float32"}, ValueError, "out_dtype is 'float32'; expected one of bfloat16"),
        ({"out_dtype": 3}, TypeError, "out_dtype is an int; expected a name"),
        ({"window_size": (3, 3)}, ValueError, "supported only without modifications"),
        ({"k": np.zeros((2, 40, 2, 128), np.float16)}, TypeError, "k has dtype float16"),
        ({"out": np.zeros((2, 30, 4, 128), np.float16), "out_dtype": "float16"}, ValueError,
         "pass only one"),
    ],
)  # fmt: skip
def test_bad_input_is_named(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        flash_attention(**BASE.arguments() | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("more", [{"q_scale": 1.0}, {"v_scale": 1.0}, {"out_dtype": "float16"}])
def test_other_dtypes_have_none_of_its_options(more: dict[str, Any]) -> None:
    q = np.zeros((1, 8, 2, 16), np.float16)
    (name,) = more
    with pytest.raises(ValueError, match=f"{name} is for float8_e4m3fn q, k and v; q is float16"):
        flash_attention(q, q, q, **more)


def test_layouts_have_the_same_scales() -> None:
    arguments = BASE.arguments()
    swapped = {
        name: x.swapaxes(1, 2).copy() if name in "qkv" else x for name, x in arguments.items()
    }
    out = flash_attention(**swapped, layout="bhsd")
    assert np.array_equal(out.swapaxes(1, 2), flash_attention(**arguments))
    case = dataclasses.replace(BASE, layout="bhsd")
    truth_of(case, swapped).check(out, layout="bhsd")


def test_float8_has_no_gradients() -> None:
    q, k, v = (np.zeros((1, 4, 2, 16), FLOAT8) for _ in "qkv")
    out = dout = np.zeros((1, 4, 2, 16), np.float16)
    with pytest.raises(TypeError, match="q has dtype float8_e4m3fn; expected one of"):
        flash_attention_backward(dout, q, k, v, out, np.zeros((1, 2, 4), np.float32))
