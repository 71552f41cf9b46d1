"""Autograd functions of `cupy_flash.torch`, which compute and refuse derivatives of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupy_flash.arrays.torch_arrays import is_tracked, version_of
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.differentiable import DifferentiableCall
from cupy_flash.problem.gradient import tangent_of

# `Function.apply` takes 2.5 us longer, for functorch transforms. Calls inside of these use the
# functions of `cupy_flash.torch.transforms` instead.
_Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


# Name of a tensor, the tensor, and its version.
Version = tuple[str, Tensor, int | None]


class FlashAttention(_Function):  # type: ignore[misc]
    """Autograd function of attention that returns out only."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> Any:
        """Compute out of a call."""
        out, _ = _saved(ctx, call, inputs)
        return out

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None
    ) -> tuple[Tensor | None, ...]:
        """Return None for `call`, and a gradient or None for each input."""
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *_gradients(ctx, dout, dlse, saved)
        # This is a graph node even if dout requires no gradient, because saved tensors may.
        return None, *_Gradients.apply(ctx, dout, dlse, *saved)


class FlashAttentionWithLse(FlashAttention):
    """Autograd function of attention that returns out and lse."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> Any:
        """Compute out and lse of a call."""
        return _saved(ctx, call, inputs)


class FlashAttentionWithStatistics(FlashAttention):
    """Autograd function of attention that returns out, lse and row statistics."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> Any:
        """Compute the results of a call, of which only out and lse have gradients."""
        results = _saved(ctx, call, inputs)
        ctx.mark_non_differentiable(*results[2:])
        return results


def _saved(ctx: Any, call: DifferentiableCall, inputs: tuple[Tensor, ...]) -> Any:
    """Compute out, lse and row statistics, and save what the backward pass needs."""
    # Missing gradients stay None: an optimizer treats None and zero differently.
    ctx.set_materialize_grads(False)
    following = call.following_arrays
    if following is None or not (made := torch_autograd.run(inputs + following, call.options)):
        results = call.run(inputs)
        # The forward pass uses the original functions, whose block masks are kept between calls.
        ctx.call_and_record = call.with_functions_kept() if call.modifications else call, None
    else:
        results, result = made
        ctx.call_and_record = call, torch_autograd.record(result, results[:2])
    out_and_lse = results[:2]
    if not call.constants:
        ctx.save_for_backward(*inputs, *out_and_lse)
    else:
        tensors = [x for x in call.constants.values() if isinstance(x, Tensor)]
        ctx.save_for_backward(*inputs, *out_and_lse, *tensors)
    if call.modifications:
        ctx.versions = captured_versions(call)
    return results


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, saved: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    """Return the gradients of a call's inputs. Autograd has checked the versions of `saved`."""
    _, record = ctx.call_and_record
    needed = ctx.needs_input_grad[1:]
    if record is not None:
        result = torch_autograd.gradients(record, saved, dout, dlse, needed)
        if result is not None:
            return result
    call, inputs, results = _saved_call(ctx, saved)
    return pull_back(call, inputs, results, (dout, dlse), needed)


