"""Attention functions with the names, arguments and results of flash_attn 2.8.

Every function has these arguments of flash_attn, after its tensors and lengths:

dropout_p : float
    Probability of dropping a weight of the softmax, from 0 to below 1, rounded to a multiple of
    1 / 256. Each call draws the weights that it drops from PyTorch's generator of the device, so
    `torch.manual_seed` reproduces them, but they are not those that flash_attn drops.
softmax_scale : float, optional
    Factor on the scores, by default 1 / sqrt(head_dim).
causal : bool
    Whether query i attends only to the keys j <= i + seqlen_k - seqlen_q.
window_size : (int, int)
    (left, right): query i attends only to the keys between i + seqlen_k - seqlen_q - left and
    i + seqlen_k - seqlen_q + right, both included. A negative number is no bound.
softcap : float
    Cap: scores become softcap * tanh(scores / softcap). 0 or less is no cap.
alibi_slopes : float32 Tensor, shape (heads_q,) or (batch, heads_q), optional
    Slopes of ALiBi: slope * abs(i + seqlen_k - seqlen_q - j) is subtracted from the scores.
deterministic : bool
    Has no effect, because the same inputs always give the same bits.
return_attn_probs : bool
    Whether to return (out, softmax_lse, probabilities) instead of out. softmax_lse is the
    log-sum-exp of the scores, -inf for rows without a key. The probabilities are an empty tensor,
    which flash_attn also returns without dropout. With dropout, flash_attn returns probabilities,
    and this argument is not supported.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import cupy_flash
from cupy_flash.arrays.strided import kind_of
from cupy_flash.calls.arguments import check_packed
from cupy_flash.calls.scaled_dot_product import dropout_options
from cupy_flash.errors import UnsupportedError
from cupy_flash.opaque import marked, outside
from cupy_flash.torch import (
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.torch.dropout import with_seed

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention, differentiable by autograd.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of dtype float16, bfloat16, float32 or float64.
    k, v : Tensor, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys and values. heads_q is a multiple of heads_kv.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Output. With return_attn_probs, (out, softmax_lse, probabilities), where softmax_lse has the
        shape (batch, heads_q, seqlen_q).

    Raises
    ------
    UnsupportedError
        For dropout with return_attn_probs; also see `cupy_flash.torch.flash_attention`.
    TypeError, ValueError, CompileError, NotImplementedError, RuntimeError
        See `cupy_flash.torch.flash_attention`.

    Examples
    --------
    >>> import torch
    >>> from cupy_flash.flash_attn import flash_attn_func
    >>> q = k = v = torch.ones(1, 4, 2, 8)
    >>> tuple(flash_attn_func(q, k, v, causal=True).shape)
    (1, 4, 2, 8)
    """
    modifications = _modifications(window_size, softcap, alibi_slopes)
    modifications |= _dropout(dropout_p, q, return_attn_probs)
    result = flash_attention(
        *(q, k, v),
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_attn_probs,
        **modifications,
    )
    return _with_probabilities(result, q) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` for queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : Tensor, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third axis.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.

    Returns
    -------
    out : Tensor, shape (batch, seqlen, heads, head_dim)
        Output. With return_attn_probs, see `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `flash_attn_func`.
    """
    q, k, v = _unpacked("qkv", qkv, 3, axes=5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` for keys and values in one tensor.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Queries.
    kv : Tensor, shape (batch, seqlen_k, 2, heads_kv, head_dim)
        Keys and values along the third axis.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Output. With return_attn_probs, see `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `flash_attn_func`.
    """
    k, v = _unpacked("kv", kv, 2, axes=5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Compute attention of packed sequences, differentiable by autograd.

    Parameters
    ----------
    q : Tensor, shape (total_q, heads_q, head_dim)
        Queries of all sequences, of dtype float16, bfloat16, float32 or float64.
    k, v : Tensor, shape (total_k, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
        Keys and values; in pages if block_table is given. heads_q is a multiple of heads_kv.
    cu_seqlens_q, cu_seqlens_k : Tensor of integers, shape (batch + 1,)
        Offsets in q and in k at which each sequence begins, then the end of the last.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.
    block_table : Tensor of integers, shape (batch, max_pages), optional
        Key j of sequence b is row j % page_size of page block_table[b, j // page_size]. Pages may
        have any number of rows. Such a call has no backward pass.

    Returns
    -------
    out : Tensor, shape (total_q, heads_q, head_dim)
        Output. With return_attn_probs, (out, softmax_lse, probabilities), where softmax_lse has the
        shape (heads_q, total_q).

    Raises
    ------
    UnsupportedError
        For dropout with return_attn_probs.
    NotImplementedError
        In the backward pass of a call with block_table; also see
        `cupy_flash.torch.flash_attention_varlen`.
    TypeError, ValueError, CompileError, RuntimeError
        See `cupy_flash.torch.flash_attention_varlen`.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "return_lse": return_attn_probs,
        **_modifications(window_size, softcap, alibi_slopes),
        **_dropout(dropout_p, q, return_attn_probs),
    }
    if block_table is None:
        result = flash_attention_varlen(q, k, v, *lengths, **options)
    else:
        options["block_table"] = block_table
        result = _without_backward(
            "flash_attn_varlen_func with block_table",
            lambda q, k, v: cupy_flash.flash_attention_varlen(q, k, v, *lengths, **options),
            *(q, k, v),
        )
    return _with_probabilities(result, q) if return_attn_probs else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` for queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : Tensor, shape (total, 3, heads, head_dim)
        Queries, keys and values along the second axis.
    cu_seqlens : Tensor of integers, shape (batch + 1,)
        Offsets in qkv at which each sequence begins, then the end of the last.
    max_seqlen : int
        Upper bound of the lengths.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.

    Returns
    -------
    out : Tensor, shape (total, heads, head_dim)
        Output. With return_attn_probs, see `flash_attn_varlen_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `flash_attn_varlen_func`.
    """
    q, k, v = _unpacked("qkv", qkv, 3, axes=4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` for keys and values in one tensor.

    Parameters
    ----------
    q : Tensor, shape (total_q, heads_q, head_dim)
        Queries of all sequences.
    kv : Tensor, shape (total_k, 2, heads_kv, head_dim)
        Keys and values along the second axis.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        See the module.

    Returns
    -------
    out : Tensor, shape (total_q, heads_q, head_dim)
        Output. With return_attn_probs, see `flash_attn_varlen_func`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NotImplementedError, RuntimeError
        See `flash_attn_varlen_func`.
    """
    k, v = _unpacked("kv", kv, 2, axes=4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute a decoding step: append to a KV cache in place, then attend to it.

    Parameters
    ----------
    q : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Queries.
    k_cache, v_cache : Tensor, shape (caches, seqlen_cache, heads_kv, head_dim)
        Caches; with block_table (pages, page_size, heads_kv, head_dim), for any page_size. The last
        axis is contiguous.
    k, v : Tensor, shape (batch, seqlen_new, heads_kv, head_dim), optional
        New keys and values, which are written to the caches from row cache_seqlens[b] on.
    rotary_cos, rotary_sin : Tensor, shape (seqlen_ro, rotary_dim / 2), optional
        Rotary embedding. New key j is rotated by the angles at position cache_seqlens[b] + j. Query
        i is at cache_seqlens[b] + i if the call is causal or has a window, otherwise at
        cache_seqlens[b]. Requires k and v.
    cache_seqlens : int or Tensor of integers, shape (batch,), optional
        Lengths of the cached sequences before the append. By default, without k and v, the capacity
        of the cache.
    cache_batch_idx : Tensor of integers, shape (batch,), optional
        Index of the cache of each sequence; by default sequence b uses cache b. With block_table,
        which flash_attn does not support, it is the row of the table of each sequence.
    cache_leftpad : Tensor of integers, shape (batch,), optional
        Number of padding rows at the beginning of each cache.
    block_table : Tensor of integers, shape (batch, max_pages), optional
        Row j of sequence b's cache is row j % page_size of page block_table[b, j // page_size].
    softmax_scale, causal, window_size, softcap, alibi_slopes
        See the module.
    rotary_interleaved : bool
        Whether columns 2i and 2i + 1 form a pair; otherwise columns i and i + rotary_dim / 2 do.
    num_splits : int
        Number of parts that the keys of each sequence are split into. 0 lets the planner choose.
    return_softmax_lse : bool
        Whether to return (out, softmax_lse), where softmax_lse has the shape (batch, heads_q,
        seqlen_q).

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Output.

    Raises
    ------
    NotImplementedError
        In the backward pass.
    TypeError, ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention_with_kvcache`.
    """
    if cache_seqlens is None and k is None:
        pages = 1 if block_table is None else block_table.shape[1]
        cache_seqlens = pages * k_cache.shape[1]
    if cache_batch_idx is not None and block_table is not None:
        block_table = _rows_of(block_table, cache_batch_idx)
        cache_batch_idx = None
    options: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "block_table": block_table,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_interleaved": rotary_interleaved,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "num_splits": num_splits,
        "return_lse": return_softmax_lse,
        "cache_leftpad": cache_leftpad,
        **_modifications(window_size, softcap, alibi_slopes),
    }
    tensors = q, k_cache, v_cache, k, v
    if torch.compiler.is_compiling() and not _are_recorded(tensors):
        # In a graph, this is an operator that writes the caches.
        return flash_attention_with_kvcache(*tensors, **options)
    return _without_backward(
        "flash_attn_with_kvcache",
        lambda *arrays: cupy_flash.flash_attention_with_kvcache(*arrays, **options),
        *tensors,
    )


def _without_backward(name: str, function: Any, *tensors: Any) -> Any:
    """Return `function(*tensors)`; the backward pass of its results raises an error."""
    # The function is no operator of torch, so it is called outside the graph of torch.compile.
    call = _outside_graph if torch.compiler.is_compiling() else _called
    return call(name, function, tensors)


def _called(name: str, function: Any, tensors: tuple[Any, ...]) -> Any:
    if _are_recorded(tensors):
        return _WithoutBackward.apply(name, function, *tensors)
    return function(*tensors)


def _are_recorded(tensors: tuple[Any, ...]) -> bool:
    """Return whether autograd records operations on the tensors."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


@functools.partial(marked, reason="calls with a cache or a block_table are no operators of PyTorch")
def _outside_graph(name: str, function: Any, tensors: tuple[Any, ...]) -> Any:
    return outside(_called, (name, function, tensors))


_Function: Any = torch.autograd.Function


class _WithoutBackward(_Function):  # type: ignore[misc]
    """Autograd function whose backward pass raises an error instead of losing gradients."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Any, *tensors: Any) -> Any:
        """Return the result of the function."""
        ctx.name = name
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"{ctx.name} has no backward pass; call it within `with torch.no_grad()`, or pass "
            "detached tensors"
        )


def _modifications(window_size: Any, softcap: Any, alibi_slopes: Any) -> dict[str, Any]:
    """Return flash_attn's arguments as modifications, without those that have no effect.

    Calls without modifications take less time.
    """
    modifications: dict[str, Any] = {}
    if window_size.__class__ is not tuple or window_size != (-1, -1):
        bounds = window_size.tolist() if isinstance(window_size, Tensor) else window_size
        if isinstance(bounds, (tuple, list)):
            bounds = tuple(-1 if isinstance(x, int) and x < 0 else x for x in bounds)
        modifications["window_size"] = bounds
    if not isinstance(softcap, (float, int)) or not softcap <= 0:
        modifications["softcap"] = softcap
    if alibi_slopes is not None:
        modifications["alibi_slopes"] = alibi_slopes
    return modifications


def _dropout(dropout_p: float, q: Tensor, return_attn_probs: bool) -> dict[str, Any]:
    """Return the arguments of dropout with a new seed; none if the probability is 0."""
    options = dropout_options(dropout_p, None)
    if options and return_attn_probs:
        raise UnsupportedError(
            f"return_attn_probs is {return_attn_probs} and dropout_p is {dropout_p}; expected only "
            "one of them, as the probabilities, whose signs show what was dropped, are never "
            "stored: pass return_lse=True and a dropout_seed to cupy_flash.torch.flash_attention, "
            "and the seed to cupy_flash.dropout_mask"
        )
    result: dict[str, Any] = with_seed(options, q)
    return result


def _with_probabilities(result: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and the empty tensor that flash_attn returns without dropout."""
    out, lse = result
    return out, lse, q.new_empty(0)


def _unpacked(name: str, packed: Tensor, count: int, *, axes: int) -> tuple[Tensor, ...]:
    """Return the `count` parts of a tensor (..., count, heads, head_dim) of `axes` axes.

    Their gradients are stacked, which takes less time than the sum of gradients of slices.
    """
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is {kind_of(packed)}; expected a tensor")
    check_packed(name, packed, count)
    if packed.ndim != axes:
        kind = "packed sequences" if axes == 4 else "a batch"
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; expected {axes} axes, as {kind} has"
        )
    return packed.unbind(-3)


def _rows_of(block_table: Tensor, indices: Tensor) -> Tensor:
    """Return the row of a block table for each index, or -1 if the index is out of range.

    Page -1 does not exist: its rows read as zeros, and what is appended to it is dropped.
    """
    last = len(block_table) - 1
    rows = block_table[indices.clamp(0, last).long()]
    return rows.masked_fill(((indices < 0) | (indices > last))[:, None], -1)
