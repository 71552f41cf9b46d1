"""Attention for PyTorch: `flash_attention` and its kin on tensors, with gradients by autograd.

    from cupy_flash.torch import flash_attention

The functions have the arguments of those of the same names in `cupy_flash`. Gradients reach q, k,
v, bias and sinks, and come from out and, with return_lse, from lse. Without gradients they cost
what the plain functions do.

In a graph of `torch.compile` a call is the operator `cupy_flash::attention`, unless score_mod or
mask_mod is among its arguments: those break the graph in two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cupy_flash.differentiable import DifferentiableCall, dense_call, varlen_call
from cupy_flash.mods.keywords import ARRAYS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications

__all__ = ["flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen"]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """`cupy_flash.flash_attention` of tensors, differentiable.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, **modifications
        As of `cupy_flash.flash_attention`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim_v)
        With return_lse the pair of out and lse.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `cupy_flash.flash_attention` and, in the backward pass,
        `cupy_flash.flash_attention_backward`.
    """
    numbers = (causal, softmax_scale, q_offset, layout)
    if torch.compiler.is_compiling() and not _has_functions(modifications):
        window, softcap, arrays = _plain(modifications)
        out, lse = torch.ops.cupy_flash.attention(q, k, v, arrays, *numbers, window, softcap)
    else:
        names = ("causal", "softmax_scale", "q_offset", "layout")
        options = dict(zip(names, numbers, strict=True)) | modifications
        call, others = dense_call(options)
        out, lse = _eager(call, (q, k, v, *others))
    return (out, lse) if return_lse else out


def flash_attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """`cupy_flash.flash_attention_qkvpacked` of a tensor, differentiable.

    Parameters
    ----------
    qkv, causal, softmax_scale, q_offset, return_lse, **modifications
        As of `cupy_flash.flash_attention_qkvpacked`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen, heads, head_dim)
        With return_lse the pair of out and lse.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `flash_attention`.
    """
    return flash_attention(
        *qkv.unbind(2),
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
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """`cupy_flash.flash_attention_varlen` of tensors, differentiable.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    return_lse, **modifications
        As of `cupy_flash.flash_attention_varlen`.

    Returns
    -------
    out : Tensor, shape (total_q, heads_q, head_dim_v)
        With return_lse the pair of out and lse.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `flash_attention`.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if torch.compiler.is_compiling() and not _has_functions(modifications):
        window, softcap, arrays = _plain(modifications)
        out, lse = torch.ops.cupy_flash.attention_varlen(
            *(q, k, v, arrays, *lengths, causal, softmax_scale, window, softcap)
        )
    else:
        options = {"causal": causal, "softmax_scale": softmax_scale, **modifications}
        call, others = varlen_call(lengths, options)
        out, lse = _eager(call, (q, k, v, *others))
    return (out, lse) if return_lse else out


