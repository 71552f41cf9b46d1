"""Gradients that transforms of torch.func compute for random backward calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.func import vjp, vmap

from cupy_flash.mods.ir.compose import varies
from support.gradients.gradient_calls import (
    HEAD_DIMS,
    LONGEST,
    ROWS,
    GradientCall,
    random_gradient_call,
)
from support.gradients.gradient_rule import check_gradients
from support.gradients.torch_gradients import as_array, tensor_call

# Arrays with one element or row for each sequence, and those that broadcast to all, with the number
# of axes that they then have.
_OF_SEQUENCES = ("prefix_lens", "seqlens_k", "q_offset", "tree_mask")
_BROADCAST = {"bias": 4, "mask": 4, "alibi_slopes": 2}


def random_call(
    seed: int,
    dtype: str,
    kind: str,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    longest: tuple[int, int] = LONGEST,
) -> GradientCall:
    """Return a random call with the gradients of all its inputs."""
    rng = np.random.default_rng(seed)
    call = random_gradient_call(rng, dtype, kind, head_dims=head_dims, longest=longest)
    call.wrt = (*ROWS, *(name for name in call.inputs if name not in ROWS))
    call.grad_dtype, call.places = None, {}
    return call


def depends_on_sequence(call: GradientCall) -> bool:
    """Return whether the call has dropout, or a function that reads the index of the sequence."""
    _, named = call.forward.given(np)
    mods = [named[name] for name in ("score_mod", "mask_mod") if name in named]
    return "dropout_p" in named or any(varies(mod.traced)[0] for mod in mods)


def check_vjp(call: GradientCall, device: str) -> None:
    """Check the results and the gradients of `torch.func.vjp`."""
    of_tensors = tensor_call(call, device)
    results, pull_back = vjp(of_tensors.run, of_tensors.inputs)
    expected = of_tensors.run(of_tensors.inputs)
    assert all(map(torch.equal, results, expected))
    _check(call, pull_back(of_tensors.results)[0])


def check_mapped(call: GradientCall, device: str) -> None:
    """Check gradients of a dense call as a map over its sequences.

    The gradients are those of the map, and those of each sequence.
    """
    of_tensors = tensor_call(call, device)
    batch = len(of_tensors.inputs["q"])

    def is_mapped(name: str, x: Any) -> bool:
        if name in _BROADCAST:
            return bool(x.ndim == _BROADCAST[name] and len(x) == batch)
        return name in (*ROWS, *_OF_SEQUENCES)

    others = {n: x for n, x in of_tensors.others.items() if isinstance(x, torch.Tensor)}
    both = of_tensors.inputs, others
    in_dims = tuple({n: 0 if is_mapped(n, x) else None for n, x in part.items()} for part in both)

    def one(inputs: Any, others: Any) -> Any:
        inputs, others = (
            {n: x[None] if dims[n] == 0 else x for n, x in part.items()}
            for part, dims in zip((inputs, others), in_dims, strict=True)
        )
        return tuple(x[0] for x in of_tensors.run(inputs, **others))

    mapped = vmap(one, in_dims)
    _, pull_back = vjp(lambda inputs: mapped(inputs, others), of_tensors.inputs)
    _check(call, pull_back(of_tensors.results)[0])

    def gradients(inputs: Any, others: Any, results: Any) -> Any:
        return vjp(lambda inputs: one(inputs, others), inputs)[1](results)[0]

    each = vmap(gradients, (*in_dims, 0))(*both, of_tensors.results)
    if call.forward.dtype == "float64":
        # Inputs that sequences share have a gradient for each of them. In other dtypes, their sum
        # has more rounding errors than the gradient of the batch.
        _check(call, {n: x if in_dims[0][n] == 0 else x.sum(0) for n, x in each.items()})
    else:
        of_rows = GradientCall(call.forward, call.dout, call.dlse, ROWS)
        _check(of_rows, {name: each[name] for name in ROWS})


def _check(call: GradientCall, found: Any) -> None:
    check_gradients(call, {name: as_array(found[name]) for name in call.names})
