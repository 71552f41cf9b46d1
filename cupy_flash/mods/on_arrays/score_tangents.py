"""Tangents of changed scores and of their derivatives, on NumPy or CuPy arrays; see `scores`.

With x the scaled score, y the score after the softcap, f the user's function with its captures c,
and a dot for tangents, the changed score t = f(y, c) + bias has

    t. = slope * x. + along(f) + bias.      slope = dt/dx = dy/dx * df/dy

where along() is the derivative along the tangents of the captures. The slope has the tangent

    slope. = d2y/dx2 * x. * df/dy + dy/dx * (d2f/dy2 * dy/dx * x. + along(df/dy))
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.mods.ir.derivative import (
    Change,
    change_of_slope,
    changes_of_partials,
    derivative,
    tangent_along,
    tangent_array,
)
from cupy_flash.mods.ir.expression import SCORE
from cupy_flash.mods.ir.operations import ONE, ZERO
from cupy_flash.mods.on_arrays.interpret import Interpreter
from cupy_flash.mods.on_arrays.score_derivatives import (
    add_to_capture,
    after_softcap,
    positions_of,
    zeros_of_captures,
)
from cupy_flash.mods.on_arrays.scores import Pairs, Scores, select_pairs


class ModificationTangents(NamedTuple):
    """Tangents of modifications; None for tangents of zeros.

    Attributes
    ----------
    bias
        Array with the axes of `Scores.bias`.
    sinks : array, (heads_q,)
    captures
        Arrays by the names of the captures of the user's score function.
    """

    bias: Any = None
    sinks: Any = None
    captures: Mapping[str, Any] = {}


class MovingScores:
    """Changed scores of some pairs, whose scaled scores and modifications have tangents.

    Parameters
    ----------
    scores, x, pairs, xp
        Arguments as in `Scores.apply`.
    x_tangent
        Tangents of the scaled scores, with the shape of x; None for zeros.
    tangents
        Tangents of the modifications.

    Notes
    -----
    The values of masked pairs are arbitrary, and may be NaN.
    """

    def __init__(
        self,
        scores: Scores,
        x: Any,
        x_tangent: Any,
        tangents: ModificationTangents,
        pairs: Pairs,
        xp: Any,
    ) -> None:
        self._scores, self._mod, self._xp = scores, scores.score_mod, xp
        self._x, self._x_tangent, self._pairs = x, x_tangent, pairs
        self._tangents, self._moving = tangents, tuple(tangents.captures)

    @property
    def _capped(self) -> Any:
        """Scores after the softcap. They are not kept, because memory limits the chunks."""
        return after_softcap(self._scores, self._x, self._xp)

    def _cap_slope(self) -> Any:
        """Return the derivatives of the softcap: 1 - tanh(x / softcap)^2, or 1 without it."""
        one, softcap = self._x.dtype.type(1), self._scores.softcap
        return one if softcap is None else one - (self._capped / one.dtype.type(softcap)) ** 2

    @functools.cached_property
    def _values(self) -> Interpreter:
        assert self._mod is not None
        moving = {tangent_array(name): array for name, array in self._tangents.captures.items()}
        captures, real = {**self._mod.captures, **moving}, self._scores.real
        return Interpreter(self._capped, positions_of(self._pairs), captures, self._xp, real)

    def tangent(self, slope: Any) -> Any:
        """Return the tangents of the scores as a new array like x; None if all are zeros.

        `slope` holds the derivatives of the scores, and is None if they are 1.
        """
        parts = []
        if self._x_tangent is not None:
            parts.append(self._x_tangent if slope is None else self._x_tangent * slope)
        if self._moving:
            assert self._mod is not None
            parts.append(self._values.value(tangent_along(self._mod.graph, self._moving)))
        if (bias := self._tangents.bias) is not None:
            parts.append(select_pairs(bias, self._pairs).astype(self._x.dtype))
        if not parts:
            return None
        result = self._xp.zeros_like(self._x)
        for part in parts:
            result += part
        return result

    def slope_tangent(self) -> Any:
        """Return the tangents of the slopes, broadcastable to x; None if all are zeros."""
        parts = []
        mod_slope, change = ONE, Change(ZERO, ZERO)
        if self._mod is not None:
            mod_slope = derivative(self._mod.graph, SCORE)
            change = change_of_slope(self._mod.graph, self._moving)
        softcap = self._scores.softcap
        if softcap is not None and self._x_tangent is not None:
            # The second derivative of y is -2 y (1 - y^2 / softcap^2) / softcap^2.
            bend = self._capped * self._x.dtype.type(-2 / softcap**2)
            bend *= self._cap_slope()
            bend *= self._x_tangent
            parts.append(bend if mod_slope is ONE else bend * self._values.value(mod_slope))
        of_mod = self._along(change)
        if of_mod is not None:
            parts.append(self._cap_slope() * of_mod)
        return sum(parts[1:], parts[0]) if parts else None

    def capture_gradients(self, seen: Any, dt: Any, dt_tangent: Any) -> dict[str, Any]:
        """Return the tangents of the gradients of the captures, see `capture_gradients`.

        Parameters
        ----------
        seen
            Whether pairs are visible.
        dt, dt_tangent
            Gradients of the scores and their tangents; 0 for masked pairs.
        """
        assert self._mod is not None
        names, result = self._mod.differentiable, zeros_of_captures(self._mod, self._xp)
        for partial, change in changes_of_partials(self._mod.graph, names, self._moving):
            with np.errstate(all="ignore"):
                products = dt_tangent * self._values.value(partial.derivative)
                of_partial = self._along(change)
                if of_partial is not None:
                    products = products + dt * of_partial
                products = self._xp.where(seen, products, 0)
            add_to_capture(result, partial.load, products, self._values, self._xp)
        return result

    def _along(self, change: Change) -> Any:
        """Return the tangents of an expression; None if all are zeros."""
        result = None
        if change.of_score is not ZERO and self._x_tangent is not None:
            result = self._values.value(change.of_score) * (self._cap_slope() * self._x_tangent)
        if change.of_captures is not ZERO:
            of_captures = self._values.value(change.of_captures)
            result = of_captures if result is None else result + of_captures
        return result
