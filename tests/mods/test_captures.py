"""Captures: accepted values, clamped indices, and the layout of the argument struct."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign import Foreign
from support.mods.generated_cuda import Text

from cupy_flash.mods.captures import CaptureSpec, HostArray, read_capture
from cupy_flash.mods.codegen.arguments import arguments_dtype, pack_arguments
from cupy_flash.mods.modification import MaskMod, ScoreMod


@given(st.integers(-(2**31), 2**31 - 1), st.lists(st.integers(-20, 20), min_size=1, max_size=9))
def test_an_index_outside_reads_the_nearest_element(single: int, several: list[int]) -> None:
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    read = HostArray("table", array, np, np.float32)
    rows = np.array(several, np.int32)
    columns = rows[:, None]
    expected = array[np.clip(rows, 0, 2), np.clip(columns, 0, 3)]
    np.testing.assert_array_equal(read[rows, columns], expected)
    assert read[rows, columns].dtype == np.float32
    assert read[np.int32(single), np.int32(-1)] == array[min(max(single, 0), 2), 0]


@pytest.mark.parametrize(
    ("dtype", "read_as"),
    [
        (bool, np.bool_), (np.uint8, np.int32), (np.int32, np.int32), (np.int64, np.int32),
        (np.uint64, np.uint64), (np.float16, np.float32), (ml_dtypes.bfloat16, np.float32),
        (np.float32, np.float32), (np.float64, np.float32),
    ],
)  # fmt: skip
def test_elements_come_as_kernels_compute_with_them(dtype, read_as) -> None:
    array, spec = read_capture("x", np.ones((2, 3), dtype))
    assert HostArray("x", array, np, np.float32)[0, 0].dtype == read_as
    assert spec == CaptureSpec(np.dtype(dtype).name, 2, True)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (True, CaptureSpec("bool")), (np.True_, CaptureSpec("bool")), (3, CaptureSpec("int32")),
        (np.int64(3), CaptureSpec("int32")), (0.5, CaptureSpec("real")),
        (np.float32(0.5), CaptureSpec("real")), (np.ones(()), CaptureSpec("float64", 0)),
        (np.ones((4, 6))[:, ::2], CaptureSpec("float64", 2, False)),
        (np.ones((4, 6))[:, ::6], CaptureSpec("float64", 2, True)),
        (np.ones((4, 6)).T, CaptureSpec("float64", 2, False)),
        (Foreign(np.ones((4, 6), np.float32)), CaptureSpec("float32", 2, True)),
    ],
)  # fmt: skip
def test_a_spec_is_what_device_text_depends_on(value, spec) -> None:
    assert read_capture("x", value)[1] == spec


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", 2**31, ValueError, "does not fit int32; pass a float"),
        ("x", "text", TypeError, "x is a str; expected a NumPy or CuPy array"),
        ("x", 1j, TypeError, "x is a complex"),
        ("x", [1, 2], TypeError, r"x is a list; expected an array: pass np.array\(x\)"),
        ("x", np.ones(3, np.int16), TypeError, "dtype int16; expected one of bool, uint8, int32"),
        ("x", np.ones(3, ">f4"), TypeError, "dtype >f4"),
        ("x", np.ones((1,) * 5), ValueError, "5 axes; expected at most 4"),
        ("x", np.ones((2, 0)), ValueError, "at least one element"),
        ("x", np.ones(3, "i4,i1")["f0"], ValueError, "misaligned elements"),
        ("a name", 1, TypeError, "'a name'; expected the name of a parameter"),
    ],
)
def test_what_cannot_be_captured_is_refused(name, value, error, message) -> None:
    with pytest.raises(error, match=message):
        read_capture(name, value)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**32])
def test_integers_that_int32_does_not_hold_are_refused(number) -> None:
    for held in (2**31 - 1, -(2**31)):
        ids = np.array([[0, held]])
        mask = MaskMod(lambda i, j, ids: ids[0, j] == ids[0, i], ids=ids)
        assert mask.evaluate(0, 0, 1, np.arange(2)).tolist() == [False, True]
    with pytest.raises(ValueError, match=f"ids holds {number}, but int64 is read as int32"):
        MaskMod(lambda i, j, ids: ids[j] == ids[i], ids=np.array([0, number]))


def test_fields_lie_as_in_cpp_and_bear_the_names_of_captures() -> None:
    captures = {
        "n": CaptureSpec("int32"),
        "table": CaptureSpec("float16", 3, True, is_wide=True),
        "factor": CaptureSpec("real"),
        "line": CaptureSpec("int32", 1, True),
        "scale": CaptureSpec("float32", 0),
        "apart": CaptureSpec("int32", 1, False, is_wide=True),
    }
    dtype = arguments_dtype(captures, "double")
    assert dtype.names == ("apart", "factor", "line", "n", "scale", "table")
    assert [dtype.fields[name][1] for name in dtype.names] == [0, 24, 32, 48, 56, 64]
    assert dtype["table"].fields["strides"][1] == 24
    assert dtype.itemsize == 64 + 40
    assert arguments_dtype(captures, "float")["factor"] == np.float32
    assert arguments_dtype({}, "float").itemsize == 4


def test_packed_arguments_hold_shapes_strides_in_elements_and_numbers() -> None:
    table = np.ones((4, 6, 8), np.float32)[::2]
    captures = {"table": CaptureSpec("float32", 3, True), "on": CaptureSpec("bool")}
    record = pack_arguments(captures, {"table": table, "on": True}, {"table": 4096}, "float")
    assert record["table"]["data"] == 4096
    assert record["table"]["shape"].tolist() == [2, 6, 8]
    assert record["table"]["strides"].tolist() == [96, 8]
    assert record["on"] == 1


def test_what_is_written_to_a_captured_array_is_seen_by_the_next_evaluation() -> None:
    table = np.zeros(3, np.float32)
    mod = ScoreMod(lambda score, j, table: score + table[j], table=table)
    table[1] = 7
    assert mod.evaluate(np.float32(1), 0, 0, 0, 1) == 8
    text = Text(mod)
    assert text.arguments()["table"]["data"] == table.ctypes.data
