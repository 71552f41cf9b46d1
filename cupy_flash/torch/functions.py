"""Autograd functions of `cupy_flash.torch`, which compute and refuse derivatives of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupy_flash.arrays.torch_arrays import is_tracked, version_of
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.differentiable import DifferentiableCall

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
    call, record = ctx.call_and_record
    needed = ctx.needs_input_grad[1:]
    if record is not None:
        result = torch_autograd.gradients(record, saved, dout, dlse, needed)
        if result is not None:
            return result
    if call.modifications:
        require_versions(ctx.versions)
    first = len(call.names)
    inputs, (out, lse, *tensors) = saved[:first], saved[first:]
    names = [name for name, x in call.constants.items() if isinstance(x, Tensor)]
    call = call.with_constants(dict(zip(names, tensors, strict=True)))
    return pull_back(call, inputs, (out, lse), (dout, dlse), needed)


class _Gradients(_Function):  # type: ignore[misc]
    """Autograd function of the backward pass, whose own derivative raises an error."""

    @staticmethod
    def forward(
        ctx: Any, of_call: Any, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> Any:
        return tuple(_gradients(of_call, dout, dlse, saved))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise no_second_derivative()


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


def no_second_derivative() -> NotImplementedError:
    """Return the error for a derivative of gradients."""
    return NotImplementedError(
        "attention of cupy_flash.torch has no second derivative: derivatives of its gradients and "
        "tangents, as in a gradient penalty, hvp, hessian or functional.jvp, are not computed"
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