def _run(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor.requires_grad:
                result: tuple[Any, Any] = _Attention.apply(call, *inputs)
                return result
    return call.run(tuple([_detached(tensor) for tensor in inputs]))


_eager = torch.compiler.disable(_run)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """A call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = tuple([_detached(tensor) for tensor in inputs])
        out, lse = call.run(inputs)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*inputs, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        return None, *_pull_back(
            ctx.call, tuple(inputs), (out, lse), (dout, dlse), ctx.needs_input_grad[1:]
        )


def _pull_back(
    call: DifferentiableCall,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """A gradient for each input, None where none is needed."""
    dout, dlse = gradients
    found: list[Tensor | None] = [None] * len(inputs)
    if dout is None and dlse is None:
        return found
    if dout is None:
        dout = torch.zeros((), dtype=results[0].dtype, device=results[0].device)
        dout = dout.expand(results[0].shape)
    wrt = tuple([name for name, is_needed in zip(call.names, needed, strict=True) if is_needed])
    new = call.pull_back(inputs, results, (dout, dlse), wrt)
    for name, gradient in zip(wrt, new, strict=True):
        found[call.names.index(name)] = gradient
    return found


def _detached(tensor: Any) -> Any:
    return tensor.detach() if tensor.requires_grad else tensor


def _has_functions(modifications: Any) -> bool:
    return any(modifications.get(name) is not None for name in ("score_mod", "mask_mod"))


def _plain(modifications: Any) -> tuple[list[int], float | None, list[Tensor | None]]:
    """What an operator's schema has types for: a window (-1 has no bound), softcap, and arrays."""
    left, right = modifications.get("window_size") or (None, None)
    window = [-1 if bound is None else bound for bound in (left, right)]
    return window, modifications.get("softcap"), [modifications.get(name) for name in ARRAYS]


_NUMBERS = "int[] window, float? softcap"
_DENSE = f"bool causal, float? softmax_scale, int? q_offset, str layout, {_NUMBERS}"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
_VARLEN = f"{_LENGTHS}, bool causal, float? softmax_scale, {_NUMBERS}"


def _dense_of_plain(arrays: list[Any], *values: Any) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    names = ("causal", "softmax_scale", "q_offset", "layout", "window_size", "softcap")
    return dense_call(
        dict(zip(names, values, strict=True)) | dict(zip(ARRAYS, arrays, strict=True))
    )


def _varlen_of_plain(arrays: list[Any], *values: Any) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    names = ("causal", "softmax_scale", "window_size", "softcap", *ARRAYS)
    return varlen_call(values[:4], dict(zip(names, (*values[4:], *arrays), strict=True)))


def _lse_shape_dense(q: Tensor, *values: Any) -> tuple[Any, ...]:
    batch, first, second, _ = q.shape
    return (batch, second, first) if values[3] == "bshd" else (batch, first, second)


def _lse_shape_varlen(q: Tensor, *values: Any) -> tuple[Any, ...]:
    return (q.shape[1], q.shape[0])


def _register(name: str, schema: str, of_plain: Any, lse_shape: Any) -> None:
    """The operator of a public function, and its gradient, which is one too."""
    arguments = f"Tensor q, Tensor k, Tensor v, Tensor?[] arrays, {schema}"
    in_order = ARRAYS.index

    def attention(q: Tensor, k: Tensor, v: Tensor, arrays: Any, *values: Any) -> Any:
        call, others = of_plain(arrays, *values)
        return call.run((q, k, v, *others))

    def fake(q: Tensor, k: Tensor, v: Tensor, arrays: Any, *values: Any) -> Any:
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty(lse_shape(q, *values), dtype=accumulator)

    def gradients(
        dout: Tensor,
        dlse: Any,
        out: Tensor,
        lse: Tensor,
        needed: list[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arrays: Any,
        *values: Any,
    ) -> list[Tensor]:
        call, others = of_plain(arrays, *values)
        found = _pull_back(call, (q, k, v, *others), (out, lse), (dout, dlse), tuple(needed))
        return [gradient for gradient in found if gradient is not None]

    def fake_gradients(
        dout: Tensor,
        dlse: Any,
        out: Tensor,
        lse: Tensor,
        needed: list[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arrays: Any,
        *values: Any,
    ) -> list[Tensor]:
        _, others = of_plain(arrays, *values)
        inputs = (q, k, v, *others)
        return [x.new_empty(x.shape) for x, n in zip(inputs, needed, strict=True) if n]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, arrays, *values = inputs
        ctx.values = values
        ctx.save_for_backward(q, k, v, *output, *arrays)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *arrays = ctx.saved_tensors
        call, others = of_plain(arrays, *ctx.values)
        inputs = (q, k, v, *others)
        given = dict(zip(call.names, inputs, strict=True))
        wanted = dict(zip("qkv", ctx.needs_input_grad, strict=False))
        wanted |= {n: x.requires_grad for n, x in given.items() if n not in wanted}
        needed = [wanted[name] for name in call.names]
        if dout is None:
            dout = torch.zeros_like(out)
        operator = getattr(torch.ops.cupy_flash, f"{name}_gradients")
        new = iter(operator(dout, dlse, out, lse, needed, q, k, v, arrays, *ctx.values))
        found = {n: next(new) for n in call.names if wanted[n]}
        of_arrays: list[Tensor | None] = [None] * len(ARRAYS)
        for n in call.names[3:]:
            of_arrays[in_order(n)] = found.get(n)
        rest = [None] * len(ctx.values)
        return (*(found.get(n) for n in "qkv"), of_arrays, *rest)

    made = torch.library.custom_op(
        f"cupy_flash::{name}",
        attention,
        mutates_args=(),
        schema=f"({arguments}) -> (Tensor, Tensor)",
    )
    made.register_fake(fake)
    made.register_autograd(backward, setup_context=setup)
    results = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needed"
    torch.library.custom_op(
        f"cupy_flash::{name}_gradients",
        gradients,
        mutates_args=(),
        schema=f"({results}, {arguments}) -> Tensor[]",
    ).register_fake(fake_gradients)


_register("attention", _DENSE, _dense_of_plain, _lse_shape_dense)
_register("attention_varlen", _VARLEN, _varlen_of_plain, _lse_shape_varlen)
