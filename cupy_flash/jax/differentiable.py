"""Calls under JAX's autodiff: computed at once for arrays with values, traced for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cupy_flash.arrays.kinds import elements, host_array_on_gpu, unshared
from cupy_flash.differentiable import WITH_GRADIENT, DifferentiableCall, with_plain_dropout
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.jax import traced
from cupy_flash.jax.static_call import StaticCall, function_tokens
from cupy_flash.jax.versions import with_common_axes
from cupy_flash.mods.keywords import (
    ARRAYS,
    DROPOUT_P,
    DROPOUT_SEED,
    checked_softcap,
    require_known,
    window_of,
)
from cupy_flash.problem.gradient import ROWS

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def attention(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a call; out and lse are differentiable by JAX.

    Raises
    ------
    TypeError
        If an argument other than q, k, v, bias and sinks is differentiated, or a statistic is.
    """
    # The caller may overwrite NumPy and CuPy arrays before the gradients are computed.
    call = _with_arrays(call.with_functions_kept(), lambda _, array: unshared(array))
    constants = {n: x for n, x in call.constants.items() if isinstance(x, jax.Array)}
    names = (*call.names, *constants)
    count = len(call.names)
    # Words of a seed are an operand of a traced call only.
    may_compute = DROPOUT_SEED not in constants

    def run(*arrays: Any) -> tuple[Any, ...]:
        given = call.with_constants(dict(zip(constants, arrays[count:], strict=True)))
        if may_compute and _have_values(arrays):
            results: tuple[Any, ...] = _computed(
                given, arrays[:count], lambda call, placed: call.run(placed)
            )
            return results
        made = _traced(given, dict(zip(call.names, arrays, strict=False)), given.options)
        return results_of(made, given.options)

    def forward(*primals: Any) -> tuple[Any, ...]:
        wrt = tuple(name for name, x in zip(names, primals, strict=True) if x.perturbed)
        for name in wrt:
            require_gradient(name)
        arrays = tuple(unshared(x.value) for x in primals)
        results = run(*arrays)
        # The names are keys, because JAX keeps only arrays and the structure around them.
        return results, (arrays, results[:2], dict.fromkeys(wrt))

    def backward(saved: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays, results, wrt = saved
        wrt = tuple(name for name in call.names if name in wrt)
        dout, dlse, *others = (None if _is_zero(x) else x for x in gradients)
        for name, gradient in zip(call.options.statistics, others, strict=True):
            if gradient is not None:
                raise TypeError(
                    f"{name} is differentiated by JAX, but has no gradient; pass it through "
                    "jax.lax.stop_gradient"
                )
        # Whether this function makes one of the arrays, to which nobody else refers.
        makes_array = dout is None
        if dout is None:
            dout = jax.numpy.zeros_like(results[0])
        given = call.with_constants(dict(zip(constants, arrays[count:], strict=True)))
        if may_compute and _have_values((*arrays, *results, dout, dlse)):
            # JAX creates the zero gradient of an unused result on its default device.
            (device,) = results[0].devices()
            makes_array |= any(x is not None and not _is_on(device, x) for x in (dout, dlse))
            dout, dlse = jax.device_put((dout, dlse), device)
            new = _computed(
                given,
                arrays[:count],
                lambda call, placed: call.pull_back(placed, results, (dout, dlse), wrt),
                waits=makes_array,
            )
            made = dict(zip(wrt, new, strict=True))
        else:
            of_results = zip(("out", "lse"), results, strict=True)
            of_gradients = {"dout": dout, "dlse": dlse}
            named = dict(zip(call.names, arrays, strict=False)) | dict(of_results) | of_gradients
            made = _traced(given, named, given.backward_options(wrt))
        return tuple(made.get(name) for name in names)

    function = jax.custom_vjp(run)
    function.defvjp(forward, backward, symbolic_zeros=True)
    given = with_common_axes((*inputs, *constants.values()))
    result: tuple[Any, ...] = function(*given)
    return result


def results_of(made: Mapping[str, Any], options: Any) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a traced call, given its results by name."""
    return tuple(made[name] for name in ("out", "lse", *options.statistics))


def without_gradient(static: StaticCall, operands: tuple[Any, ...], why: str) -> dict[str, Any]:
    """Return the results of a call; raise TypeError with the reason if it is differentiated."""

    def run(*arrays: Any) -> dict[str, Any]:
        return traced.call(static, arrays)

    def forward(*primals: Any) -> Any:
        raise TypeError(why)

    function = jax.custom_vjp(run)
    function.defvjp(forward, lambda *_: ())
    results: dict[str, Any] = function(*with_common_axes(operands))
    return results


def require_constants(values: Mapping[str, Any]) -> None:
    """Raise TypeError for numbers that are traced, and for traced values in lists."""
    for name, value in values.items():
        if not any(isinstance(x, jax.core.Tracer) for x in elements(value)):
            continue
        if name in _NUMBERS:
            raise TypeError(
                f"{name} is traced by JAX; pass a value, which under jax.jit is a static argument: "
                "only arrays may be traced"
            )
        if isinstance(value, (list, tuple)):
            raise TypeError(
                f"{name} holds values that are traced by JAX; pass numbers, or one array, because "
                "lists have no gradients"
            )


# Numbers that select kernels, or are compiled into them.
_NUMBERS = (
    *("causal", "softmax_scale", "window_size", "softcap", "max_seqlen_q", "max_seqlen_k"),
    DROPOUT_P,
)


def require_gradient(name: str) -> None:
    """Raise TypeError if an argument that is differentiated has no gradient."""
    if name not in (*ROWS, *WITH_GRADIENT):
        raise TypeError(
            f"{name} is differentiated by JAX; pass jax.lax.stop_gradient({name}): only q, k, v, "
            "bias and sinks have gradients"
        )


def static_of(
    options: Any, arrays: Mapping[str, Any], modifications: Mapping[str, Any], keys: int = 0
) -> tuple[StaticCall, tuple[Any, ...]]:
    """Return a call as `traced.call` takes it, with its operands.

    Parameters
    ----------
    options
        Options of the call.
    arrays
        Arrays of the call by name, absent ones being None. It has q.
    modifications
        Modifications of the call.
    keys
        Length of every cached sequence, see `StaticCall`.
    """
    for name in modifications:
        require_known(name)
    modifications = with_plain_dropout(modifications)
    given = {name: x for name, x in {**modifications, **arrays}.items() if x is not None}
    read = {"window_size": window_of, "softcap": checked_softcap, DROPOUT_P: float}
    numbers = {name: read[name](given[name]) for name in read if name in given}
    tokens = function_tokens(modifications)
    q = jax.numpy.asarray(arrays["q"])
    others = {name for name, _ in tokens} | numbers.keys()
    operands = {
        name: traced.operand(name, value, q, options.layout)
        for name, value in given.items()
        if name not in others
    }
    static = StaticCall(
        tuple(operands),
        options._replace(return_lse=True),
        keys,
        tuple((n, tuple(x) if isinstance(x, tuple) else x) for n, x in numbers.items()),
        tokens,
        tuple(name for name in operands if traced.is_pairs(name, given[name])),
    )
    return static, tuple(operands.values())


def _traced(call: DifferentiableCall, inputs: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Return the results of a traced forward or backward call by name."""
    lengths = dict(zip(_LENGTHS, call.lengths, strict=True))
    static, operands = static_of(options, {**inputs, **lengths}, call.modifications)
    return traced.call(static, operands)


def _is_zero(gradient: Any) -> bool:
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


def _have_values(arrays: tuple[Any, ...]) -> bool:
    """Return whether all arrays have values, on a single device."""
    return not any(
        isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and len(x.devices()) > 1)
        for x in arrays
    )


