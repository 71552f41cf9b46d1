"""Plans of the features of the support matrix for GPUs, and their calls on the CPU backend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from support_features import COMPUTED, DTYPES, PLANNED, Feature, Sizes, inputs

import cupy_flash
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import ReceivedArguments, TangentArguments
from cupy_flash.calls.gpu.received import RECEIVED
from cupy_flash.calls.gpu.tangents import TANGENTS
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import ROWS, tangent_of
from cupy_flash.problem.problem import Problem

FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("dense", "forward"): cupy_flash.flash_attention,
    ("dense", "backward"): cupy_flash.flash_attention_backward,
    ("dense", "tangent"): cupy_flash.flash_attention_jvp,
    ("dense", "hvp"): cupy_flash.flash_attention_hvp,
    ("dense", "received"): cupy_flash.attention_received,
    ("varlen", "forward"): cupy_flash.flash_attention_varlen,
    ("varlen", "backward"): cupy_flash.flash_attention_varlen_backward,
    ("varlen", "tangent"): cupy_flash.flash_attention_varlen_jvp,
    ("varlen", "hvp"): cupy_flash.flash_attention_varlen_hvp,
    ("varlen", "received"): cupy_flash.attention_received_varlen,
    ("kvcache", "forward"): cupy_flash.flash_attention_with_kvcache,
    ("kvcache", "received"): cupy_flash.attention_received_with_kvcache,
}
# Records of the arrays of calls that `cupy_flash.plan` does not take, and how they are computed.
_OTHERS = {
    "tangent": (TangentArguments, dispatch.Computation(TANGENTS, None)),
    "received": (ReceivedArguments, dispatch.Computation(RECEIVED, None)),
}
_VALUES = ("v", "v_cache", "v_scale")
# A GPU that every kernel family supports, to which a problem is planned first.
_FIRST = "sm_90"


def arguments_of(feature: Feature, direction: str, sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return the arguments of the call of a feature, without out, lse and their gradients."""
    of_dtype = DTYPES[dtype]
    arguments = inputs(feature.kind, sizes, of_dtype) | feature.options(sizes, of_dtype)
    if direction == "received":
        return {name: value for name, value in arguments.items() if name not in _VALUES}
    if direction in ("tangent", "hvp"):
        # Unlike zeros_like(), zeros() takes no time for large arrays.
        arguments |= {tangent_of(name): np.zeros(arguments[name].shape, of_dtype) for name in ROWS}
    if direction in ("backward", "hvp") and feature.wrt:
        arguments["wrt"] = (*ROWS, feature.wrt)
    return arguments


@functools.cache
def problem_of(feature: Feature, direction: str, dtype: str) -> Problem | str:
    """Return the problem of a feature's call on a GPU, or why it is refused on every GPU."""
    feature = feature.planned.get(direction, feature)
    arguments = arguments_of(feature, direction, PLANNED, dtype)
    function = FUNCTIONS[feature.kind, direction]
    try:
        if direction not in _OTHERS:
            arguments.pop("shared_prefix_len", None)
            return cupy_flash.plan(function, arch=_FIRST, **arguments).problem
        return _problem(direction, feature.kind, function, arguments)
    except (TypeError, ValueError) as error:
        return str(error)


def _problem(
    direction: str, kind: str, function: Callable[..., Any], arguments: dict[str, Any]
) -> Problem:
    """Return the problem of a call that `cupy_flash.plan` does not take."""
    record, computation = _OTHERS[direction]
    named = inspect.signature(function).parameters
    modifications = {name: value for name, value in arguments.items() if name not in named}
    arrays = {name: arguments[name] for name in record._fields if name in arguments}
    options = {name: arguments[name] for name in Options._fields if name in arguments}
    if direction == "received":
        options["received"] = ("heads", 0, PLANNED.rows)
    else:
        q, v = arguments["q"], arguments["v"]
        arrays["out"] = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        arrays["lse"] = np.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.float32)
    planned = dispatch.as_planned(record(**arrays), Options(kind, **options), modifications)
    return dispatch.plan_of(computation, *planned, "auto", _FIRST).problem


@functools.cache
def plan_of(feature: Feature, direction: str, dtype: str, arch: int) -> Plan | str:
    """Return the plan of a feature's call on an architecture, or why it is refused."""
    problem = problem_of(feature, direction, dtype)
    if isinstance(problem, str):
        return problem
    try:
        return make_plan(problem, device_for_arch(arch), explain=False)
    except UnsupportedError as error:
        return str(error)


@functools.cache
def refusal_on_cpu(feature: Feature, direction: str, dtype: str = "float32") -> str | None:
    """Compute a feature's call on the CPU; return the error message if it is refused."""
    arguments = arguments_of(feature, direction, COMPUTED, dtype)
    function = FUNCTIONS[feature.kind, direction]
    try:
        if direction in ("backward", "hvp"):
            forward = {
                name: value
                for name, value in arguments.items()
                if name != "wrt" and not name.endswith("_tangent")
            }
            out, lse = FUNCTIONS[feature.kind, "forward"](**forward, return_lse=True)
            arguments["dout"] = np.ones_like(out)
            if direction == "backward":
                arguments |= {"out": out, "lse": lse}
        function(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
