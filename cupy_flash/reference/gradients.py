"""Reference formula for the gradients of attention, with error bounds for other implementations.

:func:`attention_backward_reference` computes the formula in float64 and is the oracle of the tests.
:func:`backward_naive` is a straightforward implementation without a fused kernel, in the precision
of its inputs. Its error, and the sums of absolute values, determine :func:`gradient_bound`.

With x = softmax_scale * q k', t the modified score of x, and P = exp(t - lse):

    dv = (P * R)' dout              dP = dout v' * R      D = rowsum(dout * out) - dlse
    dT = P * (dP - D)               dX = dT * dt/dx
    dq = softmax_scale * dX k       dk = softmax_scale * dX' q

R are the factors of dropout on the weights: 0 or 1 / (1 - dropout_p), and 1 without dropout.

The gradient of a bias is dT. The gradient of a sink is -sum(exp(sink - lse) * D) over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, require_shape
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_derivatives import after_softcap, capture_gradients
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs, Scores
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.mods.slopes import with_captured_slopes
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import OF_MOD
from cupy_flash.reference.dense import error_bound
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.key_lists import dense_lists, log_counts
from cupy_flash.reference.modifications import fitting_modifications, read_array
from cupy_flash.reference.rows import (
    Rows,
    as_bhsd,
    chunks_of_rows,
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


def with_slopes(
    wrt: Iterable[str] | None, modifications: Mapping[str, Any]
) -> tuple[Iterable[str] | None, Mapping[str, Any]]:
    """Return the requested gradients and the modifications, with slopes as a capture if needed."""
    if wrt is None or isinstance(wrt, str):
        return wrt, modifications
    return with_captured_slopes(tuple(wrt), modifications, OF_MOD)


class ScoreErrors(NamedTuple):
    """Error bounds of the scores that an implementation computes.

    Attributes
    ----------
    product_error
        Error of a scaled score, relative to the sum of the absolute values of its products.
    score_error
        Function of the scaled score that returns the additional error of the modified score.
    slope_error
        Error of the derivative of the modified score with respect to the scaled score.
    """

    product_error: float
    score_error: Callable[[Any], Any]
    slope_error: float


class Arithmetic(NamedTuple):
    """Dtypes and variant of a gradient computation.

    Attributes
    ----------
    compute
        Dtype of products, sums and all values that are not stored.
    stored
        Dtype that P, dX and out are rounded to before they are multiplied.
    result
        Dtype of the gradients; None for the dtype of each input.
    magnitudes
        Whether absolute values are summed, such as |dP| + |D| instead of dP - D. Rounding errors
        are proportional to these sums, even if the gradients themselves cancel.
    errors
        Errors of the scores, whose effect on the gradients is summed instead of absolute values.
    """

    compute: np.dtype[Any]
    stored: np.dtype[Any]
    result: np.dtype[Any] | None
    magnitudes: bool = False
    errors: ScoreErrors | None = None

    @classmethod
    def of(cls, dtype: Any, grad_dtype: Any = None) -> Arithmetic:
        """Return the arithmetic of a naive implementation for inputs of this dtype."""
        result = None if grad_dtype is None else np.dtype(grad_dtype)
        return cls(precision_of(np.dtype(dtype)), np.dtype(dtype), result)

    def rounded(self, x: Any) -> Any:
        """Return an array of dtype `compute` rounded to dtype `stored`."""
        return x.astype(self.stored, copy=False).astype(self.compute, copy=False)


EXACT = Arithmetic.of(np.float64, np.float64)
SIZES = EXACT._replace(magnitudes=True)


@opaque
def attention_backward_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    wrt: Iterable[str] | None = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute the gradients of attention in float64 by the plain formula.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The output and its log-sum-exp are recomputed in float64. The scores are computed in chunks, as
    in `cupy_flash.attention_reference`.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output, with the array type of q and any float dtype.
    q, k, v
        See `cupy_flash.attention_reference`.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of the log-sum-exp.
    causal, softmax_scale, q_offset, layout
        See `cupy_flash.attention_reference`; dout and the gradients have the layout of q.
    wrt : iterable of str, optional
        Names of the inputs whose gradients are returned, in this order: "q", "k", "v", "bias",
        "sinks", "alibi_slopes", and "score_mod.NAME" for an array that a `ScoreMod` captures as
        differentiable. By default q, k and v, followed by every such array.
    stream : stream, optional
        Stream to run on instead of the current one, see `cupy_flash.flash_attention`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, see `cupy_flash.flash_attention`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`.

    Returns
    -------
    tuple of float64 arrays
        Gradients, with the shapes of the inputs: summed over the query heads of each KV head, and
        along the broadcast axes of a bias.

    Raises
    ------
    TypeError
        If dout, q, k, v or dlse is not an array, or wrt is not a sequence of names.
    ValueError
        If a shape, also of a modification, or the layout is wrong, or wrt names an input that the
        call does not have or that has no gradient.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    A (query, key) pair is masked if a mask hides the key, or if its score is -inf for any other
    reason. Masked pairs are left out of all sums, rather than multiplied by zero:

    - The gradient is exactly 0 for a fully masked query and for a key that no query attends to.
      NaN and inf in such rows of q, k, v and dout affect no result. But the log-sum-exp of a fully
      masked query is its sink, if there is one; its dlse contributes to the sink's gradient.
    - NaN and inf in a key or value reach the gradients of the queries that attend to it, and of all
      keys that these queries attend to. In q, dout and dlse they reach the gradients of their query
      and of the keys that it attends to.

    Among visible pairs, NaN and inf propagate as in the formula.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_backward_reference
    >>> dout = q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> dq, dk, dv = attention_backward_reference(dout, q, k, v, causal=True)
    >>> dv[0, :, 0, 0].round(3)
    array([2.083, 1.083, 0.583, 0.25 ])
    """
    with on_stream(stream, q):
        return dense_gradients(
            *(dout, q, k, v),
            arithmetic=EXACT,
            dlse=dlse,
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            layout=layout,
            wrt=wrt,
            key_indices=key_indices,
            **modifications,
        )


