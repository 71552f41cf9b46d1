"""Formula of the tangents of gradients: products of the Hessian of a loss and a direction.

The names are those of :mod:`~cupy_flash.reference.gradients`. With x = softmax_scale * q k', t the
modified score of x, P = exp(t - lse), R the factors of dropout, and a dot for tangents:

    x.  = softmax_scale * (q. k' + q k.')      t.  = x. * dt/dx      lse. = rowsum(P * t.)
    P.  = P * (t. - lse.)                      dP. = (dout. v' + dout v.') * R
    D.  = rowsum(P. * dP + P * dP.) - dlse.
    dT. = P. * (dP - D) + P * (dP. - D.)       dX. = dT. * dt/dx + dT * d2t/dx2 * x.

    dq. = softmax_scale * (dX. k + dX k.)      dk. = softmax_scale * (dX.' q + dX' q.)
    dv. = (P. * R)' dout + (P * R)' dout.

D is computed as rowsum(P * dP) - dlse, which is equal to rowsum(dout * out) - dlse. A row that
attends to one key then has exactly dP - D = dlse and dP. - D. = dlse., because t. = lse. exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, require_float, require_shape
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_curvatures import curvatures
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.rows import (
    Rows,
    chunks_of_rows,
    resolve,
    sinks_of,
    softmax_and_slope,
    visible_product,
)
from cupy_flash.reference.tangents import DenseCall, Tangents, require_one_memory, score_tangents

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


@opaque
def attention_hvp_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    dout_tangent: Any = None,
    *,
    dlse: Any = None,
    dlse_tangent: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute the tangents of the gradients of attention in float64 by the plain formula.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The results are the derivatives of the gradients of q, k and v, which
    `cupy_flash.attention_backward_reference` computes, as all arrays move along their tangents. The
    scores are computed in chunks, as in `cupy_flash.attention_reference`.

    Parameters
    ----------
    dout, q, k, v
        See `cupy_flash.attention_backward_reference`.
    q_tangent, k_tangent, v_tangent, dout_tangent : arrays, optional
        Tangents of q, k, v and dout, with the shapes and the array type of these arrays and any
        float dtype. A missing tangent counts as zeros.
    dlse, dlse_tangent : arrays, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp, and its tangent.
    causal, softmax_scale, q_offset, layout, stream
        See `cupy_flash.attention_reference`; all arrays have the layout of q.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`. They have no tangents.

    Returns
    -------
    dq_tangent, dk_tangent, dv_tangent : float64 arrays
        Tangents of the gradients, with the shapes of q, k and v.

    Raises
    ------
    TypeError
        If an input is not an array, an array is in other memory than q, or a modification has a
        wrong type.
    ValueError
        If the shapes or the layout are wrong, or the shape of a modification does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    Masked pairs are those of `cupy_flash.attention_backward_reference`. They are left out of all
    sums, so that NaN and inf in masked keys, values and their tangents affect no result. The
    results of a query that attends to no key, and of a key that no query attends to, are exactly 0.
    Among visible pairs, NaN and inf propagate as in the formula.

    Where a function is not differentiable, its second derivative is the derivative of its first
    derivative, by the rules for first derivatives.
    """
    return _dense_call(
        *(dout, q, k, v),
        {"q": q_tangent, "k": k_tangent, "v": v_tangent, "dout": dout_tangent},
        {"dlse": dlse, "dlse_tangent": dlse_tangent},
        stream,
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        modifications=modifications,
    )


