"""Forward kernels, run on the host: output, log-sum-exp and row statistics of random calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import row_statistics
from support.calls.modified_calls import random_call
from support.draws import few_then_slow
from support.emulated_kernels import run_on_host

from cupy_flash.calls.arguments import Arguments, normalized, with_modifications
from cupy_flash.calls.check.problems import check_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options, plain_options, with_offsets, with_statistics
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import STATISTICS

DEVICE = device_for_arch("sm_80")
_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("family", ["mma", "simt"])
@pytest.mark.parametrize("number", few_then_slow(range(3), 1))
def test_results_are_those_of_the_reference(
    family: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float16", "bfloat16", "float32") + (("float64",) if family == "simt" else ())
    dtype = str(rng.choice(dtypes))
    call = random_call(
        *(rng, dtype, "dense"),
        few_rows=False,
        head_dims=(5, 24, 64),
        longest=(90, 150),
    )
    (q, k, v), given = call.given(np)
    plain = {name: given.pop(name) for name in _OPTIONS if name in given}
    options = with_statistics(Options(**plain), True, True)
    options, mods = with_offsets(options, given)
    q, k, v = map(np.ascontiguousarray, (q, k, v))
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    arguments, mod_key, _ = with_modifications(Arguments(q, k, v, out), mods)
    options = plain_options(options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments)
    arguments = converted(arguments, options)
    problem, mod_arrays = check_call(arguments, options)
    plan = make_plan(problem, DEVICE, family=family)
    if len(plan.launches) > 1:
        pytest.skip("the keys are split")
    rows = np.float64 if dtype == "float64" else np.float32
    results = {name: np.full(problem.lse_shape, np.nan, rows) for name in ("lse", *STATISTICS)}
    run_on_host(plan, options, mod_arrays, {"q": q, "k": k, "v": v, "out": out} | results, folder)
    call.compare(out, results["lse"])
    row_statistics.compare(
        results, row_statistics.truth(call), str(call), cap=row_statistics.cap_error(call)
    )
