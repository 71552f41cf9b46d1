"""Reference formula for the gradients of varlen calls, computed sequence by sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.opaque import opaque
from cupy_flash.reference.gradients import (
    EXACT,
    SIZES,
    Arithmetic,
    Gradients,
    ScoreErrors,
    check_rows,
    gradient_formula,
    read_all,
    with_slopes,
)
from cupy_flash.reference.key_lists import packed_lists
from cupy_flash.reference.packed import packed_modifications, packed_sequences, part_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


@opaque
def attention_varlen_backward_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    wrt: Iterable[str] | None = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute the gradients of attention on packed sequences in float64 by the plain formula.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of the output, with the array type of q and any float dtype.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `cupy_flash.attention_varlen_reference`; pages are not supported.
    dlse : array, shape (heads_q, total_q), optional
        Gradient of the log-sum-exp.
    causal, softmax_scale, seqused_k, **modifications
        See `cupy_flash.attention_varlen_reference`.
    wrt, stream
        See `cupy_flash.attention_backward_reference`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, see `cupy_flash.flash_attention_varlen`.

    Returns
    -------
    tuple of float64 arrays
        Gradients, see `cupy_flash.attention_backward_reference`. Rows that belong to no sequence
        have gradients of 0; rows of two sequences have the sum of both gradients.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `cupy_flash.attention_backward_reference`.
    """
    with on_stream(stream, q):
        return packed_gradients(
            *(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            arithmetic=EXACT,
            dlse=dlse,
            causal=causal,
            softmax_scale=softmax_scale,
            seqused_k=seqused_k,
            wrt=wrt,
            key_indices=key_indices,
            **modifications,
        )


def backward_varlen_naive(
    dout: Any, q: Any, *others: Any, out: Any = None, grad_dtype: Any = None, **options: Any
) -> tuple[Any, ...]:
    """Compute the gradients of packed sequences as one writes them without a fused kernel.

    Parameters
    ----------
    dout, q, *others, **options
        See :func:`attention_varlen_backward_reference`.
    out : array, shape (total_q, heads_q, head_dim_v), optional
        Output, see :func:`~cupy_flash.reference.gradients.backward_naive`.
    grad_dtype : dtype, optional
        Dtype of the gradients; by default that of each input.

    Returns
    -------
    tuple of arrays
        Gradients, see :func:`attention_varlen_backward_reference`.
    """
    arithmetic = Arithmetic.of(read("q", q).dtype, grad_dtype)
    return packed_gradients(dout, q, *others, arithmetic=arithmetic, out=out, **options)


def gradient_varlen_sizes(
    dout: Any, q: Any, *others: Any, errors: ScoreErrors | None = None, **options: Any
) -> tuple[Any, ...]:
    """Compute the sums of absolute values of all terms of the gradients of packed sequences.

    Parameters
    ----------
    dout, q, *others, **options
        See :func:`attention_varlen_backward_reference`.
    errors
        Error bounds, see :func:`~cupy_flash.reference.gradients.gradient_sizes`.

    Returns
    -------
    tuple of float64 arrays
        Sums, see :func:`~cupy_flash.reference.gradients.gradient_sizes`.
    """
    arithmetic = SIZES._replace(errors=errors)
    return packed_gradients(dout, q, *others, arithmetic=arithmetic, **options)


def packed_gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    arithmetic: Arithmetic,
    out: Any = None,
    dlse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    wrt: Iterable[str] | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute the gradients of packed sequences with any arithmetic and output."""
    convert = result_converter("q", q)
    q, k, v, dout, out, dlse = read_all(q=q, k=k, v=v, dout=dout, out=out, dlse=dlse)
    check_rows(dout, out, dlse, (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0]))
    wrt, changes = with_slopes(wrt, modifications)
    bound_mods = packed_modifications(
        changes, q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
    )
    gradients = Gradients({"q": q, "k": k, "v": v}, changes, bound_mods, wrt, arithmetic)
    lists = packed_lists(array_module(q), key_indices)
    for rows, keys, sequence in packed_sequences(
        *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), seqused_k=seqused_k
    ):
        part = functools.partial(part_of, rows=rows, keys=keys)
        gradient_formula(
            *(part("q", dout), part("q", q), part("k", k), part("v", v)),
            out=None if out is None else part("q", out),
            dlse=None if dlse is None else dlse[None, :, rows],
            causal=causal,
            softmax_scale=softmax_scale,
            bound_mods=bound_mods,
            sequence=sequence,
            arithmetic=arithmetic,
            into=gradients.parts(part),
            lists=None if lists is None else lists[None, :, rows],
        )
    return gradients.results(convert)
