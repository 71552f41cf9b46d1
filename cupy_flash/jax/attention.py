"""Attention of JAX arrays on dense batches and on packed sequences, differentiable by JAX."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cupy_flash.api.varlen import has_key_positions
from cupy_flash.arrays.strided import kind_of
from cupy_flash.calls.arguments import check_qkv, parts_of
from cupy_flash.calls.options import Options, plain_options, with_offsets, with_statistics
from cupy_flash.differentiable import DifferentiableCall, dense_call, returned, varlen_call
from cupy_flash.jax.differentiable import (
    attention,
    require_constants,
    results_of,
    static_of,
    without_gradient,
)
from cupy_flash.jax.dropout import with_words
from cupy_flash.jax.static_call import LISTS
from cupy_flash.jax.traced import lists_of
from cupy_flash.mods.keywords import DROPOUT_SEED
from cupy_flash.problem.tile import TileRequest, freeze_tile
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    family: str | None = None,
    tile: TileRequest = None,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    out_dtype: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention` of JAX arrays, differentiable by JAX.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, return_max_logits,
    return_entropy, q_scale, k_scale, v_scale, out_dtype, key_indices, **modifications
        See `cupy_flash.flash_attention`. With key_indices, only q, k and v have gradients, and
        these have no derivatives. All arrays may be traced, and q_offset, too. dropout_seed
        may also be a key of `jax.random`, or an array of one integer.
    family, tile
        Kernel family and tile of the forward pass.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. max_logits and entropy have no gradients.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, a number is traced, or an argument without a
        gradient is differentiated: any but q, k, v, bias and sinks, and all of a float8 call.
    NotImplementedError
        If a call with key_indices has tangents or second derivatives, if a bias or sinks have a
        tangent in forward mode or a second derivative, and for a third derivative.
    ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention` and `cupy_flash.flash_attention_backward`. Inside a
        compiled function, errors about the contents of arrays or the GPU are raised by JAX when
        the function runs.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from cupy_flash.jax import flash_attention
    >>> q = k = v = jnp.ones((1, 4, 2, 8))
    >>> dv = jax.grad(lambda v: flash_attention(q, k, v, causal=True).sum())(v)
    >>> dv[0, :, 0, 0].round(3).tolist()
    [2.083..., 1.083..., 0.583..., 0.25]
    """
    if isinstance(q_offset, jax.core.Tracer) and q_offset.ndim == 0:
        q_offset = jnp.broadcast_to(q_offset, (math.prod(q.shape[:-3]),))
    numbers = {"causal": causal, "softmax_scale": softmax_scale, "q_offset": q_offset}
    require_constants({**numbers, **modifications})
    if DROPOUT_SEED in modifications:
        modifications = with_words(modifications)
    arrays = {"q": q, "k": k, "v": v}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    statistics = return_max_logits, return_entropy
    lists = lists_of(key_indices)
    if lists is not None and lists.ndim == 3:
        lists = lists[:, None]
    if out_dtype is not None or any(scale is not None for scale in scales.values()):
        options = Options(
            *("scaled", causal, softmax_scale, True, family, freeze_tile(tile), q_offset, layout),
            out_dtype=named_dtype(out_dtype),
        )
        options = with_statistics(options, *statistics)
        results = _without_gradient(options, arrays | scales | {LISTS: lists}, modifications)
    else:
        call, others = dense_call(causal, softmax_scale, q_offset, layout, modifications)
        call = _with_options(call, statistics, family=family, tile=freeze_tile(tile))
        results = attention(call.with_lists(lists), (q, k, v, *others))
    return returned(results, return_lse)


def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_qkvpacked` of a JAX array, differentiable by JAX.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis, copied, because JAX has no views.
    causal, softmax_scale, q_offset, return_lse, return_max_logits, return_entropy,
    **modifications
        See `cupy_flash.flash_attention_qkvpacked`.
    family, tile
        Kernel family and tile of the forward pass.

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. max_logits and entropy have no gradients.

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
        return_max_logits=return_max_logits,
        return_entropy=return_entropy,
        family=family,
        tile=tile,
        **modifications,
    )


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any | None = None,
    block_table: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    family: str | None = None,
    tile: TileRequest = None,
    key_indices: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_varlen` of JAX arrays, differentiable by JAX.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, block_table, k_scale, v_scale, return_lse, return_max_logits, return_entropy,
    num_splits, batch_invariant, key_indices, **modifications
        See `cupy_flash.flash_attention_varlen`, and `flash_attention` for key_indices. All arrays
        may be traced. Calls with a block_table or on 8-bit keys have no gradients.
    family, tile
        Kernel family and tile of the forward pass.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results. max_logits and entropy have no gradients.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    cu_seqlens_k = has_key_positions(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    sizes: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    numbers = {"causal": causal, "softmax_scale": softmax_scale, **sizes}
    require_constants({**numbers, **lengths, **modifications})
    if DROPOUT_SEED in modifications:
        modifications = with_words(modifications)
    forward: dict[str, Any] = {
        "family": family,
        "tile": freeze_tile(tile),
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
    }
    statistics = return_max_logits, return_entropy
    lists = lists_of(key_indices)
    more = {"block_table": block_table, "k_scale": k_scale, "v_scale": v_scale}
    if any(array is not None for array in more.values()):
        options = Options("varlen", causal, softmax_scale, True, **forward, **sizes)
        options = with_statistics(options, *statistics)
        arrays = {"q": q, "k": k, "v": v, **lengths, **more, LISTS: lists}
        results = _without_gradient(options, arrays, modifications)
    else:
        call, others = varlen_call(
            *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k),
            *(causal, softmax_scale, modifications),
        )
        call = _with_options(call, statistics, **forward).with_lists(lists)
        results = attention(call, (q, k, v, *others))
    return returned(results, return_lse)


def _with_options(
    call: DifferentiableCall, statistics: tuple[Any, Any], **forward: Any
) -> DifferentiableCall:
    """Return a call with options of the forward pass and the options `statistics`."""
    options = call.with_statistics(*statistics).options
    if any(forward.values()):
        options = plain_options(options._replace(**forward))
    return call._replace(options=options, without_lse=options._replace(return_lse=False))


def _without_gradient(
    options: Options, arrays: dict[str, Any], modifications: Any
) -> tuple[Any, ...]:
    """Return out, lse and row statistics of a call on 8-bit arrays or on pages."""
    options, modifications = with_offsets(options, modifications)
    static, operands = static_of(plain_options(options), arrays, modifications)
    made = without_gradient(
        *(static, operands),
        "attention on 8-bit arrays, or with a block_table, is differentiated by JAX, but has no "
        "gradient",
    )
    return results_of(made, static.options)
