"""Formula of the tangents of attention, its derivative along a direction in its inputs.

With x = softmax_scale * q k', t the modified score of x, and P = exp(t - lse), a dot marks a
tangent:

    x. = softmax_scale * (q. k' + q k.')        t. = x. * dt/dx + u.
    lse. = rowsum(P * t.) + w * sink.           out. = (P * R * (t. - lse.)) v + (P * R) v.

u. is the effect of the tangents of a bias and of captures on t, w = exp(sink - lse), and R are the
factors of dropout on the weights: 0 or 1 / (1 - dropout_p), and 1 without dropout. A row that
attends to one key has t. = lse. exactly, so that its output has exactly the tangent of the value.

Lu and Song, "Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models" (2024),
compute the same sums while they iterate over tiles of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import (
    array_module,
    dtype_name,
    is_cupy,
    require_float,
    require_shape,
)
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_tangents import ModificationTangents, MovingScores
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.modifications import MovingModifications, fitting_modifications
from cupy_flash.reference.rows import (
    Rows,
    as_bhsd,
    chunks_of_rows,
    from_bhsd,
    precision_of,
    resolve,
    sinks_of,
    sizes_of,
    softmax_and_slope,
    to_bhsd,
    visible_product,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


class Tangents(NamedTuple):
    """Tangents of q, k and v, with the shapes of these arrays; None for a tangent of zeros."""

    q: Any
    k: Any
    v: Any


@opaque
def attention_jvp_reference(
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    modification_tangents: Mapping[str, Any] | None = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute attention and its tangent in float64 by the plain formula.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The tangent is the derivative of the output as the inputs move along their tangents. The scores
    are computed in chunks, as in `cupy_flash.attention_reference`.

    Parameters
    ----------
    q, k, v
        See `cupy_flash.attention_reference`.
    q_tangent, k_tangent, v_tangent : arrays, optional
        Tangents of q, k and v, with the shapes and the array type of these arrays and any float
        dtype. A missing tangent counts as zeros, and takes no time.
    causal, softmax_scale, q_offset, layout, return_lse, stream
        See `cupy_flash.attention_reference`; all arrays have the layout of q.
    modification_tangents : mapping, optional
        Tangents of modifications, see `cupy_flash.flash_attention_jvp`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`.

    Returns
    -------
    out : float64 array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, in the layout of the inputs.
    out_tangent : float64 array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Tangent of the output.
    lse : float64 array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, natural logarithm; only with ``return_lse``.
    lse_tangent : float64 array, shape (batch, heads_q, seqlen_q)
        Tangent of the log-sum-exp; only with ``return_lse``.

    Raises
    ------
    TypeError
        If an input is not an array, a tangent is in other memory than q, or a modification has a
        wrong type.
    ValueError
        If the shapes or the layout are wrong, or the shape of a modification does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    A (query, key) pair is masked if a mask hides the key, or if its score is -inf for any other
    reason. Masked pairs are left out of all sums, so that NaN and inf in masked keys, values and
    their tangents affect no result. A query that attends to no key has the output 0 and the
    log-sum-exp -inf or its sink, with tangents of 0. Among visible pairs, NaN and inf propagate as
    in the formula.

    Where a function is not differentiable, the tangent uses the same derivative as the gradients.
    """
    return _dense_call(
        *(q, k, v),
        Tangents(q_tangent, k_tangent, v_tangent),
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        return_lse=return_lse,
        modification_tangents=modification_tangents,
        stream=stream,
        modifications=modifications,
    )


