"""Public functions that compute attention together with its tangent (forward-mode derivative)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cupy_flash.calls.dispatch_tangents import on_gpu
from cupy_flash.calls.options import Options
from cupy_flash.opaque import opaque
from cupy_flash.reference.packed_tangents import packed_in_precision_of_inputs
from cupy_flash.reference.tangents import Tangents, in_precision_of_inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


@opaque
def flash_attention_jvp(
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    modification_tangents: Mapping[str, Any] | None = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute `flash_attention` and its tangent, the derivative along a direction in its inputs.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16, float32 or float64, of any array type and with any batch axes
        that `flash_attention` takes.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the dtype and the array type of q.
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values, with the dtype and the array type of q.
    q_tangent, k_tangent, v_tangent : arrays, optional
        Tangents of q, k and v, with the shapes, the dtype and the array type of these arrays. A
        missing tangent counts as zeros, and takes no time.
    causal, softmax_scale, q_offset, layout, stream
        See `flash_attention`; all arrays have the layout of q.
    return_lse : bool
        Whether to return the log-sum-exp of each query row and its tangent, too.
    modification_tangents : mapping, optional
        Tangents of modifications, by the names that `wrt` of `flash_attention_backward` takes:
        "bias", "sinks", "alibi_slopes", and "score_mod.NAME" for an array that a `ScoreMod`
        captures as differentiable. They have the shapes of these arrays, any float dtype, and are
        in the memory of q. None counts as zeros.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, with the array type and dtype of q. Queries that attend to no key have 0.
    out_tangent : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Tangent of the output, with the array type and dtype of q.
    lse : float32 or float64 array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, natural logarithm; float64 for float64 inputs. Only with ``return_lse``.
    lse_tangent : float32 or float64 array, shape (batch, heads_q, seqlen_q)
        Tangent of the log-sum-exp, with the dtype of lse. Only with ``return_lse``.

    Raises
    ------
    TypeError
        If an input is not an array, has a wrong dtype or is in other memory than q, or a
        modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, the shape of a modification does not fit, or
        `modification_tangents` names an array that the call does not have.
    UnsupportedError
        If `stream` is given and no GPU can be used, or if no kernel supports the call.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    On a GPU, the call is `flash_attention` followed by one kernel, which computes the scores and
    their tangents tile by tile. On the CPU, and if modifications have tangents, it uses array
    operations on chunks of query rows, and a chunk takes up to half a GiB, or one GiB if the inputs
    are float64. In both cases, memory grows with the lengths of the sequences rather than with
    their product. All sums are float32, or float64 for float64 inputs.

    Masked pairs affect no result, whatever their queries, keys and the tangents of these hold.
    On a GPU, a NaN or infinity in a masked value or its tangent may reach rows that attend to other
    keys of the same KV tile. A query that attends to no key has tangents of 0, and one that attends
    to a single key has exactly the tangent of its value. (On a GPU, it has this tangent up to
    rounding if a mask function or array leaves only this key and its score is in the thousands.)

    References
    ----------
    Lu and Song, "Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models" (2024),
    derive the tangent of attention that is computed in tiles.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_jvp
    >>> q = k = np.ones((1, 2, 1, 4), np.float32)
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    >>> k_tangent = np.zeros_like(k)
    >>> k_tangent[0, 1] = 1
    >>> out, out_tangent = flash_attention_jvp(q, k, v, k_tangent=k_tangent)
    >>> out_tangent[0, 0, 0].round(3)
    array([2., 2., 2., 2.], dtype=float32)
    """
    tangents = Tangents(q_tangent, k_tangent, v_tangent)
    options = Options(causal=causal, softmax_scale=softmax_scale, q_offset=q_offset, layout=layout)
    if not _any_given(modification_tangents):
        results = on_gpu((q, k, v), tangents, options, modifications, stream)
        if results is not None:
            return results if return_lse else results[:2]
    return in_precision_of_inputs(
        *(q, k, v),
        tangents,
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        return_lse=return_lse,
        modification_tangents=modification_tangents,
        stream=stream,
        modifications=modifications,
    )


@opaque
def flash_attention_varlen_jvp(
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
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    modification_tangents: Mapping[str, Any] | None = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute `flash_attention_varlen` and its tangent, see `flash_attention_jvp`.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences in float16, bfloat16, float32 or float64.
    k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `flash_attention_varlen`; pages are not supported.
    q_tangent, k_tangent, v_tangent : arrays, optional
        Tangents of q, k and v, with the shapes, the dtype and the array type of these arrays. A
        missing tangent counts as zeros, and takes no time.
    causal, softmax_scale, seqused_k, stream
        See `flash_attention_varlen`.
    return_lse : bool
        Whether to return the log-sum-exp of each query row and its tangent, too.
    modification_tangents : mapping, optional
        Tangents of modifications, see `flash_attention_jvp`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output, with the array type and dtype of q. Rows that attend to no key, or belong to no
        sequence, are 0.
    out_tangent : array, shape (total_q, heads_q, head_dim_v)
        Tangent of the output, with the array type and dtype of q.
    lse : float32 or float64 array, shape (heads_q, total_q)
        Log-sum-exp, natural logarithm; float64 for float64 inputs. Only with ``return_lse``.
    lse_tangent : float32 or float64 array, shape (heads_q, total_q)
        Tangent of the log-sum-exp, with the dtype of lse. Only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention_jvp`.

    References
    ----------
    Lu and Song, see `flash_attention_jvp`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen_jvp
    >>> q = k = v = np.ones((7, 2, 8), np.float32)
    >>> ends = [0, 3, 7]
    >>> out, out_tangent = flash_attention_varlen_jvp(q, k, v, ends, ends, 4, 4, v_tangent=v)
    >>> out_tangent.shape
    (7, 2, 8)
    """
    tangents = Tangents(q_tangent, k_tangent, v_tangent)
    options = Options(
        "varlen",
        causal=causal,
        softmax_scale=softmax_scale,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
    if not _any_given(modification_tangents):
        results = on_gpu((q, k, v), tangents, options, modifications, stream, lengths)
        if results is not None:
            return results if return_lse else results[:2]
    return packed_in_precision_of_inputs(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        tangents,
        causal=causal,
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        return_lse=return_lse,
        modification_tangents=modification_tangents,
        stream=stream,
        modifications=modifications,
    )


def _any_given(tangents: Mapping[str, Any] | None) -> bool:
    """Return whether a modification has a tangent, which no kernel reads."""
    return tangents is not None and any(x is not None for x in tangents.values())
