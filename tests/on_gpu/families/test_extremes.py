"""Every kernel family with extreme inputs: one key, no key, the largest values, any scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_sequences import SEQUENCE_FAMILIES, Target, run_varlen
from support.gpu.gpu_support import (
    DTYPES,
    Arrays,
    Case,
    Truth,
    bits,
    check,
    of_supported_cases,
    random_values,
    run,
)
from support.prebuilt import cubins, use_cubins

from cupy_flash import flash_attention_with_kvcache
from cupy_flash.families import FORWARD

__all__ = ["cubins", "use_cubins"]  # fixtures

pytestmark = pytest.mark.gpu

# `LARGEST` is close to the largest bfloat16 and float32. Sums of the largest float16 numbers fit
# into float32, and those of the largest float64 numbers overflow in the reference, too.
WITH_LARGE_VALUES = ("bfloat16", "float32")
LARGEST = 3.3e38


def every_family(**sizes: Any) -> list[Case]:
    return [Case(family, dtype, **sizes) for family in FORWARD for dtype in DTYPES]


def first_values(case: Case, v: np.ndarray) -> np.ndarray:
    """Return the first value row for each query head, shape (batch, heads_q, head_dim_v)."""
    return np.repeat(v[:, 0], case.heads_q // case.heads_kv, axis=1)


# ---- Rows with one visible key.


@of_supported_cases(
    dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k, q_offset=0, causal=True)
    for seqlen_q, seqlen_k in ((113, 150), (9, 4099))
    for case in every_family(head_dim=40, head_dim_v=33)
)
def test_the_first_row_of_a_causal_call_is_exactly_the_first_value(case: Case) -> None:
    q, k, v = random_values(case)
    out, _ = run(case, (q, k, v))
    np.testing.assert_array_equal(bits(out[:, 0]), bits(first_values(case, v)))


@of_supported_cases(
    case
    for dims in ((64, 64), (128, 128), (96, 40), (256, 256))
    for case in every_family(seqlen_q=70, seqlen_k=1, head_dim=dims[0], head_dim_v=dims[1])
)
def test_with_one_key_the_result_is_exactly_its_value(case: Case) -> None:
    q, k, v = random_values(case)
    # The scores have many magnitudes, because their rounding might change the result.
    q = (q.astype(np.float64) * np.geomspace(1e-3, 30, case.seqlen_q)[:, None, None]).astype(
        q.dtype
    )
    out, _ = run(case, (q, k, v))
    for row in range(case.seqlen_q):
        np.testing.assert_array_equal(bits(out[:, row]), bits(first_values(case, v)))


@of_supported_cases(
    case for case in every_family(seqlen_q=70, seqlen_k=1) if case.dtype in ("float16", "bfloat16")
)
def test_with_one_key_of_a_large_score_the_result_is_exactly_its_value(case: Case) -> None:
    q, k, v = random_values(case)
    # All scaled scores are below the limit that docs/guide/accuracy.md states for exact results.
    q[...], k[...] = 0, 8
    most = 2000 if case.dtype == "float16" else 8000
    q[..., 0] = np.linspace(-most, most, case.seqlen_q)[:, None]
    out, _ = run(case, (q, k, v))
    for row in range(case.seqlen_q):
        np.testing.assert_array_equal(bits(out[:, row]), bits(first_values(case, v)))


@pytest.mark.parametrize("family", SEQUENCE_FAMILIES)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_cache_of_one_key_gives_exactly_its_value(
    family: str, dtype: str, page_size: int
) -> None:
    target = Target(family)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((3, 2, 8, 64)).astype(DTYPES[dtype])
    shape = (5, page_size, 2, 64) if page_size else (3, 33, 2, 64)
    k_cache, v_cache = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    pages = cupy.asarray(np.array([[4, 1], [0, 2], [3, 3]], np.int32)) if page_size else None
    arrays = map(cupy.asarray, (q, k_cache, v_cache))
    lengths = cupy.asarray(np.array([1, 1, 0], np.int32))
    options = {"cache_seqlens": lengths, "block_table": pages}
    out = target.call(flash_attention_with_kvcache, *arrays, **options).get()
    for sequence, first in ((0, 4), (1, 0)) if page_size else ((0, 0), (1, 1)):
        value = np.repeat(v_cache[first, 0], 4, axis=0)
        for row in range(2):
            np.testing.assert_array_equal(bits(out[sequence, row]), bits(value))
    assert not out[2].any()


# ---- Rows that attend to no key.


@of_supported_cases(
    dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True, q_offset=-20)
    for seqlen_q, seqlen_k in ((113, 150), (40, 4099))
    for case in every_family()
)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_without_keys_are_zero_beside_rows_that_see_nan(case: Case, poison: float) -> None:
    q, k, v = random_values(case)
    v[:, :3] = poison
    out, lse = run(case, (q, k, v))
    assert not out[:, :20].any()
    assert (lse[:, :, :20] == -np.inf).all()
    assert not np.isfinite(out[:, 20:].astype(np.float32)).any()


@pytest.mark.parametrize("family", SEQUENCE_FAMILIES)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_packed_rows_without_keys_are_zero_beside_rows_that_see_nan(
    family: str, dtype: str
) -> None:
    rng = np.random.default_rng(6)
    q = rng.standard_normal((70, 4, 64)).astype(DTYPES[dtype])
    k, v = (rng.standard_normal((30, 2, 64)).astype(DTYPES[dtype]) for _ in range(2))
    v[...] = np.nan
    arguments = {"q": q, "k": k, "v": v, "max_seqlen_q": 40, "max_seqlen_k": 20, "causal": True}
    arguments["cu_seqlens_q"] = np.array([0, 40, 70], np.int32)
    arguments["cu_seqlens_k"] = np.array([0, 10, 30], np.int32)
    out, lse = run_varlen(Target(family), arguments)
    # Sequence 0 has 40 queries and 10 keys, so 30 rows attend to none; sequence 1 has 30 and 20.
    for without, seeing in ((slice(0, 30), slice(30, 40)), (slice(40, 50), slice(50, 70))):
        assert not out[without].any()
        assert (lse[:, without] == -np.inf).all()
        assert np.isnan(out[seeing].astype(np.float32)).all()


# ---- Large values.


def with_largest_values(case: Case, *, alike: bool) -> Arrays:
    q, k, v = random_values(case)
    random = np.random.default_rng(7).uniform(-LARGEST, LARGEST, v.shape)
    return q, k, np.broadcast_to(LARGEST if alike else random, v.shape).astype(v.dtype)


@of_supported_cases(
    dataclasses.replace(case, seqlen_q=113, seqlen_k=seqlen_k, causal=causal)
    for seqlen_k in (150, 4099)
    for causal in (False, True)
    for case in every_family(batch=1)
    # `naive` adds the values sequentially, so the rounding errors of 4099 equal values accumulate.
    if case.dtype in WITH_LARGE_VALUES and (case.family != "naive" or seqlen_k == 150)
)
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "random"])
def test_the_largest_values_do_not_overflow(case: Case, alike: bool) -> None:
    check(case, with_largest_values(case, alike=alike))


@of_supported_cases(
    case
    for case in every_family(batch=1, heads_q=200, heads_kv=200, seqlen_q=9, seqlen_k=3000)
    if case.dtype in WITH_LARGE_VALUES
)
def test_the_largest_values_do_not_overflow_while_maxima_grow(case: Case) -> None:
    q, k, v = with_largest_values(case, alike=False)
    # Kernels process the keys from the last to the first, so the row maxima grow.
    size = np.geomspace(8, 0.01, case.seqlen_k)[:, None, None]
    check(case, (q, (k.astype(np.float64) * size).astype(k.dtype), v))


@of_supported_cases(
    dataclasses.replace(case, causal=causal)
    for causal in (False, True)
    for case in every_family(seqlen_q=113, seqlen_k=450)
    if case.dtype in WITH_LARGE_VALUES
)
def test_small_values_keep_their_digits(case: Case) -> None:
    q, k, v = random_values(case)
    check(case, (q, k, (v.astype(np.float64) * 1e-24).astype(v.dtype)))


# ---- Scales.


def with_large_scores(case: Case, size: float) -> Arrays:
    """Return q, k and v, where the products of queries and keys are positive and about `size`."""
    q, k, v = random_values(case)
    factor = (size / case.head_dim) ** 0.5
    return (
        (np.abs(q).astype(np.float64) * factor).astype(q.dtype),
        (np.abs(k).astype(np.float64) * factor).astype(k.dtype),
        v,
    )


@of_supported_cases(
    dataclasses.replace(case, causal=causal, softmax_scale=scale)
    for scale in (0.0, -0.0)
    for causal in (False, True)
    for case in every_family()
    if case.dtype in WITH_LARGE_VALUES
)
def test_a_scale_of_zero_gives_every_seen_key_the_same_weight(case: Case) -> None:
    check(case, with_large_scores(case, 1e34))


@of_supported_cases(
    dataclasses.replace(case, causal=True, softmax_scale=scale)
    for scale in (1e-34, -1e-34, 1e-38, 1e-44)
    for case in every_family()
    if case.dtype in WITH_LARGE_VALUES
)
def test_a_tiny_scale_of_large_scores_is_right(case: Case) -> None:
    check(case, with_large_scores(case, 1e34))


@of_supported_cases(
    dataclasses.replace(case, seqlen_k=seqlen_k)
    for seqlen_k in (150, 4099)
    for case in every_family(softmax_scale=1e37)
    if case.dtype != "float64"
)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_overflow_are_not_taken_for_no_key(case: Case, sign: int) -> None:
    q, k, v = with_large_scores(case, 1e4)
    with np.errstate(over="ignore"):
        out, lse = run(case, (q, sign * k, v))
    assert not np.isfinite(out.astype(np.float32)).any()
    assert not np.isfinite(lse).any()
    assert not (lse == -np.inf).any()


@of_supported_cases(case for case in every_family(softmax_scale=1e37) if case.dtype != "float64")
def test_scores_that_overflow_in_one_row_leave_the_others_alone(case: Case) -> None:
    q, k, v = random_values(case)
    q[...] = 0
    q[:, 17] = 60
    k = np.abs(k)
    out, _ = run(case, (q, k, v))
    assert not np.isfinite(out[:, 17].astype(np.float32)).any()
    others = np.delete(q, 17, axis=1), k, v
    Truth.of(others).check(np.delete(out, 17, axis=1))
