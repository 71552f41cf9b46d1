"""Attention for JAX outside `jax.jit`: functions on JAX arrays, differentiable by JAX.

    from cupy_flash.jax import flash_attention
    jax.grad(lambda q: flash_attention(q, k, v, causal=True).sum())(q)

The functions have the arguments of the functions of the same names in `cupy_flash`. Gradients reach
q, k, v, bias and sinks; numbers and lists are constants. A call is computed when it is made, so it
cannot be part of a function under `jax.jit`, where arrays have no values yet. As usual in JAX, an
argument may be a NumPy array, which is copied to the device of the other arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from cupy_flash.arrays.strided import kind_of
from cupy_flash.calls.arguments import check_qkv, parts_of
from cupy_flash.differentiable import dense_call, varlen_call
from cupy_flash.jax.differentiable import attention, require_constants

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications

__all__ = ["flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention` of JAX arrays, differentiable by JAX.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, **modifications
        See `cupy_flash.flash_attention`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or is traced, as inside `jax.jit`.
    ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention` and `cupy_flash.flash_attention_backward`.
    """
    require_constants({"softmax_scale": softmax_scale, "q_offset": q_offset, **modifications})
    call, others = dense_call(causal, softmax_scale, q_offset, layout, modifications)
    out, lse = attention(call, (q, k, v, *others))
    return (out, lse) if return_lse else out


def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_qkvpacked` of a JAX array, differentiable by JAX.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis, copied, because JAX has no views.
    causal, softmax_scale, q_offset, return_lse, **modifications
        See `cupy_flash.flash_attention_qkvpacked`.

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    if not isinstance(qkv, (jax.Array, np.ndarray)):
        raise TypeError(f"qkv is {kind_of(qkv)}; expected a JAX or NumPy array")
    layout = modifications.pop("layout", "bshd")  # type: ignore[typeddict-item]
    check_qkv(qkv, layout)
    return flash_attention(
        *parts_of(qkv),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        return_lse=return_lse,
        **modifications,
    )


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_varlen` of JAX arrays, differentiable by JAX.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, return_lse, **modifications
        See `cupy_flash.flash_attention_varlen`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    require_constants({"softmax_scale": softmax_scale, **lengths, **modifications})
    call, others = varlen_call(
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k),
        *(causal, softmax_scale, modifications),
    )
    out, lse = attention(call, (q, k, v, *others))
    return (out, lse) if return_lse else out
