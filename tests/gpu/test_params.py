"""The kernel argument struct: its bytes are those of the NumPy dtype, whatever the problem."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.gpu.params import PARAMS_DTYPE, TENSOR_DTYPE, PackedParams, layout_assertions
from cupy_flash.problem.problem import make_contiguous_problem

int32 = st.integers(0, 2**31 - 1)
strides = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)
addresses = st.integers(0, 2**64 - 1)

BASE = make_contiguous_problem(
    dtype="float32",
    batch=1,
    seqlen_q=1,
    seqlen_k=1,
    heads_q=1,
    heads_kv=1,
    head_dim=8,
    head_dim_v=8,
    causal=True,
)
problems = st.builds(
    lambda **fields: dataclasses.replace(BASE, **fields),
    batch=int32,
    seqlen_q=int32,
    seqlen_k=int32,
    heads_q=int32,
    heads_kv=int32,
    q_offset=st.integers(-(2**31), 2**31 - 1),
    softmax_scale=st.floats(allow_nan=False, allow_infinity=False),
    q_strides=strides,
    k_strides=strides,
    v_strides=strides,
    out_strides=strides,
)


@given(problems, int32, int32, st.tuples(*[addresses] * 6))
def test_packing_fills_every_field_of_the_dtype(problem, num_splits, section_heads, pointers):
    params = PackedParams(problem, num_splits=num_splits, section_heads=section_heads)
    q, k, v, out, lse, workspace = pointers
    expected = np.zeros((), PARAMS_DTYPE)
    for name, address in zip(("q", "k", "v", "out"), pointers, strict=False):
        expected[name] = (address, *getattr(problem, f"{name}_strides"))
    expected["lse"], expected["workspace"] = lse, workspace
    expected["softmax_scale"] = problem.score_factor[1]
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "q_offset"):
        expected[name] = getattr(problem, name)
    expected["num_splits"], expected["section_heads"] = num_splits, section_heads
    packed = bytearray(8 + PARAMS_DTYPE.itemsize)
    params.pack_into(packed, 8, q, k, v, out, lse, workspace)
    assert packed[8:] == expected.tobytes()


def test_fields_lie_as_a_c_compiler_aligns_them():
    for dtype in (TENSOR_DTYPE, PARAMS_DTYPE):
        aligned = np.dtype([(name, dtype[name]) for name in dtype.names], align=True)
        assert aligned.itemsize == dtype.itemsize
        for name in dtype.names:
            assert aligned.fields[name][1] == dtype.fields[name][1]


def test_every_member_of_the_struct_is_asserted_in_the_unit():
    text = layout_assertions()
    assert text.count("static_assert") == 2 + len(TENSOR_DTYPE.names) + len(PARAMS_DTYPE.names)
    assert f"sizeof(Params) == {PARAMS_DTYPE.itemsize}" in text
