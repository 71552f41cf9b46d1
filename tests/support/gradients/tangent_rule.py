"""Error rule of tangents: the naive formula at the precision of the inputs, and error bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash import attention_jvp_reference, attention_reference, attention_weights
from cupy_flash.reference.dense import error_bound, max_error
from support.gradients.directions import largest_product, magnitudes


def tangent_sizes(
    inputs: Any, direction: Any, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of magnitudes of all terms of the tangents of out and of lse."""
    q, q_tangent = (magnitudes(x[0], options) for x in (inputs, direction))
    k, v, k_tangent, v_tangent = (
        magnitudes(x, options, q.shape[1]) for x in (*inputs[1:], *direction[1:])
    )
    # The functions of the gallery have slopes of at most 1.5.
    of_scores = q_tangent @ k.swapaxes(2, 3) + q @ k_tangent.swapaxes(2, 3)
    scale = options.get("softmax_scale")
    of_scores *= 1.5 * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
    exact = [x.astype(np.float64) for x in inputs[:2]]
    kept = attention_weights(*exact, **options)
    weights = attention_weights(*exact, **options | {"dropout_p": 0})
    mean = (weights * of_scores).sum(axis=-1, keepdims=True)
    of_out = (kept * (of_scores + mean)) @ v + kept @ v_tangent
    return of_out if options.get("layout") == "bhsd" else of_out.swapaxes(1, 2), mean[..., 0]


def naive_out_tangent(inputs: Any, direction: Any, options: dict[str, Any]) -> np.ndarray:
    """Return the tangent of out by the naive formula, whose operands have the inputs' dtype.

    The weights and their tangents are rounded to this dtype before they are multiplied by v.
    """
    q, k, v = inputs
    dtype, bhsd = q.dtype, options.get("layout") == "bhsd"
    heads, keys = (k.shape[1], k.shape[2]) if bhsd else (k.shape[2], k.shape[1])
    units = np.broadcast_to(np.eye(keys), (k.shape[0], heads, keys, keys))
    units = units if bhsd else units.swapaxes(1, 2)
    weights, changes = attention_jvp_reference(q, k, units, *direction[:2], **options)
    axes = (0, 1, 2, 3) if bhsd else (0, 2, 1, 3)
    heads_q = q.shape[1] if bhsd else q.shape[2]

    def values(x: np.ndarray) -> np.ndarray:
        return x.transpose(axes).astype(np.float64).repeat(heads_q // heads, 1)

    def operand(x: np.ndarray) -> np.ndarray:
        return x.transpose(axes).astype(dtype).astype(np.float64)

    v_tangent = np.zeros_like(v) if direction[2] is None else direction[2]
    # Padding of masked keys may be NaN.
    v, v_tangent = (np.nan_to_num(values(x)) for x in (v, v_tangent))
    result = operand(changes) @ v + operand(weights) @ v_tangent
    return result.transpose(axes).astype(dtype)


def check_tangents(
    results: Any, inputs: Any, direction: Any, options: dict[str, Any], note: object = ""
) -> None:
    """Assert that out_tangent and lse_tangent of a call obey the error rule.

    `results` are out, out_tangent, lse and lse_tangent as NumPy arrays.
    """
    exact = attention_jvp_reference(*inputs, *direction, **options, return_lse=True)
    zeros = [np.zeros_like(x) if y is None else y for x, y in zip(inputs, direction, strict=True)]
    sizes = tangent_sizes(inputs, zeros, options)
    naive = naive_out_tangent(inputs, direction, options)
    compute = np.dtype(np.float64 if inputs[0].dtype == np.float64 else np.float32)
    # With sinks, the scores of keys may be larger than the log-sum-exp.
    _, lse = attention_reference(*inputs, **options | {"sinks": None}, return_lse=True)
    ulps = 4 * largest_product(inputs, options) * float(np.finfo(compute).eps)
    naives = (naive, exact[3])
    for found, right, size, its_naive in zip(
        results[1::2], exact[1::2], sizes, naives, strict=True
    ):
        # The bound is that of gradients: twice the error of the naive formula, a few ulps of the
        # result, and a few ulps of the sum of the magnitudes of its terms, which may cancel. Scores
        # have errors of a few ulps of their products.
        bound = error_bound(its_naive, right, found.dtype)
        bound += error_bound(size, size, compute, lse=lse) + ulps * size.max(initial=0)
        error = max_error(found, right)
        assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}: {note}"


def packed_call(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any, tuple[Any, ...], Any]:
    """Return q, k and v of packed sequences, their tangents, the lengths, and options.

    Some sequences are empty, and the last rows belong to none.
    """
    batch = int(rng.integers(1, 6))
    heads_kv = int(rng.integers(1, 3))
    heads, dims = heads_kv * int(rng.integers(1, 3)), rng.choice((5, 24, 64), 2)
    lengths = [rng.integers(0, 130, batch) * (rng.random(batch) < 0.8) for _ in range(2)]
    starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths]
    totals = [int(x[-1]) + int(rng.integers(3)) for x in starts]
    shapes = (
        (totals[0], heads, int(dims[0])),
        (totals[1], heads_kv, int(dims[0])),
        (totals[1], heads_kv, int(dims[1])),
    )
    inputs, direction = (
        [rng.standard_normal(shape).astype(dtype) for shape in shapes] for _ in range(2)
    )
    longest = tuple(max(1, int(x.max())) for x in lengths)
    options: dict[str, Any] = {"causal": bool(rng.integers(2))}
    if rng.integers(2):
        options["softcap"] = 2.0
    if rng.integers(2):
        options["window_size"] = (int(rng.integers(20)), int(rng.integers(20)))
    if rng.integers(2):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return inputs, direction, (*starts, *longest), options


def check_packed_tangents(
    results: Any, inputs: Any, direction: Any, lengths: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Assert that each sequence of a varlen call obeys the error rule, and that other rows are 0.

    `results` are out, out_tangent, lse and lse_tangent as NumPy arrays, and `lengths` those of
    `packed_call`.
    """
    starts_q, starts_k, *_ = lengths
    out, out_tangent, lse, lse_tangent = results
    for b in range(len(starts_q) - 1):
        rows = slice(starts_q[b], starts_q[b + 1])
        spans = (rows, *[slice(starts_k[b], starts_k[b + 1])] * 2)
        if rows.start == rows.stop:
            continue
        found = [x[None, rows] for x in (out, out_tangent)]
        found += [x[None, :, rows] for x in (lse, lse_tangent)]
        of_inputs, of_direction = (
            [None if x is None else x[None, span] for x, span in zip(arrays, spans, strict=True)]
            for arrays in (inputs, direction)
        )
        check_tangents(found, of_inputs, of_direction, options, (b, options))
    assert not out_tangent[starts_q[-1] :].any()
    assert not lse_tangent[:, starts_q[-1] :].any()
