"""What derivatives of changed scores are, on arrays of NumPy or CuPy: beside `scores`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupy_flash.mods.derivative import derivative, partials
from cupy_flash.mods.expression import SCORE
from cupy_flash.mods.interpret import Interpreter
from cupy_flash.mods.modification import ScoreMod
from cupy_flash.mods.operations import ONE
from cupy_flash.mods.scores import Pairs, Scores


def apply_with_slope(scores: Scores, x: Any, at: Pairs, xp: Any = np) -> tuple[Any, Any | None]:
    """The scores that the softmax takes, and how each grows with the scaled score.

    Parameters
    ----------
    scores, x, at, xp
        As of `Scores.apply`.

    Returns
    -------
    array
        As `Scores.apply` gives it.
    array or None
        Derivatives, broadcastable to x; None where they are 1 everywhere. Those of hidden pairs may
        be anything, NaN too.
    """
    slope = None
    if scores.softcap is not None:
        x, slope = _softcapped(x, scores.softcap, xp)
        scores = scores._replace(softcap=None)
    mod = scores.score_mod
    if mod is not None and derivative(mod.graph, SCORE) is not ONE:
        of_mod = mod.derivative(x, **_positions(at), xp=xp, real=scores.real)
        slope = of_mod if slope is None else slope * of_mod
    return scores.apply(x, at, xp), slope


def behind_softcap(scores: Scores, x: Any, xp: Any = np) -> Any:
    """Scaled scores as the user's function is given them."""
    return x if scores.softcap is None else _softcapped(x, scores.softcap, xp)[0]


def _softcapped(x: Any, softcap: float, xp: Any) -> tuple[Any, Any]:
    real = x.dtype.type
    part = xp.tanh(x / real(softcap))
    return real(softcap) * part, real(1) - part * part


def _positions(at: Pairs) -> dict[str, Any]:
    return {
        "b": at.b,
        "h": at.h,
        "i": at.row + at.q_offset,
        "j": at.j,
        "q_start": at.q_start,
        "k_start": at.k_start,
    }


def capture_gradients(
    score_mod: ScoreMod,
    x: Any,
    at: Pairs,
    weight: Any,
    xp: Any = np,
    *,
    of_sizes: bool = False,
    real: Any = None,
) -> dict[str, Any]:
    """Gradients of the arrays that a modification names as differentiable.

    Parameters
    ----------
    score_mod
        Whose.
    x : array of float32 or float64
        Scores as its function is given them, see `behind_softcap`.
    at
        Their pairs.
    weight : array, broadcastable to x
        Gradients of the new scores; 0 where hidden, which leaves no trace of what is there.
    xp
        NumPy or CuPy.
    of_sizes
        Whether absolute values are summed up, so that nothing cancels.
    real
        Dtype of the problem's reals, see `Scores.real`.

    Returns
    -------
    dict
        Of each name in `ScoreMod.differentiable` a float64 array of the capture's shape: the sum,
        over the pairs that read an element, of weight times the derivative of the new score.
    """
    found = {
        name: xp.zeros(score_mod.captures[name].shape, np.float64)
        for name in score_mod.differentiable
    }
    values = Interpreter(x, _positions(at), score_mod.captures, xp, real)
    pairs = np.broadcast_shapes(*(np.shape(part) for part in (x, *at)))
    for _, load, partial in partials(score_mod.graph, score_mod.differentiable):
        with np.errstate(all="ignore"):
            products = xp.where(weight != 0, weight * values.value(partial), 0)
        if of_sizes:
            products = abs(products)
        name, indices = (
            load.args[0].value,
            [values.value(node, decides=True) for node in load.args[1:]],
        )
        found[name] += _gathered(xp.broadcast_to(products, pairs), indices, found[name].shape, xp)
    return found


def _gathered(products: Any, indices: list[Any], shape: tuple[int, ...], xp: Any) -> Any:
    """Sums of what belongs to each element of an array."""
    element = xp.zeros((), np.int64)
    for index, length in zip(indices, shape, strict=True):
        element = element * length + xp.clip(xp.asarray(index), 0, length - 1)
    # Most elements serve whole axes, which are summed up at once.
    lengths = (1,) * (products.ndim - element.ndim) + element.shape
    shared = tuple(axis for axis, length in enumerate(lengths) if length == 1)
    sums = products.sum(axis=shared, keepdims=True, dtype=np.float64)
    elements = xp.broadcast_to(element, sums.shape)
    size = math.prod(shape)
    return xp.bincount(elements.ravel(), weights=sums.ravel(), minlength=size).reshape(shape)
