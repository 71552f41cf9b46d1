"""Gradients that PyTorch's autograd computes for a random backward call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import cupy_flash.torch as ct
from support.calls.modified_calls import DTYPES
from support.gradients.gradient_calls import OF_MOD, GradientCall


class TensorCall(NamedTuple):
    """A call of tensors.

    Attributes
    ----------
    inputs
        Tensors with gradients, by the names of the inputs.
    others
        Further arguments of the public function, by name.
    results
        Gradients of out and, if there is one, of lse.
    function
        Public function.
    """

    inputs: Mapping[str, Any]
    others: Mapping[str, Any]
    results: tuple[Any, ...]
    function: Callable[..., Any]

    def run(self, inputs: Mapping[str, Any], **others: Any) -> tuple[Any, ...]:
        """Return out and, if it has a gradient, lse, given inputs and perhaps other arguments."""
        named = {**self.others, **others}
        captures = {n.removeprefix(OF_MOD): x for n, x in inputs.items() if n.startswith(OF_MOD)}
        named |= {n: x for n, x in inputs.items() if not n.startswith(OF_MOD)}
        if "alibi_slopes" in captures and "score_mod" not in named:
            named["alibi_slopes"] = captures["alibi_slopes"]
        elif captures:
            mod = named["score_mod"]
            named["score_mod"] = mod.with_arrays(lambda name, x: captures.get(name, x))
        found: tuple[Any, ...] = self.function(**named, return_lse=True)
        return found[: len(self.results)]


_POSITIONAL = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def tensor_call(call: GradientCall, device: str) -> TensorCall:
    """Return a backward call with tensors on a device."""
    positional, named = call.forward.given(np)
    given = {**dict(zip(_POSITIONAL, positional, strict=False)), **named}
    others = {
        name: as_tensor(x, device) if isinstance(x, np.ndarray) else x
        for name, x in given.items()
        if name not in call.inputs
    }
    for name in ("score_mod", "mask_mod"):
        if name in others:
            others[name] = others[name].with_arrays(lambda _, x: as_tensor(x, device))
    inputs = {name: as_tensor(x, device) for name, x in call.inputs.items()}
    results = tuple(as_tensor(x, device) for x in (call.dout, call.dlse) if x is not None)
    function = ct.flash_attention_varlen if call.is_packed else ct.flash_attention
    return TensorCall(inputs, others, results, function)


def as_tensor(array: np.ndarray, device: str) -> Any:
    """Return a tensor with the values of an array, whose dtype may be of ml_dtypes."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.tensor(array.astype(np.float32), device=device).bfloat16()
    return torch.tensor(array, device=device)


def as_array(tensor: Any) -> np.ndarray:
    """Return an array with the values of a tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.float().numpy().astype(DTYPES["bfloat16"]))
    return np.asarray(tensor.numpy())


def gradients(call: GradientCall, device: str) -> dict[str, np.ndarray]:
    """Return the gradients that autograd computes, by the names of the inputs."""
    of_tensors = tensor_call(call, device)
    inputs = {name: x.requires_grad_() for name, x in of_tensors.inputs.items()}
    results = of_tensors.run(inputs)
    found = torch.autograd.grad(results, [inputs[name] for name in call.names], of_tensors.results)
    return {name: as_array(x) for name, x in zip(call.names, found, strict=True)}
