"""Attention weights of chosen query rows and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.cuda_interface import is_foreign_array
from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, convert_to
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.opaque import opaque
from cupy_flash.problem.values import count, integer
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.modifications import fitting_modifications, scaled
from cupy_flash.reference.rows import (
    Rows,
    Selection,
    chunks_of_rows,
    precision_of,
    queries_and_keys,
    resolve,
    sinks_of,
    sizes_of,
    softmax_terms,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


@opaque
def attention_weights(
    q: Any,
    k: Any,
    *,
    queries: Any = None,
    heads: Any = None,
    top_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute the weights of attention, ``softmax(softmax_scale * q @ k.T)``, of chosen rows.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The product of the weights and v is the output of `attention_reference` with the same arguments.
    The weights are computed in float64, on the device of q, in chunks of at most
    :data:`~cupy_flash.reference.rows.CHUNK_BYTES`. No kernel stores them, so this function is for
    looking at weights, not for training.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype including ``ml_dtypes.bfloat16``. NumPy, CuPy, or any array that
        supports DLPack, such as a torch tensor. There may be no batch axis or several, as in
        `cupy_flash.flash_attention`.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the array type of q. ``heads_q`` is a multiple of ``heads_kv``; query head ``h``
        uses KV head ``h // (heads_q // heads_kv)``.
    queries : int, slice, or list or integer array with one axis, optional
        Indices of the query rows, in any order and with repetitions; by default all. Negative
        indices count from the last query. They do not change the positions of queries.
    heads : int, slice, or list or integer array with one axis, optional
        Indices of the query heads, likewise.
    top_k : int, optional
        Number of keys per row whose weights are returned. The default returns the weights of all
        keys, which takes memory for all of these pairs.
    causal : bool
        Whether query ``i`` attends only to the keys ``j <= i + q_offset``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` if not given.
    q_offset : int or integer array of shape (batch,), optional
        Position of the first query of q among the keys; by default ``seqlen_k - seqlen_q``.
    layout : {"bshd", "bhsd"}
        Order of the axes of q and k; "bhsd" is (batch, heads, seqlen, head_dim).
    q_scale, k_scale : number or float32 array, optional
        Factors that q and k are multiplied by. They broadcast to (batch, 1, heads).
    stream : stream, optional
        Stream to run on instead of the current one, see `cupy_flash.flash_attention`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`.

    Returns
    -------
    weights : float32 or float64 array, shape (batch, heads, queries, seqlen_k)
        Weights, with the array type of q and in this order of axes for both layouts; float64 if q
        is float64. The axes of heads and queries remain if one index is given. With ``top_k``, the
        last axis has length ``min(top_k, seqlen_k)``, and the weights of a row are in descending
        order.
    keys : int64 array, shape (batch, heads, queries, min(top_k, seqlen_k))
        Indices of the keys of these weights; only with ``top_k``. If keys have equal weights, the
        first of them are chosen, in ascending order. NaN counts as the largest weight.

    Raises
    ------
    TypeError
        If q or k is not an array, or an index, ``top_k`` or a modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, an index is out of range, ``top_k`` is negative, or
        the shape of a modification does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    The weight of a masked key is 0, so that a query that attends to no key has only zeros. With
    sinks, the weights of a row add up to less than 1. With ``dropout_p``, dropped weights are 0,
    and the other weights are divided by the probability that they are kept. If a query attends to a
    key whose score is NaN or +inf, the weights of all visible keys are NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_weights
    >>> q, k = np.ones((2, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    >>> attention_weights(q, k, causal=True)
    array([[[0.5       , 0.5       , 0.        ],
            [0.33333334, 0.33333334, 0.33333334]]], dtype=float32)
    """
    with on_stream(stream, q):
        convert = result_converter("q", q)
        q_offset, others = with_offsets(q_offset, modifications)
        refuse_other_lengths(others.get, "dense")
        q = read("q", q)
        batch, dtype = q.shape[:-3], precision_of(q.dtype)
        q, k = queries_and_keys(q, k, layout)
        _, heads_q, seqlen_q, _ = q.shape
        selection = Selection(
            indices_of("heads", heads, heads_q), indices_of("queries", queries, seqlen_q), heads_q
        )
        q, k = scaled((q, k), (q_scale, k_scale), np.float64)
        results = weights_of_rows(
            *(q, k, selection, dtype),
            top_k=None if top_k is None else count("top_k", top_k),
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            bound_mods=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
        )
        results = tuple(convert(x.reshape(*batch, *x.shape[1:])) for x in results)
        return results[0] if top_k is None else results


