"""Dispatch of backward calls: the requested gradients, and calls on one array of q, k and v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import no_array, normalize_out, read, result_converter
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import (
    array_module,
    as_cupy,
    require_axes,
    require_batch_axes,
    require_float,
    require_shape,
    to_bshd,
    unallocated,
)
from cupy_flash.arrays.torch_arrays import count_writes, is_any_tensor
from cupy_flash.calls.arguments import (
    GradientArguments,
    check_qkv,
    parts_of,
    require_arrays,
)
from cupy_flash.calls.backends import require_backend
from cupy_flash.calls.check.gradients import require_grad_dtype
from cupy_flash.calls.dispatch import Computation, as_planned, plan_of, run
from cupy_flash.calls.gpu.backward import GRADIENTS
from cupy_flash.calls.host import backward as host_backward
from cupy_flash.calls.options import Options
from cupy_flash.mods.slopes import SLOPES, with_captured_slopes
from cupy_flash.opaque import is_dynamo_tracing, outside
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.gradient import OF_MOD, ROWS

_GRADIENTS = Computation(GRADIENTS, host_backward)
# Modifications that have gradients.
_OF_MODIFICATIONS = ("bias", "sinks", SLOPES)
# Name of the array that holds queries, keys and values.
QKV = "qkv"


def wanted(wrt: Sequence[str] | None, modifications: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the inputs whose gradients are requested, for these modifications.

    Raises
    ------
    TypeError
        If `wrt` is not a sequence of names.
    ValueError
        If `wrt` is empty, has a name twice, or names no input that has a gradient.
    """
    if wrt is None and not modifications:
        return ROWS
    differentiable = getattr(modifications.get("score_mod"), "differentiable", ())
    captures = tuple(OF_MOD + name for name in differentiable)
    if wrt is None:
        return ROWS + captures
    names = _names(wrt, "('q', 'k')")
    return ROWS if names == ROWS else _checked(names, ROWS, captures, modifications)


def _names(wrt: Any, example: str) -> tuple[str, ...]:
    if isinstance(wrt, str) or not isinstance(wrt, Sequence):
        raise TypeError(f"wrt is {wrt!r}; expected a sequence of names, such as {example}")
    return tuple(wrt)


