"""Merging partial results on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.combine_support import (
    DTYPES,
    assert_merged,
    random_parts,
    random_sinks,
    with_sinks,
)
from support.gpu import cupy
from support.gpu.gpu_support import capture_call

from cupy_flash import attention_reference, combine
from cupy_flash.reference.dense import error_bound, max_error

pytestmark = pytest.mark.gpu

SHAPES = [
    (3, 2, 113, 6, 40),
    (1, 1, 1, 1, 1),
    (33, 2, 1, 8, 64),
    (2, 17, 3, 5),
    (7, 239, 2, 256),
    (5, 3, 11, 4, 96),
    (1000, 2, 1, 3, 128),
    (4, 1, 3, 2, 799),
]


def gpu(array: np.ndarray) -> Any:
    return cupy.asarray(array)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    return gpu(np.full(shape, np.nan, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_parts_are_merged_to_the_precision_of_their_sums(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> None:
    values = random_parts(rng, dtype, shape)
    parts = [gpu(array) for array in values]
    out = poisoned(shape[1:], DTYPES[dtype])
    result, lse = combine(*parts, out=out)
    assert result is out
    assert_merged(out.get(), lse.get(), *values)
    for array, before in zip(parts, values, strict=True):
        assert array.get().tobytes() == before.tobytes(), "an input was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sink_is_one_more_part_without_values(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> None:
    values = random_parts(rng, dtype, shape)
    for kind in {values[0].dtype, values[1].dtype}:
        sinks = random_sinks(rng, shape).astype(kind)
        out = poisoned(shape[1:], DTYPES[dtype])
        # This view is not contiguous, and is copied, because the kernel reads contiguous sinks.
        apart = gpu(np.repeat(sinks, 2))[::2]
        result, lse = combine(*map(gpu, values), sinks=apart, out=out)
        assert_merged(result.get(), lse.get(), *with_sinks(*values, sinks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_attention_give_the_attention_over_all_keys(
    rng: np.random.Generator, dtype: str
) -> None:
    q = rng.standard_normal((2, 113, 4, 24))
    k, v = (rng.standard_normal((2, 203, 2, 24)) for _ in "kv")
    parts = [
        attention_reference(q, k[:, begin:end], v[:, begin:end], return_lse=True)
        for begin, end in ((0, 0), (0, 60), (60, 61), (61, 203))
    ]
    out_partial, lse_partial = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    wide = np.float64 if dtype == "float64" else np.float32
    out, lse = combine(gpu(out_partial.astype(DTYPES[dtype])), gpu(lse_partial.astype(wide)))
    whole, whole_lse = attention_reference(q, k, v, return_lse=True)
    # The parts are rounded to this dtype, as a naive computation rounds its result.
    rounded = whole.astype(DTYPES[dtype])
    assert max_error(out.get(), whole) <= error_bound(rounded, whole, DTYPES[dtype], lse=whole_lse)
    assert max_error(lse.get(), whole_lse) <= 16 * np.finfo(wide).eps * np.abs(whole_lse).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_parts_are_merged_as_one_array_of_them(
    rng: np.random.Generator, dtype: str
) -> None:
    values = random_parts(rng, dtype, SHAPES[0])
    expected = combine(*map(gpu, values))
    found = combine(*([gpu(part) for part in parts] for parts in values))
    for array, right in zip(found, expected, strict=True):
        assert array.get().tobytes() == right.get().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_lists_of_tensors_are_merged(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    out = torch.randn((3, 2, 30, 4, 24), device="cuda").to(getattr(torch, dtype))
    lse = torch.randn((3, 2, 4, 30), device="cuda")
    expected = combine(out, lse)
    found = combine(list(out), list(lse))
    for tensor, right in zip(found, expected, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_part_comes_out_bit_for_bit(rng: np.random.Generator, dtype: str) -> None:
    out_partial, lse_partial = random_parts(rng, dtype, (1, 2, 11, 3, 20), unseen=0)
    out, lse = combine(gpu(out_partial), gpu(lse_partial))
    assert out.get().tobytes() == out_partial[0].tobytes()
    assert lse.get().tobytes() == lse_partial[0].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_that_saw_no_key_counts_nothing_whatever_it_holds(
    rng: np.random.Generator, dtype: str
) -> None:
    out_partial, lse_partial = random_parts(rng, dtype, (2, 1, 5, 2, 24), unseen=0)
    lse_partial[1] = -np.inf
    for garbage in (np.nan, np.inf, -np.inf):
        out_partial[1] = garbage
        out, lse = combine(gpu(out_partial), gpu(lse_partial))
        assert out.get().tobytes() == out_partial[0].tobytes()
        assert lse.get().tobytes() == lse_partial[0].tobytes()


def test_a_row_that_no_part_saw_a_key_for_is_zero_with_an_lse_of_minus_infinity() -> None:
    out, lse = combine(
        poisoned((3, 1, 2, 1, 4), np.float16), gpu(np.full((3, 1, 1, 2), -np.inf, np.float32))
    )
    assert not out.get().any()
    assert (lse.get() == -np.inf).all()


def test_nan_and_infinite_sums_of_a_part_show_in_the_row() -> None:
    lse_partial = np.array([[[[0.0, 1.0, 2.0]]], [[[np.nan, np.inf, 2.0]]]], np.float32)
    merged = combine(gpu(np.ones((2, 1, 3, 1, 2), np.float32)), gpu(lse_partial))
    out, lse = (array.get() for array in merged)
    assert np.isnan(out[0, :2]).all()
    assert np.isnan(lse[0, 0, 0])
    assert lse[0, 0, 1] == np.inf
    assert (out[0, 2] == 1).all()


# Memory layouts


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_and_out_of_any_alignment_and_strides(
    rng: np.random.Generator, dtype: str, start: int
) -> None:
    values = random_parts(rng, dtype, (3, 2, 13, 2, 37))
    # The arrays are filled on the host, so that only the kernel under test runs.
    whole = np.full((4, 2, 14, 3, 48), np.nan, DTYPES[dtype])
    part = (slice(3), slice(None), slice(1, None), slice(2), slice(start, start + 37))
    whole[part] = values[0]
    around = poisoned((2, 15, 2, 45), DTYPES[dtype])
    rows = (slice(None), slice(13), slice(None), slice(4 - start, 41 - start))
    combine(gpu(whole)[part], gpu(values[1]), out=around[rows])
    expected, _ = combine(gpu(values[0]), gpu(values[1]))
    left = around.get()
    assert left[rows].tobytes() == expected.get().tobytes()
    left[rows] = np.nan
    assert np.isnan(left).all(), "memory around out was written"


def test_parts_whose_last_axis_is_not_contiguous_are_copied(rng: np.random.Generator) -> None:
    values = random_parts(rng, "float32", (4, 2, 9, 3, 16))
    expected = combine(*(gpu(array) for array in values))
    strided = combine(*(gpu(array.T.copy()).T for array in values))
    for got, wanted in zip(strided, expected, strict=True):
        assert got.get().tobytes() == wanted.get().tobytes()


@pytest.mark.parametrize("shape", [(2, 0, 5, 3, 8), (2, 0, 3, 8), (2, 4, 0, 3, 8)])
def test_no_rows_give_empty_results(shape: tuple[int, ...]) -> None:
    values = random_parts(np.random.default_rng(0), "float32", shape)
    out, lse = combine(*(gpu(array) for array in values))
    assert out.shape == shape[1:]
    assert lse.size == 0


# Repeated and captured calls


def test_the_same_parts_give_the_same_bits_every_time(rng: np.random.Generator) -> None:
    parts = [gpu(array) for array in random_parts(rng, "float16", (9, 2, 113, 6, 64))]
    results = {tuple(array.get().tobytes() for array in combine(*parts)) for _ in range(5)}
    assert len(results) == 1


def test_a_captured_merge_follows_what_the_parts_hold(rng: np.random.Generator) -> None:
    first, second = (random_parts(rng, "float16", (5, 2, 7, 6, 64)) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        parts = [gpu(array) for array in first]
        out = poisoned((2, 7, 6, 64), np.float16)
        graph, (_, lse) = capture_call(stream, combine, *parts, out=out)
        for array, values in zip(parts, second, strict=True):
            array.set(values, stream=stream)
        for array in (out, lse):
            array.data.memset_async(0xFF, array.nbytes, stream)
        graph.launch(stream)
        stream.synchronize()
        assert_merged(out.get(), lse.get(), *second)


# Refused arguments


@pytest.mark.parametrize("position", [0, 1])
def test_another_byte_order_is_refused_after_the_same_call_in_the_right_one(
    rng: np.random.Generator, position: int
) -> None:
    parts = [gpu(array) for array in random_parts(rng, "float32", (3, 2, 5, 2, 8))]
    combine(*parts)
    parts[position] = parts[position].view(parts[position].dtype.newbyteorder())
    with pytest.raises(TypeError, match=r"in another byte order"):
        combine(*parts)


def test_arrays_of_host_and_gpu_together_are_refused() -> None:
    out_partial, lse_partial = np.zeros((2, 1, 3, 8), np.float16), np.zeros((2, 3, 1), np.float32)
    with pytest.raises(TypeError, match="lse_partial lies in host memory and out_partial on a GPU"):
        combine(gpu(out_partial), lse_partial)
    with pytest.raises(TypeError, match="out_partial lies in host memory and out on a GPU"):
        combine(out_partial, lse_partial, out=gpu(out_partial[0]))


@pytest.mark.parametrize("position", [0, 1])
def test_an_out_that_shares_memory_with_the_parts_is_refused(position: int) -> None:
    out_partial = gpu(np.zeros((2, 1, 3, 8), np.float16))
    lse_partial = gpu(np.zeros((2, 3, 1), np.float32))
    with pytest.raises(ValueError, match="out overlaps out_partial"):
        combine(out_partial, lse_partial, out=out_partial[position])