def weights_of_rows(
    q: Any,
    k: Any,
    selection: Selection,
    dtype: np.dtype[Any],
    *,
    top_k: int | None,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None,
    bound_mods: BoundModifications,
    sequence: Pairs = FIRST_PAIR,
) -> tuple[Any, ...]:
    """Compute the weights and, with `top_k`, their keys, of (batch, heads, seqlen, dim) arrays.

    `sequence` has the index of the first sequence, and its first rows in packed arrays.
    """
    xp, seqlen_k = array_module(q), k.shape[2]
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, selection.heads_q, np.float64)
    q = q[:, xp.asarray(selection.heads)][:, :, xp.asarray(selection.queries)]
    columns = seqlen_k if top_k is None else min(top_k, seqlen_k)
    weights = xp.zeros((*q.shape[:3], columns), dtype)
    # In rows without visible keys, all weights are equal.
    keys = None if top_k is None else xp.zeros(weights.shape, np.int64) + xp.arange(columns)
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods, sequence, selection):
        if rows.end == 0 or columns == 0:
            continue
        with np.errstate(all="ignore"):
            scores = row_weights(rows, q, k, scale, bound_mods, sinks, xp)
            # Weights are ordered as they are returned, so that those with equal numbers are ties.
            result = scores.astype(dtype, copy=False)
        if keys is None:
            rows.queries(weights)[:, : rows.end] = result
        else:
            rows.queries(weights)[...], rows.queries(keys)[...] = _largest(result, columns, xp)
    return (weights,) if keys is None else (weights, keys)


def row_weights(
    rows: Rows,
    q: Any,
    k: Any,
    scale: float,
    bound_mods: BoundModifications,
    sinks: Any,
    xp: Any,
) -> Any:
    """Return the weights of a chunk of query rows in float64, 0 for masked keys."""
    scores = rows.softmax_scores(q, k, scale, bound_mods, xp)
    masked = scores == -np.inf
    _, row_sum, _ = softmax_terms(xp, scores, sinks[rows.pairs.h])
    scores *= factors(bound_mods.dropout, rows.pairs, scores.dtype, xp)
    scores /= row_sum
    # A NaN score makes its whole row NaN, including the masked keys.
    scores[masked] = 0
    return scores


def indices_of(name: str, chosen: Any, length: int) -> NDArray[np.int64]:
    """Return the nonnegative indices along an axis that an argument chooses.

    Raises
    ------
    TypeError
        If the argument is neither an integer, a slice nor a sequence of integers.
    ValueError
        If an index is out of range, or an array has more than one axis.
    """
    if chosen is None:
        return np.arange(length)
    if isinstance(chosen, slice):
        try:
            return np.arange(length)[chosen]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is {chosen!r}: {error}") from error
    if is_foreign_array(chosen):
        array = convert_to(np, read(name, chosen))
        if array.ndim > 1:
            raise ValueError(f"{name} has shape {array.shape}; expected one axis of indices")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {array.dtype}; expected integers, the indices")
        chosen = array.ravel().tolist()
    numbers = chosen if isinstance(chosen, (list, tuple, range)) else [chosen]
    found = [integer(name, number) for number in numbers]
    for index in found:
        if not -length <= index < length:
            raise ValueError(f"index {index} of {name} is out of range; q has {length} {name}")
    return np.array(found, np.int64) % max(length, 1)


def _largest(weights: Any, columns: int, xp: Any) -> tuple[Any, Any]:
    """Return the largest weights of each row in descending order, and the indices of their keys.

    Parameters
    ----------
    weights : array, shape (rows, keys)
        Weights of the first keys; those of all others are 0.
    columns
        Number of weights per row to return, at least 1.
    """
    rows, keys = weights.shape
    if keys < columns:
        weights = xp.pad(weights, ((0, 0), (0, columns - keys)))
        keys = columns
    ranked = xp.where(xp.isnan(weights), weights.dtype.type(np.inf), weights)
    if columns < keys:
        # Selecting the smallest of the returned weights first takes less time than sorting rows.
        last = xp.partition(ranked, keys - columns, axis=1)[:, keys - columns, None]
        above, tied = ranked > last, ranked == last
        tied &= xp.cumsum(tied, axis=1) <= columns - above.sum(axis=1, keepdims=True)
        indices = xp.nonzero(above | tied)[1].reshape(rows, columns)
    else:
        indices = xp.broadcast_to(xp.arange(keys), (rows, keys))
    order = xp.argsort(-xp.take_along_axis(ranked, indices, 1), axis=1, kind="stable")
    indices = xp.take_along_axis(indices, order, 1)
    return xp.take_along_axis(weights, indices, 1), indices
