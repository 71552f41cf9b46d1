"""Formula of the tangents of gradients: products of the Hessian of a loss and a direction.

The names are those of :mod:`~cupy_flash.reference.gradients`. With x = softmax_scale * q k', t the
modified score of x, P = exp(t - lse), w = exp(sink - lse), R the factors of dropout, u. the effect
of the tangents of a bias and of captures on t, s = dt/dx, and a dot for tangents:

    x.  = softmax_scale * (q. k' + q k.')      t.  = x. * s + u.
    lse. = rowsum(P * t.) + w * sink.          P.  = P * (t. - lse.)
    dP. = (dout. v' + dout v.') * R            D.  = rowsum(P. * dP + P * dP.) - dlse.
    dT. = P. * (dP - D) + P * (dP. - D.)       dX. = dT. * s + dT * s.

    dq. = softmax_scale * (dX. k + dX k.)      dk. = softmax_scale * (dX.' q + dX' q.)
    dv. = (P. * R)' dout + (P * R)' dout.

The tangent of the gradient of a bias is dT., and that of a sink is the sum of
-w * (sink. - lse.) * D - w * D. over the rows.

D is computed as rowsum(P * dP) - dlse, which is equal to rowsum(dout * out) - dlse. A row that
attends to one key then has exactly dP - D = dlse and dP. - D. = dlse., because t. = lse. exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, require_float, require_shape
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_tangents import ModificationTangents
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import OF_MOD, ROWS
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.gradients import EXACT, Arithmetic, Gradients, add_to_bias
from cupy_flash.reference.modifications import MovingModifications
from cupy_flash.reference.rows import (
    Rows,
    chunks_of_rows,
    resolve,
    sinks_of,
    to_bhsd,
    visible_product,
)
from cupy_flash.reference.tangents import (
    DenseCall,
    MovingSoftmax,
    Tangents,
    require_one_memory,
    score_tangents,
)

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
    modification_tangents: Mapping[str, Any] | None = None,
    wrt: Iterable[str] = ROWS,
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

    The results are the derivatives of the gradients that `cupy_flash.attention_backward_reference`
    computes, as all arrays move along their tangents. The
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
    modification_tangents : mapping, optional
        Tangents of modifications, see `cupy_flash.flash_attention_hvp`.
    wrt : iterable of str
        Inputs whose gradients are differentiated, see `cupy_flash.flash_attention_hvp`.
    causal, softmax_scale, q_offset, layout, stream
        See `cupy_flash.attention_reference`; all arrays have the layout of q.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`.

    Returns
    -------
    tuple of float64 arrays
        Tangents of the gradients, with the shapes of the inputs, in the order of `wrt`.

    Raises
    ------
    TypeError
        If an input is not an array, an array is in other memory than q, or a modification has a
        wrong type.
    ValueError
        If the shapes or the layout are wrong, the shape of a modification does not fit, or `wrt` or
        `modification_tangents` names an input that the call does not have.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    Masked pairs are those of `cupy_flash.attention_backward_reference`. They are left out of all
    sums, so that NaN and inf in masked keys, values and their tangents affect no result. The
    results of a query that attends to no key, and of a key that no query attends to, are exactly 0.
    But the log-sum-exp of such a query is its sink, if there is one.
    Among visible pairs, NaN and inf propagate as in the formula.

    Where a function is not differentiable, its second derivative is the derivative of its first
    derivative, by the rules for first derivatives.
    """
    return _dense_call(
        *(dout, q, k, v),
        {"q": q_tangent, "k": k_tangent, "v": v_tangent, "dout": dout_tangent},
        {"dlse": dlse, "dlse_tangent": dlse_tangent},
        wrt,
        stream,
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        modification_tangents=modification_tangents,
        modifications=modifications,
    )


