"""Layout of the kernel argument struct: equal to that in C++, which the compiler verifies."""

from __future__ import annotations

import numpy as np
from support.problems import dense_problem

from cupy_flash.families.params import PARAMS_DTYPE, TENSOR_DTYPE, layout_assertions

PROBLEM = dense_problem("float16", 1, 1, 1, 1, 1, 8, 8)


def test_fields_lie_as_a_c_compiler_aligns_them():
    for dtype in (TENSOR_DTYPE, PARAMS_DTYPE):
        aligned = np.dtype([(name, dtype[name]) for name in dtype.names], align=True)
        assert aligned.itemsize == dtype.itemsize
        for name in dtype.names:
            assert aligned.fields[name][1] == dtype.fields[name][1]


def test_every_member_of_the_struct_is_asserted_in_the_unit():
    members = [name for name in PARAMS_DTYPE.names if name != "_"]
    text = layout_assertions(PROBLEM)
    assert text.count("static_assert") == 2 + len(TENSOR_DTYPE.names) + len(members)
    assert f"sizeof(Params) == {PARAMS_DTYPE.itemsize}" in text
