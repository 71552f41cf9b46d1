"""Partitioning of traced calls over several devices: batch and heads are divided, nothing else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from cupy_flash.jax.static_call import StaticCall, function_of
from cupy_flash.mods.ir.compose import varies
from cupy_flash.mods.keywords import DROPOUT_SEED
from cupy_flash.problem.gradient import ROWS, TANGENTS
from cupy_flash.problem.problem import STATISTICS

# Roles of axes that may be divided: sequences, and query and KV heads.
BATCH, HEADS = "b", "h"
_Roles = tuple[str | None, ...]
# Roles of the last axes of each array; axes before them are not divided.
_OF_SCORES = (BATCH, HEADS, None, None)
_TRAILING: dict[str, _Roles] = {
    **dict.fromkeys(("bias", "bias_tangent", "mask"), _OF_SCORES),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), (BATCH, None, HEADS)),
    **dict.fromkeys(("prefix_lens", "seqlens_k", "q_offset", "cache_leftpad"), (BATCH,)),
    **dict.fromkeys(("cache_seqlens", "rotary_seqlens", "cache_batch_idx"), (BATCH,)),
    "tree_mask": (BATCH, None),
    "key_indices": (BATCH, None, HEADS, None),
    "block_table": (BATCH, None),
    "alibi_slopes": (BATCH, HEADS),
    **dict.fromkeys(("sinks", "sinks_tangent"), (HEADS,)),
}
_ROW_ARRAYS = (*ROWS, *TANGENTS, "out", "dout", "dout_tangent", "k_cache", "v_cache")
_LSE_ARRAYS = ("lse", "dlse", "dlse_tangent", *STATISTICS)


def partitioned(
    static: StaticCall, function: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Return the function of a call, with rules that divide it over the devices of a mesh."""
    with_rules = custom_partitioning(function)

    def partition(mesh: Any, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
        chosen = _chosen_axes(static, arguments, results, mesh)
        shardings = [
            [
                NamedSharding(mesh, PartitionSpec(*_spec(static, name, x.shape, chosen)))
                for name, x in zip(names, given, strict=True)
            ]
            for names, given in ((static.names, arguments), (static.results, results))
        ]

        def on_each_device(*operands: Any) -> tuple[Any, ...]:
            with _without_mesh():
                made = function(*operands)
                return tuple(
                    _summed(static, name, x, whole.shape, chosen)
                    for name, x, whole in zip(static.results, made, results, strict=True)
                )

        return mesh, on_each_device, tuple(shardings[1]), tuple(shardings[0])

    def infer(mesh: Any, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
        chosen = _chosen_axes(static, arguments, (), mesh)
        return tuple(
            NamedSharding(mesh, PartitionSpec(*_spec(static, name, x.shape, chosen)))
            for name, x in zip(static.results, results, strict=True)
        )

    rules: dict[str, Any] = {"partition": partition, "infer_sharding_from_operands": infer}
    if "sharding_rule" in inspect.signature(with_rules.def_partition).parameters:
        rules["sharding_rule"] = lambda mesh, arguments, results: _rule(static, arguments, results)
    with_rules.def_partition(**rules)
    result: Callable[..., tuple[Any, ...]] = with_rules
    return result


def with_explicit_axes(
    static: StaticCall, function: Callable[..., tuple[Any, ...]], operands: tuple[Any, ...]
) -> Callable[..., tuple[Any, ...]]:
    """Return the function of a call for operands whose types may say how they are divided.

    Within the function, JAX divides arrays by the rules of `partitioned`. The types of its results
    are those of the operands with the same names, or follow from the operands.
    """
    mesh = jax.sharding.get_abstract_mesh() if hasattr(jax.sharding, "auto_axes") else None
    # JAX before 0.8 has no public `auto_axes`. Outside of `jax.set_mesh`, there may be no mesh.
    if mesh is None or not mesh.explicit_axes:
        return function
    kinds = tuple(map(jax.typeof, operands))
    chosen = _chosen_axes(static, kinds, (), mesh)
    own = {name: kind.sharding.spec for name, kind in zip(static.names, kinds, strict=True)}
    shapes = zip(static.results, static.result_shapes(operands), strict=False)
    specs = tuple(
        own.get(name, PartitionSpec(*_spec(static, name, shape, chosen)))
        for name, (shape, _) in shapes
    )
    result: Callable[..., tuple[Any, ...]] = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=specs
    )
    return result


def _without_mesh() -> AbstractContextManager[Any]:
    """Return a context in which types of arrays do not say how the arrays are divided.

    JAX may compile within `jax.set_mesh`. If types name its mesh, JAX adds a sharding to the
    computation that adds two numbers in a sum over devices, and XLA (JAX 0.11) refuses it.
    """
    if not hasattr(jax.sharding, "use_abstract_mesh"):
        return nullcontext()
    context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), ())
    )
    return context


