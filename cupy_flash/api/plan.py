"""Public functions that return the plan of an attention or gradient call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cupy_flash.api.backward import (
    flash_attention_backward,
    flash_attention_qkvpacked_backward,
    flash_attention_varlen_backward,
)
from cupy_flash.api.dense import flash_attention, flash_attention_qkvpacked
from cupy_flash.api.kvcache import flash_attention_with_kvcache
from cupy_flash.api.varlen import flash_attention_varlen, has_key_positions
from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.arguments import Arguments, GradientArguments, given_lengths
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.mods.keywords import require_known
from cupy_flash.opaque import opaque
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.tile import freeze_tile
from cupy_flash.problem.values import named_dtype

# `Options.kind` of the calls of each function.
_FORWARD: Mapping[Any, str] = {
    flash_attention: "dense",
    flash_attention_qkvpacked: "qkvpacked",
    flash_attention_varlen: "varlen",
    flash_attention_with_kvcache: "kvcache",
}
_BACKWARD: Mapping[Any, str] = {
    flash_attention_backward: "dense",
    flash_attention_qkvpacked_backward: "dense",
    flash_attention_varlen_backward: "varlen",
}
# Arrays of backward calls that may be omitted for a plan, which then assumes contiguous arrays.
_ASSUMED = ("dout", "out", "lse")
_SCALED = ("q_scale", "k_scale", "v_scale", "out_dtype")


@opaque
def plan(
    function: Callable[..., Any] | Any = None,
    /,
    *arguments: Any,
    arch: str | None = None,
    **options: Any,
) -> Plan:
    """Return the Plan that a call of a function would use, without computing anything.

    Parameters
    ----------
    function : callable
        `flash_attention`, `flash_attention_qkvpacked`, `flash_attention_varlen` or
        `flash_attention_with_kvcache`, or the backward function of one of the first three, such as
        `flash_attention_backward`.
    *arguments, **options
        Arguments of the call. The arrays are neither read nor written. For a backward function,
        dout, out and lse may be omitted, and are assumed to be contiguous. dqkv is ignored.
    arch : str, optional
        Architecture to plan for, such as "sm_90", instead of that of the current GPU.

    Returns
    -------
    Plan
        Family, tile, resources, workspace and reasons; `print` shows them. For a varlen call on the
        CPU backend, the tile is that of the longest sequence. With a KV cache, the plan depends on
        the capacity, not on the lengths, and does not include the launch of an append.

    Raises
    ------
    TypeError
        If `function` is not one of these functions, or refuses the arguments.
    ValueError, UnsupportedError
        If `function` refuses the arguments.

    Warns
    -----
    DeprecationWarning
        If the arrays of `flash_attention` are passed without the function. The next version will
        not accept them.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention, plan
    >>> q = k = v = np.empty((1, 4096, 8, 64), np.float16)
    >>> plan(flash_attention, q, k, v, causal=True, arch="sm_80").family
    'mma'
    """
    if isinstance(function, str):
        raise TypeError(
            f"function is {function!r}, a name; expected the function itself, such as "
            "cupy_flash.flash_attention"
        )
    if not callable(function):
        old = "plan(q, k, v, ...)"
        _deprecated(old, "plan(flash_attention, q, k, v, ...)", is_opaque=True)
        if function is not None or arguments:
            arguments = (function, *arguments)
        function = flash_attention
    kind = _FORWARD.get(function) or _BACKWARD.get(function)
    if kind is None:
        names = ", ".join(f"cupy_flash.{known.__name__}" for known in (*_FORWARD, *_BACKWARD))
        # The module distinguishes functions of the same name, such as those of cupy_flash.torch.
        is_plain = inspect.isfunction(function)
        result = f"{function.__module__}.{function.__name__}" if is_plain else repr(function)
        raise TypeError(f"function is {result}; expected one of {names}")
    signature = inspect.signature(function)
    try:
        given = signature.bind_partial(*arguments, **options).arguments
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None
    for name in given.get("modifications", {}):
        require_known(name, function)
    _require_given(function, signature, given)
    if function in _FORWARD:
        return _plan_forward(kind, given, arch)
    return _plan_backward(kind, given, arch)


def plan_backward(q: Any, k: Any, v: Any, *, arch: str | None = None, **options: Any) -> Plan:
    """Return `plan` for `flash_attention_backward`; deprecated.

    Parameters
    ----------
    q, k, v, arch, **options
        See `plan`.
    """
    _deprecated("plan_backward(q, k, v, ...)", "plan(flash_attention_backward, q=q, k=k, v=v, ...)")
    return plan(flash_attention_backward, q=q, k=k, v=v, arch=arch, **options)


def plan_varlen(*arguments: Any, arch: str | None = None, **options: Any) -> Plan:
    """Return `plan` for `flash_attention_varlen`; deprecated.

    Parameters
    ----------
    *arguments, arch, **options
        See `plan`.
    """
    _deprecated("plan_varlen(...)", "plan(flash_attention_varlen, ...)")
    return plan(flash_attention_varlen, *arguments, arch=arch, **options)


def plan_with_kvcache(*arguments: Any, arch: str | None = None, **options: Any) -> Plan:
    """Return `plan` for `flash_attention_with_kvcache`; deprecated.

    Parameters
    ----------
    *arguments, arch, **options
        See `plan`.
    """
    _deprecated("plan_with_kvcache(...)", "plan(flash_attention_with_kvcache, ...)")
    return plan(flash_attention_with_kvcache, *arguments, arch=arch, **options)


def _require_given(
    function: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> None:
    """Raise TypeError unless all arguments are given that a plan depends on."""
    parameters = signature.parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    assumed = _ASSUMED if function in _BACKWARD else ()
    missing = [name for name in required if name not in given and name not in assumed]
    if not missing:
        return
    name, by_name = function.__name__, ", ".join(f"{n}={n}" for n in required if n not in assumed)
    instead = f"; to omit {', '.join(_ASSUMED)}, pass the others by name: plan({name}, {by_name})"
    raise TypeError(
        f"{name} is planned without {', '.join(missing)}; expected {', '.join(required)}"
        f"{instead if assumed else ''}"
    )


def _deprecated(old: str, new: str, *, is_opaque: bool = False) -> None:
    # The function that calls an opaque function is one frame further away.
    level = 4 if is_opaque else 3
    warnings.warn(f"{old} is deprecated; call {new}", DeprecationWarning, stacklevel=level)


def _plan_forward(kind: str, given: dict[str, Any], arch: str | None) -> Plan:
    _refuse_lists(given)
    if kind == "dense" and any(given.get(name) is not None for name in _SCALED):
        kind = "scaled"
    if kind == "kvcache":
        _, given["cache_seqlens"] = given_lengths(given.get("cache_seqlens"))
    if kind == "varlen":
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        given["cu_seqlens_k"] = has_key_positions(*map(given.get, names))
    return dispatch.plan(*_call(Arguments, kind, given), arch, given.get("modifications", {}))


def _refuse_lists(given: Mapping[str, Any]) -> None:
    if given.get("key_indices") is not None:
        raise UnsupportedError("calls with key_indices have no plan; leave out key_indices")


def _plan_backward(kind: str, given: dict[str, Any], arch: str | None) -> Plan:
    _refuse_lists(given)
    modifications = given.get("modifications", {})
    if "qkv" in given:
        given |= dispatch_backward.parts_of_qkv(given["qkv"])
        names = dispatch_backward.wanted_of_qkv(given.get("wrt"), modifications)
        given["wrt"] = dispatch_backward.parts_of_wrt(names)
    else:
        given["wrt"] = dispatch_backward.wanted(given.get("wrt"), modifications)
    return dispatch_backward.plan(*_call(GradientArguments, kind, given), arch, modifications)


def _call(record: Any, kind: str, given: Mapping[str, Any]) -> tuple[Any, Options, str]:
    """Return the record of arrays, the options and the backend of a call, given its arguments."""
    arrays, options = (
        {name: given[name] for name in names if name in given}
        for names in (record._fields, Options._fields)
    )
    for name, convert in _CONVERTED.items():
        if name in options:
            options[name] = convert(options[name])
    return record(**arrays), Options(kind, **options), given.get("backend", "auto")


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "tile": freeze_tile,
    "out_dtype": named_dtype,
    "grad_dtype": named_dtype,
}
