"""Rule of traced calls under `jax.vmap`: the mapped axis becomes a batch axis of the same call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.jax.folding import BROADCAST, Again, fold, folded_step
from cupy_flash.jax.static_call import StaticCall, function_of
from cupy_flash.mods.ir.compose import varies
from cupy_flash.problem.gradient import ROWS

# Operands of dense calls with the batch axes of q: the mapped axis is one more.
_WITH_BATCH_AXES = (*ROWS, "out", "dout", "lse", "dlse")


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
    # Kernels read one sink for each head, and the same rotary tables for all sequences.
    if static.options.kind == "varlen" or mapped & {"sinks", "rotary_cos", "rotary_sin"}:
        return False
    # The gradient of sinks is summed over the whole batch. Packed new rows stay packed.
    if "sinks" in static.results or "cu_seqlens_k_new" in static.names:
        return False
    # A function of the index of the sequence would get another index.
    return not any(varies(function_of(token).traced)[0] for _, token in static.functions)


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
    # A gradient has the shape of its input, so each call of the mapped axis needs its own input.
    mapped = {
        name: x if is_it else jnp.broadcast_to(x, (size, *x.shape))
        for name, x, is_it in zip(static.names, operands, is_mapped, strict=True)
        if is_it or name in (*_WITH_BATCH_AXES, *static.results)
    }
    given = {**dict(zip(static.names, operands, strict=True)), **mapped}
    batch = math.prod(given["q"].shape[1:-3])
    results = again(static)(
        *(
            x if name in _WITH_BATCH_AXES else fold(name, x, size, batch, is_mapped=name in mapped)
            for name, x in ((name, given[name]) for name in static.names)
        )
    )
    return tuple(
        _gradient_of(result, given[name].shape, batch) if name in BROADCAST else result
        for name, result in zip(static.results, results, strict=True)
    )


def _gradient_of(gradient: Any, shape: tuple[int, ...], batch: int) -> Any:
    """Return the gradients of a bias that `fold` has broadcast, for each index of the axis."""
    size, *own = shape
    each = gradient.reshape((size, batch, *gradient.shape[1:]))
    if len(own) < BROADCAST["bias"] or own[0] == 1:
        each = each.sum(1)
    return each.reshape(shape)
