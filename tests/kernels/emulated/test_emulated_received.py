"""Kernels that sum attention weights over queries, run on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.lse_calls import LseCall
from support.draws import few_then_slow
from support.emulated_kernels import run_on_host
from support.gradients.gradient_calls import random_gradient_call

from cupy_flash import attention_received, flash_attention
from cupy_flash.calls.arguments import (
    Arguments,
    ReceivedArguments,
    normalized,
    with_modifications,
)
from cupy_flash.calls.check.problems import check_call
from cupy_flash.calls.check.received import check_received_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options, plain_options, with_offsets
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

DEVICE = device_for_arch("sm_90")
_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("family", FAMILIES["received"])
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("number", few_then_slow(range(12), 1))
def test_sums_are_those_of_the_weights(
    family: str, kind: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float32", "float64", "float16") if family == "simt" else ("float16", "bfloat16")
    call = random_gradient_call(
        *(rng, str(rng.choice(dtypes)), kind),
        # TMA needs aligned rows.
        head_dims=(8, 24, 64, 80) if family == "hopper" else (5, 24, 64),
        longest=(90, 150),
        dropout=False,
    )
    (q, k, v), given = call.forward.given(np)
    q, k = np.ascontiguousarray(q), np.ascontiguousarray(k)
    _, lse = flash_attention(q, k, v, **given, return_lse=True, backend="cpu")
    plain = {name: given[name] for name in _OPTIONS if name in given}
    mods = {name: x for name, x in given.items() if name not in plain}
    bhsd = plain.get("layout") == "bhsd"
    seqlen_q, seqlen_k = (x.shape[2 if bhsd else 1] for x in (q, k))
    first, last = np.sort(rng.integers(0, seqlen_q + 1, 2)) if rng.integers(2) else (0, seqlen_q)
    grouped = bool(rng.integers(2))
    received = ("groups" if grouped else "heads", int(first), int(last))
    options, mods = with_offsets(Options(**plain, received=received), mods)
    arguments, mod_key, _ = with_modifications(ReceivedArguments(q, k, lse), mods, backward=True)
    options = plain_options(options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments, ())
    arguments = converted(arguments, options)
    problem, mod_arrays = check_received_call(arguments, options)
    if 0 in (problem.rows, seqlen_k):
        pytest.skip("no kernel runs")
    plan = make_plan(problem, DEVICE, family=family)
    heads = problem.heads_kv if grouped else problem.heads_q
    found = np.full((problem.batch, heads, seqlen_k), np.nan, lse.dtype)
    arrays = {"q": q, "k": k, "lse": lse, "received": found}
    if kind == "padded":
        arrays["seqused_k"] = arguments.seqlens_k
    fields = {"first_query": int(first), "last_query": int(last)}
    run_on_host(plan, options, mod_arrays, arrays, folder, fields)
    expected = attention_received(
        *(q.astype(np.float64), k.astype(np.float64)),
        queries=slice(first, last),
        grouped=grouped,
        **given,
    )
    # A weight has the error of its score, times the weight.
    size = max(30.0, float(np.abs(lse[np.isfinite(lse)]).max(initial=0)))
    bound = 64 * float(np.finfo(lse.dtype).eps) * size * max(1.0, float(expected.max(initial=0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("number", few_then_slow(range(16), 2))
def test_log_sum_exp_without_output(number: int, folder: Path, rng: Any) -> None:
    call = LseCall.random(rng)
    q, k = call.q, call.k
    options = plain_options(Options(**call.options, return_lse=True, discards_out=True))
    problem, _ = check_call(Arguments(q, k, k), options)
    plan = make_plan(problem, DEVICE)
    assert plan.family == "hopper_lse"
    batch, seqlen_q, heads, _ = q.shape
    lse = np.full((batch, heads, seqlen_q), np.nan, np.float32)
    run_on_host(plan, options, {}, {"q": q, "k": k, "lse": lse}, folder)
    call.check(q.astype(np.float64), k.astype(np.float64), lse)
