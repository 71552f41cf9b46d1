"""Operators of PyTorch that `cupy_flash.torch` calls under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch._library.autograd import make_autograd_impl

from cupy_flash.arrays.strided import LAYOUTS
from cupy_flash.arrays.torch_arrays import NO_FORWARD_MODE, has_tangent
from cupy_flash.differentiable import WITH_GRADIENT, DifferentiableCall, dense_call, varlen_call
from cupy_flash.mods.keywords import ARRAYS
from cupy_flash.torch.functions import no_second_derivative, pull_back

_Library: Any = library.Library
_operators = _Library("cupy_flash", "FRAGMENT")

# Modifications that operators take after those in `WITH_GRADIENT`: other arrays, then numbers.
_ARRAYS = tuple(name for name in ARRAYS if name not in WITH_GRADIENT)
_NUMBERS = ("window_size", "softcap")
_WITH_TANGENTS = ("q", "k", "v", *WITH_GRADIENT, *_ARRAYS)
_OF_MODIFICATIONS = "Tensor? bias, Tensor? sinks, Tensor?[] arrays, int[] window, float? softcap"
_LENGTHS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
    "Tensor? seqused_k"
)


def plain_modifications(modifications: Any) -> tuple[Any, ...]:
    """Return modifications as operator arguments; -1 stands for a missing window bound."""
    window = [-1 if x is None else x for x in modifications.get("window_size") or (None, None)]
    arrays = [modifications.get(name) for name in _ARRAYS]
    of_gradient = [modifications.get(name) for name in WITH_GRADIENT]
    return *of_gradient, arrays, window, modifications.get("softcap")


def fits_operator(
    tensors: tuple[Any, ...],
    integers: tuple[Any, ...],
    causal: Any,
    softmax_scale: Any,
    layout: Any,
    modifications: Mapping[str, Any],
) -> bool:
    """Return whether an operator accepts these arguments as they are.

    Other calls are made outside the graph, where wrong arguments raise the usual errors.
    """
    given = {name: value for name, value in modifications.items() if value is not None}
    arrays = [value for name, value in given.items() if name not in _NUMBERS]
    window = given.get("window_size", ())
    return (
        all(isinstance(x, Tensor) for x in (*tensors, *arrays))
        and not any(x.requires_grad for n, x in given.items() if n in _ARRAYS)
        and set(given) <= {*WITH_GRADIENT, *_ARRAYS, *_NUMBERS}
        and isinstance(causal, bool)
        and isinstance(layout, str)
        and layout in LAYOUTS
        and isinstance(window, (tuple, list))
        and len(window) in (0, 2)
        and all(x is None or isinstance(x, int) for x in (*integers, *window))
        and all(
            x is None or isinstance(x, (int, float)) for x in (softmax_scale, given.get("softcap"))
        )
    )


def _options(bias: Any, sinks: Any, arrays: Any, window: Any, softcap: Any) -> dict[str, Any]:
    """Return modifications by name, given the operator arguments of `plain_modifications`."""
    names = (*WITH_GRADIENT, *_ARRAYS, *_NUMBERS)
    return dict(zip(names, (bias, sinks, *arrays, tuple(window), softcap), strict=True))


class _Operator(NamedTuple):
    """Operator for a public function. Its arguments are q, k, v, modifications, and others.

    Attributes
    ----------
    name
        Name of the operator.
    schema
        Schema of the other arguments.
    of_plain
        Function that returns the call, and its differentiable inputs other than q, k and v, given
        the other arguments and the modifications.
    lse_shape
        Function that returns the shape of lse, given q and the other arguments.
    """

    name: str
    schema: str
    of_plain: Callable[..., tuple[DifferentiableCall, tuple[Any, ...]]]
    lse_shape: Callable[..., tuple[Any, ...]]

    def register(self) -> None:
        """Register the operator with torch, and its backward pass as a second operator."""
        arguments = f"Tensor q, Tensor k, Tensor v, {_OF_MODIFICATIONS}, {self.schema}"
        made = library.custom_op(
            f"cupy_flash::{self.name}",
            self.run,
            mutates_args=(),
            schema=f"({arguments}) -> (Tensor, Tensor)",
        )
        made.register_fake(self.run_fake)
        made.register_autograd(self.backward, setup_context=_save)
        recording = make_autograd_impl(made._opoverload, made)

        # Without this check, an operator drops the tangents of tensors that require no gradient.
        def without_tangents(keyset: Any, *values: Any) -> Any:
            q, k, v, bias, sinks, arrays, *_ = values
            tensors = (q, k, v, bias, sinks, *arrays)
            for name, tensor in zip(_WITH_TANGENTS, tensors, strict=True):
                if tensor is not None and has_tangent(tensor):
                    raise NotImplementedError(f"{name} {NO_FORWARD_MODE}")
            return recording(keyset, *values)

        for device in ("CPU", "CUDA"):
            key = f"Autograd{device}"
            _operators.impl(self.name, without_tangents, key, with_keyset=True)
        results = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needed"
        made = library.custom_op(
            f"cupy_flash::{self.name}_gradients",
            self.gradients,
            mutates_args=(),
            schema=f"({results}, {arguments}) -> Tensor[]",
        )
        made.register_fake(self.gradients_fake)
        made.register_autograd(_refuse_second_derivative)

    def _call(self, values: tuple[Any, ...]) -> tuple[DifferentiableCall, tuple[Any, ...]]:
        """Return the call that an operator's arguments describe, and its inputs."""
        q, k, v, bias, sinks, arrays, window, softcap, *others = values
        modifications = _options(bias, sinks, arrays, window, softcap)
        call, inputs = self.of_plain(*others, modifications)
        return call, (q, k, v, *inputs)

    def run(self, *values: Any) -> tuple[Any, Any]:
        """Compute attention; return out and lse."""
        call, inputs = self._call(values)
        results: tuple[Any, Any] = call.run(inputs)
        return results

    def run_fake(self, *values: Any) -> tuple[Any, Any]:
        """Return empty tensors with the shapes of out and lse."""
        q, _, v, _bias, _sinks, _arrays, _window, _softcap, *others = values
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty(self.lse_shape(q, *others), dtype=accumulator)

    def gradients(
        self, dout: Any, dlse: Any, out: Any, lse: Any, needed: list[bool], *values: Any
    ) -> list[Any]:
        """Return the needed gradients of those of q, k, v, bias and sinks that are given."""
        call, inputs = self._call(values)
        result = pull_back(call, inputs, (out, lse), (dout, dlse), tuple(needed))
        return [gradient for gradient in result if gradient is not None]

    def gradients_fake(
        self, dout: Any, dlse: Any, out: Any, lse: Any, needed: list[bool], *values: Any
    ) -> list[Any]:
        """Return empty tensors with the shapes of these gradients."""
        q, k, v, bias, sinks, *_ = values
        inputs = [x for x in (q, k, v, bias, sinks) if x is not None]
        return [x.new_empty(x.shape) for x, n in zip(inputs, needed, strict=True) if n]

    def backward(self, ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        """Return a gradient or None for each argument of the operator."""
        q, k, v, bias, sinks, out, lse, *others = ctx.saved_tensors
        first, arrays = (q, k, v, bias, sinks), others[: len(_ARRAYS)]
        lengths = iter(others[len(_ARRAYS) :])
        values = (*first, arrays, *[next(lengths) if x is _SAVED else x for x in ctx.values])
        needed = [n for x, n in zip(first, ctx.needs_input_grad, strict=False) if x is not None]
        if dout is None:
            dout = torch.zeros_like(out)
        operator = getattr(torch.ops.cupy_flash, f"{self.name}_gradients")
        new = iter(operator(dout, dlse, out, lse, needed, *values))
        of_first = (
            next(new) if x is not None and n else None
            for x, n in zip(first, ctx.needs_input_grad, strict=False)
        )
        return *of_first, *[None] * (len(values) - len(first))


# Placeholder in `ctx.values` for a tensor that autograd has saved.
_SAVED = object()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, bias, sinks, arrays, *others = inputs
    lengths = [x for x in others if isinstance(x, Tensor)]
    ctx.values = [_SAVED if isinstance(x, Tensor) else x for x in others]
    ctx.save_for_backward(q, k, v, bias, sinks, *output, *arrays, *lengths)
    ctx.set_materialize_grads(False)


def _refuse_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise no_second_derivative()


def _dense_lse_shape(
    q: Any, causal: Any, softmax_scale: Any, q_offset: Any, layout: str
) -> tuple[Any, ...]:
    *batch, first, second, _ = q.shape
    return (*batch, second, first) if layout == "bshd" else (*batch, first, second)


def _varlen_lse_shape(q: Any, *_: Any) -> tuple[Any, ...]:
    return q.shape[1], q.shape[0]


_Operator(
    "attention",
    "bool causal, float? softmax_scale, int? q_offset, str layout",
    dense_call,
    _dense_lse_shape,
).register()
_Operator(
    "attention_varlen",
    f"{_LENGTHS}, bool causal, float? softmax_scale",
    varlen_call,
    _varlen_lse_shape,
).register()
