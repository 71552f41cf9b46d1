"""Public functions for the gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cupy_flash.calls import dispatch_backward
from cupy_flash.calls.arguments import GradientArguments
from cupy_flash.calls.gpu import repeated_gradients
from cupy_flash.calls.key_lists.backward import gradients_of_lists
from cupy_flash.calls.options import Options
from cupy_flash.opaque import is_dynamo_tracing, marked, opaque
from cupy_flash.problem.tile import TileRequest, freeze_tile
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


@marked
def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    wrt: Sequence[str] | None = None,
    dq: Any | None = None,
    dk: Any | None = None,
    dv: Any | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute the gradients of `flash_attention` without storing the score matrix.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2), in a fixed order.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output, with the output's dtype and array type. Any strides, including 0.
    q, k, v, causal, softmax_scale, q_offset, layout, backend, **modifications
        Arguments of the `flash_attention` call whose gradients are computed. There may be no
        batch axis or several; all arrays then have the same ones.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output of that call.
    lse : array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp of that call, which returns it with ``return_lse=True``.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp, of the same dtype. Pass it if the loss depends on lse.
    wrt : sequence of str, optional
        Names of the inputs whose gradients are returned: "q", "k", "v", "bias", "sinks",
        "alibi_slopes" (an array), and "score_mod.NAME" for an array that a `ScoreMod` captures as
        differentiable. By default q, k and v, followed by every such array. Gradients that are not
        requested cost nothing.
    dq, dk, dv : array, optional
        Arrays that the gradients are written to, with the shapes, dtypes and array type of q, k and
        v. The last axis is contiguous. They must not overlap any other array of the call.
    grad_dtype : dtype or str, optional
        Dtype of the gradients: float32, or by default the dtype of each input.
    family, tile : optional
        Kernel family ("hopper", "mma" or "simt") and tile to use instead of the planner's choice.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, as in the forward call. `wrt` then names only
        q, k and v.

    Returns
    -------
    tuple of arrays
        Gradients in the order of `wrt`, with the shape and array type of each input. They are
        exactly 0 for a fully masked query row and for a key that no query attends to.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype.
    ValueError
        If shapes do not match, or a value is wrong.
    UnsupportedError
        If no kernel supports the problem, or `stream` is given, and no GPU can be used.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    The same inputs give the same bits. The call uses the current device and stream and does not
    synchronize, except to return NumPy arrays. Sums are accumulated in float32, for float64 inputs
    in float64. NaN and inf propagate as in the formula. Masked pairs do not affect the result, with
    one exception: a NaN in a row of q, k or dout can reach other rows of its tile as 0 * NaN.

    On a GPU, separate kernels compute the gradients of a bias, of sinks and of captured arrays from
    recomputed scores. They need a workspace: 16.25 bytes per element of a captured array, and a few
    copies of the gradient of a bias that is broadcast to many more scores than it has elements.
    `plan` shows the size of the workspace.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention, flash_attention_backward
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = flash_attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv[0, :, 0, 0].round(3)
    array([2.083, 1.083, 0.583, 0.25 ], dtype=float32)
    """
    if (
        (dlse is None and wrt is None and dq is None and dk is None and dv is None)
        and (grad_dtype is None and family is None and tile is None)
        and backend == "auto"
        and stream is None
        and key_indices is None
        and not modifications
        and not is_dynamo_tracing()
    ):
        result = repeated_gradients.run(
            q, k, v, out, dout, lse, causal, softmax_scale, q_offset, layout
        )
        if result is not None:
            return result
    options = Options(
        "dense",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        q_offset,
        layout,
        wrt=dispatch_backward.wanted(wrt, modifications),
        grad_dtype=named_dtype(grad_dtype),
    )
    arguments = GradientArguments(q, k, v, out, dout, lse, dlse, dq, dk, dv)
    call = (arguments, options, backend, modifications, stream)
    if key_indices is not None:
        return gradients_of_lists(*call, key_indices)
    return dispatch_backward.gradients(*call)


