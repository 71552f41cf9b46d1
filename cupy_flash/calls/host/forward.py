"""Attention for arrays in host memory, on the CPU backend or on copies in GPU memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.arrays.quantized import dequantized
from cupy_flash.arrays.strided import dtype_name, to_bshd
from cupy_flash.calls.arguments import (
    FLOAT8_SCALES,
    Arguments,
    written_arrays,
)
from cupy_flash.calls.backends import cpu_tile, host_runs_on_gpu
from cupy_flash.calls.check.lengths import check_contents, new_rows
from cupy_flash.calls.check.modifications import (
    NO_USER_MODS,
    UserMods,
    bind_modifications,
    canonical,
)
from cupy_flash.calls.check.problems import check_call, lse_shape, sizes_of
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.forward import ATTENTION
from cupy_flash.calls.gpu.prepared_calls import Operation
from cupy_flash.calls.options import Options
from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import varlen
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.cpu.untiled import small_call_of
from cupy_flash.gpu.environment import cupy_module, current_device
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, is_served, make_plan
from cupy_flash.problem.arrays import FLOAT8
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


def compute(
    arguments: Arguments,
    options: Options,
    keys: int,
    backend: str,
    user_mods: UserMods = NO_USER_MODS,
) -> tuple[np.ndarray | None, ...]:
    """Compute attention for NumPy arrays, after the append if any; see `prepared_calls.run`."""
    # Dense calls without modifications have no arrays that may need a conversion.
    has_no_lengths = options.kind == "dense" and options.mod_key is None
    if not has_no_lengths:
        arguments = converted(arguments, options)
    call, mod_arrays = find_call(_calls, _check, arguments, options, backend)
    problem = call.problem
    lengths = check_contents(arguments, options, problem, keys)
    out = arguments.out
    if out is not None or (not has_no_lengths and problem.layout.appends):
        written = written_arrays(problem)
        for name in written:
            if (array := getattr(arguments, name)) is not None:
                require_writable(name, array)
        require_no_overlap(arguments._fields, arguments, written)
    if out is None:
        shape = (*arguments.q.shape[:-1], problem.head_dim_v)
        out = np.empty(shape, problem.out_dtype)
    if lengths is not None:
        arguments = _appended(arguments, lengths, options, call)
    if call.goes_to_gpu:
        # The append above has computed the scales of new rows already.
        options = options._replace(compute_scales=False)
        if problem.is_float8:
            options = options._replace(out_dtype=dtype_name(out))
        out[...], *others = run_on_gpu(ATTENTION, arguments, options, user_mods, ("out",))
        return (out, *others)
    shape, dtype = lse_shape(arguments.q, problem), problem.lse_dtype
    requested = options.return_lse, options.return_max_logits, options.return_entropy
    rows = RowResults(*(np.empty(shape, dtype) if is_given else None for is_given in requested))
    _on_cpu(arguments, out, rows, options, user_mods, call, mod_arrays)
    return (out, rows.lse, *(getattr(rows, name) for name in problem.statistics))


def repeated(
    arguments: Arguments, options: Options, backend: str
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Compute a small call without modifications if a call with the same call key was made before.

    The earlier call has passed all checks, which take 10 us; computing such a call takes 10 to 100.
    Returns None if `compute` has to compute the call.
    """
    q, k, v = arguments.q, arguments.k, arguments.v
    if not (q.__class__ is k.__class__ is v.__class__ is np.ndarray) or arguments.out is not None:
        return None
    call = _calls.get(call_key(arguments, options, backend))
    if call is None or call.small is None:
        return None
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty(call.problem.lse_shape, q.dtype) if options.return_lse else None
    done = cpu_forward.forward_at_once(q, k, v, out, lse, call.small, call.scale, bound_mods=None)
    return (out, lse) if done else None


