"""Gradients of biases, sinks and captured arrays on a GPU, in calls made for this purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, SCORE_MODS, ModifiedCall
from support.gpu import cupy
from support.gpu.gpu_support import capture_call
from support.gradients.gradient_calls import GradientCall
from support.gradients.gradient_rule import check_repeatedly

import cupy_flash
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 3, 4, 70, 150
LENGTHS_Q, LENGTHS_K = (40, 0, 65), (150, 20, 30)


def make_call(
    dtype: str = "float32",
    kind: str = "dense",
    mod: tuple[str, dict[str, Any]] | None = None,
    *,
    seed: int = 0,
    **arrays: np.ndarray,
) -> GradientCall:
    """Return a causal call that requests the gradients of its modifications only."""
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    options: dict[str, Any] = {"causal": True}
    if kind == "varlen":
        rows, keys = (sum(LENGTHS_Q),), (sum(LENGTHS_K),)
        for name, lengths in (("cu_seqlens_q", LENGTHS_Q), ("cu_seqlens_k", LENGTHS_K)):
            arrays[name] = np.cumsum([0, *lengths], dtype=np.int32)
        options |= {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    else:
        rows, keys = (BATCH, SEQLEN_Q), (BATCH, SEQLEN_K)
    inputs = {
        "q": values(*rows, HEADS, 24),
        "k": values(*keys, HEADS // 2, 24),
        "v": values(*keys, HEADS // 2, 40),
    }
    mods = {} if mod is None else {"score_mod": mod}
    forward = ModifiedCall(kind, dtype, inputs | arrays, options, mods)
    call = GradientCall(forward, values(*rows, HEADS, 40))
    call.wrt = tuple(name for name in call.inputs if name not in ("q", "k", "v"))
    return call


@pytest.fixture
def made_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Return a function that makes a score modification whose captures have gradients."""

    def make(function: Callable[..., Any], **captures: Any) -> tuple[str, dict[str, Any]]:
        monkeypatch.setitem(SCORE_MODS, "of this test", function)
        return "of this test", captures | {"differentiable": tuple(captures)}

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_a_bias_may_be_broadcast_along_any_axes(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    whole: tuple[int, ...] = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    if kind == "varlen":
        whole = (HEADS, sum(LENGTHS_Q), max(LENGTHS_K))
    for shared in np.ndindex((2,) * len(whole)):
        shape = tuple(1 if one else n for one, n in zip(shared, whole, strict=True))
        bias = rng.standard_normal(shape).astype(DTYPES[dtype])
        check_repeatedly(make_call(dtype, kind, bias=bias))


def test_a_bias_may_have_fewer_axes_than_scores_and_any_strides() -> None:
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((SEQLEN_K, SEQLEN_Q)).astype(np.float32).T
    (gradient,) = check_repeatedly(make_call(bias=bias)).values()
    assert gradient.shape == (SEQLEN_Q, SEQLEN_K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_every_pair_reads_a_table_of_distances(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((HEADS, 41)).astype(DTYPES[dtype])
    check_repeatedly(
        make_call(dtype, kind, ("table", {"table": table, "differentiable": ("table",)}))
    )


def test_an_array_may_be_read_twice_and_another_beside_it(made_of) -> None:
    rng = np.random.default_rng(4)

    def function(score, h, i, j, table, gain):
        return score * gain[h] + table[h, j % 9] * table[h, i % 9]

    table, gain = rng.standard_normal((HEADS, 9)), rng.uniform(0.5, 1.5, HEADS)
    mod = made_of(function, table=table.astype(np.float16), gain=gain)
    check_repeatedly(make_call(mod=mod))


def test_an_array_may_have_an_element_for_each_pair(made_of) -> None:
    rng = np.random.default_rng(5)
    whole = rng.standard_normal((HEADS, SEQLEN_K, SEQLEN_K)).astype(np.float32)
    check_repeatedly(
        make_call(mod=made_of(lambda score, h, i, j, near: score + near[h, i, j], near=whole))
    )


def test_an_array_may_have_no_axes(made_of) -> None:
    gain = np.array([1.25], np.float32)
    (expected,) = check_repeatedly(
        make_call(mod=made_of(lambda score, gain: score * gain[0], gain=gain))
    ).values()
    call = make_call(mod=made_of(lambda score, gain: score * gain, gain=gain.reshape(())))
    (found,) = call.run(cupy).values()
    np.testing.assert_array_equal(found, expected[0])


@pytest.mark.parametrize("family", FAMILIES["backward"])
def test_all_gradients_of_a_call_in_every_family(family: str) -> None:
    rng = np.random.default_rng(6)
    table = rng.standard_normal((HEADS, 41)).astype(np.float32)
    call = make_call(
        "float16",
        mod=("table", {"table": table, "differentiable": ("table",)}),
        bias=rng.standard_normal((1, HEADS, SEQLEN_Q, 1)).astype(np.float16),
        sinks=rng.standard_normal(HEADS).astype(np.float32),
    )
    call.wrt = ("sinks", "v", "score_mod.table", "q", "bias", "k")
    check_repeatedly(call, family=family)
    call.grad_dtype = "float32"
    check_repeatedly(call, family=family)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_what_is_no_number_stays_in_its_elements(kind: str, made_of) -> None:
    rows = sum(LENGTHS_Q) if kind == "varlen" else SEQLEN_Q
    # Queries have positions among the keys; the last query is at the last key.
    position = 30 + SEQLEN_K - (LENGTHS_Q[0] if kind == "varlen" else SEQLEN_Q)
    gain = np.random.default_rng(7).uniform(0.5, 1.5, SEQLEN_K).astype(np.float32)
    mod = made_of(lambda score, i, gain: score * gain[i], gain=gain)
    bias = np.zeros((HEADS, rows, 1) if kind == "varlen" else (1, HEADS, rows, 1), np.float32)
    call = make_call(kind=kind, mod=mod, bias=bias, sinks=np.zeros(HEADS, np.float32))
    call.dout[..., 30, 2, :] = np.nan
    found = call.run(cupy)
    expected = np.zeros(bias.shape, bool)
    expected[..., 2, 30, :] = True
    np.testing.assert_array_equal(np.isnan(found["bias"]), expected)
    np.testing.assert_array_equal(np.isnan(found["sinks"]), np.arange(HEADS) == 2)
    of_gain = np.arange(SEQLEN_K) == position
    np.testing.assert_array_equal(np.isnan(found["score_mod.gain"]), of_gain)
    assert np.isfinite(found["score_mod.gain"][~of_gain]).all()


def test_rows_that_see_nothing_leave_no_trace_of_dout_in_sinks() -> None:
    rng = np.random.default_rng(8)
    seen = rng.random((BATCH, 1, SEQLEN_Q, 1)) < 0.7
    sinks = np.array([-np.inf, -3, 0, 20], np.float32)
    call = make_call(mask=seen, sinks=sinks)
    call.dlse = rng.standard_normal((BATCH, HEADS, SEQLEN_Q)).astype(np.float32)
    expected = check_repeatedly(call)
    call.dout[~seen[:, 0, :, 0]] = np.nan
    found = call.run(cupy)
    np.testing.assert_array_equal(found["sinks"], expected["sinks"])


def test_gradients_are_captured_in_a_graph() -> None:
    rng = np.random.default_rng(9)
    table = rng.standard_normal((HEADS, 41)).astype(np.float32)
    call = make_call(
        mod=("table", {"table": table, "differentiable": ("table",)}),
        bias=rng.standard_normal((1, 1, 1, SEQLEN_K)).astype(np.float32),
        sinks=rng.standard_normal(HEADS).astype(np.float32),
    )
    positional, named = call.given(cupy)
    expected = cupy_flash.flash_attention_backward(*positional, **named)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        backward = cupy_flash.flash_attention_backward
        graph, found = capture_call(stream, backward, *positional, **named)
        for _ in range(2):
            for array in found:
                array.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(cupy.asnumpy(one), cupy.asnumpy(other))
