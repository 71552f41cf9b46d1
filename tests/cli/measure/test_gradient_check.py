"""Comparison of a benchmark's gradients with the reference, for all heads or a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.measure.gradient_check import GradientCheck, choose_groups
from cupy_flash.cli.providers.providers import provider

ALL = 10**15


def case(seqlen_q: int = 113, seqlen_k: int = 203, **more: Any) -> Case:
    sizes: dict[str, Any] = {"dtype": "float32", "heads_q": 4, "heads_kv": 2} | more
    lengths, dims = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}, {"head_dim": 16, "head_dim_v": 24}
    return Case(batch=2, **lengths, **dims, direction="backward", **sizes)


def varlen(*lengths: int, **more: Any) -> Case:
    longest = max(lengths)
    made = case(longest, longest, kind="varlen", lengths=lengths, **more)
    return Case(**{**vars(made), "batch": len(lengths)})


def gradients(of: Case, seed: int = 5) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return inputs, and their gradients by the naive formula."""
    inputs = random_inputs(of, seed, on_gpu=False)
    found = provider("numpy-naive").prepare(inputs).call()
    return inputs, tuple(np.array(x) for x in found)


@pytest.mark.parametrize("of", [case(), case(1, 239), case(799, 3), varlen(113, 7, 0, 50)])
def test_of_little_work_all_heads_are_compared(of: Case) -> None:
    groups = choose_groups(of, 0, ALL)
    lengths = zip(of.query_lengths, of.key_lengths, strict=True)

    assert groups == [(b, h) for b, both in enumerate(lengths) if any(both) for h in range(2)]


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_keeps_to_its_work_but_for_one_head_of_the_longest_sequence(seed: int) -> None:
    of = varlen(7, 4003, 100, *range(60, 90))
    groups = choose_groups(of, seed, 2 * (100 * 100 + 90 * 90))
    rest = [of.lengths[batch] for batch, _ in groups if batch != 1]

    assert [batch for batch, _ in groups].count(1) == 1
    assert 1 <= len(rest) < 8
    assert groups == choose_groups(of, seed, 2 * (100 * 100 + 90 * 90))


def test_a_sample_has_at_most_so_many_rows() -> None:
    of = case(heads_q=64, heads_kv=8)

    assert len(choose_groups(of, 0, ALL)) == 16
    assert len(choose_groups(of, 0, ALL, most_rows=3 * 8 * 113)) == 1 + 3
    assert len(choose_groups(of, 0, ALL, most_rows=1)) == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_naive_formula_passes(dtype: str, layout: str) -> None:
    inputs, found = gradients(case(dtype=dtype, layout=layout, causal=True))
    check = GradientCheck(inputs, 0, on_gpu=False)

    assert check.error(found) <= check.coverage.bound == 1
    assert check.coverage.rows == check.coverage.all_rows == 2 * 4 * 113


def test_a_sample_of_heads_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_flash.cli.measure.gradient_check.HOST_SCORES", 100)
    for of in (case(causal=True, q_offset=-20), varlen(113, 7, 0, 50, causal=True)):
        inputs, found = gradients(of)
        check = GradientCheck(inputs, 0, on_gpu=False)

        assert check.coverage.rows == 2 * 113 < check.coverage.all_rows
        assert check.error(found) <= 1


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("of", [case(), varlen(113, 7, 0, 203)])
def test_one_wrong_element_of_any_gradient_is_found(of: Case, which: int) -> None:
    inputs, found = gradients(of)
    check = GradientCheck(inputs, 0, on_gpu=False)
    found[which][-1, ..., -1, -1] += 1e-3

    assert check.error(found) > 1


def test_a_nan_is_an_infinite_error() -> None:
    inputs, found = gradients(case())
    check = GradientCheck(inputs, 0, on_gpu=False)
    found[1][1, 7, 0, 3] = np.nan

    assert check.error(found) == np.inf


def test_what_has_no_finite_reference_is_left_out_and_the_rest_compared() -> None:
    inputs = random_inputs(case(), 5, on_gpu=False)
    # Due to this value, batch entry 0 has no finite gradients in the query heads of KV head 1.
    inputs.host[2][0, 7, 1] = np.inf
    found = tuple(np.array(x) for x in provider("numpy-naive").prepare(inputs).call())
    check = GradientCheck(inputs, 0, on_gpu=False)

    assert 0 < check.coverage.not_finite <= 2 * 113
    assert check.coverage.rows + check.coverage.not_finite == check.coverage.all_rows
    assert check.error(found) <= 1
    found[0][1, 7, 0, 3] += 1e-3
    assert check.error(found) > 1


def test_where_there_is_no_query_dk_and_dv_are_compared_with_zeros() -> None:
    inputs, found = gradients(case(0, 203))
    check = GradientCheck(inputs, 0, on_gpu=False)

    assert check.error(found) == 0
    found[2][0, 3, 1, 5] = 1e-3
    assert check.error(found) > 1
