"""Attention with tangents, and inside of torch.func transforms: grad, vjp, jvp and vmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from cupy_flash.arrays.kinds import is_number_or_list, seed_and_offset
from cupy_flash.arrays.torch_arrays import (
    IN_TRANSFORM,
    NO_FORWARD_MODE,
    has_tangent,
    in_forward_mode,
    is_in_transform,
    is_traced,
    version_of,
)
from cupy_flash.differentiable import DifferentiableCall
from cupy_flash.mods.keywords import DROPOUT_SEED
from cupy_flash.problem.gradient import tangent_of
from cupy_flash.torch.batching import mapped_results
from cupy_flash.torch.functions import (
    Version,
    captured_versions,
    no_second_derivative,
    no_third_derivative,
    require_versions,
)
from cupy_flash.torch.tracked import with_tracked

_RESULTS = ("out", "lse")
# Gradients of these results.
_GRADIENTS = ("dout", "dlse")
_SUPPORTED = (TransformType.Grad, TransformType.Jvp, TransformType.Vmap)


def are_active() -> bool:
    """Return whether transforms are active, and torch does not trace a graph in addition."""
    return is_in_transform() and not is_traced()


def have_tangents(call: DifferentiableCall, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether a tensor of a call has a tangent, and torch does not trace a graph as well."""
    if not in_forward_mode() or is_traced():
        return False
    _, others = call.with_inputs(lambda _, x: isinstance(x, Tensor) and has_tangent(x))
    return bool(others) or any(map(has_tangent, inputs))


def attention(call: DifferentiableCall, inputs: tuple[Any, ...], return_lse: bool) -> Any:
    """Return the result of a call inside of transforms, or of tensors with tangents.

    Raises
    ------
    NotImplementedError
        Inside of torch.func.functionalize, and for a tangent of a tensor without gradients.
    """
    if any(level.key() not in _SUPPORTED for level in get_interpreter_stack() or ()):
        raise NotImplementedError(f"{call.names[0]} {IN_TRANSFORM}")
    call, inputs = with_tracked(call, inputs)
    call = call.with_functions_kept().with_numbers()
    q = inputs[0]
    # Arrays of all kinds become tensors, which transforms map, and of which autograd detects
    # writes.
    constants = {name: _as_tensor(name, x, q.device) for name, x in call.constants.items()}
    named = {**dict(zip(call.names, inputs, strict=True)), **constants}
    slopes = named.get("alibi_slopes")
    if slopes is not None and not slopes.ndim:
        heads = q.shape[-3 if call.options.layout == "bhsd" else -2]
        named["alibi_slopes"] = slopes.expand(heads)
    versions = captured_versions(call) + _versions_of(named)
    out, lse = _Forward(call, tuple(named), versions).apply(named.values())
    return (out, lse) if return_lse else out


def _as_tensor(name: str, array: Any, device: torch.device) -> Tensor:
    if name == DROPOUT_SEED and is_number_or_list(array):
        array = seed_and_offset(name, array, on_host=True)
    elif isinstance(array, (list, tuple)):
        # Lists of numbers become float64 and int64, which calls convert.
        array = np.asarray(array)
    return torch.as_tensor(array, device=device)


def _versions_of(tensors: Mapping[str, Tensor]) -> list[Version]:
    """Return the versions of the memory of tensors, which transforms do not compare."""
    found = []
    for name, tensor in tensors.items():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        # An alias has the same version. A result itself would refer to the node that keeps it.
        with torch._C._DisableFuncTorch():
            alias = tensor.detach()
        found.append((name, alias, version_of(tensor)))
    return found


