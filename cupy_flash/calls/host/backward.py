"""Gradients for arrays in host memory, on the CPU backend or on copies in GPU memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.arrays.strided import readable_in_place, to_bshd
from cupy_flash.calls.arguments import WRITTEN_GRADIENTS, GradientArguments
from cupy_flash.calls.backends import require_cpu_family
from cupy_flash.calls.check.gradients import check_gradient_call, result_spec
from cupy_flash.calls.check.lengths import check_contents
from cupy_flash.calls.check.modifications import UserMods
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.gpu.backward import GRADIENTS
from cupy_flash.calls.host.forward import (
    CallInfo,
    ModArrays,
    call_key,
    cpu_options,
    find_call,
    is_plain,
    packed_lengths,
    require_writable,
    run_on_gpu,
    runs_on_gpu,
    scale_in,
)
from cupy_flash.calls.options import Options
from cupy_flash.cpu.backward import gradients as cpu_backward
from cupy_flash.cpu.backward.untiled import small_gradients
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.families import FAMILIES
from cupy_flash.families.schedule import Schedule
from cupy_flash.planning.planner import Plan, tile_fields
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


def compute(
    arguments: GradientArguments, options: Options, keys: int, backend: str, user_mods: UserMods
) -> tuple[np.ndarray, ...]:
    """Return the gradients for NumPy arrays, in the order of `Options.wrt`."""
    assert options.wrt is not None
    # Dense calls without modifications have no arrays that may need a conversion.
    has_no_lengths = options.kind == "dense" and options.mod_key is None
    if not has_no_lengths:
        arguments = converted(arguments, options)
    out = readable_in_place(arguments.out, one_batch=options.is_dense)
    if out is not arguments.out:
        arguments = arguments._replace(out=out)
    call, mod_arrays = find_call(_calls, _check, arguments, options, backend)
    problem = call.problem
    if not has_no_lengths:
        check_contents(arguments.forward, options, problem, keys)
    results, are_given = {}, False
    for name in options.wrt:
        result = getattr(arguments, f"d{name}", None)
        if result is None:
            result = np.empty(*result_spec(arguments, options, name))
        else:
            require_writable(f"d{name}", result)
            are_given = True
        results[name] = result
    if are_given:
        require_no_overlap(arguments._fields, arguments, WRITTEN_GRADIENTS)
    if call.goes_to_gpu:
        gradients = run_on_gpu(GRADIENTS, arguments, options, user_mods, WRITTEN_GRADIENTS)
        for result, gradient in zip(results.values(), gradients, strict=True):
            result[...] = gradient
    else:
        _on_cpu(arguments, results, options, user_mods, call, mod_arrays)
    return tuple(results.values())


def repeated(
    arguments: GradientArguments, options: Options, backend: str
) -> tuple[np.ndarray, ...] | None:
    """Compute a small call without modifications if a call with the same call key was made before.

    The earlier call has passed all checks. Returns None if `compute` has to compute the call.
    """
    for array in arguments:
        if array is not None and array.__class__ is not np.ndarray:
            return None
    if not arguments.dq is arguments.dk is arguments.dv is None:
        return None
    call = _calls.get(call_key(arguments, options, backend))
    if call is None or call.small is None:
        return None
    assert options.wrt is not None
    dtype = arguments.q.dtype
    results = {name: np.empty(getattr(arguments, name).shape, dtype) for name in options.wrt}
    done = cpu_backward.backward_by_formula(
        *(arguments.q, arguments.k, arguments.v, arguments.out),
        *(arguments.dout, arguments.lse, arguments.dlse),
        *(results, call.small, call.scale),
        bound_mods=None,
    )
    return tuple(results.values()) if done else None


_calls: dict[Any, CallInfo] = {}


def _check(
    arguments: GradientArguments, options: Options, backend: str
) -> tuple[CallInfo, ModArrays]:
    problem, mod_arrays = check_gradient_call(arguments, options)
    if runs_on_gpu(problem, options, backend):
        return CallInfo(problem, True, None), mod_arrays
    tile = tile_of(problem, options)
    info = CallInfo(problem, False, tile)
    if _has_plain_gradients(arguments, options):
        q, k, v = arguments.q, arguments.k, arguments.v
        causal, q_offset = problem.causal, problem.q_offset
        small = small_gradients(q.shape, k.shape, v.shape[3], causal, q_offset, tile)
        info = info._replace(small=small, scale=scale_in(q.dtype, problem))
    return info, mod_arrays


def _has_plain_gradients(arguments: GradientArguments, options: Options) -> bool:
    """Return whether a call `is_plain` and requests gradients that the plain formula computes.

    These are the gradients of q, and optionally of k and v, in the inputs' float32 or float64.
    """
    q, wrt = arguments.q, options.wrt
    assert wrt is not None
    is_formula = q.dtype.char in "fd" and "q" in wrt and set(wrt) <= set(ROWS)
    has_dtype = options.grad_dtype in (None, q.dtype.name)
    return is_plain(arguments, options) and is_formula and has_dtype


def tile_of(problem: Problem, options: Options) -> Tile:
    """Return the tile of the CPU backend: the requested one, or its default.

    Raises
    ------
    ValueError, UnsupportedError
        If the tile or family is not one of the CPU backend, or the tile needs too much scratch.
    """
    require_cpu_family(options.family, FAMILIES["backward"])
    default = cpu_backward.default_tile(problem)
    tile = dataclasses.replace(default, **tile_fields(Tile, options.tile))
    cpu_backward.require_scratch(problem, tile)
    return tile


def plan_of(problem: Problem, options: Options, why_no_gpu: str | None) -> Plan:
    """Return the plan of the CPU backend, with the reason why no GPU is used; see `tile_of`."""
    tile = tile_of(problem, options)
    plan = make_cpu_plan(problem, tile, why_no_gpu)
    return dataclasses.replace(
        plan,
        schedule=Schedule((), workspace=cpu_backward.workspace_bytes(problem, tile)),
        rejected={
            name: reason for reason in plan.rejected.values() for name in FAMILIES["backward"]
        },
    )


def _on_cpu(
    arguments: GradientArguments,
    results: dict[str, np.ndarray],
    options: Options,
    user_mods: UserMods,
    call: CallInfo,
    mod_arrays: ModArrays,
) -> None:
    problem, tile = call.problem, call.tile
    assert tile is not None
    common = cpu_options(arguments, options, user_mods, problem, mod_arrays)
    results = dict(results)
    is_packed = options.kind == "varlen"
    if "bias" in results:
        bias = results["bias"]
        axes = 3 if is_packed else 4
        results["bias"] = bias.reshape((1,) * (axes - bias.ndim) + bias.shape)
    q, k, v, out = arguments.q, arguments.k, arguments.v, arguments.out
    dout, lse, dlse = arguments.dout, arguments.lse, arguments.dlse
    if not is_packed:
        if q.ndim != 4 or options.layout != "bshd":
            q, k, v, out, dout = (to_bshd(x, options.layout) for x in (q, k, v, out, dout))
            results |= {n: to_bshd(results[n], options.layout) for n in ROWS if n in results}
            lse, dlse = (None if x is None else x.reshape(problem.lse_shape) for x in (lse, dlse))
        common |= {"q_offset": problem.q_offset, "tile": tile}
        cpu_backward.backward(q, k, v, out, dout, lse, dlse, results, **common)
    else:
        common |= packed_lengths(arguments, problem) | {"tile": tile}
        cpu_backward.varlen_backward(q, k, v, out, dout, lse, dlse, results, **common)
