"""Array libraries of inputs and results, layouts, alignment, and which arrays need no copy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.foreign import Foreign

from cupy_flash import flash_attention
from cupy_flash.arrays import kinds, strided
from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.calls import arguments

SHAPE = (2, 3, 4, 8)


def test_an_array_without_memory_lies_as_a_new_one_would(rng):
    for _ in range(200):
        shape = tuple(rng.integers(0, 5, rng.integers(0, 6)))
        dtype = rng.choice([np.float16, np.float64, ml_dtypes.bfloat16, np.bool_, np.uint64])
        array = np.zeros(shape, dtype).transpose(rng.permutation(len(shape)))
        array = array[tuple(slice(None, None, int(rng.choice([1, 2, -1]))) for _ in shape)]
        if rng.integers(3) == 0:
            array = np.broadcast_to(array, (3, *array.shape))
        for order in ("C", "K"):
            expected = np.empty_like(array, order=order)
            found = strided.unallocated_copy(array, order)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if array.size:
                assert found.strides == expected.strides
            assert strided.is_readable_in_place(found) == strided.is_readable_in_place(expected)


def slices(length):
    return st.builds(
        slice, st.integers(0, length), st.integers(0, length), st.sampled_from([1, 2, -1])
    )


def overlap(first, second):
    try:
        require_no_overlap(("first", "second"), (first, second), ("second",))
    except ValueError:
        return True
    return False


@given(st.data())
def test_overlap_is_what_numpy_finds(data):
    base = np.zeros((6, 5, 4))
    first, second = (
        base[data.draw(slices(6)), data.draw(slices(5)), data.draw(slices(4))] for _ in range(2)
    )
    assert overlap(first, second) == np.shares_memory(first, second)


def test_interleaved_arrays_do_not_overlap_though_their_ranges_do():
    packed = np.zeros((1, 5, 3, 2, 8), np.float32)
    assert not overlap(packed[:, :, 0], packed[:, :, 1])
    assert overlap(packed[:, :, 0], packed)


def test_the_address_of_a_reversed_array_is_that_of_its_first_element():
    base = np.zeros(8, np.float32)
    assert strided.address_of(base[::-1]) == strided.address_of(base) + 28


@pytest.mark.parametrize(
    ("view", "readable"),
    [
        (lambda a: a, True), (lambda a: a[:, ::2], True), (lambda a: a[::-1, ::-1, ::-1], True),
        (lambda a: a[..., 1:], True), (lambda a: a.swapaxes(1, 2), True),
        (lambda a: np.broadcast_to(a[:, :1], SHAPE), True), (lambda a: a[..., :1], True),
        (lambda a: a[:0, ..., ::2], True), (lambda a: a[..., ::2], False),
        (lambda a: a[..., ::-1], False), (lambda a: a.swapaxes(2, 3), False),
        (lambda a: np.broadcast_to(a[..., :1], SHAPE), False),
    ],
)  # fmt: skip
def test_an_array_is_read_in_place_where_its_last_axis_is_contiguous(view, readable):
    array = view(np.zeros(SHAPE, np.float32))
    assert strided.is_readable_in_place(array) == readable
    result = strided.readable_in_place(array)
    assert (result is array) == readable
    np.testing.assert_array_equal(result, array)
    assert strided.is_readable_in_place(result)


def test_strides_that_are_no_whole_elements_need_a_copy():
    records = np.zeros(6, [("values", np.float32, 8), ("tag", np.int16)])
    array = records["values"].reshape(1, 6, 1, 8)
    assert array.strides[1] % 4 != 0
    assert not strided.is_readable_in_place(array)


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (1, 4), (2, 8), (3, 4), (4, 16)])
def test_a_spec_holds_strides_in_elements_and_the_alignment_of_the_address(offset, alignment):
    array = np.zeros(SHAPE, np.float32)[:, ::2]
    spec = strided.spec_of(array, 1024 + 4 * offset)
    assert spec.shape == (2, 2, 4, 8)
    assert spec.strides == (96, 64, 8)
    assert (spec.dtype, spec.alignment) == ("float32", alignment)


def test_an_array_without_memory_limits_no_alignment():
    assert strided.spec_of(np.zeros((0, 3, 4, 8), np.float16), 0).alignment == 16


def test_the_bhsd_layout_is_a_view_with_two_axes_swapped():
    array = np.zeros(SHAPE)
    assert strided.to_bshd(array, "bhsd").shape == (2, 4, 3, 8)
    assert strided.to_bshd(array, "bhsd").base is array
    assert strided.to_bshd(array, "bshd") is array


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_dtypes_go_by_the_names_of_the_problem(dtype):
    array = np.zeros(SHAPE, dtype)
    strided.require_float("q", array)
    assert strided.dtype_name(array) == np.dtype(dtype).name


def test_a_numpy_array_is_taken_and_given_back_as_it_is():
    array = np.zeros(SHAPE)
    normal, convert = kinds.normalize("q", array), kinds.result_converter("q", array)
    assert normal is array
    assert convert(array) is array


def test_host_memory_of_another_library_is_read_without_a_copy_and_answered_in_kind():
    base = np.zeros(SHAPE, np.float32)
    foreign = Foreign(base)
    normal, convert = kinds.normalize("q", foreign), kinds.result_converter("q", foreign)
    assert isinstance(normal, np.ndarray)
    assert np.shares_memory(normal, base)
    assert isinstance(convert(np.ones(3, np.float32)), Foreign)


def test_an_array_that_names_no_dtype_is_read_all_the_same():
    foreign = Foreign(np.ones(SHAPE))
    del foreign.dtype
    assert kinds.normalize("q", foreign).sum() == 2 * 3 * 4 * 8


def test_memory_that_is_neither_host_nor_cuda_is_refused():
    rocm = Foreign(np.zeros(SHAPE), device_type=10)
    with pytest.raises(TypeError, match="k lies on DLPack device type 10; expected host or CUDA"):
        kinds.normalize("k", rocm)


def test_an_array_that_cannot_be_exported_is_refused_with_its_reason():
    class Locked(Foreign):
        def __dlpack__(self, **options):
            raise BufferError("it requires a gradient")

    with pytest.raises(TypeError, match="v cannot be read by NumPy: it requires a gradient"):
        kinds.normalize("v", Locked(np.zeros(SHAPE)))


def test_a_library_that_cannot_take_results_back_is_refused():
    class OneWay(Foreign):
        __array_namespace__ = None

    one_way = OneWay(np.zeros(SHAPE))
    with pytest.raises(TypeError, match="q is an OneWay, whose library has no from_dlpack"):
        kinds.result_converter("q", one_way)
    # Results come from the library of q, so the library of k and v may lack `from_dlpack`.
    k = np.ones(SHAPE, np.float32)
    with pytest.raises(TypeError, match="q is an OneWay,"):
        flash_attention(one_way, k, k)
    v = OneWay(np.full(SHAPE, 3, np.float32))
    np.testing.assert_allclose(flash_attention(k, OneWay(k), v), 3, rtol=1e-6)


@pytest.mark.parametrize("number", [2**31, -(2**40), 2**63, 2**80])
def test_integers_that_int32_does_not_hold_are_refused_as_such(number):
    with pytest.raises(ValueError, match="lengths holds integers that do not fit int32"):
        kinds.normalize_int32("lengths", [3, number], on_host=True)


@pytest.mark.parametrize("value", [1.5, True, "7", None])
def test_a_list_of_something_else_than_integers_is_refused(value):
    with pytest.raises(TypeError, match=r"lengths holds an? \w+; expected integers"):
        kinds.normalize_int32("lengths", [3, value], on_host=True)


@pytest.mark.parametrize("array", [[[1.0]], None, 3.5, "q", memoryview(b"abcd")])
def test_what_is_no_array_is_refused_by_name(array):
    with pytest.raises(TypeError, match=r"q is a .*; expected a NumPy or CuPy array"):
        kinds.normalize("q", array)


def test_device_memory_without_cupy_is_told_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match=r"q lies in GPU memory.*pip install"):
        kinds.normalize("q", Foreign(np.zeros(SHAPE), device_type=2))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_share_their_memory_both_ways(name):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(192.0).reshape(SHAPE).to(getattr(torch, name))
    normal, convert = kinds.normalize("q", tensor), kinds.result_converter("q", tensor)
    assert strided.dtype_name(normal) == name
    assert normal.flags.writeable
    assert strided.address_of(normal) == tensor.data_ptr()
    back = convert(normal)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_a_torch_tensor_that_requires_a_gradient_is_refused_by_name():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"k requires a gradient, .*; pass k.detach\(\)"):
        kinds.normalize("k", torch.zeros(SHAPE, requires_grad=True))


def test_what_is_remembered_of_types_and_dtypes_has_a_bound():
    for n in range(strided._MAX_TYPES + 10):
        assert not strided.is_cupy_type(type(f"Kind{n}", (), {}))
    assert len(strided.is_cupy_type.__self__) <= strided._MAX_TYPES
    for cached in (strided._dtype_name, arguments._record_with):
        assert cached.cache_parameters()["maxsize"] is not None
