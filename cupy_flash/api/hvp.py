"""Public functions that compute tangents of the gradients of attention (second derivatives)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.hessian_products import in_precision_of_inputs
from cupy_flash.reference.packed_hessian_products import packed_in_precision_of_inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


@opaque
def flash_attention_hvp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    dout_tangent: Any = None,
    *,
    dlse: Any = None,
    dlse_tangent: Any = None,
    modification_tangents: Mapping[str, Any] | None = None,
    wrt: Iterable[str] = ROWS,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute the derivatives of the gradients of `flash_attention` along a direction.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    If the tangents of dout and dlse are zeros, the results are the product of the Hessian of
    sum(dout * out) + sum(dlse * lse), as a function of the inputs, and the direction.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output, with the dtype and the array type of q.
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16, float32 or float64, of any array type and with any batch axes
        that `flash_attention` takes.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the dtype and the array type of q.
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values, with the dtype and the array type of q.
    q_tangent, k_tangent, v_tangent, dout_tangent : arrays, optional
        Tangents of q, k, v and dout, with the shapes, the dtype and the array type of these arrays.
        A missing tangent counts as zeros, and its products take no time.
    dlse, dlse_tangent : arrays, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp, if the loss depends on it, and its tangent, in any float dtype.
    modification_tangents : mapping, optional
        Tangents of modifications, see `flash_attention_jvp`.
    wrt : iterable of str
        Names of the inputs whose gradients are differentiated, as `flash_attention_backward` takes
        them: by default "q", "k" and "v". Results that are not requested take no time.
    causal, softmax_scale, q_offset, layout, stream
        See `flash_attention`; all arrays have the layout of q.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    tuple of arrays
        Tangents of the gradients, in the order of `wrt`, with the shapes and the dtypes of the
        inputs and the array type of q. Those of q, k and v are exactly 0 for a fully masked query
        row and for a key that no query attends to.

    Raises
    ------
    TypeError
        If an input is not an array, has a wrong dtype or is in other memory than q, or a
        modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, the shape of a modification does not fit, or `wrt` or
        `modification_tangents` names an input that the call does not have.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    Operations of NumPy or CuPy compute chunks of query rows on the device of the inputs, without a
    fused kernel: the memory grows with the lengths of the sequences rather than with their product.
    A chunk takes up to one GiB, or two GiB if the inputs are
    float64. All sums are float32, or float64 for float64 inputs. A GPU waits between chunks, so
    that the call cannot be captured in a CUDA graph.

    Masked pairs affect no result, whatever their keys, values and tangents hold. The score of a
    query that attends to a single key has no effect on the output. The tangent of dq of such a
    query, and its contribution to the tangent of dk, are exactly 0 unless dlse or its tangent is
    given.

    The dot product of the direction and the gradients of q, k and v can also be differentiated with
    respect to dout and dlse. These derivatives are the tangents of out and lse along the direction,
    which `flash_attention_jvp` computes.

    References
    ----------
    Pearlmutter, "Fast Exact Multiplication by the Hessian" (1994), computes products with the
    Hessian as derivatives of gradients along a direction.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_hvp
    >>> q = k = np.ones((1, 2, 1, 4), np.float32)
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    >>> v_tangent = np.zeros_like(v)
    >>> v_tangent[0, 1] = 1
    >>> dq, dk, dv = flash_attention_hvp(v, q, k, v, v_tangent=v_tangent)
    >>> dk[0, 1, 0].round(3)
    array([3.5, 3.5, 3.5, 3.5], dtype=float32)
    """
    return in_precision_of_inputs(
        *(dout, q, k, v),
        {"q": q_tangent, "k": k_tangent, "v": v_tangent, "dout": dout_tangent},
        {"dlse": dlse, "dlse_tangent": dlse_tangent},
        wrt,
        stream,
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        modification_tangents=modification_tangents,
        modifications=modifications,
    )


@opaque
def flash_attention_varlen_hvp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    dout_tangent: Any = None,
    *,
    dlse: Any = None,
    dlse_tangent: Any = None,
    modification_tangents: Mapping[str, Any] | None = None,
    wrt: Iterable[str] = ROWS,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute the derivatives of the gradients of `flash_attention_varlen`.

    See `flash_attention_hvp` for the direction of these derivatives.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of the output, with the dtype and the array type of q.
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences in float16, bfloat16, float32 or float64.
    k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `flash_attention_varlen`; pages are not supported.
    q_tangent, k_tangent, v_tangent, dout_tangent : arrays, optional
        Tangents of q, k, v and dout, with the shapes, the dtype and the array type of these arrays.
        A missing tangent counts as zeros, and its products take no time.
    dlse, dlse_tangent : arrays, shape (heads_q, total_q), optional
        Gradient of the log-sum-exp, if the loss depends on it, and its tangent, in any float dtype.
    modification_tangents, wrt
        See `flash_attention_hvp`.
    causal, softmax_scale, seqused_k, stream
        See `flash_attention_varlen`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    tuple of arrays
        Tangents of the gradients, see `flash_attention_hvp`. Rows that belong to no sequence have
        0; rows of two sequences have the sum of both results.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `flash_attention_hvp`.

    Notes
    -----
    Each sequence is computed as `flash_attention_hvp` computes a batch. On a GPU, the offsets and
    lengths are copied to the host, which waits for them.

    References
    ----------
    Pearlmutter, see `flash_attention_hvp`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen_hvp
    >>> q = k = v = dout = np.ones((7, 2, 8), np.float32)
    >>> ends = [0, 3, 7]
    >>> dq, dk, dv = flash_attention_varlen_hvp(dout, q, k, v, ends, ends, 4, 4, v_tangent=v)
    >>> dq.shape
    (7, 2, 8)
    """
    return packed_in_precision_of_inputs(
        *(dout, q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)),
        {"q": q_tangent, "k": k_tangent, "v": v_tangent, "dout": dout_tangent},
        {"dlse": dlse, "dlse_tangent": dlse_tangent},
        wrt,
        stream,
        causal=causal,
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        modification_tangents=modification_tangents,
        modifications=modifications,
    )
