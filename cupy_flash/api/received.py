"""Public function that sums the attention weights of each key over the queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls.dispatch_received import on_gpu
from cupy_flash.calls.options import Options
from cupy_flash.opaque import opaque
from cupy_flash.problem.values import check_bool
from cupy_flash.reference.weights import received_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


@opaque
def attention_received(
    q: Any,
    k: Any,
    *,
    lse: Any | None = None,
    queries: slice | None = None,
    grouped: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute how much attention each key receives: the sum of its weights over the queries.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The sums are those of ``attention_weights(q, k, ...)`` along the axis of queries, without the
    weights themselves. Methods that evict keys from a cache rank keys by them: H2O by the sum over
    all queries, SnapKV by the sum over the last ones.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16, float32 or float64, of any array type and with any batch axes
        that `flash_attention` takes.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the dtype and the array type of q.
    lse : float32 or float64 array, shape (batch, heads_q, seqlen_q), optional
        Log-sum-exp that `flash_attention` returns for the same arguments; float64 for float64
        inputs. Without it, a forward pass computes it first. The CPU does not read it.
    queries : slice, optional
        Queries whose weights are summed, such as ``slice(-32, None)`` for the last 32; consecutive
        ones. By default all.
    grouped : bool
        Whether to add up the sums of the query heads of each KV head.
    causal, softmax_scale, q_offset, layout, stream
        See `flash_attention`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    received : float32 or float64 array, shape (batch, heads_q or heads_kv, seqlen_k)
        Sums of weights, with the array type of q; float64 for float64 inputs. The axes have this
        order for both layouts. If `grouped`, there is one sum for each KV head.

    Raises
    ------
    TypeError
        If an input is not an array or has a wrong dtype, `queries` is not a slice, or a
        modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, `queries` has a step, or the shape of a modification
        does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    On a GPU, one kernel computes the scores tile by tile, and sums in float32, or float64 for
    float64 inputs. On the CPU, and with dropout, array operations compute chunks of weights in
    float64. Either way the memory grows with the lengths of the sequences, not with their product.

    References
    ----------
    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models" (2023). Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation"
    (2024).

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_received
    >>> q = k = np.ones((1, 3, 1, 8), np.float32)
    >>> attention_received(q, k, causal=True)
    array([[[1.8333334 , 0.8333333 , 0.33333334]]], dtype=float32)
    """
    check_bool("grouped", grouped)
    chosen = slice(None) if queries is None else queries
    if not isinstance(chosen, slice):
        raise TypeError(f"queries is {queries!r}; expected a slice, such as slice(-32, None)")
    if chosen.step not in (None, 1):
        raise ValueError(f"queries is {queries!r}; expected consecutive queries, without a step")
    shape = getattr(q, "shape", ())
    seqlen = shape[-2 if layout == "bhsd" else -3] if len(shape) >= 3 else 0
    first, last, _ = chosen.indices(int(seqlen))
    options = Options(
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        received=("groups" if grouped else "heads", first, max(first, last)),
    )
    result = on_gpu(q, k, lse, options, modifications, stream)
    if result is not None:
        return result
    return received_weights(
        *(q, k),
        queries=chosen,
        grouped=bool(grouped),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        stream=stream,
        modifications=modifications,
    )
