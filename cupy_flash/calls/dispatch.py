"""Dispatch of calls: read the arrays, compute where they are, and convert the results back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.jax_arrays import from_jax, to_jax
from cupy_flash.arrays.overlap import require_no_overlap
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
    CACHES,
    FLOAT8_SCALES,
    IN_PLACE,
    Arguments,
    normalized,
    require_arrays,
    require_given,
    with_modifications,
)
from cupy_flash.calls.backends import require_backend, require_gpu_backend
from cupy_flash.calls.backward_arguments import WRITTEN
from cupy_flash.calls.check.modifications import NO_USER_MODS, UserMods
from cupy_flash.calls.check.partials import Partials, spec_of_call, stacked
from cupy_flash.calls.conversions import conversions, converted
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.allocate import as_tensor
from cupy_flash.calls.gpu.forward import ATTENTION
from cupy_flash.calls.gpu.merge import MERGE
from cupy_flash.calls.gpu.prepared_calls import Operation
from cupy_flash.calls.gpu.sharded_append import APPEND, AppendedRows, CacheSharding
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.calls.options import INTEGER_OR_NONE, Options, plain_options, with_offsets
from cupy_flash.cpu import combine as cpu_combine
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import compiler
from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch

# Names of the results of attention and of a merge.
_RESULTS = ("out", "lse")


class Direction(NamedTuple):
    """Functions that differ between forward and backward calls.

    Attributes
    ----------
    operation
        Operation on a GPU.
    host
        Module for arrays in host memory. Its function `repeated` repeats a call, and `plan_of`
        returns the plan of the CPU backend for a problem and options.
    general
        Function that computes a call on arrays of any library, given the arrays, options, backend,
        `keys` and user functions.
    require_given
        Function that raises an error if an array is None that the arrays and options need.
    written
        Function of the arrays and options that returns the arrays that the call writes, by name;
        None for each that is not given.
    record
        Type of the record of arrays, without those of modifications.
    """

    operation: Operation
    host: Any
    general: Callable[..., Any]
    require_given: Callable[[Any, Options], None]
    written: Callable[[Any, Options], dict[str, Any]]
    record: Any


def attention(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int = 0,
    modifications: Mapping[str, Any] | None = None,
) -> Any:
    """Return the result of a public function that computes attention.

    Parameters
    ----------
    arguments, options, backend
        Arrays, options and backend of the call.
    keys
        Length of every cached sequence before the append if `cache_seqlens` is None; otherwise 0.
    modifications
        Keyword arguments that modify attention: masks, and changes of scores.
    """
    if backend == "auto" and (
        arguments.k_scale is not None
        or arguments.v_scale is not None
        or arguments.q_scale is not None
    ):
        arguments = _copy_scales_to_gpu(arguments)
    results = run(_FORWARD, arguments, options, backend, keys, modifications)
    return results if options.return_lse else results[0]


def run(
    direction: Direction,
    arguments: Any,
    options: Options,
    backend: str,
    keys: int,
    modifications: Mapping[str, Any] | None,
) -> Any:
    """Compute attention or its gradients where the arrays are; see `attention`.

    Returns
    -------
    results
        Pair of out and lse, which is None if it is not requested; or the requested gradients.
    """
    mod_key, user_mods = None, NO_USER_MODS
    if options.q_offset.__class__ not in INTEGER_OR_NONE:
        options, modifications = with_offsets(options, modifications)
    if modifications:
        is_backward = options.wrt is not None
        arguments, mod_key, user_mods = with_modifications(
            arguments, modifications, backward=is_backward
        )
    options = plain_options(options)
    results = None
    # Fast paths of common calls, without the checks that arrays of these types always pass.
    if mod_key is None and arguments.q.__class__ is np.ndarray and options.kind == "dense":
        results = direction.host.repeated(arguments, options, backend)
    elif backend == "auto":
        like = arguments.qkv if options.kind == "qkvpacked" else arguments.q
        if is_cupy_type(like.__class__):
            results = prepared_calls.run(
                direction.operation, arguments, options, keys, True, user_mods, mod_key
            )
        elif is_torch_on_gpu(*arguments.key_arrays(options)):
            direction.require_given(arguments, options)
            with kinds.on_torch_stream("q" if like is arguments.q else "qkv", like):
                results = prepared_calls.run(
                    direction.operation, arguments, options, keys, False, user_mods, mod_key
                )
                count_writes(*direction.written(arguments, options).values())
                return tuple(map(as_tensor, results))
    if results is None:
        if mod_key is not None:
            options = options.with_mod_key(mod_key)
        require_backend(backend)
        results = direction.general(arguments, options, backend, keys, user_mods)
    return results


def compute(
    operation: Operation,
    on_host: Callable[..., Any],
    arrays: Any,
    options: Any,
    names: Sequence[str],
    written: Mapping[str, Any],
    backend: str = "auto",
    keys: int = 0,
    user_mods: UserMods = NO_USER_MODS,
    convert: Callable[[Any], Any] | None = None,
) -> tuple[Any, ...]:
    """Compute an operation on arrays of any library; return arrays of the same library.

    Parameters
    ----------
    operation, on_host
        Operation on a GPU, and function for arrays in host memory. The function takes the arrays,
        options, `keys`, backend and user functions.
    arrays, options, backend, keys, user_mods
        Arguments of the call; see `prepared_calls.run`.
    names
        Names of the results.
    written
        Arrays that the call writes, by name, or None for each that is not given. A result with such
        a name is written to the array.
    convert
        Function that converts a result to the caller's library, if the first array does not
        determine it.
    """
    if convert is None and _all_are_numpy(arrays.key_arrays(options)):
        results: tuple[Any, ...] = on_host(arrays, options, keys, backend, user_mods)
        return results
    for name, array in written.items():
        kinds.require_mutable(name, array)
    arrays, from_array = normalized(arrays, tuple(written))
    if isinstance(arrays.like, np.ndarray):
        results = on_host(arrays, options, keys, backend, user_mods)
    else:
        require_gpu_backend(backend)
        results = prepared_calls.run(operation, arrays, options, keys, False, user_mods)
    count_writes(*written.values())
    convert = convert or from_array
    # The conversion also makes the caller's stream wait for ours, so given arrays are converted.
    new = [None if result is None else convert(result) for result in results]
    given = [written.get(name) for name in names]
    return tuple([x if array is None else array for array, x in zip(given, new, strict=True)])


def _attention_of_any(
    arguments: Arguments, options: Options, backend: str, keys: int, user_mods: UserMods
) -> tuple[Any, ...]:
    """Compute attention on arrays of any library; return out and lse."""
    is_plain = options.kind == "dense" and options.mod_key is None and arguments.out is None
    if backend == "auto" and is_plain:
        results = _jax_attention(arguments, options)
        if results is not None:
            return results
    require_given(arguments, options)
    options, convert = options.with_separate_qkv(), None
    if arguments.qkv is not None and arguments.qkv.__class__ is not np.ndarray:
        # NumPy and CuPy slice without a copy. JAX copies, and DLPack itself defines no slices.
        qkv = kinds.read("qkv", arguments.qkv)
        convert = kinds.result_converter("qkv", arguments.qkv)
        arguments = arguments._replace(qkv=qkv)
    arguments = arguments.parts_of_qkv(options.layout)
    return compute(
        ATTENTION,
        host_forward.forward,
        arguments,
        options,
        _RESULTS,
        _written(arguments, options),
        backend,
        keys,
        user_mods,
        convert,
    )


def _copy_scales_to_gpu(arguments: Arguments) -> Arguments:
    """Return the arguments with scales that are numbers copied to the GPU, if q is there."""
    numbers = {
        n: x for n in FLOAT8_SCALES if (x := getattr(arguments, n)).__class__ in (int, float)
    }
    q = arguments.q
    if not numbers or not (is_torch_on_gpu(q) or is_cupy(q)):
        return arguments
    copied = {n: kinds.number_on_gpu(n, x, like=q) for n, x in numbers.items()}
    return arguments._replace(**copied)


def combine(partials: Partials) -> tuple[Any, ...]:
    """Return the result of `cupy_flash.combine`: out and lse."""
    if is_cupy(partials.out_partial) and is_cupy(partials.lse_partial):
        fast_result: tuple[Any, ...] | None = prepared_calls.run(MERGE, partials, None, 0, True)
        if fast_result is not None:
            return fast_result
    convert, written = None, {"out": partials.out}
    require_arrays(partials, ("out_partial", "lse_partial"))
    if isinstance(partials.out_partial, (list, tuple)):
        partials, convert = stacked(partials)
    return compute(MERGE, _combine_on_host, partials, None, _RESULTS, written, convert=convert)


def append(rows: AppendedRows, sharding: CacheSharding, keys: int) -> None:
    """Write new rows of CuPy arrays into a rank's cache shard; see `attention` for `keys`."""
    prepared_calls.run(APPEND, rows, sharding, keys)


