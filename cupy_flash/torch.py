"""Attention for PyTorch: functions on tensors, differentiable by autograd.

    from cupy_flash.torch import flash_attention

The functions have the arguments of the functions of the same names in `cupy_flash`. Gradients reach
q, k, v, bias and sinks, from out and, with return_lse, from lse; numbers and lists are constants.
`scaled_dot_product_attention` replaces PyTorch's own function. Without gradients, calls cost what
those in `cupy_flash` do. Unsupported derivatives, such as second derivatives, raise an error.

Under `torch.compile` a call becomes the operator `cupy_flash::attention` in the graph. A call with
score_mod, mask_mod or a list among its arguments splits the graph instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, library
from torch._library.autograd import make_autograd_impl

from cupy_flash.arrays.kinds import elements
from cupy_flash.arrays.strided import LAYOUTS, kind_of
from cupy_flash.arrays.torch_arrays import (
    NO_FORWARD_MODE,
    has_tangent,
    may_be_transformed,
    require_whole,
    version_of,
)
from cupy_flash.calls.arguments import check_qkv
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.calls.scaled_dot_product import (
    mask_name,
    options_of,
    reshaped,
    shapes_of,
)
from cupy_flash.differentiable import (
    WITH_GRADIENT,
    DifferentiableCall,
    dense_call,
    varlen_call,
)
from cupy_flash.mods.keywords import ARRAYS, with_offsets

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications

__all__ = [
    "flash_attention",
    "flash_attention_qkvpacked",
    "flash_attention_varlen",
    "scaled_dot_product_attention",
]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention` of tensors, differentiable by autograd.

    The axes are (batch, seqlen, heads, head_dim). Tensors (batch, heads, seqlen, head_dim), as
    PyTorch's own function takes them, need layout="bhsd", or `scaled_dot_product_attention`.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, **modifications
        See `cupy_flash.flash_attention`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention` and, for the backward pass,
        `cupy_flash.flash_attention_backward`.
    NotImplementedError
        If a tensor has a forward-mode tangent, inside a torch.func transform, while a graph is
        traced by anything but torch.compile, and if a gradient is differentiated.
    RuntimeError
        In the backward pass, if a tensor of the call has been overwritten.
    """
    if torch.compiler.is_compiling():
        offset, modified = with_offsets(q_offset, modifications)
        if _fits_operator((q, k, v), (offset,), causal, softmax_scale, layout, modified):
            plain, numbers = _plain(modified), (causal, softmax_scale, offset, layout)
            out, lse = torch.ops.cupy_flash.attention(q, k, v, *plain, *numbers)
            return (out, lse) if return_lse else out
        return _outside_graph(
            *(flash_attention, q, k, v),
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            layout=layout,
            return_lse=return_lse,
            **modifications,
        )
    call, others = dense_call(causal, softmax_scale, q_offset, layout, modifications)
    return _run(call, (q, k, v, *others), return_lse)