def backward_naive(
    dout: Any, q: Any, k: Any, v: Any, *, out: Any = None, grad_dtype: Any = None, **options: Any
) -> tuple[Any, ...]:
    """Compute gradients as one writes them without a fused kernel, from whole score matrices.

    float64 inputs are computed in float64, other dtypes in float32. For 16-bit dtypes P, dX and the
    output are rounded to the dtype of ``q`` before they are multiplied, as by separate kernels with
    16-bit arrays between them.

    Parameters
    ----------
    dout, q, k, v
        See :func:`attention_backward_reference`.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v), optional
        Output of the forward pass, recomputed if not given. Pass the output that a kernel was
        given: then its rounding is not counted as an error of the kernel.
    grad_dtype : dtype, optional
        Dtype of the gradients; by default that of each input.
    **options
        Other arguments of :func:`attention_backward_reference`.

    Returns
    -------
    tuple of arrays
        Gradients, see :func:`attention_backward_reference`.
    """
    arithmetic = Arithmetic.of(read("q", q).dtype, grad_dtype)
    return dense_gradients(dout, q, k, v, arithmetic=arithmetic, out=out, **options)


def gradient_sizes(
    dout: Any, q: Any, k: Any, v: Any, *, errors: ScoreErrors | None = None, **options: Any
) -> tuple[Any, ...]:
    """Compute the sums of absolute values of all terms of the gradients, for `gradient_bound`.

    Parameters
    ----------
    dout, q, k, v, **options
        See :func:`attention_backward_reference`.
    errors
        Error bounds of the scores. If given, the result bounds the effect of these errors on all
        gradients except those of sinks. The output and the log-sum-exp count as exact.

    Returns
    -------
    tuple of float64 arrays
        Sums of absolute values, with the shapes of the gradients.
    """
    arithmetic = SIZES._replace(errors=errors)
    return dense_gradients(dout, q, k, v, arithmetic=arithmetic, **options)


