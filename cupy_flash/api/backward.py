"""Gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cupy_flash.calls import run_backward
from cupy_flash.calls.gradients import GradientArguments
from cupy_flash.calls.options import Options
from cupy_flash.problem.tile import TileRequest, freeze_tile
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


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
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Gradients of `flash_attention`, without the score matrix in memory.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    FlashAttention-2's backward pass (Dao 2023, algorithm 2), in a fixed order.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output: of its dtype and kind, with strides of its own (0 too).
    q, k, v, causal, softmax_scale, q_offset, layout, backend, **modifications
        As of the `flash_attention` call whose gradients these are. There may be no
        batch axis or several; all arrays then have the same ones.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        What the call returned.
    lse : array, shape (batch, heads_q, seqlen_q)
        And its log-sum-exp: call it with ``return_lse=True``.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp, of its dtype, where something depends on it.
    wrt : sequence of str, optional
        Inputs whose gradients are returned: "q", "k", "v", "bias", "sinks", and "score_mod.NAME" of
        an array that a `ScoreMod` captures as differentiable. By default q, k and v, and then every
        such array. What is left out costs nothing.
    dq, dk, dv : array, optional
        Where to write the gradients: as q, k and v, but for strides, with a contiguous last axis.
        No overlap with anything.
    grad_dtype : dtype or str, optional
        The dtype of the gradients: float32, or by default the inputs' dtype.
    family, tile : optional
        Kernel family, "hopper", "mma" or "simt", and tile, in place of the planner's.

    Returns
    -------
    tuple of arrays
        The gradients in the order of `wrt`, each of its input's shape and kind. A query that sees
        no key and a key that no query sees have exact zeros.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, or a wrong value.
    UnsupportedError
        For a problem that no kernel serves.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    Same inputs give the same bits. Runs on the current device and stream and does not synchronize
    (NumPy results apart). Sums are kept in float32, of float64 inputs in float64. NaN and inf
    propagate as in the formula, and masked pairs leave no trace, but that a NaN in a row of q, k or
    dout reaches what shares a tile with it as 0 * NaN where only causality or another mask hides
    the pair.

    Gradients of a bias, of sinks and of captured arrays have kernels of their own on a GPU, which
    find the scores anew. Of an array that is captured they take 16 bytes and a quarter of memory
    for each element, and of a bias that is broadcast to many more scores than it has elements a few
    copies of its gradient; `plan` shows how much.

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
    options = Options(
        "equal",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        q_offset,
        layout,
        wrt=run_backward.wanted(wrt, modifications),
        grad_dtype=named_dtype(grad_dtype),
    )
    arguments = GradientArguments(q, k, v, out, dout, lse, dlse, dq, dk, dv)
    return run_backward.gradients(arguments, options, backend, modifications)


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
    **modifications: Unpack[Modifications],
) -> Any:
    """Gradients of `flash_attention_qkvpacked`: that of qkv in one array as well.

    Parameters
    ----------
    dout, out, lse, dlse, causal, softmax_scale, q_offset, grad_dtype, backend, family, tile,
    **modifications
        As of `flash_attention_backward`.
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis, after any batch axes.
    wrt : sequence of str, optional
        Inputs whose gradients are returned: "qkv", "bias", "sinks", and "score_mod.NAME" of an
        array that a `ScoreMod` captures as differentiable. By default "qkv", and then every such
        array.
    dqkv : array, optional
        The gradient of qkv is written here; same shape, dtype and kind as qkv.

    Returns
    -------
    dqkv : array, shape (batch, seqlen, 3, heads, head_dim)
        The gradient, of qkv's kind, if `wrt` is left out and no captured array is differentiable.
        Otherwise a tuple of the gradients in the order of `wrt`.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention_backward`, and for a qkv or dqkv of another shape.
    """
    names = run_backward.wanted_of_qkv(wrt, modifications)
    options = Options(
        "equal",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        q_offset,
        grad_dtype=named_dtype(grad_dtype),
    )
    others = GradientArguments(None, None, None, out, dout, lse, dlse)
    found = run_backward.gradients_of_qkv(
        *(qkv, dqkv, others, options, backend, names), modifications
    )
    return found[0] if wrt is None and len(found) == 1 else found


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
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Gradients of `flash_attention_varlen` of packed queries, keys and values.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of the output.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, backend, **modifications
        As of the `flash_attention_varlen` call whose gradients these are. A key is of one sequence:
        seqused_k is at most what cu_seqlens_k says.
    out : array, shape (total_q, heads_q, head_dim_v)
        What the call returned.
    lse, dlse : array, shape (heads_q, total_q)
        Its log-sum-exp, and the gradient of that.
    wrt, dq, dk, dv, grad_dtype, family, tile
        As of `flash_attention_backward`.

    Returns
    -------
    tuple of arrays
        The gradients in the order of `wrt`. Rows that belong to no sequence are zeros.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `flash_attention_varlen` and `flash_attention_backward`.

    Notes
    -----
    As of `flash_attention_varlen`: what stands in arrays on a GPU is not checked, and leads no
    kernel outside of the arrays. Where cu_seqlens decrease, or seqused_k is more than they say, a
    row is still of one sequence at most.
    """
    options = Options(
        "packed",
        causal,
        softmax_scale,
        True,
        family,
        freeze_tile(tile),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        wrt=run_backward.wanted(wrt, modifications),
        grad_dtype=named_dtype(grad_dtype),
    )
    arguments = GradientArguments(
        *(q, k, v, out, dout, lse, dlse, dq, dk, dv),
        *(cu_seqlens_q, cu_seqlens_k, seqused_k),
    )
    return run_backward.gradients(arguments, options, backend, modifications)