class _Operation:
    """Operation on tensors that an autograd function computes, with its rule for vmap.

    The tensors are separate arguments of the autograd function, because torch transforms each of
    them. It does not look into this object.

    Attributes
    ----------
    call
        The attention call. Its tensors are replaced by those that the operation is given.
    names
        Names of the tensors: differentiable inputs of the call, its constants, and others.
    results
        Names of the results.
    versions
        Versions of the tensor arguments of the call.
    wrt
        Names of the inputs whose gradients are among the results.
    """

    function: type[torch.autograd.Function]

    def __init__(
        self,
        call: DifferentiableCall,
        names: tuple[str, ...],
        versions: list[Version],
        wrt: tuple[str, ...] = (),
    ) -> None:
        self.call, self.names, self.versions, self.wrt = call, names, versions, wrt

    def apply(self, tensors: Any) -> tuple[Tensor, ...]:
        """Compute the results as an operation that transforms and autograd record."""
        results: tuple[Tensor, ...] = self.function.apply(self, *tensors)
        return results

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the results of tensors with values, by their names."""
        raise NotImplementedError

    def given(self, tensors: Mapping[str, Tensor]) -> tuple[DifferentiableCall, tuple[Tensor, ...]]:
        """Return the call with the constants that are given, and its inputs."""
        constants = {name: tensors[name] for name in self.call.constants}
        return self.call.with_constants(constants), tuple(tensors[n] for n in self.call.names)

    def mapped(
        self, size: int, tensors: Mapping[str, Tensor], mapped: Sequence[str]
    ) -> tuple[Tensor, ...]:
        """Return the results of many operations, the first axis of the tensors in `mapped`."""
        functions = [mod.traced for mod in self.call.functions]
        results: tuple[Tensor, ...] = mapped_results(
            lambda given: self.apply(given.values()),
            self.call.options.kind,
            *(size, tensors, mapped, functions, self.wrt),
        )
        return results


class _Transformable(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of an `_Operation`, with rules for transforms."""

    @staticmethod
    def forward(operation: _Operation, *tensors: Tensor) -> Any:
        # torch hides the tangents of tensors here, which functions of arrays would refuse.
        return operation.run(dict(zip(operation.names, tensors, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: _Operation, *tensors: Tensor) -> Any:
        named = {}
        mapped = []
        for name, x, axis in zip(operation.names, tensors, in_dims[1:], strict=True):
            named[name] = x if axis is None else x.movedim(axis, 0)
            if axis is not None:
                mapped.append(name)
        results = operation.mapped(info.batch_size, named, mapped)
        return results, (0,) * len(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_third_derivative()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise no_third_derivative()


class _Attention(_Transformable):
    """Autograd function of attention, which returns out and lse."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _Transformable.setup_context(ctx, inputs, output)
        _, *tensors = inputs
        ctx.versions = ctx.operation.versions + _versions_of(
            dict(zip(_RESULTS, output, strict=True))
        )
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _, *of_tensors = tangents
        call, names = ctx.operation.call, ctx.operation.names
        tensors = dict(zip(names, ctx.saved_tensors, strict=True))
        for name, tangent in zip(names, of_tensors, strict=True):
            if tangent is None:
                continue
            if name not in call.names:
                raise NotImplementedError(f"{name} {NO_FORWARD_MODE}")
            tensors[tangent_of(name)] = tangent
        return _Pushforward(call, tuple(tensors), ctx.versions).apply(tensors.values())

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        require_versions(ctx.versions)
        operation = ctx.operation
        _, *needed = ctx.needs_input_grad
        wrt = tuple(n for n, is_it in zip(operation.names, needed, strict=True) if is_it)
        if dout is None and dlse is None:
            return (None,) * (len(needed) + 1)
        tensors = dict(zip((*operation.names, *_RESULTS), ctx.saved_tensors, strict=True))
        gradients = {"dout": torch.zeros_like(tensors["out"]) if dout is None else dout}
        if dlse is not None:
            gradients["dlse"] = dlse
        tensors |= gradients
        versions = ctx.versions + _versions_of(gradients)
        made = _Backward(operation.call, tuple(tensors), versions, wrt).apply(tensors.values())
        result = dict(zip(wrt, made, strict=True))
        return None, *(result.get(name) for name in operation.names)


class _Derivative(_Transformable):
    """Autograd function of gradients or tangents."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Transformable.setup_context(ctx, inputs, output)
        _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


def _tensors_of(ctx: Any) -> dict[str, Tensor]:
    """Return the tensor arguments of a derivative by name, after a check of their versions."""
    require_versions(ctx.operation.versions)
    return dict(zip(ctx.operation.names, ctx.saved_tensors, strict=True))


def _needed(ctx: Any) -> list[str]:
    """Return the names of the tensors of a derivative whose gradients are needed."""
    _, *needed = ctx.needs_input_grad
    return [name for name, is_it in zip(ctx.operation.names, needed, strict=True) if is_it]


class _Gradients(_Derivative):
    """Autograd function of gradients.

    The arguments out and lse have no derivatives, because they are functions of the inputs: the
    tangents of the inputs determine theirs.
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        operation, (_, *of_tensors) = ctx.operation, tangents
        named = zip(operation.names, of_tensors, strict=True)
        moving = {n: x for n, x in named if x is not None and n not in _RESULTS}
        tensors = _tensors_of(ctx) | {tangent_of(name): x for name, x in moving.items()}
        return _Hessian.of(operation, tensors, operation.wrt).apply(tensors.values())

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        operation, needed = ctx.operation, _needed(ctx)
        of_inputs = zip(operation.wrt, directions, strict=True)
        moving = {tangent_of(name): x for name, x in of_inputs if x is not None}
        if not moving:
            return (None,) * (len(operation.names) + 1)
        inputs = tuple(n for n in needed if n not in (*_RESULTS, *_GRADIENTS))
        tensors = _tensors_of(ctx)
        result: dict[str, Tensor] = {}
        if inputs:
            given = tensors | moving
            found = _Hessian.of(operation, given, inputs).apply(given.values())
            result = dict(zip(inputs, found, strict=True))
        if any(name in needed for name in _GRADIENTS):
            given = {n: x for n, x in tensors.items() if n not in (*_RESULTS, *_GRADIENTS)} | moving
            tangents = _Pushforward(operation.call, tuple(given), operation.versions)
            result |= zip(_GRADIENTS, tangents.apply(given.values()), strict=True)
        return None, *(result.get(name) if name in needed else None for name in operation.names)


class _TangentsOfResults(_Derivative):
    """Autograd function of tangents. Its gradients are those of attention and their tangents."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_second_derivative("that is the tangent of a tangent")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        operation, needed = ctx.operation, _needed(ctx)
        of_results = zip(_GRADIENTS, gradients, strict=True)
        given = {name: x for name, x in of_results if x is not None}
        if not given:
            return (None,) * (len(operation.names) + 1)
        tensors = _tensors_of(ctx)
        q, v = tensors["q"], tensors["v"]
        given.setdefault("dout", q.new_zeros((*q.shape[:-1], v.shape[-1])))
        of_tangents = {tangent_of(name): name for name in operation.call.names}
        inputs = tuple(name for name in needed if name not in of_tangents)
        result: dict[str, Tensor] = {}
        if inputs:
            found = _Hessian.of(operation, tensors | given, inputs)
            result = dict(zip(inputs, found.apply((tensors | given).values()), strict=True))
        moving = tuple(name for name in of_tangents if name in needed)
        if moving:
            # The gradients are linear in dout and dlse. Their tangent along (dout, dlse) is
            # therefore the gradient for this dout and dlse.
            still = {name: x for name, x in tensors.items() if name not in of_tangents} | given
            still |= {tangent_of(name): x for name, x in given.items()}
            wrt = tuple(of_tangents[name] for name in moving)
            found = _Hessian.of(operation, still, wrt)
            result |= zip(moving, found.apply(still.values()), strict=True)
        return None, *(result.get(name) for name in operation.names)


class _Forward(_Operation):
    """Attention, with the results out and lse."""

    function = _Attention

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        call, inputs = self.given(tensors)
        results: tuple[Tensor, Tensor] = call.run(inputs)
        return results


class _Backward(_Operation):
    """Gradients of attention for the inputs in `wrt`."""

    function = _Gradients

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        call, inputs = self.given(tensors)
        # Without its own memory, out would be refused, as arrays are that calls write to.
        results = tensors["out"].contiguous(), tensors["lse"].contiguous()
        gradients = tensors["dout"], tensors.get("dlse")
        return call.pull_back(inputs, results, gradients, self.wrt)


class _Pushforward(_Operation):
    """Tangents of out and lse of a call, whose tensors include tangents of its inputs."""

    function = _TangentsOfResults

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        call, inputs = self.given(tensors)
        return call.push_forward(inputs, tensors)


class _Hessian(_Operation):
    """Tangents of the gradients in `wrt` of a call, whose tensors include tangents."""

    function = _Transformable

    @classmethod
    def of(
        cls, operation: _Operation, tensors: Mapping[str, Tensor], wrt: tuple[str, ...]
    ) -> _Hessian:
        """Return the operation for the call of another operation."""
        return cls(operation.call, tuple(tensors), operation.versions, wrt)

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        call, inputs = self.given(tensors)
        return call.push_forward(inputs, tensors, self.wrt)
