"""Dispatch of calls: read the arrays, compute where they are, and convert the results back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.jax_arrays import from_jax, to_jax
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import (
    as_cupy,
    has_one_batch_stride,
    is_cupy,
    is_cupy_type,
    is_readable_in_place,
    unallocated,
    unallocated_copy,
)
from cupy_flash.arrays.torch_arrays import count_writes, is_torch_on_gpu
from cupy_flash.calls.arguments import (
    FLOAT8_SCALES,
    IN_PLACE,
    WRITTEN_GRADIENTS,
    Arguments,
    call_arrays,
    normalized,
    require_arrays,
    with_modifications,
)
from cupy_flash.calls.backends import require_backend, require_gpu_backend
from cupy_flash.calls.check.modifications import NO_USER_MODS, UserMods
from cupy_flash.calls.check.partials import Partials, stacked
from cupy_flash.calls.conversions import conversions
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.allocate import as_tensor
from cupy_flash.calls.gpu.combine import COMBINE
from cupy_flash.calls.gpu.forward import ATTENTION
from cupy_flash.calls.gpu.prepared_calls import Operation
from cupy_flash.calls.gpu.sharded_append import APPEND, AppendedRows, CacheSharding
from cupy_flash.calls.host import combine as host_combine
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.calls.options import INTEGER_OR_NONE, Options, plain_options, with_offsets
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import compiler
from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.opaque import is_dynamo_tracing, outside
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import ROWS


class Computation(NamedTuple):
    """Attention, its gradients or a merge: the operation on a GPU, and the module for host arrays.

    The module's function `compute` takes the arrays, options, `keys`, backend and user functions.
    Modules of attention and gradients also have functions `repeated` and `plan_of`.
    """

    operation: Operation
    host: Any


_ATTENTION = Computation(ATTENTION, host_forward)
_COMBINE = Computation(COMBINE, host_combine)


def attention(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int = 0,
    modifications: Mapping[str, Any] | None = None,
    stream: Any | None = None,
) -> Any:
    """Return the result of a public function that computes attention.

    Parameters
    ----------
    arguments, options, backend, stream
        Arrays, options and backend of the call, and its stream, or None for the current one.
    keys
        Length of every cached sequence before the append if `cache_seqlens` is None; otherwise 0.
    modifications
        Keyword arguments that modify attention: masks, and changes of scores.
    """
    if is_dynamo_tracing():
        return outside(attention, (arguments, options, backend, keys, modifications, stream))
    if stream is not None:
        with on_stream(stream, arguments.like):
            return attention(arguments, options, backend, keys, modifications)
    if backend == "auto" and (
        arguments.k_scale is not None
        or arguments.v_scale is not None
        or arguments.q_scale is not None
    ):
        arguments = copy_scales_to_gpu(arguments)
    results = run(_ATTENTION, arguments, options, backend, keys, modifications)
    if len(results) > 2:
        # Row statistics follow out and lse.
        return tuple([x for x in results if x is not None])
    return results if options.return_lse else results[0]


def run(
    computation: Computation,
    arguments: Any,
    options: Options,
    backend: str,
    keys: int,
    modifications: Mapping[str, Any] | None,
) -> Any:
    """Return out, lse (None if not requested) and row statistics, or gradients; see `attention`."""
    mod_key, user_mods = None, NO_USER_MODS
    if options.q_offset.__class__ not in INTEGER_OR_NONE:
        options, modifications = with_offsets(options, modifications)
    if modifications:
        arguments, mod_key, user_mods = with_modifications(
            arguments, modifications, backward=computation is not _ATTENTION
        )
    options = plain_options(options)
    results = None
    # Fast paths of common calls, without the checks that arrays of these types always pass.
    if mod_key is None and arguments.q.__class__ is np.ndarray and options.kind == "dense":
        results = computation.host.repeated(arguments, options, backend)
    elif backend == "auto":
        like = arguments.qkv if options.kind == "qkvpacked" else arguments.q
        if is_cupy_type(like.__class__):
            results = prepared_calls.run(
                computation.operation, arguments, options, keys, True, user_mods, mod_key
            )
        elif is_torch_on_gpu(*arguments.key_arrays(options)):
            arguments.require_given(options)
            with kinds.on_torch_stream("q" if like is arguments.q else "qkv", like):
                results = prepared_calls.run(
                    computation.operation, arguments, options, keys, False, user_mods, mod_key
                )
                count_writes(*arguments.written(options).values())
                return tuple(map(as_tensor, results))
        elif computation is _ATTENTION and mod_key is None:
            results = _jax_attention(arguments, options)
    if results is not None:
        return results
    if mod_key is not None:
        options = options._replace(mod_key=mod_key)
    require_backend(backend)
    arguments.require_given(options)
    convert = None
    if options.kind == "qkvpacked":
        if arguments.qkv.__class__ is not np.ndarray:
            # NumPy and CuPy slice without a copy. JAX copies, and DLPack itself defines no slices.
            convert = kinds.result_converter("qkv", arguments.qkv)
        arguments, options = _separated(arguments, options)
    return _compute(computation, arguments, options, backend, keys, user_mods, convert)


def _compute(
    computation: Computation,
    arrays: Any,
    options: Any,
    backend: str = "auto",
    keys: int = 0,
    user_mods: UserMods = NO_USER_MODS,
    convert: Callable[[Any], Any] | None = None,
) -> tuple[Any, ...]:
    """Compute attention, gradients or a merge of arrays of any library.

    The results are converted by `convert`; by default to the library of the first array.
    """
    call = (options, keys, backend, user_mods)
    if convert is None and _all_are_numpy(arrays.key_arrays(options)):
        results: tuple[Any, ...] = computation.host.compute(arrays, *call)
        return results
    written = arrays.written(options)
    for name, array in written.items():
        kinds.require_mutable(name, array)
    arrays, as_first = normalized(arrays, tuple(written))
    if isinstance(arrays.like, np.ndarray):
        results = computation.host.compute(arrays, *call)
    else:
        require_gpu_backend(backend)
        results = prepared_calls.run(
            computation.operation, arrays, options, keys, user_mods=user_mods
        )
    count_writes(*written.values())
    convert = convert or as_first
    given = {id(getattr(arrays, name)): array for name, array in written.items()}
    # Every result is converted, because the conversion makes the caller's stream wait for ours.
    # A result that was written to an array of the caller is returned as this array.
    return tuple([None if x is None else given.get(id(x), convert(x)) for x in results])


def _separated(arguments: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Return the arguments and options of a call with q, k and v as views of qkv."""
    arguments = arguments._replace(qkv=kinds.read("qkv", arguments.qkv))
    return arguments.parts_of_qkv(options.layout), options._replace(kind="dense")