def _is_on(device: Any, array: Any) -> bool:
    return isinstance(array, jax.Array) and array.devices() == {device}


def _with_arrays(call: DifferentiableCall, change: Callable[[str, Any], Any]) -> DifferentiableCall:
    """Return the call with its length and modification arrays replaced by `change(name, array)`."""
    lengths = tuple(map(change, _LENGTHS, call.lengths))
    modifications = {
        name: change(name, value) if name in ARRAYS else value
        for name, value in call.modifications.items()
    }
    changed = {**dict(zip(_LENGTHS, lengths, strict=True)), **modifications}
    constants = {name: changed[name] for name in call.constants}
    return call._replace(lengths=lengths, modifications=modifications, constants=constants)


def _computed(
    call: DifferentiableCall,
    inputs: tuple[Any, ...],
    compute: Callable[[DifferentiableCall, tuple[Any, ...]], Any],
    *,
    waits: bool = False,
) -> Any:
    """Return `compute(call, inputs)` with NumPy arrays copied to the device of the JAX arrays.

    That device is CuPy's current device meanwhile: JAX chooses a device by its arrays, not by the
    current device. If arrays are copied to a GPU, or if `waits`, the function returns when the GPU
    has computed the result: once nobody refers to a copy, JAX may overwrite its memory, even if a
    kernel on CuPy's stream has still to read it.
    """
    places = (array.devices() for array in inputs if isinstance(array, jax.Array))
    # If all inputs are NumPy arrays, None selects JAX's default device.
    (device, *_) = next(places, (None,))
    waits |= not all(isinstance(array, jax.Array) for array in inputs)
    inputs = tuple(
        # Copied first, because JAX may read the memory after `device_put` has returned. Some
        # versions of JAX wrap NumPy arrays in a type of their own.
        array if isinstance(array, jax.Array) else jax.device_put(np.array(array), device)
        for array in inputs
    )
    (device, *_) = inputs[0].devices()
    if device.platform != "gpu":
        return compute(call, inputs)
    with cupy_module().cuda.Device(device.local_hardware_id):
        # Host arrays of the call become CuPy arrays: JAX would narrow a uint64 tree_mask to uint32.
        call = _with_arrays(call.with_captures(host_array_on_gpu), host_array_on_gpu)
        results = compute(call, inputs)
        if waits:
            cupy_module().cuda.get_current_stream().synchronize()
        return results