def in_precision_of_inputs(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    tangents: Mapping[str, Any],
    of_lse: Mapping[str, Any],
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute `attention_hvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    dout, q, k, v
        Arrays of one dtype, which is that of the results.
    tangents
        Tangents of these arrays, keyed by the names of the arrays; None for zeros.
    of_lse
        Arrays dlse and dlse_tangent by name; None for zeros.
    stream, **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _dense_call(dout, q, k, v, tangents, of_lse, stream, exact=False, **options)


def _dense_call(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    tangents: Mapping[str, Any],
    of_lse: Mapping[str, Any],
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the results of a public function; see `DenseCall.of` for the options."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        call = DenseCall.of({"q": q, "k": k, "v": v, "dout": dout}, tangents, **options)
        bhsd = call.arrays
        *rows, _ = bhsd["q"].shape
        dim = bhsd["v"].shape[-1]
        if bhsd["dout"].shape != (*rows, dim):
            *batch, one, other, _ = q.shape
            expected = (*batch, one, other, dim)
            raise ValueError(
                f"dout has shape {tuple(dout.shape)}; expected {expected}, as the output"
            )
        given: dict[str, Any] = {n: x if x is None else read(n, x) for n, x in of_lse.items()}
        require_one_memory({"q": bhsd["q"]} | {n: x for n, x in given.items() if x is not None})
        for name, x in given.items():
            if x is not None:
                require_float(name, x)
                require_shape(name, x, (*call.batch, *rows[1:]), "as lse")
                given[name] = x.reshape(rows)
        found = hessian_formula(**bhsd, **given, tangents=call.tangents, **call.options)
        return tuple(convert(call.result(x)) for x in found)


def hessian_formula(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    dlse: Any,
    dlse_tangent: Any,
    tangents: Mapping[str, Any],
    compute: np.dtype[Any],
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None,
    bound_mods: BoundModifications,
) -> tuple[Any, Any, Any]:
    """Return the tangents of the gradients of q, k and v of (batch, heads, seqlen, dim) arrays.

    All sums are computed in the dtype `compute`, that of the results.
    """
    xp = array_module(q)
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, q.shape[1], compute)
    dq, dk, dv = (xp.zeros(x.shape, compute) for x in (q, k, v))
    of_queries = {"q": q, "dout": dout, "dlse": dlse, "dlse_tangent": dlse_tangent}
    of_queries |= {f"{name}_tangent": tangents[name] for name in ("q", "dout")}
    of_keys = {"k": k, "v": v} | {f"{name}_tangent": tangents[name] for name in ("k", "v")}
    moving = Tangents(*(tangents[name] for name in ROWS))
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods):
        if rows.end == 0:
            continue
        given = {n: rows.queries(x) for n, x in of_queries.items() if x is not None}
        given |= {n: rows.keys(x) for n, x in of_keys.items() if x is not None}
        with np.errstate(all="ignore"):
            given = {name: x.astype(compute) for name, x in given.items()}
            x = rows.scores(q, k, scale, compute, xp)
            x_tangent = score_tangents(rows, q, k, moving, scale, compute, xp)
            pairs = _of_pairs(xp, given, x, x_tangent, rows, bound_mods, sinks[rows.head])
            rows.queries(dq)[...] = scale * _sum(
                *(xp, pairs.seen),
                (pairs.dx_tangent, given["k"]),
                (pairs.dx, given.get("k_tangent")),
            )
            dk_rows = rows.keys(dk)
            dk_rows += scale * _sum(
                *(xp, pairs.seen.T),
                (pairs.dx_tangent.T, given["q"]),
                (pairs.dx.T, given.get("q_tangent")),
            )
            dv_rows = rows.keys(dv)
            dv_rows += _sum(
                *(xp, pairs.seen.T),
                (pairs.weights_tangent.T, given["dout"]),
                (pairs.weights.T, given.get("dout_tangent")),
            )
    return dq, dk, dv


class _OfPairs(NamedTuple):
    """P * R and dX of the pairs of a chunk, with tangents, (rows, keys); masked pairs are 0."""

    seen: Any
    weights: Any
    weights_tangent: Any
    dx: Any
    dx_tangent: Any


def _of_pairs(
    xp: Any,
    given: Mapping[str, Any],
    x: Any,
    x_tangent: Any,
    rows: Rows,
    bound_mods: BoundModifications,
    sink: Any,
) -> _OfPairs:
    """Return the values of a chunk, given its rows of all arrays, its scores and their tangents."""
    p, seen, slope, _ = softmax_and_slope(xp, x, rows, bound_mods, sink)
    kept = factors(bound_mods.dropout, rows.pairs, x.dtype, xp)

    def hide(values: Any) -> Any:
        """Return values with masked pairs set to 0, in place."""
        xp.copyto(values, 0, where=~seen)
        return values

    if x_tangent is None:
        p_tangent = xp.zeros_like(p)
    else:
        p_tangent = hide(x_tangent * (1 if slope is None else slope))
        p_tangent -= (p * p_tangent).sum(axis=1)[:, None]
        p_tangent *= p
    dp, dp_tangent = xp.matmul(given["dout"], given["v"].T), xp.zeros_like(p)
    for of_queries, of_keys in (("dout_tangent", "v"), ("dout", "v_tangent")):
        if of_queries in given and of_keys in given:
            dp_tangent += xp.matmul(given[of_queries], given[of_keys].T)
    for values in (dp, dp_tangent):
        values *= kept
        hide(values)
    d = (p * dp).sum(axis=1) - given.get("dlse", 0)
    d_tangent = (p_tangent * dp).sum(axis=1) + (p * dp_tangent).sum(axis=1)
    d_tangent -= given.get("dlse_tangent", 0)
    dp -= d[:, None]
    dp_tangent -= d_tangent[:, None]
    # From here on, these are the gradients of the modified scores, and their tangents. They are 0
    # in a fully masked row, whatever its dlse holds.
    dp_tangent *= p
    dp_tangent += p_tangent * dp
    dp *= p
    dx, dx_tangent = hide(dp), hide(dp_tangent)
    if slope is not None:
        dx_tangent *= slope
        if x_tangent is not None:
            curvature = curvatures(bound_mods.scores, x, rows.pairs, xp)
            if curvature is not None:
                dx_tangent += dx * curvature * x_tangent
        dx *= slope
        for values in (dx, dx_tangent):
            hide(values)
    p_tangent *= kept
    p *= kept
    return _OfPairs(seen, p, p_tangent, dx, dx_tangent)


def _sum(xp: Any, seen: Any, *products: tuple[Any, Any]) -> Any:
    """Return the sum of `visible_product` of weights and rows; rows that are None add nothing."""
    return sum(visible_product(xp, *(p[0], seen, p[1])) for p in products if p[1] is not None)