def copy_scales_to_gpu(arguments: Arguments) -> Arguments:
    """Return the arguments with scales that are numbers copied to the GPU, if q is there."""
    numbers = {
        n: x for n in FLOAT8_SCALES if (x := getattr(arguments, n)).__class__ in (int, float)
    }
    q = arguments.q
    if not numbers or not (is_torch_on_gpu(q) or is_cupy(q)):
        return arguments
    copied = {n: kinds.number_on_gpu(n, x, like=q) for n, x in numbers.items()}
    return arguments._replace(**copied)


def combine(partials: Partials, stream: Any | None = None) -> tuple[Any, ...]:
    """Return the result of `cupy_flash.combine`: out and lse."""
    if stream is not None:
        given = partials.out_partial
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        with on_stream(stream, first):
            return combine(partials)
    if is_cupy(partials.out_partial) and is_cupy(partials.lse_partial):
        results: tuple[Any, ...] | None = prepared_calls.run(COMBINE, partials, None, 0, True)
        if results is not None:
            return results
    elif is_torch_on_gpu(*partials):
        with kinds.on_torch_stream("out_partial", partials.out_partial):
            results = prepared_calls.run(COMBINE, partials, None)
            count_writes(partials.out)
            return tuple(map(as_tensor, results))
    convert = None
    if isinstance(partials.out_partial, (list, tuple)):
        partials, convert = stacked(partials)
    else:
        require_arrays(partials, ("out_partial", "lse_partial"))
    return _compute(_COMBINE, partials, None, convert=convert)


def append(rows: AppendedRows, sharding: CacheSharding, keys: int) -> None:
    """Write new rows of CuPy arrays into a rank's cache shard; see `attention` for `keys`."""
    prepared_calls.run(APPEND, rows, sharding, keys)