class CallInfo(NamedTuple):
    """Results of the checks, common to all calls with the same shapes, strides, dtypes and options.

    Attributes
    ----------
    tile
        Tile of the CPU backend; None if a GPU computes the call or each group of sequences has its
        own tile.
    small
        Parameters for computing the call in one step on the CPU; None if not applicable.
    scale
        Factor on the scores of such a call, in the dtype of q.
    """

    problem: Problem
    goes_to_gpu: bool
    tile: Tile | None
    small: Any = None
    scale: Any = None


# Result of `canonical`; None if the arrays of a call's modifications have not been checked yet.
ModArrays = Mapping[str, Any] | None
# Maximum number of entries in `_calls`, whose role is that of `_calls` in `prepared_calls`.
_MAX_CALLS = 1024
_calls: dict[Any, CallInfo] = {}


def find_call(
    known: dict[Any, CallInfo],
    check: Callable[[Any, Options, str], tuple[CallInfo, ModArrays]],
    arguments: Any,
    options: Options,
    backend: str,
) -> tuple[CallInfo, ModArrays]:
    """Return the `CallInfo` of a call, and the arrays of its modifications if they were checked.

    A call that is not known is checked, which takes 70 to 250 us: longer than a small call itself.
    """
    key = call_key(arguments, options, backend)
    info, mod_arrays = known.get(key), None
    if info is None:
        info, mod_arrays = check(arguments, options, backend)
        if len(known) >= _MAX_CALLS:
            known.clear()
        known[key] = info
    return info, mod_arrays


def _check(arguments: Arguments, options: Options, backend: str) -> tuple[CallInfo, ModArrays]:
    arguments.require_given(options)
    problem, mod_arrays = check_call(arguments, options)
    if runs_on_gpu(problem, options, backend):
        return CallInfo(problem, True, None), mod_arrays
    info = CallInfo(problem, False, requested_tile(problem, options))
    if info.tile is not None and is_plain(arguments, options) and not problem.statistics:
        q, k, v = arguments.q, arguments.k, arguments.v
        small = small_call_of(q, k, v, problem.causal, problem.q_offset, info.tile)
        info = info._replace(small=small, scale=scale_in(q.dtype, problem))
    return info, mod_arrays


@ignore_fp_errors
def scale_in(dtype: np.dtype[Any], problem: Problem) -> Any:
    """Return the factor on the scores in the dtype of q, which may round it or overflow."""
    return dtype.type(problem.softmax_scale)


def call_key(arguments: Any, options: Options, backend: str) -> tuple[Any, ...]:
    """Return the key of the `CallInfo` of a call."""
    given = arguments.key_arrays(options)
    array_keys = tuple([None if x is None else (x.shape, x.strides, x.dtype) for x in given])
    return array_keys, options, backend, gpu_of(backend), tuning.generation()


def is_plain(arguments: Any, options: Options) -> bool:
    """Return whether the CPU backend can use q, k and v as they are, without modifications."""
    is_dense = options.kind == "dense" and options.mod_key is None
    return is_dense and options.layout == "bshd" and arguments.q.ndim == 4 and arguments.q.size > 0


def gpu_of(backend: str) -> int | None:
    """Return the index of the current GPU if host arrays may be computed there, otherwise None."""
    if not host_runs_on_gpu(backend):
        return None
    return int(cupy_module().cuda.runtime.getDevice())


def runs_on_gpu(problem: Problem, options: Options, backend: str) -> bool:
    """Return whether a GPU computes host arrays; "auto" chooses a GPU that supports the problem."""
    device_id = gpu_of(backend)
    if device_id is None:
        return False
    if backend == "gpu" or options.family is not None:
        return True
    return is_served(problem, current_device())


def cpu_options(
    arguments: Any,
    options: Options,
    user_mods: UserMods,
    problem: Problem,
    mod_arrays: ModArrays,
) -> dict[str, Any]:
    """Return the keyword arguments that all functions of the CPU backend have in common.

    The contents of the arrays must have passed `check_contents`.
    """
    bound_mods = None
    if options.mod_key is not None:
        if mod_arrays is None:
            sizes = sizes_of(problem, options)
            mod_arrays = canonical(options.mod_key, arguments.modification_arrays, sizes)
        if "seqused_q" in mod_arrays and "q_offset" not in mod_arrays:
            keys = arguments.seqused_k
            if keys is None:
                keys = np.diff(arguments.cu_seqlens_k)
            mod_arrays = {**mod_arrays, "q_offset": keys - mod_arrays["seqused_q"]}
        bound_mods = bind_modifications(options.mod_key, user_mods, mod_arrays)
    return {
        "causal": problem.causal,
        "softmax_scale": problem.softmax_scale,
        "bound_mods": bound_mods,
    }


