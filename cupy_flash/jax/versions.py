"""Functions that differ between versions of JAX: the FFI module, and axes of `jax.shard_map`.

From JAX 0.6, the type of an array says over which axes of `jax.shard_map` the array varies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

try:
    from jax import ffi as _ffi
except ImportError:  # JAX 0.4
    from jax.extend import ffi as _ffi

ffi: Any = _ffi


def varying_axes(arrays: Iterable[Any]) -> frozenset[str]:
    """Return the axes over which any of the arrays varies."""
    return frozenset().union(*map(_axes_of, arrays))


def _axes_of(array: Any) -> frozenset[str]:
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    # JAX 0.10 has renamed the attribute.
    manual = getattr(kind, "manual_axis_type", None)
    axes = getattr(kind, "vma", None) if manual is None else manual.varying
    return frozenset(axes or ())


def varying(array: Any, axes: frozenset[str]) -> Any:
    """Return an array that varies over these axes, as far as its type is concerned.

    JAX sums the gradient of an array that is the same on all devices where it becomes varying.
    """
    missing = tuple(sorted(axes - _axes_of(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def with_common_axes(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arrays, each varying over the axes over which any of them varies."""
    axes = varying_axes(arrays)
    return tuple(varying(array, axes) for array in arrays) if axes else arrays


def require_devices(primitive: Any) -> None:
    """Mark a primitive as one that JAX compiles only if it knows the devices.

    The rules of `custom_partitioning` need the devices. JAX does not see that a primitive is
    lowered to such a call, and has no public function to mark it.
    """
    from jax._src import dispatch

    primitives = getattr(dispatch, "prim_requires_devices_during_lowering", None)
    if primitives is not None:
        primitives.add(primitive)
