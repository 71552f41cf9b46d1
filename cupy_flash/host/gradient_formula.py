"""Gradients of a small call on the CPU, by the plain formula in one step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.crew import single_threaded_blas
from cupy_flash.host.formula import MAX_PRODUCT_OF_ONE_THREAD, write_sums
from cupy_flash.host.gradient_tiles import least_weight_of_one_key
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Scores of a call up to which it is computed in one step, in new arrays. The arrays of scores and
# their gradients then stay in the L2 cache, and threads would save less than waking them takes.
MAX_SCORES = 1 << 17


def backward_small(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
) -> bool:
    """Write the gradients of a whole call, if it is small and its values are finite.

    Takes the arguments of `cupy_flash.host.gradients.backward`, in order. Returns False if the
    call is left to that function, which keeps values that are not finite from rows that do not
    attend to them. In one thread, 8 queries and keys with 8 heads of 64 take a sixth of the time of
    that function.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, dtype = k.shape[1], q.dtype
    if (
        not 0 < batch * heads * seqlen_q * seqlen_k <= MAX_SCORES
        or heads != k.shape[2]
        or seqlen_q > tile.Br
        or seqlen_k > tile.Bc
        or dtype.char not in "fd"
        or "q" not in results
        or any(result.dtype != dtype or name not in ROWS for name, result in results.items())
    ):
        return False
    visible = Mask(seqlen_q, seqlen_k, causal, q_offset)
    # A row that attends to no key must leave no trace, whatever its query is.
    if visible.end(0) == 0:
        return False
    is_of_one_thread = seqlen_q * seqlen_k * max(head_dim, v.shape[3]) <= MAX_PRODUCT_OF_ONE_THREAD
    with contextlib.nullcontext() if is_of_one_thread else single_threaded_blas:
        return _differentiate(
            *(q, k, v, out, dout, lse, dlse, results),
            visible,
            dtype.type(softmax_scale),
        )


def _differentiate(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    visible: Mask,
    scale: Any,
) -> bool:
    """Write the gradients; return False if a value is not finite that may reach hidden pairs."""
    seqlen_q, seqlen_k, *_ = visible
    is_masked = not visible.sees_all(0, seqlen_q)
    delta = np.einsum("bshd,bshd->bhs", dout, out)
    if dlse is not None:
        delta -= dlse
    q = q * scale
    # With an infinite query, all weights of a row may be 0.
    if not math.isfinite(np.vdot(q, q)):
        return False
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    p = np.matmul(q, k.swapaxes(2, 3))
    p -= lse[..., None]
    np.exp(p, out=p)
    if is_masked:
        np.copyto(p, 0, where=visible.hidden(0, seqlen_q, 0, seqlen_k))
    ds = np.matmul(dout, v.swapaxes(2, 3))
    ds -= delta[..., None]
    ds *= p
    # NaN and infinity in v, dout and lse, and in keys that a row attends to, are in ds as well.
    if not math.isfinite(np.vdot(ds, ds)):
        return False
    if dlse is None and visible.end(0) == 1:
        # Rows that attend to one key: all of them, or the first.
        rows = slice(None) if seqlen_k == 1 else slice(1)
        least = least_weight_of_one_key(
            p.dtype.name, max(q.shape[3], v.shape[3]), lse[:, :, rows, None]
        )
        np.copyto(ds[:, :, rows], 0, where=p[:, :, rows] > least)
    dq = results["q"]
    write_sums(ds, k, dq.swapaxes(1, 2))
    # In hidden keys they are in dq only.
    if is_masked and not math.isfinite(np.vdot(dq, dq)):
        return False
    dq *= scale
    if "k" in results:
        write_sums(ds.swapaxes(2, 3), q, results["k"].swapaxes(1, 2))
    if "v" in results:
        write_sums(p.swapaxes(2, 3), dout, results["v"].swapaxes(1, 2))
    return True
