"""Functions of `cupy_flash.torch`: attention of tensors, differentiable by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cupy_flash.arrays.strided import kind_of
from cupy_flash.arrays.torch_arrays import may_be_transformed, require_whole
from cupy_flash.calls.arguments import check_qkv
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.calls.scaled_dot_product import (
    dropout_options,
    mask_name,
    options_of,
    reshaped,
    shapes_of,
)
from cupy_flash.differentiable import DifferentiableCall, dense_call, returned, varlen_call
from cupy_flash.mods.keywords import DROPOUT_P, with_offsets
from cupy_flash.torch import transforms
from cupy_flash.torch.autocast import autocast_is_enabled, cast_arguments, cast_tensor
from cupy_flash.torch.distributed import require_local, waited_for
from cupy_flash.torch.dropout import with_seed
from cupy_flash.torch.functions import (
    FlashAttention,
    FlashAttentionWithLse,
    FlashAttentionWithStatistics,
)
from cupy_flash.torch.graphs import are_tensors, is_plain, outside_graph
from cupy_flash.torch.modifications import fits_graph, is_integer, packed
from cupy_flash.torch.nested import longest_shape, packed_call, unbound
from cupy_flash.torch.observed import is_observed, results_of_operator
from cupy_flash.torch.operators import ATTENTION, ATTENTION_VARLEN
from cupy_flash.torch.tracked import as_it_is_now, with_tracked

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    key_indices: Tensor | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention` of tensors, differentiable by autograd.

    The axes are (batch, seqlen, heads, head_dim). Tensors (batch, heads, seqlen, head_dim), as
    PyTorch's own function takes them, need layout="bhsd", or `scaled_dot_product_attention`.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, return_max_logits,
    return_entropy, key_indices, **modifications
        See `cupy_flash.flash_attention`. q, k and v may be nested tensors with the jagged layout,
        whose seqlen is ragged; a bias, a mask, a tree_mask, seqlens_k and key_indices then raise
        ValueError. With key_indices, only q, k and v have gradients, and these have no derivatives.
        dropout_seed may be missing: each call then draws one from PyTorch's default generator, see
        docs/guide/torch.md.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. All are nested tensors if q is. max_logits and entropy have no
        gradients.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention` and, for the backward pass,
        `cupy_flash.flash_attention_backward`.
    NotImplementedError
        If a tensor other than q, k and v has a forward-mode tangent, if a second derivative with
        respect to a tensor other than q, k and v of a dense call is requested, or if a second
        derivative is differentiated. Inside torch.func.functionalize and torch.jit.trace. With
        return_max_logits or return_entropy, inside any torch.func transform.
    RuntimeError
        In the backward pass, if a tensor of the call has been overwritten.

    Examples
    --------
    >>> import torch
    >>> from cupy_flash.torch import flash_attention
    >>> q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    >>> flash_attention(q, k, v, causal=True).sum().backward()
    >>> v.grad[0, 1:, 0, 0]
    tensor([1.0833, 0.5833, 0.2500])
    """
    if autocast_is_enabled():
        (q, k, v), modifications = cast_arguments((q, k, v), modifications)
    if DROPOUT_P in modifications:
        modifications = with_seed(modifications, q)
    if torch.compiler.is_compiling():
        offset, modified = with_offsets(q_offset, modifications)
        plain = is_plain(causal, softmax_scale, layout) and (offset is None or is_integer(offset))
        plain = plain and not (return_max_logits or return_entropy)
        if plain and are_tensors(q, k, v, optional=(key_indices,)) and fits_graph(modified):
            heads = q.shape[-2 if layout == "bshd" else -3]
            arguments = (*packed(modified, q, heads), causal, softmax_scale, offset, layout)
            out, lse = ATTENTION(q, k, v, *arguments, key_indices)
            return (out, lse) if return_lse else out
        return outside_graph(
            *(flash_attention, q, k, v),
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            layout=layout,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
            return_entropy=return_entropy,
            key_indices=key_indices,
            **modifications,
        )
    call, others = dense_call(causal, softmax_scale, q_offset, layout, modifications)
    call = call.with_statistics(return_max_logits, return_entropy).with_lists(key_indices)
    return _run(call, (q, k, v, *others), return_lse)


