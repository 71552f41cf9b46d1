"""Packed structs equal records of the NumPy dtype, whichever fields are fixed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.families.params import PARAMS_DTYPE, TENSOR_DTYPE
from cupy_flash.gpu.params import PackedStruct

strides = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)
VALUES = {
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "float64": st.floats(allow_nan=False),
}
FIELDS = [name for name in PARAMS_DTYPE.names if name != "_"]


@given(st.data())
def test_packing_fills_every_field_of_the_dtype(data):
    """Some fields are fixed; the values of others come in any order, among unrelated values."""
    changing = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, unique=True))
    names = data.draw(st.permutations([*(f"the {name}" for name in changing), "another"]))
    fixed, values = {}, dict.fromkeys(names, 7)
    expected = np.zeros((), PARAMS_DTYPE)
    for name in FIELDS:
        is_tensor = PARAMS_DTYPE[name] == TENSOR_DTYPE
        value = data.draw(VALUES["uint64" if is_tensor else PARAMS_DTYPE[name].name])
        if name in changing:
            values[f"the {name}"] = value
        if is_tensor:
            fixed[name] = data.draw(strides)
            expected[name] = (value if name in changing else 0, *fixed[name])
        else:
            expected[name] = value
            if name not in changing:
                fixed[name] = value
    packed = bytearray(b"\xff" * (PARAMS_DTYPE.itemsize + 8))
    sources = {name: f"the {name}" for name in changing}
    PackedStruct(PARAMS_DTYPE, fixed, sources, names).pack_into(packed, tuple(values.values()))
    assert packed == expected.tobytes() + b"\xff" * 8
