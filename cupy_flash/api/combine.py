"""Merging results of attention over parts of the keys, from wherever they come."""

from __future__ import annotations

from typing import Any

from cupy_flash.calls import run
from cupy_flash.calls.partials import Partials


def combine(
    out_partial: Any,
    lse_partial: Any,
    *,
    sinks: Any | None = None,
    out: Any | None = None,
    return_lse: bool = True,
) -> Any:
    """Attention over all keys from normalized results over parts of them.

    out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s), as in Flash-Decoding (Dao
    et al. 2023). With the lse that `flash_attention(..., return_lse=True)` gives, keys may be
    attended to in parts, at different times or places: a prefix that many sequences share, a ring
    of GPUs.

    Parameters
    ----------
    out_partial : array, shape (num_splits, batch, seqlen_q, heads_q, head_dim_v)
        Result of attention over each part of the keys, or packed (num_splits, total_q, heads_q,
        head_dim_v). float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that speaks
        DLPack. Read in place where the last axis is contiguous. Or a list of an array for each
        part, which are copied into one.
    lse_partial : array, shape (num_splits, batch, heads_q, seqlen_q)
        Log-sum-exp of each part, natural; packed (num_splits, heads_q, total_q). float32, with
        float64 results float64; a list if out_partial is one. A part whose lse is -inf counts
        nothing, whatever its result holds.
    sinks : array, shape (heads_q,), optional
        One more score of each row, unscaled, without a value: as `flash_attention` takes them, of
        parts that were attended to without. The dtype is that of lse_partial or out_partial; arrays
        of other floats, lists, and a number for all heads are converted. -inf means no sink.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last axis,
        no overlap with the inputs.
    return_lse : bool
        Whether to return lse as well.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
        Of out_partial's kind and dtype. A row that no part has seen a key for is 0.
    lse : array, shape (batch, heads_q, seqlen_q) or (heads_q, total_q)
        The log-sum-exp of all parts and the sink, only with return_lse; of lse_partial's dtype. It
        is -inf for a row that saw no key and has no sink.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, or an out that cannot be written to.
    CompileError
        If the kernel does not compile.

    Notes
    -----
    Arrays on a GPU are merged there, on the current device and stream, without synchronizing; NumPy
    arrays by NumPy. Sums are taken in float32, for float64 in float64; the result is rounded
    once. Same inputs give the same bits. A NaN in lse_partial makes the row and its lse NaN, an
    lse of +inf the row NaN and its lse +inf.

    The weights of the parts are as accurate as their lse: in float32 an lse of size s is rounded
    to about 6e-8 * s, so that parts of rows whose scores are all about -1e9 have equal weights,
    however many keys they have. Attention calls that split their keys internally do not have this
    limit where scores are modified.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import combine
    >>> parts = np.array([1.0, 4.0], np.float32).reshape(2, 1, 1, 1)
    >>> out, lse = combine(parts, np.log([[[1.0]], [[2.0]]]).astype(np.float32))
    >>> float(out.round(5).item())
    3.0
    """
    result, lse = run.combine(Partials(out_partial, lse_partial, out, sinks))
    return (result, lse) if return_lse else result