def _saved_call(
    ctx: Any, saved: tuple[Tensor, ...]
) -> tuple[DifferentiableCall, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return a call with its saved constants, its inputs and its results."""
    call, _ = ctx.call_and_record
    if call.modifications:
        require_versions(ctx.versions)
    first = len(call.names)
    inputs, (out, lse, *tensors) = saved[:first], saved[first:]
    names = [name for name, x in call.constants.items() if isinstance(x, Tensor)]
    return call.with_constants(dict(zip(names, tensors, strict=True))), inputs, (out, lse)


class _Gradients(_Function):  # type: ignore[misc]
    """Autograd function of the backward pass of the autograd function with the context `of_call`.

    Its own backward pass receives a direction in the inputs of the call, and differentiates the dot
    product of this direction and the gradients of the inputs. This dot product is the derivative of
    sum(dout * out) + sum(dlse * lse) along the direction. Its gradients of the inputs are the
    product of the Hessian and the direction. Those of dout and dlse are tangents of out and lse.
    """

    @staticmethod
    def forward(
        ctx: Any, of_call: Any, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.of_call = of_call
        ctx.save_for_backward(dout, dlse, *saved)
        return tuple(_gradients(of_call, dout, dlse, saved))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *_second_gradients(ctx, directions, tensors)
        tensors = (None if x is None else _Constant.apply(x) for x in tensors)
        return None, *_SecondGradients.apply(ctx, len(directions), *directions, *tensors)


class _SecondGradients(_Function):  # type: ignore[misc]
    """Autograd function of the backward pass of `_Gradients`, which is linear in the directions.

    It has gradients of the directions only. `torch.autograd.functional.hvp` needs them, because it
    differentiates gradients with respect to the directions.
    """

    @staticmethod
    def forward(ctx: Any, of_gradients: Any, count: int, *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.of_gradients, ctx.count = of_gradients, count
        ctx.save_for_backward(*tensors)
        return tuple(_second_gradients(of_gradients, tensors[:count], tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise no_third_derivative()
        tensors = ctx.saved_tensors[ctx.count :]
        of_dout, of_dlse, *of_inputs = gradients[: 2 + ctx.count]
        call, _ = ctx.of_gradients.of_call.call_and_record
        _, _, *needed = ctx.needs_input_grad
        wrt = _needed_names(call, needed)
        moving = _tangents(call, of_inputs) | {"dout_tangent": of_dout, "dlse_tangent": of_dlse}
        # The Hessian is symmetric, and the transpose of a tangent is a gradient.
        found = _hessian_product(ctx.of_gradients, tensors, moving, wrt)
        # Constants get zeros, and raise an error if autograd needs their gradients.
        zeros = (None if x is None else torch.zeros_like(x) for x in tensors)
        every = (*(found.get(name) for name in call.names), *zeros)
        return None, None, *(x if y else None for x, y in zip(every, needed, strict=True))


class _Constant(_Function):  # type: ignore[misc]
    """Identity, whose backward pass raises an error: there are no third derivatives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise no_third_derivative()


def _second_gradients(
    ctx: Any, directions: Sequence[Tensor | None], tensors: tuple[Any, ...]
) -> list[Tensor | None]:
    """Return a gradient or None for each tensor argument of `_Gradients`."""
    result: list[Tensor | None] = [None] * len(tensors)
    if all(direction is None for direction in directions):
        return result
    call, inputs, _ = _saved_call(ctx.of_call, tensors[2:])
    of_dout, of_dlse, *needed = ctx.needs_input_grad[1:]
    moving, wrt = _tangents(call, directions), _needed_names(call, needed)
    found = _hessian_product(ctx, tensors, moving, wrt)
    result[2 : 2 + len(call.names)] = [found.get(name) for name in call.names]
    if of_dout or of_dlse:
        of_out, of_lse = call.push_forward(inputs, moving)
        result[:2] = of_out if of_dout else None, of_lse if of_dlse else None
    return result


def _tangents(
    call: DifferentiableCall, directions: Sequence[Tensor | None]
) -> dict[str, Tensor | None]:
    """Return a direction in the inputs of a call as tangents by name."""
    return {tangent_of(name): x for name, x in zip(call.names, directions, strict=True)}


def _needed_names(call: DifferentiableCall, needed: Sequence[bool]) -> tuple[str, ...]:
    """Return the names of those inputs of a call for which `needed` is True."""
    return tuple(name for name, is_it in zip(call.names, needed, strict=False) if is_it)


def _hessian_product(
    ctx: Any, tensors: Sequence[Any], moving: dict[str, Tensor | None], wrt: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the tangents of the gradients of the inputs in `wrt` by name.

    `moving` has the tangents of inputs, dout and dlse.
    """
    if not wrt:
        return {}
    dout, dlse, *saved = tensors
    call, inputs, (out, _) = _saved_call(ctx.of_call, tuple(saved))
    dout = torch.zeros_like(out) if dout is None else dout
    found = call.push_forward(inputs, {**moving, "dout": dout, "dlse": dlse}, wrt)
    return dict(zip(wrt, found, strict=True))


def captured_versions(call: DifferentiableCall) -> list[Version]:
    """Return the versions of captured tensors, for `require_versions`.

    Captured tensors without gradients are read in place instead of being saved by autograd, so the
    backward pass has to compare their versions itself.
    """
    captured = (x for mod in call.functions for x in mod.tensors.items())
    return [(name, x, version_of(x)) for name, x in captured if not is_tracked(x)]


def require_versions(versions: list[Version]) -> None:
    """Raise RuntimeError if a tensor has been overwritten since the forward pass."""
    for name, tensor, version in versions:
        if version_of(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {name} of attention is at version {version_of(tensor)}; "
                f"expected version {version} instead"
            )


def no_second_derivative(which: str) -> NotImplementedError:
    """Return the error for a derivative of gradients or tangents that is not computed."""
    return NotImplementedError(
        f"attention of cupy_flash.torch has no second derivative {which}; calls outside of graphs "
        "have those of a gradient penalty, hvp or hessian, in reverse over reverse, forward over "
        "reverse and reverse over forward mode"
    )


def no_third_derivative() -> NotImplementedError:
    """Return the error for a derivative of second derivatives."""
    return NotImplementedError(
        "attention of cupy_flash.torch has no third derivative: second derivatives, as in hvp and "
        "hessian, cannot be differentiated"
    )


def pull_back(
    call: DifferentiableCall,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    needed: tuple[bool, ...],
) -> Sequence[Tensor | None]:
    """Return a gradient for each input, or None if it is not needed."""
    dout, dlse = gradients
    if dout is None and dlse is None:
        return (None,) * len(inputs)
    if dout is None:
        dout = torch.zeros((), dtype=results[0].dtype, device=results[0].device)
        dout = dout.expand(results[0].shape)
    wrt = call.names
    if not all(needed):
        wrt = tuple([name for name, is_needed in zip(wrt, needed, strict=True) if is_needed])
    new = call.pull_back(inputs, results, (dout, dlse), wrt)
    result = dict(zip(wrt, new, strict=True))
    return [result.get(name) for name in call.names]
