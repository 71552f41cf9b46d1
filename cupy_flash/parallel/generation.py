"""Decoding with a KV cache that is sharded over ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupy_flash.api.dense import flash_attention
from cupy_flash.api.kvcache import flash_attention_with_kvcache as attention_with_kvcache
from cupy_flash.arrays.kinds import normalize_int32
from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.arrays.strided import (
    address_of,
    array_module,
    as_int32,
    dtype_name,
    is_cupy,
    require_axes,
    require_float,
    require_in_place,
    require_shape,
    spec_of,
)
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import CACHES, Arguments, given_lengths
from cupy_flash.calls.backends import require_backend
from cupy_flash.calls.check.lengths import LengthLimit, require_length
from cupy_flash.calls.check.partials import Partials
from cupy_flash.calls.gpu.sharded_append import AppendedRows, CacheSharding
from cupy_flash.calls.host.forward import require_writable
from cupy_flash.calls.options import Options
from cupy_flash.mods.keywords import checked_softcap
from cupy_flash.parallel.calls import refuse_alone, require_same_dtype
from cupy_flash.parallel.group import Group, run_collective
from cupy_flash.parallel.shards import placed_axis, require_array, require_rank
from cupy_flash.problem.arrays import check_no_self_overlap
from cupy_flash.problem.values import MAX_COUNT, check_bool, count, finite

# Default number of consecutive keys on one rank: a multiple of the KV tiles of all kernels, and
# small enough that all ranks have nearly the same number of keys.
STRIPE = 256


def cache_shard(array: Any, ranks: int, rank: int, *, axis: int = 1, stripe: int = STRIPE) -> Any:
    """Return a rank's rows of a whole KV cache, or of keys to fill a cache with.

    Stripes of `stripe` keys are assigned to the ranks round-robin, so that ranks have nearly the
    same number of keys at any length.

    Parameters
    ----------
    array : array
        NumPy or CuPy array of all keys or values; not a masked array.
    ranks, rank : int
        Number of ranks, and index of the rank whose rows are returned.
    axis : int
        Axis of the keys: 1 for (batch, seqlen, heads, dim).
    stripe : int
        Number of keys per stripe, see `flash_attention_with_kvcache`.

    Returns
    -------
    array
        New array of this rank's rows.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    ValueError
        If the rank or axis does not exist, or stripe is 0 or so large that a stripe on each rank
        exceeds int32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import parallel
    >>> parallel.cache_shard(np.arange(10), 2, 1, axis=0, stripe=2).tolist()
    [2, 3, 6, 7]
    """
    require_array("array", array)
    axis = placed_axis(array, axis)
    own = cache_shard_length(array.shape[axis], ranks, rank, stripe=stripe)
    leading_shape, trailing_shape = array.shape[:axis], array.shape[axis + 1 :]
    leading = (slice(None),) * axis
    seqlen, period = array.shape[axis], stripe * ranks
    periods, first = seqlen // period, seqlen // period * period + rank * stripe
    result = array_module(array).empty((*leading_shape, own, *trailing_shape), array.dtype)
    complete = array[(*leading, slice(periods * period))]
    striped = complete.reshape((*leading_shape, periods, ranks, stripe, *trailing_shape))
    rank_rows = striped[(*leading, slice(None), rank)]
    result[(*leading, slice(periods * stripe))] = rank_rows.reshape(
        (*leading_shape, periods * stripe, *trailing_shape)
    )
    result[(*leading, slice(periods * stripe, None))] = array[
        (*leading, slice(first, first + stripe))
    ]
    return result


def cache_shard_length(seqlens: Any, ranks: int, rank: int, *, stripe: int = STRIPE) -> Any:
    """Return the number of keys that a rank holds of sequences of given lengths.

    Parameters
    ----------
    seqlens : int or array of integers
        Lengths of whole sequences; an array is a NumPy or CuPy array.
    ranks, rank, stripe
        Arguments of `cache_shard`.

    Returns
    -------
    int or array of int32

    Raises
    ------
    TypeError, ValueError
        See `cache_shard`. ValueError also for negative lengths in host memory.
    """
    require_rank(ranks, rank)
    stripe = _require_stripe(stripe, ranks)
    if isinstance(seqlens, np.integer):
        seqlens = int(seqlens)
    if isinstance(seqlens, int):
        return _shard_length(count("seqlens", seqlens), ranks, rank, stripe)
    if not (isinstance(seqlens, np.ndarray) or is_cupy(seqlens)):
        raise TypeError(
            f"seqlens is {seqlens!r}; expected an integer, or a NumPy or CuPy array of integers"
        )
    require_array("seqlens", seqlens)
    seqlens = as_int32("seqlens", seqlens)
    if isinstance(seqlens, np.ndarray) and seqlens.min(initial=0) < 0:
        raise ValueError(f"seqlens holds {seqlens.min()}; expected lengths of at least 0")
    return _shard_length(seqlens, ranks, rank, stripe)


def _shard_length(seqlens: Any, ranks: int, rank: int, stripe: int) -> Any:
    """Return `cache_shard_length` of lengths that have been checked."""
    periods, rest = seqlens // (stripe * ranks), seqlens % (stripe * ranks) - rank * stripe
    own = min(max(rest, 0), stripe) if isinstance(rest, int) else rest.clip(0, stripe)
    return periods * stripe + own


def _require_stripe(stripe: int, ranks: int) -> int:
    """Return the checked stripe, with which positions of keys on all ranks stay within int32."""
    keys = count("stripe", stripe)
    if keys == 0:
        raise ValueError("stripe is 0; expected at least 1 key")
    if keys > (most := MAX_COUNT // ranks):
        raise ValueError(f"stripe is {keys}; expected at most {most} keys on each of {ranks} ranks")
    return keys


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any | None = None,
    v: Any | None = None,
    *,
    group: Group,
    cache_seqlens: Any,
    stripe: int = STRIPE,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Compute `cupy_flash.flash_attention_with_kvcache` with a cache that is sharded over ranks.

    Each rank attends to the keys in its shard. All ranks gather and merge the partial results. New
    keys are appended on the rank that holds their stripe.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, the same on all ranks: a NumPy array for MPI, or a CuPy array for NCCL.
    k_cache, v_cache : arrays, shape (batch, seqlen_cache, heads_kv, dim)
        This rank's rows of the cache. Their number must be at least `cache_shard_length` of the
        longest sequence. New rows are written in place if k is given.
    k, v : arrays, shape (batch, seqlen_new, heads_kv, dim), optional
        New keys and values, the same on all ranks. They, the caches and q have the same dtype.
    group : Group
        Group of all ranks.
    cache_seqlens : int or array of integers, shape (batch,)
        Number of keys of each sequence on all ranks together, before the append. An array has q's
        array type; for NumPy, a list is allowed. Values on a GPU are not checked: new keys past the
        capacity are dropped, and results of a sequence of negative length are undefined.
    stripe : int
        Number of consecutive keys on one rank before the next rank follows. Key p is on rank
        p // stripe % group.size, in row p // (stripe * group.size) * stripe + p % stripe.
    causal : bool
        Whether query i attends only to the keys j <= i + seqlen_k - seqlen_q, where seqlen_k is the
        length after the append. More than one query requires at least as many new keys.
    softmax_scale, softcap, backend
        Arguments of `cupy_flash.flash_attention_with_kvcache`.
    sinks : array, shape (heads_q,), optional
        Sinks, the same on all ranks. The dtype is q's or float32, or float64 if q is float64.
    return_lse : bool
        Whether to return the log-sum-exp, too.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, the same on all ranks.
    lse : array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, only with return_lse.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention_with_kvcache`.
    ParallelError
        If another rank raises, calls with other arguments, or does not answer in time. Contents of
        the arrays, and hence the lengths, are not compared.

    Any other error in the middle of a call, such as a lack of memory, ends the group. The other
    ranks then wait until their timeout.

    Notes
    -----
    On GPUs, with lengths in an array, a call can be captured in a CUDA graph after an equal call
    has run. The graph reads the lengths at each launch. It needs its own memory pool, see
    `cupy_flash.flash_attention_with_kvcache`. A failure within a graph is not detected.
    """
    planned = functools.partial(
        _planned,
        *(q, k_cache, v_cache, k, v, group, cache_seqlens, stripe, causal, softmax_scale, softcap),
        *(sinks, return_lse, backend),
    )
    with run_collective(group, planned) as (lengths, new, stripe):
        if new:
            _append((k_cache, v_cache), (k, v), lengths, group, stripe)
        # Several causal queries attend to different new keys. Attention over the new keys is then a
        # separate partial result.
        is_apart = causal and q.shape[1] > 1
        attended = lengths if is_apart else lengths + new
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "backend": backend}
        if softcap is not None:
            options["softcap"] = softcap
        out, lse = attention_with_kvcache(
            *(q, k_cache, v_cache),
            cache_seqlens=_shard_length(attended, group.size, group.rank, stripe),
            return_lse=True,
            **options,
        )
        parts, lses = group.gather(out, lse, room=int(is_apart))
        if is_apart:
            parts[-1], lses[-1] = flash_attention(q, k, v, causal=True, return_lse=True, **options)
        merged, merged_lse = dispatch.combine(Partials(parts, lses, None, sinks))
        return (merged, merged_lse) if return_lse else merged


