"""JAX primitives: operations with derivative rules, and linear operations on tangents.

When JAX differentiates a loop in reverse mode, it drops the rules of `jax.custom_jvp` and
`jax.custom_vjp` in parts of the loop. The gradients of these parts could not be differentiated
again. Primitives keep their rules.

The rule of an operation returns its tangents as results of a linear operation. Reverse mode does
not compute the linear operation, but transposes it. `jax.custom_derivatives.linear_call` is not
used, because it would trace both functions of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cupy_flash.jax.versions import require_devices


class Linear(NamedTuple):
    """Functions that define a linear operation on tangents; its other operands are residuals.

    Attributes
    ----------
    push
        Function of residuals and tangents, both by name, that returns the results as a tuple.
    pull
        Function of residuals and the cotangents of the results, which are None if they are 0. It
        returns the cotangents of all tangents by name.
    moved
        Function of residuals, tangents, and tangents of the residuals, all by name. It returns the
        tangents of the results that the latter cause, or raises an error.
    """

    push: Callable[[dict[str, Any], dict[str, Any]], Sequence[Any]]
    pull: Callable[[dict[str, Any], Sequence[Any]], dict[str, Any]]
    moved: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Sequence[Any]]


def is_zero(tangent: Any) -> bool:
    """Return whether a tangent or cotangent is known to be 0, as that of an integer array is."""
    zero = isinstance(tangent, (ad.Zero, jax.custom_derivatives.SymbolicZero))
    return zero or tangent.dtype == jax.dtypes.float0


def linear(
    rule: Linear, residuals: dict[str, Any], tangents: dict[str, Any], like: Sequence[str]
) -> tuple[Any, ...]:
    """Return the results of a linear operation.

    `like` names residuals that have the shapes and dtypes of the results.
    """
    names = tuple(residuals)
    made = _linear.bind(
        *(*residuals.values(), *tangents.values()),
        rule=rule,
        names=names,
        moving=tuple(tangents),
        like=tuple(map(names.index, like)),
    )
    return tuple(made)


def _named(
    arrays: Sequence[Any], names: tuple[str, ...], moving: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return residuals and tangents by name, given both in order."""
    count = len(names)
    return (
        dict(zip(names, arrays[:count], strict=True)),
        dict(zip(moving, arrays[count:], strict=True)),
    )


def _results(*arrays: Any, rule: Linear, names: Any, moving: Any, like: Any) -> list[Any]:
    return list(rule.push(*_named(arrays, names, moving)))


def _kinds(*kinds: Any, like: tuple[int, ...], **_: Any) -> list[Any]:
    return [kinds[i].update(weak_type=False) for i in like]


def _transposed(
    cotangents: Sequence[Any], *arrays: Any, rule: Linear, names: Any, moving: Any, like: Any
) -> list[Any]:
    residuals, tangents = _named(arrays, names, moving)
    if all(map(is_zero, cotangents)):
        return [None] * len(names) + [ad.Zero(x.aval) for x in tangents.values()]
    given = tuple(None if is_zero(x) else x for x in cotangents)
    found = rule.pull(residuals, given)
    return [None] * len(names) + [found[name] for name in moving]


def _differentiated(
    arrays: Sequence[Any],
    of_arrays: Sequence[Any],
    *,
    rule: Linear,
    names: Any,
    moving: Any,
    like: Any,
) -> tuple[Any, Any]:
    params = {"rule": rule, "names": names, "moving": moving, "like": like}
    residuals, tangents = _named(arrays, names, moving)
    of_residuals, of_tangents = _named(of_arrays, names, moving)
    terms = []
    if not all(map(is_zero, of_tangents.values())):
        given = map(ad.instantiate_zeros, of_tangents.values())
        terms.append(_linear.bind(*residuals.values(), *given, **params))
    moved = {name: x for name, x in of_residuals.items() if not is_zero(x)}
    if moved:
        terms.append(rule.moved(residuals, tangents, moved))
    return _linear.bind(*arrays, **params), [sum(x[1:], x[0]) for x in zip(*terms, strict=True)]