def plan(
    arguments: Arguments,
    options: Options,
    backend: str,
    arch: str | None,
    modifications: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of a call without reading its arrays; see `cupy_flash.plan`."""
    made_plan = unloaded_plan(arguments, options, backend, arch, modifications)
    if arch is not None or made_plan.unit is None:
        return made_plan
    return dataclasses.replace(made_plan, resources=compiler.loaded_resources(made_plan.unit))


def unloaded_plan(
    arguments: Arguments,
    options: Options,
    backend: str,
    arch: str | None,
    modifications: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of a call without its resources, so that nothing is compiled."""
    require_backend(backend)
    require_given(arguments, options)
    if arguments.qkv is not None:
        arguments = arguments._replace(qkv=kinds.read("qkv", arguments.qkv))
    arguments, options = arguments.parts_of_qkv(options.layout), options.with_separate_qkv()
    arguments, options = as_planned(arguments, options, modifications)
    return plan_of(_FORWARD, arguments, options, backend, arch)


def as_planned(
    arguments: Any,
    options: Options,
    modifications: Mapping[str, Any] | None,
    written: tuple[str, ...] = ("out",),
) -> tuple[Any, Options]:
    """Return the NumPy or CuPy arrays and the plain options of a call that is planned."""
    options, modifications = with_offsets(options, modifications)
    arguments, mod_key, _ = with_modifications(
        arguments, modifications, backward=options.wrt is not None
    )
    options = plain_options(options.with_mod_key(mod_key))
    arguments, _ = normalized(arguments, written)
    return type(arguments)(*map(as_cupy, arguments)), options


def plan_of(
    direction: Direction, arguments: Any, options: Options, backend: str, arch: str | None
) -> Plan:
    """Return the plan of a call on the result of `as_planned`."""
    check = direction.operation.check
    assert check is not None
    problem, _ = check(_as_copied(direction, arguments, options), options)
    if arch is not None and backend == "cpu":
        raise ValueError(f"arch is {arch!r}, but backend is 'cpu'; pass only one of them")
    if arch is not None:
        return make_plan(problem, device_for_arch(arch), family=options.family, tile=options.tile)
    if not isinstance(arguments.q, np.ndarray):
        require_gpu_backend(backend)
    elif not host_forward.runs_on_gpu(problem, options, backend):
        cpu_plan: Plan = direction.host.plan_of(problem, options)
        return cpu_plan
    else:
        order = host_forward.upload_order(options)
        uploaded = (None if x is None else unallocated_copy(x, order) for x in arguments)
        arguments = type(arguments)(*uploaded)
        problem, _ = check(_as_copied(direction, arguments, options), options)
    if reason := gpu_unavailable():
        raise UnsupportedError(f"no GPU to plan for: {reason}; pass an arch such as 'sm_90'")
    return make_plan(problem, current_device(), family=options.family, tile=options.tile)


def _as_copied(direction: Direction, arguments: Any, options: Options) -> Any:
    """Return the arrays with the layouts of the copies that a call would make, unallocated."""
    new = {n: unallocated(*spec) for n, spec in conversions(arguments, options).items()}
    arguments = arguments._replace(**new)
    copied = {
        name: unallocated_copy(array)
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None
        and name in direction.record._fields
        and name not in (*IN_PLACE, *WRITTEN)
        and not (
            is_readable_in_place(array) and (has_one_batch_stride(array) or not options.is_dense)
        )
    }
    return arguments._replace(**copied)


def _written(arguments: Arguments, options: Options) -> dict[str, Any]:
    """Return the arrays that a call writes: out, then the caches and scales of an append."""
    written = {"out": arguments.out}
    if options.kind == "kvcache" and arguments.k is not None:
        names = IN_PLACE if options.compute_scales else CACHES
        written |= {name: getattr(arguments, name) for name in names}
    return written


_FORWARD = Direction(ATTENTION, host_forward, _attention_of_any, require_given, _written, Arguments)


def _all_are_numpy(given: tuple[Any, ...]) -> bool:
    """Return whether all arrays are exactly NumPy's; absent arrays are ignored."""
    # A loop, because a generator or sets of types take half a microsecond longer.
    for array in given:  # noqa: SIM110
        if array is not None and array.__class__ is not np.ndarray:
            return False
    return True


def _jax_attention(arguments: Arguments, options: Options) -> tuple[Any, Any] | None:
    """Compute attention of JAX arrays; return None if one cannot be read by its address."""
    memories = []
    for name in ("q", "k", "v"):
        memory = from_jax(name, getattr(arguments, name))
        if memory is None:
            return None
        memories.append(memory)
    result, lse = prepared_calls.run(ATTENTION, Arguments(*memories), options)
    device = memories[0].device
    return to_jax(result, device), None if lse is None else to_jax(lse, device)


def _combine_on_host(partials: Partials, *_: Any) -> tuple[np.ndarray, np.ndarray]:
    partials = converted(partials)
    out_partial, lse_partial, out, sinks = partials
    if out is not None:
        host_forward.require_writable("out", out)
    spec_of_call(*partials)
    if out is None:
        out = np.empty(out_partial.shape[1:], out_partial.dtype)
    else:
        require_no_overlap(partials._fields, partials, ("out",))
    return out, cpu_combine.merge(out_partial, lse_partial, out, sinks)