def _planned(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any | None,
    v: Any | None,
    group: Group,
    cache_seqlens: Any,
    stripe: int,
    causal: bool,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Any | None,
    return_lse: bool,
    backend: str,
) -> tuple[tuple[Any, ...], tuple[Any, int, int]]:
    """Check the arguments before anything is written.

    Returns the values that all ranks must agree on, and (lengths, number of new keys, stripe).
    """
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    require_backend(backend)
    stripe = _require_stripe(stripe, group.size)
    if (k is None) != (v is None):
        raise TypeError("only one of k and v is given; expected both or neither")
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if k is not None:
        arrays |= {"k": k, "v": v}
    for name, array in arrays.items():
        group.require_carried(name, array)
        require_axes(name, array, 4, "batch, tokens, heads and head_dim")
    require_same_dtype(arrays)
    for name in CACHES:
        require_in_place(name, arrays[name], ": a cache is not copied")
        if k is not None:
            if isinstance(arrays[name], np.ndarray):
                require_writable(name, arrays[name])
            check_no_self_overlap(name, spec_of(arrays[name], address_of(arrays[name])))
    batch, seqlen_q, heads_q, head_dim = q.shape
    capacity, heads_kv, head_dim_v = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    require_shape("k_cache", k_cache, (batch, capacity, heads_kv, head_dim), "as q has")
    require_shape("v_cache", v_cache, (batch, capacity, heads_kv, head_dim_v), "as k_cache has")
    new = 0
    if k is not None and v is not None:
        new = k.shape[1]
        require_shape("k", k, (batch, new, heads_kv, head_dim), "rows of k_cache")
        require_shape("v", v, (batch, new, heads_kv, head_dim_v), "rows of v_cache")
    if sinks is not None:
        group.require_carried("sinks", sinks)
        wide = "float64" if dtype_name(q) == "float64" else "float32"
        require_float("sinks", sinks, dict.fromkeys((wide, dtype_name(q))))
        require_shape("sinks", sinks, (heads_q,), "one for each query head")
    if causal and seqlen_q > max(1, new):
        raise ValueError(
            f"q has {seqlen_q} causal queries and {new} new keys; expected at most {max(1, new)}"
        )
    lengths = _lengths(cache_seqlens, q, group)
    if new:
        read = {"cache_seqlens": None if isinstance(lengths, int) else lengths, "sinks": sinks}
        require_no_overlap((*arrays, *read), (*arrays.values(), *read.values()), CACHES)
    limit = _length_limit(capacity, new, group.size, group.rank, stripe)
    if isinstance(lengths, int):
        require_length("cache_seqlens", lengths, (limit,))
    elif isinstance(lengths, np.ndarray):
        for b, length in enumerate(lengths.tolist()):
            require_length(f"cache_seqlens[{b}]", length, (limit,))
    scale = None if softmax_scale is None else finite("softmax_scale", softmax_scale)
    cap = None if softcap is None else checked_softcap(softcap)
    alike = (
        *("flash_attention_with_kvcache", q.dtype.name, q.shape, heads_kv, head_dim_v, new),
        *(stripe, bool(causal), scale, cap, bool(return_lse), backend),
        None if sinks is None else dtype_name(sinks),
    )
    if not group.knows(alike):
        refuse_alone(
            Arguments(q, k_cache=k_cache, v_cache=v_cache),
            Options("kvcache", softmax_scale=scale, return_lse=True),
            backend,
            {"softcap": cap, "sinks": sinks},
        )
    return alike, (lengths, new, stripe)


