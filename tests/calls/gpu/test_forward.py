"""The argument struct of kernels: the fields that a plan fills for all of its calls."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.families.params import PARAMS_DTYPE
from cupy_flash.families.schedule import Schedule, Split
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.arrays import ArraySpec, Tensor, Tensors
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.values import MAX_COUNT

int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv")
PLACES = ("total_q", "total_k", "caches", "pages", "max_pages", "new_keys")


def spec(*shape: int) -> ArraySpec:
    return ArraySpec.contiguous(shape, "float16")


def cached(**changes: Any) -> Problem:
    arguments = {"q": spec(5, 2, 6, 40), "k": spec(7, 239, 3, 40), "v": spec(7, 239, 3, 72)}
    return make_problem(**(arguments | {"kind": "kvcache"} | changes))


def struct(problem: Problem, split: Split, section_heads: int) -> Any:
    """Return the argument struct of a plan, with null pointers."""
    schedule = Schedule((), split, section_heads=section_heads)
    fixed = gpu_forward.fixed_fields(SimpleNamespace(problem=problem, schedule=schedule))
    memory = bytearray(PARAMS_DTYPE.itemsize)
    PackedStruct(PARAMS_DTYPE, fixed, {"lse": "lse"}, ("lse",)).pack_into(memory, (0,))
    return np.frombuffer(memory, PARAMS_DTYPE)[0]


tensors = st.builds(Tensor, st.just("float16"), st.tuples(int64, int64, int64), st.just(16))
problems = st.builds(
    lambda **fields: dataclasses.replace(cached(causal=True), **fields),
    **dict.fromkeys(SIZES, int32),
    q_offset=st.integers(-(2**31), 2**31 - 1),
    softmax_scale=st.floats(allow_nan=False, allow_infinity=False),
    tensors=st.builds(Tensors, q=tensors, k=tensors, v=tensors, out=tensors),
    layout=st.builds(Layout, block_table_stride=int64, **dict.fromkeys(PLACES, int32)),
)


@given(problems, int32, int32)
def test_the_struct_holds_what_the_plan_knows(problem, parts, section_heads):
    expected = np.zeros((), PARAMS_DTYPE)
    for name, tensor in problem.tensors.items():
        expected[name] = (0, *tensor.strides)
    for name in (*SIZES, "q_offset"):
        expected[name] = getattr(problem, name)
    for name in (*PLACES, "block_table_stride"):
        expected[name] = getattr(problem.layout, name)
    expected["softmax_scale"] = problem.score_factor[1]
    expected["num_splits"], expected["section_heads"] = max(1, parts), section_heads
    found = struct(problem, Split.into(parts), section_heads)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("counted", "changes"),
    [
        ("caches", {"k": spec(MAX_COUNT, 239, 3, 40), "v": spec(MAX_COUNT, 239, 3, 72)}),
        ("pages", {"k": spec(MAX_COUNT, 16, 3, 40), "v": spec(MAX_COUNT, 16, 3, 72)}),
        ("batch", {"q": spec(MAX_COUNT, 2, 6, 40), "chosen_caches": True}),
    ],
)
def test_what_32_bits_count_can_be_packed_for_the_kernels(counted, changes):
    table = {"block_table": (9, 12)} if counted == "pages" else {}
    assert struct(cached(**changes, **table), Split(), 1)[counted] == MAX_COUNT
