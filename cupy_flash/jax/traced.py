"""Calls inside a function that JAX traces: they become an operation of the compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupy_flash.arrays.jax_arrays import is_jax
from cupy_flash.arrays.kinds import (
    is_number_or_list,
    normalize_int32,
    normalize_scale,
    read,
    vector,
)
from cupy_flash.arrays.strided import as_int32, is_cupy
from cupy_flash.calls.arguments import FLOAT8_SCALES, INT32
from cupy_flash.jax import targets
from cupy_flash.jax.batching import batched
from cupy_flash.jax.dropout import words_of
from cupy_flash.jax.partitioning import partitioned, with_explicit_axes
from cupy_flash.jax.static_call import StaticCall
from cupy_flash.jax.versions import with_common_axes
from cupy_flash.mods.keywords import DROPOUT_SEED, VECTORS


def call(static: StaticCall, operands: tuple[Any, ...]) -> dict[str, Any]:
    """Return the results of a call by name.

    Parameters
    ----------
    static
        The call without arrays.
    operands
        JAX arrays, traced or not, in the order of `static.names`; see `operand`.

    Raises
    ------
    TypeError, ValueError
        If no kernel computes the call; the message names the argument.
    """
    operands = with_common_axes(operands)
    function = with_explicit_axes(static, _function(static), operands)
    results = function(*operands)
    return dict(zip(static.results, results, strict=True))


@functools.lru_cache(maxsize=1024)
def _function(static: StaticCall) -> Callable[..., Any]:
    """Return the compiled function of a call, so that a repeated call is traced only once."""

    def results(*operands: Any) -> tuple[Any, ...]:
        return targets.results_of(static, operands)

    function = jax.custom_jvp(batched(static, partitioned(static, results), _function))
    function.defjvp(_no_derivative)
    return jax.jit(function, inline=True)


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "second derivatives of attention are differentiated by JAX; third ones are not supported"
    )


def operand(name: str, value: Any, q: Any, layout: str) -> Any:
    """Return an argument as an operand of a traced call, in the form that kernels read.

    Parameters
    ----------
    name, value
        Name of the argument, and an array of JAX, NumPy or CuPy, or for some a list or a number.
    q, layout
        Queries of the call, and the order of their axes.

    Raises
    ------
    TypeError, ValueError
        For a value that calls outside of compiled functions refuse, too.
    """
    if name in VECTORS or name == "sinks_tangent":
        return _head_values(name, value, q, layout)
    if name == DROPOUT_SEED:
        # Arrays are words already, see `dropout.with_words`.
        return words_of(value) if is_number_or_list(value) else value
    if is_jax(value):
        # Some versions of JAX wrap NumPy arrays in a type of their own.
        value = jnp.asarray(value)
        is_other = name in INT32 and value.dtype.kind in "iu" and value.dtype != jnp.int32
        return value.astype(jnp.int32) if is_other else value
    if name in FLOAT8_SCALES:
        value = normalize_scale(name, value, on_host=True)
    elif name in INT32 and (is_number_or_list(value) or isinstance(value, bool)):
        value = normalize_int32(name, value, on_host=True)
    value = read(name, value)
    value = value.get() if is_cupy(value) else value
    if name in INT32:
        value = as_int32(name, value)
    if is_pairs(name, value):
        value = value.reshape(*value.shape, 1).view(np.uint32)
    return jnp.asarray(value)


def lists_of(key_indices: Any) -> Any:
    """Return lists of keys as int32, in which larger integers stand for no key; None stays None."""
    if key_indices is None:
        return None
    xp: Any = jnp if isinstance(key_indices, jax.Array) else np
    lists = key_indices
    if xp is np:
        lists = np.asarray(lists.get() if is_cupy(lists) else lists)
    if lists.dtype.kind not in "iu":
        raise TypeError(f"key_indices has dtype {lists.dtype}; expected integers")
    lists = xp.minimum(lists, np.iinfo(np.int32).max) if lists.dtype.itemsize >= 4 else lists
    return (xp.maximum(lists, -1) if lists.dtype.kind == "i" else lists).astype(np.int32)


def is_pairs(name: str, value: Any) -> bool:
    """Return whether `operand` passes an argument as pairs of uint32, see `StaticCall.pairs`."""
    if name == DROPOUT_SEED:
        return True
    if name != "tree_mask" or isinstance(value, jax.Array) or jax.config.jax_enable_x64:
        return False
    return bool(getattr(value, "dtype", None) == np.uint64)


def _head_values(name: str, value: Any, q: Any, layout: str) -> Any:
    """Return ALiBi slopes or sinks with a number for each head, of a dtype that kernels read."""
    if is_number_or_list(value):
        value = vector(name, value, on_host=True)
    value = jnp.asarray(value.get() if is_cupy(value) else value)
    accumulator = jnp.float64 if q.dtype.name == "float64" else jnp.float32
    as_they_are = (accumulator,) if name == "alibi_slopes" else (accumulator, q.dtype)
    if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype not in as_they_are:
        value = value.astype(accumulator)
    if value.ndim == 0 and q.ndim >= 3:
        value = jnp.broadcast_to(value, (q.shape[-3 if layout == "bhsd" else -2],))
    return value