def flash_attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_qkvpacked` of a tensor, differentiable by autograd.

    Parameters
    ----------
    qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis.
    causal, softmax_scale, q_offset, return_lse, **modifications
        See `cupy_flash.flash_attention_qkvpacked`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv is {kind_of(qkv)}; expected a tensor")
    layout = modifications.pop("layout", "bshd")  # type: ignore[typeddict-item]
    check_qkv(qkv, layout)
    return flash_attention(
        *qkv.unbind(-3),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        return_lse=return_lse,
        **modifications,
    )


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_varlen` of tensors, differentiable by autograd.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, return_lse, **modifications
        See `cupy_flash.flash_attention_varlen`.

    Returns
    -------
    out : Tensor, shape (total_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if torch.compiler.is_compiling():
        used = () if seqused_k is None else (seqused_k,)
        tensors, most = (q, k, v, cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        if _fits_operator((*tensors, *used), most, causal, softmax_scale, "bshd", modifications):
            plain = _plain(modifications)
            out, lse = torch.ops.cupy_flash.attention_varlen(
                *(q, k, v, *plain, *lengths, causal, softmax_scale)
            )
            return (out, lse) if return_lse else out
        return _outside_graph(
            *(flash_attention_varlen, q, k, v, *lengths[:4]),
            causal=causal,
            softmax_scale=softmax_scale,
            seqused_k=seqused_k,
            return_lse=return_lse,
            **modifications,
        )
    call, others = varlen_call(*lengths, causal, softmax_scale, modifications)
    return _run(call, (q, k, v, *others), return_lse)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `cupy_flash.scaled_dot_product_attention` of tensors, differentiable by autograd.

    The axes are (..., heads, seqlen, head_dim), as PyTorch's own function has them.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        See `cupy_flash.scaled_dot_product_attention`. Gradients reach query, key, value and a
        float attn_mask.

    Returns
    -------
    Tensor, shape (..., heads, seqlen_q, head_dim_v)
        Output in the dtype of query. A fully masked row is 0, and has no gradient.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `cupy_flash.scaled_dot_product_attention` and `flash_attention`.
    """
    has_mask = attn_mask is not None
    options = options_of(dropout_p, is_causal, scale, enable_gqa, has_mask=has_mask)
    names, inputs = ("query", "key", "value"), (query, key, value)
    _require_tensors(names, inputs)
    for name, tensor in zip(names, inputs, strict=True):
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; expected {query.dtype}, as query has"
            )
    of_mask = None
    if attn_mask is not None:
        _require_tensors(("attn_mask",), (attn_mask,))
        of_mask = tuple(attn_mask.shape)
    q, k, v = (tuple(tensor.shape) for tensor in inputs)
    shapes = shapes_of(q, k, v, of_mask, enable_gqa)
    if attn_mask is not None:
        kinds = (str(x.dtype).removeprefix("torch.") for x in (attn_mask, query))
        name = mask_name(*kinds)
        if name == "bias" and query.dtype == torch.float64:
            attn_mask = attn_mask.to(torch.float64)
        options[name] = reshaped(attn_mask.expand(shapes.whole_mask), shapes.mask)
    out = flash_attention(
        reshaped(query, shapes.query),
        reshaped(key, shapes.key),
        reshaped(value, shapes.value),
        **options,
    )
    return reshaped(out, shapes.out)


def _run(call: DifferentiableCall, inputs: tuple[Any, ...], return_lse: bool) -> Any:
    for tensor in inputs:
        # Comparing types takes half the time; only subclasses such as Parameter get the full check.
        if tensor.__class__ is not Tensor:
            _require_tensors(call.names, inputs)
    if may_be_transformed():
        for name, tensor in zip(call.names, inputs, strict=True):
            require_whole(name, tensor)
    if torch.is_grad_enabled():
        if call.modifications:
            _require_constants(call)
        for tensor in inputs:
            if tensor.requires_grad:
                function = _AttentionAndLse if return_lse else _Attention
                return function.apply(_as_it_is_now(call), *inputs)
    if call.following_arrays is not None:
        options = call.options if return_lse else call.without_lse
        made = torch_autograd.run(inputs + call.following_arrays, options)
        if made is not None:
            results, _ = made
            return results if return_lse else results[0]
    return call.run(inputs, return_lse=return_lse)


def _require_tensors(names: tuple[str, ...], inputs: tuple[Any, ...]) -> None:
    for name, tensor in zip(names, inputs, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {kind_of(tensor)}; expected a tensor")


def _require_constants(call: DifferentiableCall) -> None:
    """Raise ValueError for a tensor that requires a gradient which attention does not compute."""
    captured = {name: x for mod in call.functions for name, x in mod.tensors.items()}
    for name, value in {**call.modifications, **captured}.items():
        if not any(getattr(x, "requires_grad", False) for x in elements(value)):
            continue
        if isinstance(value, (list, tuple)):
            raise ValueError(
                f"{name} holds a tensor that requires a gradient; pass numbers or detached "
                "tensors: only q, k, v, and a bias and sinks that are tensors have gradients, not "
                "lists"
            )
        raise ValueError(
            f"{name} requires a gradient; pass it detached: only q, k, v, bias and sinks have "
            "gradients"
        )


def _as_it_is_now(call: DifferentiableCall) -> DifferentiableCall:
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


def _call_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


# Calls a public function outside the graph of torch.compile, which splits the graph.
_outside_graph = torch.compiler.disable(_call_of)


# `Function.apply` takes 2.5 us longer, for functorch transforms. Attention does not support these,
# because their tensors have no readable memory.
_Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


class _Attention(_Function):  # type: ignore[misc]
    """Autograd function of attention that returns out only."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> Any:
        out, _ = _saved(ctx, call, inputs)
        return out

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *_gradients(ctx, dout, dlse, saved)
        # This is a graph node even if dout requires no gradient, because saved tensors may.
        return None, *_Gradients.apply(ctx, dout, dlse, *saved)


class _AttentionAndLse(_Attention):
    """Autograd function of attention that returns out and lse."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> Any:
        return _saved(ctx, call, inputs)


def _saved(ctx: Any, call: DifferentiableCall, inputs: tuple[Tensor, ...]) -> Any:
    """Compute out and lse, and save what the backward pass needs."""
    # Missing gradients stay None: an optimizer treats None and zero differently.
    ctx.set_materialize_grads(False)
    following = call.following_arrays
    if following is None or not (made := torch_autograd.run(inputs + following, call.options)):
        results = call.run(inputs)
        # The forward pass uses the original functions, whose block masks are kept between calls.
        ctx.call_and_record = call.with_functions_kept() if call.modifications else call, None
    else:
        results, result = made
        ctx.call_and_record = call, torch_autograd.record(result, results)
    if not call.constants:
        ctx.save_for_backward(*inputs, *results)
    else:
        tensors = [x for x in call.constants.values() if isinstance(x, Tensor)]
        ctx.save_for_backward(*inputs, *results, *tensors)
    if call.modifications:
        # Captured tensors are read in place instead of being saved by autograd, so the backward
        # pass has to compare their versions itself.
        captured = [x for mod in call.functions for x in mod.tensors.items()]
        ctx.versions = [(name, tensor, version_of(tensor)) for name, tensor in captured]
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
    for name, tensor, version in ctx.versions if call.modifications else ():
        if version_of(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {name}, which a function of the call captures, is at version "
                f"{version_of(tensor)}; expected version {version} instead"
            )
    first = len(call.names)
    inputs, (out, lse, *tensors) = saved[:first], saved[first:]
    names = [name for name, x in call.constants.items() if isinstance(x, Tensor)]
    call = call.with_constants(dict(zip(names, tensors, strict=True)))
    return _pull_back(call, inputs, (out, lse), (dout, dlse), needed)


class _Gradients(_Function):  # type: ignore[misc]
    """Autograd function of the backward pass, whose own derivative raises an error."""

    @staticmethod
    def forward(
        ctx: Any, of_call: Any, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> Any:
        return tuple(_gradients(of_call, dout, dlse, saved))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _no_second_derivative()


def _no_second_derivative() -> NotImplementedError:
    return NotImplementedError(
        "attention of cupy_flash.torch has no second derivative: gradients of its gradients, as in "
        "a gradient penalty, hvp, hessian or functional.jvp, are not computed"
    )


def _pull_back(
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


def _plain(modifications: Any) -> tuple[Any, ...]:
    """Return modifications as operator arguments; -1 stands for a missing window bound."""
    window = [-1 if x is None else x for x in modifications.get("window_size") or (None, None)]
    arrays = [modifications.get(name) for name in _ARRAYS]
    of_gradient = [modifications.get(name) for name in WITH_GRADIENT]
    return *of_gradient, arrays, window, modifications.get("softcap")


def _fits_operator(
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
    """Return modifications by name, given the operator arguments that `_plain` has made."""
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
        result = _pull_back(call, inputs, (out, lse), (dout, dlse), tuple(needed))
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
    raise _no_second_derivative()


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
