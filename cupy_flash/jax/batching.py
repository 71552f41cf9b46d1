"""Rule of traced calls under `jax.vmap`: the mapped axis becomes a batch axis of the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.folding import can_fold, fold, fold_dense, unfold_gradient
from cupy_flash.jax.static_call import StaticCall, function_of

# Function that returns the function of another call.
Again = Callable[[StaticCall], Callable[..., tuple[Any, ...]]]

_CACHES = ("k_cache", "v_cache")
_SCALES = ("k_scale", "v_scale")


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
            folded = _folded_step if static.options.kind == "kvcache" else _folded
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


def _folded_step(
    static: StaticCall,
    size: int,
    is_mapped: list[bool],
    operands: tuple[Any, ...],
    again: Again,
) -> tuple[Any, ...]:
    """Return the results of a decoding step for each batch, by one call.

    Caches that are the same for all batches, and that the call does not update, are not copied.
    """
    given = dict(zip(static.names, operands, strict=True))
    mapped = {name for name, is_it in zip(static.names, is_mapped, strict=True) if is_it}
    # Each batch has its own caches and scales after the step.
    own = [name for name in static.appended if name not in mapped]
    given |= {name: jnp.broadcast_to(given[name], (size, *given[name].shape)) for name in own}
    mapped.update(own)
    of_caches = {*_CACHES, *_SCALES} & given.keys()
    has_own_caches = bool(static.appended or mapped & of_caches)
    batch = given["q"].shape[1 if "q" in mapped else 0]
    caches = given["k_cache"].shape[1 if "k_cache" in mapped else 0]
    made = {
        name: x
        if name in of_caches and not has_own_caches
        else fold(
            jnp, name, x, size, caches if name in of_caches else batch, is_mapped=name in mapped
        )
        for name, x in given.items()
    }
    first = caches * jnp.arange(size, dtype=jnp.int32) if has_own_caches else None
    if "block_table" in made:
        made["block_table"] = _moved(made["block_table"], first, caches)
    elif "cache_batch_idx" in made or caches != batch or first is None:
        index = made.get("cache_batch_idx", jnp.tile(jnp.arange(batch, dtype=jnp.int32), size))
        made["cache_batch_idx"] = _moved(index, first, caches)
    names = tuple(made)
    results = again(static._replace(names=names))(*made.values())
    return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)


def _moved(index: Any, first: Any | None, count: int) -> Any:
    """Return indices of caches or pages, given the first one of each batch.

    An index that is out of range for its batch stays out of range.
    """
    if first is None:
        return index
    start = jnp.repeat(first, index.shape[0] // len(first))
    start = start.reshape(-1, *(1,) * (index.ndim - 1))
    return jnp.where((index >= 0) & (index < count), index + start, -1)
