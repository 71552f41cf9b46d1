"""The public functions: arrays to Problem to Plan to launch."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from cupy_flash.calls import arrays
from cupy_flash.calls.backends import (
    cpu_tile,
    host_runs_on_gpu,
    require_backend,
    require_gpu_backend,
)
from cupy_flash.calls.jax_arrays import from_jax, to_jax
from cupy_flash.calls.options import plain_options
from cupy_flash.calls.overlap import require_apart
from cupy_flash.calls.torch_arrays import is_torch_on_gpu, order
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import compiler, launch
from cupy_flash.gpu.launch import Options
from cupy_flash.host import cpu
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, make_cpu_plan, make_plan
from cupy_flash.problem.device import device_for_arch, device_for_id, gpu_unavailable
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile, TileRequest, freeze_tile


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
) -> Any:
    """Exact attention, softmax(softmax_scale * q k^T) v, without the score matrix in memory.

    The tiled online-softmax algorithm of FlashAttention-2 (Dao 2023, section 3.1).

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that speaks
        DLPack. Arrays with a contiguous last axis are read in place whatever their other
        strides and their alignment (16-byte aligned rows are fastest); others are copied.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, of the same dtype and kind. heads_q is a multiple of heads_kv; query head h reads
        head h // (heads_q // heads_kv).
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values. Head dims are 1 to 256, head_dim_v may differ from head_dim.
    causal : bool
        Query i sees only the keys j <= i + q_offset.
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). An array of one number is read in
        each call, which waits for it where it lies on a GPU.
    q_offset : int, optional
        Position of the first query among the keys, for causal masks. By default seqlen_k -
        seqlen_q: the last query sees every key. 0 aligns the mask at the top left.
    layout : {"bshd", "bhsd"}
        Order of the axes; "bhsd" is (batch, heads, seqlen, dim), for the output too.
    return_lse : bool
        Also return the log-sum-exp of each row's scaled scores.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last
        axis, no overlap with the inputs. Not of JAX, whose arrays are immutable.
    backend : {"auto", "gpu", "cpu"}
        Where NumPy arrays are computed. "auto": on the GPU where there is one.
    family : str, optional
        Kernel family to use instead of the planner's choice: "decode", "hopper", "mma", "simt",
        "naive".
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Of the inputs' kind and dtype. A row that sees no key is 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm; float32, for float64 inputs float64. -inf for a
        row that sees no key.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, a wrong value, or a family or tile that does not fit.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    Runs on the current device and stream and does not synchronize (NumPy results apart). Same
    inputs give the same bits. 16-bit inputs are accumulated in float32. NaN and inf propagate
    as in the naive formula, and masked keys leave no trace; a NaN in a value row that
    causality masks for some rows of its tile can reach them as 0 * NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 4, 2, 8)
    """
    options = plain_options(
        Options(causal, softmax_scale, q_offset, layout, return_lse, family, freeze_tile(tile))
    )
    if backend == "auto" and _all_cupy(q, k, v, out):
        # The common call, without the checks that its arguments passed by their types.
        result, lse = launch.forward(q, k, v, out, options)
        return (result, lse) if return_lse else result
    if backend == "auto" and is_torch_on_gpu(q, k, v, *(() if out is None else (out,))):
        return _from_torch(q, k, v, out, options)
    require_backend(backend)
    if out is None and type(q) is type(k) is type(v) is np.ndarray:
        # Likewise.
        result, lse = _from_host(q, k, v, None, backend, options)
        return (result, lse) if return_lse else result
    if backend == "auto" and out is None:
        found = _from_jax(q, k, v, options)
        if found is not None:
            return found
    given = q
    q, k, v = (arrays.normalize(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    convert = arrays.way_back("q", given)
    target = None if out is None else arrays.normalize_out("out", out)
    _require_one_kind(q, k, v, target)
    if isinstance(q, np.ndarray):
        result, lse = _from_host(q, k, v, target, backend, options)
    else:
        require_gpu_backend(backend)
        result, lse = launch.forward(q, k, v, target, options)
    # Converting also orders the consumer's stream after ours, so it is done for `out` as well.
    result = convert(result) if out is None else (convert(result), out)[1]
    return (result, convert(lse)) if return_lse else result


def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
) -> Any:
    """`flash_attention` of queries, keys and values that lie in one array, read in place.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third axis.
    causal, softmax_scale, q_offset, layout, return_lse, out, backend, family, tile
        As in `flash_attention`; layout is "bshd".

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        And lse with return_lse.

    Raises
    ------
    TypeError
        If qkv is no array, and as `flash_attention`.
    ValueError
        If qkv is not of that shape, and as `flash_attention`.
    """
    shape = getattr(qkv, "shape", None)
    if shape is None:
        raise TypeError(f"qkv is {arrays.kind_of(qkv)}; expected an array")
    if len(shape) != 5 or shape[2] != 3:
        raise ValueError(
            f"qkv has shape {tuple(shape)}; expected (batch, seqlen, 3, heads, head_dim)"
        )
    if layout != "bshd":
        raise ValueError(f"layout is {layout!r}; packed arrays are 'bshd'")
    options = plain_options(
        Options(causal, softmax_scale, q_offset, layout, return_lse, family, freeze_tile(tile))
    )
    if backend == "auto" and _all_cupy(qkv, qkv, qkv, out):
        result, lse = launch.forward_packed(qkv, out, options)
        return (result, lse) if return_lse else result
    return flash_attention(
        *(qkv[:, :, i] for i in range(3)), **options._asdict(), out=out, backend=backend
    )


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    layout: str = "bshd",
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    arch: str | None = None,
) -> Plan:
    """The Plan that a call with these arguments would use, without computing anything.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, backend, family, tile
        As in `flash_attention`. The arrays are not read.
    arch : str, optional
        Plan for a usual GPU of this architecture, such as "sm_90", instead of the current one.

    Returns
    -------
    Plan
        Family, tile, resources and reasons; `print` it.
    """
    options = plain_options(
        Options(causal, softmax_scale, q_offset, layout, False, family, freeze_tile(tile))
    )
    require_backend(backend)
    q, k, v = (arrays.read(n, a) for n, a in (("q", q), ("k", k), ("v", v)))
    _require_one_kind(q, k, v, None)
    on_host = isinstance(q, np.ndarray)
    on_cpu = on_host and arch is None and not host_runs_on_gpu(backend)
    if on_host and arch is None and not on_cpu:
        # Uploaded arrays keep the order of their axes, and have no gaps.
        q, k, v = (np.empty_like(array) for array in (q, k, v))
    # What a call would copy is laid out as the copy would be, without making it.
    q, k, v = (
        array if arrays.is_readable_in_place(array) else np.empty(array.shape, array.dtype)
        for array in (q, k, v)
    )
    problem = launch.problem_of(q, k, v, None, options)
    if arch is not None and backend == "cpu":
        raise ValueError(f"arch is {arch!r}, a GPU's, but backend is 'cpu'; pass one of them")
    if arch is not None:
        return make_plan(problem, device_for_arch(arch), family=options.family, tile=options.tile)
    if on_cpu:
        chosen = cpu_tile(problem, options.family, options.tile)
        return make_cpu_plan(problem, chosen, gpu_unavailable())
    if not on_host:
        require_gpu_backend(backend)
    if reason := gpu_unavailable():
        raise UnsupportedError(f"no GPU to plan for: {reason}; arch='sm_90' plans without one")
    import cupy

    made = make_plan(
        problem,
        device_for_id(cupy.cuda.runtime.getDevice()),
        family=options.family,
        tile=options.tile,
    )
    assert made.unit is not None
    return dataclasses.replace(made, resources=compiler.loaded_resources(made.unit))


def _all_cupy(q: Any, k: Any, v: Any, out: Any | None) -> bool:
    cupy = sys.modules.get("cupy")
    if cupy is None or not type(q) is type(k) is type(v) is cupy.ndarray:
        return False
    return out is None or type(out) is cupy.ndarray


def _from_torch(q: Any, k: Any, v: Any, out: Any | None, options: Options) -> Any:
    """Attention of tensors on a GPU: what the checks of all kinds come to, in 5 us less."""
    streams = arrays.torch_streams("q", q)
    if streams is not None:
        order(*streams)
    result, lse = launch.forward(q, k, v, out, options)
    if streams is not None:
        order(*reversed(streams))
    # New arrays are CuPy's where q had to be copied.
    if result.__class__ is not q.__class__:
        result = arrays.to_torch(result)
    if not options.return_lse:
        return result
    return result, lse if lse.__class__ is q.__class__ else arrays.to_torch(lse)


def _from_jax(q: Any, k: Any, v: Any, options: Options) -> Any | None:
    """The same of arrays of JAX; None where one of them is not read by its address."""
    q_memory = from_jax("q", q)
    if q_memory is None:
        return None
    k_memory, v_memory = from_jax("k", k), from_jax("v", v)
    if k_memory is None or v_memory is None:
        return None
    result, lse = launch.forward(q_memory, k_memory, v_memory, None, options)
    result = to_jax(result, q_memory.device)
    return (result, to_jax(lse, q_memory.device)) if options.return_lse else result


def _require_one_kind(q: Any, k: Any, v: Any, out: Any | None) -> None:
    for name, array in (("k", k), ("v", v), ("out", out)):
        if array is not None and isinstance(array, np.ndarray) != isinstance(q, np.ndarray):
            host, device = ("q", name) if isinstance(q, np.ndarray) else (name, "q")
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")


def _from_host(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray | None,
    backend: str,
    options: Options,
) -> tuple[np.ndarray, np.ndarray | None]:
    problem, tile = _host_call(q, k, v, out, backend, options)
    if out is None:
        out = np.empty(launch.out_shape(q, v), q.dtype)
    else:
        if not out.flags.writeable:
            raise ValueError("out is read-only; pass an array that can be written")
        require_apart(("q", "k", "v", "out"), (q, k, v, out), ("out",))
    if tile is None:
        import cupy

        on_gpu = cupy.asarray(q), cupy.asarray(k), cupy.asarray(v)
        result, lse = launch.forward(*on_gpu, None, options)
        out[...] = cupy.asnumpy(result)
        return out, None if lse is None else cupy.asnumpy(lse)
    lse = None
    if options.return_lse:
        lse_dtype = np.float64 if problem.dtype == "float64" else np.float32
        lse = np.empty((problem.batch, problem.heads_q, problem.seqlen_q), lse_dtype)
    views = q, k, v, out
    if options.layout != "bshd":
        views = tuple(arrays.to_bshd(array, options.layout) for array in views)
    cpu.forward(
        *views,
        lse,
        causal=problem.causal,
        q_offset=problem.q_offset,
        softmax_scale=problem.softmax_scale,
        tile=tile,
    )
    return out, lse


# Calls on host memory kept for reuse, as those on a GPU are in `launch`.
_MAX_HOST_CALLS = 1024
_host_calls: dict[Any, tuple[Problem, Tile]] = {}


def _host_call(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray | None,
    backend: str,
    options: Options,
) -> tuple[Problem, Tile | None]:
    """The problem that arrays in host memory pose, and the CPU's tile; no tile where a GPU is used.

    Kept, as finding them takes four times as long as a small call computes.
    """
    if host_runs_on_gpu(backend):
        return launch.problem_of(q, k, v, out, options), None
    key = (
        (q.shape, q.strides, q.dtype),
        (k.shape, k.strides, k.dtype),
        (v.shape, v.strides, v.dtype),
        None if out is None else (out.shape, out.strides, out.dtype),
        options,
        tuning.generation(),
    )
    known = _host_calls.get(key)
    if known is None:
        problem = launch.problem_of(q, k, v, out, options)
        known = problem, cpu_tile(problem, options.family, options.tile)
        if len(_host_calls) >= _MAX_HOST_CALLS:
            _host_calls.clear()
        _host_calls[key] = known
    return known
