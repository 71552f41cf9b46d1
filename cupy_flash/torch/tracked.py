"""Arguments of calls that autograd records: inputs, and constants that are kept or refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from cupy_flash.arrays.kinds import elements
from cupy_flash.arrays.torch_arrays import (
    has_tangent,
    in_forward_mode,
    is_any_tensor,
    is_recorded,
    is_tracked,
)
from cupy_flash.differentiable import DifferentiableCall


def with_tracked(
    call: DifferentiableCall, inputs: tuple[Any, ...]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """Return a call whose slopes and captures are differentiable inputs if they are differentiated.

    These are tensors that require gradients, have tangents, or belong to a transform.

    Raises
    ------
    ValueError
        For another tensor that requires a gradient, which attention does not compute.
    """
    call, tracked = call.with_inputs(
        lambda _, x: is_tracked(x) or (in_forward_mode() and is_any_tensor(x) and has_tangent(x))
    )
    _require_constants(call)
    return call, (*inputs, *tracked)


def _require_constants(call: DifferentiableCall) -> None:
    """Raise ValueError for a tensor that requires a gradient which attention does not compute."""
    masks = call.modifications.get("mask_mod")
    captured: dict[str, Tensor] = {} if masks is None else dict(masks.tensors)
    for name, value in {**call.modifications, **captured}.items():
        if not any(map(is_recorded, elements(value))):
            continue
        if isinstance(value, (list, tuple)):
            raise ValueError(
                f"{name} holds a tensor that requires a gradient; pass numbers or detached "
                "tensors: lists have no gradients, but a bias, sinks and slopes that are tensors do"
            )
        raise ValueError(
            f"{name} requires a gradient; pass it detached: only q, k, v, bias, sinks, slopes and "
            "captures of a ScoreMod have gradients"
        )


def as_it_is_now(call: DifferentiableCall) -> DifferentiableCall:
    """Return the call with copies of arguments that may change before the backward pass.

    Autograd detects writes to tensors. Lists, and arrays of other libraries, are copied.
    """
    # Most calls have neither constants nor modifications.
    if not call.constants and not call.modifications:
        return call
    others = {n: x for n, x in call.constants.items() if not isinstance(x, Tensor)}
    if others:
        call = call.with_constants(copy.deepcopy(others))
    return call.with_numbers()