def plan(
    arguments: Arguments,
    options: Options,
    backend: str,
    arch: str | None,
    modifications: Mapping[str, Any] | None = None,
    *,
    compiles: bool = True,
) -> Plan:
    """Return the plan of a call without reading its arrays; see `cupy_flash.plan`.

    If `compiles`, the kernels for the current GPU are compiled, and the plan has their resources.
    """
    require_backend(backend)
    arguments.require_given(options)
    if options.kind == "qkvpacked":
        arguments, options = _separated(arguments, options)
    arguments, options = as_planned(arguments, options, modifications)
    made_plan = plan_of(_ATTENTION, arguments, options, backend, arch)
    if not compiles or arch is not None or made_plan.unit is None:
        return made_plan
    return dataclasses.replace(made_plan, resources=compiler.loaded_resources(made_plan.unit))


def as_planned(
    arguments: Any, options: Options, modifications: Mapping[str, Any] | None
) -> tuple[Any, Options]:
    """Return the NumPy or CuPy arrays and the plain options of a call that is planned."""
    options, modifications = with_offsets(options, modifications)
    arguments, mod_key, _ = with_modifications(
        arguments, modifications, backward=options.wrt is not None
    )
    options = plain_options(options._replace(mod_key=mod_key))
    # A plan writes no caches, so that immutable arrays may stand for them.
    written = (name for name in arguments.written(options) if name not in IN_PLACE)
    arguments, _ = normalized(arguments, tuple(written))
    return type(arguments)(*map(as_cupy, arguments)), options


def plan_of(
    computation: Computation, arguments: Any, options: Options, backend: str, arch: str | None
) -> Plan:
    """Return the plan of a call on the result of `as_planned`."""
    check = computation.operation.check
    assert check is not None
    problem, _ = check(_as_copied(arguments, options), options)
    if arch is not None and backend == "cpu":
        raise ValueError(f"arch is {arch!r}, but backend is 'cpu'; pass only one of them")
    if arch is not None:
        return make_plan(problem, device_for_arch(arch), family=options.family, tile=options.tile)
    if not isinstance(arguments.q, np.ndarray):
        require_gpu_backend(backend)
    elif not host_forward.runs_on_gpu(problem, options, backend):
        cpu_plan: Plan = computation.host.plan_of(problem, options, gpu_unavailable())
        return cpu_plan
    else:
        order = host_forward.upload_order(options)
        uploaded = (None if x is None else unallocated_copy(x, order) for x in arguments)
        problem, _ = check(_as_copied(type(arguments)(*uploaded), options), options)
    if reason := gpu_unavailable():
        raise UnsupportedError(f"no GPU to plan for: {reason}; pass an arch such as 'sm_90'")
    return make_plan(problem, current_device(), family=options.family, tile=options.tile)


def _as_copied(arguments: Any, options: Options) -> Any:
    """Return the arrays with the layouts of the copies that a call would make, unallocated."""
    new = {n: unallocated(*spec) for n, spec in conversions(arguments, options).items()}
    arguments = arguments._replace(**new)
    copied = {
        name: unallocated_copy(array)
        for name, array in call_arrays(arguments).items()
        if name not in (*IN_PLACE, *WRITTEN_GRADIENTS)
        and not (
            is_readable_in_place(array) and (has_one_batch_stride(array) or not options.is_dense)
        )
    }
    return arguments._replace(**copied)


def _all_are_numpy(given: tuple[Any, ...]) -> bool:
    """Return whether all arrays that are not None have exactly the type `numpy.ndarray`."""
    # A generator expression or sets of types would take half a microsecond longer than this loop.
    for array in given:  # noqa: SIM110
        if array is not None and array.__class__ is not np.ndarray:
            return False
    return True


def _jax_attention(arguments: Arguments, options: Options) -> tuple[Any, ...] | None:
    """Compute attention of JAX arrays; return None unless all can be read by their addresses."""
    if options.kind != "dense" or arguments.out is not None:
        return None
    memories = []
    for name in ROWS:
        memory = from_jax(name, getattr(arguments, name))
        if memory is None:
            return None
        memories.append(memory)
    results = prepared_calls.run(ATTENTION, Arguments(*memories), options)
    device = memories[0].device
    return tuple([None if x is None else to_jax(x, device) for x in results])
