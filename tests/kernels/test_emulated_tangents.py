"""Tangent kernels, run on the host: the error rule on random calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulated_kernels import run_on_host
from support.gradients.gradient_calls import random_gradient_call
from support.gradients.tangent_rule import check_tangents, directions

from cupy_flash import flash_attention
from cupy_flash.calls.arguments import TangentArguments, normalized, with_modifications
from cupy_flash.calls.check.tangents import check_tangent_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options, plain_options, with_offsets
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import tangent_of

DEVICE = device_for_arch("sm_80")
_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def tangents_on_host(
    family: str, inputs: Any, direction: Any, options: dict[str, Any], folder: Path
) -> list[np.ndarray]:
    """Return out, its tangent, lse and its tangent; the tangents are computed by a kernel."""
    plain = {name: options[name] for name in _OPTIONS if name in options}
    mods = {name: value for name, value in options.items() if name not in plain}
    out, lse = flash_attention(*inputs, **options, return_lse=True, backend="cpu")
    its_options, mods = with_offsets(Options(**plain), mods)
    arguments = TangentArguments(*inputs, out, lse, *direction)
    arguments, mod_key, _ = with_modifications(arguments, mods, backward=True)
    its_options = plain_options(its_options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments, ())
    arguments = converted(arguments, its_options)
    problem, mod_arrays = check_tangent_call(arguments, its_options)
    plan = make_plan(problem, DEVICE, family=family)
    results = [np.full(x.shape, np.nan, x.dtype) for x in (out, lse)]
    arrays = dict(zip(("q", "k", "v", "out", "lse"), (*inputs, out, lse), strict=True))
    arrays |= {tangent_of(n): x for n, x in zip("qkv", direction, strict=True) if x is not None}
    arrays |= {tangent_of(n): x for n, x in zip(("out", "lse"), results, strict=True)}
    if problem.layout.kind == "padded":
        arrays["seqused_k"] = arguments.seqlens_k
    run_on_host(plan, its_options, mod_arrays, arrays, folder)
    return [out, results[0], lse, results[1]]


@pytest.mark.parametrize("family", FAMILIES["tangent"])
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("number", range(4))
def test_tangents_obey_the_error_rule(
    family: str, kind: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float16", "bfloat16") if family == "mma" else ("float32", "float64", "float16")
    dtype = str(rng.choice(dtypes))
    call = random_gradient_call(rng, dtype, kind, head_dims=(5, 24, 64), longest=(90, 150))
    inputs, options = call.forward.given(np)
    inputs = [np.ascontiguousarray(x) for x in inputs]
    moved = rng.integers(1, 8)
    direction = [x if moved >> i & 1 else None for i, x in enumerate(directions(inputs, rng))]
    results = tangents_on_host(family, inputs, direction, options, folder)
    check_tangents(results, inputs, direction, options, call)
