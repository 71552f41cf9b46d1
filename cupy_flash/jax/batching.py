"""Rule of traced calls under `jax.vmap`: the mapped axis becomes a batch axis of the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.folding import can_fold, fold_dense, unfold_gradient
from cupy_flash.jax.folding import Again, folded_step
from cupy_flash.jax.static_call import StaticCall, function_of


def batched(
    static: StaticCall,
    function: Callable[..., tuple[Any, ...]],
    again: Again,
) -> Callable[..., tuple[Any, ...]]:
    """Return the function of a call, with a rule for `jax.vmap`.

    `again` returns the function of another call.
    """
    with_rule = jax.custom_batching.custom_vmap(function)

    def rule(size: int, is_mapped: list[bool], *operands: Any) -> tuple[Any, Any]:
        if _can_fold(static, is_mapped):
            folded = folded_step if static.options.kind == "kvcache" else _folded
            results = folded(static, size, is_mapped, operands, again)
        else:
            results = _one_by_one(is_mapped, operands, again(static))
        return results, (True,) * len(results)

    with_rule.def_vmap(rule)
    result: Callable[..., tuple[Any, ...]] = with_rule
    return result


def _can_fold(static: StaticCall, is_mapped: list[bool]) -> bool:
    """Return whether one call can compute all calls of a mapped axis."""
    mapped = {name for name, is_it in zip(static.names, is_mapped, strict=True) if is_it}
    functions = [function_of(token).traced for _, token in static.functions]
    return can_fold(static.options.kind, static.names, mapped, static.results, functions)


def _one_by_one(
    is_mapped: list[bool], operands: tuple[Any, ...], function: Callable[..., tuple[Any, ...]]
) -> tuple[Any, ...]:
    def one(mapped: list[Any]) -> tuple[Any, ...]:
        given = iter(mapped)
        return function(
            *(next(given) if is_it else x for x, is_it in zip(operands, is_mapped, strict=True))
        )

    mapped = [x for x, is_it in zip(operands, is_mapped, strict=True) if is_it]
    results: tuple[Any, ...] = jax.lax.map(one, mapped)
    return results


def _folded(
    static: StaticCall,
    size: int,
    is_mapped: list[bool],
    operands: tuple[Any, ...],
    again: Again,
) -> tuple[Any, ...]:
    arrays = dict(zip(static.names, operands, strict=True))
    mapped = {name for name, is_it in zip(static.names, is_mapped, strict=True) if is_it}
    given, batch = fold_dense(jnp, arrays, mapped, size, static.results)
    results = again(static)(*(given[name] for name in static.names))
    shapes = {n: x.shape[1:] if n in mapped else x.shape for n, x in arrays.items()}
    return tuple(
        unfold_gradient(name, result, shapes[name], size, batch) if name in shapes else result
        for name, result in zip(static.results, results, strict=True)
    )
