"""Derivatives of changed scores, on NumPy or CuPy arrays; see `scores` for the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.mods.ir.derivative import derivative, partials
from cupy_flash.mods.ir.expression import SCORE, Node
from cupy_flash.mods.ir.operations import ONE
from cupy_flash.mods.modification import ScoreMod
from cupy_flash.mods.on_arrays.interpret import Interpreter
from cupy_flash.mods.on_arrays.scores import Pairs, Scores


def apply_with_slope(
    scores: Scores, x: Any, pair_indices: Pairs, xp: Any = np
) -> tuple[Any, Any | None]:
    """Return the inputs of the softmax, and their derivatives with respect to scaled scores.

    Parameters
    ----------
    scores, x, pair_indices, xp
        Arguments as in `Scores.apply`.

    Returns
    -------
    array
        Scores as `Scores.apply` returns them.
    array or None
        Derivatives, broadcastable to x; None if they are 1 everywhere. Derivatives of masked pairs
        may have any value, including NaN.
    """
    slope = None
    if scores.softcap is not None:
        x, slope = _softcapped(x, scores.softcap, xp)
        scores = scores._replace(softcap=None)
    mod = scores.score_mod
    if mod is not None and derivative(mod.graph, SCORE) is not ONE:
        mod_slope = mod.derivative(x, **positions_of(pair_indices), xp=xp, real=scores.real)
        slope = mod_slope if slope is None else slope * mod_slope
    return scores.apply(x, pair_indices, xp), slope


def after_softcap(scores: Scores, x: Any, xp: Any = np) -> Any:
    """Return scaled scores after the softcap, which are the input of the user's function."""
    return x if scores.softcap is None else _softcapped(x, scores.softcap, xp)[0]


def _softcapped(x: Any, softcap: float, xp: Any) -> tuple[Any, Any]:
    real = x.dtype.type
    part = xp.tanh(x / real(softcap))
    return real(softcap) * part, real(1) - part * part


def positions_of(pair_indices: Pairs) -> dict[str, Any]:
    """Return the positions that a user's function receives, by name."""
    return {
        "b": pair_indices.b,
        "h": pair_indices.h,
        "i": pair_indices.row + pair_indices.q_offset,
        "j": pair_indices.j,
        "q_start": pair_indices.q_start,
        "k_start": pair_indices.k_start,
    }


def capture_gradients(
    score_mod: ScoreMod,
    x: Any,
    pair_indices: Pairs,
    weight: Any,
    xp: Any = np,
    *,
    magnitudes: bool = False,
    real: Any = None,
) -> dict[str, Any]:
    """Return the gradients of the arrays that a modification names as differentiable.

    Parameters
    ----------
    score_mod
        Score modification with captured arrays.
    x : array of float32 or float64
        Scores that are the input of its function, see `after_softcap`.
    pair_indices
        Coordinates of the scores' pairs.
    weight : array, broadcastable to x
        Gradients of the new scores. Masked pairs have 0 and contribute 0, even where x is NaN.
    xp
        Module of the arrays, NumPy or CuPy.
    magnitudes
        Whether to sum absolute values, so that nothing cancels.
    real
        Dtype of the problem's reals, see `Scores.real`.

    Returns
    -------
    dict
        Float64 array of the capture's shape for each name in `ScoreMod.differentiable`: the sum,
        over the pairs that read an element, of weight times the derivative of the new score.
    """
    result = zeros_of_captures(score_mod, xp)
    values = Interpreter(x, positions_of(pair_indices), score_mod.captures, xp, real)
    pairs = np.broadcast_shapes(*(np.shape(part) for part in (x, *pair_indices)))
    for _, load, partial in partials(score_mod.graph, score_mod.differentiable):
        with np.errstate(all="ignore"):
            products = xp.where(weight != 0, weight * values.value(partial), 0)
        if magnitudes:
            products = abs(products)
        add_to_capture(result, load, xp.broadcast_to(products, pairs), values, xp)
    return result


def zeros_of_captures(score_mod: ScoreMod, xp: Any) -> dict[str, Any]:
    """Return float64 zeros with the shapes of the differentiable captures, by name."""
    return {
        name: xp.zeros(score_mod.captures[name].shape, np.float64)
        for name in score_mod.differentiable
    }


def add_to_capture(
    totals: Mapping[str, Any], load: Node, products: Any, values: Interpreter, xp: Any
) -> None:
    """Add a product of each pair to the element of a capture that the pair reads.

    Parameters
    ----------
    totals
        Sums by the names of the captures.
    load
        Node that reads the elements.
    products
        Array of the products, with the shape of all pairs.
    values
        Values of expressions for these pairs.
    xp
        Module of the arrays, NumPy or CuPy.
    """
    total = totals[load.args[0].value]
    indices = [values.value(node, decides=True) for node in load.args[1:]]
    total += _gathered(products, indices, total.shape, xp)


def _gathered(products: Any, indices: list[Any], shape: tuple[int, ...], xp: Any) -> Any:
    """Return an array of `shape`: for each element, the sum of the products at its indices."""
    element = xp.zeros((), np.int64)
    for index, length in zip(indices, shape, strict=True):
        element = element * length + xp.clip(xp.asarray(index), 0, length - 1)
    # Axes along which the element does not change are summed first.
    lengths = (1,) * (products.ndim - element.ndim) + element.shape
    shared = tuple(axis for axis, length in enumerate(lengths) if length == 1)
    sums = products.sum(axis=shared, keepdims=True, dtype=np.float64)
    elements = xp.broadcast_to(element, sums.shape)
    size = math.prod(shape)
    return xp.bincount(elements.ravel(), weights=sums.ravel(), minlength=size).reshape(shape)