def in_precision_of_inputs(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    tangents: Mapping[str, Any],
    of_lse: Mapping[str, Any],
    wrt: Iterable[str],
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute `attention_hvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    dout, q, k, v
        Arrays of one dtype.
    tangents
        Tangents of these arrays, keyed by the names of the arrays; None for zeros.
    of_lse
        Arrays dlse and dlse_tangent by name; None for zeros.
    wrt, stream, **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _dense_call(dout, q, k, v, tangents, of_lse, wrt, stream, exact=False, **options)


def _dense_call(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    tangents: Mapping[str, Any],
    of_lse: Mapping[str, Any],
    wrt: Iterable[str],
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the results of a public function; see `DenseCall.of` for the options."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        call = DenseCall.of({"q": q, "k": k, "v": v, "dout": dout}, tangents, wrt, **options)
        bhsd, layout = call.arrays, call.layout
        *rows, _ = bhsd["q"].shape
        dim = bhsd["v"].shape[-1]
        if bhsd["dout"].shape != (*rows, dim):
            *batch, one, other, _ = call.inputs["q"].shape
            expected = (*batch, one, other, dim)
            raise ValueError(
                f"dout has shape {tuple(dout.shape)}; expected {expected}, as the output"
            )
        given = read_of_lse(of_lse, bhsd["q"], (*call.batch, *rows[1:]))
        given = {name: None if x is None else x.reshape(rows) for name, x in given.items()}
        gradients = gradients_of(call.moving, call.inputs, exact=options["exact"])
        hessian_formula(
            **bhsd,
            **given,
            **call.options,
            tangents=call.tangents,
            into=gradients.parts(lambda _, x: to_bhsd(x, layout)),
        )
        return gradients.results(convert)


def gradients_of(
    moving: MovingModifications, inputs: Mapping[str, Any], *, exact: bool
) -> Gradients:
    """Return accumulators for the tangents of the gradients that a call requests.

    `inputs` are q, k and v by name. The results are float64 if `exact`, and otherwise have the
    dtypes of the inputs.
    """
    arithmetic = EXACT if exact else Arithmetic.of(inputs["q"].dtype)
    return Gradients(inputs, moving.changes, moving.bound, moving.wrt, arithmetic)


def read_of_lse(of_lse: Mapping[str, Any], q: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return dlse and its tangent as arrays of this shape, in the memory of q; None for zeros."""
    given: dict[str, Any] = {n: x if x is None else read(n, x) for n, x in of_lse.items()}
    require_one_memory({"q": q} | {n: x for n, x in given.items() if x is not None})
    for name, x in given.items():
        if x is not None:
            require_float(name, x)
            require_shape(name, x, shape, "as lse")
    return given


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
    mod_tangents: ModificationTangents,
    sequence: Pairs = FIRST_PAIR,
    into: Mapping[str, Any],
) -> None:
    """Add the tangents of the gradients of (batch, heads, seqlen, dim) arrays to `into`.

    Parameters
    ----------
    tangents
        Tangents of q, k, v and dout by name; None for zeros.
    compute
        Dtype of all sums.
    sequence, into
        See `gradient_formula`.
    """
    xp = array_module(q)
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, q.shape[1], compute)
    of_queries = {"q": q, "dout": dout, "dlse": dlse, "dlse_tangent": dlse_tangent}
    of_queries |= {f"{name}_tangent": tangents[name] for name in ("q", "dout")}
    of_keys = {"k": k, "v": v} | {f"{name}_tangent": tangents[name] for name in ("k", "v")}
    moving = Tangents(*(tangents[name] for name in ROWS))
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods, sequence):
        given = {n: rows.queries(x) for n, x in of_queries.items() if x is not None}
        given |= {n: rows.keys(x) for n, x in of_keys.items() if x is not None}
        with np.errstate(all="ignore"):
            given = {name: x.astype(compute) for name, x in given.items()}
            x = rows.scores(q, k, scale, compute, xp)
            x_tangent = score_tangents(rows, q, k, moving, scale, compute, xp)
            softmax = MovingSoftmax.of(xp, x, x_tangent, rows, bound_mods, mod_tangents, sinks)
            kept = factors(bound_mods.dropout, rows.pairs, compute, xp)
            pairs = _of_pairs(xp, given, softmax, kept)
            if "sinks" in into:
                _add_to_sinks(xp, into["sinks"], pairs, softmax, mod_tangents.sinks, rows)
            if rows.end == 0:
                continue
            if "bias" in into:
                add_to_bias(into["bias"], rows, pairs.dt_tangent)
            if any(name.startswith(OF_MOD) for name in into):
                found = softmax.scores.capture_gradients(softmax.seen, pairs.dt, pairs.dt_tangent)
                for name in found.keys() & {n.removeprefix(OF_MOD) for n in into}:
                    into[OF_MOD + name][...] += found[name]
            if "v" in into:
                dv = rows.keys(into["v"])
                dv += _sum(
                    *(xp, softmax.seen.T),
                    (pairs.weights_tangent.T, given["dout"]),
                    (pairs.weights.T, given.get("dout_tangent")),
                )
            dx, dx_tangent = _with_slopes(xp, pairs, softmax)
            if "q" in into:
                dq = rows.queries(into["q"])
                dq += scale * _sum(
                    *(xp, softmax.seen),
                    (dx_tangent, given["k"]),
                    (dx, given.get("k_tangent")),
                )
            if "k" in into:
                dk = rows.keys(into["k"])
                dk += scale * _sum(
                    *(xp, softmax.seen.T),
                    (dx_tangent.T, given["q"]),
                    (dx.T, given.get("q_tangent")),
                )


class _OfPairs(NamedTuple):
    """P * R and dT of the pairs of a chunk, and D of its rows, with tangents.

    Masked pairs have 0.
    """

    weights: Any
    weights_tangent: Any
    dt: Any
    dt_tangent: Any
    d: Any
    d_tangent: Any


def _of_pairs(xp: Any, given: Mapping[str, Any], softmax: MovingSoftmax, kept: Any) -> _OfPairs:
    """Return the values of a chunk, given its rows of all arrays and its factors of dropout.

    The weights replace P in memory.
    """
    p, seen = softmax.p, softmax.seen
    p_tangent = xp.zeros_like(p) if softmax.p_tangent is None else softmax.p_tangent
    dp, dp_tangent = xp.matmul(given["dout"], given["v"].T), xp.zeros_like(p)
    for of_queries, of_keys in (("dout_tangent", "v"), ("dout", "v_tangent")):
        if of_queries in given and of_keys in given:
            dp_tangent += xp.matmul(given[of_queries], given[of_keys].T)
    for values in (dp, dp_tangent):
        values *= kept
        xp.copyto(values, 0, where=~seen)
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
    for values in (dp, dp_tangent):
        xp.copyto(values, 0, where=~seen)
    p_tangent *= kept
    p *= kept
    return _OfPairs(p, p_tangent, dp, dp_tangent, d, d_tangent)


def _with_slopes(xp: Any, pairs: _OfPairs, softmax: MovingSoftmax) -> tuple[Any, Any]:
    """Return dX and its tangent, which replace dT and its tangent in memory."""
    dt, dt_tangent = pairs.dt, pairs.dt_tangent
    if softmax.slope is not None:
        dt_tangent *= softmax.slope
        slope_tangent = softmax.scores.slope_tangent()
        if slope_tangent is not None:
            dt_tangent += dt * slope_tangent
        dt *= softmax.slope
        for values in (dt, dt_tangent):
            xp.copyto(values, 0, where=~softmax.seen)
    return dt, dt_tangent


def _add_to_sinks(
    xp: Any, total: Any, pairs: _OfPairs, softmax: MovingSoftmax, tangents: Any, rows: Rows
) -> None:
    """Add the contribution of the rows to the tangents of the gradients of sinks."""
    weight = softmax.sink_weight
    terms = weight * pairs.d_tangent
    if softmax.lse_tangent is not None:
        of_sink = 0 if tangents is None else tangents[rows.head].astype(terms.dtype)
        terms += weight * (of_sink - softmax.lse_tangent) * pairs.d
    # A sink of -inf has the weight 0, and a masked row may have any dlse.
    total[rows.head] -= xp.where(weight == 0, 0, terms).sum()


def _sum(xp: Any, seen: Any, *products: tuple[Any, Any]) -> Any:
    """Return the sum of `visible_product` of weights and rows; rows that are None add nothing."""
    return sum(visible_product(xp, *(p[0], seen, p[1])) for p in products if p[1] is not None)
