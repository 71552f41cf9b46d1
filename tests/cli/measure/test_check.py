"""Comparison of a benchmark's result with the reference, on all rows or on a sample."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_cupy

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.measure import check as check_module
from cupy_flash.cli.measure.check import Block, Check, choose_blocks
from cupy_flash.cli.providers.providers import provider
from cupy_flash.reference.dense import attention_naive

ALL = 10**15


def case(
    seqlen_q: int, seqlen_k: int, heads: int = 2, dtype: str = "float32", **more: object
) -> Case:
    return Case(dtype, 2, seqlen_q, seqlen_k, heads, heads, 16, 24, **more)


def rows_of(blocks: list[Block]) -> list[tuple[int, int, int]]:
    return [(b.batch, b.head, row) for b in blocks for row in range(b.start, b.stop)]


@pytest.mark.parametrize("shape", [(113, 203), (1, 239), (799, 3)])
def test_small_cases_are_compared_row_by_row(shape: tuple[int, int]) -> None:
    rows = rows_of(choose_blocks(case(*shape), 0, ALL))

    assert sorted(rows) == [(b, h, r) for b in range(2) for h in range(2) for r in range(shape[0])]


@pytest.mark.parametrize("shape", [(5003, 5003), (16384, 16384), (1030, 7)])
def test_a_sample_has_a_thousand_rows_of_several_heads_and_their_last(
    shape: tuple[int, int],
) -> None:
    blocks = choose_blocks(case(*shape, heads=64), 0, 1000)
    rows = rows_of(blocks)
    heads = {(block.batch, block.head) for block in blocks}

    assert len(rows) == len(set(rows))
    assert len(heads) >= 4
    assert all(0 <= row < shape[0] for _, _, row in rows)
    assert {(*head, shape[0] - 1) for head in heads} <= set(rows)
    assert len(rows) >= len(heads) * 896


def test_decoding_samples_many_heads() -> None:
    blocks = choose_blocks(case(1, 100_000, heads=512), 0, 1000)

    assert len(blocks) >= 4
    assert all(block.stop == 1 for block in blocks)


def test_nothing_is_compared_where_there_is_no_query() -> None:
    assert choose_blocks(case(0, 239), 0, ALL) == []


def checked(inputs: Inputs) -> tuple[Check, np.ndarray]:
    """Return the check of inputs, and their result by the naive formula."""
    result = attention_naive(*inputs.host, **inputs.case.arguments)
    return Check(inputs, 0, on_gpu=False), np.array(result)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_naive_formula_passes_on_a_ragged_causal_case(dtype: str, layout: str) -> None:
    of = case(113, 203, dtype=dtype, causal=True, layout=layout)
    check, result = checked(random_inputs(of, 5, on_gpu=False))

    assert check.error(result) <= check.coverage.bound
    assert check.coverage.rows == check.coverage.all_rows == 2 * 2 * 113


@pytest.mark.parametrize("offset", [None, -40, 17])
def test_a_sampled_block_is_masked_by_its_place_in_the_sequence(
    offset: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy_flash.cli.measure.check.HOST_SCORES", 1000)
    inputs = random_inputs(case(2100, 203, causal=True, q_offset=offset), 5, on_gpu=False)
    check, result = checked(inputs)

    assert check.coverage.rows < check.coverage.all_rows
    assert check.error(result) <= check.coverage.bound


def test_one_wrong_element_is_found() -> None:
    check, result = checked(random_inputs(case(113, 203), 5, on_gpu=False))
    result[1, 112, 1, 23] += 1e-3

    assert check.error(result) > check.coverage.bound


def test_a_nan_is_an_infinite_error() -> None:
    check, result = checked(random_inputs(case(113, 203), 5, on_gpu=False))
    result[0, 7, 0, 3] = np.nan

    assert check.error(result) == np.inf


def test_a_row_without_a_finite_reference_is_left_out_and_the_others_are_compared() -> None:
    inputs = random_inputs(case(113, 203), 5, on_gpu=False)
    inputs.host[0][1, 112, 1] = np.inf
    check, result = checked(inputs)
    finite_elsewhere = np.where(np.isnan(result), 7, result)

    assert (check.coverage.rows, check.coverage.not_finite) == (2 * 2 * 113 - 1, 1)
    assert check.error(finite_elsewhere) <= check.coverage.bound
    finite_elsewhere[1, 111, 1, 23] = np.nan
    assert check.error(finite_elsewhere) == np.inf


def test_inputs_depend_on_the_seed_alone() -> None:
    first, again, other = (random_inputs(case(9, 9), seed, on_gpu=False) for seed in (1, 1, 2))

    assert all(np.array_equal(a, b) for a, b in zip(first.host, again.host, strict=True))
    assert not np.array_equal(first.host[0], other.host[0])
    assert isinstance(first, Inputs)


class OnGpu:
    """Fake array in GPU memory, which can be sliced but takes no part in computations."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getitem__(self, part: Any) -> OnGpu:
        return OnGpu(self.values[part])


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_without_cublas_results_on_a_gpu_are_compared_on_the_host(
    off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(*_: object) -> None:
        raise ImportError("libcublas.so.13: cannot open")

    cupy = SimpleNamespace(ones=np.ones, matmul=matmul, asnumpy=lambda array: array.values)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(check_module, "why_no_matmul", check_module.why_no_matmul.__wrapped__)
    inputs = random_inputs(case(113, 203), 5, on_gpu=False)
    q, k, v = map(OnGpu, inputs.host)
    check = Check(Inputs(inputs.case, _gpu=(q, k, v)), 0, on_gpu=True)
    result = np.array(attention_naive(*inputs.host))
    result[1, 112, 1, 23] += off

    assert check.coverage.rows == 2 * 2 * 113
    assert (check.error(OnGpu(result)) > check.coverage.bound) is (off > 0)


@pytest.mark.parametrize("is_missing", [False, True])
def test_cupys_formula_is_missing_where_cublas_is(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        if is_missing:
            raise RuntimeError("libcublas.so.13:\ncannot open")
        return one @ other

    monkeypatch.setattr(fake_cupy.install(monkeypatch), "matmul", matmul, raising=False)
    reason = "cupy.matmul needs the cuBLAS library: libcublas.so.13: cannot open"

    assert provider("cupy-library").missing() == (reason if is_missing else None)
