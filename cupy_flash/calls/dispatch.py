"""Dispatch of forward calls: read the arrays, compute where they are, convert the results back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    require_given,
    with_modifications,
)
from cupy_flash.calls.backends import cpu_tile, require_backend, require_gpu_backend
from cupy_flash.calls.check.modifications import NO_USER_MODS, ModificationKey, UserMods
from cupy_flash.calls.check.partials import Partials, spec_of_call, stacked
from cupy_flash.calls.check.problems import problem_of
from cupy_flash.calls.conversions import conversions, converted
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.allocate import as_tensor
from cupy_flash.calls.gpu.forward import ATTENTION
from cupy_flash.calls.gpu.merge import MERGE
from cupy_flash.calls.gpu.sharded_append import APPEND, AppendedRows, CacheSharding
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.calls.options import Options, plain_options, with_offsets
from cupy_flash.cpu import combine as cpu_combine
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import compiler
from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch


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
    mod_key, user_mods = None, NO_USER_MODS
    options, modifications = with_offsets(options, modifications)
    if modifications:
        arguments, mod_key, user_mods = with_modifications(arguments, modifications)
    options = plain_options(options)
    if mod_key is None and arguments.q.__class__ is np.ndarray and options.kind == "dense":
        fast_result = host_forward.repeated(arguments, options, backend)
        if fast_result is not None:
            return fast_result if options.return_lse else fast_result[0]
    if backend == "auto":
        # Fast path of common calls, without the checks that arrays of these types always pass.
        like = arguments.q if arguments.qkv is None else arguments.qkv
        if (
            arguments.k_scale is not None
            or arguments.v_scale is not None
            or arguments.q_scale is not None
        ):
            arguments = _copy_scales_to_gpu(arguments)
        if is_cupy_type(like.__class__):
            fast_result = prepared_calls.run(
                ATTENTION, arguments, options, keys, True, user_mods, mod_key
            )
            if fast_result is not None:
                return fast_result if options.return_lse else fast_result[0]
        elif is_torch_on_gpu(*arguments.key_arrays(options)):
            return _torch_attention(arguments, options, keys, user_mods, mod_key)
        elif options.kind == "dense" and arguments.out is None and mod_key is None:
            fast_result = _jax_attention(arguments, options)
            if fast_result is not None:
                return fast_result
    require_backend(backend)
    require_given(arguments, options)
    if mod_key is not None:
        options = options.with_mod_key(mod_key)
    options = options.with_separate_qkv()
    as_qkv = None
    if arguments.qkv is not None and arguments.qkv.__class__ is not np.ndarray:
        # NumPy and CuPy slice without a copy. JAX copies, and DLPack itself defines no slices.
        qkv = kinds.read("qkv", arguments.qkv)
        as_qkv = kinds.result_converter("qkv", arguments.qkv)
        arguments = arguments._replace(qkv=qkv)
    arguments = arguments.parts_of_qkv(options.layout)
    if as_qkv is None and all_are(np.ndarray, arguments.key_arrays(options)):
        result, lse = host_forward.forward(arguments, options, keys, backend, user_mods)
        return (result, lse) if options.return_lse else result
    for array, name in zip(_written(arguments, options), ("out", *IN_PLACE), strict=False):
        kinds.require_mutable(name, array)
    given, out = arguments, arguments.out
    arguments, convert = normalized(arguments)
    convert = as_qkv or convert
    if isinstance(arguments.q, np.ndarray):
        result, lse = host_forward.forward(arguments, options, keys, backend, user_mods)
    else:
        require_gpu_backend(backend)
        result, lse = prepared_calls.run(ATTENTION, arguments, options, keys, False, user_mods)
    count_writes(*_written(given, options))
    # The conversion also makes the caller's stream wait for ours, so `out` is converted as well.
    result = convert(result) if out is None else (convert(result), out)[1]
    return (result, convert(lse)) if options.return_lse else result


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


def combine(partials: Partials) -> tuple[Any, Any]:
    """Return the result of `cupy_flash.combine`: out and lse."""
    if is_cupy(partials.out_partial) and is_cupy(partials.lse_partial):
        fast_result = prepared_calls.run(MERGE, partials, None, 0, True)
        if fast_result is not None:
            return fast_result
    out = partials.out
    as_parts = None
    if isinstance(partials.out_partial, (list, tuple)):
        partials, as_parts = stacked(partials)
    partials, convert = normalized(partials)
    convert = as_parts or convert
    if isinstance(partials.out_partial, np.ndarray):
        result, lse = _combine_on_host(partials)
    else:
        result, lse = prepared_calls.run(MERGE, partials, None)
    result = convert(result) if out is None else (convert(result), out)[1]
    count_writes(out)
    return result, convert(lse)


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
    options, modifications = with_offsets(options, modifications)
    if modifications:
        arguments, mod_key, _ = with_modifications(arguments, modifications)
        options = options.with_mod_key(mod_key)
    options = plain_options(options)
    require_backend(backend)
    require_given(arguments, options)
    if arguments.qkv is not None:
        arguments = arguments._replace(qkv=kinds.read("qkv", arguments.qkv))
    arguments, options = arguments.parts_of_qkv(options.layout), options.with_separate_qkv()
    arguments, _ = normalized(arguments)
    arguments = type(arguments)(*map(as_cupy, arguments))
    problem = problem_of(_as_copied(arguments, options), options)
    if arch is not None and backend == "cpu":
        raise ValueError(f"arch is {arch!r}, but backend is 'cpu'; pass only one of them")
    if arch is not None:
        return make_plan(problem, device_for_arch(arch), family=options.family, tile=options.tile)
    if not isinstance(arguments.q, np.ndarray):
        require_gpu_backend(backend)
    elif not host_forward.runs_on_gpu(problem, options, backend):
        tile = cpu_tile(problem, options.family, options.tile)
        return make_cpu_plan(problem, tile, gpu_unavailable())
    else:
        order = host_forward.upload_order(options)
        uploaded = (None if x is None else unallocated_copy(x, order) for x in arguments)
        problem = problem_of(_as_copied(type(arguments)(*uploaded), options), options)
    if reason := gpu_unavailable():
        raise UnsupportedError(f"no GPU to plan for: {reason}; pass an arch such as 'sm_90'")
    return make_plan(problem, current_device(), family=options.family, tile=options.tile)


def _as_copied(arguments: Arguments, options: Options) -> Arguments:
    """Return the arrays with the layouts of the copies that a call would make, unallocated."""
    new = {n: unallocated(*spec) for n, spec in conversions(arguments, options).items()}
    arguments = arguments._replace(**new)
    copied = {
        name: unallocated_copy(array)
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None
        and name in Arguments._fields
        and name not in IN_PLACE
        and not (
            is_readable_in_place(array) and (has_one_batch_stride(array) or not options.is_dense)
        )
    }
    return arguments._replace(**copied)


def _written(arguments: Arguments, options: Options) -> tuple[Any, ...]:
    """Return the given arrays that a call writes: out, then the caches and scales of an append."""
    if options.kind != "kvcache" or arguments.k is None:
        return (arguments.out,)
    names = IN_PLACE if options.compute_scales else CACHES
    return (arguments.out, *[getattr(arguments, name) for name in names])


def all_are(kind: type, given: tuple[Any, ...]) -> bool:
    """Return whether all arrays have exactly this type; absent arrays are ignored."""
    # A loop, because a generator or sets of types take half a microsecond longer.
    for array in given:  # noqa: SIM110
        if array is not None and array.__class__ is not kind:
            return False
    return True


def _torch_attention(
    arguments: Arguments,
    options: Options,
    keys: int,
    user_mods: UserMods,
    mod_key: ModificationKey | None,
) -> Any:
    """Compute attention of GPU tensors without the checks that they always pass (saves 5 us)."""
    require_given(arguments, options)
    name, like = ("q", arguments.q) if arguments.qkv is None else ("qkv", arguments.qkv)
    with kinds.on_torch_stream(name, like):
        result, lse = prepared_calls.run(
            ATTENTION, arguments, options, keys, False, user_mods, mod_key
        )
        count_writes(*_written(arguments, options))
        result = as_tensor(result)
        return (result, as_tensor(lse)) if options.return_lse else result


def _jax_attention(arguments: Arguments, options: Options) -> Any | None:
    """Compute attention of JAX arrays; return None if one cannot be read by its address."""
    memories = []
    for name in ("q", "k", "v"):
        memory = from_jax(name, getattr(arguments, name))
        if memory is None:
            return None
        memories.append(memory)
    result, lse = prepared_calls.run(ATTENTION, Arguments(*memories), options)
    device = memories[0].device
    result = to_jax(result, device)
    return (result, to_jax(lse, device)) if options.return_lse else result


def _combine_on_host(partials: Partials) -> tuple[np.ndarray, np.ndarray]:
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
