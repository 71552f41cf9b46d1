"""Gradients of attention of batches of equal lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cupy_flash.calls import run_backward
from cupy_flash.calls.gradients import GradientArguments
from cupy_flash.calls.options import Options
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


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
    q_offset: int | None = None,
    layout: str = "bshd",
    wrt: Sequence[str] | None = None,
    dq: Any | None = None,
    dk: Any | None = None,
    dv: Any | None = None,
    grad_dtype: str | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Gradients of `flash_attention`, without the score matrix in memory.

    FlashAttention-2's backward pass (Dao 2023, algorithm 2), in a fixed order.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output: of its dtype and kind, with strides of its own (0 too).
    q, k, v, causal, softmax_scale, q_offset, layout, backend, **modifications
        As of the `flash_attention` call whose gradients these are.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        What the call returned.
    lse : array, shape (batch, heads_q, seqlen_q)
        And its log-sum-exp: call it with ``return_lse=True``.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp, of its dtype, where something depends on it.
    wrt : sequence of str, optional
        Inputs whose gradients are returned, by default ("q", "k", "v"). What is left out costs
        nothing.
    dq, dk, dv : array, optional
        Where to write the gradients: as q, k and v, but for strides, with a contiguous last axis.
        No overlap with anything.
    grad_dtype : str, optional
        Of the gradients: "float32", or by default the inputs' dtype.
    family, tile : optional
        Kernel family, "mma" or "simt", and tile in place of the planner's choice.

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
        wrt=run_backward.wanted(wrt),
        grad_dtype=grad_dtype,
    )
    arguments = GradientArguments(q, k, v, out, dout, lse, dlse, dq, dk, dv)
    return run_backward.gradients(arguments, options, backend, modifications)