def _lengths(cache_seqlens: Any, q: Any, group: Group) -> Any:
    """Return the one length of all sequences, or an array of lengths in the memory of q."""
    length, lengths = given_lengths(cache_seqlens)
    if lengths is None:
        return length
    on_host = isinstance(q, np.ndarray)
    lengths = normalize_int32("cache_seqlens", lengths, on_host=on_host)
    group.require_carried("cache_seqlens", lengths)
    lengths = as_int32("cache_seqlens", lengths)
    require_shape("cache_seqlens", lengths, (len(q),), "one length for each sequence")
    return lengths


def _length_limit(capacity: int, new: int, ranks: int, rank: int, stripe: int) -> LengthLimit:
    """Return the limit of lengths: the first key of this rank that its rows have no space for."""
    periods, rest = divmod(capacity, stripe)
    keys = (periods * ranks + rank) * stripe + rest
    reason = (
        f"k_cache has {capacity} rows on rank {rank} of {ranks}, with stripes of {stripe} enough "
        f"for {keys} keys on all ranks" + (f", and {new} are appended" if new else "")
    )
    # A length plus the number of new keys must not exceed int32.
    return LengthLimit(min(keys, MAX_COUNT - new) - new, reason)


def _append(
    caches: tuple[Any, Any], new: tuple[Any, Any], lengths: Any, group: Group, stripe: int
) -> None:
    """Write the new keys and values that belong to this rank to its rows of the caches."""
    batch, count_new = new[0].shape[:2]
    if is_cupy(caches[0]):
        limit = _length_limit(caches[0].shape[1], count_new, group.size, group.rank, stripe)
        stripes = CacheSharding(group.size, group.rank, stripe, limit.most + count_new)
        keys, each = (lengths, None) if isinstance(lengths, int) else (0, lengths)
        dispatch.append(AppendedRows(*caches, *new, each), stripes, keys)
        return
    lengths = np.broadcast_to(np.asarray(lengths, np.int32), batch)
    positions = lengths[:, None] + np.arange(count_new, dtype=np.int32)
    periods, owners = np.divmod(positions // stripe, group.size)
    sequences, rows = np.nonzero(owners == group.rank)
    places = (periods * stripe + positions % stripe)[sequences, rows]
    for cache, given in zip(caches, new, strict=True):
        cache[sequences, places] = given[sequences, rows]
