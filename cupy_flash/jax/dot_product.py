"""Functions with the arguments of `jax.nn.dot_product_attention` and of Flax's attention functions.

Both align causal masks and windows at the top left: query i has the position of key i.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.errors import UnsupportedError
from cupy_flash.jax.attention import flash_attention
from cupy_flash.problem.values import check_bool, finite


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any | None = None,
    key_value_seq_lengths: Any | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention as `jax.nn.dot_product_attention` does, by `flash_attention`.

    Parameters
    ----------
    query : array, shape (batch, seqlen_q, heads, head_dim) or without the batch axis
        Queries.
    key, value : array, shape (batch, seqlen_k, heads_kv, head_dim) or without the batch axis
        Keys and values of query's dtype; heads is a multiple of heads_kv.
    bias : array, optional
        Summand of the scaled scores; broadcasts to (batch, heads, seqlen_q, seqlen_k).
    mask : bool array, optional
        Mask of the same shapes as bias. True keeps a pair.
    scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim).
    is_causal : bool
        Whether query i attends only to the keys j <= i.
    query_seq_lengths, key_value_seq_lengths : int32 array, shape (batch,), optional
        Number of queries and of keys of each sequence. The output of other queries is 0.
    local_window_size : int or (int, int), optional
        (left, right): query i attends only to the keys i - left <= j <= i + right. One integer is
        both.
    implementation : {None, "xla", "cudnn"}
        Ignored, so that calls need not be changed.
    return_residual : bool
        Whether to return the log-sum-exp of the scores, too. It has no gradient.

    Returns
    -------
    out : array, of the shape and dtype of query
        Output. A fully masked row is 0, whereas that of `jax.nn` is the mean of all values. With
        return_residual, the pair (out, residual) with a residual of shape (batch, seqlen_q, heads)
        and the dtype of key.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    del implementation
    query = jnp.asarray(query)
    window = local_window_size
    out, lse = flash_attention(
        query,
        key,
        value,
        causal=is_causal,
        softmax_scale=scale,
        q_offset=0 if is_causal or window is not None else None,
        return_lse=True,
        window_size=(window, window) if isinstance(window, int) else window,
        bias=_as_bias(bias, query),
        mask=mask,
        seqlens_k=key_value_seq_lengths,
    )
    if query_seq_lengths is not None:
        rows = jnp.arange(query.shape[-3])[:, None, None]
        used = rows < jnp.asarray(query_seq_lengths)[:, None, None, None]
        out = jnp.where(used.reshape(*query.shape[:-3], -1, 1, 1), out, 0)
    if not return_residual:
        return out
    residual = jnp.swapaxes(lse, -1, -2).astype(jnp.asarray(key).dtype)
    return out, jax.lax.stop_gradient(residual)


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any | None = None,
    precision: Any | None = None,
    module: Any | None = None,
    *,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any | None = None,
    qk_attn_weights_einsum: Any | None = None,
    attn_weights_value_einsum: Any | None = None,
) -> Any:
    """Compute attention as Flax does; pass it as `attention_fn` to Flax's attention modules.

    It serves `MultiHeadDotProductAttention` of `flax.linen` and `MultiHeadAttention` of `flax.nnx`.

    Parameters
    ----------
    query : array, shape (..., seqlen_q, heads, head_dim)
        Queries.
    key, value : array, shape (..., seqlen_k, heads_kv, head_dim)
        Keys and values, with the leading axes of query.
    bias, mask : array, optional
        Summand of the scaled scores, and mask, which is not 0 where a query attends to a key. Both
        broadcast to (..., heads, seqlen_q, seqlen_k).
    broadcast_dropout : bool
        Ignored: each sequence and head drops its own weights.
    dropout_rng : key of `jax.random`, optional
        Key of the weights that are dropped. Required for dropout.
    dropout_rate : float
        Probability of dropping a weight of the softmax, rounded to a multiple of 1 / 256.
    deterministic : bool
        Whether there is no dropout, whatever dropout_rate is.
    dtype : dtype, optional
        Dtype of the computation, by default that which query, key and value promote to.
    precision
        Ignored: products of 16-bit arrays are accumulated in float32.
    module
        Not supported: attention weights are never stored, so they cannot be recorded.
    is_causal : bool
        Whether query i attends only to the keys j <= i.
    force_fp32_for_softmax : bool
        Ignored: the softmax is computed in float32, or in float64 for float64 arrays.
    einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum
        Not supported: kernels compute both products.

    Returns
    -------
    array, shape (..., seqlen_q, heads, head_dim)
        Output. A fully masked row is 0.

    Raises
    ------
    UnsupportedError
        For a module that records attention weights, and for functions that compute products.
    TypeError, ValueError, CompileError
        See `flash_attention`.
    """
    del broadcast_dropout, precision, force_fp32_for_softmax
    check_bool("deterministic", deterministic)
    functions = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, function in functions.items():
        if function is not None:
            raise UnsupportedError(f"{name} is not supported: kernels compute both products")
    dropout: dict[str, Any] = {}
    if finite("dropout_rate", dropout_rate) != 0 and not deterministic:
        dropout = _dropout(dropout_rate, dropout_rng)
    if module is not None:
        raise UnsupportedError(
            "the module records attention weights, which are never stored; leave out sow_weights"
        )
    arrays = query, key, value
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in arrays)
    mask = None if mask is None else jnp.asarray(mask) != 0
    return flash_attention(
        query,
        key,
        value,
        causal=is_causal,
        q_offset=0 if is_causal else None,
        bias=_with_one_batch_axis(_as_bias(bias, query), query),
        mask=_with_one_batch_axis(mask, query),
        **dropout,
    )


def _dropout(rate: float, rng: Any | None) -> dict[str, Any]:
    """Return Flax's arguments of dropout as those of `flash_attention`."""
    if not 0 < rate < 1:
        raise ValueError(f"dropout_rate is {rate}; expected a number from 0 to below 1")
    if rng is None:
        raise ValueError(
            f"dropout_rate is {rate}, but dropout_rng is missing; pass a key of jax.random, or "
            "deterministic=True"
        )
    return {"dropout_p": rate, "dropout_seed": rng}


def _as_bias(bias: Any | None, query: Any) -> Any | None:
    """Return a bias in float32, or in query's dtype if it has that already."""
    if bias is None or jnp.asarray(bias).dtype == query.dtype:
        return bias
    return jnp.asarray(bias, jnp.float64 if query.dtype == jnp.float64 else jnp.float32)


def _with_one_batch_axis(scores: Any | None, query: Any) -> Any | None:
    """Return an array of scores with all axes before heads merged into one."""
    if scores is None or scores.ndim <= 4:
        return scores
    *batch, heads, rows, keys = scores.shape
    if math.prod(batch) != 1:
        batch = query.shape[:-3]
        scores = jnp.broadcast_to(scores, (*batch, heads, rows, keys))
    return scores.reshape(math.prod(batch), heads, rows, keys)
