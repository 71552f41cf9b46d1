"""Handler of traced calls on JAX's CPU platform, which runs the CPU backend."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np

from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.key_lists.backward import gradients_of_lists
from cupy_flash.calls.key_lists.forward import attention_to_lists
from cupy_flash.jax.frames import BufferKey, read_frame
from cupy_flash.jax.static_call import LISTS, StaticCall, function_of, parsed, whole_dtype

_BACKEND = "cpu"
_parsed = functools.lru_cache(maxsize=1024)(parsed)


def execute(address: int) -> None:
    """Compute the call with the frame at this address."""
    frame = read_frame(address)
    static = _parsed(frame.text)
    given = dict(zip(static.names, _arrays(frame.keys(), frame.addresses), strict=True))
    for name in static.pairs:
        given[name] = given[name].view(whole_dtype(name))[..., 0]
    # The workspace follows the results; the CPU backend does not need it.
    made = _arrays(frame.result_keys(), frame.results)
    results = dict(zip(static.results, made, strict=False))
    for name in static.appended:
        if results[name].ctypes.data != given[name].ctypes.data:
            results[name][...] = given[name]
        given[name] = results[name]
    if static.has_tangents:
        _tangents(static, given, results)
    else:
        (_backward if static.is_backward else _forward)(static, given, results)


def _forward(static: StaticCall, given: dict[str, Any], results: dict[str, Any]) -> None:
    record, modifications = _call_of(static, {**given, "out": results["out"]})
    options = static.options._replace(return_lse=True)
    if options.kind == "scaled":
        options = options._replace(out_dtype=None)
    call = record, options, _BACKEND, static.keys, modifications
    if static.has_lists:
        _, *rows = attention_to_lists(*call, None, given[LISTS])
    else:
        _, *rows = dispatch.attention(*call)
    for name, row in zip(("lse", *options.statistics), rows, strict=True):
        results[name][...] = row


def _backward(static: StaticCall, given: dict[str, Any], results: dict[str, Any]) -> None:
    rows = {f"d{name}": x for name, x in results.items() if name in ("q", "k", "v")}
    record, modifications = _call_of(static, {**given, **rows})
    call = record, static.options, _BACKEND, modifications
    if static.has_lists:
        gradients = gradients_of_lists(*call, None, given[LISTS])
    else:
        gradients = dispatch_backward.gradients(*call)
    for name, gradient in zip(static.results, gradients, strict=True):
        if name not in ("q", "k", "v"):
            results[name][...] = gradient


def _tangents(static: StaticCall, given: dict[str, Any], results: dict[str, Any]) -> None:
    functions = {name: function_of(token) for name, token in static.functions}
    made = static.tangents(given, functions)
    for name, tangent in zip(static.results, made, strict=True):
        results[name][...] = tangent


def _call_of(static: StaticCall, arrays: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    record, modifications = static.record(arrays)
    return record, modifications | {name: function_of(token) for name, token in static.functions}


def _arrays(keys: tuple[BufferKey, ...], addresses: list[int]) -> list[np.ndarray]:
    return [_array(key, at) for key, at in zip(keys, addresses, strict=True)]


def _array(key: BufferKey, address: int) -> np.ndarray:
    shape, dtype = key.shape, key.numpy_dtype
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(address)
    return np.ndarray(shape, dtype, memory)