def _checked(
    names: tuple[str, ...],
    inputs: tuple[str, ...],
    captures: tuple[str, ...],
    modifications: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return `names`, after checking that each is an input, a modification or a capture."""
    others = [name for name in _OF_MODIFICATIONS if modifications.get(name) is not None]
    known = (*inputs, *others, *captures)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt names {name!r}; expected some of {', '.join(known)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"wrt is {list(names)}; expected at least one name, and each name once")
    return names


def wanted_of_qkv(wrt: Sequence[str] | None, modifications: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the result of `wanted` for a call on one array of q, k and v, which is named "qkv".

    Raises
    ------
    TypeError, ValueError
        See `wanted`.
    """
    captures = wanted(None, modifications)[len(ROWS) :]
    if wrt is None:
        return (QKV, *captures)
    return _checked(_names(wrt, "('qkv', 'bias')"), (QKV,), captures, modifications)


def gradients(
    arguments: GradientArguments,
    options: Options,
    backend: str,
    modifications: Mapping[str, Any],
    stream: Any | None = None,
) -> tuple[Any, ...]:
    """Return the result of a public function that computes gradients, on `stream` if given."""
    if is_dynamo_tracing():
        return outside(gradients, (arguments, options, backend, modifications, stream))
    if stream is not None:
        with on_stream(stream, arguments.like):
            return gradients(arguments, options, backend, modifications)
    require_grad_dtype(options.grad_dtype)
    assert options.wrt is not None
    if SLOPES in options.wrt:
        wrt, modifications = with_captured_slopes(options.wrt, modifications, OF_MOD)
        options = options._replace(wrt=wrt)
    results = run(_GRADIENTS, arguments, options, backend, 0, modifications)
    assert options.wrt is not None
    if "sinks" in options.wrt and options.grad_dtype is None:
        index, results = options.wrt.index("sinks"), list(results)
        results[index] = _as_sinks(results[index], modifications["sinks"])
    return tuple(results)


@ignore_fp_errors
def _as_sinks(gradient: Any, sinks: Any) -> Any:
    """Return the gradient of sinks with the dtype and axes of the given sinks."""
    if not isinstance(sinks, (list, tuple)) and getattr(sinks, "ndim", 0) == 0:
        # One sink was used for all heads, so their gradients are summed.
        gradient = gradient.sum()
    dtype = getattr(sinks, "dtype", gradient.dtype)
    if gradient.dtype != dtype:
        gradient = gradient.to(dtype) if is_any_tensor(gradient) else gradient.astype(dtype)
    return gradient


def gradients_of_qkv(
    qkv: Any,
    dqkv: Any | None,
    others: GradientArguments,
    options: Options,
    backend: str,
    wrt: tuple[str, ...],
    modifications: Mapping[str, Any],
    stream: Any | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of a call on one array of queries, keys and values.

    The gradient of qkv is written to dqkv unless dqkv is None. `others` are the remaining arrays of
    the call. `wrt` is the result of `wanted_of_qkv`, and `options` are without `wrt`. The call runs
    on `stream`, if given, instead of the current one.
    """
    if stream is not None:
        with on_stream(stream, qkv):
            return gradients_of_qkv(qkv, dqkv, others, options, backend, wrt, modifications)
    if qkv is None:
        raise no_array(QKV, None)
    convert = result_converter(QKV, qkv)
    packed = read(QKV, qkv)
    arrays = parts_of_qkv(packed)
    require_grad_dtype(options.grad_dtype)
    written = None
    if QKV in wrt:
        if dqkv is None:
            written = array_module(packed).empty(packed.shape, options.grad_dtype or packed.dtype)
        else:
            written = as_cupy(normalize_out("dqkv", dqkv))
            require_shape("dqkv", written, tuple(packed.shape), "the shape of qkv")
        arrays |= {f"d{name}": x for name, x in zip(ROWS, parts_of(written), strict=True)}
    elif dqkv is not None:
        raise ValueError("dqkv is given, but wrt does not name 'qkv'")
    names = parts_of_wrt(wrt)
    options = options._replace(wrt=names)
    results = gradients(others._replace(**arrays), options, backend, modifications)
    result = dict(zip(names, results, strict=True))
    if written is not None:
        result[QKV] = convert(written) if dqkv is None else (convert(written), dqkv)[1]
        count_writes(dqkv)
    return tuple(result[QKV] if name == QKV else convert(result[name]) for name in wrt)


def parts_of_qkv(qkv: Any) -> dict[str, Any]:
    """Return q, k and v by name, as views of one array of queries, keys and values."""
    packed = read(QKV, qkv)
    check_qkv(packed, "bshd")
    return dict(zip(ROWS, parts_of(packed), strict=True))


def parts_of_wrt(wrt: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `wrt` with "qkv" replaced by "q", "k" and "v"."""
    return tuple(name for one in wrt for name in (ROWS if one == QKV else (one,)))


def plan(
    arguments: GradientArguments,
    options: Options,
    backend: str,
    arch: str | None,
    modifications: Mapping[str, Any],
) -> Plan:
    """Return the plan of a call without reading its arrays; see `cupy_flash.plan`.

    If out, dout or lse is None, a contiguous array is assumed.
    """
    require_arrays(arguments, ROWS)
    wrt, modifications = with_captured_slopes(options.wrt or ROWS, modifications, OF_MOD)
    options = options._replace(wrt=wrt)
    arguments, options = as_planned(arguments, options, modifications)
    q, v = arguments.q, arguments.v
    is_packed = options.kind == "varlen"
    for name, array in (("q", q), ("v", v)):
        if is_packed:
            require_axes(name, array, 3, "(rows, heads, head_dim)")
        else:
            require_batch_axes(name, array, q)
        require_float(name, array)
    out = unallocated((*q.shape[:-1], v.shape[-1]), q.dtype)
    *_, seqlen, heads, _ = (q if is_packed else to_bshd(q, options.layout)).shape
    shape = (*q.shape[:-3], heads, seqlen)
    lse = unallocated(shape, np.float64 if q.dtype == np.float64 else np.float32)
    assumed = {"out": out, "dout": out, "lse": lse}
    missing = {name: x for name, x in assumed.items() if getattr(arguments, name) is None}
    arguments = arguments._replace(**missing)
    require_backend(backend)
    return plan_of(_GRADIENTS, arguments, options, backend, arch)
