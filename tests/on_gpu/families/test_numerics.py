"""Every kernel family against the reference, on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.gpu import cupy
from support.gpu.gpu_support import (
    DTYPES,
    Arrays,
    Case,
    Guarded,
    Truth,
    bits,
    check,
    checks_of,
    checks_of_supported,
    current_device,
    on_gpu,
    random_values,
    require_free_memory,
    run,
    with_zero_stride,
)
from support.hard_values import check_masked_keys
from support.prebuilt import cubins, use_cubins

from cupy_flash import flash_attention, flash_attention_qkvpacked
from cupy_flash.families import FORWARD

__all__ = ["cubins", "use_cubins"]  # fixtures

pytestmark = pytest.mark.gpu

# One or two dtypes per family, for tests that do not depend on the dtype. The decode family is
# tested in test_decode.py.
FAMILY_DTYPES = [
    ("hopper", "float16"),
    ("hopper", "float32"),
    ("mma", "float16"),
    ("mma", "float32"),
    ("simt", "float32"),
    ("naive", "float32"),
]
assert {family for family, _ in FAMILY_DTYPES} == set(FORWARD) - {"decode"}


test_ragged_sequences_are_right_in_every_dtype = checks_of_supported(
    Case(family, dtype, seqlen_q, seqlen_k, causal=causal)
    for family in FORWARD
    for dtype in DTYPES
    for causal in (False, True)
    for seqlen_q, seqlen_k in ((113, 203), (1, 239), (799, 3), (64, 64), (257, 129))
)

test_what_the_planner_chooses_is_right = checks_of_supported(
    Case(None, dtype, 129, 190, head_dim=dim, head_dim_v=dim, causal=causal)
    for dtype in DTYPES
    for dim in (64, 128)
    for causal in (False, True)
)


HEAD_DIMS = [(d, d) for d in (1, 7, 33, 40, 72, 96, 100, 128, 160, 192, 256)]
HEAD_DIMS += [(64, 128), (192, 128), (40, 33), (1, 256), (256, 1), (72, 96)]


def dtypes_for(family: str, index: int) -> tuple[str, ...]:
    """Return a 16-bit dtype and float32 for `hopper` and `mma`, else one dtype, by index."""
    if family in ("hopper", "mma"):
        return (("float16", "bfloat16")[index % 2], "float32")
    return (tuple(DTYPES)[index % 4],)


test_any_head_dims_are_right = checks_of_supported(
    Case(family, dtype, 77, 150, head_dim=dim, head_dim_v=dim_v, causal=index % 3 == 1)
    for family in FORWARD
    for index, (dim, dim_v) in enumerate(HEAD_DIMS)
    for dtype in dtypes_for(family, index)
)

test_rows_of_any_alignment_and_both_layouts_are_read_and_written_in_place = checks_of_supported(
    Case(family, dtype, 97, 150, 2, 3, 3, 40, 33, layout=layout, alignment=alignment)
    for family in FORWARD
    for dtype in ("bfloat16", "float32", "float64")
    for alignment in (16, 8, 4, 2)
    if alignment >= DTYPES[dtype].itemsize
    for layout in ("bshd", "bhsd")
)

test_q_offset_moves_the_causal_mask_and_rows_without_keys_are_zero = checks_of_supported(
    Case(family, dtype, 113, 150, causal=True, q_offset=q_offset)
    for family, dtype in FAMILY_DTYPES
    for q_offset in (-(2**40), -113, -112, -50, 0, 36, 149, 150, 2**40)
)

test_any_softmax_scale_is_right = checks_of_supported(
    Case(family, dtype, 70, 150, causal=causal, softmax_scale=scale)
    for family, dtype in FAMILY_DTYPES
    for scale, causal in ((0.0, True), (-0.2, True), (-1.5, False), (1e-4, False), (5.0, True))
)

test_query_heads_share_key_value_heads_in_order = checks_of_supported(
    Case(family, dtype, 70, 150, heads_q=heads_q, heads_kv=heads_kv, causal=True)
    for family, dtype in FAMILY_DTYPES
    for heads_q, heads_kv in ((8, 8), (8, 2), (6, 3), (7, 1))
)

test_one_head_with_many_keys_is_right = checks_of_supported(
    Case(family, dtype, seqlen_q, 4099, batch=1, heads_q=1, heads_kv=1, causal=True, q_offset=off)
    for family, dtype in (*FAMILY_DTYPES, ("simt", "float64"))
    # With an offset of 5, most splits have no visible key.
    for seqlen_q, off in ((1, None), (113, None), (113, 5), (113, -50))
)

test_many_heads_over_many_key_tiles_are_right = checks_of_supported(
    Case(family, dtype, 33, 333, batch=3, heads_q=80, heads_kv=20, causal=causal)
    for family, dtype in FAMILY_DTYPES
    for causal in (False, True)
)

test_empty_sequences_and_batches_give_zero_or_nothing = checks_of_supported(
    Case(family, dtype, seqlen_q, seqlen_k, batch=batch)
    for family, dtype in FAMILY_DTYPES
    for batch, seqlen_q, seqlen_k in ((2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 7))
)


def sampled_tiles(case: Case, count: int) -> list[Case]:
    """Return the case with a fixed random sample of its legal tiles; empty if unsupported."""
    if not case.is_supported():
        return []
    family = FORWARD[str(case.family)]
    tiles = list(family.tiles(case.problem(), current_device()))
    chosen = random.Random(0).sample(tiles, min(count, len(tiles)))
    return [dataclasses.replace(case, tile=tile) for tile in chosen]


# There are enough heads to leave the keys unsplit, and enough keys to fill the ring of KV tiles.
MANY = Case("mma", "float16", 133, 450, batch=4, heads_q=60, heads_kv=20, causal=True)


test_any_legal_tile_is_right = checks_of_supported(
    tiled
    for case, count in (
        (dataclasses.replace(MANY, family="hopper"), 12),
        (MANY, 12),
        (dataclasses.replace(MANY, dtype="bfloat16", head_dim=128, head_dim_v=96), 6),
        (dataclasses.replace(MANY, dtype="float32"), 8),
        (dataclasses.replace(MANY, family="simt", dtype="float32"), 12),
        (dataclasses.replace(MANY, family="simt", dtype="float64"), 4),
        (dataclasses.replace(MANY, family="simt", dtype="float16", seqlen_q=13), 4),
    )
    for tiled in sampled_tiles(case, count)
)


@settings(
    max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    family_dtype=st.sampled_from([*FAMILY_DTYPES, (None, "bfloat16")]),
    seqlens=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    batch=st.integers(0, 3),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    q_offset=st.none() | st.integers(-350, 350),
    softmax_scale=st.none() | st.floats(0, 1),
    layout=st.sampled_from(["bshd", "bhsd"]),
)
def test_random_problems_are_right(
    family_dtype: tuple[str | None, str],
    seqlens: tuple[int, int],
    batch: int,
    heads: tuple[int, int],
    q_offset: int | None,
    softmax_scale: float | None,
    layout: str,
) -> None:
    sizes = (*seqlens, batch, heads[0] * heads[1], heads[0])
    options = {"q_offset": q_offset, "softmax_scale": softmax_scale, "layout": layout}
    case = Case(*family_dtype, *sizes, causal=q_offset is not None, **options)
    assume(case.is_supported())
    check(case)


# float32 rounds the exponents of p by up to 2^-20 if they lie near the exponents' headroom of -16.
test_rows_of_nearly_equal_scores_are_right = checks_of(
    Case(family, "float32", 64, seqlen_k, batch=2, heads_q=6, heads_kv=2, softmax_scale=2.0**-power)
    for family, dtype in FAMILY_DTYPES
    if dtype == "float32"
    for seqlen_k in (2, 5, 40)
    for power in (5, 7, 9)
)

of_families = pytest.mark.parametrize(
    ("family", "dtype"), [pair for pair in FAMILY_DTYPES if Case(*pair).is_supported()]
)


def poisoned_values(case: Case, what: str) -> Arrays:
    """Return random values with one element, or one row, of NaN or infinity."""
    q, k, v = random_values(case)
    name, index, value = POISONS[what]
    {"q": q, "k": k, "v": v}[name][index] = value
    return q, k, v


POISONS = {
    "NaN query": ("q", (0, 37), np.nan),
    "infinite query": ("q", (0, 37, 1, 5), np.inf),
    "NaN key": ("k", (1, 91), np.nan),
    "infinite key": ("k", (1, 91, 0, 5), -np.inf),
    "NaN value": ("v", (0, 91, 1, 7), np.nan),
    "infinite value": ("v", (0, 91, 1, 7), np.inf),
}


@of_families
@pytest.mark.parametrize("what", POISONS)
def test_nan_and_infinity_propagate_as_in_the_reference(family: str, dtype: str, what: str) -> None:
    # Poisoned values are tested without a mask, because a masked value may count as 0 * NaN.
    case = Case(family, dtype, 113, 150, causal="value" not in what)
    check(case, poisoned_values(case, what))


@of_families
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_keys_never_reach_the_output(family: str, dtype: str, poison: float) -> None:
    # Rows before 70 attend to no poisoned key, but some of their KV tiles have such keys.
    case = Case(family, dtype, 113, 150, causal=True, q_offset=0)
    check_masked_keys(case, 70, poison, rows=70)


@of_families
@pytest.mark.parametrize("seqlen_k", [150, 4099])
def test_the_same_inputs_give_the_same_bits(family: str, dtype: str, seqlen_k: int) -> None:
    case = Case(family, dtype, 113, seqlen_k, batch=1, causal=True)
    values = random_values(case)
    out, lse = run(case, values)
    for _ in range(20):
        again, lse_again = run(case, values)
        np.testing.assert_array_equal(bits(again), bits(out))
        np.testing.assert_array_equal(lse_again, lse)


@of_families
def test_without_out_the_result_is_contiguous_and_has_the_same_bits(
    family: str, dtype: str
) -> None:
    case = Case(family, dtype)
    arrays = on_gpu(random_values(case))
    given_out = run(case, random_values(case))[0]
    out = flash_attention(*arrays, **case.choice)
    assert out.flags.c_contiguous
    assert out.dtype == arrays[0].dtype
    np.testing.assert_array_equal(bits(out.get()), bits(given_out))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "reversed_rows": lambda array: array[:, ::-1],
    "every_other_row": lambda array: array[:, ::2],
    "every_other_column": lambda array: array[..., ::2],
    "first_head_for_all": lambda array: with_zero_stride(array, 2),
}


@of_families
@pytest.mark.parametrize("name", VIEWS)
def test_strided_views_are_read_as_they_lie_or_copied(family: str, dtype: str, name: str) -> None:
    if family == "hopper" and name == "reversed_rows":
        pytest.skip("the copy engine takes no negative strides; the planner takes mma for them")
    case, view = Case(family, dtype, 112, 150, head_dim=80, head_dim_v=80), VIEWS[name]
    truth = Truth.of(tuple(map(view, random_values(case))))
    out, lse = flash_attention(
        *map(view, on_gpu(random_values(case))), family=family, return_lse=True
    )
    truth.check(out.get(), lse.get())


@of_families
def test_packed_qkv_is_right(family: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    qkv = rng.standard_normal((2, 113, 3, 4, 64)).astype(DTYPES[dtype])
    truth = Truth.of((qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), causal=True)
    out = flash_attention_qkvpacked(cupy.asarray(qkv), causal=True, family=family)
    truth.check(out.get())


FAR = 2**31 + 2**20  # elements


of_float16_families = pytest.mark.parametrize(
    "family", [name for name in FORWARD if Case(name, "float16").is_supported()]
)


@of_float16_families
@pytest.mark.parametrize("axis", ["batch", "row", "head"])
def test_strides_beyond_32_bits_are_right(family: str, axis: str) -> None:
    require_free_memory(2 * (FAR + 2**20) * 2 + 2**30)
    case = Case(family, "float16", 70, 133, heads_q=2, heads_kv=2)
    values = random_values(case)
    out_values = np.full(case.shape("out"), np.nan, np.float16)
    # q and k are in one buffer, the output is in the other, and v is an ordinary array.
    inputs, outputs = (cupy.ndarray((FAR + 2**20,), np.float16) for _ in range(2))
    arrays = {"v": cupy.asarray(values[2])}
    for name, array, buffer, start in (
        ("q", values[0], inputs, 0),
        ("k", values[1], inputs, 2**19),
        ("out", out_values, outputs, 0),
    ):
        arrays[name] = spread(array, buffer, start, axis)
    out, lse = flash_attention(
        *(arrays[n] for n in "qkv"), out=arrays["out"], return_lse=True, family=family
    )
    result = np.stack([row.get() for row in rows_of(out)]).reshape(out.shape)
    Truth.of(values).check(result, lse.get())


def spread(values: np.ndarray, buffer: Any, start: int, axis: str) -> Any:
    """Return the values in a flat GPU buffer, with the ends of one axis `FAR` elements apart."""
    size = values.itemsize
    number = {"batch": 0, "row": 1, "head": 2}[axis]
    strides = list(values.strides)
    # The stride is a multiple of 16 bytes, so that rows stay aligned.
    strides[number] = -(-FAR // (values.shape[number] - 1) // 8) * 8 * size
    view = cupy.ndarray(
        values.shape, values.dtype, buffer.data + start * size, (*strides[:3], size)
    )
    for row, row_values in zip(rows_of(view), values.reshape(-1, values.shape[3]), strict=True):
        row.set(row_values)
    return view


def rows_of(array: Any) -> Iterator[Any]:
    """Yield the contiguous rows of a 4-d CuPy array, found by pointer arithmetic on the host."""
    for index in np.ndindex(array.shape[:3]):
        offset = sum(i * stride for i, stride in zip(index, array.strides, strict=False))
        yield cupy.ndarray((array.shape[3],), array.dtype, array.data + offset)


@of_float16_families
def test_contiguous_tensors_of_more_than_2_to_the_31_elements_are_right(family: str) -> None:
    case = Case(
        family, "float16", 7, 1003, batch=2100, heads_q=8, heads_kv=8, head_dim=128, head_dim_v=128
    )
    shapes = [case.shape(name) for name in "qkv"]
    sizes = [2 * int(np.prod(shape)) for shape in shapes]
    assert min(sizes[1:]) // 2 > 2**31
    require_free_memory(sum(sizes) + 2**31)
    arrays = [cupy.ndarray(shape, np.float16) for shape in shapes]
    for array, size in zip(arrays, sizes, strict=True):
        array.data.memset_async(0, size)
    sampled = (0, 1049, 2099)
    one = dataclasses.replace(case, batch=1)
    values = {b: random_values(dataclasses.replace(one, q_offset=b)) for b in sampled}
    for b in sampled:
        for array, value in zip(arrays, values[b], strict=True):
            array[b].set(value[0])
    out, lse = flash_attention(*arrays, return_lse=True, family=family)
    for b in range(0, case.batch, 150):
        if b not in sampled:
            assert not out[b].get().any(), "zero values of another batch are not zero here"
    for b in sampled:
        Truth.of(values[b]).check(out[b : b + 1].get(), lse[b : b + 1].get())


def test_what_lies_around_an_array_is_checked() -> None:
    guarded = Guarded(np.zeros((1, 3, 2, 5), np.float32), 4)
    guarded.values()
    beyond = cupy.ndarray((1,), np.float32, guarded.view.data + 5 * 4)
    beyond.set(np.zeros(1, np.float32))
    with pytest.raises(AssertionError, match="around"):
        guarded.values()
