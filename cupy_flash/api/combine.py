"""Public function that merges the results of attention over several parts of the keys."""

from __future__ import annotations

from typing import Any

from cupy_flash.calls import dispatch
from cupy_flash.calls.check.partials import Partials
from cupy_flash.opaque import opaque


@opaque
def combine(
    out_partial: Any,
    lse_partial: Any,
    *,
    sinks: Any | None = None,
    out: Any | None = None,
    return_lse: bool = True,
    stream: Any | None = None,
) -> Any:
    """Merge the results of attention over parts of the keys into attention over all keys.

    The result is out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s), as in
    Flash-Decoding (Dao et al. 2023). The parts can be computed by separate calls of
    `flash_attention(..., return_lse=True)`, for example for a prefix that is common to many
    sequences, or on several GPUs.

    Parameters
    ----------
    out_partial : array, shape (num_splits, batch, seqlen_q, heads_q, head_dim_v)
        Normalized output of attention over each part of the keys; packed (num_splits, total_q,
        heads_q, head_dim_v). float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that
        supports DLPack. Read in place if the last axis is contiguous. A list with one array per
        part is also accepted; its arrays are copied into one.
    lse_partial : array, shape (num_splits, batch, heads_q, seqlen_q)
        Log-sum-exp of each part, natural logarithm; packed (num_splits, heads_q, total_q). float32,
        for float64 outputs float64. A list if out_partial is a list. A part with an lse of -inf has
        weight 0, whatever its output holds.
    sinks : array, shape (heads_q,), optional
        Attention sink of each head: an unscaled score without a value, which the parts must not
        include. The dtype is that of lse_partial or out_partial; arrays of other float dtypes,
        lists, and one number for all heads are converted. -inf means no sink.
    out : array, optional
        Array that the result is written to; same array type, dtype and shape as the result. Its
        last axis is contiguous, and it does not overlap the inputs.
    return_lse : bool
        Whether to return lse as well.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
        Merged output, with the array type and dtype of out_partial. A fully masked row is 0.
    lse : array, shape (batch, heads_q, seqlen_q) or (heads_q, total_q)
        Log-sum-exp of all parts and the sink, only with return_lse; dtype of lse_partial. It is
        -inf for a fully masked row without a sink.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype.
    ValueError
        If shapes do not match, or `out` cannot be written to.
    UnsupportedError
        If `stream` is given, and no GPU can be used.
    CompileError
        If the kernel does not compile.

    Notes
    -----
    Arrays on a GPU are merged on the current device and stream, without synchronizing; NumPy arrays
    are merged by NumPy. Sums are computed in float32, for float64 in float64, and rounded once. The
    same inputs give the same bits. A NaN in lse_partial makes the output row and its lse NaN. An
    lse of +inf makes the output row NaN and its lse +inf.

    The weights of the parts are as accurate as their lse. A float32 lse of magnitude s is rounded
    to about 6e-8 * s. If all scores of a row are about -1e9, its parts therefore get equal weights,
    however many keys they have. Attention calls that split their keys internally do not have this
    limit if scores are modified.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import combine
    >>> parts = np.array([1.0, 4.0], np.float32).reshape(2, 1, 1, 1)
    >>> out, lse = combine(parts, np.log([[[1.0]], [[2.0]]]).astype(np.float32))
    >>> float(out.round(5).item())
    3.0
    """
    result, lse = dispatch.combine(Partials(out_partial, lse_partial, out, sinks), stream)
    return (result, lse) if return_lse else result