def in_precision_of_inputs(
    q: Any, k: Any, v: Any, tangents: Tangents, **options: Any
) -> tuple[Any, ...]:
    """Compute `attention_jvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    q, k, v, tangents
        Arrays of one dtype, which is that of out and its tangent.
    **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _dense_call(q, k, v, tangents, exact=False, **options)


def _dense_call(
    q: Any,
    k: Any,
    v: Any,
    tangents: Tangents,
    *,
    return_lse: bool,
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the results of a public function; see `DenseCall.of` for the options."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        call = DenseCall.of({"q": q, "k": k, "v": v}, tangents._asdict(), (), **options)
        results = tangent_formula(**call.arrays, tangents=Tangents(**call.tangents), **call.options)
        out, out_tangent, *of_rows = results
        with np.errstate(all="ignore"):
            found = [x.astype(call.dtype, copy=False) for x in (out, out_tangent)]
        found = [from_bhsd(x, call.layout, call.batch) for x in found]
        if return_lse:
            found += [x.reshape(*call.batch, *x.shape[1:]) for x in of_rows]
        return tuple(map(convert, found))


class DenseCall(NamedTuple):
    """Checked arrays of a dense call, with tangents.

    Attributes
    ----------
    inputs
        Arrays q, k and v with their own axes and dtypes, by name.
    arrays, tangents
        Arrays (batch, heads, seqlen, dim) by name, and their tangents by the same names; None for
        tangents of zeros.
    options
        Arguments `compute`, `causal`, `softmax_scale`, `q_offset`, `bound_mods` and `mod_tangents`
        of a formula.
    moving
        Modifications and their tangents.
    dtype
        Dtype of the results.
    layout, batch
        Layout of the given arrays, and lengths of the batch axes of q.
    """

    inputs: dict[str, Any]
    arrays: dict[str, Any]
    tangents: dict[str, Any]
    options: dict[str, Any]
    moving: MovingModifications
    dtype: np.dtype[Any]
    layout: str
    batch: tuple[int, ...]

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Any],
        tangents: Mapping[str, Any],
        wrt: Iterable[str],
        *,
        exact: bool,
        causal: bool,
        softmax_scale: float | None,
        q_offset: Any,
        layout: str,
        modification_tangents: Mapping[str, Any] | None,
        modifications: Mapping[str, Any],
    ) -> DenseCall:
        """Return the call of arrays of any type.

        Parameters
        ----------
        arrays, tangents
            q, k, v and other arrays with the axes of q, and tangents of these arrays, by name.
        wrt
            Names of the inputs whose gradients are differentiated.
        exact
            Whether results are float64. Otherwise all arrays and results have one dtype.
        causal, softmax_scale, q_offset, layout, modification_tangents, modifications
            See `attention_jvp_reference`.

        Raises
        ------
        TypeError, ValueError
            See `attention_jvp_reference`.
        """
        q_offset, others = with_offsets(q_offset, modifications)
        refuse_other_lengths(others.get, "dense")
        arrays, tangents = read_all(arrays, tangents, exact=exact)
        q = arrays["q"]
        dtype = np.dtype(np.float64) if exact else q.dtype
        operands = map(widened, as_bhsd(q, arrays["k"], arrays["v"], layout))
        wide = dict(zip(ROWS, operands, strict=True))
        wide |= {n: to_bhsd(widened(x), layout) for n, x in arrays.items() if n not in ROWS}
        sizes = sizes_of(wide["q"], wide["k"])
        bind = functools.partial(fitting_modifications, q=wide["q"], sizes=sizes, causal=causal)
        moving = MovingModifications.of(others, modification_tangents, wrt, bind)
        options = {
            "compute": precision_of(dtype),
            "causal": causal,
            "softmax_scale": softmax_scale,
            "q_offset": q_offset,
            "bound_mods": moving.bound,
            "mod_tangents": moving.tangents,
        }
        tangents = {
            name: None if x is None else to_bhsd(widened(x), layout) for name, x in tangents.items()
        }
        inputs = {name: arrays[name] for name in ROWS}
        return cls(inputs, wide, tangents, options, moving, dtype, layout, q.shape[:-3])


def read_all(
    arrays: Mapping[str, Any], tangents: Mapping[str, Any], *, exact: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays and tangents of any type as `read` does.

    Raises
    ------
    TypeError
        If an argument is not an array, or not in the same memory as q. Unless `exact`, also if the
        dtypes differ or are not those of `cupy_flash.flash_attention`.
    ValueError
        If a tangent has another shape than its array.
    """
    arrays = {name: read(name, x) for name, x in arrays.items()}
    given = {
        name: None if x is None else read(f"{name}_tangent", x) for name, x in tangents.items()
    }
    every = {**arrays, **{f"{n}_tangent": x for n, x in given.items() if x is not None}}
    require_one_memory(every)
    for name, tangent in given.items():
        if tangent is not None:
            require_shape(f"{name}_tangent", tangent, tuple(arrays[name].shape), f"that of {name}")
    if not exact:
        _require_dtypes(arrays, given)
    return arrays, given