def gradient_bound(
    naive: Any, reference: Any, sizes: Any, dtype: Any, *, lse: Any, result: Any = None
) -> float:
    """Return the largest allowed error of a gradient against ``reference``.

    The bound is :func:`~cupy_flash.reference.dense.error_bound` of the naive gradient (twice its
    error and a few ulps), plus a few ulps of ``sizes`` in the compute precision. The second term is
    needed because gradients are differences. A query that attends to a single key has dP = D, and
    rounding leaves a difference proportional to dP, which happens to be 0 in the naive formula.

    Parameters
    ----------
    naive, reference, sizes
        The same gradient from :func:`backward_naive`, :func:`attention_backward_reference` and
        :func:`gradient_sizes`.
    dtype
        Dtype of q, k and v.
    lse
        Log-sum-exp from the reference. Larger scores have larger errors.
    result
        Dtype of the gradient if it is not ``dtype``. The ulps are those of the coarser of the two:
        products of 16-bit numbers have 16-bit errors even if they are summed in float32.
    """
    import ml_dtypes

    dtypes = [np.dtype(x) for x in (dtype, result) if x is not None]
    coarser = max(dtypes, key=lambda x: float(ml_dtypes.finfo(x).eps))  # type: ignore[no-untyped-call]
    compute = precision_of(np.dtype(dtype))
    return error_bound(naive, reference, coarser) + error_bound(sizes, sizes, compute, lse=lse)


