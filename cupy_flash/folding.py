"""Calls on many batches as one call: the sequences of all batches follow one another.

The rules of `torch.func.vmap` and `jax.vmap` share these functions. `xp` is the module of the
arrays, `torch` or `jax.numpy`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cupy_flash.mods.ir.compose import varies
from cupy_flash.mods.keywords import DROPOUT_SEED
from cupy_flash.mods.trace.traced import Traced
from cupy_flash.problem.gradient import OF_MOD, ROWS, TANGENTS, tangent_of

# Arrays that broadcast to all sequences and may have tangents, with the number of their axes.
_WITH_TANGENTS = {"bias": 4, "alibi_slopes": 2}
# All arrays that broadcast to all sequences.
BROADCAST = {
    **_WITH_TANGENTS,
    **{tangent_of(name): axes for name, axes in _WITH_TANGENTS.items()},
    **{"mask": 4, "q_scale": 3, "k_scale": 3, "v_scale": 3},
}
# Those that calls of many sequences take with a batch axis of length 1.
_OF_ONE_SEQUENCE = ("bias", "mask")
# Arrays of dense calls with the batch axes of q: the axis of the batches is one more.
_WITH_BATCH_AXES = (
    *(*ROWS, "out", "dout", "lse", "dlse"),
    *(*TANGENTS, "dout_tangent", "dlse_tangent"),
)
# Arrays whose leading axis is that of the sequences.
_OF_SEQUENCES = (
    *("q", "k", "v", "prefix_lens", "seqlens_k", "q_offset", "tree_mask", "cache_leftpad"),
    *("cache_seqlens", "rotary_seqlens", "cache_batch_idx", "block_table", "k_cache", "v_cache"),
)
# Arrays of which kernels read one for all sequences.
_OF_ALL_SEQUENCES = {"sinks", "sinks_tangent", "rotary_cos", "rotary_sin"}


def can_fold(
    kind: str,
    names: Collection[str],
    mapped: Iterable[str],
    results: Collection[str],
    functions: Iterable[Traced],
) -> bool:
    """Return whether one call can compute the calls on all batches.

    Parameters
    ----------
    kind
        Kind of the call: "dense", "varlen" or "kvcache".
    names
        Names of the arrays of the call.
    mapped
        Names of the arrays that differ from batch to batch.
    results
        Names of the results; those of gradients are the names of their inputs.
    functions
        User's functions, traced.
    """
    if kind == "varlen" or _OF_ALL_SEQUENCES & set(mapped) or "key_indices" in names:
        return False
    # The weights that dropout drops depend on the index of the sequence, which would be another.
    if DROPOUT_SEED in names:
        return False
    # The gradients of sinks and captures are summed over all sequences. Packed new rows stay
    # packed.
    if "sinks" in results or "cu_seqlens_k_new" in names:
        return False
    if any(name.startswith(OF_MOD) for name in (*mapped, *results)):
        return False
    # A function of the index of the sequence would get another index.
    return not any(varies(function)[0] for function in functions)


def fold(xp: Any, name: str, x: Any, size: int, batch: int, *, is_mapped: bool) -> Any:
    """Return an array of a call on `size` batches of `batch` sequences.

    If it `is_mapped`, its first axis is that of the batches; otherwise all batches have the same.
    """
    axes = BROADCAST.get(name)
    if axes is not None:
        has_one = name in _OF_ONE_SEQUENCE and x.ndim == axes and x.shape[0] == 1
        if not is_mapped and (x.ndim < axes or has_one):
            return x
        own = x.shape[1:] if is_mapped else x.shape
        own = (1,) * (axes - len(own)) + tuple(own)
        x = x.reshape((size if is_mapped else 1, *own))
        x = xp.broadcast_to(x, (size, batch, *own[1:]))
    elif name in _OF_SEQUENCES:
        x = x if is_mapped else xp.broadcast_to(x, (size, *x.shape))
    else:
        # Sinks, rotary tables and captures are the same for all sequences.
        return x
    return x.reshape((size * batch, *x.shape[2:]))


def fold_dense(
    xp: Any, arrays: Mapping[str, Any], mapped: Collection[str], size: int, wrt: Collection[str]
) -> tuple[dict[str, Any], int]:
    """Return the arrays of a dense call on all batches, and the number of sequences of a batch.

    Parameters
    ----------
    xp, size
        See `fold`.
    arrays
        Arrays of the call by name. The first axis of those in `mapped` is that of the batches.
    wrt
        Names of the inputs whose gradients the call computes.
    """
    # A gradient has the shape of its input, so each batch needs its own input. So does a tangent.
    own = {*_WITH_BATCH_AXES, *wrt}
    for name in _WITH_TANGENTS:
        if tangent_of(name) in arrays:
            own |= {name, tangent_of(name)}
    given = {
        name: xp.broadcast_to(x, (size, *x.shape)) if name in own and name not in mapped else x
        for name, x in arrays.items()
    }
    batch = math.prod(given["q"].shape[1:-3])
    folded = {
        name: x
        if name in _WITH_BATCH_AXES
        else fold(xp, name, x, size, batch, is_mapped=name in mapped or name in own)
        for name, x in given.items()
    }
    return folded, batch


def unfold_gradient(name: str, gradient: Any, shape: tuple[int, ...], size: int, batch: int) -> Any:
    """Return the gradients of an input for each batch, given that of the folded input.

    `shape` is the shape of the input of one batch.
    """
    if name not in BROADCAST:
        return gradient
    each = gradient.reshape((size, batch, *gradient.shape[1:]))
    if len(shape) < BROADCAST[name] or shape[0] == 1:
        each = each.sum(1)
    return each.reshape((size, *shape))
