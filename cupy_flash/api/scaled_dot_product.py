"""Attention with the arguments, shapes and causal mask of PyTorch's function."""

from __future__ import annotations

from typing import Any

from cupy_flash.api.dense import flash_attention
from cupy_flash.calls import scaled_dot_product


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as ``torch.nn.functional.scaled_dot_product_attention`` computes it.

    The axes are (..., heads, seqlen, head_dim), as PyTorch's own function has them.

    softmax(scale * query key^T + attn_mask) value, by `flash_attention` with layout="bhsd". For
    gradients of PyTorch's tensors see the function of this name in `cupy_flash.torch`.

    Parameters
    ----------
    query : array, shape (..., heads, seqlen_q, head_dim)
        Queries, with heads before seqlen. Two axes are one head; with three axes the first one is
        heads. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that speaks DLPack.
        Four axes are read in place as `flash_attention` reads them.
    key : array, shape (..., heads_kv, seqlen_k, head_dim)
        Keys, of the same dtype and kind, with the same leading axes.
    value : array, shape (..., heads_kv, seqlen_k, head_dim_v)
        Values.
    attn_mask : array, optional
        Mask that broadcasts to (..., heads, seqlen_q, seqlen_k). A query attends to a key where a
        bool mask is True. A mask of float32 or query's dtype is added to the scaled scores.
    dropout_p : float
        Probability of dropout, of which only 0 is supported.
    is_causal : bool
        Whether query i sees only the keys j <= i. The mask is aligned at the top left also if
        seqlen_q and seqlen_k differ, unlike that of `flash_attention(causal=True)`. Not together
        with attn_mask.
    scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim).
    enable_gqa : bool
        Whether heads may be a multiple of heads_kv; query head h then reads head
        h // (heads // heads_kv). Otherwise they are equal.

    Returns
    -------
    array, shape (..., heads, seqlen_q, head_dim_v)
        Result of query's kind and dtype. A row whose keys are all masked is 0.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, and for attn_mask together with is_causal.
    UnsupportedError
        For a dropout_p other than 0, and as `flash_attention`.
    CompileError
        If a kernel does not compile.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import scaled_dot_product_attention
    >>> query = np.ones((1, 2, 4, 8), np.float32)  # batch, heads, seqlen, head_dim
    >>> scaled_dot_product_attention(query, query, query, is_causal=True).shape
    (1, 2, 4, 8)
    """
    arrays, options, finish = scaled_dot_product.prepared(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    return finish(flash_attention(*arrays, **options))
