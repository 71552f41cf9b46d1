"""Attention over paged caches of sequences with a common prefix, whose keys are read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, as_cupy, as_int32, is_cupy
from cupy_flash.arrays.torch_arrays import count_writes, is_torch_on_gpu
from cupy_flash.calls import dispatch, rotary
from cupy_flash.calls.arguments import Arguments, normalized
from cupy_flash.calls.check.lengths import new_rows
from cupy_flash.calls.check.partials import Partials
from cupy_flash.calls.check.whole_call import WholeCall, check_whole, on_stream_of_tensors
from cupy_flash.calls.gpu.allocate import is_tensor, result_allocator
from cupy_flash.calls.host.forward import runs_on_gpu
from cupy_flash.calls.options import Options
from cupy_flash.mods.keywords import Window, given
from cupy_flash.opaque import is_dynamo_tracing, outside
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.values import count

# The prefix is computed once if this saves reading at least this number of bytes. A GPU reads them
# in about 10 us, the time of the additional launches.
LEAST_SAVED_BYTES = 32 << 20
# Arrays of modifications that do not depend on the position of a key. The tree mask concerns only
# the last keys of a sequence, which are no part of a prefix.
_SHARABLE = {"sinks", "tree_mask"}


def attention(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int,
    modifications: Mapping[str, Any],
    stream: Any | None,
    shared_prefix_len: int,
) -> Any:
    """Return the result of `flash_attention_with_kvcache` with a shared prefix.

    The first `shared_prefix_len` keys of all sequences are in the pages of the first sequence. The
    queries of all sequences attend to these keys in one call, as if they were the queries of one
    sequence. In another call, the queries of each sequence attend to its other keys. The results of
    both calls are merged:

        first call     all queries              prefix
        second call    queries of sequence 0    other keys of sequence 0
                       queries of sequence 1    other keys of sequence 1

    A call that gains nothing, or that the merge does not support, is computed as without a prefix.
    `dispatch.attention` describes the other arguments.
    """
    call = (arguments, options, backend, keys, modifications)
    if is_dynamo_tracing():
        return outside(attention, (*call, stream, shared_prefix_len))
    shared = count("shared_prefix_len", shared_prefix_len)
    with on_stream(stream, arguments.like), on_stream_of_tensors(arguments.q):
        if shared == 0:
            return dispatch.attention(*call)
        whole = _checked(arguments, options, keys, modifications, shared)
        shared -= shared % whole.problem.layout.page_size
        if not _is_worthwhile(whole.problem, shared) or not _is_sharable(
            whole, backend, keys, shared
        ):
            return dispatch.attention(*call)
        out, lse = _shared(
            arguments, options, backend, keys, given(modifications), whole.problem, shared
        )
        return (out, lse) if options.return_lse else out


def _checked(
    arguments: Arguments,
    options: Options,
    keys: int,
    modifications: Mapping[str, Any],
    shared: int,
) -> WholeCall:
    """Return the whole call, whose arguments are checked before anything is written.

    Raises
    ------
    TypeError, ValueError
        See `flash_attention_with_kvcache`.
    """
    if arguments.block_table is None:
        raise ValueError(
            "shared_prefix_len is given, but block_table is missing; pass the pages of each "
            "sequence, which begin with those of the prefix"
        )
    whole = check_whole(arguments, options, keys, modifications)
    problem, lengths = whole.problem, whole.lengths
    if shared > problem.seqlen_k:
        raise ValueError(
            f"shared_prefix_len is {shared}; expected at most {problem.seqlen_k}, the rows of a "
            "cache"
        )
    if whole.is_on_host or arguments.cache_seqlens is None:
        shortest = keys if lengths is None else int(lengths.min(initial=shared))
        if shortest < shared:
            raise ValueError(
                f"shared_prefix_len is {shared}, but a cached sequence has {shortest} keys; "
                "expected that all sequences begin with the prefix"
            )
    if whole.is_on_host:
        _check_tables(whole.arguments.block_table, shared, problem)
    return whole


def _check_tables(block_table: np.ndarray, shared: int, problem: Problem) -> None:
    """Raise ValueError unless the whole pages of the prefix are the same in all table rows."""
    pages = block_table[:, : shared // problem.layout.page_size]
    for b, page in np.argwhere(pages != pages[:1])[:1].tolist():
        raise ValueError(
            f"block_table[{b}, {page}] is {pages[b, page]}, but block_table[0, {page}] is "
            f"{pages[0, page]}; expected the same pages for a prefix of {shared} keys"
        )


def _is_worthwhile(problem: Problem, shared: int) -> bool:
    """Return whether one call for the prefix saves more than the additional launches take."""
    columns = problem.head_dim + (0 if problem.values_in_keys else problem.head_dim_v)
    row = problem.heads_kv * columns * (problem.itemsize if problem.scales is None else 1)
    return shared > 0 and (problem.batch - 1) * shared * row >= LEAST_SAVED_BYTES


def _is_sharable(whole: WholeCall, backend: str, keys: int, shared: int) -> bool:
    """Return whether results over the prefix and over the other keys can be merged."""
    arguments, options, problem = whole.arguments, whole.options, whole.problem
    if options.batch_invariant or options.statistics or arguments.cache_batch_idx is not None:
        return False
    # A GPU would be sent the whole cache in each of the two calls.
    if whole.is_on_host and runs_on_gpu(problem, options, backend):
        return False
    # Rotated queries would be in CuPy's memory, which a graph of PyTorch does not keep.
    if whole.is_of_tensors and arguments.rotary_cos is not None:
        return False
    key = whole.options.mod_key
    if key is not None:
        functions = key.score_mod, key.mask_mod
        if key.window != Window() or set(key.names) - _SHARABLE or functions != (None, None):
            return False
    # Every query must see the whole prefix. On a GPU, the lengths are not known here.
    lengths = whole.lengths
    if lengths is None and arguments.cache_seqlens is None:
        lengths = np.array([keys])
    if lengths is None or not problem.batch:
        return True
    has_tree = key is not None and "tree_mask" in key.names
    hidden = problem.seqlen_q if has_tree else (problem.seqlen_q - 1) * problem.causal
    new = new_rows(arguments, problem) if whole.is_on_host else problem.layout.new_keys
    return bool((lengths + new >= shared + hidden).all())


def _shared(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int,
    modifications: dict[str, Any],
    problem: Problem,
    shared: int,
) -> tuple[Any, Any]:
    """Return out and lse: attend to the first `shared` keys and to the others, and merge."""
    if backend == "auto":
        arguments = dispatch.copy_scales_to_gpu(arguments)
    original = arguments
    convert: Callable[[Any], Any] | None = None
    if not _are_read_directly(arguments.key_arrays(options)):
        arguments, convert = normalized(arguments, tuple(arguments.written(options)))
        arguments = type(arguments)(*map(as_cupy, arguments))
    parts, lses, out = _new_results(arguments.q, problem)
    if arguments.out is not None:
        out = arguments.out
    # The sinks count once, in the merge.
    sinks = modifications.pop("sinks", None)
    softcap = {name: x for name, x in modifications.items() if name == "softcap"}
    options = options._replace(return_lse=True)
    of_prefix, of_others = _calls(arguments, options, problem, keys, shared)
    plain = options._replace(causal=False, compute_scales=False)
    rows = of_prefix._replace(out=parts[0].reshape(of_prefix.q.shape[:3] + parts.shape[4:]))
    _, lse = dispatch.attention(rows, plain, backend, shared, softcap)
    batch, heads, queries = lses.shape[1:]
    lses[0] = lse.reshape(heads, batch, queries).swapaxes(0, 1)
    remaining = keys - shared if arguments.cache_seqlens is None else 0
    rows = of_others._replace(out=parts[1])
    _, lses[1] = dispatch.attention(rows, options, backend, remaining, modifications)
    out, lse = dispatch.combine(Partials(parts, lses, out, sinks))
    if convert is None:
        return out, lse
    count_writes(*original.written(options).values())
    return (convert(out) if original.out is None else original.out), convert(lse)


def _calls(
    arguments: Arguments, options: Options, problem: Problem, keys: int, shared: int
) -> tuple[Arguments, Arguments]:
    """Return the arrays of the call for the prefix, and of that for the other keys, without out."""
    q, table, lengths = arguments.q, arguments.block_table, arguments.cache_seqlens
    pages = shared // problem.layout.page_size
    starts = arguments.rotary_seqlens
    if arguments.rotary_cos is not None:
        xp = array_module(q)
        if starts is None:
            starts = xp.full(len(q), keys, np.int32) if lengths is None else lengths
        # As the append rotates the queries: they have consecutive positions, or all the first one.
        places = _int32(starts)[:, None] + xp.arange(q.shape[1]) * problem.is_local
        turned = (q, arguments.rotary_cos, arguments.rotary_sin, places, options.rotary_interleaved)
        q = rotary.rotate(*turned, None)
    of_prefix = Arguments(
        q=q.reshape(1, -1, *q.shape[2:]),
        block_table=table[:1, :pages],
        k_scale=arguments.k_scale,
        v_scale=arguments.v_scale,
        k_cache=arguments.k_cache,
        v_cache=arguments.v_cache,
    )
    of_others = arguments._replace(
        block_table=table[:, pages:],
        cache_seqlens=None if lengths is None else _int32(lengths) - shared,
        rotary_seqlens=starts,
    )
    return of_prefix, of_others


def _are_read_directly(arrays: tuple[Any, ...]) -> bool:
    """Return whether all arrays are CuPy arrays, or all are tensors on a GPU."""
    return is_torch_on_gpu(*arrays) or all(x is None or is_cupy(x) for x in arrays)


def _int32(lengths: Any) -> Any:
    """Return lengths in int32, in which a difference may be negative; kernels clamp it to 0."""
    return lengths.int() if is_tensor(lengths) else as_int32("cache_seqlens", lengths)


def _new_results(q: Any, problem: Problem) -> tuple[Any, Any, Any]:
    """Return new arrays for out and lse of both parts, and for the merged out."""
    shape = (*q.shape[:-1], problem.head_dim_v)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    dtype, lse_dtype = np.dtype(problem.out_dtype), np.dtype(problem.lse_dtype)
    specs = ((2, *shape), dtype), ((2, *lse_shape), lse_dtype), (shape, dtype)
    if isinstance(q, np.ndarray):
        parts, lses, out = (np.empty(*spec) for spec in specs)
    else:
        (parts, lses, out), _ = result_allocator(specs, uses_torch=is_tensor(q))()
    return parts, lses, out
