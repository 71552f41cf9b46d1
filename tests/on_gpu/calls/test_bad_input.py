"""Refused calls on a GPU: the error is clear, inputs are unchanged, and the context still works."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import Case, Truth, random_values, with_zero_stride

from cupy_flash import (
    UnsupportedError,
    combine,
    flash_attention,
    flash_attention_qkvpacked,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)

pytestmark = pytest.mark.gpu

CASE = Case(None, "float16", 70, 90, heads_q=4, heads_kv=2)
SHAPE_Q, SHAPE_K = CASE.shape("q"), CASE.shape("k")


def gpu(array: np.ndarray) -> Any:
    return cupy.asarray(array)


@pytest.fixture
def qkv() -> Iterator[list[Any]]:
    """Yield valid arrays; check afterwards that they are unchanged and that a call still works."""
    values = random_values(CASE)
    arrays = [gpu(array) for array in values]
    yield arrays
    for array, value in zip(arrays, values, strict=True):
        assert array.get().tobytes() == value.tobytes(), "an input was written"
    out, lse = flash_attention(*arrays, return_lse=True)
    Truth.of(values).check(out.get(), lse.get())


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return gpu(np.zeros(shape, dtype))


# Function of q, k and v that returns the arguments to change.
Change = Callable[[Any, Any, Any], dict[str, Any]]

WRONG_KINDS: dict[str, tuple[Change, str]] = {
    "q on the host": (lambda q, k, v: {"q": q.get()}, "q lies in host memory and k on a GPU"),
    "v on the host": (lambda q, k, v: {"v": v.get()}, "v lies in host memory and q on a GPU"),
    "out on the host": (lambda q, k, v: {"out": q.get()}, "out lies in host memory and q on a GPU"),
    "a list": (lambda q, k, v: {"q": [[[[1.0]]]]}, "q is a list"),
    "k of another dtype": (
        lambda q, k, v: {"k": zeros(*SHAPE_K, dtype=np.float32)},
        "q, k and v must have one dtype, but are float16, float32 and float16",
    ),
    "bfloat16 among float16": (
        lambda q, k, v: {"v": zeros(*SHAPE_K, dtype=ml_dtypes.bfloat16)},
        "float16, float16 and bfloat16",
    ),
    "integers": (
        lambda q, k, v: {name: zeros(*SHAPE_Q, dtype=np.int32) for name in "qkv"},
        "q has dtype int32",
    ),
    "complex numbers": (
        lambda q, k, v: {name: zeros(*SHAPE_Q, dtype=np.complex64) for name in "qkv"},
        "q has dtype complex64",
    ),
    "out of another dtype": (
        lambda q, k, v: {"out": zeros(*SHAPE_Q, dtype=np.float32)},
        "out has dtype float32",
    ),
    "tile of one number": (lambda q, k, v: {"tile": 64}, "tile is 64"),
}

WRONG_VALUES: dict[str, tuple[Change, str]] = {
    "three axes": (
        lambda q, k, v: {"q": q[0]},
        "k has 4 axes, shape (2, 90, 2, 64); expected 3, as q has",
    ),
    "no axes": (lambda q, k, v: {"k": zeros()}, "k has 0 axes"),
    "another batch": (lambda q, k, v: {"q": q[:1]}, "k has batch 2, but q has 1"),
    "another head_dim": (lambda q, k, v: {"q": q[..., :32]}, "k has head_dim 64"),
    "fewer values than keys": (lambda q, k, v: {"v": v[:, 1:]}, "one seqlen"),
    "heads of v": (lambda q, k, v: {"v": v[:, :, :1]}, "one number of heads"),
    "heads that do not divide": (
        lambda q, k, v: {"q": q[:, :, :3]},
        "q has 3 heads; expected a multiple of the 2 heads",
    ),
    "no key heads": (lambda q, k, v: {"k": k[:, :, :0], "v": v[:, :, :0]}, "k and v have no heads"),
    "head_dim over 576": (
        lambda q, k, v: {name: zeros(1, 8, 1, 577) for name in "qkv"},
        "head_dim of q and k is 577; expected 1 to 576",
    ),
    "head_dim 0": (lambda q, k, v: {"q": q[..., :0], "k": k[..., :0]}, "is 0; expected 1 to 576"),
    "layout": (lambda q, k, v: {"layout": "sbhd"}, "layout is 'sbhd'"),
    "backend": (lambda q, k, v: {"backend": "tpu"}, "backend is 'tpu'"),
    "cpu backend": (lambda q, k, v: {"backend": "cpu"}, "pass NumPy arrays"),
    "NaN scale": (lambda q, k, v: {"softmax_scale": np.nan}, "softmax_scale is nan"),
    "infinite scale": (lambda q, k, v: {"softmax_scale": np.inf}, "is inf"),
    "offset without a mask": (lambda q, k, v: {"q_offset": 3}, "causal=True"),
    "family": (lambda q, k, v: {"family": "magic"}, "unknown family 'magic'"),
    "tile": (lambda q, k, v: {"tile": {"rows": 4}}, "unknown tile field 'rows'"),
    "shape of out": (
        lambda q, k, v: {"out": zeros(2, 71, 4, 64)},
        "out has shape (2, 71, 4, 64); expected (2, 70, 4, 64)",
    ),
    "out with gaps in its rows": (
        lambda q, k, v: {"out": zeros(2, 70, 4, 128)[..., ::2]},
        "contiguous last axis",
    ),
    "out over itself": (
        lambda q, k, v: {"out": with_zero_stride(zeros(*SHAPE_Q), 2)},
        "out overlaps itself",
    ),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_wrong_kind_or_dtype_is_a_type_error(name: str, qkv: list[Any]) -> None:
    change, message = WRONG_KINDS[name]
    arguments = dict(zip("qkv", qkv, strict=True)) | change(*qkv)
    with pytest.raises(TypeError, match=re.escape(message)):
        flash_attention(**arguments)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_shape_or_value_is_a_value_error(name: str, qkv: list[Any]) -> None:
    change, message = WRONG_VALUES[name]
    arguments = dict(zip("qkv", qkv, strict=True)) | change(*qkv)
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(**arguments)


@pytest.mark.parametrize("shape", [(2, 70, 4, 64), (2, 70, 2, 4, 64), (70,)])
def test_a_packed_array_of_another_shape_is_a_value_error(
    shape: tuple[int, ...], qkv: list[Any]
) -> None:
    with pytest.raises(ValueError, match="expected \\(batch, seqlen, 3, heads, head_dim\\)"):
        flash_attention_qkvpacked(zeros(*shape))


@pytest.mark.parametrize(
    ("family", "tile"),
    [
        ("mma", {"Br": 128, "Bc": 128, "warps": 4, "stages": 4}),
        ("simt", {"Br": 128, "Bc": 128, "threads": 128, "rows_per_thread": 8}),
        ("naive", {"Br": 64, "Bc": 64}),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_before_anything_is_launched(
    family: str, tile: dict[str, int], qkv: list[Any]
) -> None:
    wide = [gpu(np.zeros((1, 40, 1, 256), np.float16)) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="tile"):
        flash_attention(*wide, family=family, tile=tile)


def test_a_family_that_lacks_the_dtype_is_refused(qkv: list[Any]) -> None:
    double = [zeros(1, 8, 1, 64, dtype=np.float64) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="not float64"):
        flash_attention(*double, family="mma")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("offset", [0, 1, 64, 70 * 2 * 64])
def test_out_may_not_overlap_an_input(name: str, offset: int, qkv: list[Any]) -> None:
    index = "qkv".index(name)
    size = int(np.prod(SHAPE_Q))
    shape = qkv[index].shape
    buffer = zeros(2 * size)
    inputs = list(qkv)
    inputs[index] = buffer[: int(np.prod(shape))].reshape(shape)
    out = cupy.ndarray(SHAPE_Q, np.float16, buffer.data + 2 * offset)
    before = buffer.get().tobytes()
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        flash_attention(*inputs, out=out)
    assert buffer.get().tobytes() == before


MISALIGNED = [("float32", 2), ("float16", 1), ("bfloat16", 1), ("float64", 4)]


def beside(array: np.ndarray, offset: int) -> Any:
    """Return the array on the GPU, `offset` bytes past an aligned address."""
    memory = cupy.asarray(np.zeros(array.nbytes + 16, np.uint8))
    moved = cupy.ndarray(array.shape, array.dtype, memory.data + offset)
    whole = np.zeros(memory.nbytes, np.uint8)
    whole[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    memory.set(whole)
    return moved


@pytest.mark.parametrize(("dtype", "offset"), MISALIGNED)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_at_an_address_that_no_load_can_use_is_copied(
    name: str, dtype: str, offset: int, qkv: list[Any]
) -> None:
    values = random_values(dataclasses.replace(CASE, dtype=dtype))
    arrays = [gpu(array) for array in values]
    index = "qkv".index(name)
    arrays[index] = beside(values[index], offset)
    for _ in range(2):
        out, lse = flash_attention(*arrays, return_lse=True)
        Truth.of(values).check(out.get(), lse.get())


@pytest.mark.parametrize("axes", ["every other row", "every other column"])
def test_a_part_of_an_array_at_such_an_address_is_copied(axes: str, qkv: list[Any]) -> None:
    values = list(random_values(dataclasses.replace(CASE, dtype="float32")))
    q = values[0]
    if axes == "every other row":
        values[0] = q[:, ::2]
        moved = beside(q, 2)[:, ::2]
    else:
        values[0], values[1] = q[..., ::2], values[1][..., ::2]
        moved = beside(q, 2)[..., ::2]
    out = flash_attention(moved, gpu(values[1]), gpu(values[2]))
    Truth.of(tuple(np.ascontiguousarray(x) for x in values)).check(out.get())


@pytest.mark.parametrize(("dtype", "offset"), MISALIGNED)
def test_an_out_at_an_address_that_no_store_can_use_is_refused(
    dtype: str, offset: int, qkv: list[Any]
) -> None:
    case = dataclasses.replace(CASE, dtype=dtype)
    values = random_values(case)
    out = beside(np.zeros(case.shape("out"), values[0].dtype), offset)
    with pytest.raises(ValueError, match=f"out lies at address {out.data.ptr:#x}; expected a mult"):
        flash_attention(*map(gpu, values), out=out)


def test_lengths_at_an_address_that_no_load_can_use_are_copied(qkv: list[Any]) -> None:
    q, k, v = (array.reshape(-1, *array.shape[2:]) for array in qkv)
    starts = [np.array([0, rows, 2 * rows], np.int32) for rows in (CASE.seqlen_q, CASE.seqlen_k)]
    most = (CASE.seqlen_q, CASE.seqlen_k)
    expected = flash_attention_varlen(q, k, v, *map(gpu, starts), *most)
    out = flash_attention_varlen(q, k, v, *(beside(x, 2) for x in starts), *most)
    np.testing.assert_array_equal(out.get(), expected.get())


def test_a_cache_at_an_address_that_no_load_can_use_is_refused(qkv: list[Any]) -> None:
    q, k, v = qkv
    moved = beside(k.get(), 1)
    with pytest.raises(ValueError, match=f"k_cache lies at address {moved.data.ptr:#x}"):
        flash_attention_with_kvcache(q, moved, v, cache_seqlens=5)


def test_partial_results_at_addresses_that_no_load_can_use_are_copied(qkv: list[Any]) -> None:
    parts = [flash_attention(qkv[0], k, v, return_lse=True) for k, v in halves(*qkv[1:])]
    outs, lses = (np.stack([part[i].get() for part in parts]) for i in (0, 1))
    sinks = np.arange(outs.shape[-2], dtype=np.float32)
    values = (outs, lses, sinks)
    expected, expected_lse = combine(*map(gpu, values[:2]), sinks=gpu(sinks))
    for index, offset in enumerate((1, 2, 2)):
        arrays = [gpu(array) for array in values]
        arrays[index] = beside(values[index], offset)
        out, lse = combine(*arrays[:2], sinks=arrays[2])
        np.testing.assert_array_equal(out.get(), expected.get())
        np.testing.assert_array_equal(lse.get(), expected_lse.get())
    with pytest.raises(ValueError, match="out lies at address"):
        combine(gpu(outs), gpu(lses), out=beside(outs[0], 1))


def halves(k: Any, v: Any) -> list[tuple[Any, Any]]:
    middle = k.shape[1] // 2
    return [(k[:, :middle], v[:, :middle]), (k[:, middle:], v[:, middle:])]


def test_an_array_that_is_missing_is_a_type_error(qkv: list[Any]) -> None:
    _, k, v = qkv
    with pytest.raises(TypeError, match="q is a NoneType; expected a NumPy or CuPy array"):
        flash_attention(None, k, v)
    packed = (array.reshape(-1, *array.shape[2:]) for array in qkv)
    starts = gpu(np.array([0, CASE.seqlen_q, 2 * CASE.seqlen_q], np.int32))
    with pytest.raises(TypeError, match="cu_seqlens_k is a NoneType; expected a NumPy or"):
        flash_attention_varlen(*packed, starts, None, CASE.seqlen_q, CASE.seqlen_k)
    with pytest.raises(TypeError, match="q is a NoneType; expected a NumPy or CuPy array"):
        flash_attention_with_kvcache(None, k, v, cache_seqlens=5)


@pytest.mark.filterwarnings("default")
def test_an_out_of_jax_is_refused(qkv: list[Any]) -> None:
    jax = pytest.importorskip("jax")
    if all(device.platform != "gpu" for device in jax.devices()):
        pytest.skip("this JAX has no GPU")
    arrays = [jax.numpy.asarray(array.get()) for array in qkv]
    out = jax.numpy.zeros(SHAPE_Q, np.float16)
    with pytest.raises(TypeError, match="out is a JAX array, which is immutable"):
        flash_attention(*arrays, out=out)
    assert not np.asarray(out).any()


Split = Callable[[Any], tuple[Any, Any]]
SPLITS: dict[str, tuple[Split, tuple[int, ...]]] = {
    "even_and_odd_heads": (lambda x: (x[:, :, ::2], x[:, :, 1::2]), (2, 70, 8, 64)),
    "lower_and_upper_columns": (lambda x: (x[..., :64], x[..., 64:]), (2, 70, 4, 128)),
    "even_and_odd_rows": (lambda x: (x[:, ::2], x[:, 1::2]), (2, 140, 4, 64)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_out_may_lie_between_the_parts_of_an_input(name: str, qkv: list[Any]) -> None:
    split, shape = SPLITS[name]
    buffer = zeros(*shape)
    values = random_values(CASE)
    host = np.zeros(shape, np.float16)
    split(host)[0][...] = values[0]
    buffer.set(host)
    q, out = split(buffer)
    assert flash_attention(q, *qkv[1:], out=out) is out
    after = buffer.get()
    np.testing.assert_array_equal(split(after)[0], values[0])
    Truth.of(values).check(split(after)[1])


def test_arrays_of_another_device_are_refused(qkv: list[Any]) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU only")
    with cupy.cuda.Device(1):
        other = [gpu(array) for array in random_values(CASE)]
        with pytest.raises(ValueError, match="q lies on device 0, but the current device is 1"):
            flash_attention(*qkv)
        # This call loads the same kernels again, for device 1.
        out = flash_attention(*other)
        Truth.of(random_values(CASE)).check(out.get())
    with pytest.raises(ValueError, match="k lies on device 1, but the current device is 0"):
        flash_attention(qkv[0], other[1], qkv[2])
    out = zeros(*SHAPE_Q)
    flash_attention(*qkv, out=out)
    with cupy.cuda.Device(1):
        far_out = zeros(*SHAPE_Q)
    # This call differs from the successful one above only in the device of `out`.
    with pytest.raises(ValueError, match="out lies on device 1, but the current device is 0"):
        flash_attention(*qkv, out=far_out)
