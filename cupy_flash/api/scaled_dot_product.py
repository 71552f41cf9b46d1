"""Public function with the arguments, shapes and causal mask of PyTorch's attention function."""

from __future__ import annotations

from typing import Any

from cupy_flash.api.dense import flash_attention
from cupy_flash.calls import scaled_dot_product
from cupy_flash.opaque import opaque


@opaque
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_seed: Any | None = None,
    stream: Any | None = None,
) -> Any:
    """Compute attention as ``torch.nn.functional.scaled_dot_product_attention`` does.

    The axes are (..., heads, seqlen, head_dim), as PyTorch's own function has them.

    The result is softmax(scale * query key^T + attn_mask) value, computed by `flash_attention` with
    layout="bhsd". The function of this name in `cupy_flash.torch` also provides gradients.

    Parameters
    ----------
    query : array, shape (..., heads, seqlen_q, head_dim)
        Queries, with heads before seqlen. Two axes mean a single head; with three axes the first is
        heads. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that supports
        DLPack. Arrays with four axes are read in place like those of `flash_attention`.
    key : array, shape (..., heads_kv, seqlen_k, head_dim)
        Keys, with the dtype and array type of query, and the same leading axes.
    value : array, shape (..., heads_kv, seqlen_k, head_dim_v)
        Values, with the dtype and array type of query.
    attn_mask : array, optional
        Mask that broadcasts to (..., heads, seqlen_q, seqlen_k). A query attends to a key where a
        bool mask is True. A mask of float32 or query's dtype is added to the scaled scores.
    dropout_p : float
        Probability of dropping a weight of the softmax, see `flash_attention`. PyTorch's own
        function drops other weights.
    is_causal : bool
        Whether query i attends only to the keys j <= i. The mask is aligned at the top left, also
        if seqlen_q and seqlen_k differ, unlike that of `flash_attention(causal=True)`. Excludes
        attn_mask.
    scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim).
    enable_gqa : bool
        Whether heads may be a multiple of heads_kv; query head h then uses KV head
        h // (heads // heads_kv). Otherwise heads and heads_kv must be equal.
    dropout_seed : int or int64 array, shape (2,), optional
        Seed of the weights to drop, see `flash_attention`. By default each call draws a new one.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.

    Returns
    -------
    array, shape (..., heads, seqlen_q, head_dim_v)
        Output, with the array type and dtype of query. A fully masked row is 0.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype.
    ValueError
        If shapes do not match, or attn_mask is given together with is_causal.
    UnsupportedError
        In the cases of `flash_attention`.
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
    return scaled_dot_product.run(
        *(flash_attention, query, key, value, attn_mask),
        *(dropout_p, is_causal, scale, enable_gqa),
        *(dropout_seed, stream),
    )