def packed_lengths(arguments: Any, problem: Problem) -> dict[str, Any]:
    """Return the keyword arguments of the CPU backend that give the lengths of a varlen call."""
    return {
        "cu_seqlens_q": arguments.cu_seqlens_q,
        "cu_seqlens_k": arguments.cu_seqlens_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
        "seqused_k": arguments.seqused_k,
    }


def requested_tile(problem: Problem, options: Options) -> Tile | None:
    """Return the tile of the CPU backend, or None if each group of sequences has its own tile.

    Raises
    ------
    ValueError, UnsupportedError
        If the tile or family is not one of the CPU backend.
    """
    if not problem.layout.is_dense and options.tile is None and options.family in (None, "cpu"):
        return None
    tile = cpu_tile(problem, options.family, options.tile)
    return None if not problem.layout.is_dense and options.tile is None else tile


def plan_of(problem: Problem, options: Options, why_no_gpu: str | None) -> Plan:
    """Return the plan of the CPU backend, with the reason why no GPU is used; see `cpu_tile`."""
    return make_cpu_plan(problem, cpu_tile(problem, options.family, options.tile), why_no_gpu)


def require_writable(name: str, array: np.ndarray) -> None:
    """Raise ValueError for a read-only array."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; pass an array that can be written")


def upload_order(options: Options) -> Literal["K", "C"]:
    """Return the memory order of uploaded arrays: "K" keeps the order of the axes, "C" does not."""
    return "K" if options.is_dense else "C"


def run_on_gpu(
    operation: Operation,
    arguments: Any,
    options: Options,
    user_mods: UserMods,
    written: tuple[str, ...],
) -> list[Any]:
    """Return the results of an operation on a GPU for copies of the arrays except `written`."""
    order = upload_order(options)
    arguments = arguments._replace(**dict.fromkeys(written))
    uploaded = type(arguments)(*(None if x is None else _uploaded(x, order) for x in arguments))
    results = prepared_calls.run(operation, uploaded, options, user_mods=user_mods)
    return [None if x is None else cupy_module().asnumpy(x) for x in results]


def _uploaded(array: np.ndarray, order: Literal["K", "C"]) -> Any:
    cupy = cupy_module()
    if dtype_name(array) == FLOAT8:
        # CuPy allocates no float8 arrays, but a uint8 array can be viewed as float8.
        return cupy.asarray(array.view(np.uint8), order=order).view(array.dtype)
    return cupy.asarray(array, order=order)


def _on_cpu(
    arguments: Arguments,
    out: np.ndarray,
    rows: RowResults,
    options: Options,
    user_mods: UserMods,
    call: CallInfo,
    mod_arrays: ModArrays,
) -> None:
    problem, tile = call.problem, call.tile
    common = cpu_options(arguments, options, user_mods, problem, mod_arrays)
    if options.is_dense:
        if tile is None:
            # The CPU backend computes padded sequences as a dense batch, with one tile.
            tile = cpu_tile(problem, options.family, options.tile)
        q, k, v, target = arguments.q, arguments.k, arguments.v, out
        if q.ndim != 4 or options.layout != "bshd":
            q, k, v, target = (to_bshd(array, options.layout) for array in (q, k, v, target))
        if problem.is_float8:
            scales = (getattr(arguments, name) for name in FLOAT8_SCALES)
            q, k, v = map(dequantized, (q, k, v), scales)
        cpu_forward.forward(
            *(q, k, v, target),
            rows.each(lambda array: array.reshape(problem.lse_shape)),
            q_offset=problem.q_offset,
            tile=tile,
            **common,
        )
        return
    common |= {
        "block_table": arguments.block_table,
        "tile": tile,
        "batch_invariant": problem.is_batch_invariant,
        "scales": _scales(arguments, problem),
    }
    arrays = arguments.q, arguments.keys, arguments.values_of(options), out, rows
    if options.kind == "varlen":
        common |= packed_lengths(arguments, problem)
        varlen.varlen_forward(*arrays, **common)
    else:
        varlen.kvcache_forward(
            *arrays,
            lengths=arguments.cache_seqlens,
            cache_batch_idx=arguments.cache_batch_idx,
            **common,
        )


def _scales(arguments: Arguments, problem: Problem) -> varlen.CacheScales | None:
    """Return the scales of 8-bit keys and values, 1 where none are given; None for other dtypes."""
    if problem.scales is None:
        return None
    one = np.float32(1)
    of_values = arguments.k_scale if problem.values_in_keys else arguments.v_scale
    k, v = (one if x is None else x for x in (arguments.k_scale, of_values))
    return varlen.CacheScales(k, v, problem.scales.computed)


def _appended(
    arguments: Arguments, lengths: np.ndarray, options: Options, call: CallInfo
) -> Arguments:
    """Append new rows to the cache; return the arguments of attention, with the new lengths."""
    problem = call.problem
    new, starts = new_rows(arguments, problem), arguments.cu_seqlens_k_new
    lengths_after = lengths + new
    # Errors must be raised before the cache is written.
    if call.goes_to_gpu:
        _require_a_plan(problem, options)
    elif call.tile is not None:
        _require_scratch(problem, call.tile, int(lengths_after.max(initial=0)))
    q, k, v = arguments.q, arguments.k, arguments.v
    if arguments.rotary_cos is not None:
        first = lengths if arguments.rotary_seqlens is None else arguments.rotary_seqlens
        rotate = functools.partial(
            varlen.rotate,
            cos=arguments.rotary_cos,
            sin=arguments.rotary_sin,
            interleaved=bool(options.rotary_interleaved),
        )
        q = rotate(q, first_positions=first, advance=problem.is_local)
        if starts is None:
            k = rotate(k, first_positions=first, advance=True)
        else:
            # Rows that belong to no sequence are not appended, so their positions do not matter.
            places = np.zeros(len(k), np.int64)
            owned = slice(int(starts[0]), int(starts[-1]))
            places[owned] = np.repeat(first - starts[:-1], new) + np.arange(len(k))[owned]
            k = rotate(k[:, None], first_positions=places, advance=False)[:, 0]
    if k is not None:
        if starts is not None:
            k, v = (None if x is None else np.split(x, starts)[1:-1] for x in (k, v))
        varlen.append(
            arguments.k_cache,
            arguments.v_cache,
            k,
            v,
            lengths=lengths,
            cache_batch_idx=arguments.cache_batch_idx,
            block_table=arguments.block_table,
            scales=_scales(arguments, problem),
        )
    return arguments._replace(
        q=q,
        k=None,
        v=None,
        out=None,
        cache_seqlens=lengths_after.astype(np.int32),
        rotary_cos=None,
        rotary_sin=None,
        rotary_seqlens=None,
        cu_seqlens_k_new=None,
    )


def _require_a_plan(problem: Problem, options: Options) -> None:
    """Raise the errors of a call on the current GPU for a family or tile that does not fit."""
    make_plan(problem, current_device(), family=options.family, tile=options.tile)


def _require_scratch(problem: Problem, tile: Tile, seqlen_k: int) -> None:
    """Raise ValueError for a tile that the CPU backend would refuse after the append."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    clipped = Tile(min(tile.Br, max(rows, 1)), min(tile.Bc, max(seqlen_k, 1)))
    needed = cpu_forward.scratch_bytes(problem, clipped)
    if needed > cpu_forward.SCRATCH_LIMIT:
        raise ValueError(
            f"tile {tile} needs {needed} bytes of scratch per worker, more than "
            f"{cpu_forward.SCRATCH_LIMIT}; choose a smaller Br or Bc"
        )