def require_one_memory(arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless all arrays, by name, are in the same memory as q."""
    for name, array in arrays.items():
        if is_cupy(array) != is_cupy(arrays["q"]):
            host, device = ("q", name) if is_cupy(array) else (name, "q")
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")


def _require_dtypes(arrays: Mapping[str, Any], tangents: Mapping[str, Any]) -> None:
    """Raise TypeError unless all arrays have one of the dtypes of `flash_attention`."""
    for name, array in arrays.items():
        require_float(name, array)
    dtype, *others = (dtype_name(arrays[name]) for name in ROWS)
    if others != [dtype] * 2:
        raise TypeError(f"q, k and v must have one dtype, but are {dtype}, {' and '.join(others)}")
    further = {name: array for name, array in arrays.items() if name not in ROWS}
    for name, array in (further | {f"{name}_tangent": x for name, x in tangents.items()}).items():
        if array is not None and dtype_name(array) != dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype}, as q has")


def tangent_formula(
    q: Any,
    k: Any,
    v: Any,
    tangents: Tangents,
    *,
    compute: np.dtype[Any],
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None,
    bound_mods: BoundModifications,
    mod_tangents: ModificationTangents,
    sequence: Pairs = FIRST_PAIR,
) -> tuple[Any, Any, Any, Any]:
    """Return out, its tangent, lse and its tangent of (batch, heads, seqlen, dim) arrays.

    All sums are computed in the dtype `compute`, that of the results. `sequence` holds the
    index of the first sequence, and its first rows in packed arrays.
    """
    xp = array_module(q)
    batch, heads_q, seqlen_q, _ = q.shape
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, heads_q, compute)
    out, out_tangent = (xp.zeros((batch, heads_q, seqlen_q, v.shape[3]), compute) for _ in range(2))
    lse, lse_tangent = (xp.zeros((batch, heads_q, seqlen_q), compute) for _ in range(2))
    lse[...] = sinks[:, None]
    if mod_tangents.sinks is not None:
        lse_tangent[...] = xp.where(sinks == -np.inf, 0, mod_tangents.sinks)[:, None]
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods, sequence):
        if rows.end == 0:
            continue
        with np.errstate(all="ignore"):
            x = rows.scores(q, k, scale, compute, xp)
            dx = score_tangents(rows, q, k, tangents, scale, compute, xp)
            softmax = MovingSoftmax.of(xp, x, dx, rows, bound_mods, mod_tangents, sinks)
            rows.queries(lse)[...] = softmax.lse
            seen, kept = softmax.seen, factors(bound_mods.dropout, rows.pairs, compute, xp)
            weights = softmax.p * kept
            v_rows = rows.keys(v).astype(compute)
            rows.queries(out)[...] = visible_product(xp, weights, seen, v_rows)
            if tangents.v is not None:
                v_tangent = rows.keys(tangents.v).astype(compute)
                rows.queries(out_tangent)[...] = visible_product(xp, weights, seen, v_tangent)
            if softmax.p_tangent is not None:
                rows.queries(lse_tangent)[...] = softmax.lse_tangent
                moved = softmax.p_tangent * kept
                rows.queries(out_tangent)[...] += visible_product(xp, moved, seen, v_rows)
    return out, out_tangent, lse, lse_tangent


class MovingSoftmax(NamedTuple):
    """Softmax of a chunk of rows whose scores have tangents.

    Attributes
    ----------
    p, seen, slope, lse
        Results of `softmax_and_slope`.
    p_tangent : array, (rows, keys)
        Tangents of p, 0 for masked pairs; None if nothing has a tangent.
    lse_tangent : array, (rows,)
        Tangents of the log-sum-exp; None if nothing has a tangent.
    sink_weight : array, (rows,)
        Weights exp(sink - lse) of the sink.
    scores
        The scores, with the tangents of their derivatives.
    """

    p: Any
    seen: Any
    slope: Any
    lse: Any
    p_tangent: Any
    lse_tangent: Any
    sink_weight: Any
    scores: MovingScores

    @classmethod
    def of(
        cls,
        xp: Any,
        x: Any,
        x_tangent: Any,
        rows: Rows,
        bound_mods: BoundModifications,
        mod_tangents: ModificationTangents,
        sinks: Any,
    ) -> MovingSoftmax:
        """Return the softmax of scaled scores, given the tangents of these, or None for zeros."""
        sink, sink_tangent = sinks[rows.head], mod_tangents.sinks
        p, seen, slope, lse = softmax_and_slope(xp, x, rows, bound_mods, sink)
        scores = MovingScores(bound_mods.scores, x, x_tangent, mod_tangents, rows.pairs, xp)
        sink_weight = xp.where(sink == -np.inf, 0, xp.exp(sink - lse))
        tangent, lse_tangent = scores.tangent(slope), None
        if tangent is None and sink_tangent is not None:
            tangent = xp.zeros_like(p)
        if tangent is not None:
            xp.copyto(tangent, 0, where=~seen)
            lse_tangent = (p * tangent).sum(axis=1)
            if sink_tangent is not None:
                moved = sink_weight * sink_tangent[rows.head].astype(p.dtype)
                lse_tangent += xp.where(sink == -np.inf, 0, moved)
            tangent -= lse_tangent[:, None]
            # From here on, this is the tangent of p.
            tangent *= p
        return cls(p, seen, slope, lse, tangent, lse_tangent, sink_weight, scores)


def score_tangents(
    rows: Rows,
    q: Any,
    k: Any,
    tangents: Tangents,
    scale: float,
    compute: np.dtype[Any],
    xp: Any,
) -> Any:
    """Return the tangents of the scaled scores, (rows, keys); None if they are all zeros."""
    if tangents.q is None and tangents.k is None:
        return None
    if tangents.k is None:
        return rows.scores(tangents.q, k, scale, compute, xp)
    result = rows.scores(q, tangents.k, scale, compute, xp)
    if tangents.q is not None:
        result += rows.scores(tangents.q, k, scale, compute, xp)
    return result