@opaque
def flash_attention_qkvpacked_backward(
    dout: Any,
    qkv: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    wrt: Sequence[str] | None = None,
    dqkv: Any | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute the gradients of `flash_attention_qkvpacked`, the gradient of qkv as one array.

    Parameters
    ----------
    dout, out, lse, dlse, causal, softmax_scale, q_offset, grad_dtype, backend, family, tile,
    stream, **modifications
        See `flash_attention_backward`.
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis, after any batch axes.
    wrt : sequence of str, optional
        Names of the inputs whose gradients are returned: "qkv", "bias", "sinks",
        "alibi_slopes" (an array), and "score_mod.NAME" for an array that a `ScoreMod` captures as
        differentiable. By default "qkv", followed by every such array.
    dqkv : array, optional
        Array that the gradient of qkv is written to; same shape, dtype and array type as qkv.

    Returns
    -------
    dqkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Gradient of qkv, if `wrt` is not given and no captured array is differentiable.
        Otherwise a tuple of the gradients in the order of `wrt`.

    Raises
    ------
    TypeError, ValueError
        See `flash_attention_backward`; also if qkv or dqkv has another shape.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_qkvpacked, flash_attention_qkvpacked_backward
    >>> qkv = np.ones((1, 4, 3, 2, 8), np.float32)
    >>> out, lse = flash_attention_qkvpacked(qkv, return_lse=True)
    >>> dqkv = flash_attention_qkvpacked_backward(np.ones_like(out), qkv, out, lse)
    >>> dqkv.shape
    (1, 4, 3, 2, 8)
    """
    names = dispatch_backward.wanted_of_qkv(wrt, modifications)
    options = Options(
        "dense",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        q_offset,
        grad_dtype=named_dtype(grad_dtype),
    )
    others = GradientArguments(None, None, None, out, dout, lse, dlse)
    result = dispatch_backward.gradients_of_qkv(
        *(qkv, dqkv, others, options, backend, names), modifications, stream
    )
    return result[0] if wrt is None and len(result) == 1 else result


@marked
def flash_attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Any | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any | None = None,
    wrt: Sequence[str] | None = None,
    dq: Any | None = None,
    dk: Any | None = None,
    dv: Any | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute the gradients of `flash_attention_varlen` for packed queries, keys and values.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of the output.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, backend, **modifications
        Arguments of the `flash_attention_varlen` call whose gradients are computed. seqused_k
        must be at most the length that cu_seqlens_k gives, since a key belongs to one sequence.
    out : array, shape (total_q, heads_q, head_dim_v)
        Output of that call.
    lse, dlse : array, shape (heads_q, total_q)
        Log-sum-exp of that call, and the gradient of the log-sum-exp.
    wrt, dq, dk, dv, grad_dtype, family, tile, stream
        See `flash_attention_backward`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, as in the forward call. `wrt` then names only
        q, k and v.

    Returns
    -------
    tuple of arrays
        Gradients in the order of `wrt`. Rows that belong to no sequence are zeros.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention_varlen` and `flash_attention_backward`.

    Notes
    -----
    The contents of arrays on a GPU are not checked, and cannot cause an access outside the arrays;
    see `flash_attention_varlen`. A row belongs to at most one sequence even if cu_seqlens_q or
    cu_seqlens_k decrease, or seqused_k exceeds the lengths that cu_seqlens_k gives.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen, flash_attention_varlen_backward
    >>> q = k = v = np.ones((4, 2, 8), np.float32)
    >>> cu_seqlens = np.array([0, 1, 4], np.int32)
    >>> lengths = cu_seqlens, cu_seqlens, 3, 3
    >>> out, lse = flash_attention_varlen(q, k, v, *lengths, return_lse=True)
    >>> dq, dk, dv = flash_attention_varlen_backward(
    ...     np.ones_like(out), q, k, v, out, lse, *lengths
    ... )
    >>> dv[:, 0, 0].round(3)
    array([1., 1., 1., 1.], dtype=float32)
    """
    options = Options(
        "varlen",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        wrt=dispatch_backward.wanted(wrt, modifications),
        grad_dtype=named_dtype(grad_dtype),
    )
    arguments = GradientArguments(
        *(q, k, v, out, dout, lse, dlse, dq, dk, dv),
        *(cu_seqlens_q, cu_seqlens_k, seqused_k),
    )
    call = (arguments, options, backend, modifications, stream)
    if key_indices is not None:
        return gradients_of_lists(*call, key_indices)
    return dispatch_backward.gradients(*call)