class Gradients:
    """Accumulators for the gradients that a call requests.

    Parameters
    ----------
    inputs
        Arrays q, k and v by name.
    modifications
        Keyword arguments that modify attention.
    bound_mods
        The same modifications, parsed.
    wrt
        Names of the inputs whose gradients are requested, or None for the default.
    arithmetic
        Arithmetic of the computation.

    Raises
    ------
    TypeError, ValueError
        If `wrt` is invalid, see `attention_backward_reference`.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        modifications: Mapping[str, Any],
        bound_mods: BoundModifications,
        wrt: Iterable[str] | None,
        arithmetic: Arithmetic,
    ) -> None:
        given = dict(inputs)
        for name, array in (("bias", bound_mods.scores.bias), ("sinks", bound_mods.sinks)):
            if array is not None:
                given[name] = read_array(name, modifications[name])
        mod = bound_mods.scores.score_mod
        captures = () if mod is None else mod.differentiable
        given |= {OF_MOD + name: mod.captures[name] for name in captures} if mod else {}
        if wrt is None:
            wrt = (*inputs, *(OF_MOD + name for name in captures))
        names = _checked_names(wrt, given)
        xp = array_module(inputs["q"])
        self._arithmetic = arithmetic
        self._bias_shape = None if bound_mods.scores.bias is None else bound_mods.scores.bias.shape
        self._dtypes = {name: arithmetic.result or given[name].dtype for name in names}
        self._shapes = {name: given[name].shape for name in names}
        # A single sink for all heads gets the sum of their gradients.
        of_heads = {} if bound_mods.sinks is None else {"sinks": bound_mods.sinks.shape}
        shapes = {name: of_heads.get(name, shape) for name, shape in self._shapes.items()}
        self._sums = {name: xp.zeros(shape, arithmetic.compute) for name, shape in shapes.items()}

    def parts(self, part_of: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Return views of the accumulators by name; a bias has all of its axes.

        The views of q, k and v are the results of `part_of`, called with name and accumulator.
        """
        parts = dict(self._sums)
        for name in self._sums:
            if name in ("q", "k", "v"):
                parts[name] = part_of(name, self._sums[name])
            elif name == "bias":
                parts[name] = self._sums[name].reshape(self._bias_shape)
        return parts

    def results(self, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return the sums in the result dtype, converted by `convert`, in the order of `wrt`."""
        size = abs if self._arithmetic.magnitudes else lambda x: x
        with np.errstate(all="ignore"):
            result = {name: size(total) for name, total in self._sums.items()}
            if self._shapes.get("sinks") == ():
                result["sinks"] = result["sinks"].sum(keepdims=True).reshape(())
            return tuple(
                convert(total.astype(self._dtypes[name], copy=False))
                for name, total in result.items()
            )


def _checked_names(wrt: Iterable[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(wrt, str):
        raise TypeError(f"wrt is {wrt!r}, one name; expected a sequence of names: ({wrt!r},)")
    names = tuple(wrt)
    for name in names:
        if name not in given:
            raise ValueError(
                f"wrt names {name!r}; expected some of {', '.join(given)}, the given inputs that "
                "have gradients"
            )
        if names.count(name) > 1:
            raise ValueError(f"wrt names {name!r} {names.count(name)} times; expected it once")
    return names


def dense_gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    arithmetic: Arithmetic,
    out: Any = None,
    dlse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    wrt: Iterable[str] | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, ...]:
    """Compute gradients as `attention_backward_reference` does, with any arithmetic and output."""
    convert = result_converter("q", q)

    def bhsd(_: str, x: Any) -> Any:
        return to_bhsd(x, layout)

    wrt, changes = with_slopes(wrt, modifications)
    q_offset, others = with_offsets(q_offset, changes)
    refuse_other_lengths(others.get, "dense")
    q, k, v, dout, out, dlse = read_all(q=q, k=k, v=v, dout=dout, out=out, dlse=dlse)
    operands = as_bhsd(q, k, v, layout)
    of_lse = operands[0].shape[:3]
    check_rows(dout, out, dlse, (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], *of_lse[1:]))
    bound_mods = fitting_modifications(others, q, sizes_of(*operands[:2]), causal=causal)
    gradients = Gradients({"q": q, "k": k, "v": v}, others, bound_mods, wrt, arithmetic)
    gradient_formula(
        bhsd("q", dout),
        *operands,
        out=None if out is None else bhsd("q", out),
        dlse=None if dlse is None else dlse.reshape(of_lse),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        bound_mods=bound_mods,
        arithmetic=arithmetic,
        into=gradients.parts(bhsd),
        lists=dense_lists(array_module(q), key_indices, of_lse[2]),
    )
    return gradients.results(convert)


def read_all(**arrays: Any) -> list[Any]:
    """Return arrays of any type as `read` does, float8 as float32. out and dlse may be None."""
    optional = "out", "dlse"
    return [
        None if x is None and name in optional else widened(read(name, x))
        for name, x in arrays.items()
    ]


def check_rows(
    dout: Any, out: Any, dlse: Any, of_out: tuple[int, ...], of_lse: tuple[int, ...]
) -> None:
    """Raise ValueError unless the arrays have the shapes of the output and of its log-sum-exp."""
    for name, array, shape in (
        ("dout", dout, of_out),
        ("out", out, of_out),
        ("dlse", dlse, of_lse),
    ):
        if array is not None:
            require_shape(name, array, shape, "as the output" if shape is of_out else "as lse")


def gradient_formula(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any,
    dlse: Any,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None = None,
    bound_mods: BoundModifications,
    sequence: Pairs = FIRST_PAIR,
    arithmetic: Arithmetic,
    into: Mapping[str, Any],
    lists: Any | None = None,
) -> None:
    """Add the gradients of checked (batch, heads, seqlen, dim) arrays to `into`.

    Parameters
    ----------
    sequence
        Index of the first sequence, and its first rows in packed arrays.
    into
        Accumulators by name: (batch, heads, seqlen, dim) for q, k and v; for a bias with the axes
        of the bias.
    lists
        Keys that each query attends to, (batch, lists, seqlen_q, n), or None.
    """
    xp, compute = array_module(q), arithmetic.compute
    size: Callable[[Any], Any] = abs if arithmetic.magnitudes else lambda x: x
    minus = xp.add if arithmetic.magnitudes else xp.subtract
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, q.shape[1], compute)
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods, sequence):
        sink = sinks[rows.head]
        with np.errstate(all="ignore"):
            x = rows.scores(q, k, scale, compute, xp)
            counts = None if lists is None else log_counts(xp, lists, rows)
            p, seen, slope, lse = softmax_and_slope(xp, x, rows, bound_mods, sink, counts)
            q_rows, dout_rows = (size(rows.queries(a).astype(compute)) for a in (q, dout))
            k_rows, v_rows = (size(rows.keys(a).astype(compute)) for a in (k, v))
            kept = factors(bound_mods.dropout, rows.pairs, compute, xp)
            stored_p = arithmetic.rounded(p * kept)
            if out is None:
                out_rows = arithmetic.rounded(visible_product(xp, stored_p, seen, v_rows))
            else:
                out_rows = rows.queries(out).astype(compute)
            # The output of a fully masked row is constant, so D is 0 whatever its dout holds.
            d = xp.where(seen.any(axis=1), (dout_rows * out_rows).sum(axis=1), 0)
            if dlse is not None:
                d = minus(d, size(rows.queries(dlse).astype(compute)))
            dp = xp.matmul(dout_rows, v_rows.T) * kept
            dt = xp.where(seen, p * minus(dp, d[:, None]), 0)
            dx = dt if slope is None else xp.where(seen, dt * size(slope), 0)
            if arithmetic.errors is not None:
                errors = arithmetic.errors
                off = errors.product_error * abs(scale) * xp.matmul(q_rows, k_rows.T)
                if slope is not None:
                    off = off * abs(slope)
                off = xp.where(seen, off + errors.score_error(x), 0)
                dx = dx * off + dt * errors.slope_error
                stored_p, dt = stored_p * off, dt * off
            stored_dx = arithmetic.rounded(dx)
            if "q" in into:
                dq = rows.queries(into["q"])
                dq += size(scale) * visible_product(xp, stored_dx, seen, k_rows)
            if "k" in into:
                dk = rows.keys(into["k"])
                dk += size(scale) * visible_product(xp, stored_dx.T, seen.T, q_rows)
            if "v" in into:
                dv = rows.keys(into["v"])
                dv += visible_product(xp, stored_p.T, seen.T, dout_rows)
            if "bias" in into:
                add_to_bias(into["bias"], rows, dt)
            if "sinks" in into:
                of_sink = xp.where(sink == -np.inf, 0, xp.exp(sink - lse) * d)
                into["sinks"][rows.head] -= of_sink.sum()
            _add_to_captures(xp, into, rows, x, dt, bound_mods.scores, arithmetic)


def add_to_bias(total: Any, rows: Rows, dt: Any) -> None:
    """Add the contribution of the pairs to the gradient of a bias with the axes of `Scores`."""
    pairs = rows.pairs
    first = rows.span.start + (pairs.q_start if total.ndim == 3 else 0)
    index = (pairs.h,) if total.ndim == 3 else (pairs.b, pairs.h)
    index += slice(first, first + dt.shape[0]), slice(0, rows.end)
    # Along an axis of length 1, one element of the bias serves all indices.
    shared = tuple(axis for axis in (0, 1) if total.shape[axis - 2] == 1)
    part = tuple(
        slice(None) if n == 1 else slice(i, i + 1) if isinstance(i, int) else i
        for i, n in zip(index, total.shape, strict=True)
    )
    total[part] += dt.sum(axis=shared, keepdims=True)


def _add_to_captures(
    xp: Any,
    into: Mapping[str, Any],
    rows: Rows,
    x: Any,
    dt: Any,
    scores: Scores,
    arithmetic: Arithmetic,
) -> None:
    """Add the contribution of the pairs to the gradients of captured arrays."""
    if not any(name.startswith(OF_MOD) for name in into):
        return
    assert scores.score_mod is not None
    x = after_softcap(scores, x, xp)
    result = capture_gradients(
        scores.score_mod, x, rows.pairs, dt, xp, magnitudes=arithmetic.magnitudes, real=scores.real
    )
    for name in result.keys() & {n.removeprefix(OF_MOD) for n in into}:
        into[OF_MOD + name][...] += result[name]
