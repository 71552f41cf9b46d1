"""Autograd functions of `cupy_flash.torch`, which compute and refuse derivatives of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupy_flash.api.hvp import flash_attention_hvp
from cupy_flash.api.jvp import flash_attention_jvp
from cupy_flash.arrays.torch_arrays import is_tracked, version_of
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.differentiable import DifferentiableCall
from cupy_flash.problem.gradient import ROWS

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

    Its own backward pass receives a direction in q, k and v, and differentiates the dot product of
    this direction and the gradients of q, k and v. This dot product is the derivative of
    sum(dout * out) + sum(dlse * lse) along the direction. Its gradients of q, k and v are the
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
        of_dout, of_dlse, *of_rows = gradients[: 2 + len(ROWS)]
        # The Hessian is symmetric, and the transpose of a tangent is a gradient.
        found = _hessian_product(ctx.of_gradients, tensors, (*of_rows, of_dout), of_dlse)
        # Constants get zeros, and raise an error if autograd needs their gradients.
        zeros = (None if x is None else torch.zeros_like(x) for x in tensors)
        every = (*found, *(None,) * (ctx.count - len(ROWS)), *zeros)
        needed = zip(every, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(x if is_needed else None for x, is_needed in needed)


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
    by_name = dict(zip(call.names, directions, strict=True))
    named = zip(call.names, directions, needed, strict=False)
    require_second_derivative(call, [name for name, x, y in named if x is not None or y])
    moving = [by_name[name] for name in ROWS]
    if any(needed[: len(ROWS)]):
        found = _hessian_product(ctx, tensors, (*moving, None), None)
        for i, x in enumerate(found):
            result[2 + i] = x if needed[i] else None
    if of_dout or of_dlse:
        rows, keywords = inputs[: len(ROWS)], call.keywords(inputs)
        _, of_out, _, of_lse = flash_attention_jvp(*rows, *moving, return_lse=True, **keywords)
        result[:2] = of_out if of_dout else None, of_lse if of_dlse else None
    return result


def _hessian_product(
    ctx: Any,
    tensors: Sequence[Any],
    directions: Sequence[Tensor | None],
    of_dlse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the tangents of gradients along directions in q, k, v, dout and dlse."""
    dout, dlse, *saved = tensors
    call, inputs, (out, _) = _saved_call(ctx.of_call, tuple(saved))
    if dout is None:
        dout = torch.zeros_like(out)
    rows, keywords = inputs[: len(ROWS)], call.keywords(inputs)
    return flash_attention_hvp(
        *(dout, *rows, *directions), dlse=dlse, dlse_tangent=of_dlse, **keywords
    )


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


def require_second_derivative(call: DifferentiableCall, names: Sequence[str]) -> None:
    """Raise NotImplementedError unless gradients of these inputs of a call have derivatives."""
    if call.options.kind != "dense":
        raise no_second_derivative("of packed sequences")
    for name in names:
        if name not in ROWS:
            raise no_second_derivative(f"with respect to {name}")


def no_second_derivative(which: str) -> NotImplementedError:
    """Return the error for a derivative of gradients or tangents that is not computed."""
    return NotImplementedError(
        f"attention of cupy_flash.torch has no second derivative {which}, as in a gradient penalty "
        "or hessian; only q, k and v of dense calls outside of graphs have second derivatives, so "
        "pass other tensors detached"
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
