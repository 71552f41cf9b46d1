"""Kernels that sum attention weights over queries, run on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.received_calls import KINDS, ReceivedCall, random_received_call
from support.draws import few_then_slow
from support.emulated_kernels import run_on_host

from cupy_flash.calls.arguments import normalized, with_modifications
from cupy_flash.calls.check.received import check_received_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import plain_options, with_offsets
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

DEVICE = device_for_arch("sm_80")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def sums_on_host(
    call: ReceivedCall, family: str, folder: Path, keys: int | None = None
) -> np.ndarray:
    """Return the sums that a kernel computes; `keys` is the length of every cached sequence."""
    arguments, options, mods = call.prepared(np, call.lse)
    options, mods = with_offsets(options, mods)
    arguments, mod_key, _ = with_modifications(arguments, mods, backward=True)
    options = plain_options(options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments, ())
    arguments = converted(arguments, options)
    problem, mod_arrays = check_received_call(arguments, options)
    if 0 in (problem.rows, problem.seqlen_k):
        pytest.skip("no kernel runs")
    plan = make_plan(problem, DEVICE, family=family)
    # The call clears keys that may belong to no sequence.
    found = np.full(call.exact.shape, 0 if call.is_packed else np.nan, call.lse.dtype)
    names = ("q", "lse", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    arrays = {name: x for name in names if (x := getattr(arguments, name)) is not None}
    arrays |= {"k": arguments.k_cache if call.is_cached else arguments.k, "received": found}
    lengths = arguments.cache_seqlens if call.is_cached else arguments.seqused_k
    if call.forward.kind == "padded":
        lengths = arguments.seqlens_k
    if lengths is not None and keys is None:
        arrays["seqused_k"] = lengths
    assert options.received is not None
    fields = dict(zip(("first_query", "last_query"), options.received[1:], strict=True))
    run_on_host(plan, options, mod_arrays, arrays, folder, fields | {"keys": keys or 0})
    return found


@pytest.mark.parametrize("family", FAMILIES["received"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", few_then_slow(range(12), 1))
def test_sums_are_those_of_the_weights(
    family: str, kind: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float16", "bfloat16") if family == "mma" else ("float32", "float64", "float16")
    call = random_received_call(
        *(rng, str(rng.choice(dtypes)), kind),
        head_dims=(5, 24, 64),
        longest=(90, 150),
        dropout=False,
    )
    call.check(sums_on_host(call, family, folder))