def _mapped(
    arrays: Sequence[Any],
    axes: Sequence[Any],
    *,
    rule: Linear,
    names: Any,
    moving: Any,
    like: tuple[int, ...],
) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    # Each mapped element has its own cotangents, so all tangents are mapped. The residuals in
    # `like` are mapped, too, because they determine the shapes of the results.
    own = {*like, *range(len(names), len(arrays))}
    given = [
        _at_front(x, axis, size) if axis is not None or i in own else x
        for i, (x, axis) in enumerate(zip(arrays, axes, strict=True))
    ]
    first = {n: 0 if i in own or axes[i] is not None else None for i, n in enumerate(names)}

    def push(residuals: dict[str, Any], tangents: dict[str, Any]) -> Any:
        return jax.vmap(rule.push, (first, 0))(residuals, tangents)

    def pull(residuals: dict[str, Any], cotangents: Sequence[Any]) -> Any:
        return jax.vmap(rule.pull, (first, 0))(residuals, cotangents)

    def moved(residuals: dict[str, Any], tangents: dict[str, Any], moved: dict[str, Any]) -> Any:
        # A residual that is not mapped has a tangent that is not mapped.
        of_moved = {name: first[name] for name in moved}
        return jax.vmap(rule.moved, (first, 0, of_moved))(residuals, tangents, moved)

    results = _linear.bind(
        *given, rule=Linear(push, pull, moved), names=names, moving=moving, like=like
    )
    return results, [0] * len(results)


def _at_front(array: Any, axis: int | None, size: int) -> Any:
    if axis is None:
        return jnp.broadcast_to(array, (size, *array.shape))
    return jnp.moveaxis(array, axis, 0)


# Function of the arguments, and of the tangents of the differentiated arguments, keyed by position.
# It returns the results and their tangents.
Rule = Callable[[tuple[Any, ...], dict[int, Any]], tuple[Sequence[Any], Sequence[Any]]]


def differentiable(run: Callable[..., Sequence[Any]], rule: Rule) -> Callable[..., tuple[Any, ...]]:
    """Return the function `run` of arrays with the derivatives that `rule` returns."""

    def function(*arrays: Any) -> tuple[Any, ...]:
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            return tuple(_call.bind(*arrays, run=run, rule=rule))
        # Without tracers, nothing is differentiated.
        return tuple(run(*arrays))

    return function


def _run(*arrays: Any, run: Callable[..., Sequence[Any]], rule: Rule) -> list[Any]:
    return list(run(*arrays))


def _kinds_of_run(*kinds: Any, run: Callable[..., Sequence[Any]], rule: Rule) -> list[Any]:
    found: list[Any] = jax.make_jaxpr(lambda *arrays: list(run(*arrays)))(*kinds).out_avals
    return found


def _tangents_of_run(
    arrays: Sequence[Any], tangents: Sequence[Any], *, run: Any, rule: Rule
) -> tuple[Any, Any]:
    return rule(tuple(arrays), {i: x for i, x in enumerate(tangents) if not is_zero(x)})


def _mapped_run(
    arrays: Sequence[Any], axes: Sequence[Any], *, run: Any, rule: Rule
) -> tuple[Any, Any]:
    first = tuple(None if axis is None else 0 for axis in axes)
    given = (
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    )

    def mapped_rule(arrays: tuple[Any, ...], moving: dict[int, Any]) -> Any:
        of_moving = {i: first[i] for i in moving}
        return jax.vmap(rule, (first, of_moving))(arrays, moving)

    results = _call.bind(*given, run=jax.vmap(run, first), rule=mapped_rule)
    return results, [0] * len(results)


_call = Primitive("cupy_flash_call")
_call.multiple_results = True
_call.def_impl(_run)
_call.def_abstract_eval(_kinds_of_run)
ad.primitive_jvps[_call] = _tangents_of_run
batching.primitive_batchers[_call] = _mapped_run
mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=True))
require_devices(_call)

_linear = Primitive("cupy_flash_linear")
_linear.multiple_results = True
_linear.def_impl(_results)
_linear.def_abstract_eval(_kinds)
ad.primitive_jvps[_linear] = _differentiated
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _mapped
mlir.register_lowering(_linear, mlir.lower_fun(_results, multiple_results=True))
require_devices(_linear)
