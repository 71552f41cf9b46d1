"""Calls under JAX's autodiff: computed at once for arrays with values, traced for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cupy_flash.arrays.kinds import elements, host_array_on_gpu, unshared
from cupy_flash.calls.key_lists.backward import require_gradients_of_lists
from cupy_flash.differentiable import WITH_GRADIENT, DifferentiableCall, with_plain_dropout
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.jax import traced
from cupy_flash.jax.linear import Linear, differentiable, linear
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
from cupy_flash.problem.gradient import ROWS, tangent_of

_RESULTS = ("out", "lse")
_GRADIENTS = ("dout", "dlse")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def attention(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a call; out and lse are differentiable by JAX.

    Raises
    ------
    TypeError
        If an argument other than q, k, v, bias and sinks is differentiated, if a statistic is
        differentiated, or if a call that returns statistics is differentiated in forward mode.
    NotImplementedError
        If a third derivative is requested, or a tangent of a tangent.
    """
    # The caller may overwrite NumPy and CuPy arrays before the gradients are computed.
    call = _with_arrays(call.with_functions_kept(), lambda _, array: unshared(array))
    # JAX differentiates the conversion of sinks to the dtype and the shape that kernels read.
    inputs = tuple(
        traced.operand(name, x, inputs[0], call.options.layout)
        if name == "sinks" and isinstance(x, jax.Array)
        else x
        for name, x in zip(call.names, inputs, strict=True)
    )
    constants = {n: x for n, x in call.constants.items() if isinstance(x, jax.Array)}
    given = with_common_axes((*inputs, *constants.values()))
    result: tuple[Any, ...] = _Differentiated(call, tuple(constants)).function(*given)
    return result


