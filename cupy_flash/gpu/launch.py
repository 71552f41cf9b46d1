"""Run a problem on the current GPU: plan, kernels and packed arguments are kept per call key."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupy_flash.calls.arrays import (
    address_of,
    as_cupy,
    dtype_name,
    is_readable_in_place,
    readable_in_place,
    require_4d,
    require_float,
    require_in_place,
    require_layout,
    spec_of,
    to_bshd,
)
from cupy_flash.calls.overlap import OverlapCheck
from cupy_flash.gpu.counters import shared
from cupy_flash.gpu.gpu_calls import Attention, cupy_module, facts_of, remember, require_device
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_id
from cupy_flash.problem.problem import (
    ArraySpec,
    Problem,
    check_bool,
    contiguous_strides,
    make_problem,
)
from cupy_flash.problem.tile import FrozenTile

_NAMES = ("q", "k", "v", "out")


class Options(NamedTuple):
    """What a call asks for besides its arrays; plain values, as part of the call's key."""

    causal: bool = False
    softmax_scale: float | None = None
    q_offset: int | None = None
    layout: str = "bshd"
    return_lse: bool = False
    family: str | None = None
    tile: FrozenTile = None


_calls: dict[tuple[Any, ...], Attention] = {}


def forward(q: Any, k: Any, v: Any, out: Any | None, options: Options) -> tuple[Any, Any | None]:
    """Attention of CuPy arrays on the current device and stream.

    Parameters
    ----------
    q, k, v
        In `options.layout`.
    out
        Where to write, or None for a new array.
    options
        The rest of the call, see `plain_options`.

    Returns
    -------
    out, lse
        lse is None unless asked for.
    """
    device_id = cupy_module().cuda.runtime.getDevice()
    facts, addresses = facts_of((q, k, v, out))
    # Everything that the plan and the checks depend on.
    key = (device_id, facts, options, tuning.generation())
    call = _calls.get(key)
    if call is None:
        require_device(device_id, q=q, k=k, v=v, out=out)
        readable = tuple(map(readable_in_place, (q, k, v)))
        if any(a is not b for a, b in zip(readable, (q, k, v), strict=True)):
            q, k, v = readable
            return forward(q, k, v, out, options)
        prepared = _prepare(*map(as_cupy, (q, k, v, out)), options=options, device_id=device_id)
        call = remember(_calls, key, prepared)
    return _run(call, addresses, q, out, options)


def forward_packed(qkv: Any, out: Any | None, options: Options) -> tuple[Any, Any | None]:
    """`forward` of the parts of a CuPy array (batch, seqlen, 3, heads, head_dim)."""
    device_id = cupy_module().cuda.runtime.getDevice()
    # Slices would take 3 us each.
    facts, (q_address, out_address) = facts_of((qkv, out))
    key = (device_id, facts, options, tuning.generation())
    call = _calls.get(key)
    if call is None:
        require_device(device_id, qkv=qkv, out=out)
        if not is_readable_in_place(qkv):
            return forward_packed(readable_in_place(qkv), out, options)
        packed = as_cupy(qkv)
        q, k, v = (packed[:, :, i] for i in range(3))
        prepared = _prepare(q, k, v, as_cupy(out), options=options, device_id=device_id)
        call = remember(_calls, key, prepared)
    step = qkv.strides[2]
    addresses = (q_address, q_address + step, q_address + 2 * step, out_address)
    return _run(call, addresses, qkv, out, options)


def _run(
    call: Attention, addresses: tuple[int, ...], like: Any, out: Any | None, options: Options
) -> tuple[Any, Any | None]:
    call.apart.check(addresses)
    out, lse = call.results(like, out, options.return_lse)
    if call.kernels:
        stream = shared(call.counters) if call.counters or call.workspace else None
        # Named until the launches are made: then the pool may hand it on, to what runs later.
        memory = cupy_module().cuda.alloc(call.workspace) if call.workspace else None
        workspace = 0 if memory is None else memory.ptr
        call.launch(addresses[:3], out, lse, workspace, 0 if stream is None else stream.address)
        if stream is not None:
            stream.launched()
    return out, lse


def _prepare(
    q: Any, k: Any, v: Any, out: Any | None, *, options: Options, device_id: int
) -> Attention:
    problem = problem_of(q, k, v, out, options)
    plan = make_plan(problem, device_for_id(device_id), family=options.family, tile=options.tile)
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    apart = OverlapCheck(_NAMES, (q, k, v, out), ("out",))
    return Attention.of(plan, q.dtype, out_shape(q, v), lse_shape, apart)


def problem_of(q: Any, k: Any, v: Any, out: Any | None, options: Options) -> Problem:
    """The problem that these NumPy or CuPy arrays pose.

    Raises
    ------
    TypeError, ValueError
        For what no kernel computes; the message names the argument.
    """
    require_layout(options.layout)
    check_bool("return_lse", options.return_lse)
    arrays = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    for name, array in arrays.items():
        require_4d(name, array)
        require_float(name, array)
    if out is not None:
        require_in_place("out", out)
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