def flash_attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_qkvpacked` of a tensor, differentiable by autograd.

    Parameters
    ----------
    qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis. It may be a nested tensor with the
        jagged layout.
    causal, softmax_scale, q_offset, return_lse, return_max_logits, return_entropy,
    **modifications
        See `cupy_flash.flash_attention_qkvpacked`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. All are nested tensors if qkv is.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv is {kind_of(qkv)}; expected a tensor")
    layout = modifications.pop("layout", "bshd")  # type: ignore[typeddict-item]
    parts = unbound(qkv) if qkv.is_nested else None
    check_qkv(qkv, layout)
    return flash_attention(
        *(parts or qkv.unbind(-3)),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        return_entropy=return_entropy,
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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    key_indices: Tensor | None = None,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_varlen` of tensors, differentiable by autograd.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, return_lse, return_max_logits, return_entropy, key_indices, **modifications
        See `cupy_flash.flash_attention_varlen`, and `flash_attention` for key_indices.

    Returns
    -------
    out : Tensor, shape (total_q, heads_q, head_dim_v)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. max_logits and entropy have no gradients.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    if autocast_is_enabled():
        (q, k, v), modifications = cast_arguments((q, k, v), modifications)
    if DROPOUT_P in modifications:
        modifications = with_seed(modifications, q)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if torch.compiler.is_compiling():
        tensors, most = (q, k, v, cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        plain = is_plain(causal, softmax_scale) and all(is_integer(x) for x in most)
        plain = plain and not (return_max_logits or return_entropy)
        if (
            plain
            and are_tensors(*tensors, optional=(seqused_k, key_indices))
            and fits_graph(modifications)
        ):
            arguments = (*packed(modifications, q, q.shape[1]), *lengths, causal, softmax_scale)
            out, lse = ATTENTION_VARLEN(q, k, v, *arguments, key_indices)
            return (out, lse) if return_lse else out
        return outside_graph(
            *(flash_attention_varlen, q, k, v, *lengths[:4]),
            causal=causal,
            softmax_scale=softmax_scale,
            seqused_k=seqused_k,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
            return_entropy=return_entropy,
            key_indices=key_indices,
            **modifications,
        )
    call, others = varlen_call(*lengths, causal, softmax_scale, modifications)
    call = call.with_statistics(return_max_logits, return_entropy).with_lists(key_indices)
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
    *,
    dropout_seed: Any = None,
) -> Tensor:
    """Compute `cupy_flash.scaled_dot_product_attention` of tensors, differentiable by autograd.

    The axes are (..., heads, seqlen, head_dim), as PyTorch's own function has them.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed
        See `cupy_flash.scaled_dot_product_attention`, and `flash_attention` for a missing seed.
        Gradients reach query, key, value and a float attn_mask. query, key and value may be nested
        tensors (batch, heads, seqlen, head_dim) with the jagged layout, without an attn_mask.

    Returns
    -------
    Tensor, shape (..., heads, seqlen_q, head_dim_v)
        Output in the dtype of query. A fully masked row is 0, and has no gradient.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `cupy_flash.scaled_dot_product_attention` and `flash_attention`.

    Examples
    --------
    >>> import torch
    >>> from cupy_flash.torch import scaled_dot_product_attention
    >>> query = key = value = torch.ones(1, 2, 4, 8, requires_grad=True)
    >>> tuple(scaled_dot_product_attention(query, key, value, is_causal=True).shape)
    (1, 2, 4, 8)
    """
    has_mask = attn_mask is not None
    options = options_of(is_causal, scale, enable_gqa, has_mask=has_mask)
    options |= dropout_options(dropout_p, dropout_seed)
    names, inputs = ("query", "key", "value"), (query, key, value)
    _require_tensors(names, inputs)
    if autocast_is_enabled():
        inputs = query, key, value = tuple(map(cast_tensor, inputs))
        if query.dtype != torch.float64:
            attn_mask = cast_tensor(attn_mask)
    for name, tensor in zip(names, inputs, strict=True):
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; expected {query.dtype}, as query has"
            )
    if query.is_nested or key.is_nested or value.is_nested:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is given with nested tensors; pass flash_attention a mask_mod instead"
            )
        q, k, v = (longest_shape(*x) for x in zip(names, inputs, strict=True))
        shapes_of(q, k, v, None, enable_gqa)
        result: Tensor = flash_attention(query, key, value, **options)
        return result
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
        # Comparing types takes half the time of isinstance(), which only subclasses such as
        # Parameter need.
        if tensor.__class__ is not Tensor:
            _require_tensors(call.names, inputs)
            inputs = waited_for(inputs)
            if any(x.is_nested for x in inputs[:3]) and call.options.kind == "dense":
                packed = packed_call(call, inputs)
                options = call.options
                packed = packed._replace(
                    call=packed.call.with_statistics(
                        options.return_max_logits, options.return_entropy
                    )
                )
                return packed.nested(_run(packed.call, packed.inputs, return_lse))
            break
    if call.options.statistics:
        return returned(_with_statistics(call, inputs), return_lse)
    if may_be_transformed():
        if transforms.are_active():
            return transforms.attention(call, inputs, return_lse)
        if is_observed() and (results := results_of_operator(call, inputs)) is not None:
            return results if return_lse else results[0]
        if transforms.have_tangents(call, inputs):
            return transforms.attention(call, inputs, return_lse)
        for name, tensor in zip(call.names, inputs, strict=True):
            require_whole(name, tensor)
    if torch.is_grad_enabled():
        if call.modifications:
            call, inputs = with_tracked(call, inputs)
        for tensor in inputs:
            if tensor.requires_grad:
                function = FlashAttentionWithLse if return_lse else FlashAttention
                return function.apply(as_it_is_now(call), *inputs)
    if call.following_arrays is not None:
        options = call.options if return_lse else call.without_lse
        made = torch_autograd.run(inputs + call.following_arrays, options)
        if made is not None:
            results, _ = made
            return results if return_lse else results[0]
    return call.run(inputs, return_lse=return_lse)


def _with_statistics(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a call; the statistics have no gradient."""
    if may_be_transformed():
        if transforms.are_active() or transforms.have_tangents(call, inputs):
            raise NotImplementedError(
                f"{', '.join(call.options.statistics)} of attention is not computed inside of "
                "torch.func transforms and forward mode; call the function outside of them"
            )
        for name, tensor in zip(call.names, inputs, strict=True):
            require_whole(name, tensor)
    if torch.is_grad_enabled():
        call, inputs = with_tracked(call, inputs)
        if any(tensor.requires_grad for tensor in inputs):
            results: tuple[Any, ...] = FlashAttentionWithStatistics.apply(
                as_it_is_now(call), *inputs
            )
            return results
    results = call.run(inputs)
    return results


def _require_tensors(names: tuple[str, ...], inputs: tuple[Any, ...]) -> None:
    for name, tensor in zip(names, inputs, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {kind_of(tensor)}; expected a tensor")
        if tensor.__class__ is not Tensor:
            require_local(name, tensor)