class _Differentiated:
    """Differentiable function of JAX that computes a call, with its gradients and tangents.

    Parameters
    ----------
    call
        Call whose inputs and constants are separate arrays.
    constants
        Names of the constants that are JAX arrays. They follow the inputs among the arrays.
    """

    def __init__(self, call: DifferentiableCall, constants: tuple[str, ...]) -> None:
        self._call, self._constants = call, constants
        self._names = (*call.names, *constants)
        # Words of a seed are an operand of a traced call only.
        self._may_compute = DROPOUT_SEED not in constants
        self.function = differentiable(self._run, self._tangents)

    def _run(self, *arrays: Any) -> tuple[Any, ...]:
        """Return out, lse and row statistics."""
        named = dict(zip(self._names, arrays, strict=True))
        call, inputs = self._given(named)
        if self._are_computed(arrays):
            results: tuple[Any, ...] = _computed(call, inputs, lambda call, x: call.run(x))
            return results
        made = _traced(call, dict(zip(call.names, inputs, strict=True)), call.options)
        return results_of(made, call.options)

    def _given(self, arrays: dict[str, Any]) -> tuple[DifferentiableCall, tuple[Any, ...]]:
        """Return the call with its constants replaced by those of `arrays`, and its inputs."""
        call = self._call.with_constants({name: arrays[name] for name in self._constants})
        return call, tuple(arrays[name] for name in call.names)

    def _are_computed(self, arrays: Iterable[Any]) -> bool:
        """Return whether a call with these arrays is computed at once."""
        return self._may_compute and _have_values(arrays)

    def _tangents(self, primals: tuple[Any, ...], moving: dict[int, Any]) -> tuple[Any, Any]:
        """Return the results, and their tangents as a linear operation."""
        tangents = {self._names[i]: x for i, x in moving.items()}
        for name in tangents:
            require_gradient(name)
        arrays = dict(zip(self._names, map(unshared, primals), strict=True))
        results = self.function(*arrays.values())
        out, lse, *of_rows = results
        arrays |= zip(_RESULTS, (out, lse), strict=True)
        statistics = dict(zip(self._call.options.statistics, of_rows, strict=True))
        # NumPy and CuPy arrays are constants of the operation, and are not converted.
        operands = {name: x for name, x in arrays.items() if isinstance(x, jax.Array)}
        rule = self._rule_of_tangents(arrays, tuple(statistics), tuple(tangents))
        like = (*_RESULTS, *statistics)
        return results, linear(rule, operands | statistics, tangents, like)

    def _rule_of_tangents(
        self, arrays: dict[str, Any], statistics: tuple[str, ...], wrt: tuple[str, ...]
    ) -> Linear:
        """Return the linear operation that gives the tangents of results.

        Parameters
        ----------
        arrays
            Arrays of the call, out and lse by name.
        statistics
            Names of the row statistics among the results.
        wrt
            Names of the inputs with tangents.
        """

        def given(residuals: dict[str, Any]) -> dict[str, Any]:
            return arrays | {n: x for n, x in residuals.items() if n not in statistics}

        def push(residuals: dict[str, Any], tangents: dict[str, Any]) -> tuple[Any, ...]:
            for name in statistics:
                raise TypeError(f"{name} has no tangent in cupy_flash.jax; do not request it")
            return self._pushed(given(residuals), _named_tangents(tangents), None)

        def pull(residuals: dict[str, Any], gradients: Sequence[Any]) -> dict[str, Any]:
            dout, dlse, *others = gradients
            for name, gradient in zip(statistics, others, strict=True):
                if gradient is not None:
                    raise TypeError(
                        f"{name} is differentiated by JAX, but has no gradient; pass it through "
                        "jax.lax.stop_gradient"
                    )
            found = self._pulled(given(residuals), (dout, dlse), wrt)
            return dict(zip(wrt, found, strict=True))

        def moved(
            residuals: dict[str, Any], tangents: dict[str, Any], moved: dict[str, Any]
        ) -> tuple[Any, ...]:
            for name in statistics:
                raise TypeError(f"a call that returns {name} has no second derivative")
            moved = {name: x for name, x in moved.items() if name not in _RESULTS}
            for name in moved:
                require_gradient(name)
            along = _named_tangents(tangents)

            def pull_moved(residuals: dict[str, Any], gradients: Sequence[Any]) -> dict[str, Any]:
                both = _with_gradients(arrays | residuals, *gradients)
                moving = {name: both[name] for name in (*along, *_GRADIENTS) if name in both}
                found = self._pushed(both, moving, tuple(moved))
                return dict(zip(moved, found, strict=True))

            rule = Linear(_refuse_tangent, pull_moved, _refuse_third)
            return linear(rule, residuals | along, moved, _RESULTS)

        return Linear(push, pull, moved)

    def _pulled(
        self, arrays: dict[str, Any], gradients: Sequence[Any], wrt: tuple[str, ...]
    ) -> tuple[Any, ...]:
        """Return the gradients of inputs as an operation that is differentiable itself."""
        given = _with_gradients(arrays, *gradients)
        makes_dout = gradients[0] is None
        names = tuple(given)

        def run(*arrays: Any) -> tuple[Any, ...]:
            return self._gradients(dict(zip(names, arrays, strict=True)), wrt, waits=makes_dout)

        def rule(primals: tuple[Any, ...], moving: dict[int, Any]) -> tuple[Any, Any]:
            tangents = {names[i]: x for i, x in moving.items() if names[i] not in _RESULTS}
            for name in tangents.keys() - set(_GRADIENTS):
                require_gradient(name)
            arrays = dict(zip(names, primals, strict=True))
            operands = {name: x for name, x in arrays.items() if isinstance(x, jax.Array)}
            made = self._rule_of_gradients(arrays, wrt, tuple(tangents))
            return function(*primals), linear(made, operands, tangents, wrt)

        function = differentiable(run, rule)
        return function(*given.values())

    def _rule_of_gradients(
        self, arrays: dict[str, Any], wrt: tuple[str, ...], moving: tuple[str, ...]
    ) -> Linear:
        """Return the linear operation that gives the tangents of gradients.

        Parameters
        ----------
        arrays
            Arrays of the backward call by name.
        wrt
            Names of the inputs whose gradients have tangents.
        moving
            Names of the arrays with tangents: inputs, dout and dlse.
        """
        inputs = tuple(name for name in moving if name not in _GRADIENTS)

        def gradients_in(arrays: dict[str, Any]) -> dict[str, Any]:
            return {name: arrays[name] for name in _GRADIENTS if name in arrays}

        def push(residuals: dict[str, Any], tangents: dict[str, Any]) -> tuple[Any, ...]:
            given = arrays | residuals
            return self._pushed(given, _named_tangents(tangents) | gradients_in(given), wrt)

        def pull(residuals: dict[str, Any], directions: Sequence[Any]) -> dict[str, Any]:
            given = arrays | residuals
            along = {n: x for n, x in zip(wrt, directions, strict=True) if x is not None}
            along = _named_tangents(along)
            found: dict[str, Any] = {}
            if inputs:
                products = self._pushed(given, along | gradients_in(given), inputs)
                found |= zip(inputs, products, strict=True)
            if any(name in moving for name in _GRADIENTS):
                found |= zip(_GRADIENTS, self._pushed(given, along, None), strict=True)
            return {name: found[name] for name in moving}

        return Linear(push, pull, _refuse_third)

    def _gradients(
        self, arrays: dict[str, Any], wrt: tuple[str, ...], *, waits: bool
    ) -> tuple[Any, ...]:
        """Return gradients; `waits` if one of the arrays exists only for this computation."""
        call, inputs = self._given(arrays)
        if call.key_indices is not None:
            require_gradients_of_lists(wrt)
        if not self._are_computed(arrays.values()):
            named = {n: x for n, x in arrays.items() if n not in self._constants}
            made = _traced(call, named, call.backward_options(wrt))
            return tuple(made[name] for name in wrt)
        results = arrays["out"], arrays["lse"]
        gradients = arrays["dout"], arrays.get("dlse")
        # JAX creates the zero gradient of an unused result on its default device.
        (device,) = results[0].devices()
        waits |= any(x is not None and not _is_on(device, x) for x in gradients)
        gradients = jax.device_put(gradients, device)
        new: tuple[Any, ...] = _computed(
            *(call, inputs),
            lambda call, placed: call.pull_back(placed, results, gradients, wrt),
            waits=waits,
        )
        return new

    def _pushed(
        self, arrays: dict[str, Any], moving: dict[str, Any], wrt: tuple[str, ...] | None
    ) -> tuple[Any, ...]:
        """Return tangents of out and lse, or of the gradients of the inputs in `wrt`.

        `moving` has the arrays that `DifferentiableCall.push_forward` takes.
        """
        call, inputs = self._given(arrays)
        call.require_tangents()
        if not self._are_computed((*arrays.values(), *moving.values())):
            named = dict(zip(call.names, inputs, strict=True)) | moving
            options = call.options if wrt is None else call.backward_options(wrt)
            made = _traced(call, named, options)
            return tuple(made[name] for name in (_RESULTS if wrt is None else wrt))

        def compute(call: DifferentiableCall, placed: tuple[Any, ...]) -> tuple[Any, ...]:
            given = jax.device_put(moving, next(iter(placed[0].devices())))
            return call.push_forward(placed, given, wrt)

        result: tuple[Any, ...] = _computed(call, inputs, compute, waits=True)
        return result


