"""Attention with its gradients, for those who have no autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cupy_flash.api.backward import flash_attention_backward
from cupy_flash.api.dense import flash_attention
from cupy_flash.arrays.strided import named_dtype
from cupy_flash.calls.gradients import require_grad_dtype
from cupy_flash.calls.run_backward import wanted
from cupy_flash.mods.keywords import require_known

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


def flash_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    wrt: Sequence[str] | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    **modifications: Unpack[Modifications],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """`flash_attention`, and the function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, backend, **modifications
        As of `flash_attention`.
    wrt, grad_dtype
        As of `flash_attention_backward`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        With return_lse the pair of out and lse.
    pullback : callable
        ``pullback(dout)`` returns the gradients of q, k and v, or of what `wrt` names. It takes
        ``dlse`` besides, the gradient of lse. It holds on to the inputs and to out, and reads them
        as they are when it is called; call it as often as you like.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As `flash_attention` and `flash_attention_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_vjp
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> out, pullback = flash_attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dv[0, :, 0, 0].round(3)
    array([2.083, 1.083, 0.583, 0.25 ], dtype=float32)
    """
    for name in modifications:
        require_known(name)
    wrt = wanted(wrt, modifications)
    grad_dtype = named_dtype(grad_dtype)
    require_grad_dtype(grad_dtype)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "q_offset": q_offset,
        "layout": layout,
        "backend": backend,
        **modifications,
    }
    out, lse = flash_attention(q, k, v, return_lse=True, **options)

    def pullback(dout: Any, dlse: Any | None = None) -> tuple[Any, ...]:
        return flash_attention_backward(
            *(dout, q, k, v, out, lse), dlse=dlse, wrt=wrt, grad_dtype=grad_dtype, **options
        )

    return ((out, lse) if return_lse else out), pullback
