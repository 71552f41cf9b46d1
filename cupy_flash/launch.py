"""Run a problem on the current GPU: plan, kernels and packed arguments are kept per call key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupy_flash import tuning
from cupy_flash.arrays import (
    address_of,
    dtype_name,
    is_readable_in_place,
    kind_of,
    overlap,
    readable_in_place,
    require_4d,
    require_float,
    spec_of,
    to_bshd,
)
from cupy_flash.counters import zeroed
from cupy_flash.device import device_for_id
from cupy_flash.gpu_calls import (
    LoadedLaunch,
    array_key,
    cupy_module,
    loaded_launches,
    require_device,
)
from cupy_flash.params import PackedParams, PackedSequences
from cupy_flash.planner import make_plan
from cupy_flash.problem import (
    MAX_ALIGNMENT,
    ArraySpec,
    Problem,
    check_bool,
    contiguous_strides,
    make_problem,
)
from cupy_flash.tensor_map import TensorMaps
from cupy_flash.tile import FrozenTile

# Calls kept for reuse. A key takes about 2 KiB, and one workload uses a handful.
_MAX_CALLS = 4096


class Options(NamedTuple):
    """What a call asks for besides its arrays; hashable, as part of the call's key."""

    causal: bool = False
    softmax_scale: float | None = None
    q_offset: int | None = None
    layout: str = "bshd"
    return_lse: bool = False
    family: str | None = None
    tile: FrozenTile = None


@dataclass(frozen=True)
class _Call:
    """Everything about a call that does not change while its key stays the same."""

    workspace: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, int, int]
    lse_dtype: str
    params: PackedParams
    tensor_maps: TensorMaps | None
    sequences: PackedSequences | None
    counters: int
    kernels: tuple[LoadedLaunch, ...]


_calls: dict[tuple[Any, ...], _Call] = {}


def forward(q: Any, k: Any, v: Any, out: Any | None, options: Options) -> tuple[Any, Any | None]:
    """Attention of CuPy arrays on the current device and stream.

    Parameters
    ----------
    q, k, v
        In `options.layout`.
    out
        Where to write, or None for a new array.
    options
        The rest of the call.

    Returns
    -------
    out, lse
        lse is None unless asked for.
    """
    cupy = cupy_module()
    device_id = cupy.cuda.runtime.getDevice()
    q_data, k_data, v_data = q.data, k.data, v.data
    q_address, k_address, v_address = q_data.ptr, k_data.ptr, v_data.ptr
    q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
    # Everything that the plan and the checks depend on. dtype.num, not dtype: hashing a dtype takes
    # a microsecond.
    key = (
        device_id,
        q_data.device_id,
        k_data.device_id,
        v_data.device_id,
        q.shape,
        q.strides,
        k.shape,
        k.strides,
        v.shape,
        v.strides,
        q_dtype.num,
        k_dtype.num,
        v_dtype.num,
        # Of both byte orders there is one number.
        q_dtype.isnative and k_dtype.isnative and v_dtype.isnative,
        (q_address | k_address | v_address) & (MAX_ALIGNMENT - 1),
        options,
        # 1 and True are one key, and only one of them is a right value.
        options.causal.__class__,
        options.softmax_scale.__class__,
        options.q_offset.__class__,
        options.return_lse.__class__,
        None if out is None else array_key(out),
        tuning.generation(),
    )
    try:
        call = _calls.get(key)
    except TypeError:
        # An option of a kind that cannot be part of a key: the checks say which, and what to pass.
        problem = problem_of(q, k, v, out, options)
        if options.family is not None and not isinstance(options.family, str):
            raise TypeError(f"family is {kind_of(options.family)}; expected a name") from None
        # A scale that is an array of one number.
        return forward(q, k, v, out, options._replace(softmax_scale=problem.softmax_scale))
    if call is None:
        require_device(device_id, q=q, k=k, v=v, out=out)
        if not all(map(is_readable_in_place, (q, k, v))):
            q, k, v = map(readable_in_place, (q, k, v))
            return forward(q, k, v, out, options)
        call = _prepare(q, k, v, out, options, device_id)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call

    if out is None:
        out = cupy.ndarray(call.out_shape, q.dtype)
    else:
        _require_apart(out, q, k, v)
    lse = cupy.ndarray(call.lse_shape, call.lse_dtype) if options.return_lse else None
    if call.kernels:
        workspace = cupy.cuda.alloc(call.workspace) if call.workspace else None
        params = call.params.with_pointers(
            q_address,
            k_address,
            v_address,
            out.data.ptr,
            0 if lse is None else lse.data.ptr,
            0 if workspace is None else workspace.ptr,
        )
        # A kernel is given only what it has parameters for.
        arguments: tuple[Any, ...] = (params,)
        if call.tensor_maps is not None:
            arguments = (params, call.tensor_maps.at((q_address, k_address, v_address)))
        elif call.sequences is not None:
            counters = zeroed(call.counters) if call.counters else 0
            arguments = (params, call.sequences.with_pointers(0, 0, 0, 0, 0, counters, 0))
        for kernel, grid, block, shared_memory in call.kernels:
            kernel(grid, block, arguments, shared_memory)
    return out, lse


def _prepare(q: Any, k: Any, v: Any, out: Any | None, options: Options, device_id: int) -> _Call:
    problem = problem_of(q, k, v, out, options)
    device = device_for_id(device_id)
    plan = make_plan(problem, device, family=options.family, tile=options.tile)
    return _Call(
        workspace=plan.workspace,
        out_shape=out_shape(q, v),
        lse_shape=(problem.batch, problem.heads_q, problem.seqlen_q),
        lse_dtype="float64" if problem.dtype == "float64" else "float32",
        params=PackedParams(
            problem,
            num_splits=plan.num_splits,
            section_heads=plan.section_heads,
        ),
        tensor_maps=TensorMaps(plan.tensor_maps) if plan.tensor_maps else None,
        sequences=PackedSequences(problem) if plan.takes_sequences else None,
        counters=plan.counters,
        kernels=loaded_launches(plan),
    )


def problem_of(q: Any, k: Any, v: Any, out: Any | None, options: Options) -> Problem:
    """The problem that these NumPy or CuPy arrays pose.

    Raises
    ------
    TypeError, ValueError
        For what no kernel computes; the message names the argument.
    """
    check_bool("return_lse", options.return_lse)
    arrays = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    for name, array in arrays.items():
        require_4d(name, array)
        require_float(name, array)
    if out is not None and not is_readable_in_place(out):
        raise ValueError(f"out has strides {out.strides}; expected a contiguous last axis")
    specs = {n: spec_of(to_bshd(a, options.layout), address_of(a)) for n, a in arrays.items()}
    if out is None:
        shape = out_shape(q, v)
        strides = contiguous_strides(shape)
        batch, seqlen, heads = (0, 1, 2) if options.layout == "bshd" else (0, 2, 1)
        specs["out"] = ArraySpec(
            shape=(shape[batch], shape[seqlen], shape[heads], shape[3]),
            strides=(strides[batch], strides[seqlen], strides[heads]),
            dtype=dtype_name(q),
        )
    return make_problem(
        **specs,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        q_offset=options.q_offset,
    )


def out_shape(q: Any, v: Any) -> tuple[int, int, int, int]:
    """Shape of the output, in the layout of the inputs."""
    return (*q.shape[:3], v.shape[3])


def _require_apart(out: Any, *inputs: Any) -> None:
    for name, array in zip("qkv", inputs, strict=True):
        if overlap(out, array):
            raise ValueError(f"out overlaps {name}; pass memory of its own")