def roles(static: StaticCall, name: str, shape: tuple[int, ...]) -> _Roles:
    """Return the role of each axis of an operand or result."""
    divided = _divisible(static)
    if name in _ROW_ARRAYS:
        order = (HEADS, None, None) if static.options.layout == "bhsd" else (None, HEADS, None)
        result: _Roles = (BATCH, *(None,) * (len(shape) - 4), *order)
    elif name in _LSE_ARRAYS:
        result = (BATCH, *(None,) * (len(shape) - 3), HEADS, None)
    else:
        result = _TRAILING.get(name, (None,) * len(shape))
        if name in static.pairs:
            result = (*result, None)
    # Arrays may lack leading axes, to which they broadcast.
    result = result[-len(shape) :] if shape else ()
    result = (None,) * (len(shape) - len(result)) + result
    # An axis of length 1 broadcasts, or has nothing to divide.
    return tuple(
        role if role in divided and length != 1 else None
        for role, length in zip(result, shape, strict=True)
    )


def _divisible(static: StaticCall) -> set[str]:
    """Return the roles of axes that may be divided in this call."""
    # The weights that dropout drops depend on the indices of sequence and head.
    result = set() if DROPOUT_SEED in static.names else {BATCH, HEADS}
    options = static.options
    if options.kind == "varlen" or not {"block_table", "cache_batch_idx"}.isdisjoint(static.names):
        # Packed rows and shared caches are not divided by sequences.
        result.discard(BATCH)
    if "cu_seqlens_k_new" in static.names:
        result.discard(BATCH)
    for _, token in static.functions:
        # A function of the index of the sequence or head would get another index.
        of_batch, of_head = varies(function_of(token).traced)
        result -= {role for role, is_it in ((BATCH, of_batch), (HEADS, of_head)) if is_it}
    return result


def _chosen_axes(
    static: StaticCall, arguments: tuple[Any, ...], results: tuple[Any, ...], mesh: Any
) -> dict[str, tuple[str, ...]]:
    """Return the axes of the mesh that divide each role.

    They are those of the first array that is divided along the role, and divide all arrays that
    have it.
    """
    arrays = [*zip(static.names, arguments, strict=True)]
    arrays += zip(static.results, results, strict=False)
    chosen: dict[str, tuple[str, ...]] = {}
    for name, x in arrays:
        spec = getattr(x.sharding, "spec", ())
        for role, axes in zip(roles(static, name, x.shape), spec, strict=False):
            if role is not None and axes is not None and role not in chosen:
                chosen[role] = (axes,) if isinstance(axes, str) else tuple(axes)
    for role, axes in list(chosen.items()):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        lengths = {
            length
            for name, x in arrays
            for own, length in zip(roles(static, name, x.shape), x.shape, strict=True)
            if own == role
        }
        # A cached call may use some of the caches only, and a query of one sequence may meet a bias
        # of several batch axes.
        is_other = role == BATCH and static.options.kind == "kvcache" and len(lengths) > 1
        is_other |= role == BATCH and arguments[static.names.index("q")].shape[0] % parts != 0
        if is_other or any(length % parts for length in lengths):
            del chosen[role]
    if not set(chosen.get(BATCH, ())).isdisjoint(chosen.get(HEADS, ())):
        del chosen[HEADS]
    return chosen


def _spec(
    static: StaticCall, name: str, shape: tuple[int, ...], chosen: dict[str, tuple[str, ...]]
) -> list[tuple[str, ...] | None]:
    return [chosen.get(role) if role else None for role in roles(static, name, shape)]


def _summed(
    static: StaticCall,
    name: str,
    result: Any,
    shape: tuple[int, ...],
    chosen: dict[str, tuple[str, ...]],
) -> Any:
    """Return a result of a device, summed over the devices that have the same part of an input."""
    if not static.is_backward:
        return result
    own = set(roles(static, name, shape))
    axes = [axis for role, axes in chosen.items() if role not in own for axis in axes]
    return jax.lax.psum(result, tuple(axes)) if axes else result


def _rule(static: StaticCall, arguments: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """Return the rule of the call for Shardy: axes with the same factor are divided alike."""
    names, kinds = (*static.names, *static.results), (*arguments, *results)
    shapes = [tuple(kind.shape) for kind in kinds]
    of_operands = dict(zip(static.names, shapes, strict=False))
    axis = -3 if static.options.layout == "bhsd" else -2
    kv_heads = of_operands.get("k_cache", of_operands.get("k", ()))[axis]
    batch = of_operands["q"][0]
    has_all_caches = static.options.kind != "kvcache" or of_operands["k_cache"][0] == batch
    sizes: dict[str, Any] = {}
    others: list[str] = []

    def factor(role: str | None, length: int) -> str:
        if role is None or (role == BATCH and (batch == 1 or not has_all_caches)):
            others.append(f"x{len(others)}")
            return others[-1]
        if role == BATCH and length != batch:
            # Several batch axes are one axis of this array, of which the first may be divided.
            sizes["m"] = length // batch
            return "(b m)"
        if role == HEADS and kv_heads not in (1, length):
            # Query heads of the same KV head follow one another.
            sizes["g"] = length // kv_heads
            return "(h g)"
        return role

    parts = [
        " ".join(factor(*axis) for axis in zip(roles(static, name, shape), shape, strict=True))
        for name, shape in zip(names, shapes, strict=True)
    ]
    count = len(static.names)
    rule = f"{', '.join(parts[:count])} -> {', '.join(parts[count:])}"
    return rule, {"need_replication_factors": tuple(others), **sizes}
