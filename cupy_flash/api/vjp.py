"""Public functions that return attention and a pullback function, for use without autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash.api.backward import (
    flash_attention_backward,
    flash_attention_qkvpacked_backward,
    flash_attention_varlen_backward,
)
from cupy_flash.api.dense import flash_attention, flash_attention_qkvpacked
from cupy_flash.api.varlen import flash_attention_varlen
from cupy_flash.calls.check.gradients import require_grad_dtype
from cupy_flash.calls.dispatch_backward import wanted, wanted_of_qkv
from cupy_flash.mods.keywords import DROPOUT_SEED, require_known
from cupy_flash.opaque import opaque
from cupy_flash.problem.tile import TileRequest
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications


@opaque
def flash_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    wrt: Sequence[str] | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Compute `flash_attention` and return its result with a pullback function.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, backend, stream, key_indices,
    **modifications
        See `flash_attention`.
    wrt, grad_dtype
        See `flash_attention_backward`.
    family, tile
        Kernel family and tile of the forward call, see `flash_attention`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output of `flash_attention`. With return_lse, the pair (out, lse).
    pullback : callable
        ``pullback(dout)`` returns the gradients of q, k and v, or of the inputs that `wrt` names.
        It also takes ``dlse``, the gradient of lse, and the ``family`` and ``tile`` of
        `flash_attention_backward`. It keeps references to the inputs and to out, and reads their
        contents when it is called. It can be called any number of times.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention` and `flash_attention_backward`.

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
    _require_known(modifications)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "q_offset": q_offset,
        "layout": layout,
        "backend": backend,
        "stream": stream,
        "key_indices": key_indices,
        **_with_own_seed(modifications),
    }
    gradients = {"wrt": wanted(wrt, modifications), "grad_dtype": _checked(grad_dtype)}
    results = flash_attention(q, k, v, return_lse=True, family=family, tile=tile, **options)
    return _with_pullback(
        *(flash_attention_backward, (q, k, v), results, (), options | gradients),
        return_lse=return_lse,
    )


@opaque
def flash_attention_qkvpacked_vjp(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    wrt: Sequence[str] | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, Callable[..., Any]]:
    """Compute `flash_attention_qkvpacked` and return its result with a pullback function.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis.
    causal, softmax_scale, q_offset, return_lse, backend, family, tile, stream, **modifications
        See `flash_attention_qkvpacked`.
    wrt, grad_dtype
        See `flash_attention_qkvpacked_backward`.

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        Output of `flash_attention_qkvpacked`. With return_lse, the pair (out, lse).
    pullback : callable
        See `flash_attention_vjp`. Returns the result of `flash_attention_qkvpacked_backward`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention_qkvpacked` and `flash_attention_qkvpacked_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_qkvpacked_vjp
    >>> qkv = np.ones((1, 4, 3, 2, 8), np.float32)
    >>> out, pullback = flash_attention_qkvpacked_vjp(qkv, causal=True)
    >>> pullback(np.ones_like(out)).shape
    (1, 4, 3, 2, 8)
    """
    _require_known(modifications)
    wanted_of_qkv(wrt, modifications)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "q_offset": q_offset,
        "backend": backend,
        "stream": stream,
        **_with_own_seed(modifications),
    }
    gradients = {"wrt": wrt, "grad_dtype": _checked(grad_dtype)}
    results = flash_attention_qkvpacked(qkv, return_lse=True, family=family, tile=tile, **options)
    return _with_pullback(
        *(flash_attention_qkvpacked_backward, (qkv,), results, (), options | gradients),
        return_lse=return_lse,
    )


@opaque
def flash_attention_varlen_vjp(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any | None = None,
    return_lse: bool = False,
    wrt: Sequence[str] | None = None,
    grad_dtype: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Compute `flash_attention_varlen` and return its result with a pullback function.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, return_lse, backend, family, tile, stream, key_indices, **modifications
        See `flash_attention_varlen`. Keys and values are packed, and have the dtype of q.
    wrt, grad_dtype
        See `flash_attention_backward`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output of `flash_attention_varlen`. With return_lse, the pair (out, lse).
    pullback : callable
        See `flash_attention_vjp`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention_varlen` and `flash_attention_varlen_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen_vjp
    >>> q = k = v = np.ones((4, 2, 8), np.float32)
    >>> cu_seqlens = np.array([0, 1, 4], np.int32)
    >>> out, pullback = flash_attention_varlen_vjp(q, k, v, cu_seqlens, cu_seqlens, 3, 3)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dv[:, 0, 0].round(3)
    array([1., 1., 1., 1.], dtype=float32)
    """
    _require_known(modifications)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "seqused_k": seqused_k,
        "backend": backend,
        "stream": stream,
        "key_indices": key_indices,
        **_with_own_seed(modifications),
    }
    gradients = {"wrt": wanted(wrt, modifications), "grad_dtype": _checked(grad_dtype)}
    inputs, lengths = (q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results = flash_attention_varlen(
        *inputs, *lengths, return_lse=True, family=family, tile=tile, **options
    )
    return _with_pullback(
        *(flash_attention_varlen_backward, inputs, results, lengths, options | gradients),
        return_lse=return_lse,
    )


def _with_own_seed(modifications: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return modifications with a copy of a dropout_seed that the caller may change in place.

    Arrays on a GPU are not copied.
    """
    seed = modifications.get(DROPOUT_SEED)
    if not isinstance(seed, (list, np.ndarray)):
        return modifications
    return {**modifications, DROPOUT_SEED: copy.copy(seed)}


def _require_known(modifications: Mapping[str, Any]) -> None:
    for name in modifications:
        require_known(name)


def _checked(grad_dtype: Any) -> Any:
    grad_dtype = named_dtype(grad_dtype)
    require_grad_dtype(grad_dtype)
    return grad_dtype


def _with_pullback(
    backward: Callable[..., Any],
    inputs: tuple[Any, ...],
    results: tuple[Any, Any],
    lengths: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    return_lse: bool,
) -> tuple[Any, Callable[..., Any]]:
    """Return the results of a forward call, and a function that computes its gradients."""
    out, lse = results

    def pullback(
        dout: Any,
        dlse: Any | None = None,
        *,
        family: str | None = None,
        tile: TileRequest = None,
    ) -> Any:
        how = {**options, "dlse": dlse, "family": family, "tile": tile}
        return backward(dout, *inputs, out, lse, *lengths, **how)

    return ((out, lse) if return_lse else out), pullback