def _named_tangents(tangents: Mapping[str, Any]) -> dict[str, Any]:
    """Return tangents by their own names, given the names of their arrays."""
    return {tangent_of(name): x for name, x in tangents.items()}


def _with_gradients(arrays: Mapping[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    """Return the arrays with dout, which is zeros if it is None, and dlse unless it is None."""
    dout = jax.numpy.zeros_like(arrays["out"]) if dout is None else dout
    return {**arrays, "dout": dout} | ({} if dlse is None else {"dlse": dlse})


def _refuse_tangent(*_: Any) -> Any:
    raise NotImplementedError(
        "a tangent of attention has no tangent in cupy_flash.jax; compute second derivatives by "
        "jax.jvp of jax.grad, jax.hessian or jax.grad of a tangent"
    )


def _refuse_third(*_: Any) -> Any:
    raise NotImplementedError("attention has no third derivatives in cupy_flash.jax")


def results_of(made: Mapping[str, Any], options: Any) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a traced call, given its results by name."""
    return tuple(made[name] for name in (*_RESULTS, *options.statistics))


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
    arrays = {**inputs, **dict(zip(_LENGTHS, call.lengths, strict=True))}
    arrays["key_indices"] = call.key_indices
    static, operands = static_of(options, arrays, call.modifications)
    return traced.call(static, operands)


def _have_values(arrays: Iterable[Any]) -> bool:
    """Return whether all arrays have values, on a single device."""
    return not any(
        isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and len(x.devices()) > 1)
        for x in arrays
    )


def _is_on(device: Any, array: Any) -> bool:
    return isinstance(array, jax.Array) and array.devices() == {device}


def _with_arrays(call: DifferentiableCall, change: Callable[[str, Any], Any]) -> DifferentiableCall:
    """Return the call with its constant arrays replaced by `change(name, array)`."""
    lengths = tuple(map(change, _LENGTHS, call.lengths))
    modifications = {
        name: change(name, value) if name in ARRAYS else value
        for name, value in call.modifications.items()
    }
    lists = change("key_indices", call.key_indices)
    changed = {**dict(zip(_LENGTHS, lengths, strict=True)), **modifications, "key_indices": lists}
    constants = {name: changed[name] for name in call.constants}
    return call._replace(
        lengths=lengths, modifications=modifications, constants=constants, key_indices=lists
    )


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
